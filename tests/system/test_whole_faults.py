"""What happens to the whole running system when a part of it goes away in the middle of work."""

import asyncio
import signal
import time

import pytest

from sandbox.stack import SERVICES
from tests.system.whole import DUMMY, Recorder, Refused, condition, gather, provided
from tests.waiting import eventually

NO_BACKEND = "no running backend servers"
RECONNECT_S = 60.0


async def populate(space):
    """Three LBs with two checked backends each, and a Service of each class."""
    await space.pool()
    found = {}
    for name in ("a", "b", "c"):
        found[name] = [await space.vm(name, answers=True) for _ in range(2)]
        await space.balancer(name, healthCheck=space.check())
    await space.service("shop")
    await space.service("checkout", "lbledger.io/nrp")
    await space.pods("checkout", 1, 2)
    for name, (one, two) in found.items():
        await space.becomes(name, "True")
        await space.slice_is(name, {one: True, two: True})
    await space.has_ingress("shop")
    await space.provider_has("checkout", 1, 2)
    await space.has_ingress("checkout")
    await space.quiet()
    return found


async def degraded(space, *services):
    """Each of these says that it is not ready, and why."""

    async def told():
        for name in services:
            ready, why = await space.api.readiness(name)
            assert not ready, f"{name} says that it is ready"
            assert why
        return True

    await eventually(told, 30, message=f"{services} say that they are not ready")


def lost_endpoints(seen, allowed=()):
    """Backends that a slice showed as not ready, or not any more."""
    lost = set()
    for found in seen.of("EndpointSlice"):
        for endpoint in found.get("endpoints") or []:
            if not endpoint["conditions"]["ready"]:
                lost.add(endpoint["addresses"][0])
    return lost - set(allowed)


@pytest.mark.parametrize(
    "which", ["postgres", "nats"], ids=["report-21-postgres", "report-21-nats"]
)
async def test_an_outage_of_our_servers_changes_nothing_outside(whole, space, which):
    """No endpoint goes, the provider keeps everything, readiness tells; what failed and what came
    meanwhile is acted on afterwards."""
    backends = await populate(space)
    server = {"postgres": whole.postgres, "nats": whole.nats}[which]
    requests = (await space.api.provider("GET", "requests?limit=0"))["counts"]
    async with Recorder(space.api, space.name, "EndpointSlice") as seen:
        await server.kill()
        # The watcher has no need of Postgres.
        services = [s for s in SERVICES if which == "nats" or s != "watcher"]
        await degraded(space, *services)
        await space.refuse(backends["a"][0])
        await space.balancer("late")
        await asyncio.sleep(1.0)  # many periods of checks
        assert lost_endpoints(seen) == set()

        await server.start()
        await whole.ready(RECONNECT_S)
        await space.slice_is("a", {backends["a"][0]: False, backends["a"][1]: True})
        await space.becomes("late", "False", NO_BACKEND)
        await space.quiet()

    assert lost_endpoints(seen, backends["a"][:1]) == set()
    after = await space.api.provider("GET", "requests?limit=0")
    changed = {op for op, n in after["counts"].items() if n != requests.get(op, 0)}
    assert not [op for op in changed if not op.startswith(("get", "list"))], changed
    await space.provider_has("checkout", 1, 2)


@pytest.mark.parametrize("wipe", [False, True], ids=["report-39-a", "report-39-b"])
async def test_nats_comes_back(whole, space, wipe):
    """With its store, or with an empty one: no restart is needed, what was made meanwhile is
    served, addresses and statuses stay, and what the log lost is said again."""
    backends = await populate(space)
    before = {name: await space.status(name) for name in backends}
    held = await space.leases()
    async with Recorder(space.api, space.name, "EndpointSlice", "LoadBalancer", "Service") as seen:
        await whole.nats.kill()
        await space.balancer("x")
        await space.delete("c")
        if wipe:
            await whole.nats.wipe()
        await whole.nats.start()
        await whole.ready(RECONNECT_S)
        await space.becomes("x", "False", NO_BACKEND)
        await space.goes("Service", "c")

        async def released():
            found = await space.leases()
            assert "c" not in found
            return {name: found[name] for name in held if name != "c"}

        assert await eventually(released) == {k: v for k, v in held.items() if k != "c"}
        await space.quiet(1.0)

    assert lost_endpoints(seen) == set()
    for name in ("a", "b"):
        assert await space.status(name) == before[name]
    for found in seen.of("Service", "shop"):
        assert found["status"]["loadBalancer"]["ingress"] == [{"ip": held["shop"], "ipMode": "VIP"}]


