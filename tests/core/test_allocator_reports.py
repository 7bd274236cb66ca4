"""What the field complained about in address management, each settled; the ids carry the report."""

import random
import sys
from datetime import timedelta

import pytest

from schema import events, objects
from services.allocator.core import Rules
from tests.core.allocating import START, World, granted, kinds, reborn, shown

AT_ONCE = Rules(retire=timedelta(0))
DUAL = {"ip_families": ["IPv4", "IPv6"]}


def released(decisions):
    return [(e.owner.name, e.address) for e in decisions if isinstance(e, events.LeaseReleased)]


def test_a_release_finds_its_lease_by_uid():
    """[report-2] The status never said which pool was chosen; the deletion frees the address."""
    world = World()
    world.pool("p1", "192.0.2.8/29 192.0.2.10-192.0.2.11")
    world.lb("web")
    assert world.lb_address("web") == "192.0.2.10"
    world.gone("loadbalancers", "web", reason="vanished")
    assert world.account()["p1"].available == 2
    world.lb("other", address="192.0.2.10")
    assert world.lb_address("other") == "192.0.2.10"


def test_changing_to_dhcp_gives_the_address_back():
    """[report-4] Never dhcp while the lease stays: the address goes to whoever waits."""
    world = World()
    world.pool("p1", "192.0.2.8/29 192.0.2.10-192.0.2.12")
    for name in "abcd":
        world.lb(name)
    assert world.refusal("loadbalancers", "d") == "PoolExhausted"
    out = world.lb("a", ipam="dhcp")
    assert kinds(out) == ["LeaseReleased", "AddressDelegated", "LeaseGranted"]
    assert world.lb_address("d") == "192.0.2.10"
    assert world.lb_address("a") == ""
    out = world.lb("a", ipam="pool")
    assert kinds(out) == ["LeaseRefused"]


def test_a_dangling_lease_is_reclaimed_after_the_grace_period():
    """[report-5] An owner that a complete list lacks loses its lease when the time is over, with
    its reason in the log; one that comes back in time keeps it."""
    world = World(Rules(grace=timedelta(seconds=60)))
    world.pool("p1", "192.0.2.5/32")
    world.lb("web", uid="u1")
    world.gone("loadbalancers", "web", reason="vanished")
    world.lb("web2")
    assert world.refusal("loadbalancers", "web2") == "PoolExhausted"
    assert world.tick(30) == []
    world.lb("web", uid="u1")
    assert world.tick(60) == []
    assert world.lb_address("web") == "192.0.2.5"
    world.gone("loadbalancers", "web", reason="vanished")
    out = world.tick(61)
    assert [type(e).__name__ for e in out] == ["LeaseReleased", "LeaseGranted"]
    assert out[0].reason == "reclaimed"
    assert world.lb_address("web2") == "192.0.2.5"


def test_nothing_is_decided_before_the_lists_are_complete():
    """[report-7] A newcomer that arrives while the list is loading takes nobody's address."""
    world = World(synced=False)
    world.pool("p1", "192.0.2.0/29 192.0.2.2-192.0.2.3")
    assert world.svc("c") == []
    assert world.sync("ippools", "namespaces", "loadbalancers") == []
    assert world.svc("a", ingress=["192.0.2.2"]) == []
    assert world.svc("b", ingress=["192.0.2.3"]) == []
    out = world.sync("services")
    assert kinds(out) == ["LeaseAdopted", "LeaseAdopted", "LeaseRefused"]
    assert granted(out) == {"a": "192.0.2.2", "b": "192.0.2.3"}
    assert world.refusal("services", "c") == "PoolExhausted"


def test_a_deletion_changes_nobody_else():
    """[report-9] A dual-stack Service with one cluster address got one address, and keeps it."""
    world = World()
    world.pool("p1", "192.0.2.0/29", "2001:db8::/125")
    single = {"ip_family_policy": "PreferDualStack", "cluster_ips": ["10.0.0.1"]}
    world.svc("a", **single)
    world.svc("b", **single)
    assert world.addresses("services", "a") == ["192.0.2.2"]
    assert released(world.gone("services", "b")) == [("b", "192.0.2.3")]
    world.new_epoch("e2")
    for (plural, _, _), obj in list(world.objects.items()):
        world.feed(events.SEEN[plural](at=world.at(), object=obj))
    assert world.sync() == []
    assert world.addresses("services", "a") == ["192.0.2.2"]


