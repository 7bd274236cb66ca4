"""Egress pods, gateways and finalizers. Ids name the rows of docs/nrp-conformance.md."""

from datetime import UTC, datetime

import pytest

from schema import events
from schema.names import NRP_FINALIZER
from services.nrp_sync import core, egress
from services.nrp_sync import provider as port
from services.nrp_sync.sources import Name
from services.nrp_sync.steps import Phase
from tests.core.nrp_world import POLICY, World, node, pod, service, slice_of, uid

A, A6, B = "172.16.0.1", "2001:db8:f::1", "172.16.0.2"
GONE = datetime(2026, 11, 30, tzinfo=UTC)


def rows(*names):
    """Rows that a test stands for."""
    return pytest.mark.parametrize("row", names)


def begun(*pods):
    w = World(POLICY._replace(read_interval=1e6))
    w.see(node("n1", A), node("n2", B), *pods)
    return w


def served(*pods):
    w = begun(*pods)
    w.run()
    w.check_equal()
    w.history.clear()
    return w


def held(w):
    return {
        place: {address: set(names) for address, names in addresses.items()}
        for place, addresses in w.provider.locations.items()
    }


def op(w, gateway="shop"):
    return w.state.operations.get(("outbound", gateway))


def verbs(w):
    return [str(r.parts[0].step.verb) if r.parts else r.verb for r in w.history if r.lane != "read"]


def until(w, verb):
    for _ in range(30):
        w.tick(POLICY.latency)
        found = [r for r in w.flying if (r.parts and r.parts[0].step.verb == verb)]
        if found:
            return found[0]
        w.answer_all()
    raise AssertionError(f"{verb} never came")


def has_finalizer(w, name):
    view = w.objects.get(("pods", Name("default", name)))
    return view is not None and NRP_FINALIZER in (view.metadata.finalizers or ())


def terminating(name, number, *addresses, label="shop", **over):
    return pod(name, number, label, *addresses, finalizer=True, deletion_timestamp=GONE, **over)


# --- coming ---


@rows("G01", "A07", "Z37")
@pytest.mark.parametrize("phase", ["Running", "Pending"])
def test_pod_gets_a_gateway(row, phase):
    """Public IP, NAT gateway, registration, addresses, in this order."""
    w = begun(pod("p", 1, "shop", "10.0.0.1", phase=phase))
    w.run()
    assert verbs(w) == ["put_public_ip", "put_balancer", "register", "update_address_locations"]
    assert held(w) == {A: {"10.0.0.1": {"shop"}}}


@rows("G02")
@pytest.mark.parametrize(
    "made",
    [
        pod("p", 1, "", "10.0.0.1"),
        pod("p", 1, "shop", "10.0.0.1", deletion_timestamp=GONE),
        pod("p", 1, "shop", "10.0.0.1", phase="Failed"),
        pod("p", 1, "shop", "10.0.0.1", phase="Succeeded"),
        pod("p", 1, "shop", "10.0.0.1", phase="Unknown"),
        pod("p", 1, "shop", "10.0.0.1", node_name=""),
        pod("p", 1, "shop"),
    ],
    ids=["label", "terminating", "failed", "succeeded", "unknown", "no-node", "no-address"],
)
def test_other_pods_are_not_followed(row, made):
    """Without label, node or address, or past its life, a pod asks for nothing."""
    w = begun(made)
    w.run()
    assert verbs(w) == []
    assert not has_finalizer(w, "p")


@rows("G04", "R14")
@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ("../x", "ServiceGatewayInvalidEgressLabel"),
        ("default-natgw", "ServiceGatewayReservedEgressLabel"),
        (uid(9), "ServiceGatewayInvalidEgressLabel"),
    ],
)
def test_label_that_names_no_gateway_is_told(row, label, reason):
    """The pod is left alone, and why is told."""
    w = begun(pod("p", 1, label, "10.0.0.1"))
    w.run()
    assert verbs(w) == []
    image = w.images("p", "pods")
    assert (image.reason, image.finalizer) == (reason, False)


