"""Batches that fail, start from what the provider holds, drift, and metrics.

Ids name the rows of docs/nrp-conformance.md.
"""

import math

import msgspec
import pytest
from prometheus_client import REGISTRY

from services.nrp_sync import effects, metrics, planning
from services.nrp_sync import provider as port
from services.nrp_sync.batches import Key, Limits, LocationCall
from services.nrp_sync.provider import (
    DEFAULT_SERVICE,
    LoadBalancer,
    NatGateway,
    PublicAddress,
    ServiceKind,
    ServiceRegistration,
)
from services.nrp_sync.sources import Name
from services.nrp_sync.steps import Phase
from tests.core.nrp_world import POLICY, World, node, pod, run_now, service, slice_of, uid

A, B = "172.16.0.1", "172.16.0.2"
WEB, API = uid(1), uid(2)


def rows(*names):
    """Rows that a test stands for."""
    return pytest.mark.parametrize("row", names)


def ready(policy=POLICY):
    w = World(policy._replace(read_interval=1e6))
    w.see(node("n1", A), node("n2", B), service("web", 1), service("api", 2))
    w.run()
    w.history.clear()
    return w


def batches(w):
    return [r for r in w.flying if isinstance(r.payload, LocationCall)]


def refuse_poison(w, poison, error=port.Invalid):
    """Answer every request; batches that carry the poison are refused as the provider would."""
    for request in list(w.flying):
        bad = [p for p in poison if f'"{p}"' in _text(request)]
        w.answer(request, error(request.verb, f"{bad[0]} is bad", code="Bad") if bad else None)


def _text(request):
    return msgspec.json.encode(request.payload).decode() if request.payload else ""


# --- batches that fail ---


@rows("L01", "L02", "A-transient")
@pytest.mark.parametrize(
    "cls", [port.NotFound, port.Conflict, port.Unknown, port.Unreachable, port.AuthFailed]
)
def test_failed_batch_is_sent_again(row, cls):
    """After a failure that may pass the difference is sent again, after a wait."""
    w = ready()
    w.see(slice_of("web-a", "web", ["10.0.0.1"]))
    w.tick(POLICY.latency)
    (request,) = batches(w)
    w.answer(request, cls(request.verb, "injected"))
    w.tick(0.5)
    assert batches(w) == []
    assert w.images().reason == "Retrying"
    w.run()
    w.check_equal()
    assert w.images().reason == "Registered"


@rows("L03", "9.7-churn")
def test_wait_is_a_floor_that_changes_do_not_shorten(row):
    """However much changes meanwhile, a batch that failed waits its time."""
    w = ready()
    w.see(slice_of("web-a", "web", ["10.0.0.1"]))
    for attempt in range(1, 6):
        w.tick(40)
        (request,) = batches(w)
        w.answer(request, port.Unknown(request.verb, "injected"))
        failed = w.now
        while not batches(w):
            w.see(slice_of("web-a", "web", [f"10.0.{attempt}.{int(w.now) % 200 + 1}"]))
            w.tick(0.2)
        assert w.now - failed >= min(2.0 ** (attempt - 1), 30.0)
        (request,) = batches(w)
        w.answer(request)
        w.state.lanes["locations"].retries = attempt
        w.see(slice_of("web-a", "web", [f"10.1.{attempt}.1"]))


@rows("window-churn")
def test_steady_changes_are_one_batch_for_each_window(row):
    """However often pods change, addresses are sent once in the longest latency; a change waits no
    longer than that, also while the batch before it is still under way."""
    w = ready()
    sent, waited, changed = [], [], {}
    for step in range(200):
        address = f"10.0.{step // 250}.{step % 250 + 1}"
        changed[address] = w.now
        w.see(slice_of(f"web-{step}", "web", [address]))
        w.tick()
        for request in batches(w):
            if request.sent_at == w.now:
                sent.append(request)
                keys = [key.address for key in request.payload.keys()]  # noqa: SIM118
                waited += [w.now - changed[key] for key in keys]
            elif request.sent_at <= w.now - 0.06:
                w.answer(request)
        w.now += 0.025
    windows = 200 * 0.025 / POLICY.latency
    assert windows - 1 <= len(sent) <= windows + 1
    assert max(waited) <= POLICY.latency + 0.05
    w.run()
    w.check_equal()


