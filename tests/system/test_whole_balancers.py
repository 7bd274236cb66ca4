"""Load balancers of virtual machines on the whole running system: the rows S of the test plan.

Real sockets stand behind the addresses. Each test is a row of docs/conformance.md, by its name.
"""

from tests.system.whole import DUMMY, GROUP, Recorder, gather
from tests.waiting import eventually

NO_BACKEND = "no running backend servers"


async def test_S1a_without_a_backend_there_is_an_address_and_the_dummy(space):
    """No VM matches: the address is leased, the Service is published, and the slice holds the
    dummy alone; Ready says why it is not."""
    await space.pool()

    await space.balancer("web")
    status = await space.becomes("web", "False", NO_BACKEND)

    address = (await space.leases("web"))["web"]
    assert address == space.pooled(10)
    assert status["allocatedAddress"]["ip"] == address
    assert status["address"] == address
    assert await space.ingress("web") == [address]
    assert await space.endpoints("web") == {DUMMY: True}


async def test_S1c_no_selector_takes_no_backend(space):
    """An LB without a selector, or with an empty one, takes none of the machines around it."""
    await space.pool()
    await space.vm("web")

    await gather(
        space.balancer("absent", backendServerSelector=None),
        space.balancer("empty", backendServerSelector={}),
    )

    for name in ("absent", "empty"):
        status = await space.becomes(name, "False", NO_BACKEND)
        assert not status.get("backendServers")
        assert await space.endpoints(name) == {DUMMY: True}


async def test_S2a_a_machine_that_starts_replaces_the_dummy(space):
    """[report-69] A matching VM joins an LB that was there before it, without touching the LB."""
    await space.pool()
    await space.balancer("web")
    await space.becomes("web", "False", NO_BACKEND)
    generation = (await space.api.get("LoadBalancer", "web", space.name))["metadata"]["generation"]

    vm = await space.vm("web")
    await space.becomes("web", "True")

    assert await space.endpoints("web") == {vm: True}
    after = await space.api.get("LoadBalancer", "web", space.name)
    assert after["metadata"]["generation"] == generation


async def test_S2b_a_second_machine_comes_and_goes(space):
    """backendServers has two, then one; Ready stays True and the address stays."""
    await space.pool()
    first = await space.vm("web")
    await space.balancer("web")
    address = (await space.becomes("web", "True"))["address"]

    async with Recorder(space.api, space.name, "LoadBalancer") as seen:
        second = await space.vm("web", name="vm2")
        await space.becomes("web", "True", also=lambda s: s["backendServers"] == [first, second])
        await space.stop_vm("vm2")
        await space.becomes("web", "True", also=lambda s: s["backendServers"] == [first])

    for found in seen.of("LoadBalancer", "web"):
        assert found["status"]["address"] == address
        assert found["status"]["conditions"][0]["status"] == "True"


async def test_S2c_the_last_machine_stops_and_comes_back(space):
    """[report-24] Stopping the only VM leaves the dummy and no backend; a start restores Ready."""
    await space.pool()
    address = await space.vm("web", name="vm")
    await space.balancer("web")
    await space.becomes("web", "True")

    await space.stop_vm("vm")
    status = await space.becomes("web", "False", NO_BACKEND)
    assert not status.get("backendServers")
    assert await space.endpoints("web") == {DUMMY: True}

    await space.vm("web", name="vm", address=address)
    await space.becomes("web", "True")
    assert await space.endpoints("web") == {address: True}


async def test_S2c_a_machine_that_is_being_deleted_leaves_at_once(space):
    """[report-24] A backend goes at its deletionTimestamp; a finalizer of others delays nothing,
    and none of ours is on it."""
    await space.pool()
    await space.vm("web", name="vm")
    await space.api.merge(
        "VirtualMachineInstance",
        "vm",
        space.name,
        {"metadata": {"finalizers": ["foregroundDeleteVirtualMachine"]}},
    )
    await space.balancer("web")
    await space.becomes("web", "True")

    await space.stop_vm("vm")
    await space.becomes("web", "False", NO_BACKEND)

    vm = await space.api.get("VirtualMachineInstance", "vm", space.name)
    assert vm["metadata"]["finalizers"] == ["foregroundDeleteVirtualMachine"]
    await space.api.merge(
        "VirtualMachineInstance", "vm", space.name, {"metadata": {"finalizers": None}}
    )


