"""What nrp_sync decides: facts in, wishes and operations changed. Pure; the clock is an argument.

The parts: `wishes` reads one object, `desired` adds up the addresses, `diff` keeps what the
provider lacks, `operations` leads each service through its life, `planning` makes requests of what
is due, `outcomes` takes their answers, `readback` compares with what the provider really holds,
`images` says where each Service stands, `egress` and `nodes` take the facts of those kinds.
`State` holds it all.

This module takes the facts of Services and slices. It refuses to trust an event's idea of the
past: what was is what our own rows say.
"""

from __future__ import annotations

from typing import Literal

from schema import objects
from schema.names import NRP_FINALIZER
from services.nrp_sync import operations
from services.nrp_sync.operations import Operation
from services.nrp_sync.sources import Member, Name, Reading, read_slice
from services.nrp_sync.state import OpKey, Service, State
from services.nrp_sync.steps import Phase
from services.nrp_sync.wishes import InboundSpec, Refusal, Spec, claims, read_service

# --- services -----------------------------------------------------------------------------------


def see_service(state: State, view: objects.Service, *, cause: str, now: float) -> None:
    """A Service as it is now."""
    meta = view.metadata
    name = Name(meta.namespace, meta.name)
    old = state.services.get(name)
    if old is not None and old.uid != meta.uid:
        gone_service(state, name, old.uid, cause=cause, now=now)
    policy = state.policy
    claimed = claims(view, classless=policy.classless)
    read = read_service(view, first_family=policy.first_family) if claimed else None
    service = Service(
        name=name,
        uid=meta.uid,
        generation=meta.generation,
        claimed=claimed,
        terminating=meta.deletion_timestamp is not None,
        finalizer=NRP_FINALIZER in (meta.finalizers or ()),
        spec=read if isinstance(read, InboundSpec) else None,
        refusal=read if isinstance(read, Refusal) else None,
        cause=cause,
    )
    op = state.operations.get(("inbound", service.identity))
    if op is None and not claimed and not service.finalizer:
        if state.services.pop(name, None) is not None:
            state.tell.add(name)
        return
    state.services[name] = service
    state.next_steps.pop(("inbound", service.identity), None)
    state.tell.add(name)
    _follow(state, service, op, now)


def _follow(state: State, service: Service, op: Operation | None, now: float) -> None:
    """Bring the operation of a Service in line with it."""
    if op is not None:
        op.namespace, op.name = service.name
        op.cause = service.cause
    changed = False
    if service.spec is not None:
        op = op or start(state, ("inbound", service.identity), service.name, now)
        op.cause = service.cause
        changed = operations.wish(op, service.spec, now)
    elif op is not None and not service.claimed:
        changed = operations.unwish(op)
    if op is not None and changed:
        settle(state, op, now)


def gone_service(state: State, name: Name, uid: str, *, cause: str, now: float) -> None:
    """A Service does not exist any more; whatever the provider has for it goes."""
    service = state.services.get(name)
    if service is None or service.uid != uid:
        return
    del state.services[name]
    state.next_steps.pop(("inbound", service.identity), None)
    state.tell.add(name)
    op = state.operations.get(("inbound", service.identity))
    if op is not None:
        op.cause = cause
        operations.unwish(op)
        settle(state, op, now)


# --- operations ---------------------------------------------------------------------------------


def start(state: State, key: OpKey, name: Name, now: float) -> Operation:
    """Begin to follow a service at the provider, and let addresses refer to it."""
    kind, identity = key
    op = Operation(
        kind=kind,
        identity=identity,
        namespace=name.namespace,
        name=name.name,
        created_at=now,
        ready_at=now,
    )
    state.operations[key] = op
    member_of(state, op)
    state.touch(op)
    return op


def member_of(state: State, op: Operation) -> Member:
    """How the addresses see an operation; made when it is asked for first."""
    member = state.members.get(op.key)
    if member is None:
        member = state.members[op.key] = Member(op.kind, op.identity)
    if op.kind == "inbound":
        service = state.services.get(Name(op.namespace, op.name))
        if service is not None and service.identity == op.identity:
            state.provided.desired.bind(service.name, service.uid, member)
    return member


