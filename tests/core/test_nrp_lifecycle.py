"""The life of a service at the provider: creation, change, deletion, and all that crosses them.

Ids name the rows of docs/nrp-conformance.md.
"""

from datetime import UTC, datetime

import pytest

from schema import events, objects
from services.nrp_sync import core, operations, steps
from services.nrp_sync import provider as port
from services.nrp_sync.batches import LocationCall
from services.nrp_sync.effects import failure_of
from services.nrp_sync.operations import Operation
from services.nrp_sync.sources import Name
from services.nrp_sync.steps import Mark, Phase, Retrying
from services.nrp_sync.wishes import load_balancer
from tests.core.nrp_world import POLICY, World, node, pod, port_of, service, slice_of, uid

A = "172.16.0.1"
WEB = uid(1)
GONE = datetime(2026, 11, 30, tzinfo=UTC)


def rows(*names):
    """Rows that a test stands for."""
    return pytest.mark.parametrize("row", names)


def op(world, number=1):
    return world.state.operations.get(("inbound", uid(number)))


def start():
    """A node, a Service and an address of it; nothing has been asked of the provider."""
    w = World(POLICY._replace(read_interval=1e6))
    w.see(node("n1", A), service("web", 1), slice_of("web-a", "web", ["10.0.0.1"]))
    return w


def creating(verb="put_public_ip"):
    """With the request of a sub-step of the creation under way."""
    w = start()
    w.apply_finalizers()
    return until(w, verb)


def until(w, verb):
    for _ in range(30):
        w.tick(POLICY.latency)
        if any(_verb(r) == verb for r in w.flying):
            return w
        w.answer_all()
    raise AssertionError(f"{verb} never came")


def _verb(request):
    return str(request.parts[0].step.verb) if request.parts else request.verb


def created():
    w = start()
    w.run()
    w.history.clear()
    return w


def updating():
    w = created()
    w.see(service("web", 1, ports=[(81, 8080)], finalizer=True))
    return until(w, "put_balancer")


def draining():
    """Its Service is gone, its address is on its way out."""
    w = created()
    w.gone(service("web", 1))
    return until(w, "update_address_locations")


def deleting(verb="clear"):
    w = created()
    w.gone(service("web", 1))
    return until(w, verb)


def retyped(**over):
    return service("web", 1, type="ClusterIP", load_balancer_class="", finalizer=True, **over)


def verbs(w):
    return [_verb(r) for r in w.history if r.lane != "read"]


def fail(w, cls, verb=None, **facts):
    (request,) = [r for r in w.flying if verb is None or _verb(r) == verb]
    w.answer(request, cls(request.verb, "injected", **facts))


# --- creation -------------------------------------------------------------------------------------


@rows("E01", "E05", "F01")
def test_service_begins_with_its_finalizer(row):
    """Following a Service begins by asking for our finalizer; nothing else is asked yet."""
    w = start()
    assert op(w).phase is Phase.NOT_STARTED
    assert (op(w).namespace, op(w).name) == ("default", "web")
    assert w.images().finalizer
    for _ in range(3):
        w.tick(10)
        w.answer_all()
    assert verbs(w) == []


@rows("A04", "E22", "4.13.1", "Z01", "Z30")
def test_creation_goes_in_order(row):
    """Public IP, load balancer, registration, addresses; then the public address is told."""
    w = start()
    w.run()
    assert verbs(w) == ["put_public_ip", "put_balancer", "register", "update_address_locations"]
    assert op(w).phase is Phase.CREATED
    image = w.images()
    assert image.addresses == [w.provider.public_ips[f"{WEB}-pip"].address]
    assert (image.in_step, image.backends, image.reason) == (True, 1, "Registered")


@rows("E02", "E12", "E38", "9.9")
def test_what_is_there_already_is_not_made_again(row):
    """A service that the provider has, as it should be, is taken over without a request."""
    w = created()
    fresh = World()
    fresh.provider = w.provider
    fresh.see(node("n1", A), service("web", 1), slice_of("web-a", "web", ["10.0.0.1"]))
    fresh.run()
    assert verbs(fresh) == []
    assert op(fresh).phase is Phase.CREATED
    fresh.see(slice_of("web-a", "web", ["10.0.0.2"]))
    fresh.run()
    fresh.check_equal()