@rows("9.21")
def test_gateways_can_be_kept_to_namespaces(row):
    """Where it is set who may leave by what, others are left alone, and why is told."""
    w = World(POLICY._replace(egress_allowed=("default/*", "team-*/Team-Gw")))
    w.see(
        node("n1", A),
        pod("mine", 1, "shop", "10.0.0.1"),
        pod("theirs", 2, "shop", "10.0.0.2", namespace="team-a"),
        pod("own", 3, "team-gw", "10.0.0.3", namespace="team-a"),
    )
    w.run()
    assert held(w) == {A: {"10.0.0.1": {"shop"}, "10.0.0.3": {"team-gw"}}}
    image = w.state.told["pods", Name("team-a", "theirs")]
    assert (image.reason, image.finalizer) == ("ServiceGatewayEgressNotAllowed", False)
    assert "team-a" in image.message


@rows("9.21-later")
def test_pod_that_may_not_any_more_is_let_go_after_its_addresses(row):
    """A start with narrower settings drains the pod first; its finalizer stays until then."""
    w = begun(pod("p", 1, "shop", "10.0.0.1"), pod("q", 2, "shop", "10.0.0.2"))
    w.run()
    w.policy = w.policy._replace(egress_allowed=("other/*",))
    w.restart()
    assert has_finalizer(w, "p")
    assert w.images("p", "pods").finalizer
    w.run()
    assert held(w) == {}
    assert op(w) is None
    assert not has_finalizer(w, "p")
    assert w.images("p", "pods").reason == "ServiceGatewayEgressNotAllowed"


@rows("G05")
def test_malformed_address_is_left_out_alone(row):
    """The other address of the pod is sent, and why the one is not is told."""
    w = begun(pod("p", 1, "shop", "10.0.0.1", "bad"))
    w.run()
    assert held(w) == {A: {"10.0.0.1": {"shop"}}}
    image = w.images("p", "pods")
    assert (image.reason, image.finalizer) == ("ServiceGatewayInvalidPodIP", True)


@rows("G06", "Z43", "I03")
def test_each_address_goes_under_its_own_family(row):
    """A dual-stack pod is an address behind each location of its node; a missing one is told."""
    w = begun(pod("p", 1, "shop", "10.0.0.1", "2001:db8::1"))
    w.run()
    assert held(w) == {A: {"10.0.0.1": {"shop"}}}
    assert w.images("p", "pods").reason == "ServiceGatewayNoNodeLocation"
    w.see(node("n1", A, A6))
    w.run()
    assert held(w) == {A: {"10.0.0.1": {"shop"}}, A6: {"2001:db8::1": {"shop"}}}
    assert w.images("p", "pods").reason == "Accepted"


@rows("G07", "8.3-4.9")
def test_pod_without_its_finalizer_is_served_in_the_end(row):
    """A finalizer that can't be had is waited for, then gone without, visibly."""
    w = begun(pod("p", 1, "shop", "10.0.0.1"))
    for _ in range(10):
        w.tick(POLICY.finalizer_grace / 20)
        w.answer_all()
    assert verbs(w) == []
    w.tick(POLICY.finalizer_grace)
    assert w.images("p", "pods").reason == "ServiceGatewayFinalizerAddFailed"
    assert any(note.metric == "pod_finalizer_add_failed_total" for note in w.state.notes)
    for _ in range(20):
        w.tick(1)
        w.answer_all()
    assert held(w) == {A: {"10.0.0.1": {"shop"}}}
    w.restart()
    for _ in range(5):
        w.tick(1)
        w.answer_all()
    assert held(w) == {A: {"10.0.0.1": {"shop"}}}


@rows("G08", "G22")
def test_fact_about_a_pod_before_it_touches_only_that(row):
    """A deletion that names another uid does not touch the pod that has the name now."""
    w = served(pod("p", 2, "shop", "10.0.0.1"))
    egress.gone_pod(w.state, Name("default", "p"), uid(1), now=w.now)
    w.run()
    w.check_equal()