async def test_S2d_a_label_edit_makes_a_machine_join_and_leave(space):
    """[report-24] A label that begins to match joins; one that stops matching leaves at once."""
    await space.pool()
    address = await space.vm("other", name="vm")
    await space.balancer("web")
    await space.becomes("web", "False", NO_BACKEND)

    async def label(value):
        patch = {"metadata": {"labels": {"app": value}}}
        await space.api.merge("VirtualMachineInstance", "vm", space.name, patch)

    await label("web")
    await space.becomes("web", "True")
    assert await space.endpoints("web") == {address: True}
    await label("other")
    await space.becomes("web", "False", NO_BACKEND)
    assert await space.endpoints("web") == {DUMMY: True}


async def test_S2e_another_selector_takes_other_machines(space):
    """The slice has the new backends and only those."""
    await space.pool()
    old, new = await gather(space.vm("web"), space.vm("api"))
    await space.balancer("web")
    await space.becomes("web", "True", also=lambda s: s["backendServers"] == [old])

    await space.edit("web", backendServerSelector={"app": ["api"]})
    await space.becomes("web", "True", also=lambda s: s["backendServers"] == [new])

    await space.slice_is("web", {new: True})


async def test_S3_a_pool_is_used_up_and_serves_again(space):
    """S3a: as many LBs as addresses, at once, have one each and nothing is left. S3b: the next one
    waits and has no Service. S3c: it gets what a deleted one frees, at once."""
    pool = await space.pool(10, 12)
    names = ["a", "b", "c"]
    await gather(*(space.balancer(name, ipPool=pool) for name in names))
    for name in names:
        await space.becomes(name, "False", NO_BACKEND)
    held = await space.leases(*names)
    assert sorted(held.values()) == [space.pooled(n) for n in (10, 11, 12)]
    await space.pool_is(pool, total=3, available=0)

    await space.balancer("late", ipPool=pool)
    await space.becomes("late", "False", "no IP addresses available in range set")
    assert await space.api.get("Service", "late", space.name) is None

    await space.delete("b")
    await space.becomes("late", "False", NO_BACKEND)
    assert await space.leases("late") == {"late": held["b"]}
    holders = {held["a"]: "a", held["b"]: "late", held["c"]: "c"}
    allocated = {address: f"{space.name}/{name}" for address, name in holders.items()}
    await space.pool_is(pool, available=0, allocated=allocated)


async def test_S3d_the_same_name_gets_its_address_back(space):
    """An address that is still free goes to the name that had it."""
    pool = await space.pool()
    await space.balancer("other")
    await space.balancer("web")
    await space.becomes("web", "False", NO_BACKEND)
    held = (await space.leases("web"))["web"]
    await space.delete("web")
    await space.pool_is(pool, allocatedHistory={held: f"{space.name}/web"})

    await space.balancer("web")
    await space.becomes("web", "False", NO_BACKEND)

    assert await space.leases("web") == {"web": held}


async def test_S3e_an_address_that_somebody_took_stays_his(space):
    """The returning name gets another free address instead of an error."""
    await space.pool(10, 11)
    await space.balancer("web", address=space.pooled(10))
    await space.becomes("web", "False", NO_BACKEND)
    await space.delete("web")
    await space.goes("LoadBalancer", "web")
    await space.balancer("taker", address=space.pooled(10))
    await space.becomes("taker", "False", NO_BACKEND)

    await space.balancer("web")
    await space.becomes("web", "False", NO_BACKEND)

    assert await space.leases() == {"taker": space.pooled(10), "web": space.pooled(11)}


