"""What the applier writes for a load balancer of virtual machines, decision by decision."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schema import names
from schema.subjects import ObjectRef
from services.applier.shapes import Announcing
from services.applier.targets import Options
from tests.core.applying import DUMMY, LISTENERS, World, backend, said

SERVICE = ObjectRef("services", "default", "web")
SLICE = ObjectRef("endpointslices", "default", "web")
FORMS = {
    "subresource": {},
    "main-resource": {"subresource": False},
    "harvester": {"subresource": False, "prunes": True},
}


def ready_world(**api):
    world = World(**api)
    owner = world.balancer()
    world.grant(owner, "192.0.2.10")
    world.resolve(owner, backend())
    world.wait(1)
    return world, owner


@pytest.mark.parametrize("form", FORMS)
def test_four_writes_bring_it_to_ready_and_then_none(form):
    """Slice, Service, ingress, status; a second look, and a restart, write nothing."""
    world = World(**FORMS[form])
    owner = world.balancer()
    world.grant(owner, "192.0.2.10")
    world.resolve(owner, backend())

    first = world.wait(1)
    assert said(first) == ["EndpointSlice", "LoadBalancer/status", "Service", "Service/status"]
    assert world.condition(owner).status == "True"

    world.state.touch(owner.uid)
    assert world.wait(60) == []
    world.restart()
    world.state.touch(owner.uid)
    assert world.wait(60) == []


# The rows of Harvester's traces, each with what this implementation makes of it.
def test_golden_trace_placeholder_then_a_machine_then_none():
    """A1: an LB without a machine has an address, a VIP, the dummy and the reason; a machine makes
    it Ready in two writes; a label that is taken away brings the dummy back in two."""
    world = World()
    owner = world.balancer()
    world.grant(owner, "192.0.2.10")
    world.resolve(owner)
    world.wait(1)

    found = world.condition(owner)
    assert (found.status, found.message) == ("False", "no running backend servers")
    assert world.status(owner).address == "192.0.2.10"
    assert [e.addresses for e in world.slice().endpoints] == [[DUMMY]]
    assert world.slice().endpoints[0].target_ref.uid == names.DUMMY_UID

    world.resolve(owner, backend())
    assert said(world.wait(1)) == ["EndpointSlice", "LoadBalancer/status"]
    assert world.condition(owner).status == "True"
    assert [e.addresses for e in world.slice().endpoints] == [["10.52.1.7"]]

    world.resolve(owner)
    assert said(world.wait(1)) == ["EndpointSlice", "LoadBalancer/status"]
    assert [e.addresses for e in world.slice().endpoints] == [[DUMMY]]
    assert world.condition(owner).message == "no running backend servers"


def test_golden_trace_pool_change():
    """A1 rows 8-11: a move to another pool is make-before-break. The Service never lacks an
    address, the status never shows one that was released, and Ready returns."""
    world, owner = ready_world()
    old = world.state.owners[owner.uid].leases[0].lease

    world.grant(owner, "198.51.100.7", pool="p2")
    world.release(owner, old, "192.0.2.10")
    writes = world.wait(1)

    assert said(writes) == ["LoadBalancer/status", "Service", "Service/status"]
    assert world.service().spec.load_balancer_ip == "198.51.100.7"
    status = world.status(owner)
    assert (status.address, status.allocated_address.ip_pool) == ("198.51.100.7", "p2")
    assert world.condition(owner).status == "True"


def test_golden_trace_dhcp_with_a_health_check():
    """A2: the Service asks for 0.0.0.0, the address is what the announcer obtained, and a failing
    machine is replaced by the dummy in one write."""
    world = World(Options(announcing=Announcing("kube-vip")))
    owner = world.balancer(ipam="dhcp")
    vm = backend(ready=False, state="unknown")
    world.state.decide(delegated(world, owner))
    world.resolve(owner, vm, checked=True)
    world.wait(1)
    assert world.service().spec.load_balancer_ip == "0.0.0.0"
    assert world.status(owner).allocated_address.ip == "0.0.0.0"
    assert world.condition(owner).message == "service is waiting for external IP"

    world.api.edit(SERVICE, status={"loadBalancer": {"ingress": [{"ip": "172.16.1.9"}]}})
    world.wait(1)
    assert world.status(owner).address == "172.16.1.9"
    assert world.condition(owner).message == (
        "running backend servers are not probed as healthy total:1, healthy:0"
    )
    world.verdict(owner, vm, True)
    assert said(world.wait(1)) == ["EndpointSlice", "LoadBalancer/status"]
    assert world.condition(owner).status == "True"
    world.verdict(owner, vm, False)
    assert said(world.wait(1)) == ["EndpointSlice", "LoadBalancer/status"]
    ready = [e.addresses for e in world.slice().endpoints if e.conditions.ready]
    assert ready == [[DUMMY]]


def delegated(world, owner):
    from schema import events

    return events.AddressDelegated(at=world.now, owner=owner)


def test_report_68_exhausted_pool_is_named_and_said_once():
    """A3: no Service and no slice without an address; the reason and the message are the
    allocator's, and saying it again writes nothing and moves no time."""
    world = World()
    owner = world.balancer()
    world.refuse(owner)
    world.resolve(owner)
    assert said(world.wait(1)) == ["LoadBalancer/status"]
    before = world.condition(owner)
    assert (before.reason, before.status) == ("PoolExhausted", "False")
    assert "p1" in before.message
    assert (world.service(), world.slice()) == (None, None)

    world.wait(3600)
    world.refuse(owner)
    assert world.wait(60) == []
    assert world.condition(owner) == before