@rows("retry-after-crash")
def test_wait_that_the_provider_asked_for_outlives_a_restart(row):
    """A process that starts anew during a Retry-After keeps to it."""
    w = ready()
    w.see(slice_of("web-a", "web", ["10.0.0.1"]))
    w.tick(POLICY.latency)
    (request,) = w.flying
    w.answer(request, port.Throttled(request.verb, "slow down", retry_after=30.0))
    w.restart()
    sent = len(w.history)
    w.tick(29.0)
    assert w.history[sent:] == []
    w.tick(1.5)
    w.run()
    w.check_equal()


@rows("L04", "L05", "9.6", "Z-quarantine")
@pytest.mark.parametrize("cap", [500, 3])
def test_refused_entry_is_found_and_put_aside(row, cap):
    """400: the batch is halved until the poisoned entry stands alone; all others are sent."""
    w = ready(POLICY._replace(limits=Limits(addresses=cap)))
    good = [f"10.0.0.{n}" for n in range(1, 30)]
    w.see(slice_of("web-a", "web", [*good, "10.0.0.66"]))
    w.see(slice_of("api-a", "api", [("10.0.1.1", "n2"), ("10.0.0.66", "n1")], number=101))
    for _ in range(200):
        w.advance()
        refuse_poison(w, ["10.0.0.66"])
        if w.state.quarantine and not w.flying and w.state.provided.differing() == 1:
            break
    assert set(w.provider.locations[A]) == set(good)
    assert set(w.provider.locations[B]) == {"10.0.1.1"}
    (key,) = w.state.quarantine
    assert key == Key(A, "10.0.0.66")
    for name in ("web", "api"):
        image = w.images(name)
        assert (image.reason, image.in_step) == ("Quarantined", False)
        assert "10.0.0.66" in image.message
    assert w.state.suspects == {}
    assert any(n.metric == "location_sync_terminal_errors_total" for n in w.state.notes)
    sent = len(w.history)
    w.tick(60)
    w.see(slice_of("web-b", "web", ["10.0.0.200"], number=102))
    for _ in range(5):
        w.tick(1)
        w.answer_all()
    refused = [r for r in w.history[sent:] if '"10.0.0.66"' in _text(r)]
    assert refused == []


@rows("L04-change", "L06")
def test_put_aside_until_its_wish_changes_or_time_is_up(row):
    """A refused entry is tried again when its services change, and after a rest."""
    w = ready()
    w.see(slice_of("web-a", "web", ["10.0.0.66"]))
    w.tick(POLICY.latency)
    refuse_poison(w, ["10.0.0.66"])
    assert w.state.quarantine
    w.tick(60)
    assert not batches(w)
    w.see(slice_of("api-a", "api", ["10.0.0.66"], number=101))
    w.tick(POLICY.latency)
    assert len(batches(w)) == 1
    refuse_poison(w, ["10.0.0.66"])
    w.tick(POLICY.retrying.cooldown)
    assert len(batches(w)) == 1
    w.answer_all()
    w.run()
    w.check_equal()
    assert w.state.quarantine == {}


@rows("L06-drain")
def test_refused_removal_holds_its_service_and_is_tried_again(row):
    """A deletion that waits for a refused removal goes on when the removal is accepted."""
    w = ready()
    w.see(slice_of("web-a", "web", ["10.0.0.1"]))
    w.run()
    w.gone(service("web", 1))
    w.tick(POLICY.latency)
    (request,) = batches(w)
    w.answer(request, port.Invalid(request.verb, "never", code="Bad"))
    assert ("inbound", WEB) in w.state.operations
    w.tick(1)
    assert not batches(w)
    w.run()
    w.check_equal()


@rows("report-54-400", "Z-services")
def test_refused_registration_is_found_and_parked(row):
    """A batch of registrations that is refused for one is halved; the others are registered."""
    w = World()
    for number in range(1, 9):
        w.see(service(f"s{number}", number))
    for _ in range(200):
        w.apply_finalizers()
        w.advance()
        for request in list(w.flying):
            bad = request.verb == "update_services" and f'"{uid(5)}"' in _text(request)
            w.answer(request, port.Invalid(request.verb, "no", code="Bad") if bad else None)
        parked = [op for op in w.state.operations.values() if op.parked]
        if parked and len(w.provider.services) == 8:
            break
    assert [op.identity for op in parked] == [uid(5)]
    assert w.images("s5").reason == "Rejected"
    assert {w.images(f"s{n}").reason for n in (1, 2, 3, 4, 6, 7, 8)} == {"Registered"}