async def test_S3f_create_and_delete_in_a_tight_loop(space):
    """However fast a name comes and goes, it is never stuck; the ledger ends with the living."""
    pool = await space.pool(10, 12)
    for _ in range(25):
        await space.balancer("web")
        await space.delete("web")
    await space.balancer("web")
    status = await space.becomes("web", "False", NO_BACKEND)

    async def exact():
        leases = await space.leases()
        assert leases == {"web": status["address"]}
        return True

    await eventually(exact)
    await space.pool_is(pool, available=2, allocated={status["address"]: f"{space.name}/web"})


async def test_S3g_ten_at_once_without_a_named_pool(space):
    """[report-2] Each gets an address of the pool that is chosen for it, whose name it shows."""
    pool = await space.pool()
    names = [f"lb{n}" for n in range(10)]

    await gather(*(space.balancer(name) for name in names))

    for name in names:
        status = await space.becomes(name, "False", NO_BACKEND)
        assert status["allocatedAddress"]["ipPool"] == pool
    assert len(set((await space.leases(*names)).values())) == 10


async def test_S4_health_decides_who_gets_traffic(space):
    """[report-17] S4a: both ready. S4b: one stops answering. S4c: both, the dummy stands in. S4d:
    one answers again. S4e: checks off, all ready. S4f: checks on again, ready until they failed."""
    await space.pool()
    one, two = await gather(space.vm("web", answers=True), space.vm("web", answers=True))
    failing = "running backend servers are not probed as healthy total:2, healthy:0"
    async with Recorder(space.api, space.name, "EndpointSlice") as seen:
        await space.balancer("web", healthCheck=space.check())
        await space.slice_is("web", {one: True, two: True})  # S4a
        await space.becomes("web", "True")

        await space.refuse(one)
        await space.slice_is("web", {one: False, two: True})  # S4b
        await space.becomes("web", "True")

        await space.refuse(two)
        await space.becomes("web", "False", failing)  # S4c
        await space.slice_is("web", {one: False, two: False, DUMMY: True})

        await space.answer(one)
        await space.becomes("web", "True")  # S4d
        await space.slice_is("web", {one: True, two: False})
        await space.refuse(one)
        await space.becomes("web", "False", failing)

        await space.edit("web", healthCheck=None)
        await space.becomes("web", "True")  # S4e
        await space.slice_is("web", {one: True, two: True})

        before = len(seen.changes)
        await space.edit("web", healthCheck=space.check())
        await space.becomes("web", "False", failing)  # S4f
        await space.slice_is("web", {one: False, two: False, DUMMY: True})
        after_on = seen.of("EndpointSlice", "web")[before:]

    # The last slice with both ready is followed by one where checks have failed: no fail-closed
    # phase in between, and never a slice without a ready endpoint.
    for found in seen.of("EndpointSlice", "web"):
        ready = [e for e in found["endpoints"] if e["conditions"]["ready"]]
        assert ready, found
    for found in after_on:
        states = [e["conditions"]["ready"] for e in found["endpoints"]]
        assert states in ([True, True], [False, True], [True, False], [False, False, True]), states


async def test_S5_zero_thresholds_take_the_defaults(space):
    """A health check that names only its port, or says 0 for the rest, is accepted and works."""
    await space.pool()
    await space.vm("web", answers=True)
    zero = ("successThreshold", "failureThreshold", "periodSeconds", "timeoutSeconds")

    await gather(
        space.balancer("web", healthCheck={"port": space.port}),
        space.balancer(
            "zero",
            backendServerSelector={"app": ["web"]},
            healthCheck={"port": space.port, **dict.fromkeys(zero, 0)},
        ),
    )

    for name in ("web", "zero"):
        status = await space.becomes(name, "True")
        assert status["backends"][0]["state"] == "healthy"


