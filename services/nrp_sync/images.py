"""What is told about each Service: one complete image, said again only when it changed."""

from __future__ import annotations

import msgspec

from schema import events
from services.nrp_sync.operations import Operation
from services.nrp_sync.sources import Name
from services.nrp_sync.state import Service, State, stamp
from services.nrp_sync.steps import Phase

REASONS = {
    "rejected": "Rejected",
    "quota_exceeded": "QuotaExceeded",
    "retries_exceeded": "Parked",
}


def tell_all(state: State, now: float) -> None:
    """State the images that changed of those that may have."""
    for name in sorted(state.tell):
        tell(state, name, now)
    state.tell.clear()


def tell(state: State, name: Name, now: float) -> None:
    service = state.services.get(name)
    if service is None:
        forget(state, "services", name, "", now)
        return
    op = state.operations.get(("inbound", service.identity))
    if op is None and not service.claimed and not service.finalizer:
        forget(state, "services", name, service.cause, now)
        return
    image = image_of(state, service, op)
    key = ("services", name)
    let_go(state, key, carried=service.finalizer and not image.finalizer, now=now)
    if state.told.get(key) == image:
        return
    state.told[key] = image
    state.dirty_told.add(key)
    state.say(msgspec.structs.replace(image, at=stamp(now)), service.cause)


def restate(state: State, now: float) -> None:
    """State every image again."""
    for key in sorted(state.told):
        state.say(msgspec.structs.replace(state.told[key], at=stamp(now)))


def let_go(state: State, key: tuple[str, Name], *, carried: bool, now: float) -> None:
    """Note that an object may go. `carried`: our finalizer is still on it, so that it can't."""
    if carried:
        state.letting_go.setdefault(key, now + state.policy.finalizer_grace)
    else:
        state.letting_go.pop(key, None)


def overdue(state: State, now: float) -> None:
    """Count the objects that should have been let go by now, once for each grace time."""
    for (plural, name), until in list(state.letting_go.items()):
        if until <= now:
            kind = "pod" if plural == "pods" else "service"
            state.note(f"{kind}_finalizer_remove_failed_total")
            state.letting_go[plural, name] = now + state.policy.finalizer_grace


def forget(state: State, plural: str, name: Name, cause: str, now: float) -> None:
    """An object concerns us no more; whoever still keeps our finalizer on it is told."""
    state.letting_go.pop((plural, name), None)
    old = state.told.pop((plural, name), None)
    if old is None:
        return
    state.dirty_told.add((plural, name))
    if old.finalizer:
        state.say(
            events.ProviderStateChanged(
                at=stamp(now),
                owner=old.owner,
                generation=old.generation,
                finalizer=False,
                in_step=True,
                reason="Released",
            ),
            cause,
        )


def image_of(state: State, service: Service, op: Operation | None) -> events.ProviderStateChanged:
    """The image of one Service now. Its time is the epoch, so that images compare."""
    in_step, reason, message = _standing(state, service, op)
    identity = service.identity
    addresses: list[str] = []
    if op is not None and op.registered and not op.deleting:
        addresses = [op.addresses[name] for name in sorted(op.addresses) if op.addresses[name]]
    return events.ProviderStateChanged(
        at=stamp(0.0),
        owner=events.Owner(
            plural="services",
            namespace=service.name.namespace,
            name=service.name.name,
            uid=service.uid,
        ),
        generation=service.generation,
        finalizer=op is not None,
        addresses=addresses,
        in_step=in_step,
        backends=state.provided.mapped.get(identity, 0),
        reason=reason,
        message=message,
    )


def _standing(state: State, service: Service, op: Operation | None) -> tuple[bool, str, str]:
    """(in step, reason, message)"""
    if service.refusal is not None and service.claimed:
        served = " (the configuration before it stays served)" if op is not None else ""
        return False, service.refusal.reason, service.refusal.message + served
    if op is None:
        if service.claimed:
            return False, "NoPorts", "spec.ports is empty, there is nothing to provide"
        return True, "Released", ""
    if op.deleting:
        return _leaving(state, op)
    if op.parked:
        return False, REASONS[op.parked], f"{op.error_code}: {op.error_message}"
    if op.error_code:
        return False, "Retrying", f"{op.error_code}: {op.error_message}"
    if op.phase is not Phase.CREATED:
        if not service.finalizer:
            return False, "WaitingForFinalizer", "our finalizer is not on the Service yet"
        return False, "Pending", "the provider is being asked"
    return _backends(state, op)


def _leaving(state: State, op: Operation) -> tuple[bool, str, str]:
    if op.error_code:
        reason = REASONS.get(op.parked, "Retrying")
        return False, reason, f"{op.error_code}: {op.error_message}"
    left = state.provided.mapped.get(op.identity, 0)
    if op.phase is Phase.DRAINING:
        return False, "Draining", f"{left} addresses still refer to it at the provider"
    return False, "Deleting", "its resources are being deleted"


def _backends(state: State, op: Operation) -> tuple[bool, str, str]:
    notes = left_out(state, op)
    bad = [key for key, q in sorted(state.quarantine.items()) if op.identity in q.wish]
    if bad:
        first = state.quarantine[bad[0]]
        notes.insert(
            0, f"{len(bad)} refused, {bad[0].address} at {bad[0].location} with {first.message}"
        )
        return False, "Quarantined", "; ".join(notes)
    open_ = state.provided.unsettled.get(op.identity, 0)
    failure = state.lanes["locations"].failure
    if open_ and failure is not None:
        reason = "Throttled" if failure.kind == "throttled" else "Retrying"
        return False, reason, f"{failure.code or failure.kind}: {failure.message}"
    if open_:
        return False, "Pending", "; ".join([f"{open_} addresses to be sent", *notes])
    waiting = state.provided.desired.waiting_for(state.members[op.key])
    if waiting:
        shown = ", ".join(waiting[:3]) + (" ..." if len(waiting) > 3 else "")
        return True, "WaitingForNode", "; ".join([f"addresses on unknown nodes: {shown}", *notes])
    return True, "Registered", "; ".join(notes)


def left_out(state: State, op: Operation) -> list[str]:
    """Endpoints that are no backends, in words."""
    counts: dict[str, int] = {}
    member = state.members[op.key]
    for source in member.sources:
        for field, count in zip(source.left_out._fields, source.left_out, strict=True):
            if count:
                words = field.replace("_", " ")
                counts[words] = counts.get(words, 0) + count
        if member.family:
            other = source.sixes if member.family == 4 else len(source.endpoints) - source.sixes
            if other:
                counts["of another family"] = counts.get("of another family", 0) + other
    return [f"left out: {count} {words}" for words, count in sorted(counts.items())]
