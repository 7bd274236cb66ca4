"""The applier's writes on a running API server: others, refusals, crashes, and what is left."""

import asyncio
import signal

import msgspec
import pytest

from schema import events, names
from services.kit.kube import JSON_PATCH
from tests.system.applier_rig import (
    EVENT,
    FORMS,
    LB,
    POOL,
    SERVICE,
    SLICE,
    backend,
    balancer,
    gone,
    now,
    pool,
    stage,
    ticket,
)
from tests.system.watcher_rig import CRD
from tests.waiting import eventually


@pytest.mark.parametrize("victim", [SERVICE, SLICE], ids=["service", "slice"])
async def test_report_31_what_was_deleted_by_hand_is_made_again(
    nats_url, database_url, tmp_path, victim
):
    """The slice or the Service comes back with label and owner, and the load balancer is Ready."""
    async with stage(nats_url, database_url, tmp_path) as s:
        owner = await s.vm("web", "192.0.2.10")
        before = await s.get(victim, "web")
        await s.kube.delete(victim.path("default", "web"))

        async def back():
            found = await s.get(victim, "web")
            assert found is not None
            assert found["metadata"]["uid"] != before["metadata"]["uid"]
            return found

        after = await eventually(back, 10)
        await s.still()
        assert after["metadata"]["labels"] == before["metadata"]["labels"]
        assert after["metadata"]["ownerReferences"] == before["metadata"]["ownerReferences"]
        await s.settles(owner, "Ready")
        service = await s.get(SERVICE, "web")
        assert service["status"]["loadBalancer"]["ingress"][0]["ip"] == "192.0.2.10"


async def test_report_31_edits_by_hand_are_undone_in_one_write_each(
    nats_url, database_url, tmp_path
):
    """Endpoints, labels, owner, a port that was added, a selector: one write, and as it was."""
    async with stage(nats_url, database_url, tmp_path) as s:
        await s.vm("web", "192.0.2.10")
        extra = {"name": "ssh", "port": 22, "protocol": "TCP", "targetPort": 22}
        edits = [
            (SLICE, [{"op": "replace", "path": "/endpoints/0/conditions/ready", "value": False}]),
            (SLICE, [{"op": "remove", "path": "/metadata/labels"}]),
            (SERVICE, [{"op": "remove", "path": "/metadata/ownerReferences"}]),
            (SERVICE, [{"op": "add", "path": "/spec/ports/-", "value": extra}]),
            (SERVICE, [{"op": "add", "path": "/spec/selector", "value": {"app": "x"}}]),
        ]
        for resource, patch in edits:
            before = _stable(await s.get(resource, "web"))
            await s.still(0.3)
            s.forget()
            await s.kube.patch(resource.path("default", "web"), patch, JSON_PATCH)

            async def restored(resource=resource, before=before):
                assert _stable(await s.get(resource, "web")) == before
                return True

            await eventually(restored, 10, message=str(patch))
            await s.still(0.4)
            assert s.writes() == {f"patch {resource.plural}": 2}, "theirs and ours"


def _stable(obj):
    meta = {k: obj["metadata"].get(k) for k in ("name", "labels", "ownerReferences")}
    return meta, obj.get("spec"), obj.get("endpoints"), obj.get("ports")


async def test_report_62_foreign_ingress_fields_cost_no_write(nats_url, database_url, tmp_path):
    """Another controller adds ports to our entry twenty times: nothing is written back."""
    async with stage(nats_url, database_url, tmp_path) as s:
        await s.vm("web", "192.0.2.10")
        await s.still()
        s.forget()
        for port in range(1, 21):
            entry = {"ip": "192.0.2.10", "ports": [{"port": port, "protocol": "UDP"}]}
            status = {"status": {"loadBalancer": {"ingress": [entry]}}}
            await s.kube.patch(SERVICE.path("default", "web"), status, subresource="status")
        await s.still()
        assert s.writes() == {"patch services/status": 20}, "theirs"


