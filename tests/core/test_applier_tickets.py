"""What the applier writes for Services that asked for an address, and for pools."""

import pytest

from schema import events, names, objects
from schema.subjects import ObjectRef
from services.applier.shapes import Announcing
from services.applier.targets import Options
from tests.core.applying import World, backend, said


def ingress(world, name="svc"):
    status = world.service(name).status
    balancer = status.load_balancer if status else None
    return [entry.ip for entry in (balancer.ingress if balancer else None) or []]


def provider(world, owner, **fields):
    world.state.decide(events.ProviderStateChanged(at=world.now, owner=owner, **fields))


# --- class lbledger.io/pool ---


def test_a_ticket_is_one_write():
    """Ingress and conditions together, then silence."""
    world = World()
    owner = world.ticket()
    world.grant(owner, "192.0.2.10")
    assert said(world.wait(5)) == ["Service/status"]
    assert ingress(world) == ["192.0.2.10"]
    assert world.condition(owner, "lbledger.io/Ready").status == "True"
    assert world.wait(600) == []


def test_two_addresses_of_a_dual_stack_service_are_published_together():
    """IPv4 first, in one write; the release of one takes that one back."""
    world = World()
    owner = world.ticket()
    six = world.grant(owner, "2001:db8::10")
    world.grant(owner, "192.0.2.10")
    assert said(world.wait(5)) == ["Service/status"]
    assert ingress(world) == ["192.0.2.10", "2001:db8::10"]
    world.release(owner, six, "2001:db8::10")
    world.wait(1)
    assert ingress(world) == ["192.0.2.10"]


def test_report_9_nothing_moves_when_a_neighbour_is_deleted():
    """The list of a satisfied Service is byte for byte the same, and nobody writes to it."""
    world = World()
    kept, other = world.ticket("a"), world.ticket("b")
    world.grant(kept, "192.0.2.10")
    lease = world.grant(other, "192.0.2.11")
    world.wait(5)
    before = world.api.objects[kept.ref]
    world.api.put(other.ref, None)
    world.release(other, lease, "192.0.2.11")
    world.state.resume()
    assert world.wait(600) == []
    assert world.api.objects[kept.ref] == before


def test_report_11_retyped_service_shows_no_address_of_ours():
    """Away from LoadBalancer our entries and conditions go; back again it waits its turn."""
    world = World()
    owner = world.ticket()
    lease = world.grant(owner, "192.0.2.3")
    world.wait(5)
    world.api.edit(owner.ref, spec={"type": "ClusterIP", "loadBalancerClass": None})
    world.release(owner, lease, "192.0.2.3")
    assert said(world.wait(5)) == ["Service/status"]
    assert ingress(world) == []
    assert world.status(owner) is None, "no condition of ours is left either"
    assert world.wait(600) == []

    world.api.edit(owner.ref, spec={"type": "LoadBalancer", "loadBalancerClass": names.POOL_CLASS})
    world.refuse(owner)
    world.wait(5)
    assert ingress(world) == []
    assert world.condition(owner, "lbledger.io/Ready").reason == "PoolExhausted"


def test_a_foreign_address_in_our_ingress_is_taken_out():
    """An address that the ledger did not give is nobody's, and traffic must not go there."""
    world = World()
    owner = world.ticket()
    world.grant(owner, "192.0.2.10")
    world.wait(5)
    entries = [{"ip": "192.0.2.10"}, {"ip": "203.0.113.9"}]
    world.api.edit(owner.ref, status={"loadBalancer": {"ingress": entries}})
    world.wait(5)
    assert ingress(world) == ["192.0.2.10"]


def test_services_that_nobody_decided_about_are_never_written():
    """Another class, another type, or ours and undecided: no write."""
    world = World()
    world.ticket("other", class_="example.org/lb")
    world.ticket("ours")
    world.create("services", "plain", {"type": "ClusterIP"})
    assert world.wait(600) == []


