"""The wish for addresses and its difference from what the provider holds.

Ids name the rows of docs/nrp-conformance.md.
"""

from datetime import UTC, datetime

import msgspec
import pytest

from services.nrp_sync import core, nodes, planning
from services.nrp_sync import provider as port
from services.nrp_sync.batches import Key, Limits, LocationCall
from services.nrp_sync.diff import Maybe, Provided
from services.nrp_sync.provider import (
    DEFAULT_SERVICE,
    Action,
    Address,
    AddressLocation,
    LocationBatch,
)
from services.nrp_sync.state import SOURCES
from tests.core.nrp_world import POLICY, World, endpoint, node, pod, service, slice_of, uid

A, B = "172.16.0.1", "172.16.0.2"
WEB, API = uid(1), uid(2)
GONE = datetime(2026, 11, 30, tzinfo=UTC)


def rows(*names):
    """Rows that a test stands for."""
    return pytest.mark.parametrize("row", names)


@pytest.fixture
def world():
    """Two nodes and two registered services without addresses."""
    w = World()
    w.see(node("n1", A), node("n2", B), service("web", 1), service("api", 2))
    w.run()
    w.history.clear()
    return w


def batch(world):
    """What would be sent now, as location to (action, address to services)."""
    world.tick(POLICY.latency)
    calls = [r.payload for r in world.flying if isinstance(r.payload, LocationCall)]
    assert len(calls) <= 1
    return shown(calls[0]) if calls else {}


def shown(call):
    assert call.batch.action is Action.PARTIAL
    return {
        entry.location: (entry.action, {a.address: a.services for a in entry.addresses})
        for entry in call.batch.locations
    }


def held(world):
    return {
        place: {address: set(names) for address, names in addresses.items()}
        for place, addresses in world.provider.locations.items()
    }


# --- the wish -----------------------------------------------------------------------------------


@rows("K03", "D03")
def test_new_location_is_sent_in_full(world, row):
    """A location that the provider lacks is sent as FullUpdate."""
    world.see(slice_of("web-a", "web", ["10.0.0.1"]))
    assert batch(world) == {A: (Action.FULL, {"10.0.0.1": (WEB,)})}


@rows("K04", "8.1.4", "P13-move")
def test_address_that_changes_its_node_moves(world, row):
    """It is added behind the new node and removed behind the old one, in one request."""
    world.see(slice_of("web-a", "web", [("10.0.0.1", "n1")]))
    world.run()
    world.see(slice_of("web-a", "web", [("10.0.0.1", "n2")]))
    assert batch(world) == {A: (Action.PARTIAL, {}), B: (Action.FULL, {"10.0.0.1": (WEB,)})}


@rows("K05", "P11-no-node", "P11-malformed", "P11-not-ready", "I01")
def test_what_is_no_backend_holds_up_nothing(world, row):
    """Endpoints without node, address or readiness are left out one by one, and counted."""
    world.see(
        slice_of(
            "web-a",
            "web",
            [
                endpoint("10.0.0.1"),
                endpoint("10.0.0.2", ""),
                endpoint("host.example"),
                endpoint("10.0.0.3", ready=False),
                endpoint("10.0.0.4", ready=True),
                endpoint("10.0.0.5", ready=None),
            ],
        )
    )
    world.run()
    assert held(world) == {A: {f"10.0.0.{n}": {WEB} for n in (1, 4, 5)}}
    message = world.images("web").message
    for words in ("1 no node", "1 malformed", "1 not ready"):
        assert words in message