@rows("E03", "E09", "Z14", "report-59")
@pytest.mark.parametrize("again", [{}, {"generation": 5}, {"annotations": {"x": "y"}}])
def test_same_spec_again_changes_nothing(row, again):
    """A Service that is seen again with the same wish keeps its phase, and nothing is sent."""
    w = created()
    w.see(service("web", 1, finalizer=True, **again))
    w.run()
    assert verbs(w) == []
    assert w.images().generation == again.get("generation", 1)


@rows("E04", "S11", "E15")
def test_unknown_names_are_no_ops(row):
    """Facts about what we do not follow are passed over."""
    w = created()
    w.gone(service("nobody", 77))
    w.gone(slice_of("nothing", "web", []))
    w.gone(pod("nobody", 78))
    w.run()
    assert verbs(w) == []


@rows("E06", "R10", "Z22", "I06")
@pytest.mark.parametrize(
    ("over", "reason"),
    [
        ({"session_affinity": "ClientIP"}, "UnsupportedSessionAffinity"),
        ({"ip_families": ["IPv4", "IPv6"]}, "UnsupportedDualStack"),
        ({"ports": [port_of(80, "http")]}, "UnsupportedNamedTargetPort"),
        ({"ports": [port_of(80, 80, "SCTP")]}, "UnsupportedProtocol"),
    ],
)
def test_refused_service_is_told_and_never_made(row, over, reason):
    """A wish that can't be met is an image with the reason; the provider hears nothing."""
    w = World()
    w.see(service("web", 1, **over))
    w.run()
    assert verbs(w) == []
    image = w.images()
    assert (image.reason, image.in_step, image.finalizer) == (reason, False, False)


@rows("E05", "Z25")
def test_service_without_ports_waits_for_some(row):
    """A Service without ports asks for nothing until it has one."""
    w = World()
    w.see(service("web", 1, ports=[]))
    w.run()
    assert verbs(w) == []
    assert w.images().reason == "NoPorts"
    w.see(service("web", 1))
    w.run()
    w.check_equal()


@rows("E07", "8.2.19")
def test_terminating_service_is_not_begun(row):
    """A Service on its way out asks for nothing."""
    w = World()
    w.see(service("web", 1, deletion_timestamp=GONE, finalizer=True))
    w.run()
    assert verbs(w) == []
    assert not w.objects


@rows("A01", "A02")
def test_service_that_goes_before_it_was_made_leaves_nothing(row):
    """A Service that is gone before the first request is forgotten without one."""
    w = start()
    w.gone(service("web", 1))
    w.run()
    assert verbs(w) == []
    assert op(w) is None


@rows("E11")
def test_change_before_and_during_the_creation_is_taken_along(row):
    """A new spec replaces the old one; what is under way ends first."""
    w = creating("put_balancer")
    w.see(service("web", 1, ports=[(82, 8080)], finalizer=True))
    assert op(w).phase is Phase.CREATING
    w.run()
    assert [r.frontend_port for r in w.provider.load_balancers[WEB].rules] == [82]
    assert verbs(w).count("put_balancer") == 2


@rows("A03", "8.2.21", "no-address")
def test_missing_public_address_withholds_no_backends(row):
    """While the provider has given no address the service is registered and its backends synced."""
    w = creating()
    (request,) = w.flying
    ip = w.provider.public_ips
    w.answer(request)
    operation = op(w)
    operation.addresses[f"{WEB}-pip"] = ""
    for _ in range(6):
        w.tick(POLICY.latency)
        for flying in list(w.flying):
            if _verb(flying) != "put_public_ip":
                w.answer(flying)
    assert WEB in w.provider.services
    assert w.provider.locations == {A: {"10.0.0.1": (WEB,)}}
    assert w.images().addresses == []
    w.run()
    assert w.images().addresses == [ip[f"{WEB}-pip"].address]