def test_an_announcer_of_services_is_told_by_annotation():
    """With metallb the address is asked for, and published by metallb."""
    world = World(Options(announcing=Announcing("metallb")))
    owner = world.ticket()
    world.grant(owner, "192.0.2.10")
    assert said(world.wait(5)) == ["Service", "Service/status"]
    assert world.service("svc").metadata.annotations == {"metallb.io/loadBalancerIPs": "192.0.2.10"}
    assert world.condition(owner, "lbledger.io/Ready").reason == "WaitingForAddress"
    world.api.edit(owner.ref, status={"loadBalancer": {"ingress": [{"ip": "192.0.2.10"}]}})
    assert said(world.wait(5)) == ["Service/status"]
    assert world.condition(owner, "lbledger.io/Ready").status == "True"


def test_report_62_a_ticket_that_is_fought_over_says_so():
    """The conditions of a Service name the conflict, and our writes are bounded."""
    world = World()
    owner = world.ticket()
    world.grant(owner, "192.0.2.10")
    world.wait(5)
    first = len(world.api.writes)
    for _ in range(300):
        world.api.edit(owner.ref, status={"loadBalancer": {"ingress": [{"ip": "203.0.113.9"}]}})
        world.wait(1)
    assert len(world.api.writes) - first <= 25
    assert world.condition(owner, "lbledger.io/Ready").reason == "Conflict"
    world.wait(3600)
    assert ingress(world) == ["192.0.2.10"]
    assert world.condition(owner, "lbledger.io/Ready").status == "True"


# --- class lbledger.io/nrp ---


def test_provider_service_has_finalizer_then_ingress_then_nothing_left():
    """The finalizer stands while the provider asks for it, and goes when it does not; the ingress
    is the provider's address."""
    world = World()
    owner = world.ticket(class_=names.NRP_CLASS)
    provider(world, owner, finalizer=True, reason="Pending")
    world.wait(5)
    assert world.service("svc").metadata.finalizers == [names.NRP_FINALIZER]
    assert world.condition(owner, "lbledger.io/ProviderSynced").reason == "Pending"

    provider(
        world, owner, finalizer=True, addresses=["20.0.0.4"], in_step=True, reason="Registered"
    )
    world.wait(5)
    assert ingress(world) == ["20.0.0.4"]
    assert world.condition(owner, "lbledger.io/Ready").status == "True"

    world.api.edit(owner.ref, metadata={"deletionTimestamp": "2026-11-30T12:00:00Z"})
    assert world.wait(60) == [], "the provider still holds it"
    provider(world, owner, finalizer=False, reason="Gone")
    assert said(world.wait(5)) == ["Service/finalizers"]
    assert world.service("svc") is None


def test_served_provider_service_stays_ready_while_the_provider_catches_up():
    """A change that is soon done is no write; one that takes long is told as ProviderSynced."""
    world = World()
    owner = world.ticket(class_=names.NRP_CLASS)
    served = {"addresses": ["20.0.0.4"], "backends": 3}
    provider(world, owner, in_step=True, reason="Registered", **served)
    world.wait(5)
    provider(world, owner, in_step=False, reason="Pending", **served)
    assert world.run() == []
    provider(world, owner, in_step=True, reason="Registered", **served)
    assert world.wait(5) == []

    provider(world, owner, in_step=False, reason="Throttled", message="retry in 40 s", **served)
    assert said(world.wait(5)) == ["Service/status"]
    assert world.condition(owner, "lbledger.io/ProviderSynced").reason == "Throttled"
    assert world.condition(owner, "lbledger.io/Ready").status == "True"


def test_finalizers_of_others_stay_and_a_conflict_is_thought_over():
    """Ours is set beside theirs; a list that changed meanwhile is read again."""
    world = World()
    owner = world.ticket(class_=names.NRP_CLASS)
    world.deliver()
    world.api.edit(owner.ref, metadata={"finalizers": ["example.org/hold"]})
    provider(world, owner, finalizer=True)
    world.run(show=False)
    world.wait(5)
    assert world.service("svc").metadata.finalizers == ["example.org/hold", names.NRP_FINALIZER]
    provider(world, owner, finalizer=False)
    world.wait(5)
    assert world.service("svc").metadata.finalizers == ["example.org/hold"]