@rows("G09", "E38-egress")
def test_gateway_that_is_there_is_used(row):
    """A second pod costs one batch of addresses."""
    w = served(pod("p", 1, "shop", "10.0.0.1"))
    w.see(pod("q", 2, "Shop", "10.0.0.2", finalizer=True))
    w.run()
    assert verbs(w) == ["update_address_locations"]
    assert held(w) == {A: {"10.0.0.1": {"shop"}, "10.0.0.2": {"shop"}}}


@rows("K09", "K12", "Z39", "8.1.3")
def test_pod_in_both_roles_keeps_one(row):
    """A backend that stops leaving by a gateway is still a backend, and the other way round."""
    w = served(pod("p", 1, "shop", "10.0.0.1"))
    w.see(service("web", 9), slice_of("web-a", "web", ["10.0.0.1"]))
    w.run()
    assert held(w) == {A: {"10.0.0.1": {"shop", uid(9)}}}
    w.see(slice_of("web-a", "web", []))
    w.run()
    assert held(w) == {A: {"10.0.0.1": {"shop"}}}
    w.see(slice_of("web-a", "web", ["10.0.0.1"]), terminating("p", 1, "10.0.0.1"))
    w.run()
    assert held(w) == {A: {"10.0.0.1": {uid(9)}}}
    assert op(w) is None


@rows("I21", "Z42", "9.13")
def test_gateway_has_the_clusters_families(row):
    """Dual once a node is, also when that comes later; an IPv4 address in disguise is none."""
    w = begun(pod("p", 1, "shop", "10.0.0.1"), node("n3", "::ffff:172.16.0.3"))
    w.run()
    assert w.provider.nat_gateways["shop"].public_ips_v6 == ()
    w.see(node("n2", B, "2001:db8:f::2"))
    w.run()
    assert w.provider.nat_gateways["shop"].public_ips_v6 == ("shop-pip-v6",)
    assert held(w) == {A: {"10.0.0.1": {"shop"}}}
    w.see(node("n2", B))
    w.run()
    assert w.provider.nat_gateways["shop"].public_ips_v6 == ("shop-pip-v6",)
    w.check_equal()


# --- changing ---


@rows("G29", "G30", "G31", "G32", "8.2.27")
@pytest.mark.parametrize(
    ("change", "there"),
    [
        pytest.param({"addresses": ["10.0.0.9"]}, {A: {"10.0.0.9": {"shop"}}}, id="address"),
        pytest.param(
            {"addresses": ["10.0.0.1", "10.0.0.9"]},
            {A: {"10.0.0.1": {"shop"}, "10.0.0.9": {"shop"}}},
            id="one-more",
        ),
        pytest.param({"node_name": "n2"}, {B: {"10.0.0.1": {"shop"}}}, id="node"),
        pytest.param({"phase": "Pending"}, {A: {"10.0.0.1": {"shop"}}}, id="phase"),
        pytest.param({"label": "SHOP"}, {A: {"10.0.0.1": {"shop"}}}, id="case"),
    ],
)
def test_pod_that_changes_while_it_lives_keeps_gateway_and_finalizer(row, change, there):
    """Only what differs is sent; the gateway is not touched, the finalizer stays."""
    w = served(pod("p", 1, "shop", "10.0.0.1"))
    over = dict(change)
    label, addresses = over.pop("label", "shop"), over.pop("addresses", ["10.0.0.1"])
    w.see(pod("p", 1, label, *addresses, finalizer=True, **over))
    w.run()
    assert held(w) == there
    assert set(verbs(w)) <= {"update_address_locations"}
    assert has_finalizer(w, "p")
    assert op(w).phase is Phase.CREATED


@rows("G29-label", "Z43-label", "K10")
def test_pod_that_changes_its_gateway_moves(row):
    """It leaves the old one, which is torn down with its last pod, and keeps its finalizer."""
    w = served(pod("p", 1, "shop", "10.0.0.1"))
    w.see(pod("p", 1, "bank", "10.0.0.1", finalizer=True))
    w.run()
    w.check_equal()
    assert held(w) == {A: {"10.0.0.1": {"bank"}}}
    assert op(w) is None
    assert has_finalizer(w, "p")