# --- trouble on the way ---


@rows("E23", "A07", "U02")
@pytest.mark.parametrize("verb", ["put_public_ip", "put_balancer", "register"])
@pytest.mark.parametrize(
    "cls", [port.Conflict, port.Unreachable, port.NotFound, port.AuthFailed, port.Unknown]
)
def test_passing_failure_is_tried_again_later(row, verb, cls):
    """After a failure that may pass the same step is tried again, after a growing wait."""
    w = creating(verb)
    fail(w, cls, verb)
    assert op(w).retries == 1
    assert w.now < op(w).retry_at <= w.now + 1.2
    sent = len(w.history)
    w.tick(0.5)
    assert len(w.history) == sent
    w.run()
    w.check_equal()
    assert op(w).retries == 0


@rows("E24", "E41", "U06", "9.8")
def test_refused_creation_is_parked(row):
    """What the provider will not accept is parked and told; a new spec is tried at once."""
    w = creating("put_balancer")
    fail(w, port.Invalid, code="BadRule")
    image = w.images()
    assert (image.reason, image.message) == ("Rejected", "BadRule: injected")
    sent = len(w.history)
    w.see(service("web", 1, finalizer=True))
    w.tick(60)
    assert len(w.history) == sent
    failed = [e for e in w.said if isinstance(e, events.ProviderOperationFailed)]
    assert failed[-1].retry_at is None
    w.see(service("web", 1, ports=[(83, 8080)], finalizer=True))
    w.run()
    w.check_equal()


@rows("E25", "8.2.18")
@pytest.mark.parametrize("make", [lambda: creating("put_balancer"), updating])
def test_refusal_of_an_old_spec_does_not_park_a_new_one(row, make):
    """The spec was put right while the bad attempt was under way: it is tried, not parked."""
    w = make()
    w.see(service("web", 1, ports=[(84, 8080)], finalizer=True))
    fail(w, port.Invalid, "put_balancer")
    assert op(w).parked == ""
    w.run()
    w.check_equal()


@rows("U02", "U03", "U04", "M02-park")
@pytest.mark.parametrize("verb", ["put_balancer", "delete_balancer"])
def test_operation_that_ran_out_of_tries_rests_and_starts_again(row, verb):
    """After its tries an operation is parked, rests, and goes on by itself."""
    w = creating(verb) if verb == "put_balancer" else deleting(verb)
    for attempt in range(1, POLICY.retrying.tries + 1):
        fail(w, port.Conflict, verb)
        assert op(w).retries == attempt
        if attempt < POLICY.retrying.tries:
            w.tick(40)
    assert op(w).parked == "retries_exceeded"
    assert op(w).retry_at == w.now + POLICY.retrying.cooldown
    w.tick(60)
    assert not w.flying
    w.tick(300)
    assert [_verb(r) for r in w.flying if r.parts] == [verb]
    w.run()
    w.check_equal()


@rows("U05")
@pytest.mark.parametrize("what", ["change", "delete"])
def test_fresh_intent_gets_a_fresh_budget(row, what):
    """A parked operation begins anew when its wish changes."""
    w = creating("put_balancer")
    for _ in range(POLICY.retrying.tries):
        fail(w, port.Conflict)
        w.tick(40)
    assert op(w).parked
    if what == "change":
        w.see(service("web", 1, ports=[(85, 8080)], finalizer=True))
    else:
        w.gone(service("web", 1))
    assert (op(w).parked, op(w).retries, op(w).retry_at) == ("", 0, 0.0)
    w.run()
    w.check_equal()


@rows("U05-repair")
def test_repair_takes_up_what_was_parked(row):
    """An operator's repair ends every rest."""
    w = creating("put_balancer")
    fail(w, port.QuotaExceeded)
    assert w.images().reason == "QuotaExceeded"
    core.repair(w.state, w.now)
    w.tick()
    assert any(_verb(r) == "put_balancer" for r in w.flying)