@pytest.mark.parametrize("gone", ["deleted", "moved"])
async def test_a_release_that_the_log_lost_leaves_nothing_shown(whole, space, gone):
    """[report-39] The applier was away when an address was given back, and the log that said so is
    lost: the pool's status does not go on listing it, and another owner may have it."""
    one = await space.pool(10, 10, name="p1")
    two = await space.pool(30, 30, name="p2")
    await space.balancer("web", ipPool=one)
    await space.becomes("web", "False", NO_BACKEND)
    await space.pool_is(one, available=0)
    await whole.kill("applier")
    if gone == "deleted":
        await space.delete("web")
    else:
        await space.edit("web", ipPool=two)
        # Nobody shows the new address, so the old one would be kept for a while: say it is seen.
        patch = {"status": {"address": space.pooled(30)}}
        await eventually(lambda: held(space, "web", space.pooled(30)))
        await space.api.merge("LoadBalancer", "web", space.name, patch, "status")

    async def released():
        rows = await whole.rows(
            "select name from allocator.lease where host(address) = $1 and upper_inf(during)",
            space.pooled(10),
        )
        return not rows

    await eventually(released, 20)
    await whole.nats.kill()
    await whole.nats.wipe()
    await whole.nats.start()
    await whole.respawn("applier")
    await whole.ready(RECONNECT_S)

    await space.pool_is(one, available=1, allocated={})
    await space.balancer("next", ipPool=one)
    await space.becomes("next", "False", NO_BACKEND)
    await space.pool_is(one, available=0, allocated={space.pooled(10): f"{space.name}/next"})


async def held(space, name, address):
    rows = await space.whole.rows(
        "select name from allocator.lease where host(address) = $1 and upper_inf(during)", address
    )
    return [row["name"] for row in rows] == [name]


async def test_the_api_server_restarts_with_its_objects(whole, space):
    """Watches resume or list anew; what changes afterwards is seen; nothing is lost or repeated."""
    backends = await populate(space)
    held = await space.leases()

    await whole.kill("kube")
    await degraded(space, "watcher")
    await whole.stack.restart_kube()
    await whole.ready(RECONNECT_S)

    await space.stop_vm("vm1")
    await space.slice_is("a", {backends["a"][1]: True})
    await space.balancer("late")
    await space.becomes("late", "False", NO_BACKEND)
    found = await space.leases()
    assert {name: found[name] for name in held} == held


@pytest.mark.parametrize("how", ["clean", "midline", "error", "hang"])
async def test_report_35_a_watch_that_breaks_or_falls_silent(space, how):
    """[report-35] However the watches end, or whether they only say nothing any more, the next
    change is seen, and nothing that is known changes."""
    await space.pool()
    vm = await space.vm("web", name="vm")
    await space.balancer("web")
    await space.becomes("web", "True")
    await space.quiet()

    await space.api.sandbox("POST", "watches/cut", {"how": how})
    if how == "error":
        await space.api.sandbox("POST", "compact")
    await space.stop_vm("vm")
    await space.becomes("web", "False", NO_BACKEND)
    await space.vm("web", name="vm", address=vm)
    await space.becomes("web", "True")