@rows("G29-leaving")
@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"phase": "Succeeded"}, id="succeeded"),
        pytest.param({"phase": "Failed"}, id="failed"),
        pytest.param({"phase": "Unknown"}, id="unknown"),
        pytest.param({"addresses": []}, id="addresses-lost"),
        pytest.param({"label": ""}, id="label-emptied"),
    ],
)
def test_pod_that_ends_leaves_its_gateway(row, change):
    """Its addresses leave, the gateway goes with its last pod, then the finalizer."""
    w = served(pod("p", 1, "shop", "10.0.0.1"))
    over = dict(change)
    label, addresses = over.pop("label", "shop"), over.pop("addresses", ["10.0.0.1"])
    w.see(pod("p", 1, label, *addresses, finalizer=True, **over))
    w.run()
    assert held(w) == {}
    assert op(w) is None
    assert not has_finalizer(w, "p")
    w.see(pod("p", 1, "shop", "10.0.0.1"))
    w.run()
    w.check_equal()


# --- going ---


@rows("G17", "F06", "Z33-one")
def test_pod_goes_when_its_addresses_have_left(row):
    """One of several: the finalizer stays until its addresses are acknowledged away."""
    w = served(pod("p", 1, "shop", "10.0.0.1"), pod("q", 2, "shop", "10.0.0.2"))
    w.see(terminating("q", 2, "10.0.0.2"))
    w.tick(POLICY.latency)
    (request,) = w.flying
    w.apply_finalizers()
    assert has_finalizer(w, "q")
    w.answer(request)
    w.apply_finalizers()
    assert not has_finalizer(w, "q")
    assert op(w).phase is Phase.CREATED


@rows("G18", "F07", "A08", "A09", "Z33-last")
def test_last_pod_goes_when_its_gateway_is_gone(row):
    """Addresses, parting, registration, NAT gateway, public IPs; only then the finalizer."""
    w = served(pod("p", 1, "shop", "10.0.0.1"))
    w.see(terminating("p", 1, "10.0.0.1"))
    for _ in range(20):
        if op(w) is None:
            break
        w.apply_finalizers()
        assert has_finalizer(w, "p")
        w.tick(POLICY.latency)
        w.answer_all()
    assert verbs(w) == [
        "update_address_locations",
        "detach",
        "unregister",
        "delete_balancer",
        "delete_public_ip",
    ]
    w.apply_finalizers()
    assert not has_finalizer(w, "p")


@rows("G19", "F06-families")
def test_all_addresses_of_a_pod_have_to_leave(row):
    """With one family left the finalizer stays."""
    w = begun(
        node("n1", A, A6),
        pod("p", 1, "shop", "10.0.0.1", "2001:db8::1"),
        pod("q", 2, "shop", "10.0.0.2"),
    )
    w.run()
    w.see(terminating("p", 1, "10.0.0.1", "2001:db8::1"))
    w.state.provided.busy.add(A6)  # as if something about it were under way
    w.tick(POLICY.latency)
    w.answer_all()
    w.apply_finalizers()
    assert has_finalizer(w, "p")
    w.state.provided.busy.discard(A6)
    w.run()
    assert not has_finalizer(w, "p")
    w.check_equal()


@rows("G20", "G21", "8.3.28")
def test_told_twice_that_it_ends_is_once(row):
    """A second terminating fact neither lets the pod go early nor starts anything."""
    w = served(pod("p", 1, "shop", "10.0.0.1"), pod("q", 2, "shop", "10.0.0.2"))
    w.see(terminating("q", 2, "10.0.0.2"))
    w.see(terminating("q", 2, "10.0.0.2"))
    w.see(terminating("q", 2))
    w.apply_finalizers()
    assert has_finalizer(w, "q")
    w.run()
    assert verbs(w) == ["update_address_locations"]
    assert not has_finalizer(w, "q")


@rows("G10", "G11", "8.2-4.9")
def test_pod_that_goes_before_anything_was_asked_leaves_nothing(row):
    """The gateway is forgotten without a request."""
    w = begun(pod("p", 1, "shop", "10.0.0.1"))
    w.apply_finalizers()
    assert op(w) is not None
    w.see(terminating("p", 1, "10.0.0.1"))
    w.run()
    assert verbs(w) == []
    assert op(w) is None
    assert not has_finalizer(w, "p")