@rows("report-54-412", "azure-792")
def test_precondition_is_tried_again_at_once(row):
    """An etag that moved is no reason to wait: what is put is complete, once more is enough."""
    w = creating("put_balancer")
    fail(w, port.PreconditionFailed)
    w.tick()
    assert [_verb(r) for r in w.flying] == ["put_balancer"]


@rows("9.7", "report-54-429", "retry-after")
@pytest.mark.parametrize("verb", ["put_public_ip", "register", "update_address_locations"])
def test_nothing_is_sent_before_retry_after(row, verb):
    """What the provider asks to wait holds for every request, and new changes do not shorten it."""
    w = creating(verb)
    fail(w, port.Throttled, verb, retry_after=30.0)
    sent = len(w.history)
    for n in range(10):
        w.see(slice_of("web-a", "web", [f"10.0.0.{n + 1}"]))
        w.see(service("api", 2, finalizer=True))
        w.tick(2.9)
        assert len(w.history) == sent
    w.run()
    w.check_equal()
    assert op(w).parked == ""


@rows("backoff")
def test_waits_double_to_a_cap_and_are_spread(row):
    """1, 2, 4 ... 30 seconds and up to a fifth more, the same for the same try."""
    retrying = Retrying()
    waits = [retrying.backoff(n, "x") for n in range(1, 20)]
    for n, wait in enumerate(waits):
        base = min(2.0**n, 30.0)
        assert base <= wait <= base * 1.2
    assert waits == [retrying.backoff(n, "x") for n in range(1, 20)]
    assert len({retrying.backoff(1, str(n)) for n in range(20)}) > 10


# --- change ---


@rows("E10", "E31", "A05", "Z11", "Z13", "Z17")
@pytest.mark.parametrize(
    "ports", [[(81, 8080)], [(80, 9090)], [(80, 8080), (443, 8443)], [port_of(80, 8080, "UDP")]]
)
def test_change_is_one_put_of_the_load_balancer(row, ports):
    """Nothing else is touched; what is not listed any more is gone by omission."""
    w = created()
    w.see(service("web", 1, ports=ports, finalizer=True))
    assert op(w).phase is Phase.UPDATING
    w.run()
    assert verbs(w) == ["put_balancer"]
    w.check_equal()
    assert op(w).phase is Phase.CREATED
    assert w.provider.load_balancers[WEB].rules == load_balancer(WEB, op(w).wanted).rules


@rows("E32", "Z12", "E08")
def test_change_during_a_change_is_sent_after_it(row):
    """The last wish wins, and nothing between is sent for its own sake."""
    w = updating()
    for number in (82, 83, 84):
        w.see(service("web", 1, ports=[(number, 8080)], finalizer=True))
    w.run()
    assert verbs(w) == ["put_balancer", "put_balancer"]
    assert [r.frontend_port for r in w.provider.load_balancers[WEB].rules] == [84]


@rows("E31-transient")
@pytest.mark.parametrize("applied", [False, True])
def test_change_without_answer_is_put_again(row, applied):
    """Whether a change was applied is found out by making it again."""
    w = updating()
    (request,) = w.flying
    w.answer(request, port.Unknown("put_load_balancer", "lost"), applied=applied)
    assert op(w).phase is Phase.UPDATING
    assert WEB in w.provider.services
    w.run()
    assert w.provider.locations == {A: {"10.0.0.1": (WEB,)}}
    w.check_equal()


@rows("E33", "Z16", "E41-update")
@pytest.mark.parametrize(
    "over", [{"ports": [port_of(80, "http")]}, {"session_affinity": "ClientIP"}]
)
def test_service_changed_to_what_can_not_be_had_keeps_what_it_has(row, over):
    """The old configuration is served, its backends are followed, and the reason is told."""
    w = created()
    w.see(service("web", 1, finalizer=True, **over))
    w.see(slice_of("web-a", "web", ["10.0.0.2"]))
    w.run()
    assert verbs(w) == ["update_address_locations"]
    assert w.provider.locations == {A: {"10.0.0.2": (WEB,)}}
    image = w.images()
    assert image.reason.startswith("Unsupported")
    assert image.addresses
    assert "stays served" in image.message