@rows("report-29")
def test_readiness_alone_decides(world, row):
    """Ready or not said counts; draining and not ready do not, whatever `serving` says.

    With only draining endpoints left a service has no backend: the provider keeps what is
    connected and gets nothing new, as for any address that leaves.
    """
    ends = {
        "10.0.0.1": {"ready": True},
        "10.0.0.2": {},
        "10.0.0.3": {"ready": False, "serving": True, "terminating": True},
        "10.0.0.4": {"ready": False, "serving": False},
        "10.0.0.5": {"ready": True, "serving": False},
    }
    world.see(slice_of("web-a", "web", [endpoint(a, **c) for a, c in ends.items()]))
    world.run()
    assert set(held(world)[A]) == {"10.0.0.1", "10.0.0.2", "10.0.0.5"}
    assert "1 draining" in world.images("web").message
    world.see(slice_of("web-a", "web", [endpoint("10.0.0.3", **ends["10.0.0.3"])]))
    world.run()
    assert held(world) == {}
    assert world.images("web").in_step


@rows("K06")
def test_address_missed_before_is_sent_with_the_next_look(world, row):
    """An address that the provider turns out to lack is put there, though no event says so."""
    world.see(slice_of("web-a", "web", ["10.0.0.1"]))
    world.run()
    world.checks = False
    world.provider.locations = {}
    world.state.read_wanted = True
    world.run()
    assert held(world) == {A: {"10.0.0.1": {WEB}}}


@rows("P16-twice")
def test_address_listed_twice_is_on_one_node_in_any_order(world, row):
    """A slice that lists an address on two nodes does not make it flap between them."""
    twice = [("10.0.0.1", "n2"), ("10.0.0.1", "n1")]
    world.see(slice_of("web-a", "web", twice))
    world.run()
    assert held(world) == {A: {"10.0.0.1": {WEB}}}
    sent = len(world.history)
    world.see(slice_of("web-a", "web", twice[::-1]))
    world.run()
    assert len(world.history) == sent


@rows("K07", "D04", "N04", "Z19")
def test_address_of_two_services_keeps_the_other(world, row):
    """An entry carries all services of its address, when one comes and when one goes."""
    world.see(slice_of("web-a", "web", ["10.0.0.1"]))
    world.run()
    world.see(slice_of("api-a", "api", ["10.0.0.1"], number=101))
    assert batch(world) == {A: (Action.PARTIAL, {"10.0.0.1": (WEB, API)})}
    world.run()
    world.see(slice_of("web-a", "web", []))
    assert batch(world) == {A: (Action.PARTIAL, {"10.0.0.1": (API,)})}
    world.run()
    world.check_equal()


