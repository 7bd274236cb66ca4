"""Recorded decisions back into memory: replay never decides again.

For each fact of the log: take it in, then apply the decisions that were recorded with it as their
cause. What remains of the fact (an owner whose changed request is still satisfied, one that is
still refused for the same reason) follows from the state alone. Facts after the last recorded
decision are then decided in the usual way.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from schema import events
from services.allocator.core import ledger, sharing
from services.allocator.core.adopt import recall_histories
from services.allocator.core.decide import become_ready, imported_digest, take_in
from services.allocator.core.model import (
    DELEGATED,
    DHCP,
    HELD,
    NOTHING,
    POOL,
    WAITING,
    Lease,
    Owner,
    Refusal,
    Request,
)
from services.allocator.core.pick import missing
from services.allocator.core.place import OUTSIDE, fitting_leases, note_stray, rejoin, settle
from services.allocator.core.state import State


def replay(
    state: State,
    fact: events.AnyEvent,
    decisions: Iterable[events.AnyEvent],
    *,
    epoch: str,
    seq: int,
) -> None:
    """One fact of the log with the decisions that it led to."""
    state.begin(fact.at, epoch, seq)
    was_ready = state.ready
    take_in(state, fact, epoch=epoch, seq=seq)
    if state.ready and not was_ready:
        become_ready(state)
    if state.ready:
        for owner in sorted(state.undecided, key=lambda owner: owner.ticket):
            if not owner.request.problem and not owner.request.strict:
                for lease in fitting_leases(state, owner):
                    sharing.restate_slots(state, lease)
    recorded = list(decisions)
    recalled = was_ready or not state.ready
    for decision in recorded:
        if not recalled and not isinstance(
            decision, events.LeaseAdopted | events.LeaseReleased | events.AddressContested
        ):
            recall_histories(state, state.pools.values())
            recalled = True
        evolve(state, decision)
    if not recalled:
        recall_histories(state, state.pools.values())
    if state.ready:
        _follow(state)
    state.out.clear()


def replay_tick(state: State, now: datetime, decisions: Iterable[events.AnyEvent]) -> None:
    """The passing of time, with the decisions that it led to."""
    state.begin(now, state.cause.epoch, state.cause.seq)
    for decision in decisions:
        evolve(state, decision)
    if state.ready:
        _follow(state)
    state.out.clear()


def evolve(state: State, decision: events.AnyEvent) -> None:
    """Apply one recorded decision. One that holds already changes nothing."""
    match decision:
        case events.LeaseGranted() | events.LeaseAdopted():
            _granted(state, decision)
        case events.LeaseReleased():
            _released(state, decision)
        case events.LeaseRefused():
            _refused(state, decision)
        case events.OwnerCondemned():
            owner = _owner(state, decision.owner)
            owner.note(condemned=decision.reason)
            state.changed(owner)
        case events.PoolsImported():
            state.imported, state.legacy = imported_digest(state), None
            state.changes.clock = True
        case events.AddressDelegated():
            owner = _owner(state, decision.owner, Request(DHCP, decision.owner.namespace))
            state.undecided.pop(owner, None)
            settle(state, owner, DELEGATED)


def _granted(state: State, decision: events.LeaseGranted | events.LeaseAdopted) -> None:
    state.now = max(state.now, decision.at)
    owner = _owner(state, decision.owner)
    if any(lease.id == decision.lease for lease in owner.leases):
        note_stray(state, owner)
        return
    serial = int(decision.lease.rpartition(":")[2])
    state.serial = max(state.serial, serial)
    state.changes.clock = True
    ledger.begin(state, owner, decision)
    if isinstance(decision, events.LeaseGranted):
        state.undecided[owner] = None
        state.moved[owner] = None


def _released(state: State, decision: events.LeaseReleased) -> None:
    state.now = max(state.now, decision.at)
    owner = _known(state, decision.owner)
    lease = _lease(owner, decision.lease) if owner is not None else None
    if lease is not None:
        ledger.end(state, lease, decision.reason)


def _lease(owner: Owner, lease_id: str) -> Lease | None:
    return next((lease for lease in owner.leases if lease.id == lease_id), None)


def _refused(state: State, decision: events.LeaseRefused) -> None:
    owner = _owner(state, decision.owner)
    state.changed(owner)
    refusal = Refusal(
        decision.reason,
        decision.message,
        decision.pool,
        tuple((v.pool, v.reason, v.message) for v in decision.considered),
        decision.kept,
    )
    owner.note(refusal=refusal)
    if decision.reason == OUTSIDE:
        return
    if not owner.ticket:
        owner.ticket = state.next_serial()
    owner.phase = WAITING
    state.undecided.pop(owner, None)
    rejoin(state, owner)


def _known(state: State, who: events.Owner) -> Owner | None:
    departed = state.departed.get((who.plural, who.uid))
    if departed is not None:
        return departed
    owner = state.owners[who.plural].get(f"{who.namespace}/{who.name}")
    return owner if owner is not None and owner.uid == who.uid else None


def _owner(state: State, who: events.Owner, request: Request | None = None) -> Owner:
    """The owner of a decision, also where the log has lost the fact that told of it."""
    known = _known(state, who)
    if known is None:
        wish = state.intern(request or Request(POOL, who.namespace))
        known = Owner(who.plural, f"{who.namespace}/{who.name}", who.uid, wish, "")
        state.add_owner(known)
    return known


def _follow(state: State) -> None:
    """What the fact leads to without a decision of its own."""
    for owner in state.due():
        if not owner.leases:
            state.forget_owner(owner)
    moved, state.moved = state.moved, {}
    for owner in moved:
        fitting = fitting_leases(state, owner)
        for lease in owner.leases:
            if lease not in fitting and state.rules.retire:
                state.retire(lease)
    undecided, state.undecided = state.undecided, {}
    for owner in sorted(undecided, key=lambda owner: owner.ticket):
        if owner.request.mode == NOTHING:
            state.forget_owner(owner)
            continue
        if owner.request.mode == DHCP:
            settle(state, owner, DELEGATED)
            continue
        if owner.request.problem:
            owner.phase = WAITING
            rejoin(state, owner)
            continue
        fitting = fitting_leases(state, owner)
        lacking = missing(owner.request, fitting)
        if not lacking or not _all_or_nothing(owner, fitting):
            for lease in fitting:
                sharing.restate_slots(state, lease)
        if lacking:
            owner.phase = WAITING
            rejoin(state, owner)
        else:
            settle(state, owner, HELD)
    state.altered.clear()
    state.freed.clear()
    state.freed_quotas.clear()
    state.rejoinable.clear()
    state.showing.clear()
    state.strayed.clear()
    state.release_asked.clear()
    state.guests_changed.clear()
    state.clusters_removed.clear()


def _all_or_nothing(owner: Owner, fitting: tuple[Lease, ...]) -> bool:
    """Whether an owner that lacks something was refused altogether."""
    return owner.request.strict or not fitting
