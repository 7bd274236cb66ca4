"""What other services ask the applier to do once: on a running API server."""

from schema import events, names, objects
from tests.system.applier_rig import (
    EVENT,
    LB,
    POOL,
    SLICE,
    backend,
    balancer,
    gone,
    now,
    pool,
    stage,
)
from tests.system.watcher_rig import CONFIGMAP, POD
from tests.waiting import eventually

RELEASE = "loadbalancer.harvesterhci.io/manuallyReleaseIP"


async def told(stage, uid, namespace="default"):
    body = await stage.get(EVENT, "", namespace)
    return [e["reason"] for e in body["items"] if e["regarding"].get("uid") == uid]


async def test_condemned_load_balancer_goes_with_everything_of_it(nats_url, database_url, tmp_path):
    """One DELETE by uid; the garbage collector takes Service and slice; an Event says why."""
    async with stage(nats_url, database_url, tmp_path) as s:
        owner = await s.vm("web", "192.0.2.10")
        condemned = events.OwnerCondemned(
            at=now(), owner=owner, reason="GuestClusterRemoved", message="cluster c1 is gone"
        )
        await s.say(condemned)
        await gone(s, LB, "web")
        await gone(s, SLICE, "web")
        assert "GuestClusterRemoved" in await told(s, owner.uid)

        fresh = await s.create(LB, balancer("web"))
        await s.say(condemned)
        await s.granted(fresh, "192.0.2.11")
        await s.resolved(fresh, backend("vm1", "10.52.1.7"))
        await s.settles(fresh, "Ready")


async def test_answered_release_request_loses_its_annotation(nats_url, database_url, tmp_path):
    """The pool keeps its other annotations and gets its status as before."""
    async with stage(nats_url, database_url, tmp_path) as s:
        request = "192.0.2.9: default/a"
        body = pool("p1")
        body["metadata"]["annotations"] = {RELEASE: request, "example.org/x": "y"}
        p1 = await s.create(POOL, body)
        await s.accounted(p1, 10, 10)
        await s.say(
            events.ReleaseAnswered(
                at=now(), pool="p1", uid=p1.uid, request=request, released=True, message="done"
            )
        )

        async def answered():
            found = await s.get(POOL, "p1")
            assert found["metadata"]["annotations"] == {"example.org/x": "y"}
            assert found.get("status", {}).get("total") == 10
            assert "AddressReleased" in await told(s, p1.uid)
            return True

        await eventually(answered, 10)


async def test_pools_of_a_kube_vip_config_map_are_imported_once(nats_url, database_url, tmp_path):
    """Missing pools are created with their history, then the ConfigMap is marked."""
    async with stage(nats_url, database_url, tmp_path) as s:
        config = await s.create(
            CONFIGMAP,
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "kubevip", "namespace": "kube-system"},
                "data": {"cidr-ns1": "192.0.2.0/24"},
            },
        )
        spec = objects.IPPoolSpec(ranges=[objects.PoolRange(subnet="192.0.2.0/24")])
        await s.say(
            events.PoolsImported(
                at=now(),
                namespace="kube-system",
                name="kubevip",
                uid=config.uid,
                pools=[events.ImportedPool(name="ns1", spec=spec, history={"192.0.2.9": "ns1/w"})],
                problems=["range-x: '9' is no range"],
            )
        )

        async def marked():
            found = await s.get(CONFIGMAP, "kubevip", "kube-system")
            notes = found["metadata"].get("annotations")
            assert notes == {"loadbalancer.harvesterhci.io/after-conversion": "true"}
            assert await told(s, config.uid, "kube-system") == ["InvalidPool"]
            return True

        await eventually(marked, 10)
        made = await s.get(POOL, "ns1")
        assert made["spec"]["ranges"] == [{"subnet": "192.0.2.0/24"}]
        assert made["metadata"]["annotations"] == {"lbledger.io/history": '{"192.0.2.9":"ns1/w"}'}


async def test_egress_pod_is_held_until_the_provider_lets_go(nats_url, database_url, tmp_path):
    """Finalizer on, deletion waits, finalizer off, gone."""
    async with stage(nats_url, database_url, tmp_path) as s:
        owner = await s.create(
            POD,
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": "p1",
                    "namespace": "default",
                    "labels": {names.EGRESS_LABEL: "gw"},
                },
                "spec": {"containers": [{"name": "c", "image": "x"}]},
            },
        )
        await s.say(events.ProviderStateChanged(at=now(), owner=owner, finalizer=True))

        async def held():
            found = await s.get(POD, "p1")
            assert found["metadata"].get("finalizers") == [names.NRP_FINALIZER]
            return True

        await eventually(held, 10)
        await s.kube.delete(POD.path("default", "p1"))
        await s.still()
        await held()
        await s.say(events.ProviderStateChanged(at=now(), owner=owner, finalizer=False))
        await gone(s, POD, "p1")