def test_no_finalizer_is_added_to_what_is_being_deleted():
    """The API server would refuse it."""
    world = World()
    owner = world.ticket(class_=names.NRP_CLASS)
    hold = {"deletionTimestamp": "2026-11-30T12:00:00Z", "finalizers": ["example.org/hold"]}
    world.api.edit(owner.ref, metadata=hold)
    provider(world, owner, finalizer=True)
    assert world.wait(60) == []


def test_retyped_provider_service_keeps_the_finalizer_until_it_is_torn_down():
    """Type away from LoadBalancer: ingress goes, the finalizer only at the provider's word."""
    world = World()
    owner = world.ticket(class_=names.NRP_CLASS)
    provider(world, owner, addresses=["20.0.0.4"], in_step=True)
    world.wait(5)
    world.api.edit(owner.ref, spec={"type": "ClusterIP", "loadBalancerClass": None})
    world.wait(5)
    assert ingress(world) == []
    assert world.service("svc").metadata.finalizers == [names.NRP_FINALIZER]
    provider(world, owner, finalizer=False)
    world.wait(5)
    assert world.service("svc").metadata.finalizers is None


def test_egress_pod_is_held_by_a_finalizer_until_its_addresses_have_left():
    """Added and taken away at the provider's word, beside those of others; what is wrong with the
    pod is told on it once."""
    world = World()
    world.state.synced.add("pods")
    hold = {"finalizers": ["example.org/hold"]}
    owner = world.create("pods", "p1", {}, metadata=hold)
    provider(world, owner, finalizer=True, reason="ServiceGatewayLabelInvalid", message="why")
    assert said(world.wait(5)) == ["Pod/finalizers"]
    provider(world, owner, finalizer=True, reason="ServiceGatewayLabelInvalid", message="why")
    assert world.wait(5) == []
    assert world.api.view(owner.ref).metadata.finalizers == [
        "example.org/hold",
        names.NRP_FINALIZER,
    ]
    assert [(n.kind, n.reason, n.message) for n in world.told] == [
        ("Pod", "ServiceGatewayLabelInvalid", "why")
    ]
    world.api.edit(owner.ref, metadata={"deletionTimestamp": "2026-11-30T12:00:00Z"})
    provider(world, owner, finalizer=False)
    world.wait(5)
    assert world.api.view(owner.ref).metadata.finalizers == ["example.org/hold"]


WRONG = {
    "Rejected": "ServiceGatewayConfigurationRejected",
    "QuotaExceeded": "QuotaExceeded",
    "Parked": "Parked",
    "Quarantined": "Quarantined",
} | {
    reason: reason
    for reason in (
        "UnsupportedInternalLoadBalancer",
        "UnsupportedSessionAffinity",
        "UnsupportedLoadBalancerIP",
        "UnsupportedDualStack",
        "UnsupportedNamedTargetPort",
        "UnsupportedProtocol",
        "UnsupportedPort",
        "UnsupportedBackendPortCollision",
        "InvalidIdleTimeout",
    )
}


def warnings(world):
    """Events of the kind Warning, in whatever way they were told: (object's kind, reason, text)."""
    notices = world.told + [w.notice for w in world.api.writes if w.notice is not None]
    return [(n.kind, n.reason, n.message) for n in notices if n.warning]


@pytest.mark.parametrize("served", [False, True], ids=["new", "served"])
@pytest.mark.parametrize(("reason", "told"), WRONG.items(), ids=WRONG)
def test_wish_that_the_provider_cannot_meet_is_one_warning(reason, told, served):
    """A Service that keeps what it had stays Ready, and hears of it all the same; said again it is
    no second Event."""
    world = World()
    owner = world.ticket(class_=names.NRP_CLASS)
    had = {"addresses": ["20.0.0.4"]} if served else {}
    if served:
        provider(world, owner, in_step=True, reason="Registered", **had)
        world.wait(5)
    for _ in range(2):
        provider(world, owner, reason=reason, message="spec.x is wrong", **had)
        world.wait(60)
    assert warnings(world) == [("Service", told, "spec.x is wrong")]
    assert world.condition(owner, "lbledger.io/Ready").status == ("True" if served else "False")
    assert world.condition(owner, "lbledger.io/ProviderSynced").reason == reason


