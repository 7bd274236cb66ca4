"""The golden traces A1 to A3, and the rows in which kube-vip announces, on the whole system.

Harvester's controller needs several passes for each step and shows false states between them; ours
goes from one right state to the next, and the same checks hold for everything in between.
"""

import pytest

from tests.system.whole import DUMMY, Recorder, condition, gather
from tests.waiting import eventually

WAITING = "service is waiting for external IP"
NO_BACKEND = "no running backend servers"
KINDS = ("LoadBalancer", "Service", "EndpointSlice")


def messages(seen, name="web"):
    """(Ready, message) of every status, in order, without repetition."""
    found = []
    for shown in seen.of("LoadBalancer", name):
        ready = condition(shown.get("status") or {})
        if ready and (not found or found[-1] != (ready["status"], ready["message"])):
            found.append((ready["status"], ready["message"]))
    return found


def check_history(seen):
    """What holds in every version of every object that was shown."""
    for found in seen.of("EndpointSlice"):
        ready = [e for e in found["endpoints"] if e["conditions"]["ready"]]
        dummies = [e for e in found["endpoints"] if e["addresses"] == [DUMMY]]
        assert ready, "a slice without a ready endpoint"
        assert bool(dummies) == (ready == dummies), "the dummy beside a ready backend, or missing"
    for status, message in messages(seen):
        assert "modified" not in message, message
        assert (status == "True") == (message == ""), (status, message)


async def test_A1_a_life_with_a_pool(vip_space):
    """From creation to Ready, a VM that leaves and comes back, and a move to another pool: the new
    address is there before the old one is given back, and status.address never shows one that the
    Service does not."""
    space = vip_space
    one = await space.pool(10, 19, name="p1")
    two = await space.pool(30, 39, name="p2")
    vm = await space.vm("web", name="vm")
    async with Recorder(space.api, space.name, *KINDS) as seen:
        await space.balancer("web", ipPool=one)
        status = await space.becomes("web", "True")
        assert status["address"] == status["allocatedAddress"]["ip"] == space.pooled(10)
        assert status["backendServers"] == [vm]
        service = await space.api.get("Service", "web", space.name)
        assert service["spec"]["loadBalancerIP"] == space.pooled(10)
        assert await space.endpoints("web") == {vm: True}
        assert messages(seen) in ([("False", WAITING), ("True", "")], [("True", "")])
        await space.quiet()

        # Nothing happens to an LB for which nothing happens.
        before = len(seen.changes)
        await space.api.merge("LoadBalancer", "web", space.name, {"metadata": {"labels": {}}})
        await space.quiet()
        assert len(seen.changes) == before

        patch = {"metadata": {"labels": {"app": "other"}}}
        await space.api.merge("VirtualMachineInstance", "vm", space.name, patch)
        await space.becomes("web", "False", NO_BACKEND)
        await space.slice_is("web", {DUMMY: True})
        patch = {"metadata": {"labels": {"app": "web"}}}
        await space.api.merge("VirtualMachineInstance", "vm", space.name, patch)
        await space.becomes("web", "True")

        await space.edit("web", ipPool=two)
        moved = await space.becomes("web", "True", also=lambda s: s["address"] == space.pooled(30))
        assert moved["allocatedAddress"]["ipPool"] == two
        await space.pool_is(
            one, available=10, allocatedHistory={space.pooled(10): f"{space.name}/web"}
        )

    check_history(seen)
    # No instant with two owners, none without an address, none with a bare Service.
    for found in seen.of("Service", "web")[1:]:
        assert found["spec"]["loadBalancerIP"] in (space.pooled(10), space.pooled(30))
    writes = [c.kind for c in seen.changes if c.type == "ADDED"]
    assert sorted(writes) == ["EndpointSlice", "LoadBalancer", "Service"]