@rows("G12", "G13", "F15", "8.3.31", "8.4.45")
@pytest.mark.parametrize("ends", ["ok", "refused", "unknown-applied"])
@pytest.mark.parametrize("verb", ["put_public_ip", "put_balancer", "register"])
def test_pod_that_goes_during_the_creation_waits_for_its_undoing(row, ends, verb):
    """What was made is deleted before the finalizer goes."""
    w = begun(pod("p", 1, "shop", "10.0.0.1"))
    w.apply_finalizers()
    request = until(w, verb)
    w.see(terminating("p", 1, "10.0.0.1"))
    w.apply_finalizers()
    assert has_finalizer(w, "p")
    if ends == "ok":
        w.answer(request)
    elif ends == "refused":
        w.answer(request, port.Conflict(request.verb, "injected"))
    else:
        w.answer(request, port.Unknown(request.verb, "lost"), applied=True)
    w.run()
    w.check_equal()
    assert not has_finalizer(w, "p")
    if ends == "ok":
        assert not [e for e in w.said if isinstance(e, events.ProviderOperationFailed)]


@rows("G14", "Z40")
def test_gateway_whose_deletion_has_not_begun_is_revived(row):
    """A new pod while addresses drain: the gateway stays, the old pod goes after its drain."""
    w = served(pod("p", 1, "shop", "10.0.0.1"))
    w.see(terminating("p", 1, "10.0.0.1"))
    assert op(w).phase is Phase.DRAINING
    w.see(pod("q", 2, "shop", "10.0.0.2", finalizer=True))
    assert op(w).phase is Phase.CREATED
    w.run()
    assert set(verbs(w)) == {"update_address_locations"}
    assert not has_finalizer(w, "p")
    w.check_equal()


@rows("G15", "8.2.26")
def test_gateway_whose_deletion_has_begun_is_made_anew(row):
    """A new pod during the deletion: deleted to the end, then created afresh."""
    w = served(pod("p", 1, "shop", "10.0.0.1"))
    w.see(terminating("p", 1, "10.0.0.1"))
    until(w, "detach")
    w.see(pod("q", 2, "shop", "10.0.0.2", finalizer=True))
    assert op(w).deleting
    w.run()
    w.check_equal()
    assert verbs(w)[-4:] == [
        "put_public_ip",
        "put_balancer",
        "register",
        "update_address_locations",
    ]
    assert not has_finalizer(w, "p")


@rows("G23", "hostNetwork")
def test_address_that_two_pods_share_stays_with_one(row):
    """Pods on the host's network share an address: one goes without waiting for the other."""
    w = served(pod("p", 1, "shop", A), pod("q", 2, "shop", A))
    w.see(terminating("q", 2, A))
    w.run()
    assert held(w) == {A: {A: {"shop"}}}
    assert not has_finalizer(w, "q")
    assert has_finalizer(w, "p")


@rows("G25", "G28", "I12")
@pytest.mark.parametrize("addresses", [("10.0.0.7",), ()], ids=["known", "unknown"])
def test_pod_that_we_know_nothing_of_waits_for_what_the_provider_holds(row, addresses):
    """After a loss of our rows: a terminating pod is held while the provider maps its address."""
    w = served(pod("q", 2, "shop", "10.0.0.2"))
    w.checks = False
    w.provider.locations[A]["10.0.0.7"] = ("shop",)
    fresh = World(POLICY._replace(read_interval=1e6))
    fresh.provider, fresh.checks = w.provider, False
    fresh.see(node("n1", A), pod("q", 2, "shop", "10.0.0.2", finalizer=True))
    fresh.see(terminating("p", 7, *addresses))
    fresh.tick()
    fresh.apply_finalizers()
    assert has_finalizer(fresh, "p")
    fresh.run()
    assert held(fresh) == {A: {"10.0.0.2": {"shop"}}}
    assert not has_finalizer(fresh, "p")