@rows("K08", "D08", "D10", "W06", "8.1.1")
def test_last_address_of_a_node_takes_the_location_along(world, row):
    """A location behind which nothing is wanted is deleted whole: listed with an empty list."""
    world.see(slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2"]))
    world.run()
    world.see(slice_of("web-a", "web", []))
    assert batch(world) == {A: (Action.PARTIAL, {})}
    call = next(r.payload for r in world.flying if isinstance(r.payload, LocationCall))
    assert b'"addresses":[]' in msgspec.json.encode(call.batch)
    world.run()
    assert held(world) == {}


@rows("D07", "N05")
def test_address_that_is_not_wanted_is_sent_without_services(world, row):
    """While its node has other addresses, an address leaves by an empty list of services."""
    world.see(slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2"]))
    world.run()
    world.see(slice_of("web-a", "web", ["10.0.0.2"]))
    assert batch(world) == {A: (Action.PARTIAL, {"10.0.0.1": ()})}
    call = next(r.payload for r in world.flying if isinstance(r.payload, LocationCall))
    assert b'"services":[]' in msgspec.json.encode(call.batch)


@rows("D05", "P01")
def test_addresses_of_an_unregistered_service_wait(row):
    """Nothing refers to a service before it is registered; then all of its addresses follow."""
    w = World()
    w.see(node("n1", A), service("web", 1), slice_of("web-a", "web", ["10.0.0.1"]))
    w.apply_finalizers()
    for _ in range(12):
        w.tick(POLICY.latency)
        if any(r.verb == "update_services" for r in w.flying):
            break
        assert not any(r.lane == "locations" for r in w.flying)
        w.answer_all()
    w.tick(POLICY.latency)
    assert not any(r.lane == "locations" for r in w.flying)
    w.run()
    assert held(w) == {A: {"10.0.0.1": {WEB}}}


@rows("D06")
def test_address_whose_services_all_left_is_emptied(world, row):
    """An address that slices still list but no living service wants is sent without services."""
    world.see(
        slice_of("web-a", "web", ["10.0.0.1"]),
        slice_of("api-a", "api", ["10.0.0.2"], number=101),
    )
    world.run()
    world.gone(world.objects["services", core.Name("default", "web")])
    assert batch(world) == {A: (Action.PARTIAL, {"10.0.0.1": ()})}


@rows("D09", "D13", "N02", "report-59", "I04")
def test_what_is_in_step_is_not_sent(world, row):
    """Facts that change nothing, and orders that differ, send nothing."""
    world.see(slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2"]))
    world.run()
    world.history.clear()
    world.see(slice_of("web-a", "web", ["10.0.0.2", "10.0.0.1"], annotations={"a": "b"}))
    world.see(slice_of("web-b", "web", [], number=101))
    world.run()
    assert world.history == []
    assert world.images("web").in_step


@rows("D12", "I12-many")
def test_everything_missed_is_made_up_for(world, row):
    """After a long absence the difference is exactly what has to change."""
    world.see(slice_of("web-a", "web", [f"10.0.0.{n}" for n in range(1, 20)]))
    world.run()
    world.see(slice_of("web-a", "web", [f"10.0.0.{n}" for n in range(10, 30)]))
    ((_, sent),) = batch(world).values()
    assert sent == {f"10.0.0.{n}": () for n in range(1, 10)} | {
        f"10.0.0.{n}": (WEB,) for n in range(20, 30)
    }


@rows("D14", "P06", "E33", "8.1.9")
def test_service_whose_change_is_refused_keeps_its_addresses(world, row):
    """While a new configuration is refused, the old one is served, and its backends followed."""
    world.see(slice_of("web-a", "web", ["10.0.0.1"]))
    world.run()
    world.see(service("web", 1, ports=[(81, 8080)], finalizer=True))
    world.tick()
    (change,) = [r for r in world.flying if r.verb == "put_balancer"]
    world.answer(change, port.Invalid("put_load_balancer", "never"))
    assert world.images("web").reason == "Rejected"
    world.see(slice_of("web-a", "web", ["10.0.0.2"]))
    assert batch(world) == {A: (Action.PARTIAL, {"10.0.0.1": (), "10.0.0.2": (WEB,)})}


@rows("P12", "8.1.6", "Z36")
def test_family_is_the_addresses_own(world, row):
    """An address goes under the location of its own family, whatever its slice says."""
    world.see(node("n1", A, "2001:db8:f::1"), service("six", 3, ip_families=["IPv6"]))
    world.see(
        slice_of("six-a", "six", ["2001:db8::1", "10.0.0.9"], number=102),
        slice_of("web-a", "web", ["10.0.0.1", "2001:db8::9"]),
    )
    world.run()
    assert held(world) == {A: {"10.0.0.1": {WEB}}, "2001:db8:f::1": {"2001:db8::1": {uid(3)}}}
    assert "1 of another family" in world.images("web").message


@rows("P13", "9.4")
def test_node_that_changes_its_address_takes_its_pods_along(world, row):
    """All that runs on a node moves to its new location and leaves the old one."""
    world.see(slice_of("web-a", "web", [("10.0.0.1", "n1"), ("10.0.0.2", "n2")]))
    world.run()
    world.see(node("n1", "172.16.0.77"))
    assert batch(world) == {
        "172.16.0.77": (Action.FULL, {"10.0.0.1": (WEB,)}),
        A: (Action.PARTIAL, {}),
    }


@rows("P14", "report-30")
def test_address_on_an_unknown_node_waits_for_it(world, row):
    """It is sent when the node appears, without another event of its slice."""
    world.see(slice_of("web-a", "web", [("10.0.0.1", "n9")]))
    world.run()
    assert world.images("web").reason == "WaitingForNode"
    world.see(node("n9", "172.16.0.9"))
    world.run()
    assert held(world) == {"172.16.0.9": {"10.0.0.1": {WEB}}}
    assert world.images("web").reason == "Registered"


@rows("P15", "Z35", "azure-4147")
def test_node_that_is_gone_takes_its_addresses_along(world, row):
    """Also if its pods' deletions never come; exactly its addresses leave."""
    world.see(slice_of("web-a", "web", [("10.0.0.1", "n1"), ("10.0.0.2", "n2")]))
    world.run()
    world.gone(node("n1", A))
    world.run()
    assert held(world) == {B: {"10.0.0.2": {WEB}}}


@rows("P02", "8.2.14")
def test_address_that_came_and_went_during_a_creation_is_never_sent(row):
    """What counts is what is wanted when the service is there."""
    w = World()
    w.see(node("n1", A), service("web", 1))
    w.apply_finalizers()
    w.tick()
    w.see(slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2"]))
    w.see(slice_of("web-a", "web", ["10.0.0.2"]))
    w.run()
    sent = [shown(r.payload) for r in w.history if isinstance(r.payload, LocationCall)]
    assert sent == [{A: (Action.FULL, {"10.0.0.2": (WEB,)})}]


@rows("P03")
def test_slices_of_other_services_cost_nothing_at_the_provider(world, row):
    """Addresses of a Service that is none of ours are never sent."""
    world.history.clear()
    world.see(slice_of("x-a", "other", ["10.0.0.1"]))
    world.run()
    assert world.history == []


@rows("P07", "8.2.20", "report-30")
def test_slice_that_came_first_is_used(row):
    """A slice that is seen before its Service counts once that is there."""
    w = World()
    w.see(slice_of("web-a", "web", ["10.0.0.1"]), node("n1", A), service("web", 1))
    w.run()
    w.check_equal()


@rows("P10-owner", "P10-label", "P10-terminating")
def test_slice_follows_its_label(world, row):
    """A slice that changes its Service moves its addresses; one that goes away removes them."""
    world.see(slice_of("s", "web", ["10.0.0.1"]))
    world.run()
    if row == "P10-owner":
        world.see(slice_of("s", "api", ["10.0.0.1"]))
        world.run()
        assert held(world) == {A: {"10.0.0.1": {API}}}
    elif row == "P10-label":
        core.see_slice(world.state, slice_of("s", "", ["10.0.0.1"]), now=world.now)
        world.objects.clear()
        world.tick(POLICY.latency)
        world.answer_all()
        assert held(world) == {}
    else:
        gone = slice_of("s", "web", ["10.0.0.1"], deletion_timestamp=GONE)
        core.see_slice(world.state, gone, now=world.now)
        world.tick(POLICY.latency)
        world.answer_all()
        assert held(world) == {}


@rows("8.3.30")
def test_slice_of_a_service_that_was_replaced_does_not_count(world, row):
    """A slice names its Service by uid; one of the Service before it does not count."""
    world.see(slice_of("web-a", "web", ["10.0.0.1"], owner=1))
    world.run()
    world.gone(world.objects["services", core.Name("default", "web")])
    world.see(service("web", 9))
    world.tick(POLICY.latency)
    world.answer_all()
    world.apply_finalizers()
    world.tick()
    world.see(slice_of("web-b", "web", ["10.0.0.2"], number=101, owner=9))
    for _ in range(60):
        world.apply_finalizers()
        world.advance()
        world.answer_all()
    assert held(world) == {A: {"10.0.0.2": {uid(9)}}}


@rows("report-27", "9.3")
def test_address_in_two_slices_survives_the_loss_of_one(world, row):
    """The union of all slices counts."""
    world.see(
        slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2"]),
        slice_of("web-b", "web", ["10.0.0.2"], number=101),
    )
    world.run()
    world.see(slice_of("web-a", "web", []))
    world.run()
    assert held(world) == {A: {"10.0.0.2": {WEB}}}
    world.gone(slice_of("web-b", "web", [], number=101))
    world.run()
    assert held(world) == {}


# --- acknowledgements -----------------------------------------------------------------------------


def acknowledged(*entries, before=()):
    """What is held after an acknowledgement, starting from `before`."""
    provided = Provided()
    for place, address, names in before:
        provided.see(place, address, names)
        provided.locate(place, True)
    call = LocationCall(
        batch=LocationBatch(locations=entries),
        emptied={
            e.location: tuple(a for p, a, _ in before if p == e.location)
            for e in entries
            if not e.addresses
        },
    )
    provided.begin(call)
    provided.acknowledge(call)
    found = {}
    for key, seen in provided.held():
        found.setdefault(key.location, {})[key.address] = seen
    return found, provided


def entry(place, action=Action.PARTIAL, **addresses):
    items = tuple(Address(address=a.replace("_", "."), services=s) for a, s in addresses.items())
    return AddressLocation(location=place, addresses=items, action=action)


def full(place, **addresses):
    return entry(place, Action.FULL, **addresses)


@pytest.mark.parametrize(
    ("before", "entries", "after"),
    [
        pytest.param([], [full(A, _1=("s",))], {A: {".1": ("s",)}}, id="N03"),
        pytest.param(
            [(A, ".1", ("s1",))], [entry(A, _1=("s1", "s2"))], {A: {".1": ("s1", "s2")}}, id="N04"
        ),
        pytest.param(
            [(A, ".1", ("s",)), (A, ".2", ("s",))],
            [entry(A, _1=())],
            {A: {".2": ("s",)}},
            id="N05-address",
        ),
        pytest.param([(A, ".1", ("s",))], [entry(A, _1=())], {}, id="N05-location"),
        pytest.param([(A, ".1", ("s",)), (A, ".2", ("s",))], [entry(A)], {}, id="N06"),
        pytest.param(
            [(A, ".1", ("s",)), (B, ".9", ("s",))],
            [entry(A, _1=("t",), _2=("t",)), entry(B)],
            {A: {".1": ("t",), ".2": ("t",)}},
            id="N08",
        ),
    ],
)
def test_what_was_sent_is_what_is_held(before, entries, after):
    """An acknowledgement changes exactly what its request listed."""
    assert acknowledged(*entries, before=before)[0] == after


@rows("N07")
def test_full_update_replaces_what_was_perhaps_there(row):
    """After a FullUpdate a location holds what it listed and nothing else."""
    provided = Provided()
    provided.see(A, ".1", Maybe(("s",)))
    provided.locate(A, False)
    call = LocationCall(batch=LocationBatch(locations=(full(A, _9=("s",)),)))
    provided.begin(call)
    provided.acknowledge(call)
    assert list(provided.held()) == [(Key(A, ".9"), ("s",))]


@rows("D03-unknown")
def test_location_that_is_perhaps_there_is_sent_in_full(world, row):
    """Created without an answer, or emptied address by address: it is replaced, not added to."""
    world.see(slice_of("web-a", "web", ["10.0.0.1"]))
    world.tick(POLICY.latency)
    (sent,) = world.flying
    world.answer(sent, port.Unknown("update_address_locations", "lost"), applied=True)
    world.see(slice_of("web-a", "web", ["10.0.0.2"]))
    world.tick(40)
    (again,) = [r for r in world.flying if r.lane == "locations"]
    assert shown(again.payload) == {A: (Action.FULL, {"10.0.0.2": (WEB,)})}
    world.run()
    assert held(world) == {A: {"10.0.0.2": {WEB}}}


@rows("9.1a", "unknown-removal")
def test_removal_without_answer_is_not_believed_away(world, row):
    """Removed but not acknowledged, then wanted again: it is sent again, not believed equal."""
    world.see(slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2"]))
    world.run()
    world.see(slice_of("web-a", "web", ["10.0.0.2"]))
    world.tick(POLICY.latency)
    (sent,) = world.flying
    world.answer(sent, port.Unknown("update_address_locations", "lost"), applied=True)
    assert held(world) == {A: {"10.0.0.2": {WEB}}}
    world.see(slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2"]))
    world.run()
    assert held(world) == {A: {"10.0.0.1": {WEB}, "10.0.0.2": {WEB}}}


@rows("9.1b", "unknown-addition")
def test_addition_without_answer_does_not_leak(world, row):
    """Added but not acknowledged, then not wanted: it is taken away all the same."""
    world.see(slice_of("web-a", "web", ["10.0.0.2"]))
    world.run()
    world.see(slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2"]))
    world.tick(POLICY.latency)
    (sent,) = world.flying
    world.answer(sent, port.Unknown("update_address_locations", "lost"), applied=True)
    world.see(slice_of("web-a", "web", ["10.0.0.2"]))
    world.run()
    assert held(world) == {A: {"10.0.0.2": {WEB}}}


@rows("4.13.3", "in-flight-addition")
def test_service_is_not_unregistered_under_an_addition_on_its_way(world, row):
    """Addresses of a request under way count as there: the deletion waits for its outcome."""
    world.see(slice_of("web-a", "web", ["10.0.0.1"]))
    world.tick(POLICY.latency)
    (sent,) = world.flying
    world.gone(world.objects["services", core.Name("default", "web")])
    for _ in range(5):
        world.tick(POLICY.latency)
    assert world.flying == [sent]
    world.run()
    world.check_equal()


@rows("report-55")
def test_changes_meanwhile_stay_to_be_sent(world, row):
    """What changed while a request was under way is sent after it, and only that."""
    world.see(slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2"]))
    world.tick(POLICY.latency)
    (sent,) = world.flying
    world.see(slice_of("web-a", "web", ["10.0.0.2", "10.0.0.3"]))
    assert not batch_after(world, sent)
    world.answer(sent)
    assert batch(world) == {A: (Action.PARTIAL, {"10.0.0.1": (), "10.0.0.3": (WEB,)})}


def batch_after(world, sent):
    """Requests for the same location beside the one that is under way."""
    world.tick(POLICY.latency)
    return [request for request in world.flying if request is not sent]


# --- batches ------------------------------------------------------------------------------------


@rows("L08", "report-52")
def test_batch_is_exactly_the_difference(world, row):
    """Each location and each address is listed once, in a fixed order."""
    world.see(
        slice_of("web-b", "web", [("10.0.0.3", "n2"), ("10.0.0.2", "n1")], number=101),
        slice_of("web-a", "web", [("10.0.0.1", "n1"), ("10.0.0.2", "n1")]),
    )
    world.tick(POLICY.latency)
    (sent,) = world.flying
    assert [
        (e.location, [a.address for a in e.addresses]) for e in sent.payload.batch.locations
    ] == [(A, ["10.0.0.1", "10.0.0.2"]), (B, ["10.0.0.3"])]


@rows("10.4-fewest")
@pytest.mark.parametrize("cap", [3, 10, 50])
def test_full_resync_takes_the_fewest_requests(row, cap):
    """Nothing but the cap makes a batch end."""
    w = World(POLICY._replace(limits=Limits(addresses=cap), lanes=1))
    for n in range(1, 6):
        w.see(node(f"n{n}", f"172.16.0.{n}"))
    w.see(service("web", 1))
    w.see(
        slice_of(
            "web-a", "web", [(f"10.0.{n}.{m}", f"n{n}") for n in range(1, 6) for m in range(7)]
        )
    )
    w.run()
    sent = [r.payload.size() for r in w.history if isinstance(r.payload, LocationCall)]
    assert sum(sent) == 35
    assert len(sent) == -(-35 // cap)
    w.check_equal()


@rows("10.4-bytes")
def test_batch_is_capped_in_bytes(world, row):
    """The body of a batch stays below the cap."""
    world.state.policy = world.policy = POLICY._replace(limits=Limits(500, 2_000), lanes=1)
    world.see(slice_of("web-a", "web", [f"10.0.0.{n}" for n in range(1, 100)]))
    world.run()
    calls = [r.payload for r in world.history if isinstance(r.payload, LocationCall)]
    assert len(calls) > 3
    assert all(len(msgspec.json.encode(call.batch)) <= 2_000 for call in calls)
    world.check_equal()


@rows("10.4-together")
def test_what_leaves_and_what_comes_stay_together(world, row):
    """Removals and additions of one location are not spread over two requests."""
    world.state.policy = world.policy = POLICY._replace(limits=Limits(addresses=4), lanes=1)
    world.see(slice_of("web-a", "web", [("10.0.1.1", "n2"), ("10.0.1.2", "n2")]))
    world.run()
    world.history.clear()
    world.see(
        slice_of(
            "web-a",
            "web",
            [("10.0.0.1", "n1"), ("10.0.0.2", "n1"), ("10.0.1.3", "n2"), ("10.0.1.4", "n2")],
        )
    )
    world.run()
    calls = [shown(r.payload) for r in world.history if isinstance(r.payload, LocationCall)]
    assert [set(call) for call in calls] == [{A}, {B}]
    assert len(calls[1][B][1]) == 4


@rows("report-57", "4.13.10")
@pytest.mark.parametrize("missing", SOURCES)
def test_nothing_leaves_on_a_partial_view(world, row, missing):
    """Until every list is complete additions are sent and removals are not."""
    world.see(slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2"]))
    world.run()
    core.new_epoch(world.state)
    world.synced(*(plural for plural in SOURCES if plural != missing))
    world.see(slice_of("web-a", "web", ["10.0.0.2", "10.0.0.3"]))
    world.tick(POLICY.latency)
    world.answer_all()
    assert held(world) == {A: {f"10.0.0.{n}": {WEB} for n in (1, 2, 3)}}
    world.synced(missing)
    world.run()
    assert held(world) == {A: {f"10.0.0.{n}": {WEB} for n in (2, 3)}}


@rows("10.4-window", "L11")
def test_changes_are_coalesced_with_a_longest_latency(world, row):
    """A change waits for a quiet moment, but never longer than the latency."""
    began = world.now
    for n in range(1, 40):
        world.see(slice_of("web-a", "web", [f"10.0.0.{m}" for m in range(1, n + 1)]))
        world.tick(POLICY.quiet / 2)
        if world.flying:
            break
    assert POLICY.latency * 0.9 <= world.now - began <= POLICY.latency * 1.2
    assert len(world.flying) == 1


@rows("10.4-urgent")
def test_deletion_does_not_wait_for_the_window(world, row):
    """Addresses that hold up a finalizer leave at once."""
    world.see(slice_of("web-a", "web", ["10.0.0.1"]))
    world.run()
    world.gone(world.objects["services", core.Name("default", "web")])
    world.tick()
    assert any(r.lane == "locations" for r in world.flying)


@rows("10.4-interval")
def test_batches_keep_their_distance(world, row):
    """Between the starts of two batches lies the interval."""
    world.state.policy = world.policy = POLICY._replace(interval=5.0)
    world.see(slice_of("web-a", "web", ["10.0.0.1"]))
    world.tick(POLICY.latency)
    world.answer_all()
    world.see(slice_of("web-a", "web", ["10.0.0.2"]))
    world.tick(POLICY.latency)
    assert not world.flying
    world.tick(5.0)
    assert len(world.flying) == 1


@rows("storm")
def test_storm_is_coalesced_to_the_fewest_requests(world, row):
    """Changes that come faster than the window allows cost no request of their own."""
    for n in range(200):
        world.see(slice_of("web-a", "web", [f"10.0.0.{n % 7 + 1}", f"10.0.1.{n % 5 + 1}"]))
    world.run()
    assert len([r for r in world.history if r.lane == "locations"]) == 1
    world.check_equal()


@rows("C03")
def test_one_address_changes_one_entry(world, row):
    """The difference grows with what changed, not with what is there."""
    world.see(slice_of("web-a", "web", [f"10.0.0.{n}" for n in range(1, 100)]))
    world.run()
    world.see(slice_of("web-a", "web", [f"10.0.0.{n}" for n in range(2, 100)]))
    assert world.state.provided.deviant == {A: {"10.0.0.1": (WEB,)}}


@rows("G06-hostnetwork")
def test_pod_on_the_hosts_network_is_an_address_behind_itself(world, row):
    """A pod whose address is its node's is sent like any other."""
    world.see(pod("p", 50, "shop", A))
    world.run()
    assert held(world) == {A: {A: {"shop"}}}


def test_node_without_addresses_is_no_location():
    """[P18] A node that is known but has no InternalIP is waited for like an unknown one."""
    w = World()
    nodes.see_node(w.state, node("n1"), now=w.now)
    core.see_slice(w.state, slice_of("web-a", "web", ["10.0.0.1"]), now=w.now)
    assert list(w.state.provided.desired.waiting) == ["n1"]
    nodes.see_node(w.state, node("n1", A), now=w.now)
    assert w.state.provided.desired.waiting == {}
    assert planning.next_due(w.state, w.now) >= w.now


@pytest.mark.parametrize("order", [("web", "api"), ("api", "web")], ids="report-58-{0[0]}".format)
def test_what_two_services_share_stays_until_the_second_goes(world, order):
    """Pods, node and gateway stay with the other service; after both nothing is left."""
    world.see(
        slice_of("web-a", "web", ["10.0.0.1"]),
        slice_of("api-a", "api", ["10.0.0.1"], number=101),
        pod("p", 50, "shop", "10.0.0.1"),
    )
    world.run()
    before = dict(world.provider.load_balancers)
    uids = {"web": WEB, "api": API}
    first, second = order
    world.gone(service(first, int(uids[first][-2:])))
    world.run()
    assert held(world) == {A: {"10.0.0.1": {uids[second], "shop"}}}
    assert world.provider.load_balancers == {uids[second]: before[uids[second]]}
    world.gone(service(second, int(uids[second][-2:])))
    world.gone(pod("p", 50, "shop", "10.0.0.1"))
    world.run()
    world.check_equal()
    assert (world.provider.locations, world.provider.load_balancers) == ({}, {})
    assert set(world.provider.nat_gateways) == {DEFAULT_SERVICE}


@rows("10.4-gate")
@pytest.mark.parametrize("gates", [False, True], ids=["change", "deletion"])
def test_only_what_holds_an_object_does_not_wait_for_more(gates, row):
    """Addresses of a pod that is going leave at once; other changes wait out the quiet time."""
    w = World(POLICY._replace(quiet=5.0, latency=10.0, read_interval=1e6))
    pods = pod("p", 1, "shop", "10.0.0.1"), pod("q", 2, "shop", "10.0.0.2")
    w.see(node("n1", A), *pods)
    w.run()
    going = pod("q", 2, "shop", "10.0.0.2", finalizer=True, deletion_timestamp=GONE)
    w.see(going if gates else pod("r", 3, "shop", "10.0.0.3", finalizer=True))
    w.tick(1.0)
    sent = [r for r in w.flying if isinstance(r.payload, LocationCall)]
    assert bool(sent) is gates
    w.run()
    w.check_equal()
