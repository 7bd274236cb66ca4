"""How requests ended, and what follows.

An acknowledgement counts for what was sent. A failure that may have been applied leaves what it
touched unknown; every other one restores it. A batch that the provider will never accept is halved
until the entry that spoils it stands alone; that one is put aside, visibly, and the rest goes on.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from schema import events
from services.nrp_sync import operations, readback
from services.nrp_sync.batches import WHOLE, Key, LocationCall
from services.nrp_sync.core import settle, stirred
from services.nrp_sync.diff import possible
from services.nrp_sync.sources import Name
from services.nrp_sync.state import (
    Done,
    Ended,
    Failed,
    Flight,
    Lane,
    Outcome,
    Part,
    Quarantined,
    State,
    purpose,
    stamp,
    subjects_of,
)
from services.nrp_sync.steps import Failure, Phase, Verb

ONE_ENTRY: Final = ("invalid", "overlay_mappings", "not_found", "conflict", "quota_exceeded")
"""Failures that may be the fault of one entry of a batch."""
PATIENCE: Final = 3
"""Times that a batch may fail like that before it is halved; an invalid one is halved at once."""
LOST: Final = Failure(
    kind="unknown", code="Interrupted", message="we were restarted before the answer"
)


def finish(state: State, number: int, outcome: Outcome, now: float) -> None:
    """A request ended. One that is not known (any more) was settled otherwise."""
    flight = state.flights.pop(number, None)
    if flight is None:
        return
    state.stuck = False
    lane = state.lanes[flight.request.lane]
    lane.flights.discard(number)
    told = list(subjects_of(state, flight.request))
    state.ended[number] = _ended(outcome, now)
    _note_attempts(state, flight, outcome)
    if isinstance(outcome, Done):
        lane.retries, lane.retry_at, lane.failure, lane.worked = 0, 0.0, None, True
        state.check_releases = True
        _succeeded(state, flight, outcome, now)
    else:
        lane.failure = outcome.failure
        if outcome.failure.kind == "throttled":
            wait = outcome.failure.retry_after or state.policy.retrying.first
            state.gate_until = max(state.gate_until, now + wait)
            state.dirty_view = True  # a restart must not shorten it
        _failed(state, flight, lane, outcome.failure, now)
    for (owner, operation, cause), part in zip(told, flight.request.parts or (None,), strict=False):
        state.say(_event(state, flight, outcome, owner, operation, part, now), cause)


def release_orphans(state: State, now: float) -> None:
    """Give up on requests of a process before this one, once they can't arrive any more."""
    for flight in [f for f in state.flights.values() if 0.0 < f.orphaned_until <= now]:
        finish(state, flight.request.number, Failed(failure=LOST), now)


def _ended(outcome: Outcome, now: float) -> Ended:
    if isinstance(outcome, Done):
        return Ended("ok", now, outcome.provider_request, duration=outcome.duration)
    failure = outcome.failure
    return Ended(
        "unknown" if failure.kind == "unknown" else "failed",
        now,
        failure.provider_request,
        failure.code or failure.kind,
        failure.message,
        outcome.duration,
    )


def _note_attempts(state: State, flight: Flight, outcome: Outcome) -> None:
    """One sample for each service that the request was about, or one for the batch."""
    request = flight.request
    failed = isinstance(outcome, Failed)
    result = "error" if failed else "success"
    code = outcome.failure.metric if isinstance(outcome, Failed) else ""
    state.note("requests_total", request.lane, request.verb, result, code)
    state.note("request_duration_seconds", request.lane, value=outcome.duration)
    for part in request.parts:
        op = state.operations[part.key]
        labels = (purpose(op), op.kind)
        orphan = str(op.orphan).lower()
        state.note("service_operations_total", *labels, result, code, orphan)
        state.note("service_operation_duration_seconds", *labels, value=outcome.duration)
        if failed and part.step.verb in (Verb.CLEAR, Verb.DETACH):
            step = "remove_backend_pool" if op.kind == "inbound" else "disassociate_nat_gateway"
            state.note("delete_substep_failures_total", step)


def _event(
    state: State,
    flight: Flight,
    outcome: Outcome,
    owner: events.Owner,
    operation: str,
    part: Part | None,
    now: float,
) -> events.Event:
    request = flight.request
    milliseconds = round(outcome.duration * 1000, 3)
    if isinstance(outcome, Done):
        return events.ProviderOperationSucceeded(
            at=stamp(now),
            owner=owner,
            operation=operation,
            request=request.id,
            provider_request=outcome.provider_request,
            duration_ms=milliseconds,
        )
    failure = outcome.failure
    return events.ProviderOperationFailed(
        at=stamp(now),
        owner=owner,
        operation=operation,
        request=request.id,
        provider_request=failure.provider_request,
        code=failure.code or failure.kind,
        message=failure.message,
        retry_at=_retry_at(state, part, now),
        duration_ms=milliseconds,
    )


def _retry_at(state: State, part: Part | None, now: float) -> datetime | None:
    """When it is tried again, None when something has to change first."""
    if part is None:
        at = state.lanes["locations"].retry_at
    else:
        op = state.operations.get(part.key)
        if op is None or op.parked:
            return None
        at = op.retry_at
    return stamp(max(at, state.gate_until, now))


# --- success ------------------------------------------------------------------------------------