@pytest.mark.parametrize(
    ("policy", "addresses", "reason"),
    [
        ("PreferDualStack", ["192.0.2.10"], "FamilyUnavailable"),
        ("RequireDualStack", [], "FamilyUnavailable"),
    ],
    ids=["report-10-prefer", "report-10-require"],
)
def test_dual_stack_with_one_family_available(policy, addresses, reason):
    """Preferring degrades with a note; requiring is all or nothing, and leaks not one address."""
    world = World()
    world.pool("p1", "192.0.2.8/29 192.0.2.10-192.0.2.11")
    world.svc("a", ip_family_policy=policy, **DUAL)
    assert world.addresses("services", "a") == addresses
    assert world.refusal("services", "a") == reason
    assert "IPv6" in world.message("services", "a")
    assert world.account()["p1"].available == 2 - len(addresses)
    world.pool("p1", "192.0.2.8/29 192.0.2.10-192.0.2.11", "2001:db8::/126")
    assert world.addresses("services", "a") == ["192.0.2.10", "2001:db8::2"]
    assert world.refusal("services", "a") == ""


def test_both_families_from_one_pool_where_there_is_one():
    """[report-10] A pool with both goes before two pools with one each."""
    world = World()
    world.pool("a4", "192.0.2.0/29")
    world.pool("b6", "2001:db8::/126")
    world.pool("c46", "198.51.100.0/29", "2001:db8:1::/126")
    world.svc("s", ip_family_policy="RequireDualStack", **DUAL)
    assert world.addresses("services", "s") == ["198.51.100.2", "2001:db8:1::2"]


def test_retyping_a_service_frees_its_address():
    """[report-11] Type changes free and do not bring back: whoever holds it now keeps it."""
    world = World()
    world.pool("p1", "192.0.2.3/32")
    world.svc("a")
    out = world.svc("a", kind="ClusterIP", ingress=["192.0.2.3"])
    assert released(out) == [("a", "192.0.2.3")]
    world.svc("b")
    assert world.svc_address("b") == "192.0.2.3"
    world.svc("a", ingress=["192.0.2.3"])
    assert world.svc_address("a") == ""
    assert world.refusal("services", "a") == "PoolExhausted"


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("192.0.2.111", "not in range set"),
        ("192.0.2.1", "is subnet's gateway"),
        ("192.0.2.0", "is the network address"),
        ("192.0.2.6", "is excluded"),
        ("192.0.2.2", "is held by loadbalancers/default/holder"),
        ("192.0.2.999", "invalid IP"),
    ],
    ids=lambda value: f"report-12-{value}" if value[0].isdigit() else "",
)
def test_an_address_asked_for_is_given_or_refused(address, why):
    """No silent substitute; the refusal names the address and what stands against it."""
    world = World()
    world.pool("p1", "192.0.2.0/29", exclude=["192.0.2.6"])
    world.lb("holder")
    world.lb("web", address=address)
    assert world.lb_address("web") == ""
    assert world.refusal("loadbalancers", "web") in (
        "RequestedAddressUnavailable",
        "InvalidRequest",
    )
    assert why in world.message("loadbalancers", "web")
    assert address in world.message("loadbalancers", "web")


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ("192.0.2.4/30", 1),
        ("192.0.2.8/31", 2),
        ("192.0.2.12/32", 1),
        ("192.0.2.16/29 - 192.0.2.17", 5),
        ("2001:db8::/126", 2),
        ("2001:db8::/127", 2),
    ],
    ids=lambda value: f"report-13-{value}",
)
def test_the_total_is_what_can_be_had(text, total):
    """Allocating to exhaustion gives exactly `total`; available ends at zero, never below."""
    world = World()
    world.pool("p1", text)
    names = [f"lb{n}" for n in range(total + 2)]
    for name in names:
        world.lb(name)
    assert len({world.lb_address(name) for name in names} - {""}) == total
    account = world.account()["p1"]
    assert (account.total, account.available, account.waiting) == (total, 0, 2)


def test_an_ipv6_address_of_a_mixed_pool():
    """[report-14] In any spelling, once; a mapped address is no second lease of the IPv4 one."""
    world = World()
    world.pool("p1", "192.0.2.0/29", "2001:db8::/125")
    world.lb("v6", address="2001:db8:0:0::3")
    assert world.lb_address("v6") == "2001:db8::3"
    world.lb("twin", address="2001:0db8::0003")
    assert "is held by" in world.message("loadbalancers", "twin")
    world.lb("v4m", address="::ffff:192.0.2.4")
    assert world.lb_address("v4m") == "192.0.2.4"
    world.lb("v4", address="192.0.2.4")
    assert world.refusal("loadbalancers", "v4") == "RequestedAddressUnavailable"


