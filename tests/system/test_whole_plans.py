"""Rows L of the test plan on the whole running system: what later reports asked for.

Each test is a row of docs/conformance.md, by its name.
"""

import json

import pytest

from tests.system.whole import DUMMY, GROUP, Refused, condition, gather
from tests.waiting import eventually

NO_BACKEND = "no running backend servers"
CLUSTER = {"workloadType": "cluster", "listeners": None, "backendServerSelector": None}


@pytest.mark.parametrize(("before", "after"), [("pool", "dhcp"), ("dhcp", "pool")])
async def test_L1_ipam_does_not_change(space, before, after):
    """[report-4] The API server refuses the change and says what to do; the lease stays."""
    await space.pool()
    await space.balancer("web", ipam=before)
    await space.becomes("web", "False")
    held = await space.leases()

    with pytest.raises(Refused, match=r"spec.ipam can't be changed between pool and dhcp") as no:
        await space.edit("web", ipam=after)

    assert no.value.code == 422
    assert await space.leases() == held


@pytest.mark.parametrize("ipam", ["pool", "dhcp"])
async def test_L3_a_cluster_needs_no_listener(space, ipam):
    """The ticket of a guest cluster gets its address, and neither Service nor slice."""
    pool = await space.pool()

    await space.balancer("guest", ipam=ipam, **CLUSTER)
    status = await space.becomes("guest", "True")

    wanted = {"pool": (pool, space.pooled(10)), "dhcp": ("", "0.0.0.0")}[ipam]
    allocated = status["allocatedAddress"]
    assert (allocated.get("ipPool", ""), allocated["ip"]) == wanted
    assert await space.api.get("Service", "guest", space.name) is None
    assert await space.api.get("EndpointSlice", "guest", space.name) is None


async def test_L4_the_workload_type_does_not_change(space):
    """Between vm and cluster it is refused; from empty to vm, which is the same, it is not."""
    await space.pool()
    await space.balancer("web")
    await space.becomes("web", "False")

    with pytest.raises(Refused, match=r"spec.workloadType can't be changed between vm and cluster"):
        await space.edit("web", workloadType="cluster")
    await space.edit("web", workloadType="vm")


async def test_L6_a_selector_may_come_later(space):
    """Several LBs without a selector wait; with one they become ready."""
    await space.pool()
    await space.vm("web")
    names = ["a", "b", "c"]
    await gather(*(space.balancer(name, backendServerSelector=None) for name in names))
    for name in names:
        await space.becomes(name, "False", NO_BACKEND)

    await gather(*(space.edit(name, backendServerSelector={"app": ["web"]}) for name in names))

    for name in names:
        await space.becomes(name, "True")


RELEASE = f"{GROUP}/manuallyReleaseIP"


async def asked_for_release(space, pool, text):
    """Annotate the pool, and wait until the annotation was answered and removed."""
    patch = {"metadata": {"annotations": {RELEASE: text}}}
    await space.api.merge("IPPool", pool, "", patch)

    async def answered():
        found = await space.api.get("IPPool", pool)
        return RELEASE not in (found["metadata"].get("annotations") or {})

    await eventually(answered, 30, message=f"the request {text!r} is answered")


async def test_L7_a_leaked_booking_is_released_by_hand(whole, space):
    """The LB vanished while nobody watched: the annotation ends its booking and goes away."""
    pool = await space.pool()
    await space.balancer("web")
    await space.becomes("web", "False", NO_BACKEND)
    await whole.kill("watcher")
    await space.delete("web")
    await whole.respawn("watcher")

    await asked_for_release(space, pool, f"{space.pooled(10)}: {space.name}/web")

    await space.pool_is(pool, available=20, allocated={})


@pytest.mark.parametrize(
    "text", ["nonsense", "{address}: {ns}/other", "{address}: {ns}/web", "198.18.0.9: {ns}/web"]
)
async def test_L8_a_wrong_request_releases_nothing(space, text):
    """Bad format, wrong owner, wrong address, or an LB that still exists: only the annotation
    goes."""
    pool = await space.pool()
    await space.balancer("web")
    await space.becomes("web", "False", NO_BACKEND)
    held = await space.leases()

    await asked_for_release(space, pool, text.format(address=space.pooled(10), ns=space.name))
    await space.quiet()

    assert await space.leases() == held == {"web": space.pooled(10)}
    await space.pool_is(pool, available=19)