def test_kept_address_stays_ready_while_a_wish_is_refused():
    """A refused move keeps the old address in use and says so."""
    world, owner = ready_world()
    world.refuse(owner, reason="PoolExhausted", kept="192.0.2.10")
    world.wait(1)
    assert world.condition(owner).status == "True"
    told = world.condition(owner, "AddressAllocated")
    assert (told.status, told.reason) == ("True", "PoolExhausted")
    assert told.message.startswith("keeps 192.0.2.10 of pool p1: ")


def test_address_taken_back_is_withdrawn_everywhere():
    """Without a lease the ingress and the loadBalancerIP go, and Ready says so."""
    world, owner = ready_world()
    lease = world.state.owners[owner.uid].leases[0].lease
    world.release(owner, lease, "192.0.2.10")
    world.refuse(owner, reason="PoolNotFound", message="pool p9 does not exist")
    world.wait(1)
    assert world.service().spec.load_balancer_ip == ""
    assert world.service().status.load_balancer.ingress is None
    assert world.status(owner).address == ""
    assert world.status(owner).allocated_address is None
    assert world.condition(owner).reason == "PoolNotFound"


@pytest.mark.parametrize(
    ("image", "reason", "message"),
    [
        ({"matched": 2}, "NoBackendAddress", "running backend servers have no IP"),
        ({"matched": 0}, "NoBackendMatched", "no running backend servers"),
        (
            {"matched": 0, "message": "no pod is watched"},
            "NoBackendMatched",
            "no running backend servers; no pod is watched",
        ),
        (
            {"matched": 0, "reason": "InvalidSelector", "message": "selector app: no value"},
            "InvalidSelector",
            "selector app: no value",
        ),
    ],
)
def test_each_reason_for_no_backend_is_told_apart(image, reason, message):
    """No match, no address, and a spec that can't be followed are three different things."""
    world = World()
    owner = world.balancer()
    world.grant(owner, "192.0.2.10")
    world.resolve(owner, **image)
    world.wait(1)
    assert (world.condition(owner).reason, world.condition(owner).message) == (reason, message)
    assert world.condition(owner, "BackendsResolved").reason == reason


