"""Deciding about one owner: what it keeps, what it gets, what it lets go.

What an owner holds stays as long as it fits the request; only what is missing is looked for. A
move is made before the old address is let go: it retires, and is released when the owner's status
shows the new one (or, at the latest, when the time for that is over). An owner whose move fails
keeps what it has. Two families asked for strictly are given together or not at all.
"""

from __future__ import annotations

from typing import Final

from schema import addresses, events
from services.allocator.core import sharing
from services.allocator.core.ledger import (
    adopted,
    event_owner,
    grant,
    release,
    release_all,
)
from services.allocator.core.model import (
    DELEGATED,
    DHCP,
    HELD,
    NOTHING,
    WAITING,
    Lease,
    Owner,
    Refusal,
    Wait,
)
from services.allocator.core.pick import Miss, fits, look_for, missing
from services.allocator.core.state import State

OUTSIDE: Final = "AddressOutsidePool"


def place(state: State, owner: Owner) -> None:
    request = owner.request
    if request.mode == NOTHING:
        release_all(state, owner, "owner-retyped")
        settle(state, owner, HELD)
        return
    if request.mode == DHCP:
        _delegate(state, owner)
        return
    if request.problem:
        _refuse(state, owner, Miss(Refusal("InvalidRequest", request.problem), ()))
        return
    fitting = fitting_leases(state, owner)
    _end_sharing(state, owner, fitting)
    picks, miss = look_for(state, owner, missing(request, fitting))
    if miss is not None and (request.strict or not (picks or fitting)):
        _refuse(state, owner, miss)
        return
    before = owner.leases
    for pick in picks:
        grant(state, owner, *pick)
    for lease in before:
        if lease not in fitting and not lease.retiring and lease in owner.leases:
            _let_go(state, lease, by_move=bool(picks))
    for lease in fitting:
        sharing.restate_slots(state, lease)
    if miss is not None:
        _refuse(state, owner, miss)
    else:
        settle(state, owner, HELD)


def fitting_leases(state: State, owner: Owner) -> tuple[Lease, ...]:
    """What the owner may keep. One that retires comes back where it fits again before the move
    has shown."""
    fitting = [lease for lease in owner.leases if fits(state, lease)]
    if any(lease.retiring for lease in fitting):
        current = {addresses.family(lease.address) for lease in fitting if not lease.retiring}
        fitting = [
            lease
            for lease in fitting
            if not lease.retiring or addresses.family(lease.address) not in current
        ]
        for lease in fitting:
            state.unretire(lease)
    return tuple(fitting)


def _end_sharing(state: State, owner: Owner, fitting: tuple[Lease, ...]) -> None:
    """A holder that may not share any more leaves at once: the others were there by right."""
    for lease in owner.leases:
        if lease not in fitting and lease.share and not sharing.still_shares(state, lease):
            release(state, lease, "sharing-ended")


def _let_go(state: State, lease: Lease, *, by_move: bool) -> None:
    if by_move and state.rules.retire:
        state.retire(lease)
    else:
        release(state, lease, "request-changed")


def shown(state: State, owner: Owner, claims: tuple[int, ...]) -> None:
    """The owner's status shows these addresses: what retired in their favour may go."""
    current = [lease.address for lease in owner.leases if not lease.retiring]
    if not all(address in claims for address in current):
        return
    for lease in owner.leases:
        if lease.retiring and lease.address not in claims:
            release(state, lease, "request-changed")


def retire_due(state: State) -> None:
    """Leases that have been retiring for so long that nobody will show the new address."""
    due = [
        (lease.retiring, lease.serial, lease)
        for lease in state.retiring
        if lease.retiring is not None and lease.retiring + state.rules.retire <= state.now
    ]
    for _, _, lease in sorted(due):
        release(state, lease, "request-changed")


def _delegate(state: State, owner: Owner) -> None:
    release_all(state, owner, "request-changed")
    if owner.phase != DELEGATED:
        state.out.append(
            events.AddressDelegated(
                at=state.now, owner=event_owner(owner), generation=owner.generation
            )
        )
    settle(state, owner, DELEGATED)


def _refuse(state: State, owner: Owner, miss: Miss) -> None:
    """The owner waits. It is told why once, not each time that it is tried again in vain."""
    refusal = miss.refusal._replace(kept=kept_text(owner))
    if not owner.ticket:
        owner.ticket = state.next_serial()
        state.changed(owner)
    if owner.phase != WAITING:
        owner.phase = WAITING
        state.changed(owner)
    state.queues.join(owner, miss.waits)
    _touch_pools(state, miss.waits)
    tell(state, owner, refusal)


def tell(state: State, owner: Owner, refusal: Refusal) -> None:
    old = owner.refusal
    if old is None or old[:3] != refusal[:3] or old.kept != refusal.kept:
        owner.note(refusal=refusal)
        state.out.append(refused(state, owner, refusal))
        state.changed(owner)


def kept_text(owner: Owner) -> str:
    return ",".join(addresses.text(lease.address) for lease in owner.leases if not lease.retiring)


def refused(state: State, owner: Owner, refusal: Refusal) -> events.LeaseRefused:
    return events.LeaseRefused(
        at=state.now,
        owner=event_owner(owner),
        reason=refusal.reason,
        message=refusal.message,
        pool=refusal.pool,
        considered=[
            events.PoolVerdict(pool=pool, reason=reason, message=message)
            for pool, reason, message in refusal.considered
        ],
        kept=refusal.kept,
        generation=owner.generation,
    )


def rejoin(state: State, owner: Owner) -> None:
    """Put an owner that was refused back among those who wait, at its old place in the order."""
    waits: tuple[Wait, ...] = ()
    if not owner.request.problem:
        fitting = fitting_leases(state, owner)
        _, miss = look_for(state, owner, missing(owner.request, fitting))
        if miss is None:
            state.undecided[owner] = None
            return
        waits = miss.waits
    state.queues.join(owner, waits)


def settle(state: State, owner: Owner, phase: str) -> None:
    """Nothing is missing: the owner leaves the order of those who wait."""
    if owner.phase != phase or owner.ticket or owner.refusal is not None:
        state.changed(owner)
        owner.phase, owner.ticket = phase, 0
    if owner.rare is not None:
        if owner.waits:
            _touch_pools(state, owner.waits)
            state.queues.leave(owner)
        if owner.claims:
            state.changed(owner)
        created = owner.created if owner.request.guest else ""
        owner.note(claims=(), created=created, refusal=None)
    if state.strays:
        note_stray(state, owner)


def note_stray(state: State, owner: Owner) -> None:
    """Say it when an owner's address is not in its pool any more, and when it is again."""
    stray = next((lease for lease in owner.leases if state.is_stray(lease)), None)
    noted = owner.refusal is not None and owner.refusal.reason == OUTSIDE
    if stray is not None and owner.phase == HELD:
        text = addresses.text(stray.address)
        message = f"{text} is not an address of pool {stray.pool} any more; it stays as it is"
        tell(state, owner, Refusal(OUTSIDE, message, stray.pool, kept=kept_text(owner)))
    elif stray is None and noted:
        owner.note(refusal=None)
        state.changed(owner)
        state.out.extend(adopted(state, lease, "ledger") for lease in owner.leases)


def _touch_pools(state: State, waits: tuple[Wait, ...]) -> None:
    """The number of those who wait for a pool is part of its account."""
    for wait in waits:
        if wait[0] == "pool":
            state.touched[str(wait[1])] = None