async def test_L15_a_guest_cluster_goes_with_its_load_balancers(space):
    """The tickets of a cluster that is torn down with its disks are deleted; those of others and
    VM load balancers in the namespace stay."""
    await space.pool()
    label = "cloudprovider.harvesterhci.io/cluster"
    for name, cluster in (("one", "rke"), ("two", "rke"), ("other", "k3s")):
        await space.balancer(name, labels={label: cluster}, **CLUSTER)
    await space.balancer("vm")
    for name in ("one", "two", "other"):
        await space.becomes(name, "True")
    await space.becomes("vm", "False", NO_BACKEND)
    creator = {"harvesterhci.io/creator": "docker-machine-driver-harvester"}
    for name, cluster, annotations in (
        ("node-1", "rke", {"harvesterhci.io/removeAllPersistentVolumeClaims": "true"}),
        ("node-2", "k3s", {}),
    ):
        labels = {**creator, "guestcluster.harvesterhci.io/name": cluster}
        meta = {"name": name, "namespace": space.name, "labels": labels}
        meta |= {
            "annotations": annotations,
            "finalizers": ["kubevirt.io/virtualMachineControllerFinalize"],
        }
        await space.api.create({"kind": "VirtualMachine", "metadata": meta, "spec": {}})
        await space.api.delete("VirtualMachine", name, space.name)

    for name in ("one", "two"):
        await space.goes("LoadBalancer", name)
    await space.quiet()
    assert sorted(await space.leases()) == ["other", "vm"]
    for name in ("node-1", "node-2"):
        patch = {"metadata": {"finalizers": None}}
        await space.api.merge("VirtualMachine", name, space.name, patch)


async def test_L22_pools_of_a_kube_vip_config_map_are_taken_over(space):
    """Its pools are created, an old address goes back to the name that had it, what can't be read
    stops nothing, and the ConfigMap is marked so that it happens once."""
    space.pools += [space.name, "global"]
    data = {
        f"range-{space.name}": f"{space.pooled(10)}-{space.pooled(20)}",
        "range-global": f"{space.pooled(30)}-{space.pooled(40)}",
        "kubevip-services": json.dumps(
            {"services": [{"vip": space.pooled(34), "serviceName": "web"}]}
        ),
        "cidr-wrong": "not a network",
    }
    meta = {"name": "kubevip", "namespace": "kube-system"}
    await space.api.create({"kind": "ConfigMap", "metadata": meta, "data": data})
    try:

        async def converted():
            found = await space.api.get("ConfigMap", "kubevip", "kube-system")
            return (found["metadata"].get("annotations") or {}).get(f"{GROUP}/after-conversion")

        assert await eventually(converted, 30) == "true"
        found = await space.api.get("IPPool", space.name)
        assert found["spec"]["selector"]["scope"] == [
            {"project": "*", "namespace": space.name, "guestCluster": "*"}
        ]
        await space.balancer("any")
        status = await space.becomes("any", "False", NO_BACKEND)
        assert status["allocatedAddress"]["ipPool"] == space.name
        old = {"name": "web", "namespace": "kube-system"}
        spec = {"listeners": [space.listener()]}
        await space.api.create({"kind": "LoadBalancer", "metadata": old, "spec": spec})

        async def regranted():
            found = await space.api.get("LoadBalancer", "web", "kube-system")
            return ((found.get("status") or {}).get("allocatedAddress") or {}).get("ip")

        assert await eventually(regranted, 30) == space.pooled(34)
    finally:
        await space.api.delete("LoadBalancer", "web", "kube-system")
        await space.api.delete("ConfigMap", "kubevip", "kube-system")


async def test_L9_one_port_by_tcp_and_by_udp(space):
    """TCP:7777 and UDP:7777 are two listeners, in the Service and in the slice."""
    await space.pool()
    vm = await space.vm("web")
    listeners = [
        {"name": "t", "port": 7777, "protocol": "TCP", "backendPort": 7777},
        {"name": "u", "port": 7777, "protocol": "UDP", "backendPort": 7777},
    ]

    await space.balancer("web", listeners=listeners)
    await space.becomes("web", "True")

    service = await space.api.get("Service", "web", space.name)
    found = await space.api.get("EndpointSlice", "web", space.name)
    wanted = [("t", "TCP", 7777), ("u", "UDP", 7777)]
    assert [(p["name"], p["protocol"], p["port"]) for p in service["spec"]["ports"]] == wanted
    assert [(p["name"], p["protocol"], p["port"]) for p in found["ports"]] == wanted
    assert await space.endpoints("web") == {vm: True}