@pytest.mark.parametrize("ready", [True, False])
def test_checks_that_can_not_be_made_are_told_with_their_reason(ready):
    """Whether or not anything is ready: it is our fault, and a person has to know what it is."""
    world = World()
    owner = world.balancer()
    held = "checks can't be made: Network is unreachable"
    world.grant(owner, "192.0.2.10")
    vm = backend(ready=ready, state="healthy" if ready else "unknown")
    world.resolve(owner, vm, checked=True, held=held)
    world.wait(1)
    told = world.condition(owner, "BackendsHealthy")
    assert (told.status, told.reason) == (str(ready), "ChecksHeld")
    assert told.message.endswith(held)


def test_slice_stands_before_an_announcer_hears_of_the_address():
    """kube-vip 1.2 and later publish nothing while the slice is empty or missing."""
    world = World(Options(announcing=Announcing("kube-vip")))
    owner = world.balancer()
    world.grant(owner, "192.0.2.10")
    assert world.wait(5) != [] or world.service() is None
    assert world.service() is None, "no Service before the first word about backends"
    world.checks.append(lambda: world.service() is None or world.slice() is not None)
    world.resolve(owner)
    order = [write.target for write in world.wait(1)]
    assert order.index("EndpointSlice") < order.index("Service")


@pytest.mark.parametrize(
    ("announcing", "annotations"),
    [
        (Announcing("kube-vip"), {"kube-vip.io/loadbalancerIPs": "192.0.2.10"}),
        (Announcing("metallb"), {"metallb.io/loadBalancerIPs": "192.0.2.10"}),
        (
            Announcing("metallb", legacy_metallb=True),
            {"metallb.universe.tf/loadBalancerIPs": "192.0.2.10"},
        ),
        (Announcing("cilium"), {"lbipam.cilium.io/ips": "192.0.2.10"}),
        (Announcing("none"), None),
    ],
)
def test_each_announcer_is_told_in_its_own_words(announcing, annotations):
    """The address is in loadBalancerIP and in the announcer's annotation; only without an announcer
    do we write the ingress."""
    world = World(Options(announcing=announcing))
    owner = world.balancer()
    world.grant(owner, "192.0.2.10")
    world.resolve(owner, backend())
    targets = said(world.wait(1))
    assert world.service().metadata.annotations == annotations
    assert world.service().spec.load_balancer_ip == "192.0.2.10"
    assert ("Service/status" in targets) == announcing.ours
    assert world.condition(owner).status == ("True" if announcing.ours else "False")


def test_changed_ingress_of_an_announcer_reaches_the_status_at_once():
    """A renewed DHCP lease is one status write."""
    world = World(Options(announcing=Announcing("kube-vip")))
    owner = world.balancer(ipam="dhcp")
    world.state.decide(delegated(world, owner))
    world.resolve(owner, backend())
    world.wait(1)
    for address in ("172.16.1.9", "172.16.1.44"):
        world.api.edit(SERVICE, status={"loadBalancer": {"ingress": [{"ip": address}]}})
        assert said(world.run()) == ["LoadBalancer/status"]
        assert world.status(owner).address == address


@pytest.mark.parametrize("count", [1, 12, 200])
def test_a_change_of_backends_costs_one_slice_and_one_status_write(count):
    """However many there are: one comes, one fails, one leaves (upstream: 10.8 passes at 12)."""
    world = World()
    owner = world.balancer()
    many = [backend(f"vm{i}", f"10.52.{i // 250}.{1 + i % 250}") for i in range(count)]
    world.grant(owner, "192.0.2.10")
    world.resolve(owner, *many)
    world.wait(1)
    one_more = backend("vm-new", "10.53.0.1")
    world.resolve(owner, one_more, *many)
    assert said(world.wait(1)) == ["EndpointSlice", "LoadBalancer/status"]
    world.verdict(owner, one_more, False, dummy="")
    assert said(world.wait(1)) == ["EndpointSlice", "LoadBalancer/status"]
    world.resolve(owner, *many)
    assert said(world.wait(1)) == ["EndpointSlice", "LoadBalancer/status"]
    assert world.wait(1) == []