# --- deletion ---


@rows("A06", "E17", "E29", "4.13.3", "Z32")
def test_deletion_goes_in_order(row):
    """Addresses, pool, load balancer, registration, public IP; then the object is let go."""
    w = created()
    w.see(service("web", 1, finalizer=True, deletion_timestamp=GONE))
    w.run()
    assert verbs(w) == [
        "update_address_locations",
        "clear",
        "delete_balancer",
        "unregister",
        "delete_public_ip",
    ]
    assert op(w) is None
    assert not [key for key in w.objects if key[0] == "services"]


@rows("E16")
def test_deletion_without_addresses_begins_at_once(row):
    """Nothing refers to the service: there is nothing to wait for."""
    w = created()
    w.see(slice_of("web-a", "web", []))
    w.run()
    w.history.clear()
    w.gone(service("web", 1))
    assert op(w).phase is Phase.DELETING


@rows("E18")
@pytest.mark.parametrize("make", [start, creating, created, updating])
def test_deletion_wins_over_everything(row, make):
    """Whatever it was about, a service whose object is gone is deleted, and nothing is left."""
    w = make()
    w.gone(service("web", 1))
    w.run()
    w.check_equal()
    assert op(w) is None


@rows("E26", "8.2.10", "kubernetes-59255")
@pytest.mark.parametrize("verb", ["put_public_ip", "put_balancer", "register"])
@pytest.mark.parametrize("ends", ["ok", "refused", "unknown", "unknown-applied"])
def test_deletion_during_a_creation_cleans_up_what_was_made(row, verb, ends):
    """The sub-step under way ends first, then exactly what was made is deleted."""
    w = creating(verb)
    (request,) = w.flying
    w.gone(service("web", 1))
    assert op(w).deleting
    assert op(w).flight == request.number
    for _ in range(3):
        w.tick(1)
    assert w.flying == [request]
    if ends == "ok":
        w.answer(request)
    elif ends == "refused":
        w.answer(request, port.Conflict(request.verb, "injected"))
    else:
        w.answer(request, port.Unknown(request.verb, "lost"), applied=ends.endswith("applied"))
    assert op(w) is None or op(w).deleting
    w.run()
    w.check_equal()


@rows("E27", "E28", "8.2.11", "8.2.12")
@pytest.mark.parametrize("failing", [False, True])
def test_deletion_during_a_change(row, failing):
    """The change ends, well or not, and the deletion goes on."""
    w = updating()
    w.gone(service("web", 1))
    if failing:
        fail(w, port.Conflict, "put_balancer")
    w.run()
    w.check_equal()


@rows("E19", "9.11")
def test_service_that_carries_our_finalizer_for_nothing_is_let_go(row):
    """Our finalizer on an object that we hold nothing for is taken off, tracked or not."""
    w = World()
    w.see(retyped())
    assert not w.images().finalizer
    w.run()
    assert verbs(w) == []
    assert w.objects["services", Name("default", "web")].metadata.finalizers is None
    assert w.state.services == {}
    assert w.state.told == {}


@rows("E20")
def test_deletion_is_idempotent(row):
    """Being told again that it is not wanted changes nothing."""
    w = created()
    w.see(retyped())
    before = op(w).generation, op(w).phase, op(w).retries
    w.see(retyped(generation=2))
    assert (op(w).generation, op(w).phase, op(w).retries) == before


@rows("E14", "E34", "Z31", "8.2.16", "8.2.17")
@pytest.mark.parametrize("make", [draining, deleting])
def test_service_that_comes_back_during_its_deletion_is_made_anew(row, make):
    """LoadBalancer, ClusterIP, LoadBalancer: deleted to the end, then created afresh."""
    w = created()
    w.see(retyped())
    until(w, "update_address_locations" if make is draining else "clear")
    phase = op(w).phase
    w.see(service("web", 1, finalizer=True))
    assert op(w).phase is phase
    assert op(w).recreate is not None
    w.run()
    w.check_equal()
    assert verbs(w)[-4:] == [
        "put_public_ip",
        "put_balancer",
        "register",
        "update_address_locations",
    ]
    assert w.images().finalizer