async def test_L10_L11_the_network_must_be_the_pools(space):
    """[report-3] L10: no network, but the only pool is on one: no match, and the message says what
    was asked. L11: with the network named, the pool serves."""
    pool = await space.pool(selector={"network": f"{space.name}/nad3"})
    await space.balancer("bare")
    await space.becomes(
        "bare",
        "False",
        "no matched IPPool with requirement "
        f"&{{Network: Project: Namespace:{space.name} Cluster:}}",
    )

    await space.balancer("named", annotations={f"{GROUP}/network": f"{space.name}/nad3"})
    status = await space.becomes("named", "False", NO_BACKEND)

    assert status["allocatedAddress"]["ipPool"] == pool


async def test_L12_a_scope_with_only_a_namespace_serves_guests(space):
    """A guest's request with project and cluster finds it when nothing fits better."""
    pool = await space.pool(scope=[{"namespace": space.name}])

    await space.balancer("guest", annotations={f"{GROUP}/cluster": "rke"}, **CLUSTER)
    status = await space.becomes("guest", "True")

    assert status["allocatedAddress"]["ipPool"] == pool


async def test_L14_a_machine_without_an_address(space):
    """Matched but without an IPv4: said so, the dummy stands in; an address that comes and goes is
    followed."""
    await space.pool()
    await space.vm("web", name="vm", address="")
    await space.balancer("web")
    await space.becomes("web", "False", "running backend servers have no IP")
    assert await space.endpoints("web") == {DUMMY: True}

    async def interfaces(*addresses):
        found = [{"name": "default", "ipAddress": a} for a in addresses]
        patch = {"status": {"interfaces": found}}
        await space.api.merge("VirtualMachineInstance", "vm", space.name, patch)

    for _ in range(2):
        await interfaces(space.address(7))
        await space.becomes("web", "True", also=lambda s: s["backendServers"] == [space.address(7)])
        await interfaces()
        await space.becomes("web", "False", "running backend servers have no IP")
    await space.slice_is("web", {DUMMY: True})


async def test_L16_a_guest_without_cluster_name(space):
    """A ticket without labels and annotations is admitted and served by its namespace."""
    await space.pool()

    await space.balancer("guest", **CLUSTER)
    status = await space.becomes("guest", "True")

    assert status["allocatedAddress"]["ip"] == space.pooled(10)


async def test_L17_which_network_a_guest_asks_for(space):
    """The network annotation goes before the management network; a network that no pool has is
    admitted and told."""
    network, management = f"{space.name}/net", f"{space.name}/mgmt"
    one = await space.pool(10, 12, name="net", selector={"network": network})
    two = await space.pool(20, 22, name="mgmt", selector={"network": management})
    by_network = {f"{GROUP}/network": network}
    by_management = {"cloudprovider.harvesterhci.io/managementNetwork": management}

    await gather(
        space.balancer("both", annotations={**by_network, **by_management}, **CLUSTER),
        space.balancer("mgmt", annotations=by_management, **CLUSTER),
        space.balancer("wrong", annotations={f"{GROUP}/network": "no/such"}, **CLUSTER),
    )

    for name, pool in (("both", one), ("mgmt", two)):
        status = await space.becomes(name, "True")
        assert status["allocatedAddress"]["ipPool"] == pool
    status = await space.becomes("wrong", "False", "no matched IPPool")
    assert condition(status)["reason"] == "NoMatchingPool"
    assert "no/such" in condition(status)["message"]


async def test_L18_L20_a_global_pool_is_the_last_choice(space):
    """[report-3] L20: the namespace's pool goes before the global one. L18: a network without a
    pool falls back to the global one, whatever its network (documented; a setting ends it)."""
    anybody = [{"project": "*", "namespace": "*", "guestCluster": "*"}]
    everybody = await space.pool(20, 29, name="global", scope=anybody)
    ours = await space.pool(10, 19, name="ours")

    await space.balancer("near")
    await space.balancer("far", annotations={f"{GROUP}/network": "no/such"}, **CLUSTER)

    near = await space.becomes("near", "False", NO_BACKEND)
    far = await space.becomes("far", "True")
    assert near["allocatedAddress"]["ipPool"] == ours
    assert far["allocatedAddress"]["ipPool"] == everybody


