"""Waking those who wait, in the order of their tickets, when something frees capacity.

Only those who may be helped are looked at: a freed address wakes the owners that wait for it or
for a place in its pool, one by one, until the place is taken; a changed pool wakes the owners that
wait for that pool, and those whose request it fits now.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from schema import addresses, selection
from services.allocator.core.model import Owner, Pool, Wait
from services.allocator.core.place import place
from services.allocator.core.quota import QuotaKey
from services.allocator.core.state import State


def wake(state: State) -> None:
    """Serve whom the changes since the last call may help; serving may help others in turn."""
    while state.altered or state.freed or state.freed_quotas:
        altered, state.altered = state.altered, {}
        for name, serves in altered.items():
            _wake_for_pool(state, name, serves=serves)
        freed, state.freed = state.freed, []
        for name, address in freed:
            _wake_for_address(state, name, address)
        quotas, state.freed_quotas = state.freed_quotas, {}
        for key in quotas:
            _serve(state, [("quota", *key)], partial(_has_room, state, key))


def wake_cooled(state: State) -> None:
    """Time has passed: freed addresses may have become free for everybody."""
    for wait in state.queues.kind("pool"):
        pool, family = state.pools.get(str(wait[1])), int(str(wait[2]))
        if pool is not None and pool.usable:
            _serve(state, [wait], _grantable(state, pool, family))
    for wait in state.queues.kind("address"):
        _all(state, [wait])


def _wake_for_address(state: State, name: str, address: int) -> None:
    pool = state.pools.get(name)
    family = addresses.family(address)
    space = pool.spaces.get(family) if pool is not None else None
    asked: Wait = ("address", address)
    if space is None or pool is None or not pool.usable:
        _all(state, [asked])
        return

    capacity: Wait = ("pool", name, family)

    def free() -> bool:
        return space.is_free(address) and not state.cooling(space, address)

    def shared() -> bool:
        holders = space.holders(address)
        return bool(holders) and bool(holders[0].share)

    _serve(state, [asked, capacity], free)
    _serve(state, [capacity], _grantable(state, pool, family))
    _serve(state, [asked], shared)


def _has_room(state: State, key: QuotaKey) -> bool:
    pool = state.pools.get(str(key[0]))
    index = int(str(key[1]))
    if pool is None or index >= len(pool.quotas):
        return True
    return state.usage.get(key, 0) < pool.quotas[index].limit


def _grantable(state: State, pool: Pool, family: int) -> Callable[[], bool]:
    return partial(state.grantable, pool, family)


def _wake_for_pool(state: State, name: str, *, serves: bool) -> None:
    """The pool is new, has changed, or is gone. Where that touches whom it serves (`serves`), all
    who named it or wait for it learn what holds now; else those who may get an address."""
    pool = state.pools.get(name)
    capacity: list[Wait] = [("pool", name, 4), ("pool", name, 6)]
    quotas = [wait for wait in state.queues.kind("quota") if wait[1] == name]
    _all(state, [("name", name), *quotas])
    if serves:
        _all(state, capacity)
    if pool is None or not pool.usable:
        return
    for wait in state.queues.kind("fit"):
        if _fits(state, pool, wait):
            _all(state, [wait])
    waits = list(capacity)
    for wait in state.queues.kind("need"):
        if _fits(state, pool, wait):
            _all_unmatched(state, wait)
            if state.tries(_need(wait), pool):
                waits.append(wait)
    for family in pool.spaces:
        _serve(state, waits, _grantable(state, pool, family))


def _need(wait: Wait) -> selection.Need:
    need = wait[1]
    assert isinstance(need, selection.Need)
    return need


def _fits(state: State, pool: Pool, wait: Wait) -> bool:
    return selection.fit(pool.view, _need(wait), state.rules.selection) is not None


def _serve(state: State, waits: list[Wait], more: Callable[[], bool]) -> None:
    """Place waiting owners in order while there is something to give."""
    again: list[tuple[Wait, Owner]] = []
    while more():
        found = state.queues.pop(waits)
        if found is None:
            break
        wait, owner = found
        place(state, owner)
        if owner.ticket and wait in owner.waits:
            again.append(found)
    for wait, owner in again:
        state.queues.put_back(wait, owner)


def _all(state: State, waits: list[Wait]) -> None:
    """Look at every owner that waits for one of these: the reason may have changed."""
    _serve(state, waits, lambda: True)


def _all_unmatched(state: State, wait: Wait) -> None:
    """Owners that no pool fitted have one now: from here on they wait for its capacity."""
    found = state.queues.pop([wait])
    if found is None:
        return
    state.queues.put_back(*found)
    refusal = found[1].refusal
    if refusal is not None and refusal.reason == "NoMatchingPool":
        _all(state, [wait])
