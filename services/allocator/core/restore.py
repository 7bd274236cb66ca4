"""Building a state from what was stored: the same state as the one that stored it."""

from __future__ import annotations

from schema import addresses
from schema.pools import PoolError, read_plan, read_quotas
from services.allocator.core.model import PENDING, WAITING, Lease, Owner, Pool
from services.allocator.core.observe import standing
from services.allocator.core.place import rejoin
from services.allocator.core.space import Memo
from services.allocator.core.state import State


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


def lease(state: State, stored: Lease) -> None:
    stored.owner.leases = (*stored.owner.leases, stored)
    if stored.share:
        stored.slots, stored.policy = stored.owner.request.slots, stored.owner.request.policy
    if stored.retiring is not None:
        state.retiring[stored.id] = stored
    state.count(stored, 1)
    for _, space in state.places(stored):
        space.put(stored)
    if state.is_stray(stored):
        state.strays[stored.address] = (*state.strays.get(stored.address, ()), stored)


def memo(state: State, stored: Memo) -> None:
    """In the order of release."""
    known = state.pools.get(stored.pool)
    space = known.spaces.get(addresses.family(stored.address)) if known else None
    if space is not None and space.is_free(stored.address):
        space.put_memo(stored)
        state.memory.setdefault((stored.plural, stored.key), []).append(stored)


def finish(state: State) -> None:
    """Everything is in: bring it into the order in which it would have come to be."""
    state.refresh_ready()
    for known in state.pools.values():
        for space in known.spaces.values():
            space.settle()
    for one in sorted(state.departed.values(), key=lambda one: str(one.gone_at)):
        state.await_release(one)
    for one in sorted(state.all_owners(), key=lambda one: one.ticket):
        if not one.ticket or one.gone_at is not None:
            continue
        if one.phase == WAITING:
            rejoin(state, one)
        elif one.phase == PENDING:
            state.undecided[one.plural, one.uid] = one
    state.strayed.clear()
    state.guests_changed.clear()
    state.forget_changes()
