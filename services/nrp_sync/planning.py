"""Which requests are due, and when to look again.

Registrations of one direction are coalesced into one call, addresses into capped batches, both
after a short quiet or a longest latency. Nothing is sent while the provider asked us to wait, never
two requests for one service or location, nothing before the provider was read once, and no address
is taken away before every source was listed completely. A backoff is a floor: new changes wait for
it too. Planning begins what it returns, so its rows must be committed before anything is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec

from schema import events
from services.nrp_sync import egress, images, operations, readback
from services.nrp_sync.batches import Key, LocationCall
from services.nrp_sync.core import settle
from services.nrp_sync.operations import Operation
from services.nrp_sync.provider import (
    ServiceBatch,
    ServiceKind,
    ServiceRegistration,
    ServiceUpdate,
)
from services.nrp_sync.sources import Name
from services.nrp_sync.state import (
    Flight,
    LaneName,
    Part,
    Payload,
    Request,
    State,
    stamp,
    subjects_of,
)
from services.nrp_sync.steps import BATCHED, Phase, Step, Verb
from services.nrp_sync.wishes import (
    InboundSpec,
    OutboundSpec,
    load_balancer,
    nat_gateway,
    public_ips,
)

NEVER = float("inf")


def plan(state: State, now: float) -> None:
    """Begin every request that is due; they are in `state.outgoing` then."""
    egress.overdue(state, now)
    images.overdue(state, now)
    readback.compare_some(state, now)
    _read(state, now)
    if not state.read_at or now < state.gate_until:
        return
    ready: dict[LaneName, list[tuple[Operation, Step]]] = {"inbound": [], "outbound": []}
    for key in sorted(state.active):
        op = state.operations[key]
        if op.phase is Phase.DRAINING and not op.flight and op.retry_at <= now:
            settle(state, op, now)
            if op.gone:
                continue
        step = _step(state, op)
        if step is None or op.retry_at > now:
            continue
        if step.verb in BATCHED:
            ready[op.kind].append((op, step))
        elif len(state.lanes["resources"].flights) < state.policy.workers:
            _send_step(state, op, step, now)
    for lane, steps in ready.items():
        _send_services(state, lane, steps, now)
    _send_locations(state, now)


def next_due(state: State, now: float) -> float:
    """When the next request may be due if nothing happens before; infinity for never."""
    floor = state.gate_until
    due = [max(_read_due(state, now), floor), min(state.awaited.values(), default=NEVER)]
    due.append(min(state.letting_go.values(), default=NEVER))
    if state.comparing is not None:
        due.append(now)
    if not state.read_at:
        return min(due)
    due.append(max(_locations_due(state, now), floor))
    due += [f.orphaned_until for f in state.flights.values() if f.orphaned_until]
    oldest: dict[LaneName, float] = {}
    newest: dict[LaneName, float] = {}
    for key in state.active:
        op = state.operations.get(key)
        if op is None or op.flight:
            continue
        if op.phase is Phase.DRAINING:
            if op.identity not in state.provided.mapped:
                due.append(max(op.retry_at, floor, now))
            continue
        step = _step(state, op)
        if step is None:
            continue
        if op.retry_at > now:
            due.append(max(op.retry_at, floor))
        elif step.verb in BATCHED:
            oldest[op.kind] = min(oldest.get(op.kind, NEVER), op.ready_at)
            newest[op.kind] = max(newest.get(op.kind, 0.0), op.ready_at)
        elif len(state.lanes["resources"].flights) < state.policy.workers:
            due.append(max(now, floor))
    for lane in oldest:
        if not state.lanes[lane].flights:
            due.append(max(_window(state, newest[lane], oldest[lane]), floor))
    return min(due)


def _step(state: State, op: Operation) -> Step | None:
    """What to do next for an operation; found once after each change, asked for all the time."""
    key = op.key
    try:
        return state.next_steps[key]
    except KeyError:
        step = state.next_steps[key] = _find_step(state, op)
        return step


def _find_step(state: State, op: Operation) -> Step | None:
    held_back = False
    if op.kind == "inbound" and not op.deleting:
        service = state.services.get(Name(op.namespace, op.name))
        held_back = service is None or not service.finalizer or service.identity != op.identity
    return operations.next_step(op, held_back=held_back)


def _window(state: State, newest: float, oldest: float) -> float:
    return min(newest + state.policy.quiet, oldest + state.policy.latency)


# --- single resources ---------------------------------------------------------------------------


def _send_step(state: State, op: Operation, step: Step, now: float) -> None:
    payload, target = _resource(op, step)
    part = Part(kind=op.kind, identity=op.identity, step=step)
    _launch(state, "resources", str(step.verb), payload, now, parts=(part,), target=target)


def _resource(op: Operation, step: Step) -> tuple[Payload, str]:
    """What to put, or the name of what to delete."""
    if step.verb is Verb.PUT_PUBLIC_IP:
        assert step.spec is not None
        return next(
            (ip, ip.name) for ip in public_ips(op.identity, step.spec) if ip.name == step.resource
        )
    if step.verb is Verb.PUT_BALANCER:
        if isinstance(step.spec, InboundSpec):
            return load_balancer(op.identity, step.spec), op.identity
        assert isinstance(step.spec, OutboundSpec)
        return nat_gateway(op.identity, step.spec), op.identity
    if step.verb is Verb.DELETE_PUBLIC_IP:
        return None, step.resource
    return None, op.identity


# --- registrations ------------------------------------------------------------------------------


def _send_services(
    state: State, lane: LaneName, ready: list[tuple[Operation, Step]], now: float
) -> None:
    if not ready or state.lanes[lane].flights:
        return
    moments = [op.ready_at for op, _ in ready]
    most = state.policy.services_per_batch
    if len(ready) < most and now < _window(state, max(moments), min(moments)):
        return
    chosen: list[tuple[Operation, Step]] = []
    for op, step in ready:
        most = min(most, state.suspect_ops.get(op.key, most))
        if chosen and len(chosen) + 1 > most:
            break
        chosen.append((op, step))
    updates = tuple(_update(op, step) for op, step in chosen)
    parts = tuple(Part(kind=op.kind, identity=op.identity, step=step) for op, step in chosen)
    _launch(state, lane, "update_services", ServiceBatch(services=updates), now, parts=parts)


def _update(op: Operation, step: Step) -> ServiceUpdate:
    inbound = op.kind == "inbound"
    feeds = step.verb is Verb.REGISTER
    return ServiceUpdate(
        service=ServiceRegistration(
            name=op.identity,
            kind=ServiceKind.INBOUND if inbound else ServiceKind.OUTBOUND,
            load_balancer=op.identity if inbound and feeds else None,
            nat_gateway=op.identity if not inbound and feeds else None,
        ),
        delete=step.verb is Verb.UNREGISTER,
    )


# --- addresses ----------------------------------------------------------------------------------


def _locations_due(state: State, now: float) -> float:
    provided, policy, lane = state.provided, state.policy, state.lanes["locations"]
    differing = provided.differing()
    if not differing:
        state.stirred_since = 0.0
        return NEVER
    if len(lane.flights) >= policy.lanes:
        return NEVER
    differing -= _under_way(state)  # those differ until they are acknowledged
    floor = max(lane.retry_at, lane.started_at + policy.interval)
    if state.stuck:
        waits = [q.retry_at for q in state.quarantine.values() if q.retry_at > now]
        return max(floor, min(waits, default=NEVER))
    if differing >= policy.limits.addresses or _draining(state):
        return max(floor, min(state.stirred_since, now))
    return max(floor, _window(state, state.stirred_at, state.stirred_since))


def _under_way(state: State) -> int:
    """How many of what differs the batches under way carry."""
    calls = (state.flights[number].request.payload for number in state.lanes["locations"].flights)
    return sum(
        call.size() + sum(map(len, call.emptied.values()))
        for call in calls
        if isinstance(call, LocationCall)
    )


def _draining(state: State) -> bool:
    """An object is held until its addresses leave: that is not made to wait for more changes."""
    return any(state.operations[key].phase is Phase.DRAINING for key in state.active) or any(
        held.leaving for held in state.releases.values()
    )


def _send_locations(state: State, now: float) -> None:
    while _locations_due(state, now) <= now:
        call = state.provided.next_batch(
            state.policy.limits,
            removals=state.complete,
            skip=lambda key: _quarantined(state, key, now),
            suspects=state.suspects,
        )
        if call is None:
            state.stuck = True
            return
        state.note("location_batch_addresses", value=call.size())
        state.note("location_batch_age_seconds", value=now - (state.stirred_since or now))
        alone = not state.lanes["locations"].flights
        _launch(state, "locations", "update_address_locations", call, now)
        left = state.provided.differing() - _under_way(state)
        if alone and left <= len(state.quarantine):
            state.stirred_since = now  # it took all there was: a new window begins


def _quarantined(state: State, key: Key, now: float) -> bool:
    kept = state.quarantine.get(key)
    if kept is None:
        return False
    wish = state.provided.desired.refs(key.location, key.address)
    return kept.wish == wish and kept.retry_at > now


# --- reading ------------------------------------------------------------------------------------


def _read_due(state: State, now: float) -> float:
    lane = state.lanes["read"]
    if lane.flights or state.comparing is not None:
        return NEVER
    if not state.read_at and not state.complete:
        return NEVER  # nothing would be sent after it either
    wanted = state.read_wanted or not state.read_at
    return max(lane.retry_at, now if wanted else state.read_at + state.policy.read_interval)


def _read(state: State, now: float) -> None:
    if max(_read_due(state, now), state.gate_until) > now:
        return
    state.read_wanted = False
    flight = _launch(state, "read", "read", None, now)
    for other in state.flights.values():
        flight.touched_ops.update(part.key for part in other.request.parts)
    flight.touched_locations.update(state.provided.busy)


# --- all of them --------------------------------------------------------------------------------


def _launch(
    state: State,
    lane_name: LaneName,
    verb: str,
    payload: Payload,
    now: float,
    *,
    parts: tuple[Part, ...] = (),
    target: str = "",
) -> Flight:
    number, request_id = state.next_id()
    lane = state.lanes[lane_name]
    request = Request(
        number=number,
        id=request_id,
        lane=lane_name,
        verb=verb,
        target=target,
        payload=payload,
        parts=parts,
        sent_at=now,
        attempt=1 + max((state.operations[p.key].retries for p in parts), default=lane.retries),
        hash=hashlib.blake2b(msgspec.json.encode(payload), digest_size=16).hexdigest(),
    )
    flight = take_off(state, request, now)
    state.outgoing.append(request)
    for event, cause in _started(state, request):
        state.say(event, cause)
    return flight


def take_off(state: State, request: Request, now: float) -> Flight:
    """Everything that a request touches is under way now."""
    flight = state.flights[request.number] = Flight(request)
    lane = state.lanes[request.lane]
    lane.flights.add(request.number)
    lane.started_at = now
    for part in request.parts:
        op = state.operations[part.key]
        flight.steps[part.key] = operations.begin(op, part.step, request.number, now)
        state.touch(op)
    if request.lane == "locations":
        call = request.payload
        flight.locations = state.provided.begin(call)  # type: ignore[arg-type]
        for reading in state.readings():
            reading.touched_locations.update(call.locations())  # type: ignore[union-attr]
    return flight


def _started(state: State, request: Request) -> Iterator[tuple[events.Event, str]]:
    for owner, operation, cause in subjects_of(state, request):
        yield (
            events.ProviderOperationStarted(
                at=stamp(request.sent_at),
                owner=owner,
                operation=operation,
                request=request.id,
                payload_hash=request.hash,
                attempt=request.attempt,
            ),
            cause,
        )
