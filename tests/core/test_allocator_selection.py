"""Which pools serve a request, in which order; the same answer however they are listed."""

import itertools

import pytest

from schema import objects
from schema.selection import Fit, Need, Rules, fit, permits, rank
from tests.core.allocating import EVERYWHERE, World


class Listed:
    def __init__(self, name, *scope, network="", priority=0):
        self.name = name
        selector = objects.PoolSelector(
            priority=priority,
            network=network,
            scope=[objects.PoolScope(project=p, namespace=n, guest_cluster=c) for p, n, c in scope],
        )
        self.view = objects.IPPool(
            metadata=objects.ObjectMeta(name=name), spec=objects.IPPoolSpec(selector=selector)
        )


ALL = ("*", "*", "*")
DEFAULT = Listed("default", ("*", "default", "*"), network="vlan10")
PREFERRED = Listed("defaultPriority", ("*", "default", "*"), network="vlan10", priority=100)
GLOBAL = Listed("global", ALL)
NO_SCOPE = Listed("noScope", ("", "default", ""))
WITH_SCOPE = Listed("withScope", ("project1", "default", "cluster1"))


@pytest.mark.parametrize(
    ("pools", "need", "expected"),
    [
        ([DEFAULT, GLOBAL], Need("vlan10", "", "default", ""), "default"),
        ([DEFAULT, GLOBAL], Need("vlan10", "", "test", ""), "global"),
        ([DEFAULT, GLOBAL], Need("vlan10", "unknown", "", "cluster1"), "global"),
        ([DEFAULT], Need("vlan10", "", "test", ""), None),
        ([DEFAULT], Need("vlan10", "unknown", "guest-cluster-1", "cluster1"), None),
        ([DEFAULT, PREFERRED], Need("vlan10", "", "default", ""), "defaultPriority"),
        ([WITH_SCOPE, NO_SCOPE], Need("", "project1", "default", "cluster1"), "withScope"),
        ([WITH_SCOPE, NO_SCOPE], Need("", "unknown", "default", "cluster1"), "noScope"),
        ([WITH_SCOPE, NO_SCOPE], Need("", "", "default", ""), "noScope"),
        ([DEFAULT, GLOBAL], Need("", "", "default", ""), "global"),
        ([NO_SCOPE, GLOBAL], Need("", "unknown", "default", "cluster1"), "noScope"),
    ],
)
def test_the_choice_does_not_depend_on_the_listing(pools, need, expected):
    """Harvester's selector tables; a loose fit goes before the global pool."""
    for order in itertools.permutations(pools):
        ranked = rank(order, need)
        assert (ranked[0][1].name if ranked else None) == expected


def test_the_order_is_total():
    """Fit, then priority, then name; never a tie."""
    pools = [
        Listed("z-exact", ("*", "ns", "*")),
        Listed("a-exact", ("*", "ns", "*")),
        Listed("b-exact-high", ("*", "ns", "*"), priority=5),
        Listed("a-loose-high", ("", "ns", ""), priority=50),
        Listed("a-global-high", ALL, priority=99),
        Listed("b-global", ALL),
        Listed("open", priority=1000),
    ]
    need = Need("", "p", "ns", "c")
    expected = ["b-exact-high", "a-exact", "z-exact", "a-loose-high", "a-global-high", "b-global"]
    for order in (pools, pools[::-1]):
        names = [pool.name for _, pool in rank(order, need, Rules(open_pools=True))]
        assert names == [*expected, "open"]
        assert [pool.name for _, pool in rank(order, need)] == expected


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ((("", "*", ""),), Fit.LOOSE),
        ((("p", "", ""),), Fit.LOOSE),
        ((("", "", ""),), None),
        ((("other", "*", ""),), None),
        ((("p", "*", "c"),), Fit.EXACT),
        ((ALL,), Fit.GLOBAL),
        ((ALL, ("p", "*", "*")), Fit.EXACT),
    ],
)
def test_an_empty_field_is_a_wildcard_or_nothing(scope, expected):
    """[harvester 7062, 9053] An item that was accepted also matches; an empty item never does."""
    assert fit(Listed("p", *scope).view, Need("", "p", "ns", "c")) == expected