@rows("robbiezhang", "lanes")
def test_inbound_and_outbound_fail_apart(row):
    """While registrations of one direction fail, the other direction goes on."""
    w = World()
    w.see(node("n1", A), service("web", 1), pod("p", 50, "shop", "10.0.0.1"))
    for _ in range(60):
        w.apply_finalizers()
        w.advance()
        for request in list(w.flying):
            bad = request.lane == "outbound"
            w.answer(request, port.Conflict(request.verb, "busy") if bad else None)
    assert WEB in w.provider.services
    assert "shop" not in w.provider.services
    w.run()
    w.check_equal()


@rows("L07", "8.4.42")
def test_long_outage_is_counted_once_and_never_given_up(row):
    """A batch is tried for ever; a long run of failures is counted once."""
    w = ready()
    w.see(slice_of("web-a", "web", ["10.0.0.1"]))
    for _ in range(30):
        w.tick(40)
        for request in batches(w):
            w.answer(request, port.Unreachable(request.verb, "down"))
    counted = [n for n in w.state.notes if n.metric == "location_sync_abandoned_total"]
    assert len(counted) == 1
    w.run()
    w.check_equal()


@rows("L09", "U08", "crash")
@pytest.mark.parametrize("reached", [True, False])
def test_request_of_a_dead_process_is_settled(row, reached):
    """It may still arrive for a moment; then what it touched is unknown, and is sent again."""
    w = ready()
    w.see(slice_of("web-a", "web", ["10.0.0.1"]))
    w.see(service("web", 1, ports=[(81, 8080)], finalizer=True))
    w.tick(POLICY.latency)
    assert len(w.flying) == 2
    for request in list(w.flying):
        if reached:
            w.reach(request)
    w.restart()
    w.tick(POLICY.orphan_grace / 2)
    assert [r.lane for r in w.flying] == ["read"]
    w.run()
    w.check_equal()


# --- start ---


def holding():
    """A provider with things of ours, of others, and its own."""
    w = ready()
    w.see(slice_of("web-a", "web", ["10.0.0.1"]), pod("p", 50, "shop", "10.0.0.2"))
    w.run()
    return w.provider


def begin(provider, *views):
    w = World(POLICY._replace(read_interval=1e6))
    w.provider, w.checks = provider, False
    w.see(*views)
    return w


@rows("I02", "I05", "I13", "D01", "D02", "Z50")
def test_what_nobody_wants_any_more_is_swept(row):
    """After a loss of our rows, services of ours that the cluster does not want are deleted."""
    w = begin(holding(), node("n1", A), service("api", 2, finalizer=True))
    w.run()
    w.checks = True
    w.check_equal()
    assert set(w.provider.load_balancers) == {API}
    assert {op.orphan for op in w.state.operations.values()} == {False}
    cleaned = [n for n in w.state.notes if n.metric == "orphaned_resources_cleaned_total"]
    assert len(cleaned) == 2


@rows("I13-parts", "I09", "I15", "8.5.52")
@pytest.mark.parametrize("left", ["balancer", "public_ip", "registration", "gateway"], ids=str)
def test_parts_of_ours_that_were_left_are_swept(row, left):
    """Also a single resource that a creation or deletion left behind, found by its exact name."""
    w = begin(ready().provider, node("n1", A), service("web", 1), service("api", 2))
    provider, name = w.provider, uid(77)
    if left in ("balancer", "public_ip"):
        provider.public_ips[f"{name}-pip"] = PublicAddress(name=f"{name}-pip")
    if left == "balancer":
        provider.load_balancers[name] = LoadBalancer(name=name, public_ip=f"{name}-pip")
    if left == "registration":
        provider.services[name] = ServiceRegistration(name=name, kind=ServiceKind.INBOUND)
    if left == "gateway":
        provider.public_ips["old-pip"] = PublicAddress(name="old-pip")
        provider.nat_gateways["old"] = NatGateway(name="old", public_ips=("old-pip",))
    w.run()
    w.checks = True
    w.check_equal()