async def test_a_change_is_written_once_whatever_the_number_of_backends(space):
    """A VM joining twelve others costs one write of the slice, none of the Service, one of the
    status (upstream: about eleven reconciles)."""
    await space.pool()
    await gather(*(space.vm("web") for _ in range(12)))
    await space.balancer("web")
    await space.becomes("web", "True", also=lambda s: len(s["backendServers"]) == 12)
    await space.quiet()

    kinds = ("LoadBalancer", "Service", "EndpointSlice")
    async with Recorder(space.api, space.name, *kinds) as seen:
        known = len(seen.changes)
        await space.vm("web")
        await space.becomes("web", "True", also=lambda s: len(s["backendServers"]) == 13)
        await space.quiet()
        written = [change.kind for change in seen.changes[known:]]

    assert sorted(written) == ["EndpointSlice", "LoadBalancer"]


async def test_what_is_edited_by_hand_is_repaired(space):
    """[report-31] A Service, a slice and a status that somebody edits or deletes become again what
    they were, with label and owner."""
    await space.pool()
    vm = await space.vm("web")
    await space.balancer("web")
    status = await space.becomes("web", "True")
    service = await space.api.get("Service", "web", space.name)
    changing = {"resourceVersion": "", "managedFields": [], "generation": 0}
    patches = (
        ("Service", {"metadata": {"labels": {f"{GROUP}/servicelb": None}}}, ""),
        ("Service", {"spec": {"loadBalancerIP": "198.18.255.1", "selector": {"app": "x"}}}, ""),
        ("EndpointSlice", {"endpoints": [{"addresses": ["10.99.9.9"]}]}, ""),
        ("LoadBalancer", {"status": {"address": "198.18.255.1"}}, "status"),
    )

    for kind, patch, subresource in patches:
        await space.api.merge(kind, "web", space.name, patch, subresource)

    async def whole_again():
        now = await space.api.get("Service", "web", space.name)
        assert {**now["metadata"], **changing} == {**service["metadata"], **changing}
        assert now["spec"] == service["spec"]
        assert await space.endpoints("web") == {vm: True}
        assert (await space.status("web"))["address"] == status["address"]
        return True

    await eventually(whole_again, 30)
    for kind in ("Service", "EndpointSlice"):
        await space.delete("web", kind)

    async def there():
        assert await space.ingress("web") == [status["address"]]
        assert await space.endpoints("web") == {vm: True}
        return True

    await eventually(there, 30)
    assert await space.leases("web") == {"web": status["address"]}


async def test_a_foreign_service_of_the_name_is_left_alone(space):
    """NameConflict names it; nothing of it changes; when it goes, ours comes."""
    await space.pool()
    await space.api.create(
        {
            "kind": "Service",
            "metadata": {"name": "web", "namespace": space.name},
            "spec": {"ports": [{"port": 5432}], "selector": {"db": "main"}},
        }
    )
    foreign = await space.api.get("Service", "web", space.name)

    await space.vm("web")
    await space.balancer("web")
    await space.becomes(
        "web", "False", also=lambda s: s["conditions"][0]["reason"] == "NameConflict"
    )
    assert (await space.api.get("Service", "web", space.name))["spec"] == foreign["spec"]

    await space.delete("web", "Service")
    await space.becomes("web", "True")


async def test_report_63_a_new_object_of_an_old_name_starts_anew(space):
    """[report-63] An LB deleted and made again in one breath is served by its own uid; conditions
    of the old one are not copied."""
    await space.pool()
    await space.balancer("web", backendServerSelector={"app": ["none"]})
    await space.becomes("web", "False", NO_BACKEND)
    await space.vm("web")

    await space.delete("web")
    made = await space.balancer("web")
    await space.becomes("web", "True")

    async def owned():
        service = await space.api.get("Service", "web", space.name)
        assert service, "no Service"
        owners = [ref["uid"] for ref in service["metadata"]["ownerReferences"]]
        assert owners == [made["metadata"]["uid"]]
        return True

    await eventually(owned, 20)
    assert not made.get("status")