@pytest.mark.parametrize("served", [False, True], ids=["new", "served"])
@pytest.mark.parametrize("reason", ["Pending", "Throttled", "Retrying", "WaitingForFinalizer"])
def test_what_the_provider_will_catch_up_with_is_no_warning(reason, served):
    """It passes by itself: a condition shows it, an Event does not warn of it."""
    world = World()
    owner = world.ticket(class_=names.NRP_CLASS)
    had = {"addresses": ["20.0.0.4"]} if served else {}
    if served:
        provider(world, owner, in_step=True, reason="Registered", **had)
        world.wait(5)
    provider(world, owner, reason=reason, message="429", **had)
    world.wait(60)
    assert warnings(world) == []
    assert world.condition(owner, "lbledger.io/ProviderSynced").reason == reason


@pytest.mark.parametrize(
    "reason",
    [
        "ServiceGatewayInvalidPodIP",
        "ServiceGatewayInvalidEgressLabel",
        "ServiceGatewayReservedEgressLabel",
        "ServiceGatewayFinalizerAddFailed",
        "ServiceGatewayNoNodeLocation",
    ],
)
def test_what_is_wrong_with_an_egress_pod_is_one_warning(reason):
    """It has no condition of ours, only the Event tells."""
    world = World()
    world.state.synced.add("pods")
    owner = world.create("pods", "p1", {})
    for _ in range(2):
        provider(world, owner, finalizer=False, reason=reason, message="why")
        world.wait(5)
    assert warnings(world) == [("Pod", reason, "why")]


# --- pools ---


POOL = ObjectRef("ippools", "", "p1")


def pool_world(**options):
    world = World(Options(**options))
    pool = world.create("ippools", "p1", {"ranges": [{"subnet": "192.0.2.0/24"}]})
    return world, pool


def account(world, pool, total, available, **more):
    world.state.decide(
        events.PoolAccounted(
            at=world.now, pool=pool.name, uid=pool.uid, total=total, available=available, **more
        )
    )


def test_report_60_pool_counters_are_restored_without_a_new_allocation():
    """Total 1, available 0, Ready; a status that somebody wiped comes back in one write."""
    world, pool = pool_world()
    owner = world.ticket("a")
    world.grant(owner, "192.0.2.9")
    account(world, pool, 1, 0, last_allocated="192.0.2.9")
    world.wait(5)
    before = world.status(pool)
    assert (before.total, before.available, before.last_allocated) == (1, 0, "192.0.2.9")
    assert before.allocated == {"192.0.2.9": "default/a"}
    assert world.condition(pool).status == "True"

    world.api.edit(POOL, status=None)
    assert said(world.wait(5)) == ["IPPool/status"]
    assert world.status(pool) == before


def test_an_address_that_changes_hands_at_once_is_booked_to_the_new_holder():
    """Released and granted again between two accounts that say the same."""
    world, pool = pool_world()
    first, second = world.ticket("a"), world.ticket("b")
    lease = world.grant(first, "192.0.2.9")
    account(world, pool, 1, 0, last_allocated="192.0.2.9")
    world.wait(5)
    world.release(first, lease, "192.0.2.9")
    world.grant(second, "192.0.2.9")
    account(world, pool, 1, 0, last_allocated="192.0.2.9")

    assert said(world.wait(5)).count("IPPool/status") == 1
    assert world.status(pool).allocated == {"192.0.2.9": "default/b"}


def test_pool_status_is_written_once_a_second_at_most():
    """A hundred allocations in a second are two writes, the first at once; the last word counts."""
    world, pool = pool_world()
    for i in range(100):
        owner = world.ticket(f"s{i}")
        world.grant(owner, f"192.0.2.{i}")
        account(world, pool, 254, 253 - i, last_allocated=f"192.0.2.{i}")
        world.wait(0.01)
    world.wait(5)
    written = [w for w in world.api.writes if w.target == "IPPool/status"]
    assert len(written) == 2
    assert world.status(pool).available == 154
    assert len(world.status(pool).allocated) == 100