@rows("I08", "8.5.46", "4.13.9", "foreign")
def test_what_is_not_ours_stays(row):
    """The provider's default, and resources that carry no name of our making."""
    w = begin(ready().provider, node("n1", A), service("web", 1), service("api", 2))
    p = w.provider
    p.public_ips["jump-pip"] = PublicAddress(name="jump-pip")
    p.load_balancers["kubernetes"] = LoadBalancer(name="kubernetes", public_ip="jump-pip")
    p.nat_gateways["theirs"] = NatGateway(name="theirs", public_ips=(), attached=False)
    p.services["legacy"] = ServiceRegistration(name="legacy", kind=ServiceKind.INBOUND)
    p.locations[B] = {"10.9.9.9": (DEFAULT_SERVICE,)}
    w.run()
    assert {"jump-pip", f"{DEFAULT_SERVICE}-pip"} <= set(p.public_ips)
    assert "kubernetes" in p.load_balancers
    assert "theirs" in p.nat_gateways
    assert {"legacy", DEFAULT_SERVICE} <= set(p.services)
    assert p.locations == {B: {"10.9.9.9": (DEFAULT_SERVICE,)}}
    assert w.history[1:] == []


@rows("foreign-addresses")
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("theirs", [DEFAULT_SERVICE, "legacy"])
def test_what_others_map_on_our_nodes_stays(row, theirs, restarted):
    """Their addresses, and their services on addresses of ours, through everything we do there."""
    w = ready()
    w.see(node("n2", B))
    p = w.provider
    p.services["legacy"] = ServiceRegistration(name="legacy", kind=ServiceKind.INBOUND)
    p.locations[A] = {"10.9.9.9": (theirs,), "10.0.0.1": (theirs,)}
    w.state.read_wanted = True
    w.run()
    assert [r for r in w.history if r.lane == "locations"] == []
    w.checks = False  # it looks for names of ours only
    w.see(slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2", ("10.0.0.3", "n2")]))
    w.run()
    both = tuple(sorted([WEB, theirs]))
    others = {"10.9.9.9": (theirs,)}
    assert p.locations[A] == others | {"10.0.0.1": both, "10.0.0.2": (WEB,)}
    assert w.state.provided.deviant == {}
    if restarted:
        w.restart()
        w.tick()
    w.see(slice_of("web-a", "web", [("10.0.0.3", "n2")]))
    w.run()
    assert p.locations == {A: others | {"10.0.0.1": (theirs,)}, B: {"10.0.0.3": (WEB,)}}
    w.gone(w.objects["services", Name("default", "web")])
    w.run()
    assert p.locations == {A: others | {"10.0.0.1": (theirs,)}}
    assert {"legacy", DEFAULT_SERVICE} <= set(p.services)
    p.locations = {}
    w.state.read_wanted = True
    w.run()
    assert (w.state.provided.foreign, w.rows.located) == ({}, {})


@rows("foreign-unusable")
def test_what_can_not_be_ours_is_not_taken_for_known(row):
    """Text that is no address, and addresses of the other family, are passed over."""
    w = ready()
    w.checks, p = False, w.provider
    p.locations["nowhere"] = {"10.0.0.9": (WEB,)}
    p.locations["::2"] = {"::3": (WEB,)}
    p.locations["172.16.0.77"] = {"2001:db8::7": (WEB,), "x": (WEB,)}
    w.state.read_wanted = True
    w.run()
    assert not {"nowhere", "::2", "172.16.0.77"} & w.rows.located.keys()
    assert {key.location for key in w.rows.addresses} <= {A}
    assert w.images().in_step


@rows("I06", "8.5.48")
def test_refused_service_that_is_provided_stays(row):
    """A Service that would be refused today keeps what the provider has for it."""
    provider = holding()
    w = begin(
        provider,
        node("n1", A),
        service("web", 1, session_affinity="ClientIP", finalizer=True),
        service("api", 2, finalizer=True),
        slice_of("web-a", "web", ["10.0.0.1", "10.0.0.3"]),
    )
    w.run()
    assert WEB in provider.load_balancers
    assert set(provider.locations[A]) == {"10.0.0.1", "10.0.0.3"}
    assert w.images().reason == "UnsupportedSessionAffinity"
    assert w.images().finalizer
    w.gone(service("web", 1))
    w.run()
    assert WEB not in provider.load_balancers


@rows("I07")
def test_service_of_both_directions_is_both(row):
    """InboundOutbound counts as either; nothing of it is taken for an orphan while it is wanted."""
    w = ready()
    w.checks = False
    registered = w.provider.services[WEB]
    both = ServiceRegistration(
        name=WEB, kind=ServiceKind.BOTH, load_balancer=registered.load_balancer
    )
    w.provider.services[WEB] = both
    w.state.read_wanted = True
    w.run()
    assert w.history == [r for r in w.history if r.lane == "read"]


@rows("I19", "I20", "I-unreadable")
@pytest.mark.parametrize("op", ["list_services", "list_address_locations", "list_public_ips"])
def test_reading_that_fails_is_no_reading(row, op):
    """A list that can't be read in full starts nothing and deletes nothing; it is tried again."""
    w = begin(holding(), node("n1", A), service("api", 2, finalizer=True))
    w.provider.fail(port.Unreadable(op, "cut off"), times=3)
    for _ in range(3):
        w.tick(POLICY.latency)
        (request,) = w.flying
        assert request.lane == "read"
        w.answer_all()
        w.now += 40
    assert w.state.read_at == 0
    w.run()
    assert set(w.provider.load_balancers) == {API}


@rows("I17", "I16", "I22")
def test_park_holds_up_nobody_else(row):
    """A service that can't be made does not delay the addresses of those that are there."""
    provider = holding()
    w = begin(
        provider,
        node("n1", A),
        service("web", 1, finalizer=True),
        service("bad", 9, finalizer=True),
        slice_of("web-a", "web", ["10.0.0.5"]),
    )
    for _ in range(30):
        w.apply_finalizers()
        w.advance()
        for request in list(w.flying):
            bad = any(part.identity == uid(9) for part in request.parts)
            w.answer(request, port.QuotaExceeded(request.verb, "no more") if bad else None)
    assert set(provider.locations[A]) == {"10.0.0.5"}
    assert w.images("bad").reason == "QuotaExceeded"


@rows("I18", "4.12-status")
def test_public_address_is_told_after_a_loss_of_our_rows(row):
    """What the provider has is told again, without asking it for anything."""
    provider = holding()
    w = begin(provider, node("n1", A), service("web", 1), service("api", 2))
    w.see(slice_of("web-a", "web", ["10.0.0.1"]), pod("p", 50, "shop", "10.0.0.2", finalizer=True))
    w.run()
    assert w.images().addresses == [provider.public_ips[f"{WEB}-pip"].address]
    assert [r.lane for r in w.history] == ["read"]


@rows("report-57-start", "9.2", "9.5")
def test_nothing_is_sent_before_the_provider_was_read(row):
    """The first thing is to look; before every list is complete not even that."""
    w = World(synced=False)
    w.provider = holding()
    w.see(node("n1", A), service("web", 1, finalizer=True))
    w.tick(10)
    assert w.flying == []
    w.synced()
    w.tick(10)
    assert [r.lane for r in w.flying] == ["read"]


# --- drift ---


@rows("9.5", "9.15", "drift")
@pytest.mark.parametrize(
    "what", ["rules", "balancer", "registration", "pool", "public_ip", "address", "location"]
)
def test_drift_is_found_and_repaired(row, what):
    """Whatever somebody changed by hand, the next reading finds it, and it is put right."""
    w = ready()
    w.see(slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2"]))
    w.run()
    w.checks, p = False, w.provider
    if what == "rules":
        p.load_balancers[WEB] = LoadBalancer(name=WEB, public_ip=f"{WEB}-pip")
    elif what == "balancer":
        del p.load_balancers[WEB]
    elif what == "registration":
        del p.services[WEB]
        p.locations = {}
    elif what == "pool":
        p.services[WEB] = ServiceRegistration(name=WEB, kind=ServiceKind.INBOUND)
    elif what == "public_ip":
        del p.public_ips[f"{WEB}-pip"]
        del p.load_balancers[WEB]
    elif what == "address":
        p.locations[A] = {"10.0.0.1": (API,), "10.0.0.3": (WEB,)}
    else:
        del p.locations[A]
    w.state.read_wanted = True
    w.run()
    w.check_equal()
    assert p.services[WEB].load_balancer == WEB
    assert len(p.load_balancers[WEB].rules) == 1
    assert w.state.drift_found > 0


@rows("drift-refused")
def test_refusal_for_what_somebody_took_away_is_healed_at_once(row):
    """An address refused since its registration is gone makes us look, register and send again."""
    w = ready()
    w.see(slice_of("web-a", "web", ["10.0.0.1"]))
    w.run()
    w.checks, p = False, w.provider
    del p.services[WEB]
    p.locations.clear()
    w.now += 60
    began = w.now
    w.see(slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2"]))
    w.run()
    assert p.locations == {A: {"10.0.0.1": (WEB,), "10.0.0.2": (WEB,)}}
    assert w.now - began < POLICY.retrying.cooldown / 2
    assert w.state.quarantine == {}
    assert w.rows.quarantine == {}


@rows("drift-race")
def test_reading_says_nothing_of_what_changed_meanwhile(row):
    """What was sent or acknowledged while the reading went on is not undone by it."""
    w = ready()
    w.state.read_wanted = True
    w.tick()
    (reading,) = w.flying
    outcome = run_now(effects.perform(w.provider, reading))  # read before the change ...
    w.see(slice_of("web-a", "web", ["10.0.0.1"]))
    w.see(service("web", 1, ports=[(81, 8080)], finalizer=True))
    for _ in range(6):
        w.tick(POLICY.latency)
        for request in [r for r in w.flying if r is not reading]:
            w.answer(request)
    w.flying.remove(reading)
    w.finish(reading, outcome)  # ... and taken after it
    assert w.state.provided.deviant == {}
    assert w.state.operations["inbound", WEB].phase is Phase.CREATED
    assert w.state.drift_found == 0


@rows("periodic")
def test_provider_is_read_every_so_often(row):
    """A reading is due when the last is old enough, and at once on demand."""
    w = World()
    w.see(service("web", 1))
    w.run()
    due = planning.next_due(w.state, w.now)
    assert due == pytest.approx(w.state.read_at + POLICY.read_interval)
    w.tick(POLICY.read_interval)
    assert [r.lane for r in w.flying] == ["read"]
    w.answer_all()
    assert planning.next_due(w.state, w.now) > w.now


@rows("idle")
def test_nothing_is_due_without_work(row):
    """Before anything is known, or all lists are complete, there is no moment to wait for."""
    assert planning.next_due(World(synced=False).state, 0.0) == math.inf


# --- metrics ---


@rows("M01", "M05", "M02")
def test_each_attempt_is_one_sample(row):
    """Success and error apart, with the class of the error, once each."""
    w = World(POLICY._replace(read_interval=1e6))
    w.see(service("web", 1))
    w.apply_finalizers()
    w.tick()
    w.answer_all()
    w.tick()
    (request,) = w.flying
    w.answer(request, port.Throttled(request.verb, "slow down"))
    w.run()
    samples = [n.labels for n in w.state.notes if n.metric == "service_operations_total"]
    assert samples == [
        ("create", "inbound", "error", "throttled", "false"),
        ("create", "inbound", "success", "", "false"),
        ("create", "inbound", "success", "", "false"),
        ("create", "inbound", "success", "", "false"),
    ]
    retries = [n for n in w.state.notes if n.metric == "service_operation_retries"]
    assert [(n.labels, n.value) for n in retries] == [(("create", "inbound"), 0)]


@rows("M04")
def test_counts_are_taken_without_going_wrong(row):
    """Gauges follow; unknown names are passed over; nothing is negative."""
    w = ready()
    w.see(pod("p", 50, "shop", "10.0.0.1"))
    w.run()
    metrics.count(w.state.notes)
    metrics.gauge(w.state, w.now, active=True)
    names = {metrics.PREFIX + name for name in ("pending_deletions", "locations_total")}
    found = {s.name: s.value for m in REGISTRY.collect() for s in m.samples if s.name in names}
    assert found == {
        metrics.PREFIX + "pending_deletions": 0.0,
        metrics.PREFIX + "locations_total": 1.0,
    }