@rows("E21")
def test_second_deletion_ends_the_wish_to_come_back(row):
    """Wanted again, then not: it is not resurrected."""
    w = created()
    w.see(retyped())
    until(w, "clear")
    w.see(service("web", 1, finalizer=True))
    w.see(retyped())
    w.run()
    w.check_equal()
    assert op(w) is None


@rows("E34-parked")
def test_coming_back_begins_without_the_parks_of_before(row):
    """A service that is made anew has a fresh budget and no old error."""
    w = creating("put_balancer")
    fail(w, port.Invalid)
    w.see(retyped())
    until(w, "delete_public_ip")
    w.see(service("web", 1, finalizer=True))
    w.run()
    assert (op(w).phase, op(w).parked, op(w).error_code) == (Phase.CREATED, "", "")


@rows("E35", "8.2.13")
def test_mappings_that_we_did_not_know_are_drained_again(row):
    """The provider says that addresses still refer to it: we read, drain, and only then go on."""
    w = deleting("unregister")
    w.checks = False
    w.provider.locations = {A: {"10.0.0.1": (WEB,)}}
    w.answer_all()
    assert op(w).phase is Phase.DRAINING
    assert w.state.read_wanted
    sent = len([v for v in verbs(w) if v == "unregister"])
    w.tick(0.1)
    assert len([v for v in verbs(w) if v == "unregister"]) == sent
    w.run()
    w.check_equal()


@rows("A06-trouble", "A08-trouble")
@pytest.mark.parametrize("verb", ["clear", "delete_balancer", "unregister", "delete_public_ip"])
@pytest.mark.parametrize("cls", [port.Conflict, port.Unknown, port.InUse, port.Invalid])
def test_deletion_that_fails_is_tried_until_it_is_done(row, verb, cls):
    """A failing step holds the finalizer, and nothing is forgotten."""
    w = deleting(verb)
    fail(w, cls, verb)
    assert op(w) is not None
    w.run()
    w.check_equal()


@rows("Z10", "Z41", "F03", "report-38")
def test_service_of_the_same_name_is_another_one(row):
    """Deleted and created again under one name: both lives are complete, neither touches the other.

    The tombstone of the old one may come before or after the new one is seen.
    """
    w = created()
    w.see(service("web", 2))
    w.gone(service("web", 1))
    w.see(service("web", 2))
    w.run()
    w.check_equal()
    assert set(w.provider.load_balancers) == {uid(2)}


@rows("E30", "E37", "U07")
def test_answer_that_nobody_waits_for_is_passed_over(row):
    """The outcome of a request that is not known changes nothing."""
    w = creating()
    (request,) = w.flying
    w.answer(request)
    before = op(w).marks.copy()
    w.flying.append(request)
    w.answer(request)
    assert op(w).marks == before


@rows("E36")
@pytest.mark.parametrize(
    ("cls", "kind"),
    [(port.OverlayMappings, "overlay_mappings"), (port.Conflict, "conflict")],
)
def test_failures_have_their_class(row, cls, kind):
    """What an error means is its class, never a guess at its text."""
    assert failure_of(cls("update_services", "ServiceWithOverlayMappings...")).kind == kind


@rows("E39")
def test_a_service_is_ready_while_it_is_registered_and_stays(row):
    """[2.6] Registered and not being deleted: in every phase."""
    for phase in Phase:
        made = Operation(kind="inbound", identity=WEB, phase=phase)
        assert not made.serving
        made.marks[steps.REGISTRATION] = Mark.YES
        assert made.serving is (phase not in (Phase.DRAINING, Phase.DELETING))
        made.marks[steps.REGISTRATION] = Mark.MAYBE
        assert not made.serving