async def test_the_api_server_throttles_and_fails(space):
    """429 with Retry-After, 500, a lost answer and a conflict on order: everything is written in
    the end, once."""
    await space.pool()
    for fault in (
        {"verb": "patch", "times": 3, "status": 429, "retry_after": 1},
        {"verb": "patch", "path": "/endpointslices", "times": 2, "status": 500},
        {"verb": "patch", "path": "/services", "times": 2, "drop": "after"},
        {"verb": "patch", "path": "/status", "times": 2, "status": 409, "reason": "Conflict"},
    ):
        await space.api.sandbox("POST", "faults", fault)

    vm = await space.vm("web")
    with pytest.raises(Refused):  # it is really on
        await space.api.merge("VirtualMachineInstance", "vm1", space.name, {})
    await space.balancer("web")
    await space.becomes("web", "True")

    await space.slice_is("web", {vm: True})
    assert await space.ingress("web") == [(await space.leases("web"))["web"]]


async def test_report_38_deleted_and_made_again_while_nobody_watched(whole, space):
    """[report-38] The old uid's lease ends, the new one has its own; what vanished is released."""
    await space.pool()
    await space.balancer("web", backendServerSelector=None)
    await space.balancer("gone")
    await space.service("shop")
    await space.becomes("gone", "False", NO_BACKEND)
    await space.becomes("web", "False", NO_BACKEND)
    await space.has_ingress("shop")

    await whole.kill("watcher")
    await space.delete("gone")
    await space.delete("web")
    await space.delete("shop", "Service")
    vm = await space.vm("web")
    made = await space.balancer("web")
    await whole.respawn("watcher")
    await whole.ready(RECONNECT_S)

    await space.becomes("web", "True")
    await space.slice_is("web", {vm: True})

    async def exact():
        rows = await whole.rows(
            "select name, uid from allocator.lease where namespace = $1 and upper_inf(during)",
            space.name,
        )
        assert [(r["name"], r["uid"]) for r in rows] == [("web", made["metadata"]["uid"])]
        return True

    await eventually(exact, 20)


async def test_a_slice_that_nobody_ever_saw_does_not_block_its_successor(whole, space):
    """The applier wrote a slice while nobody watched; before anybody did, its load balancer was
    made anew and the slice collected. The new one gets its own, without a restart."""
    await space.pool()
    await whole.kill("prober")
    await space.balancer("web")
    await eventually(lambda: held(space, "web", space.pooled(10)), 20)
    await space.quiet()
    await whole.kill("watcher")
    await whole.respawn("prober")

    async def written():
        return await space.api.get("EndpointSlice", "web", space.name)

    await eventually(written, RECONNECT_S)
    await space.delete("web")
    await space.goes("EndpointSlice", "web")
    await space.goes("Service", "web")
    await space.vm("web", name="vm")
    made = await space.balancer("web")
    await whole.respawn("watcher")
    await whole.ready(RECONNECT_S)

    await space.becomes("web", "True")
    found = await space.api.get("EndpointSlice", "web", space.name)
    assert [ref["uid"] for ref in found["metadata"]["ownerReferences"]] == [made["metadata"]["uid"]]


async def test_a_successor_is_never_given_the_status_of_its_predecessor(whole, space):
    """[report-63] The watcher is away; a load balancer is made anew under its name, and a verdict
    about the old one comes: nothing of it is written to the new one, not even after a conflict."""
    await space.pool()
    vm = await space.vm("web", answers=True)
    await space.balancer("web", healthCheck=space.check())
    await space.becomes("web", "True")
    await space.quiet()
    await whole.kill("watcher")
    await space.delete("web")
    await space.goes("Service", "web")
    made = await space.balancer("web", healthCheck=space.check())
    async with Recorder(space.api, space.name, "LoadBalancer") as seen:
        await space.refuse(vm)

        async def judged():
            rows = await whole.rows(
                "select image from prober.image where namespace = $1", space.name
            )
            return rows and '"unhealthy"' in rows[0]["image"]

        await eventually(judged, 20)
        await space.quiet(1.0)
        before = [found.get("status") for found in seen.of("LoadBalancer", "web")]
        await whole.respawn("watcher")
        await whole.ready(RECONNECT_S)
        await space.becomes("web", "False", "healthy:0")

    assert before == [None]
    for found in seen.of("LoadBalancer", "web"):
        assert found["metadata"]["uid"] == made["metadata"]["uid"]
        assert condition(found.get("status") or {}).get("status") != "True"