async def test_A1_creation_costs_one_write_of_each_kind(vip_space):
    """Service, slice and ingress are written once each, the status at most twice (without and with
    the announcer's answer); upstream needs five passes and shows a conflict as Not Ready."""
    space = vip_space
    await space.pool()
    await space.vm("web")
    async with Recorder(space.api, space.name, *KINDS) as seen:
        await space.balancer("web")
        await space.becomes("web", "True")
        await space.quiet()

    assert len(seen.of("Service")) == 2  # ours, and the announcer's ingress
    assert len(seen.of("EndpointSlice")) == 1
    assert len(seen.of("LoadBalancer")) <= 3  # the user's, and two statuses
    check_history(seen)


async def test_A2_a_life_with_dhcp_and_checks(vip_space):
    """Not healthy, healthy, failing, checks off, and the VM goes: one slice write for each, dummy
    and verdict together."""
    space = vip_space
    vm = await space.vm("web", name="vm")
    unhealthy = "running backend servers are not probed as healthy total:1, healthy:0"
    async with Recorder(space.api, space.name, *KINDS) as seen:
        await space.balancer("web", ipam="dhcp", healthCheck=space.check(failure=1))
        status = await space.becomes("web", "False", unhealthy)
        assert status["allocatedAddress"]["ip"] == "0.0.0.0"
        assert status["address"] == space.vip.leases["web"]
        assert await space.endpoints("web") == {vm: False, DUMMY: True}

        await space.answer(vm)
        await space.becomes("web", "True")
        await space.refuse(vm)
        await space.becomes("web", "False", unhealthy)
        await space.slice_is("web", {vm: False, DUMMY: True})
        await space.edit("web", healthCheck=None)
        await space.becomes("web", "True")
        await space.stop_vm("vm")
        await space.becomes("web", "False", NO_BACKEND)
        await space.slice_is("web", {DUMMY: True})

    check_history(seen)
    states = []
    for found in seen.of("EndpointSlice", "web"):
        states.append({e["addresses"][0]: e["conditions"]["ready"] for e in found["endpoints"]})
    failing = {vm: False, DUMMY: True}
    assert states == [failing, {vm: True}, failing, {vm: True}, {DUMMY: True}]


async def test_S1b_dhcp_without_a_backend(vip_space):
    """0.0.0.0 is delegated, the announcer's address is shown, and Ready says what is missing."""
    space = vip_space

    await space.balancer("web", ipam="dhcp")
    status = await space.becomes("web", "False", NO_BACKEND)

    service = await space.api.get("Service", "web", space.name)
    assert service["spec"]["loadBalancerIP"] == "0.0.0.0"
    assert status["allocatedAddress"]["ip"] == "0.0.0.0"
    assert status["address"] == space.vip.leases["web"]


async def test_a_renewed_address_is_shown_at_once(vip_space):
    """The announcer's new address reaches status.address without any other trigger."""
    space = vip_space
    await space.vm("web")
    await space.balancer("web", ipam="dhcp")
    await space.becomes("web", "True")

    renewed = await space.vip.renew("web")

    await space.becomes("web", "True", also=lambda s: s["address"] == renewed)


async def test_S6_dhcp_again_and_again(vip_space):
    """Created and deleted many times: no hang, and the announcer is left with nothing."""
    space = vip_space
    for _ in range(5):
        await space.balancer("web", ipam="dhcp")
        await space.becomes("web", "False", NO_BACKEND)
        await space.delete("web")
        await space.goes("Service", "web")

    await eventually(lambda: space.vip.leases == {}, message="no lease by DHCP is left")


@pytest.mark.parametrize("case", ["no-vm", "vm-off", "vm-booting", "selector-matches-none"])
async def test_L19_an_address_is_announced_without_a_backend(vip_space, case):
    """kube-vip announces only what has a ready endpoint; the slice with the dummy is there from
    the start, so the address comes in every case."""
    space = vip_space
    await space.pool()
    if case == "vm-off":
        await space.vm("web", name="vm")
        await space.stop_vm("vm")
    if case == "vm-booting":
        await space.vm("web", address="")
    if case == "selector-matches-none":
        await space.vm("other")

    await space.balancer("web")
    status = await space.becomes("web", "False", also=lambda s: s.get("address"))

    assert status["address"] == space.pooled(10) == space.vip.announced["web"]