@rows("G27", "G34", "E19-pod")
def test_pod_that_carries_our_finalizer_for_nothing_is_let_go(row):
    """Nothing of it is at the provider, and that is known: the finalizer goes at once."""
    w = served(pod("q", 2, "shop", "10.0.0.2"))
    w.see(terminating("p", 1, "10.0.0.1"), pod("r", 3, "", "10.0.0.3", finalizer=True))
    w.apply_finalizers()
    assert not has_finalizer(w, "p")
    assert not has_finalizer(w, "r")
    assert verbs(w) == []


@rows("F09", "G36")
def test_pod_of_the_same_name_is_another_one(row):
    """A replacement is followed by itself; the old one's traces hold nothing of it."""
    w = served(pod("p", 1, "shop", "10.0.0.1"))
    w.see(terminating("p", 1, "10.0.0.1"))
    w.see(pod("p", 2, "shop", "10.0.0.5"))
    assert set(w.state.releases) <= {uid(2)}
    w.run()
    w.check_equal()
    assert held(w) == {A: {"10.0.0.5": {"shop"}}}
    assert has_finalizer(w, "p")


@rows("F08", "F11", "F15-retry")
def test_gateway_that_can_not_be_deleted_holds_its_last_pod(row):
    """As long as the deletion fails the finalizer stays."""
    w = served(pod("p", 1, "shop", "10.0.0.1"))
    w.see(terminating("p", 1, "10.0.0.1"))
    request = until(w, "delete_balancer")
    w.answer(request, port.Conflict("delete_nat_gateway", "busy"))
    w.apply_finalizers()
    assert has_finalizer(w, "p")
    w.run()
    assert not has_finalizer(w, "p")


@rows("F12")
def test_gateways_do_not_wait_for_each_other(row):
    """The deletion of one holds only its own pods."""
    w = served(pod("p", 1, "shop", "10.0.0.1"), pod("q", 2, "bank", "10.0.0.2"))
    w.see(terminating("p", 1, "10.0.0.1"), terminating("q", 2, "10.0.0.2"))
    until(w, "detach")
    (one,) = [r for r in w.flying if r.target == "bank"]
    for _ in range(10):
        for request in [r for r in w.flying if r is not one]:
            w.answer(request)
        w.tick(POLICY.latency)
    w.apply_finalizers()
    assert has_finalizer(w, "q")
    assert not has_finalizer(w, "p")
    w.run()
    w.check_equal()


@rows("report-21-pods", "4.13.5")
def test_pods_are_held_on_a_partial_view(row):
    """Before every list is complete no pod is let go."""
    w = served(pod("p", 1, "shop", "10.0.0.1"), pod("q", 2, "shop", "10.0.0.2"))
    core.new_epoch(w.state)
    w.see(terminating("q", 2, "10.0.0.2"))
    for _ in range(5):
        w.tick(1)
        w.answer_all()
        w.apply_finalizers()
    assert has_finalizer(w, "q")
    assert "10.0.0.2" in held(w)[A]
    w.synced()
    w.run()
    assert not has_finalizer(w, "q")


@rows("C02", "K14", "K15")
def test_pods_come_and_go_and_nothing_is_left(row):
    """However many: in the end there is no gateway, no address, no count."""
    w = served(*(pod(f"p{n}", n, "shop", f"10.0.0.{n}") for n in range(1, 30)))
    for n in range(1, 30):
        w.see(terminating(f"p{n}", n, f"10.0.0.{n}"))
    w.run()
    w.check_equal()
    assert w.state.provided.mapped == {}
    assert w.state.provided.population == {}
    assert w.state.provided.unsettled == {}
    assert w.state.releases == {}
    assert w.state.gateways == {}


@rows("subjects")
def test_gateway_with_an_underscore_has_a_subject(row):
    """A label may hold `_`, a subject may not: the owner's name is escaped, its uid is not."""
    w = begun(pod("p", 1, "my_shop", "10.0.0.1"))
    w.run()
    started = [e for e in w.said if isinstance(e, events.ProviderOperationStarted)]
    egress_events = [e for e in started if e.owner.plural == "egresses"]
    assert {(e.owner.name, e.owner.uid) for e in egress_events} == {("my=shop", "my_shop")}
    for event in egress_events:
        assert events.subject_of(event) == "lb.provider.egresses._.my=shop"