def test_the_gateway_is_never_given_out_and_may_move_onto_a_lease():
    """[report-15] A gateway that moves onto a leased address takes nothing from its holder, and
    says so; the rest of the pool goes on."""
    world = World()
    range_ = "192.0.2.0/29 192.0.2.1-192.0.2.6 "
    world.pool("p1", range_ + "192.0.2.1")
    for name in "abcdef":
        world.lb(name)
    assert world.refusal("loadbalancers", "f") == "PoolExhausted"
    assert world.account()["p1"].total == 5
    world.pool("p1", range_ + "192.0.2.3")
    assert world.lb_address("b") == "192.0.2.3"
    assert world.refusal("loadbalancers", "b") == "AddressOutsidePool"
    assert world.lb_address("f") == "192.0.2.1"
    world.gone("loadbalancers", "b")
    world.lb("g", address="192.0.2.3")
    assert "gateway" in world.message("loadbalancers", "g")


@pytest.mark.parametrize("first", ["ippools", "services"], ids=["report-16-pool", "report-16-svc"])
def test_pool_and_service_deleted_together(first):
    """No lease is left in either order; a new pool wakes who waits, a deleting one does not."""
    world = World()
    world.pool("p1", "192.0.2.224/28 192.0.2.230-192.0.2.231")
    world.svc("a")
    order = [("ippools", "p1"), ("services", "a")]
    for plural, name in order if first == "ippools" else order[::-1]:
        world.gone(plural, name)
    assert not world.state.strays
    world.svc("b")
    assert world.refusal("services", "b") == "NoMatchingPool"
    world.pool("p3", "192.0.2.241/32", deletion_timestamp=START)
    assert world.svc_address("b") == ""
    world.pool("p2", "192.0.2.240/32")
    assert world.svc_address("b") == "192.0.2.240"


def test_the_same_pool_without_status_decides_nothing():
    """[report-60] A save without status, a status write of ours: no decision, the same account."""
    world = World()
    world.pool("p1", "192.0.2.9/32")
    world.lb("a")
    account = world.account()["p1"]
    assert (account.total, account.available, account.ready) == (1, 0, True)
    assert world.pool("p1", "192.0.2.9/32", status=objects.IPPoolStatus()) == []
    status = objects.IPPoolStatus(total=1, allocated={"192.0.2.9": "default/a"})
    assert world.pool("p1", "192.0.2.9/32", status=status) == []
    assert world.account() == {}


def test_foreign_fields_in_the_ingress_are_no_news():
    """[report-62] What others add to a status we look at leads to no decision, however often."""
    world = World()
    world.pool("p1", "192.0.2.0/29")
    world.svc("a")
    for n in range(20):
        assert world.svc("a", ingress=["192.0.2.2"] * (n % 2 + 1)) == []


def test_a_new_object_inherits_the_address_and_nothing_else():
    """[report-63] [report-38] Deleted and created again under one name: the old uid's lease ends,
    the new one starts clean, and gets the same address."""
    world = World()
    world.pool("p1", "192.0.2.0/29")
    world.lb("blocker")
    world.lb("web", uid="u-old")
    out = world.lb("web", uid="u-new")
    assert kinds(out) == ["LeaseReleased", "LeaseGranted"]
    assert (out[0].owner.uid, out[1].owner.uid) == ("u-old", "u-new")
    assert out[0].address == out[1].address == "192.0.2.3"
    assert out[1].rule == "returning"


def test_the_refusal_names_the_full_pool_once():
    """[report-68] PoolExhausted with the pool and its numbers; no other pool steps in silently;
    the same is not said again."""
    world = World()
    world.pool("p1", "192.0.2.2/32")
    world.pool("p2", "192.0.2.10/32")
    world.lb("a", ip_pool="p1")
    out = world.lb("b", ip_pool="p1")
    assert [(e.reason, e.pool) for e in out] == [("PoolExhausted", "p1")]
    assert "(total=1 available=0)" in out[0].message
    assert out[0].message.startswith(
        "fail to get ip from pool p1, error: no IP addresses available in range set: "
        "192.0.2.2-192.0.2.2"
    )
    assert world.lb("b", ip_pool="p1") == []
    assert world.pool("p1", "192.0.2.2/32", description="edited") == []


def test_a_load_balancer_without_backends_gets_its_address():
    """[report-69] Backends are nobody's business here: the address comes at once."""
    world = World()
    world.pool("p1", "192.0.2.0/29")
    out = world.lb("later", backend_server_selector={"vmName": ["vm9"]})
    assert granted(out) == {"later": "192.0.2.2"}