def test_released_address_moves_to_the_history():
    """Live bookings and the last holder of free addresses, as the UI and peers know them."""
    world, pool = pool_world()
    owner = world.ticket("a")
    lease = world.grant(owner, "192.0.2.9")
    account(world, pool, 2, 1)
    world.wait(5)
    world.release(owner, lease, "192.0.2.9")
    account(world, pool, 2, 2)
    world.wait(5)
    status = world.status(pool)
    assert (status.allocated, status.allocated_history) == (None, {"192.0.2.9": "default/a"}) or (
        status.allocated == {} and status.allocated_history == {"192.0.2.9": "default/a"}
    )
    other = world.ticket("b")
    world.grant(other, "192.0.2.9")
    account(world, pool, 2, 1)
    world.wait(5)
    assert world.status(pool).allocated == {"192.0.2.9": "default/b"}
    assert not world.status(pool).allocated_history


def test_maps_above_the_setting_are_left_out_and_said_to_be():
    """An object never grows with the number of leases; below the setting the list returns."""
    world, pool = pool_world(pool_map_entries=3)
    leases = {}
    for i in range(5):
        owner = world.ticket(f"s{i}")
        leases[i] = (owner, world.grant(owner, f"192.0.2.{i}"))
    account(world, pool, 254, 249)
    world.wait(5)
    assert not world.status(pool).allocated
    assert world.condition(pool, "AllocationsListed").reason == "TooMany"
    assert "5 allocations" in world.condition(pool, "AllocationsListed").message
    for i in (0, 1):
        world.release(*leases[i], f"192.0.2.{i}")
    account(world, pool, 254, 251)
    world.wait(5)
    assert len(world.status(pool).allocated) == 3
    assert world.condition(pool, "AllocationsListed") is None


def test_a_pool_that_is_not_ready_says_why():
    """[report-65] The allocator's reason and words."""
    world, pool = pool_world()
    account(
        world, pool, 0, 0, ready=False, reason="InvalidRange", message="rangeEnd: not an address"
    )
    world.wait(5)
    found = world.condition(pool)
    assert (found.status, found.reason) == ("False", "InvalidRange")
    assert found.message == "rangeEnd: not an address"


def test_counts_beyond_the_api_are_clamped():
    """A /64 has more addresses than an int64 holds."""
    world, pool = pool_world()
    account(world, pool, 1 << 64, (1 << 64) - 1)
    world.wait(5)
    assert world.status(pool).total == (1 << 63) - 1


def test_account_of_a_pool_that_was_replaced_is_not_written():
    """Another uid under the name: nothing of the old pool is shown on the new one."""
    world, pool = pool_world()
    world.api.put(POOL, None)
    world.create("ippools", "p1", {"ranges": []})
    account(world, pool, 10, 9)
    assert world.wait(5) == []


@pytest.mark.parametrize("kind", ["loadbalancer", "service", "pool"])
def test_each_change_of_reason_is_one_event_and_no_repetition(kind):
    """A Kubernetes Event at each new reason, named by what it says."""
    world = World()
    pool = world.create("ippools", "p1", {"ranges": []})
    owner = world.ticket() if kind == "service" else world.balancer(workloadType="cluster")

    def bad():
        if kind == "pool":
            account(world, pool, 1, 1, ready=False, reason="InvalidRange", message="x")
        else:
            world.refuse(owner)

    def good():
        if kind == "pool":
            account(world, pool, 1, 1)
        else:
            world.grant(owner, "192.0.2.10")

    bad()
    world.wait(5)
    bad()
    world.wait(5)
    good()
    world.wait(5)
    told = [w.notice for w in world.api.writes if w.notice is not None]
    assert [n.warning for n in told] == [True, False]
    assert len({n.event_name for n in told}) == 2
    assert told[0].kind == {"loadbalancer": "LoadBalancer", "service": "Service"}.get(
        kind, "IPPool"
    )


def test_backends_of_a_service_are_not_ours_to_write():
    """Slices of a Service with a class belong to the cluster's own controller."""
    world = World()
    owner = world.ticket()
    world.grant(owner, "192.0.2.10")
    world.resolve(owner, backend())
    assert said(world.wait(5)) == ["Service/status"]


# --- what the allocator asks to be told or done ---