def _succeeded(state: State, flight: Flight, outcome: Done, now: float) -> None:
    payload = flight.request.payload
    if outcome.snapshot is not None:
        readback.reconcile(state, flight, outcome.snapshot, now)
    if isinstance(payload, LocationCall):
        _tell_services(state, payload, flight)
        state.provided.acknowledge(payload)
        for key in _keys(payload):
            state.suspects.pop(key, None)
            if state.quarantine.pop(key, None) is not None:
                state.dirty_quarantine.add(key)
    for part in flight.request.parts:
        op = state.operations[part.key]
        state.suspect_ops.pop(part.key, None)
        what, retries = purpose(op), op.retries
        if part.step.verb is Verb.PUT_PUBLIC_IP and op.registered and not outcome.address:
            state.note("service_external_ip_recovery_failed_total")
        operations.succeed(
            op, part.step, address=outcome.address, retrying=state.policy.retrying, now=now
        )
        if op.phase is Phase.CREATED and op.complete:
            state.note("service_operation_retries", what, op.kind, value=retries)
        settle(state, op, now)
    stirred(state, now)


def _keys(call: LocationCall) -> list[Key]:
    whole = [Key(e.location, WHOLE) for e in call.batch.locations if not e.addresses]
    return [*call.keys(), *whole]


def _tell_services(state: State, call: LocationCall, flight: Flight) -> None:
    """Everybody whose addresses the batch carries has a new image, perhaps."""
    names = {name for e in call.batch.locations for item in e.addresses for name in item.services}
    if flight.locations is not None:
        for seen in flight.locations.seen.values():
            names.update(possible(seen))
    for identity in names:
        op = state.operations.get(("inbound", identity))
        if op is not None:
            state.tell.add(Name(op.namespace, op.name))


# --- failure ------------------------------------------------------------------------------------


def _failed(state: State, flight: Flight, lane: Lane, failure: Failure, now: float) -> None:
    if flight.request.lane == "locations":
        _locations_failed(state, flight, lane, failure, now)
    elif flight.request.lane == "read":
        state.read_wanted = True
        _back_off(state, lane, failure, now, "read")
    elif len(flight.request.parts) > 1:
        _services_failed(state, flight, lane, failure, now)
    else:
        _step_failed(state, flight, flight.request.parts[0], failure, now)


def _back_off(state: State, lane: Lane, failure: Failure, now: float, seed: str) -> None:
    lane.retries += 1
    wait = state.policy.retrying.backoff(lane.retries, seed)
    lane.retry_at = now + max(wait, failure.retry_after or 0.0)


def _one_entry_may_be_wrong(lane: Lane, failure: Failure) -> bool:
    patient = lane.retries < PATIENCE
    return failure.kind == "invalid" or (failure.kind in ONE_ENTRY and not patient)


def _locations_failed(
    state: State, flight: Flight, lane: Lane, failure: Failure, now: float
) -> None:
    call, before = flight.request.payload, flight.locations
    assert isinstance(call, LocationCall)
    assert before is not None
    _tell_services(state, call, flight)
    surely_not = failure.kind != "unknown" and not flight.orphaned_until
    state.provided.give_up(call, before, applied=False if surely_not else None)
    stirred(state, now)
    if not _one_entry_may_be_wrong(lane, failure):
        _back_off(state, lane, failure, now, "locations")
        if lane.retries == state.policy.retrying.tries:
            when = "drain" if lane.worked else "init"
            state.note("location_sync_abandoned_total", f"{when}_attempts_exhausted")
        return
    keys, size = _keys(call), call.size()
    if size > 1:
        for key in keys:
            state.suspects[key] = (size + 1) // 2
        return
    lane.retries = 0
    state.note("location_sync_terminal_errors_total")
    # Perhaps what it refers to is not there any more: look, but not for each of many.
    state.read_wanted |= now >= state.read_at + state.policy.retrying.cap
    cooldown = state.policy.retrying.cooldown
    for key in keys:
        state.suspects.pop(key, None)
        old = state.quarantine.get(key)
        state.quarantine[key] = Quarantined(
            wish=state.provided.desired.refs(key.location, key.address),
            code=failure.code or failure.kind,
            message=failure.message,
            since=old.since if old else now,
            retry_at=now + max(cooldown, failure.retry_after or 0.0),
            attempts=old.attempts + 1 if old else 1,
        )
        state.dirty_quarantine.add(key)


def _step_failed(state: State, flight: Flight, part: Part, failure: Failure, now: float) -> None:
    op = state.operations[part.key]
    state.suspect_ops.pop(part.key, None)
    before = None if flight.orphaned_until else flight.steps.get(part.key)
    was = op.parked
    operations.fail(op, part.step, failure, before, retrying=state.policy.retrying, now=now)
    if op.parked and not was:
        state.note("service_operations_parked_total", op.parked)
        state.note("service_operation_retries", purpose(op), op.kind, value=op.retries)
    if failure.kind == "overlay_mappings":
        state.read_wanted = True  # our view says that nothing refers to it, theirs differs
    settle(state, op, now)


def _services_failed(
    state: State, flight: Flight, lane: Lane, failure: Failure, now: float
) -> None:
    """A batch of registrations failed, for all of them or for one that is not named."""
    parts = flight.request.parts
    if not _one_entry_may_be_wrong(lane, failure) and failure.kind != "overlay_mappings":
        for part in parts:
            _step_failed(state, flight, part, failure, now)
        lane.retries += 1
        # One moment for all, so that they stay together.
        ops = [state.operations[part.key] for part in parts]
        again = max(op.retry_at for op in ops)
        for op in ops:
            op.retry_at = op.retry_at if op.parked else again
        return
    for part in parts:
        op = state.operations[part.key]
        before = None if flight.orphaned_until else flight.steps.get(part.key)
        operations.postpone(op, before, now)
        state.suspect_ops[part.key] = (len(parts) + 1) // 2
        settle(state, op, now)
