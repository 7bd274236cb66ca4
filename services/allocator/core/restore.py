"""Building a state from what was stored: the same state as the one that stored it."""

from __future__ import annotations

from datetime import datetime

from schema import addresses
from schema.pools import PoolError, read_plan, read_quotas
from services.allocator.core.model import PENDING, WAITING, Lease, Owner, Pool, Slots
from services.allocator.core.observe import standing
from services.allocator.core.place import rejoin
from services.allocator.core.request import NO_REQUEST
from services.allocator.core.space import Memo, in_order
from services.allocator.core.state import Cause, State


def pool(state: State, stored: Pool) -> None:
    state.pools[stored.name] = stored
    if stored.good is not None:
        state.reshape(stored, read_plan(stored.good))
        stored.quotas = read_quotas(stored.good)
    try:
        read_plan(stored.view)
        read_quotas(stored.view)
        stored.reason, stored.problem = standing(stored.view)
    except PoolError as error:
        stored.reason, stored.problem = "InvalidRange", str(error)


def owner(state: State, stored: Owner) -> None:
    if stored.gone_at is not None:
        state.departed[stored.plural, stored.uid] = stored  # finish() puts them in order
    if stored.gone_how in ("", "vanished"):
        state.owners[stored.plural][stored.key] = stored
    if stored.request.guest_cluster and stored.gone_at is None:
        state.enlist_guest(stored)
    stored.compact()


def holder(state: State, plural: str, key: str, uid: str) -> Owner:
    """Whose lease it is. One whose owner nobody knows is a leak: it is released like a departed
    owner's."""
    departed = state.departed.get((plural, uid)) if state.departed else None
    if departed is not None:
        return departed
    known = state.owners[plural].get(key)
    if known is not None and known.has_uid(uid):
        return known
    lost = Owner(plural, key, uid, state.intern(NO_REQUEST), "")
    lost.note(gone_at=state.now, gone_how="vanished")
    state.departed[plural, uid] = lost
    return lost


def lease(state: State, stored: Lease, share: str, slots: Slots, retiring: datetime | None) -> None:
    others = stored.owner.leases
    stored.owner.leases = in_order((*others, stored)) if others else (stored,)
    pool = state.pools.get(stored.pool)
    if share:
        stored.cover(share, slots, stored.owner.request.policy)
    if retiring is not None:
        stored.retire(retiring)
        state.retiring[stored] = None
    if share or (pool is not None and pool.quotas):
        state.count(stored, 1)
    if pool is not None and not pool.overlapping:  # the usual case, without detours
        space = pool.spaces.get(6 if stored.address >= addresses.V6 else 4)
        if space is not None and stored.address in space.shape:
            space.put(stored)
            return
    for _, space in state.places(stored):
        space.put(stored)
    if state.is_stray(stored):
        state.strays[stored.address] = in_order((*state.strays.get(stored.address, ()), stored))


def memo(state: State, stored: Memo) -> None:
    """In the order of release."""
    known = state.pools.get(stored.pool)
    space = known.spaces.get(addresses.family(stored.address)) if known else None
    if space is not None and space.is_free(stored.address):
        space.put_memo(stored)
        state.memory.setdefault((stored.plural, stored.key), []).append(stored)


def finish(state: State, seq: int) -> None:
    """Everything is in: bring it into the order in which it would have come to be. `seq` is that
    of the last fact: the cause of what the time alone will bring about."""
    state.refresh_ready()
    state.cause = Cause(state.epoch, seq, f"{state.epoch}:{seq}")
    for known in state.pools.values():
        for space in known.spaces.values():
            space.settle()
    for one in sorted(state.departed.values(), key=_departed):
        state.await_release(one)
    for one in sorted(state.all_owners(), key=lambda one: one.ticket):
        if not one.ticket or one.gone_at is not None:
            continue
        if one.phase == WAITING:
            rejoin(state, one)
        elif one.phase == PENDING:
            state.undecided[one] = None
    state.strayed.clear()
    state.touched.clear()
    state.altered.clear()
    state.rejoinable.clear()
    state.guests_changed.clear()
    state.forget_changes()


def _departed(owner: Owner) -> tuple[datetime, str, str]:
    assert owner.gone_at is not None
    return owner.gone_at, owner.plural, owner.key