def test_overlapping_pools_never_give_one_address_twice():
    """[metallb 1591] The pool of a holder is deleted and one that overlaps it made."""
    world = World()
    world.pool("a", "192.0.2.0/30")
    world.svc("svc1")
    out = world.gone("ippools", "a")
    assert [e.reason for e in out] == ["AddressOutsidePool"]
    world.pool("b", "192.0.2.0/29 192.0.2.2-192.0.2.3")
    world.svc("svc2")
    world.svc("svc3")
    assert world.svc_address("svc1") == "192.0.2.2"
    assert world.svc_address("svc2") == "192.0.2.3"
    assert world.refusal("services", "svc3") == "PoolExhausted"
    world.gone("services", "svc1")
    assert world.svc_address("svc3") == "192.0.2.2"


def share(key="k", policy="Cluster", **spec):
    return {
        "annotations": {"lbledger.io/allow-shared-ip": key, **spec.pop("annotations", {})},
        "external_traffic_policy": policy,
        **spec,
    }


def test_sharing_ends_and_resumes_with_the_policy():
    """[metallb 2403] [cilium 34783] Sharers part when their policies differ, and meet again when
    they agree, without a restart."""
    world = World()
    world.pool("p1", "192.0.2.0/29")
    wish = {"annotations": {"lbledger.io/address": "192.0.2.4"}}
    world.svc("a", ports=["TCP/80"], **share(**wish))
    world.svc("b", ports=["TCP/443"], **share(**wish))
    assert world.svc_address("a") == world.svc_address("b") == "192.0.2.4"
    world.svc("a", ports=["TCP/80"], selector={"x": "1"}, **share(policy="Local", **wish))
    assert world.svc_address("a") == ""
    world.svc("b", ports=["TCP/443"], selector={"x": "1"}, **share(policy="Local", **wish))
    assert world.svc_address("a") == world.svc_address("b") == "192.0.2.4"


def test_who_may_share():
    """The same key in one namespace with other ports or another protocol; nobody else."""
    world = World()
    world.pool("p1", "192.0.2.0/28")
    world.svc("a", ports=["TCP/80"], **share())
    world.svc("udp", ports=["UDP/80"], **share())
    world.svc("same-port", ports=["TCP/80"], **share())
    world.svc("other-key", ports=["TCP/81"], **share("k2"))
    world.svc("no-key", ports=["TCP/82"])
    world.svc("abroad", "elsewhere", ports=["TCP/83"], **share())
    assert world.svc_address("udp") == world.svc_address("a")
    others = [world.svc_address(n) for n in ("same-port", "other-key", "no-key")]
    others.append(world.svc_address("abroad", "elsewhere"))
    assert world.svc_address("a") not in others
    assert len(set(others)) == 4
    assert world.account()["p1"].available == 13 - 5
    world.gone("services", "a")
    assert world.svc_address("udp") == "192.0.2.2"
    world.gone("services", "udp")
    assert world.account()["p1"].available == 13 - 4


@pytest.mark.parametrize("field", ["pool", "address"])
def test_a_live_owner_moves_or_learns_why_not(field):
    """[metallb 448] [openelb 426] Another pool or address: made before the old one goes, which it
    does when the status shows the new one; a full target keeps the old and says why."""
    world = World()
    world.pool("p1", "192.0.2.0/29")
    world.pool("p2", "198.51.100.5/32")
    target = {"ip_pool": "p2"} if field == "pool" else {"address": "198.51.100.5"}
    world.lb("web", ip_pool="" if field == "address" else "p1")
    assert granted(world.lb("web", **target)) == {"web": "198.51.100.5"}
    assert world.addresses("loadbalancers", "web") == ["192.0.2.2", "198.51.100.5"]
    status = objects.LoadBalancerStatus(address="192.0.2.2")
    assert world.lb("web", status=status, **target) == []
    status = objects.LoadBalancerStatus(address="198.51.100.5")
    assert released(world.lb("web", status=status, **target)) == [("web", "192.0.2.2")]
    world.lb("late", ip_pool="p1" if field == "pool" else "")
    out = world.lb("late", **target)
    assert [(type(e).__name__, e.kept) for e in out] == [("LeaseRefused", "192.0.2.3")]
    world.gone("loadbalancers", "web")
    assert world.lb_address("late") == "192.0.2.3"
    assert world.addresses("loadbalancers", "late")[1:] == ["198.51.100.5"]


def test_a_move_that_nobody_shows_ends_by_itself():
    """Without a status that shows the new address the old one goes when its time is over."""
    world = World(Rules(retire=timedelta(seconds=60)))
    world.pool("p1", "192.0.2.0/29")
    world.pool("p2", "198.51.100.5/32")
    world.lb("web", ip_pool="p1")
    world.lb("web", ip_pool="p2")
    assert world.tick(30) == []
    assert released(world.tick(40)) == [("web", "192.0.2.2")]