@pytest.mark.parametrize("why", ["pool-missing", "no-dhcp", "pool-exhausted", "pool-deleted"])
async def test_L21_a_load_balancer_can_always_be_deleted(space, why):
    """[report-5] Whatever its address waits for, deletion never hangs."""
    pool = await space.pool(10, 10)
    if why == "pool-exhausted":
        await space.balancer("first", ipPool=pool)
        await space.becomes("first", "False", NO_BACKEND)
    spec = {
        "pool-missing": {"ipPool": "nope"},
        "no-dhcp": {"ipam": "dhcp"},
        "pool-exhausted": {"ipPool": pool},
        "pool-deleted": {"ipPool": pool},
    }[why]
    await space.balancer("web", **spec)
    await space.becomes("web", "False")
    if why == "pool-deleted":
        await space.api.delete("IPPool", pool)

    await space.delete("web")

    await space.goes("LoadBalancer", "web")
    await space.goes("Service", "web")
    await space.goes("EndpointSlice", "web")


FORMS = {
    "cidr": ({}, 253),
    "start": ({"rangeStart": "{net}.251"}, 4),
    "end": ({"rangeEnd": "{net}.10"}, 9),
    "both": ({"rangeStart": "{net}.1", "rangeEnd": "{net}.10", "gateway": "{net}.11"}, 10),
    "both-without-gateway": ({"rangeStart": "{net}.1", "rangeEnd": "{net}.10"}, 9),
    "slash-30": ({"subnet": "{net}.4/30"}, 1),
    "slash-31": ({"subnet": "{net}.4/31"}, 2),
    "slash-32": ({"subnet": "{net}.5/32"}, 1),
}


@pytest.mark.parametrize("form", FORMS)
async def test_L23_forms_of_a_pool(space, form):
    """[report-13] A pool counts what it can really give out, in each form of a range."""
    given, total = FORMS[form]
    net = space.pooled(0).removesuffix(".0")
    item = {"subnet": f"{net}.0/24"}
    item |= {key: value.format(net=net) for key, value in given.items()}

    pool = await space.pool(ranges=[item])

    await space.pool_is(pool, total=total, available=total)


BAD_RANGES = {
    "L5-no-mask": ({"subnet": "192.168.10.1"}, "invalid CIDR address|in CIDR notation|subnet"),
    "L23-no-subnet": ({"rangeStart": "{net}.1"}, "subnet"),
    "report-65-order": (
        {"subnet": "{net}.0/24", "rangeStart": "{net}.149", "rangeEnd": "{net}.140"},
        "comes after range end",
    ),
    "report-65-outside": (
        {"subnet": "{net}.0/24", "rangeStart": "{net}.10", "rangeEnd": "198.51.100.9"},
        "198.51.100.9 is out of subnet",
    ),
    "report-65-no-address": (
        {"subnet": "{net}.0/24", "rangeStart": "{net}.251", "rangeEnd": "{net}.259"},
        "rangeEnd",
    ),
    "L23-start-is-network": (
        {"subnet": "{net}.0/24", "rangeStart": "{net}.0"},
        "is the network address",
    ),
    "L23-end-is-broadcast": (
        {"subnet": "{net}.0/24", "rangeEnd": "{net}.255"},
        "is the broadcast address",
    ),
    "L23-other-family": ({"subnet": "{net}.0/24", "gateway": "2001:db8::1"}, "address family"),
}


@pytest.mark.parametrize("case", BAD_RANGES)
async def test_a_bad_range_is_told_and_others_go_on(space, case):
    """[report-65] Refused by the API server, or Ready=False naming field and value; it is never
    told as exhausted, and another pool goes on serving."""
    given, words = BAD_RANGES[case]
    net = space.pooled(0).removesuffix(".0")
    item = {key: value.format(net=net) for key, value in given.items()}
    good = await space.pool(10, 11, name="good")

    try:
        bad = await space.pool(name="bad", ranges=[item])
    except Refused as error:
        told = error.message
    else:
        found = condition(await space.pool_is(bad, total=0))
        assert found["status"] == "False"
        told = found["message"]
    assert any(word in told for word in words.split("|")), told
    await space.balancer("web", ipPool=good)
    await space.becomes("web", "False", NO_BACKEND)


async def test_L23_overlapping_pools_never_give_one_address_twice(space):
    """A range that another pool has too is told, and whatever is given out is held once."""
    one = await space.pool(10, 12, name="one")
    two = await space.pool(11, 13, name="two")
    names = [f"lb{n}" for n in range(6)]

    await gather(
        *(space.balancer(name, ipPool=one if n % 2 else two) for n, name in enumerate(names))
    )
    for name in names:
        await space.becomes(name, "False")

    held = [address for address in (await space.leases(*names)).values() if address]
    assert sorted(held) == [space.pooled(n) for n in (10, 11, 12, 13)]