@rows("U01")
def test_only_what_has_a_next_step_is_sent(row):
    """[U01] Created and draining services are left alone; the others take their next step."""
    for phase in Phase:
        made = Operation(kind="inbound", identity=WEB, phase=phase)
        made.wanted = core.read_service(service())
        made.marks = {steps.BALANCER: Mark.YES}
        step = operations.next_step(made, held_back=False)
        if phase is Phase.DRAINING:
            assert step is None
        elif phase is Phase.DELETING:
            assert step.verb is steps.Verb.DELETE_BALANCER
        else:
            assert step.verb is steps.Verb.PUT_PUBLIC_IP


@rows("E40", "C01")
def test_one_writer_for_each_service(row):
    """While a request about a service is under way no other one is begun."""
    w = creating()
    for number in range(86, 90):
        w.see(service("web", 1, ports=[(number, 8080)], finalizer=True))
        w.tick(5)
    assert len(w.flying) == 1


@rows("Z02", "Z03", "Z08", "10.4-coalesced")
def test_many_services_are_registered_together(row):
    """Registrations that come together are one request, in order."""
    w = World()
    w.see(node("n1", A))
    for number in range(1, 16):
        w.see(service(f"s{number}", number))
        w.see(slice_of(f"s{number}", f"s{number}", [f"10.0.0.{number}"], number=100 + number))
    w.run()
    w.check_equal()
    batches = [r for r in w.history if r.verb == "update_services"]
    assert len(batches) <= 3
    assert len([r for r in w.history if isinstance(r.payload, LocationCall)]) <= 3


@rows("Z51")
def test_finalizer_asked_for_when_the_object_is_already_going(row):
    """An object that is deleted before our finalizer was written does not hold anything up."""
    w = start()
    w.see(service("web", 1, deletion_timestamp=GONE))
    w.run()
    assert verbs(w) == []
    told = [e for e in w.said if isinstance(e, events.ProviderStateChanged)]
    assert [e.finalizer for e in told] == [True, False]


@rows("events")
def test_every_request_is_told_by_two_events(row):
    """Started and Succeeded or Failed, with the request's id and the cause."""
    w = creating("put_balancer")
    fail(w, port.Conflict, code="Busy")
    w.run()
    started = [e for e in w.said if isinstance(e, events.ProviderOperationStarted)]
    ended = [
        e
        for e in w.said
        if isinstance(e, events.ProviderOperationSucceeded | events.ProviderOperationFailed)
    ]
    assert [e.request for e in started] == [e.request for e in ended]
    assert all(e.payload_hash and e.request for e in started)
    (failed,) = [e for e in ended if isinstance(e, events.ProviderOperationFailed)]
    assert (failed.code, failed.operation) == ("Busy", "put_balancer")
    assert failed.retry_at is not None
    assert {e.owner.plural for e in started} == {"services", "nodes"}
    for event in started + ended:
        assert events.decode(events.encode(event)) == event
        assert events.subject_of(event).startswith("lb.provider.")


def test_objects_are_compared_by_uid_without_case():
    """[S01] A uid in upper case is the same service."""
    w = World()
    upper = service("web", 1, uid=uid(1).upper())
    w.see(node("n1", A), upper, slice_of("web-a", "web", ["10.0.0.1"]))
    w.run()
    assert w.provider.locations == {A: {"10.0.0.1": (WEB,)}}
    assert isinstance(upper, objects.Service)


def test_an_ended_operation_has_no_next_step():
    """A gateway whose first request failed while its only pod left: it ends between two requests,
    and nothing of it stays in memory."""
    w = World(POLICY._replace(read_interval=1e6))
    w.see(node("n1", A), pod("p", 1, "egress-b", "10.0.0.1"))
    w.synced()
    w.apply_finalizers()
    until(w, "put_public_ip")
    w.see(pod("p", 1, "egress-a"))
    (request,) = [r for r in w.flying if r.target == "egress-b-pip"]
    w.answer(request, port.Throttled(request.verb, "injected", retry_after=3.0))
    w.tick(5.0)
    assert ("outbound", "egress-b") not in w.state.operations
    assert w.state.next_steps.keys() <= w.state.operations.keys()