def test_one_address_serves_one_namespace():
    """[kube-vip 400] Addresses of a global pool are unique in the cluster."""
    world = World()
    world.pool("global", "192.0.2.0/29")
    world.lb("a", "one")
    world.lb("a", "two")
    assert world.lb_address("a", "one") != world.lb_address("a", "two")


def test_contradicting_hints_give_one_answer():
    """[openelb 322] A pool and an address outside it: refused, always for the same reason."""
    world = World()
    world.pool("p1", "192.0.2.0/29")
    world.pool("p2", "198.51.100.0/29")
    for _ in range(3):
        world.lb("a", ip_pool="p1", address="198.51.100.3")
        assert world.lb_address("a") == ""
        assert "pool p1" in world.message("loadbalancers", "a")
    assert len([e for e in world.decisions if isinstance(e, events.LeaseRefused)]) == 1


def test_reuse_prefers_never_used_then_longest_released():
    """Others' hints survive longest; the same name gets its address back while it is free."""
    world = World()
    world.pool("p1", "192.0.2.0/29")  # .2 to .6
    for name in "abc":
        world.lb(name)
    world.gone("loadbalancers", "b")
    world.gone("loadbalancers", "a")
    assert granted(world.lb("d")) == {"d": "192.0.2.5"}
    assert granted(world.lb("e")) == {"e": "192.0.2.6"}
    assert granted(world.lb("a")) == {"a": "192.0.2.2"}  # its own, back
    assert granted(world.lb("f")) == {"f": "192.0.2.3"}
    assert kinds(world.lb("b")) == ["LeaseRefused"]  # its own is taken, nothing else is free


def test_cooling_addresses_wait_for_strangers_only():
    """A freed address goes to its old owner at once, to others when its caches had their time."""
    world = World(Rules(cooldown=timedelta(seconds=30)))
    world.pool("p1", "192.0.2.2/32")
    world.lb("a")
    world.lb("b")
    world.gone("loadbalancers", "a")
    assert world.lb_address("b") == ""
    assert world.account()["p1"].available == 0
    world.lb("a")
    assert world.lb_address("a") == "192.0.2.2"
    world.gone("loadbalancers", "a")
    assert world.tick(29) == []
    assert granted(world.tick(2)) == {"b": "192.0.2.2"}


def test_quotas_hold_and_wake():
    """At most so many for a namespace; a release or a raise wakes who waits, in order."""
    world = World()
    quotas = [objects.PoolQuota(namespace="*", limit=1)]
    world.pool("p1", "192.0.2.0/28", quotas=quotas)
    for name in "abc":
        world.lb(name)
    world.lb("x", "elsewhere")
    assert world.lb_address("x", "elsewhere")
    assert world.refusal("loadbalancers", "b") == "QuotaExceeded"
    world.gone("loadbalancers", "a")
    assert world.lb_address("b")
    assert not world.lb_address("c")
    world.pool("p1", "192.0.2.0/28", quotas=[objects.PoolQuota(namespace="*", limit=2)])
    assert world.lb_address("c")


def test_overflow_is_a_setting():
    """An exhausted pool hands over to the next that fits, only where that is switched on."""
    for overflow in (False, True):
        world = World(Rules(overflow=overflow))
        world.pool("p1", "192.0.2.2/32", priority=1)
        world.pool("p2", "192.0.2.10/32")
        world.lb("a")
        world.lb("b")
        assert world.lb_address("b") == ("192.0.2.10" if overflow else "")


def test_waiting_owners_are_served_in_the_order_of_asking():
    """First come first served, whatever frees the capacity."""
    world = World()
    world.pool("p1", "192.0.2.2/32")
    names = [f"lb{n}" for n in range(6)]
    for name in names:
        world.lb(name)
    world.gone("loadbalancers", "lb0")
    assert world.lb_address("lb1")
    served = granted(world.pool("p1", "192.0.2.0/29 192.0.2.2-192.0.2.4"))
    assert list(served) == ["lb2", "lb3"]
    world.pool("p1", "192.0.2.0/29 192.0.2.2-192.0.2.4", exclude=["192.0.2.3"])
    assert world.lb_address("lb2")
    assert granted(world.gone("loadbalancers", "lb3")) == {"lb4": "192.0.2.4"}