async def test_report_45_many_allocators_and_a_full_pool(whole, space):
    """[report-45] Four replicas, one of them killed in each round, sixteen addresses, twenty at
    once: sixteen distinct leases, four that are told that the pool is exhausted, and what is freed
    goes to those four."""
    pool = await space.pool(10, 25)
    names = [f"lb{n}" for n in range(20)]
    replicas = [whole.stack.replica("allocator", n) for n in (2, 3, 4)]
    for replica in replicas:
        await whole.stack.service_ready(replica)
    try:
        for victim in ("allocator", "allocator-2"):
            made = asyncio.create_task(
                gather(*(space.balancer(name, ipPool=pool) for name in names))
            )
            await whole.kill(victim)
            await made

            async def settled():
                held = await space.leases()
                assert len(held) == 16
                return held

            held = await eventually(settled, 30)
            assert len(set(held.values())) == 16
            waiting = [name for name in names if name not in held]
            for name in waiting:
                await space.becomes(name, "False", "no IP addresses available")
            await gather(*(space.delete(name) for name in sorted(held)[:4]))
            for name in waiting:
                await space.becomes(name, "False", NO_BACKEND)
            await gather(*(space.delete(name) for name in names))
            for name in names:
                await space.goes("LoadBalancer", name)
    finally:
        codes = await gather(*(whole.end(name) for name in replicas))
    assert codes == [-signal.SIGKILL, 0, 0]


async def test_report_47_every_service_ends_cleanly_in_the_middle_of_work(whole, space):
    """[report-47] SIGTERM under load: exit code 0 within ten seconds, no transaction left open,
    and what was asked for meanwhile is done after the start."""
    await space.pool(10, 60)
    names = [f"lb{n}" for n in range(20)]

    async def load():
        for name in names:
            await space.balancer(name)
            await asyncio.sleep(0.01)

    working = asyncio.create_task(load())
    await asyncio.sleep(0.1)
    began = time.monotonic()
    codes = await gather(*(whole.end(name) for name in SERVICES))
    assert time.monotonic() - began < 12
    assert codes == [0] * len(SERVICES)
    await working
    idle = await whole.rows(
        "select application_name, state from pg_stat_activity where state like 'idle in trans%'"
    )
    assert idle == []

    await whole.heal()
    for name in names:
        await space.becomes(name, "False", NO_BACKEND)
    assert len(set((await space.leases()).values())) == len(names)


async def test_report_48_the_schema_changes_under_running_services(whole, space):
    """[report-48] A column more and a column of another type: no event is lost or dead-lettered."""
    await space.pool(10, 60)
    await space.balancer("before")
    await space.becomes("before", "False", NO_BACKEND)
    dead = "select count(*) from allocator.dead_letter"
    (count,) = (await whole.rows(dead))[0]
    await whole.rows("alter table allocator.lease add column note text")
    await whole.rows("alter table allocator.lease alter column rule type varchar(200)")
    await whole.rows("alter table allocator.owner alter column generation type int")
    try:
        names = [f"lb{n}" for n in range(20)]
        await gather(*(space.balancer(name) for name in names))
        for name in names:
            await space.becomes(name, "False", NO_BACKEND)
        assert (await whole.rows(dead))[0][0] == count
    finally:
        await whole.rows("alter table allocator.owner alter column generation type bigint")
        await whole.rows("alter table allocator.lease alter column rule type text")
        await whole.rows("alter table allocator.lease drop column note")


@pytest.mark.parametrize("forgets", [False, True], ids=["remembers", "forgets"])
async def test_the_provider_goes_and_comes_back(whole, space, forgets):
    """What was asked for meanwhile is there afterwards, in its last form. What was there stays, or,
    with a provider that forgot the last moments, is made again."""
    await space.service("checkout", "lbledger.io/nrp")
    await space.pods("checkout", 1, 2)
    await space.provider_has("checkout", 1, 2)
    (ingress,) = await space.has_ingress("checkout")

    await (whole.kill("nrp") if forgets else whole.end("nrp"))
    await space.pods("checkout", 2)
    await space.pods("checkout", 2, 3)
    await space.service("late", "lbledger.io/nrp")
    await space.pods("late", 7)
    await asyncio.sleep(0.5)  # requests fail meanwhile
    assert await space.ingress("checkout") == [ingress]
    await whole.stack.restart_provider()

    await space.provider_has("checkout", 2, 3, timeout=60)
    await space.provider_has("late", 7, timeout=60)

    async def published():
        state = await space.api.provider("GET", "state")
        public = {ip["properties"].get("ipAddress") for ip in state["publicIPAddresses"]}
        for name in ("checkout", "late"):
            (shown,) = await space.ingress(name)
            assert shown in public, (shown, public)
        return True

    await eventually(published, 30)
    if not forgets:
        assert await space.ingress("checkout") == [ingress]