def test_more_than_a_thousand_endpoints_are_split_and_joined_again():
    """A slice holds a thousand; what is left over is deleted when the backends are fewer."""
    world = World()
    owner = world.balancer()
    many = [backend(f"vm{i}", f"10.{i // 65536}.{i // 256 % 256}.{i % 256}") for i in range(2001)]
    world.grant(owner, "192.0.2.10")
    world.resolve(owner, *many)
    world.wait(1)
    sizes = [len(world.slice(name).endpoints) for name in ("web", "web.2", "web.3")]
    assert sizes == [1000, 1000, 1]
    assert len(world.status(owner).backends) == 100
    assert len(world.status(owner).backend_servers) == 2001

    world.resolve(owner, *many[:3])
    world.wait(1)
    assert len(world.slice("web").endpoints) == 3
    assert (world.slice("web.2"), world.slice("web.3")) == (None, None)


def test_both_families_and_own_ports_have_slices_of_their_own():
    """IPv6 endpoints and explicit backends with a port can't share a slice with the rest."""
    world = World()
    owner = world.balancer(ipFamilies=["IPv4", "IPv6"])
    world.grant(owner, "192.0.2.10")
    world.resolve(
        owner,
        backend(),
        backend("vm2", "2001:db8::7"),
        backend("box", "10.9.9.9", kind="Address", port=9090),
        families=["IPv4", "IPv6"],
    )
    world.wait(1)
    four, six, own = (world.slice(n) for n in ("web", "web.ipv6", "web.port-9090"))
    assert (four.address_type, six.address_type) == ("IPv4", "IPv6")
    assert [e.addresses for e in six.endpoints] == [["2001:db8::7"]]
    assert (own.ports[0].port, own.endpoints[0].target_ref) == (9090, None)
    assert world.service().spec.ip_families == ["IPv4", "IPv6"]


IMAGES = st.lists(
    st.dictionaries(st.sampled_from([0, 9090, 9091]), st.booleans(), max_size=3), max_size=6
)


@given(IMAGES)
def test_report_17_something_is_ready_between_the_writes_of_several_slices(images):
    """Backends with ports of their own come, go, fail and recover: the slices take turns, so that
    a ready endpoint is shown after every single write, and all end as wanted."""
    world = World()
    owner = world.balancer()
    world.grant(owner, "192.0.2.10")
    world.resolve(owner)
    world.wait(1)

    def shown():
        names = [ref for ref in world.api.objects if ref.plural == "endpointslices"]
        return [e for ref in names for e in world.api.view(ref).endpoints or []]

    put = world.api.put

    def put_and_look(ref, new):
        put(ref, new)
        assert any(endpoint.conditions.ready for endpoint in shown())

    world.api.put = put_and_look
    for image in images:
        backends = [
            backend(f"b{port}", f"10.9.9.{port % 97}", ready=ready, kind="Address", port=port)
            for port, ready in sorted(image.items())
        ]
        world.resolve(owner, *backends)
        world.wait(1)
        ready = {e.addresses[0] for e in shown() if e.conditions.ready}
        assert ready == {b.address for b in backends if b.ready} or {DUMMY}


def test_extension_fields_pass_to_the_service_by_field_or_annotation():
    """Traffic policy, affinity, node ports: for clusters with Harvester's CRDs too."""
    world = World()
    by_field = world.balancer(
        externalTrafficPolicy="Local",
        sessionAffinity="ClientIP",
        allocateLoadBalancerNodePorts=False,
    )
    notes = {
        "lbledger.io/external-traffic-policy": "Local",
        "lbledger.io/session-affinity": "ClientIP",
        "lbledger.io/allocate-node-ports": "false",
    }
    by_note = world.create(
        "loadbalancers", "noted", {"listeners": LISTENERS}, metadata={"annotations": notes}
    )
    for owner in (by_field, by_note):
        world.grant(owner, "192.0.2.10")
        world.resolve(owner, backend())
    world.wait(1)
    for name in ("web", "noted"):
        spec = world.service(name).spec
        assert spec.external_traffic_policy == "Local"
        assert spec.session_affinity == "ClientIP"
        assert spec.allocate_load_balancer_node_ports is False