@pytest.mark.parametrize("resource", [SERVICE, SLICE], ids=["service", "slice"])
async def test_foreign_object_of_our_name_is_not_touched(
    nats_url, database_url, tmp_path, resource
):
    """NameConflict says so, resourceVersion stays; when it goes, the load balancer comes up."""
    async with stage(nats_url, database_url, tmp_path) as s:
        body = {"metadata": {"name": "web", "namespace": "default"}}
        if resource is SERVICE:
            body |= {"apiVersion": "v1", "kind": "Service"}
            body["spec"] = {"ports": [{"name": "http", "port": 80}], "type": "ClusterIP"}
        else:
            body |= {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice"}
            body |= {"addressType": "IPv4", "endpoints": [], "ports": []}
        await s.create(resource, body)
        before = await s.get(resource, "web")
        owner = await s.balancer("web")
        await s.granted(owner, "192.0.2.10")
        await s.resolved(owner, backend("vm1", "10.52.1.7"))
        told = await s.settles(owner, "NameConflict")
        await s.still()
        assert "default/web" in told["message"]
        assert await s.get(resource, "web") == before

        await s.kube.delete(resource.path("default", "web"))
        await s.settles(owner, "Ready")


async def test_deleted_load_balancer_leaves_nothing(nats_url, database_url, tmp_path):
    """No finalizer of ours holds it; Service and slice go by their owner; a new one of the same
    name starts afresh [report-63]."""
    async with stage(nats_url, database_url, tmp_path) as s:
        owner = await s.vm("web", "192.0.2.10")
        assert "finalizers" not in (await s.get(LB, "web"))["metadata"]
        lease = "of the old one"
        await s.kube.delete(LB.path("default", "web"))
        fresh = await s.create(LB, balancer("web"))
        await s.released(owner, lease, "192.0.2.10")
        await s.verdict(owner, backend("vm1", "10.52.1.7"), False)
        for resource in (SERVICE, SLICE):
            await gone(s, resource, "web")
        await s.still()
        assert await s.status(fresh) == {}
        await s.granted(fresh, "192.0.2.11")
        await s.resolved(fresh)
        told = await s.settles(fresh, "NoBackendMatched")
        assert told["status"] == "False"
        assert (await s.status(fresh))["address"] == "192.0.2.11"


@pytest.mark.parametrize("status", [422, 429, 503])
async def test_refusals_are_outlived(nats_url, database_url, tmp_path, status):
    """429 and 503 pass; a 422 is told on the load balancer and on the bus, and not repeated."""
    async with stage(nats_url, database_url, tmp_path) as s:
        owner = await s.balancer("web")
        times = 1 if status == 422 else 3
        s.api.faults.fail(
            verb="patch", path="/services/web", status=status, retry_after=1, times=times
        )
        await s.granted(owner, "192.0.2.10")
        await s.resolved(owner, backend("vm1", "10.52.1.7"))
        if status != 422:
            await s.settles(owner, "Ready")
            return
        told = await s.settles(owner, "Invalid")
        assert told["message"].startswith("fail to create service, error: ")
        await s.still()
        s.forget()
        await asyncio.sleep(1.5)
        assert s.writes() == {}
        failed = [e for e in await s.outcomes(owner) if e.outcome == "failed"]
        assert [(e.target, e.reason) for e in failed] == [("Service", "Invalid")]


async def test_one_bad_load_balancer_holds_up_no_other(nats_url, database_url, tmp_path):
    """While the API server refuses everything about one object, a hundred others come up."""
    async with stage(nats_url, database_url, tmp_path, workers=4) as s:
        s.api.faults.fail(verb="patch", path="/services/bad", status=503, times=100_000)
        bad = await s.balancer("bad")
        await s.granted(bad, "192.0.2.1")
        await s.resolved(bad)
        owners = [await s.balancer(f"lb{i}") for i in range(20)]
        for i, owner in enumerate(owners):
            await s.granted(owner, f"192.0.2.{i + 10}")
            await s.resolved(owner, backend(f"vm{i}", f"10.52.1.{i}"))
        for owner in owners:
            await s.settles(owner, "Ready")


async def test_conflicts_are_no_news(nats_url, database_url, tmp_path):
    """409s while somebody else is busy with the objects: never Not Ready, and right in the end."""
    async with stage(nats_url, database_url, tmp_path) as s:
        owner = await s.vm("web", "192.0.2.10")
        for i in range(15):
            note = {"metadata": {"annotations": {"example.org/n": str(i)}}}
            await s.kube.patch(LB.path("default", "web"), note)
            await s.kube.patch(SERVICE.path("default", "web"), note)
            await s.resolved(owner, backend("vm1", "10.52.1.7"), backend(f"vm{i}x", f"10.52.2.{i}"))
        await s.still()
        status = await s.status(owner)
        assert status["backendServers"] == ["10.52.1.7", "10.52.2.14"]
        told = [e for e in await s.outcomes(owner) if e.ready is not None]
        first = next(i for i, e in enumerate(told) if e.ready)
        assert all(e.ready for e in told[first:])


async def test_ticket_is_one_write_and_its_release_another(nats_url, database_url, tmp_path):
    """A Service of class lbledger.io/pool; retyped, it shows nothing of ours [report-11]."""
    async with stage(nats_url, database_url, tmp_path) as s:
        owner = await s.create(SERVICE, ticket("svc"))
        s.forget()
        lease = await s.granted(owner, "192.0.2.3")
        await s.settles(owner, "Ready", "lbledger.io/Ready")
        await s.still()
        assert s.writes() == {"patch services/status": 1}
        assert (await s.status(owner))["loadBalancer"]["ingress"][0]["ip"] == "192.0.2.3"

        patch = {"spec": {"type": "ClusterIP", "loadBalancerClass": None}}
        await s.kube.patch(SERVICE.path("default", "svc"), patch)
        await s.released(owner, lease, "192.0.2.3")

        async def bare():
            status = await s.status(owner)
            assert not status.get("conditions")
            assert not status["loadBalancer"]
            return True

        await eventually(bare, 10)
        other = await s.create(SERVICE, ticket("other"))
        await s.granted(other, "192.0.2.3")
        patch = {"spec": {"type": "LoadBalancer", "loadBalancerClass": names.POOL_CLASS}}
        await s.kube.patch(SERVICE.path("default", "svc"), patch)
        await s.refused(owner, "PoolExhausted", "no free address in pool p1")
        await s.settles(owner, "PoolExhausted", "lbledger.io/Ready")
        assert not (await s.status(owner))["loadBalancer"]


async def test_provider_service_has_finalizer_and_ingress_until_torn_down(
    nats_url, database_url, tmp_path
):
    """Class lbledger.io/nrp: the finalizer holds the Service until the provider lets go."""
    async with stage(nats_url, database_url, tmp_path) as s:
        owner = await s.create(SERVICE, ticket("svc", names.NRP_CLASS))

        async def provider(**fields):
            await s.say(events.ProviderStateChanged(at=now(), owner=owner, **fields))

        await provider(finalizer=True, reason="Pending")
        await s.settles(owner, "Pending", "lbledger.io/ProviderSynced")
        assert (await s.get(SERVICE, "svc"))["metadata"]["finalizers"] == [names.NRP_FINALIZER]
        await provider(addresses=["20.0.0.4"], in_step=True, reason="Registered")
        await s.settles(owner, "Ready", "lbledger.io/Ready")
        assert (await s.status(owner))["loadBalancer"]["ingress"][0]["ip"] == "20.0.0.4"

        await s.kube.delete(SERVICE.path("default", "svc"))
        await s.still()
        assert await s.get(SERVICE, "svc") is not None
        await provider(finalizer=False, reason="Gone")
        await gone(s, SERVICE, "svc")


@pytest.mark.parametrize("form", ["ours", "harvester"])
async def test_report_60_pool_status_is_coalesced_and_restored(
    nats_url, database_url, tmp_path, form
):
    """Counters, maps, Ready; a burst is two writes; a wiped status comes back as it was."""
    async with stage(nats_url, database_url, tmp_path, form=form) as s:
        p1 = await s.create(POOL, pool("p1"))
        s.forget()
        for i in range(20):
            owner = await s.create(SERVICE, ticket(f"s{i}"))
            await s.granted(owner, f"192.0.2.{i + 10}")
            await s.accounted(p1, 20, 19 - i, last_allocated=f"192.0.2.{i + 10}")

        async def counted():
            assert (await s.status(p1)).get("available") == 0
            return True

        await eventually(counted, 10)
        place = "ippools/status" if form == "ours" else "ippools"
        assert s.writes()[f"patch {place}"] <= 3
        before = await s.status(p1)
        assert len(before["allocated"]) == 20
        assert before["lastAllocated"] == "192.0.2.29"

        body = {**await s.get(POOL, "p1"), "status": {"total": 0, "available": 0}}
        body["status"]["lastAllocated"] = ""
        path = POOL.path("", "p1")
        await s.kube.replace(path, body, subresource="status" if form == "ours" else "")

        async def restored():
            assert await s.status(p1) == before
            return True

        await eventually(restored, 10)


async def test_kubernetes_events_tell_each_reason_once(nats_url, database_url, tmp_path):
    """One Event per new reason on the object, none while nothing changes, none after a restart."""
    async with stage(nats_url, database_url, tmp_path) as s:
        owner = await s.balancer("web", workloadType="cluster")
        await s.refused(owner, "PoolExhausted", "no free address in pool p1")
        await s.settles(owner, "PoolExhausted")
        await s.refused(owner, "PoolExhausted", "no free address in pool p1")
        await s.still()
        await s.stop()
        s.start()
        await s.granted(owner, "192.0.2.10")
        await s.settles(owner, "Ready")

        async def told():
            body = await s.get(EVENT, "", "default")
            found = [e for e in body["items"] if e["regarding"]["uid"] == owner.uid]
            assert len(found) == 2, found
            return {e["reason"]: e for e in found}

        by_reason = await eventually(told, 10)
        await s.still()
        assert by_reason == await told()
        assert by_reason["PoolExhausted"]["type"] == "Warning"
        assert by_reason["PoolExhausted"]["note"] == "no free address in pool p1"
        assert by_reason["Ready"]["type"] == "Normal"


async def test_large_slices_are_split_on_the_server(nats_url, database_url, tmp_path):
    """1,500 endpoints are two slices; fewer again, the second is deleted."""
    async with stage(nats_url, database_url, tmp_path) as s:
        owner = await s.balancer("web")
        many = [backend(f"vm{i}", f"10.52.{i // 250}.{i % 250}") for i in range(1500)]
        await s.granted(owner, "192.0.2.10")
        await s.resolved(owner, *many)
        await s.settles(owner, "Ready")
        assert len((await s.get(SLICE, "web"))["endpoints"]) == 1000
        assert len((await s.get(SLICE, "web.2"))["endpoints"]) == 500
        await s.resolved(owner, *many[:2])
        await gone(s, SLICE, "web.2")
        assert len((await s.get(SLICE, "web"))["endpoints"]) == 2


async def test_restart_writes_nothing_and_goes_on(nats_url, database_url, tmp_path):
    """A new process compares and is content; what came while it was down is written once."""
    async with stage(nats_url, database_url, tmp_path) as s:
        owner = await s.vm("web", "192.0.2.10")
        await s.still()
        await s.stop()
        s.forget()
        s.start()
        await asyncio.sleep(1.0)
        assert s.writes() == {}
        await s.stop()
        await s.resolved(owner)
        s.forget()
        s.start()
        await s.settles(owner, "NoBackendMatched")
        await s.still()
        assert s.writes() == {"patch endpointslices": 1, "patch loadbalancers/status": 1}


@pytest.mark.parametrize("target", ["services/web", "endpointslices/web", "loadbalancers/web"])
async def test_kill_between_write_and_commit_has_no_double_effect(
    nats_url, database_url, tmp_path, target
):
    """SIGKILL while the answer to a write is on its way: the successor sees it done. Generations
    and versions show that nothing was written twice with another result."""
    async with stage(nats_url, database_url, tmp_path, started=False) as s:
        owner = await s.balancer("web")
        s.api.faults.fail(
            verb="patch", path=f"/{target}", drop="after", latency=1.0, status=500, times=1
        )
        process = s.spawn()
        try:
            await s.granted(owner, "192.0.2.10")
            await s.resolved(owner, backend("vm1", "10.52.1.7"))
            await eventually(lambda: _tried(s, target), 30)
            process.send_signal(signal.SIGKILL)
        finally:
            process.kill()
            process.wait()
        s.start()
        await s.settles(owner, "Ready")
        await s.still()
        service, found = await s.get(SERVICE, "web"), await s.get(SLICE, "web")
        assert found["metadata"]["generation"] == 1
        assert len(service["spec"]["ports"]) == 1
        assert service["status"]["loadBalancer"]["ingress"] == [
            {"ip": "192.0.2.10", "ipMode": "VIP"}
        ]
        s.forget()
        await s.still()
        assert s.writes() == {}


def _tried(s, target):
    plural = target.partition("/")[0]
    return any(
        verb == "patch" and place.partition("/")[0] == plural for verb, place in s.api.faults.counts
    )


async def test_kills_in_the_middle_of_many_load_balancers(nats_url, database_url, tmp_path):
    """Whenever it dies, the next one goes on; at the end every object is as decided."""
    async with stage(nats_url, database_url, tmp_path, started=False) as s:
        owners = []
        for i in range(40):
            owner = await s.balancer(f"lb{i}")
            owners.append(owner)
            await s.granted(owner, f"192.0.2.{i + 10}")
            await s.resolved(owner, backend(f"vm{i}", f"10.52.1.{i}"))
        for round_ in range(3):
            process = s.spawn()
            before = sum(s.writes().values())
            try:
                await eventually(lambda before=before: sum(s.writes().values()) > before + 20, 30)
            finally:
                process.kill()
                process.wait()
            for owner in owners[round_::10]:
                await s.resolved(owner, backend("late", f"10.53.0.{round_}"))
        s.start()
        for i, owner in enumerate(owners):
            await s.settles(owner, "Ready")
            assert (await s.status(owner))["address"] == f"192.0.2.{i + 10}"
        for round_ in range(3):
            for owner in owners[round_::10]:
                found = await s.get(SLICE, owner.name)
                assert [e["addresses"] for e in found["endpoints"]] == [[f"10.53.0.{round_}"]]


@pytest.mark.parametrize(("before", "after"), [("harvester", "ours"), ("ours", "harvester")])
async def test_crds_may_be_replaced_while_it_runs(nats_url, database_url, tmp_path, before, after):
    """With or without a status subresource, and then the other way round: no restart needed."""
    async with stage(nats_url, database_url, tmp_path, form=before) as s:
        owner = await s.vm("web", "192.0.2.10")
        for definition in FORMS[after]():
            path = CRD.path("", definition["metadata"]["name"])
            current = msgspec.json.decode(await s.kube.get(path))
            await s.kube.replace(path, {**current, "spec": definition["spec"]})
        await s.resolved(owner)
        await s.settles(owner, "NoBackendMatched")
        await s.resolved(owner, backend("vm1", "10.52.1.7"))
        await s.settles(owner, "Ready")
        await s.still()
        s.forget()
        await s.still()
        assert s.writes() == {}