def test_adoption_conflicts_are_decided_by_rule_and_told_to_both():
    """The one that the pool's status names keeps the address, else the older object."""
    world = World(synced=False)
    world.pool(
        "p1", "192.0.2.0/29", status=objects.IPPoolStatus(allocated={"192.0.2.5": "default/b"})
    )
    world.lb("old", status=shown("192.0.2.4", "p1"), created=START)
    world.lb("young", status=shown("192.0.2.4", "p1"), created=START + timedelta(days=1))
    world.lb("a", status=shown("192.0.2.5", "p1"), created=START)
    world.lb("b", status=shown("192.0.2.5", "p1"), created=START + timedelta(days=1))
    out = world.sync()
    assert world.lb_address("old") == "192.0.2.4"
    assert world.lb_address("b") == "192.0.2.5"
    contested = {(e.owner.name, e.kept) for e in out if isinstance(e, events.AddressContested)}
    assert contested == {("old", True), ("young", False), ("b", True), ("a", False)}
    assert len({world.lb_address(n) for n in ("old", "young", "a", "b")}) == 4


def test_history_of_the_cluster_becomes_memory():
    """allocatedHistory gives a name its old address, also on an empty database."""
    world = World(synced=False)
    history = objects.IPPoolStatus(allocated_history={"192.0.2.5": "default/web", "x": "y/z"})
    world.pool("p1", "192.0.2.0/29", status=history)
    world.sync()
    assert granted(world.lb("other")) == {"other": "192.0.2.2"}
    assert granted(world.lb("web")) == {"web": "192.0.2.5"}


@pytest.mark.parametrize("address", ["192.0.2.2", "2001:db8::2"], ids=["L7-v4", "L7-v6"])
def test_manual_release_of_a_leaked_booking(address):
    """A booking without its load balancer goes on request, IPv6 too, and that is answered."""
    world = World(Rules(grace=timedelta(days=1)))
    world.pool("p1", "192.0.2.0/29", "2001:db8::/126")
    world.lb("web", address=address)
    world.gone("loadbalancers", "web", reason="vanished")
    annotations = {"loadbalancer.harvesterhci.io/manuallyReleaseIP": f"{address}: default/web"}
    out = world.pool("p1", "192.0.2.0/29", "2001:db8::/126", annotations=annotations)
    assert released(out) == [("web", address)]
    answer = out[-1]
    assert isinstance(answer, events.ReleaseAnswered)
    assert answer.released


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ("192.0.2.2: default/web", "still exists"),
        ("192.0.2.2: default/other", "has no booking"),
        ("192.0.2.3: default/web", "has no booking"),
        ("192.0.2.2 default/web", "write it as"),
        ("nonsense: default/web", "invalid IP"),
    ],
    ids=lambda value: f"L8-{value}" if ":" in value or "/" in value else "",
)
def test_manual_release_that_does_nothing_says_why(request_, why):
    """Nothing is released, once, and the answer tells what stands against it."""
    world = World()
    world.pool("p1", "192.0.2.0/29")
    world.lb("web")
    annotations = {"loadbalancer.harvesterhci.io/manuallyReleaseIP": request_}
    out = world.pool("p1", "192.0.2.0/29", annotations=annotations)
    assert kinds(out) == ["ReleaseAnswered"]
    assert not out[0].released
    assert why in out[0].message
    assert world.pool("p1", "192.0.2.0/29", annotations=annotations) == []
    assert world.lb_address("web") == "192.0.2.2"


def guest(service="web", cluster="gc1"):
    return {
        "workload_type": "cluster",
        "labels": {
            "cloudprovider.harvesterhci.io/cluster": cluster,
            "cloudprovider.harvesterhci.io/serviceNamespace": "default",
            "cloudprovider.harvesterhci.io/serviceName": service,
        },
        "annotations": {"loadbalancer.harvesterhci.io/cluster": cluster},
    }


def vm(world, *, teardown="true", creator="docker-machine-driver-harvester", cluster="gc1"):
    meta = world.meta(
        "node-1",
        "default",
        deletion_timestamp=START,
        labels={"harvesterhci.io/creator": creator, "guestcluster.harvesterhci.io/name": cluster},
        annotations={"harvesterhci.io/removeAllPersistentVolumeClaims": teardown},
    )
    return world.see(objects.VirtualMachine(metadata=meta))


@pytest.mark.parametrize(
    ("kwargs", "condemned"),
    [
        ({}, {"a", "b"}),
        ({"teardown": "false"}, set()),
        ({"creator": ""}, set()),
        ({"cluster": ""}, set()),
        ({"cluster": "gc2"}, {"other"}),
    ],
    ids=["L15-removed", "no-annotation", "no-guest", "no-name", "another"],
)
def test_a_removed_guest_cluster_takes_its_tickets_along(kwargs, condemned):
    """Only cluster load balancers of that cluster, once; each machine of it may say so."""
    world = World()
    world.pool("p1", "192.0.2.0/28")
    world.lb("a", **guest("a"))
    world.lb("b", **guest("b"))
    world.lb("other", **guest("a", "gc2"))
    world.lb("vm-type", labels=guest()["labels"])
    out = vm(world, **kwargs)
    assert {e.owner.name for e in out} == condemned
    assert vm(world, **kwargs) == []