def test_cluster_load_balancer_is_a_ticket_of_one_write():
    """No Service, no slice, no address of ours in status; Ready as soon as there is a lease."""
    world = World()
    owner = world.balancer(workloadType="cluster", listeners=None)
    world.grant(owner, "192.0.2.10")
    assert said(world.wait(5)) == ["LoadBalancer/status"]
    assert world.condition(owner).status == "True"
    assert [c.type for c in world.status(owner).conditions] == ["Ready", "AddressAllocated"]
    world.api.edit(owner.ref, status={"address": "192.0.2.10"})
    assert world.wait(5) == [], "the guest cluster writes the address, and nobody undoes it"


def test_report_63_a_new_uid_starts_with_nothing_of_the_old():
    """Deleted and created again under one name: no condition, no lease, no slice of the old one."""
    world, owner = ready_world()
    lease = world.state.owners[owner.uid].leases[0].lease
    for ref in (owner.ref, SERVICE, SLICE):
        world.api.put(ref, None)
    fresh = world.balancer()
    world.run()
    world.release(owner, lease, "192.0.2.10")
    late = world.resolve(owner, backend("old", "10.52.9.9"))
    assert late.owner.uid == owner.uid
    assert world.wait(5) == []
    assert world.status(fresh) is None
    assert owner.uid not in world.state.owners

    world.grant(fresh, "192.0.2.11")
    world.resolve(fresh)
    world.wait(1)
    assert world.condition(fresh).last_transition_time == "2026-11-30T12:00:06Z"
    assert world.status(fresh).address == "192.0.2.11"


def test_deleting_load_balancer_is_left_alone():
    """No write and no finalizer of ours can hold up a deletion."""
    world, owner = ready_world()
    world.api.edit(owner.ref, metadata={"deletionTimestamp": "2026-11-30T12:00:00Z"})
    world.resolve(owner)
    assert world.wait(60) == []


def test_nothing_is_told_before_the_prober_was_read():
    """A load balancer that shows Ready keeps it while the word on its backends is still unread."""
    world, owner = ready_world()
    fresh = World()
    fresh.api = world.api
    fresh.now = world.now
    fresh.grant(owner, "192.0.2.10")
    assert fresh.wait(3600) == []
    fresh.resolve(owner, backend())
    assert fresh.wait(60) == []


def test_new_load_balancer_tells_after_a_while_that_the_prober_is_silent():
    """With the prober down a new load balancer is not mute."""
    world = World()
    owner = world.balancer()
    world.grant(owner, "192.0.2.10")
    assert said(world.wait(5)) == ["LoadBalancer/status"]
    assert world.condition(owner, "BackendsResolved").reason == "WaitingForProber"
    assert world.condition(owner).status != "True"


def test_nothing_is_planned_before_everything_is_listed():
    """A partial view is no ground for a write."""
    world = World()
    owner = world.balancer()
    world.state.synced.discard("services")
    world.grant(owner, "192.0.2.10")
    world.resolve(owner, backend())
    assert world.wait(60) == []
    world.state.synced.add("services")
    world.state.resume()
    assert len(world.wait(1)) == 4


def test_verdicts_that_overtake_their_image_are_kept_for_it():
    """The two come on two subjects; whatever comes first, the slice ends as the prober meant."""
    world = World()
    owner = world.balancer()
    vm = backend(ready=False, state="unknown")
    world.grant(owner, "192.0.2.10")
    revision = world.revision(owner)
    world.verdict(owner, vm, True)
    world.resolve(owner, vm, checked=True)  # said first, read second
    world.state.owners[owner.uid].backends = None
    fresh = World()
    owner = fresh.balancer()
    fresh.grant(owner, "192.0.2.10")
    fresh.revisions[owner.uid] = revision
    fresh.verdict(owner, vm, True)
    fresh.revisions[owner.uid] = revision - 1
    fresh.resolve(owner, vm, checked=True)
    fresh.wait(1)
    assert [e.addresses for e in fresh.slice().endpoints if e.conditions.ready] == [["10.52.1.7"]]
    assert fresh.condition(owner).status == "True"