async def test_report_62_what_the_announcer_adds_is_no_difference(vip_space):
    """[report-62] Fields beside the address, written again and again, cause no write of ours."""
    space = vip_space
    await space.pool()
    await space.vm("web")
    await space.balancer("web")
    await space.becomes("web", "True")
    await space.quiet()
    async with Recorder(space.api, space.name, *KINDS) as seen:
        before = len(seen.changes)
        for number in range(20):
            ports = [{"port": 80, "protocol": "TCP", "error": f"e{number}"}]
            ingress = [{"ip": space.pooled(10), "ipMode": "VIP", "ports": ports}]
            patch = {"status": {"loadBalancer": {"ingress": ingress}}}
            await space.api.merge("Service", "web", space.name, patch, "status")
        await space.quiet()
        after = seen.changes[before:]

    assert [change.kind for change in after] == ["Service"] * 20


async def test_twelve_machines_come_in_one_order(vip_space):
    """However they come, slice and status list them in one order, and the order never changes."""
    space = vip_space
    await space.pool()
    await space.balancer("web")
    async with Recorder(space.api, space.name, "EndpointSlice") as seen:
        await gather(*(space.vm("web") for _ in range(12)))
        status = await space.becomes("web", "True", also=lambda s: len(s["backendServers"]) == 12)

    last = [e["addresses"][0] for e in seen.of("EndpointSlice", "web")[-1]["endpoints"]]
    assert status["backendServers"] == last
    for found in seen.of("EndpointSlice", "web"):
        shown = [e["addresses"][0] for e in found["endpoints"]]
        assert shown == [DUMMY] or shown == [address for address in last if address in shown]


@pytest.mark.parametrize("case", ["exhausted", "no-match", "missing", "empty-ipam"])
async def test_A3_pool_cases(space, case):
    """Each refusal by its message, without a Service and with one status write; an LB with empty
    ipam releases its address like any other (upstream leaks it)."""
    pool = await space.pool(10, 10)
    if case == "empty-ipam":
        await space.balancer("web")
        await space.becomes("web", "False", NO_BACKEND)
        await space.delete("web")
        history = {space.pooled(10): f"{space.name}/web"}
        await space.pool_is(pool, allocated={}, available=1, allocatedHistory=history)
        return
    if case == "exhausted":
        await space.balancer("first")
        await space.becomes("first", "False", NO_BACKEND)
    elsewhere = [{"project": "*", "namespace": "elsewhere", "guestCluster": "*"}]
    if case == "no-match":
        await space.api.merge("IPPool", pool, "", {"spec": {"selector": {"scope": elsewhere}}})
    wanted = {
        "exhausted": (
            f"fail to get ip from pool {pool}, error: no IP addresses available in range set: "
            f"{space.pooled(10)}-{space.pooled(10)}"
        ),
        "no-match": (
            "no matched IPPool with requirement "
            f"&{{Network: Project: Namespace:{space.name} Cluster:}}"
        ),
        "missing": "fail to get allocator nope",
    }[case]

    async with Recorder(space.api, space.name, "LoadBalancer", "Service") as seen:
        await space.balancer("web", **({"ipPool": "nope"} if case == "missing" else {}))
        status = await space.becomes("web", "False", wanted)
        await space.quiet()

    assert (
        condition(status)["reason"]
        == {
            "exhausted": "PoolExhausted",
            "no-match": "NoMatchingPool",
            "missing": "PoolNotFound",
        }[case]
    )
    assert seen.of("Service", "web") == []
    assert len(seen.of("LoadBalancer", "web")) == 2, "created, and told once"