def test_an_orphan_of_an_older_guest_service_is_condemned():
    """[harvester 11345] The guest Service was created again: the older ticket goes, the newer and
    those of other Services stay."""
    world = World()
    world.pool("p1", "192.0.2.0/28")
    world.lb("web-1", created=START, **guest())
    world.lb("shop-1", created=START, **guest("shop"))
    out = world.lb("web-2", created=START + timedelta(hours=1), **guest())
    assert kinds(out) == ["LeaseGranted", "OwnerCondemned"]
    assert out[1].owner.name == "web-1"


def config(data, annotations=None):
    meta = objects.ObjectMeta(
        name="kubevip", namespace="kube-system", uid="cm", annotations=annotations
    )
    return objects.ConfigMap(metadata=meta, data=data)


def test_pools_of_the_old_config_map_are_imported_once():
    """[L22] Readable entries become pools with their history, the global one first; the others
    are named; a second sight, or a converted map, imports nothing."""
    data = {
        "cidr-default": "10.0.0.0/24",
        "cidr-global": "10.1.0.0/24",
        "range-kube-system": "10.2.0.3-10.2.0.9,10.2.0.33-10.2.0.40",
        "range-bad": "10.3.0.9",
        "cidr-worse": "10.3.0.0/99",
        "other": "x",
        "kubevip-services": '{"services":[{"vip":"10.2.0.5","serviceName":"a"},'
        '{"vip":"10.1.0.7","serviceName":"b"},{"vip":"0.0.0.0","serviceName":"c"},'
        '{"vip":"172.16.0.1","serviceName":"d"}]}',
    }
    world = World()
    (out,) = world.see(config(data))
    assert [pool.name for pool in out.pools] == ["global", "default", "kube-system"]
    subnets = [item.subnet for item in out.pools[2].spec.ranges]
    assert subnets == ["10.2.0.0/28", "10.2.0.32/28"]
    assert out.pools[2].history == {"10.2.0.5": "kube-system/a"}
    assert out.pools[0].history == {"10.1.0.7": "kube-system/b"}
    assert [p.partition(":")[0] for p in out.problems] == ["cidr-worse", "other", "range-bad"]
    assert world.see(config(data)) == []
    done = {"loadbalancer.harvesterhci.io/after-conversion": "true"}
    assert World().see(config(data, done)) == []


def test_loose_match_for_guest_clusters():
    """[L12] A pool with only a namespace in its scope serves a guest cluster's load balancer."""
    world = World()
    world.namespace("default", "c:p1")
    world.pool("p1", "192.0.2.0/29", scope=[objects.PoolScope(namespace="default")])
    world.lb("a", **guest())
    assert world.lb_address("a") == "192.0.2.2"


def test_a_tight_loop_under_one_name():
    """[S3f] Created and deleted again and again: one address, never stuck, nothing leaks."""
    world = World()
    world.pool("p1", "192.0.2.0/29")
    for n in range(200):
        assert granted(world.lb("web", uid=f"u{n}")) == {"web": "192.0.2.2"}
        if n % 3:
            world.gone("loadbalancers", "web")
    assert world.account()["p1"].available >= 4


def test_a_deleting_owner_without_address_is_no_trouble():
    """[L21] Missing pool, DHCP or exhausted pool: the deletion leaves nothing behind."""
    world = World()
    world.lb("missing", ip_pool="nope")
    world.lb("dhcp", ipam="dhcp")
    for name in ("missing", "dhcp"):
        assert world.gone("loadbalancers", name) == []
    assert not list(world.state.all_owners())
    assert not len(world.state.queues)


def test_who_asked_first_is_served_first_whatever_he_waits_for():
    """Owners of several namespaces, with and without a named pool, for whom no pool was there: the
    new pool's addresses go out in the order of asking, not kind by kind."""
    world = World()
    for n in range(6):
        wish = {"ip_pool": "p1"} if n % 3 == 2 else {}
        world.lb(f"lb{n}", f"ns{n % 2}", **wish)
    served = granted(world.pool("p1", "192.0.2.0/29 192.0.2.2-192.0.2.5"))
    assert list(served) == ["lb0", "lb1", "lb2", "lb3"]


def test_a_full_pool_that_goes_first_now_wakes_those_who_waited_elsewhere():
    """Who waits for one pool is given the free address of another that serves him since."""
    world = World()
    world.pool("all", "192.0.2.2/32")
    for name in "abc":
        world.lb(name)
    scope = objects.PoolScope(namespace="default", project="*", guest_cluster="*")
    world.pool("own", "198.51.100.2/32", scope=[scope])
    assert world.lb_address("b") == "198.51.100.2"
    assert granted(world.gone("loadbalancers", "b")) == {"c": "198.51.100.2"}