async def test_report_54_a_throttled_provider_gets_one_last_form(space):
    """[report-54] No request before Retry-After is over; all changes meanwhile are one desired
    set."""
    await space.service("web", "lbledger.io/nrp")
    await space.pods("web", 1)
    await space.provider_has("web", 1)
    fault = {"kind": "error", "op": "update_address*", "status": 429, "retry_after": 2, "count": 1}
    await space.api.provider("POST", "faults", fault)

    async def sent():
        page = await space.api.provider("GET", "requests?limit=1000")
        return [r for r in page["requests"] if r["op"].startswith("update_address")]

    async def refused():
        return [r for r in await sent() if r["status"] == 429]

    await space.pods("web", 2)
    await eventually(refused)
    began, number = time.monotonic(), 2
    while time.monotonic() < began + 1.2 and number < 202:
        number += 1
        await space.pods("web", number)
    await space.pods("web", 209)
    await space.provider_has("web", 209)

    [first] = await refused()
    after = [r for r in await sent() if r["seq"] > first["seq"]]
    assert min(r["started"] for r in after) >= first["started"] + 1.9
    assert len(after) <= 3, f"pending work is one desired set, not {number} steps"


async def test_report_54_a_conflict_is_read_again_and_a_bad_service_is_alone(space):
    """[report-54] 412 once: read again, and done. 400 for one service only: it is told, the others
    are applied."""
    conflict = {"kind": "error", "op": "update_*", "status": 412, "count": 1}
    await space.api.provider("POST", "faults", conflict)
    for name, number in (("one", 1), ("bad", 2), ("two", 3)):
        await space.service(name, "lbledger.io/nrp")
        if name == "bad":
            found = await space.api.get("Service", name, space.name)
            uid = found["metadata"]["uid"]
            fault = {"kind": "error", "op": "update_*", "status": 400, "contains": uid}
            await space.api.provider("POST", "faults", fault)
        await space.pods(name, number)

    await space.provider_has("one", 1)
    await space.provider_has("two", 3)

    async def told():
        found = await space.api.get("Service", "bad", space.name)
        conditions = (found.get("status") or {}).get("conditions") or []
        assert conditions, found["status"]
        synced = next(c for c in conditions if c["type"] == "lbledger.io/ProviderSynced")
        assert synced["status"] == "False"
        return True

    await eventually(told, 30)
    assert provided(await space.api.provider("GET", "state"), uid) == set()
    await space.api.provider("DELETE", "faults")
    await space.provider_has("bad", 2, timeout=60)


async def test_a_slice_is_never_without_a_ready_endpoint_while_the_prober_dies(whole, space):
    """[report-17] SIGKILL to the prober in the middle of changes: the slice goes from one right
    form to the next."""
    await space.pool()
    one, two = await gather(space.vm("web", answers=True), space.vm("web", answers=True))
    async with Recorder(space.api, space.name, "EndpointSlice") as seen:
        await space.balancer("web", healthCheck=space.check())
        await space.slice_is("web", {one: True, two: True})
        await space.refuse(one)
        await whole.kill("prober")
        await space.refuse(two)
        await whole.respawn("prober")
        await whole.ready(RECONNECT_S)
        await space.slice_is("web", {one: False, two: False, DUMMY: True})
        await space.answer(one)
        await space.slice_is("web", {one: True, two: False})

    for found in seen.of("EndpointSlice", "web"):
        assert any(e["conditions"]["ready"] for e in found["endpoints"]), found
