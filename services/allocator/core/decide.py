"""From a fact to decisions: take it in, and, once all kinds are known, decide what it asks for.

The order within one fact: leases of owners that are gone are released, then owners that ask are
placed in the order in which they asked, then those who wait are woken by what became free. Before
every kind is known completely in the current epoch, facts are only taken in. When the last one
becomes known, what the cluster shows already is adopted before anything is granted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

from schema import addresses, events
from services.allocator.core import express, guests, legacy, manual, observe
from services.allocator.core.adopt import adopt
from services.allocator.core.ledger import release_all
from services.allocator.core.model import NOTHING, Owner
from services.allocator.core.place import note_stray, place, retire_due, shown
from services.allocator.core.state import State
from services.allocator.core.wake import wake, wake_cooled

RELEASE_REASONS = {"deleted": "owner-deleted", "replaced": "replaced", "vanished": "reclaimed"}
MAX_INT64 = (1 << 63) - 1


class Tick(NamedTuple):
    """The time, for rules that depend on it; submitted by the shell when something is due."""

    at: datetime


def decide(state: State, fact: events.AnyEvent, *, epoch: str, seq: int) -> list[events.Event]:
    """Take a fact in and decide. Deterministic; the same fact again decides nothing."""
    state.begin(fact.at, epoch, seq)
    if state.settled:
        granted = express.grant(state, fact, epoch)
        if granted is not None:
            return [granted]
    was_ready = state.ready
    take_in(state, fact, epoch=epoch, seq=seq)
    return conclude(state, was_ready=was_ready)


def tick(state: State, now: datetime) -> list[events.Event]:
    """Time has passed: reclaim what is due."""
    state.begin(now, state.cause.epoch, state.cause.seq)
    if state.ready:
        retire_due(state)
        if state.rules.cooldown:
            wake_cooled(state)
    return conclude(state, was_ready=state.ready)


def take_in(state: State, fact: events.AnyEvent, *, epoch: str, seq: int) -> None:
    """Note what a fact shows, without deciding."""
    if not state.epoch:
        state.epoch = epoch
        state.changes.clock = True
    match fact:
        case events.ServiceSeen():
            observe.service(state, fact.object, epoch)
        case events.LoadBalancerSeen():
            observe.load_balancer(state, fact.object, epoch)
        case events.IPPoolSeen():
            observe.pool(state, fact.object, epoch)
        case events.NamespaceSeen():
            observe.namespace(state, fact.object, epoch)
        case events.ObjectGone():
            observe.gone(state, fact)
        case events.VirtualMachineSeen():
            observe.virtual_machine(state, fact.object)
        case events.ConfigMapSeen():
            observe.config_map(state, fact.object)
        case events.SyncFinished():
            observe.sync_finished(state, fact.plural, fact.epoch, seq, absent=fact.absent)
        case events.EpochStarted():
            state.epoch = fact.epoch
            state.changes.clock = True
            state.refresh_ready()


def conclude(state: State, *, was_ready: bool) -> list[events.Event]:
    if state.ready:
        if not was_ready:
            _release_departed(state)
            adopt(state)
            become_ready(state)
        if state.leaving or state.vanished:
            _release_departed(state)
        if state.undecided:
            _place_undecided(state)
        if state.showing:
            _let_movers_go(state)
        if state.altered or state.freed or state.freed_quotas or state.rejoinable:
            wake(state)
        if state.strayed:
            _note_strays(state)
        if state.release_asked:
            manual.answer(state)
            wake(state)
        if state.guests_changed or state.clusters_removed:
            guests.condemn(state)
        if state.legacy is not None:
            _import_legacy(state)
    out, state.out = state.out, []
    return out


def become_ready(state: State) -> None:
    """Every pool may matter to somebody who waited through the listing."""
    state.altered.update(dict.fromkeys(sorted(state.pools), True))
    state.touched.update(dict.fromkeys(state.pools))
    state.release_asked.update((n, None) for n, p in state.pools.items() if manual.asked(p))


def imported_digest(state: State) -> str:
    """Tells one content of the ConfigMap from another."""
    return hashlib.sha256(repr(state.legacy).encode()).hexdigest()[:16]


def _import_legacy(state: State) -> None:
    assert state.legacy is not None
    uid, data = state.legacy
    digest = imported_digest(state)
    state.legacy, state.changes.clock = None, True
    if digest == state.imported:
        return
    state.imported = digest
    pools, problems = legacy.convert(data, "kube-system")
    state.out.append(
        events.PoolsImported(
            at=state.now,
            namespace="kube-system",
            name="kubevip",
            uid=uid,
            pools=pools,
            problems=problems,
        )
    )


def _release_departed(state: State) -> None:
    for owner in state.due():
        release_all(state, owner, RELEASE_REASONS.get(owner.gone_how, "owner-deleted"))
        state.forget_owner(owner)


def _place_undecided(state: State) -> None:
    owners = list(state.undecided)
    state.undecided.clear()
    if len(owners) > 1:
        owners.sort(key=_by_ticket)
    for owner in owners:
        place(state, owner)
        if owner.request.mode == NOTHING:
            state.forget_owner(owner)


def _let_movers_go(state: State) -> None:
    showing, state.showing = state.showing, []
    for owner, claims in showing:
        if state.knows(owner):
            shown(state, owner, claims)


def _note_strays(state: State) -> None:
    strayed, state.strayed = state.strayed, {}
    for owner in sorted(strayed, key=lambda owner: (owner.plural, owner.key)):
        if state.knows(owner) and owner.gone_at is None:
            note_stray(state, owner)


def _by_ticket(owner: Owner) -> int:
    return owner.ticket


def next_deadline(state: State) -> datetime | None:
    """When a tick could decide something, as far as is known now."""
    rules = state.rules
    ends = [owner.gone_at + rules.grace for owner in state.vanished if owner.gone_at][:1]
    ends += [o.retiring + rules.retire for o in state.retiring if o.retiring is not None]
    if rules.cooldown:
        ends += [released + rules.cooldown for released in _cooling_for_waiters(state)]
    return min(ends, default=None)


def _cooling_for_waiters(state: State) -> Iterator[datetime]:
    """When the addresses were released that somebody waits for although they are free."""
    for wait in state.queues.kind("pool"):
        pool = state.pools.get(str(wait[1]))
        space = pool.spaces.get(int(str(wait[2]))) if pool is not None else None
        memo = space.longest_released() if space is not None else None
        if memo is not None:
            yield memo.released
    for wait in state.queues.kind("address"):
        address = int(str(wait[1]))
        for pool in state.pools_around(address):
            space = pool.spaces.get(addresses.family(address))
            if space is not None and address in space.free:
                yield space.free[address].released


def account(state: State) -> list[events.PoolAccounted]:
    """The use of every pool that the decisions since the last call touched."""
    touched, state.touched = state.touched, {}
    if not state.ready:
        state.touched = touched
        return []
    accounts = []
    for name in touched:
        pool = state.pools.get(name)
        if pool is None:
            continue
        accounts.append(
            events.PoolAccounted(
                at=state.now,
                pool=name,
                uid=pool.uid,
                generation=pool.generation,
                total=min(pool.total, MAX_INT64),
                available=max(0, min(state.available(pool), MAX_INT64)),
                waiting=sum(state.queues.waiting(("pool", name, family)) for family in (4, 6)),
                last_allocated=pool.last_text,
                ready=not pool.reason,
                reason=pool.reason or "Ready",
                message=pool.problem,
            )
        )
    return accounts