def test_a_request_can_not_widen_itself():
    """A `*` in annotations is no wish: neither network nor cluster turn into a wildcard."""
    world = World()
    world.pool("p1", "192.0.2.0/29", scope=[objects.PoolScope(namespace="*", guest_cluster="c1")])
    stars = {
        "loadbalancer.harvesterhci.io/cluster": "*",
        "loadbalancer.harvesterhci.io/namespace": "*",
        "loadbalancer.harvesterhci.io/project": "*",
        "loadbalancer.harvesterhci.io/network": "*",
    }
    world.lb("a", annotations=stars, workload_type="cluster")
    assert world.refusal("loadbalancers", "a") == "NoMatchingPool"


def test_project_comes_from_the_namespace_object():
    """The annotation of the load balancer counts for nothing, that of its namespace does."""
    world = World()
    world.pool("p1", "192.0.2.0/29", scope=[objects.PoolScope(project="c-1/p-1", namespace="*")])
    world.namespace("default", "c-1:p-2")
    world.lb("a", annotations={"loadbalancer.harvesterhci.io/project": "c-1/p-1"})
    assert world.refusal("loadbalancers", "a") == "NoMatchingPool"
    assert "Project:c-1/p-2 Namespace:default" in world.message("loadbalancers", "a")
    world.namespace("default", "c-1:p-1")
    assert world.lb_address("a") == "192.0.2.2"


@pytest.mark.parametrize("reverse", [False, True], ids=["report-3", "report-3-reversed"])
@pytest.mark.parametrize("per_network", [False, True], ids=["any-network", "per-network"])
def test_a_scoped_pool_goes_before_the_global_one(reverse, per_network):
    """The scoped pool wins in both orders; the global pool serves another network only where the
    setting has it so, else the refusal names the network."""
    from services.allocator.core import Rules as AllocatorRules

    world = World(AllocatorRules(selection=Rules(global_per_network=per_network)))
    scoped = objects.PoolScope(namespace="default", project="*", guest_cluster="*")
    made = [
        lambda: world.pool("p-scoped", "192.0.2.0/27", scope=[scoped]),
        lambda: world.pool("p-global", "198.51.100.0/27", scope=[EVERYWHERE]),
    ]
    for make in reversed(made) if reverse else made:
        make()
    world.lb("a", annotations={"loadbalancer.harvesterhci.io/network": ""})
    world.lb("b", annotations={"loadbalancer.harvesterhci.io/network": "default/vlan200"})
    assert world.lb_address("a").startswith("192.0.2.")
    if per_network:
        assert world.refusal("loadbalancers", "b") == "NoMatchingPool"
        assert "Network:default/vlan200" in world.message("loadbalancers", "b")
    else:
        assert world.lb_address("b").startswith("198.51.100.")


def test_naming_a_pool_does_not_bypass_its_scope():
    """Unless the setting says so, as Harvester does."""
    others = Listed("p", ("*", "other", "*"))
    need = Need("", "", "default", "")
    assert not permits(others.view, need)
    assert permits(others.view, need, Rules(explicit_bypasses_scope=True))
    assert permits(Listed("p").view, need)
    assert permits(Listed("p", ALL, network="default/vlan9").view, need)


@pytest.mark.parametrize(
    ("annotations", "address"),
    [(None, ""), ({"loadbalancer.harvesterhci.io/network": "default/nad3"}, "192.0.2.2")],
    ids=["L10", "L11"],
)
def test_the_network_must_be_named(annotations, address):
    """A pool of a network serves those that name the network."""
    world = World()
    scope = objects.PoolScope(project="*", namespace="default", guest_cluster="*")
    world.pool("p1", "192.0.2.0/29", scope=[scope], network="default/nad3")
    world.lb("a", annotations=annotations)
    assert world.lb_address("a") == address
    if not address:
        assert world.message("loadbalancers", "a") == (
            "no matched IPPool with requirement &{Network: Project: Namespace:default Cluster:}"
        )
