"""The published plans for load balancers, as far as addresses go; ids are those of the plans."""

import pytest

from schema import objects
from schema.selection import Rules as Selection
from services.allocator.core import Rules
from services.allocator.core.legacy import convert
from tests.core.allocating import EVERYWHERE, World, granted, kinds

NETWORK = "loadbalancer.harvesterhci.io/network"


def pool_of(*names):
    """A pool with as many addresses as names, and load balancers of these names."""
    world = World()
    world.pool("p1", f"192.0.2.0/24 192.0.2.10-192.0.2.{9 + len(names)}")
    for name in names:
        world.lb(name)
    return world


@pytest.mark.parametrize(
    ("spec", "decided", "address"),
    [({}, "LeaseGranted", "192.0.2.10"), ({"ipam": "dhcp"}, "AddressDelegated", "")],
    ids=["S1a", "S1b"],
)
def test_an_address_before_there_is_a_backend(spec, decided, address):
    """Booked at once, or left to the announcer."""
    world = World()
    world.pool("p1", "192.0.2.0/24 192.0.2.10-192.0.2.12")
    selector = {"vmName": ["none"]}
    assert kinds(world.lb("a", backend_server_selector=selector, **spec)) == [decided]
    assert world.lb_address("a") == address


def test_S3a_as_many_as_there_are():
    """n load balancers for n addresses: all different, none left."""
    world = pool_of(*"abcdef")
    assert len({world.lb_address(name) for name in "abcdef"}) == 6
    assert world.account()["p1"].available == 0


def test_S3b_one_more_is_refused_in_the_known_words():
    world = pool_of(*"abc")
    (refused,) = world.lb("d")
    assert refused.message.startswith(
        "fail to get ip from pool p1, error: no IP addresses available in range set: "
        "192.0.2.10-192.0.2.12"
    )


def test_S3c_a_deletion_serves_who_waits_at_once():
    world = pool_of(*"abc")
    world.lb("d")
    assert granted(world.gone("loadbalancers", "b")) == {"d": "192.0.2.11"}


@pytest.mark.parametrize(
    ("taken", "address"), [(False, "192.0.2.11"), (True, "192.0.2.12")], ids=["S3d", "S3e"]
)
def test_created_again_under_the_same_name(taken, address):
    """The old address while it is free, else another one."""
    world = pool_of(*"abc")
    world.gone("loadbalancers", "c")
    world.gone("loadbalancers", "b")
    if taken:
        world.lb("thief", address="192.0.2.11")
    world.lb("b", uid="another")
    assert world.lb_address("b") == address


def test_S3g_without_a_named_pool():
    """Ten that leave the choice to us: none is refused for the lack of a name."""
    world = pool_of(*(f"lb{n}" for n in range(10)))
    assert not any(world.refusal("loadbalancers", f"lb{n}") for n in range(10))


@pytest.mark.parametrize(
    ("before", "after", "address"),
    [
        ("", "pool", "192.0.2.10"),
        ("pool", "", "192.0.2.10"),
        ("dhcp", "pool", "192.0.2.10"),
        ("pool", "dhcp", ""),
        ("", "dhcp", ""),
    ],
    ids=lambda value: f"L1-{value}" if not value[:1].isdigit() else "",
)
def test_another_way_to_an_address(before, after, address):
    """Where no admission forbids the change, lease and request agree after it."""
    world = World()
    world.pool("p1", "192.0.2.0/24 192.0.2.10-192.0.2.10")
    world.lb("a", ipam=before)
    world.lb("a", ipam=after)
    assert world.lb_address("a") == address
    assert world.account()["p1"].available == (0 if address else 1)


@pytest.mark.parametrize("per_network", [False, True], ids=["L18", "L18-reverted-variant"])
def test_a_global_pool_of_another_network(per_network):
    """It serves whoever has no pool of his own, unless each network is to keep to itself."""
    world = World(Rules(selection=Selection(global_per_network=per_network)))
    world.pool("all", "192.0.2.0/24", scope=[EVERYWHERE], network="default/vlan1")
    world.lb("a", annotations={NETWORK: "default/vlan2"}, workload_type="cluster")
    assert bool(world.lb_address("a")) != per_network


def test_L20_the_namespace_goes_before_the_global_pool():
    world = World()
    world.pool("all", "198.51.100.0/24", priority=99)
    scope = objects.PoolScope(project="*", namespace="default", guest_cluster="*")
    world.pool("own", "192.0.2.0/24", scope=[scope])
    world.lb("a")
    assert world.lb_address("a") == "192.0.2.2"


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ("10.9.0.0/24", 253),
        ("10.9.0.0/24 10.9.0.200-", 55),
        ("10.9.0.0/24 -10.9.0.20", 19),
        ("10.9.0.0/24 10.9.0.10-10.9.0.20", 11),
        ("10.9.0.0/24 10.9.0.10-10.9.0.20 10.9.0.15", 10),
        ("10.9.0.7/32", 1),
    ],
    ids=lambda value: f"L23-{value}",
)
def test_the_forms_of_a_pool(text, total):
    world = World()
    world.pool("p1", text)
    assert (world.account()["p1"].total, world.state.pools["p1"].reason) == (total, "")


SERVICES = '{"services":[{"vip":"%s","serviceName":"a"}]}'


@pytest.mark.parametrize(
    ("data", "pools", "histories"),
    [
        (
            {
                "cidr-default": "10.0.0.0/24",
                "cidr-ns1": "10.1.0.0/24,10.2.0.0/24",
                "range-ns-2": "10.3.0.1-10.3.0.14,10.3.0.33-10.3.0.62",
                "kubevip-services": SERVICES % "10.0.0.9",
            },
            {
                "default": ["10.0.0.0/24"],
                "ns1": ["10.1.0.0/24", "10.2.0.0/24"],
                "ns-2": ["10.3.0.0/28", "10.3.0.32/27"],
            },
            {"default": {"10.0.0.9": "default/a"}},
        ),
        (
            {
                "cidr-default": "10.0.0.0/24",
                "cidr-global": "10.1.0.0/24",
                "kubevip-services": SERVICES % "10.1.0.9",
            },
            {"global": ["10.1.0.0/24"], "default": ["10.0.0.0/24"]},
            {"global": {"10.1.0.9": "default/a"}},
        ),
        (
            {"cidr-global": "10.1.0.0/24", "kubevip-services": SERVICES % "0.0.0.0"},
            {"global": ["10.1.0.0/24"]},
            {},
        ),
        (
            {"cidr-ns1": "10.1.0.0/24", "kubevip-services": SERVICES % "10.1.0.9"},
            {"ns1": ["10.1.0.0/24"]},
            {},
        ),
    ],
    ids=["K1", "K2", "K3-by-dhcp", "K3-of-another"],
)
def test_the_import_of_the_old_config_map(data, pools, histories):
    """Pools by namespace, ranges as their smallest subnets, and who had which address."""
    imported, problems = convert(data, "default")
    assert not problems
    assert {p.name: [r.subnet for r in p.spec.ranges or []] for p in imported} == pools
    assert {p.name: p.history for p in imported if p.history} == histories