def test_contested_address_is_told_once_on_both_objects():
    """A Kubernetes Event on each claimant; a repetition by the allocator is none."""
    world = World()
    one, other = world.ticket("a"), world.balancer("b")
    world.grant(one, "192.0.2.10")
    for owner, peer, kept in ((one, other, True), (other, one, False)) * 2:
        world.state.decide(
            events.AddressContested(
                at=world.now,
                owner=owner,
                address="192.0.2.10",
                pool="p1",
                other=peer,
                kept=kept,
                message=f"192.0.2.10 is also shown by {peer.name}",
            )
        )
    world.wait(5)
    assert [(n.kind, n.name, n.reason) for n in world.told] == [
        ("Service", "a", "AddressContested"),
        ("LoadBalancer", "b", "AddressContested"),
    ]
    assert world.status(other) is None, "a claim is no decision about its address"


def test_condemned_load_balancer_is_deleted_by_its_uid():
    """One DELETE with an Event that says why; a successor of the same name is spared."""
    world = World()
    owner = world.balancer(workloadType="cluster")
    world.grant(owner, "192.0.2.10")
    world.wait(5)
    condemned = events.OwnerCondemned(
        at=world.now, owner=owner, reason="GuestClusterRemoved", message="cluster c1 is gone"
    )
    world.state.decide(condemned)
    assert said(world.wait(5)) == ["LoadBalancer"]
    assert owner.ref not in world.api.objects
    assert world.told[-1].message == "cluster c1 is gone"

    fresh = world.balancer(workloadType="cluster")
    world.run()
    world.state.decide(condemned)
    assert world.wait(5) == []
    assert fresh.ref in world.api.objects


@pytest.mark.parametrize("changed", [False, True])
def test_answered_request_for_release_loses_its_annotation(changed):
    """The annotation goes with an Event; one that says something else by now stays."""
    request = "192.0.2.9: default/a"
    key = "loadbalancer.harvesterhci.io/manuallyReleaseIP"
    world, pool = pool_world()
    world.api.edit(POOL, metadata={"annotations": {key: request}})
    if changed:
        world.api.edit(POOL, metadata={"annotations": {key: "192.0.2.8: default/b"}})
    world.state.decide(
        events.ReleaseAnswered(
            at=world.now,
            pool="p1",
            uid=pool.uid,
            request=request,
            released=False,
            message="default/a still exists",
        )
    )
    world.wait(5)
    notes = world.api.view(POOL).metadata.annotations or {}
    assert (key in notes) == changed
    assert [(n.reason, n.warning) for n in world.told] == [("ReleaseRefused", True)]
    account(world, pool, 1, 1)
    world.wait(5)
    assert world.status(pool).total == 1


def test_imported_pools_are_created_before_the_config_map_is_marked():
    """What exists is left alone; history goes along; bad entries are told on the ConfigMap."""
    world = World()
    config = world.create("configmaps", "kubevip", {})
    kept = world.create("ippools", "global", {"ranges": []})
    before = world.api.objects[kept.ref]
    spec = objects.IPPoolSpec(ranges=[objects.PoolRange(subnet="192.0.2.0/24")])
    world.state.decide(
        events.PoolsImported(
            at=world.now,
            namespace="default",
            name="kubevip",
            uid=config.uid,
            pools=[
                events.ImportedPool(name="global", spec=spec),
                events.ImportedPool(name="ns1", spec=spec, history={"192.0.2.9": "ns1/web"}),
            ],
            problems=["range-x: '9' is no range"],
        )
    )
    world.api.fail.append(503)
    targets = [write.target for write in world.wait(5)]
    assert targets == ["IPPool", "IPPool", "ConfigMap"]
    assert world.api.objects[kept.ref] == before
    made = world.api.objects[ObjectRef("ippools", "", "ns1")]
    assert made["spec"] == {"ranges": [{"subnet": "192.0.2.0/24"}]}
    assert made["metadata"]["annotations"] == {"lbledger.io/history": '{"192.0.2.9":"ns1/web"}'}
    marked = world.api.view(config.ref).metadata.annotations
    assert marked == {"loadbalancer.harvesterhci.io/after-conversion": "true"}
    assert [(n.kind, n.reason) for n in world.told] == [("ConfigMap", "InvalidPool")]
    world.restart()
    assert world.wait(60) == []
