"""The life of one service at the provider, as a pure machine.

An operation is keyed by (kind, identity) and holds what is wanted, what of it the provider has
(`marks`, one per resource, written down after every sub-step, so that a restart resumes), and where
it is. What to do next is never remembered, it follows: `next_step` compares the wish with the
marks. A sub-step under way makes its mark `maybe`; an answer settles it; no answer leaves it, and
the sub-step is done again (all are idempotent).

Order, which the provider relies on:
    inbound   public IP, load balancer, registration | drained, pool cleared, load balancer gone,
              unregistered, public IP gone
    outbound  public IPs, NAT gateway, registration  | drained, parted, unregistered, NAT gateway
              gone, public IPs gone
Deletion wins over what is under way and waits for it; a wish that arrives during a deletion is kept
and begins afresh after it, except that an egress whose deletion has not begun is revived.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.nrp_sync.sources import Kind
from services.nrp_sync.steps import (
    BALANCER,
    PARTING_TRIES,
    POOL,
    REGISTRATION,
    REMOVING,
    Before,
    Failure,
    Mark,
    Park,
    Phase,
    Retrying,
    Step,
    Verb,
)
from services.nrp_sync.wishes import Spec, public_ip_name, public_ips


@dataclass(slots=True, kw_only=True)
class Operation:
    kind: Kind
    identity: str
    namespace: str = ""
    name: str = ""
    wanted: Spec | None = None
    generation: int = 0
    """Grows with every change of mind."""
    applied: Spec | None = None
    """What the load balancer or NAT gateway was last put with."""
    phase: Phase = Phase.NOT_STARTED
    marks: dict[str, Mark] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    """Public IP by name to the address that the provider gave it."""
    recreate: Spec | None = None
    orphan: bool = False
    flight: int = 0
    """Number of the request under way, 0 for none."""
    retries: int = 0
    retry_at: float = 0.0
    parked: Park = ""
    error_code: str = ""
    error_message: str = ""
    cause: str = ""
    created_at: float = 0.0
    ready_at: float = 0.0
    """Since when the next step waits to join a batch."""

    @property
    def key(self) -> tuple[Kind, str]:
        return self.kind, self.identity

    @property
    def registered(self) -> bool:
        return self.marks.get(REGISTRATION) is Mark.YES

    @property
    def deleting(self) -> bool:
        return self.phase in (Phase.DRAINING, Phase.DELETING)

    @property
    def serving(self) -> bool:
        """Whether addresses may refer to it."""
        return self.registered and not self.deleting

    @property
    def complete(self) -> bool:
        """Nothing is left to do for the wish."""
        return (
            self.wanted is not None
            and self.applied == self.wanted
            and self.registered
            and self.marks.get(POOL) is Mark.YES
            and self.marks.get(BALANCER) is Mark.YES
            and all(self.addresses.get(ip.name) for ip in public_ips(self.identity, self.wanted))
        )

    @property
    def gone(self) -> bool:
        """A deletion that has nothing left to delete."""
        return self.phase is Phase.DELETING and not self.marks and not self.flight


# --- wishes -------------------------------------------------------------------------------------


def wish(op: Operation, spec: Spec, now: float) -> bool:
    """The service is wanted like this. Returns whether anything changed."""
    if op.deleting:
        if op.kind == "outbound" and op.phase is Phase.DRAINING and op.retries == 0:
            return _revive(op, spec)
        changed = op.recreate != spec
        op.recreate = spec
        return changed
    if op.wanted == spec:
        return False
    op.wanted = spec
    op.generation += 1
    _fresh_budget(op)
    op.ready_at = now
    if op.phase is Phase.CREATED:
        op.phase = Phase.UPDATING
    return True


def _revive(op: Operation, spec: Spec) -> bool:
    op.wanted, op.recreate = spec, None
    op.generation += 1
    op.phase = Phase.CREATED if op.complete else Phase.NOT_STARTED
    return True


def unwish(op: Operation, *, orphan: bool = False) -> bool:
    """The service is not wanted any more. Returns whether anything changed."""
    if op.deleting:
        changed = op.recreate is not None
        op.recreate = None
        if op.parked:
            _fresh_budget(op)
        return changed
    op.phase = Phase.DRAINING
    op.recreate = None
    op.orphan = orphan
    op.generation += 1
    _fresh_budget(op)
    return True


def _fresh_budget(op: Operation) -> None:
    op.retries, op.retry_at, op.parked = 0, 0.0, ""
    op.error_code = op.error_message = ""


# --- what to do ---------------------------------------------------------------------------------


def advance(op: Operation, *, mapped: bool, now: float) -> None:
    """Move on where nothing has to be asked of the provider. `mapped`: addresses refer to it."""
    if op.phase is Phase.DRAINING and not mapped and not op.flight and op.retry_at <= now:
        op.phase = Phase.DELETING
    if op.gone and op.recreate is not None:
        _begin_afresh(op)


def _begin_afresh(op: Operation) -> None:
    op.wanted, op.recreate = op.recreate, None
    op.applied = None
    op.addresses = {}
    op.phase = Phase.NOT_STARTED
    op.orphan = False
    op.generation += 1
    _fresh_budget(op)


def next_step(op: Operation, *, held_back: bool) -> Step | None:
    """The sub-step to do now, None when there is none.

    `held_back`: nothing may be made at the provider yet, our finalizer is not on the object.
    """
    if op.flight:
        return None
    if op.phase is Phase.DELETING:
        return _removal(op)
    if op.phase is Phase.DRAINING or op.wanted is None or held_back or op.complete:
        return None
    return _making(op, op.wanted)


def _making(op: Operation, spec: Spec) -> Step | None:
    generation = op.generation
    ips = public_ips(op.identity, spec)
    for ip in ips:
        if op.marks.get(ip.name) is not Mark.YES:
            return Step(verb=Verb.PUT_PUBLIC_IP, resource=ip.name, generation=generation, spec=spec)
    if op.marks.get(BALANCER) is not Mark.YES or op.applied != spec:
        return Step(verb=Verb.PUT_BALANCER, resource=BALANCER, generation=generation, spec=spec)
    if not op.registered or op.marks.get(POOL) is not Mark.YES:
        return Step(verb=Verb.REGISTER, resource=REGISTRATION, generation=generation, spec=spec)
    for ip in ips:  # made, but the provider had no address for it then: ask again
        if not op.addresses.get(ip.name):
            return Step(verb=Verb.PUT_PUBLIC_IP, resource=ip.name, generation=generation, spec=spec)
    return None


def _removal(op: Operation) -> Step | None:
    def step(verb: Verb, resource: str) -> Step:
        return Step(verb=verb, resource=resource, generation=op.generation)

    if POOL in op.marks:
        return step(Verb.CLEAR if op.kind == "inbound" else Verb.DETACH, POOL)
    order = [(BALANCER, Verb.DELETE_BALANCER), (REGISTRATION, Verb.UNREGISTER)]
    if op.kind == "outbound":
        order.reverse()
    for resource, verb in order:
        if resource in op.marks:
            return step(verb, resource)
    for resource in sorted(op.marks):
        return step(Verb.DELETE_PUBLIC_IP, resource)
    return None


def begin(op: Operation, step: Step, number: int, now: float) -> Before:
    """The sub-step is on its way. Returns what to go back to if it was surely not applied."""
    before = Before(dict(op.marks), op.applied)
    if op.parked and op.retry_at <= now:
        op.retries, op.parked = 0, ""
    op.flight = number
    # What is there and is put again stays there, whatever becomes of the request.
    if step.verb in REMOVING or step.resource not in op.marks:
        op.marks[step.resource] = Mark.MAYBE
    if step.verb is Verb.REGISTER:
        op.marks[POOL] = Mark.MAYBE
    elif step.verb is Verb.PUT_BALANCER:
        op.applied = None
        if op.kind == "outbound":  # it refers to the service gateway from its first day
            op.marks.setdefault(POOL, Mark.MAYBE)
    if op.phase is Phase.NOT_STARTED:
        op.phase = Phase.CREATING
    return before


# --- outcomes -----------------------------------------------------------------------------------


def succeed(
    op: Operation, step: Step, *, address: str = "", retrying: Retrying, now: float
) -> None:
    """The provider acknowledged the sub-step."""
    op.flight = 0
    op.ready_at = now
    op.error_code = op.error_message = ""
    if step.verb in REMOVING:
        op.marks.pop(step.resource, None)
        if step.verb is Verb.DELETE_PUBLIC_IP:
            op.addresses.pop(step.resource, None)
        elif step.verb is Verb.UNREGISTER:
            op.marks.pop(POOL, None)
        elif step.verb is Verb.DELETE_BALANCER:
            op.applied = None
        return
    op.marks[step.resource] = Mark.YES
    if step.verb is Verb.PUT_PUBLIC_IP:
        op.addresses[step.resource] = address
        if not address and op.registered:
            op.retries += 1
            op.retry_at = now + retrying.backoff(op.retries, op.identity)
    elif step.verb is Verb.PUT_BALANCER:
        op.applied = step.spec
    elif step.verb is Verb.REGISTER:
        op.marks[POOL] = Mark.YES
    conclude(op)


def conclude(op: Operation) -> None:
    """Name the phase that the marks amount to, unless a deletion is under way."""
    if op.deleting:
        return
    if op.complete:
        op.phase = Phase.CREATED
        _fresh_budget(op)
    elif op.phase is Phase.CREATED:
        op.phase = Phase.UPDATING


def fail(
    op: Operation,
    step: Step,
    failure: Failure,
    before: Before | None,
    *,
    retrying: Retrying,
    now: float,
) -> None:
    """The sub-step did not succeed; decide whether, and when, it is tried again.

    `before` None: it is not remembered (we were restarted), so what the step touched stays maybe.
    """
    postpone(op, before if failure.kind != "unknown" else None, now)
    op.error_code, op.error_message = failure.code or failure.kind, failure.message
    stale = step.generation != op.generation  # the mind was changed meanwhile: a new budget
    wait = failure.retry_after or 0.0
    if stale:
        op.retry_at = now + wait
        return
    parting = step.verb in (Verb.CLEAR, Verb.DETACH)
    if parting and failure.kind in ("invalid", "not_found") and op.retries >= PARTING_TRIES:
        op.marks.pop(POOL, None)  # nothing there to part from, it seems; the deletion will tell
        return
    if step.verb is Verb.DELETE_BALANCER and failure.kind == "in_use":
        op.marks[POOL] = Mark.MAYBE
    if failure.kind == "overlay_mappings":
        op.phase = Phase.DRAINING
    if failure.kind == "throttled":
        op.retry_at = now + max(wait, retrying.first)
        return
    op.retries += 1
    if failure.kind in ("invalid", "quota_exceeded"):
        op.parked = "rejected" if failure.kind == "invalid" else "quota_exceeded"
    elif op.retries >= retrying.tries:
        op.parked = "retries_exceeded"
    if op.parked:
        op.retry_at = now + max(wait, retrying.cooldown)
    elif failure.kind == "precondition_failed" and op.retries == 1:
        op.retry_at = now + wait
    else:
        op.retry_at = now + max(wait, retrying.backoff(op.retries, op.identity))


def postpone(op: Operation, before: Before | None, now: float) -> None:
    """The request came to nothing, for no reason of this operation's own."""
    op.flight = 0
    op.ready_at = now
    if before is not None:
        op.marks, op.applied = before
    if op.phase is Phase.CREATING:
        op.phase = Phase.NOT_STARTED


# --- adoption -----------------------------------------------------------------------------------


def public_ip_names(kind: Kind, identity: str) -> tuple[str, ...]:
    """Every name that a public IP of this service may have."""
    if kind == "inbound":
        return (public_ip_name(identity),)
    return tuple(public_ip_name(identity, family, outbound=True) for family in (4, 6))