def resume(state: State, op: Operation) -> None:
    """Take up an operation again from its row."""
    member = member_of(state, op)
    state.provided.desired.set_member(member, ready=op.serving, family=_family(op))
    if not (op.phase is Phase.CREATED and op.complete):
        state.active.add(op.key)


def settle(state: State, op: Operation, now: float) -> None:
    """After any change of an operation: move it on, tell its addresses, end it when it is gone."""
    provided = state.provided
    mapped = provided.desired.loading or op.identity in provided.mapped  # loading: not known yet
    operations.advance(op, mapped=mapped, now=now)
    state.touch(op)
    member = member_of(state, op)
    state.provided.desired.set_member(member, ready=op.serving, family=_family(op))
    stirred(state, now)
    if op.gone:
        _end(state, op)
    elif op.phase is Phase.CREATED and op.complete:
        state.active.discard(op.key)


def _family(op: Operation) -> Literal[0, 4, 6]:
    spec: Spec | None = op.wanted or op.applied
    return spec.family if isinstance(spec, InboundSpec) else 0


def _end(state: State, op: Operation) -> None:
    """Nothing of it is left at the provider: forget it, and let the object go."""
    state.note("service_operation_retries", "delete", op.kind, value=op.retries)
    if op.orphan:
        state.note("orphaned_resources_cleaned_total")
    del state.operations[op.key]
    state.members.pop(op.key)
    state.active.discard(op.key)
    state.next_steps.pop(op.key, None)
    state.dirty_ops.add(op.key)
    state.suspect_ops.pop(op.key, None)
    state.check_releases = True
    name = Name(op.namespace, op.name)
    service = state.services.get(name)
    if op.kind == "inbound" and service is not None and service.identity == op.identity:
        state.provided.desired.bind(name, service.uid, None)
        state.tell.add(name)


# --- slices ---------------------------------------------------------------------------


def see_slice(state: State, view: objects.EndpointSlice, *, now: float) -> None:
    """An EndpointSlice as it is now."""
    desired = state.provided.desired
    name = Name(view.metadata.namespace, view.metadata.name)
    put_slice(state, read_slice(view, desired.slices.get(name)), now=now)


def put_slice(state: State, reading: Reading, *, now: float) -> None:
    desired = state.provided.desired
    old = desired.slices.get(reading.name)
    left_out = old.left_out if old is not None else None
    source = desired.put_slice(reading)
    stirred(state, now)
    # Backends are told of when the provider has acknowledged them; what will never reach it, now.
    if source.service is not None and (desired.waiting or source.left_out != left_out):
        state.tell.add(source.service)


def gone_slice(state: State, name: Name, *, now: float) -> None:
    state.provided.desired.drop_slice(name)
    stirred(state, now)


def stirred(state: State, now: float) -> None:
    """Note when the wish for addresses changed, for the window that coalesces changes."""
    if state.provided.stirred:
        state.provided.stirred = False
        state.stuck = False
        state.stirred_at = now
        state.stirred_since = state.stirred_since or now


# --- marks --------------------------------------------------------------------------------------


def new_epoch(state: State) -> None:
    """Everything is listed anew; until then nothing is taken away."""
    state.synced.clear()


def finished(state: State, plural: str) -> None:
    """The list of one kind is complete, and what it did not show has been reported gone."""
    state.synced.add(plural)
    state.stuck = False
    state.check_releases = True


def repair(state: State, now: float) -> None:
    """Somebody asks: read the provider again, and try what was put aside."""
    state.read_wanted = True
    state.lanes["read"].retry_at = now
    for key in sorted(state.operations):
        op = state.operations[key]
        if op.parked:
            op.retry_at = now
            state.touch(op)
    for kept in state.quarantine.values():
        kept.retry_at = now
    state.dirty_quarantine.update(state.quarantine)
    state.stuck = False