def test_a_sharer_joins_as_soon_as_there_is_somebody_to_join():
    """The ports of a holder, or the pool around its address, change: a sharer that found no free
    address takes its place beside it."""
    world = World()
    world.pool("p1", "192.0.2.2/32")
    world.svc("a", ports=["TCP/80"], **share())
    world.svc("b", ports=["TCP/80"], **share())
    assert world.refusal("services", "b") == "PoolExhausted"
    assert granted(world.svc("a", ports=["TCP/81"], **share())) == {"b": "192.0.2.2"}


@pytest.mark.parametrize("how", ["retyped", "cluster"])
def test_a_quota_counts_an_owner_that_changes_as_what_it_was(how):
    """A place is given back under the name under which it was taken."""
    world = World()
    quotas = [objects.PoolQuota(namespace="*", guest_cluster="*", limit=1)]
    world.pool("p1", "192.0.2.0/28", quotas=quotas)
    if how == "retyped":
        world.svc("a")
        world.svc("a", kind="ClusterIP")
    else:
        world.lb("a", **guest(cluster="gc1"))
        world.lb("a", **guest(cluster="gc2"))
        world.lb("b", **guest(cluster="gc2"))
        assert world.refusal("loadbalancers", "b") == "QuotaExceeded"
        world.gone("loadbalancers", "a")
    assert not any(count for key, count in world.state.usage.items() if "gc1" in key)
    world.svc("c") if how == "retyped" else world.lb("c", **guest(cluster="gc1"))
    kind = "services" if how == "retyped" else "loadbalancers"
    assert world.addresses(kind, "c")


def test_a_holder_outside_counts_towards_its_quota():
    """Shrinking a pool below a holder keeps it, also in the account of the quota."""
    world = World()
    world.pool("p1", "192.0.2.0/29")
    world.lb("a", address="192.0.2.6")
    limit = [objects.PoolQuota(namespace="*", limit=1)]
    world.pool("p1", "192.0.2.0/30", quotas=limit)
    world.lb("b")
    assert world.refusal("loadbalancers", "b") == "QuotaExceeded"
    world.gone("loadbalancers", "a")
    assert world.lb_address("b") == "192.0.2.2"


def test_a_sharer_that_moves_covers_its_old_ports_until_it_is_gone():
    """[metallb 2403] Also after a restart in between: the others stay, nobody takes the ports."""
    world = World()
    world.pool("p1", "192.0.2.0/29")
    world.svc("a", ports=["TCP/80"], **share())
    world.svc("b", ports=["TCP/443"], **share())
    elsewhere = {"annotations": {"lbledger.io/address": "192.0.2.5"}}
    world.svc("a", ports=["TCP/82"], **share(**elsewhere))
    assert world.addresses("services", "a") == ["192.0.2.2", "192.0.2.5"]
    world.state = reborn(world.state, random.Random(1))
    world.svc("c", ports=["TCP/82"], **share())
    world.svc("d", ports=["TCP/80"], **share())
    assert world.svc_address("b") == world.svc_address("c") == "192.0.2.2"
    assert world.svc_address("d") == "192.0.2.5"


@pytest.mark.parametrize("share", ["", "k"])
@pytest.mark.parametrize("first", ["bad", "good"])
def test_a_malformed_port_is_nobody_else_s_problem(first, share):
    """Services of a namespace ask for the same; what is wrong with one does not stop another."""
    world = World()
    world.pool("p1", "192.0.2.8/29 192.0.2.10-192.0.2.12")
    annotations = {"lbledger.io/allow-shared-ip": share} if share else None
    for name in sorted(["bad", "good"], key=lambda name: name != first):
        port = "TCP/80" if name == "good" else "ICMP/80"
        world.svc(name, annotations=annotations, ports=[port])
    assert world.svc_address("good")
    if share:
        assert world.refusal("services", "bad") == "InvalidRequest"
        assert "spec.ports: ICMP/80" in world.message("services", "bad")


def test_the_usual_owner_goes_the_short_way(monkeypatch):
    """As the API server shows them: a new Service has a status, and nothing in it."""
    world = World()
    world.pool("p1", "192.0.2.8/29 192.0.2.10-192.0.2.12")
    monkeypatch.delattr(sys.modules["services.allocator.core.decide"], "take_in")
    world.svc("a")
    world.lb("b")
    assert (world.svc_address("a"), world.lb_address("b")) == ("192.0.2.10", "192.0.2.11")