def test_generation_alone_is_no_reason_without_a_subresource():
    """There each status write raises the generation: following it would never end."""
    for form, writes in (("subresource", ["LoadBalancer/status"]), ("main-resource", [])):
        world, owner = ready_world(**FORMS[form])
        world.api.edit(owner.ref, spec={"description": "changed"})
        assert said(world.wait(5)) == writes
        assert world.wait(60) == []


def test_conditions_of_other_writers_are_kept():
    """Ours are set beside theirs."""
    world = World()
    owner = world.balancer()
    foreign = {"type": "example.org/Audited", "status": "True", "reason": "Done", "message": "x"}
    world.api.edit(owner.ref, status={"conditions": [foreign]})
    world.grant(owner, "192.0.2.10")
    world.resolve(owner, backend())
    world.wait(1)
    assert world.condition(owner, "example.org/Audited").reason == "Done"
    assert world.condition(owner).status == "True"


def test_transition_time_moves_with_the_status_only():
    """A new message keeps lastTransitionTime and moves lastUpdateTime."""
    world, owner = ready_world()
    first = world.condition(owner, "BackendsHealthy")
    world.wait(100)
    world.resolve(owner, backend(), backend("vm2", "10.52.1.8"))
    world.wait(1)
    second = world.condition(owner, "BackendsHealthy")
    assert first.message != second.message
    assert first.last_transition_time == second.last_transition_time
    assert first.last_update_time < second.last_update_time
    world.resolve(owner)
    world.wait(1)
    third = world.condition(owner, "BackendsHealthy")
    assert third.last_transition_time > second.last_transition_time


def test_each_backend_is_told_with_its_last_change_and_its_last_error():
    """The error stays when it recovers, and what is shown already is not written again."""
    world = World()
    owner = world.balancer()
    vm = backend(state="healthy", ready=True)
    world.grant(owner, "192.0.2.10")
    world.resolve(owner, vm, checked=True)
    world.wait(1)
    told = []
    for ready in (False, True):
        world.verdict(owner, vm, ready)
        at = world.now
        world.wait(60)
        (shown,) = world.status(owner).backends
        assert shown.since == f"{at:%Y-%m-%dT%H:%M:%SZ}"
        told.append((shown.state, shown.message, shown.last_error))
    error = "connection refused"
    assert told == [("unhealthy", error, ""), ("healthy", "", error)]
    world.restart()
    world.state.touch(owner.uid)
    assert world.wait(60) == []


def test_status_waits_for_the_echo_of_the_ingress_but_not_for_ever():
    """One status write tells the whole story; without an echo it tells what is shown, in time."""
    for shown in (True, False):
        world = World()
        owner = world.balancer()
        world.grant(owner, "192.0.2.10")
        world.resolve(owner, backend())
        world.deliver()
        first = world.run(show=False)
        assert said(first) == ["EndpointSlice", "Service", "Service/status"]
        if not shown:
            world.deliver = lambda count=None: None  # the watcher is behind
        assert said(world.wait(1)) == ["LoadBalancer/status"]
        assert world.condition(owner).status == ("True" if shown else "False")


def test_a_verdict_older_than_the_image_says_nothing():
    """The two come on two subjects: what the image already knew does not undo it."""
    world, owner = ready_world()
    revision = world.revisions[owner.uid]
    world.revisions[owner.uid] = revision - 1
    world.verdict(owner, backend(), False)
    assert world.wait(1) == []
    assert world.condition(owner).status == "True"


def test_an_owner_without_a_lease_is_forgotten_when_it_goes():
    """Nothing is kept of what is gone and holds nothing; a late word does not bring it back."""
    world = World()
    owner = world.balancer()
    world.refuse(owner)
    world.resolve(owner)
    world.wait(1)
    world.api.put(owner.ref, None)
    world.run()
    assert world.state.owners == {}
    world.resolve(owner)
    world.refuse(owner)
    assert world.state.owners == {}
    assert not any(key.name == "web" for key in world.state.targets)
