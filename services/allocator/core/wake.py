"""Waking those who wait, in the order of their tickets, when something frees capacity.

Only those who may be helped are looked at: a freed address wakes the owners that wait for it or
for a place in its pool, one by one, until the place is taken; a changed pool wakes the owners that
wait for that pool, and those whose request it fits now.
"""

from __future__ import annotations

from schema import addresses, selection
from services.allocator.core.model import Owner, Pool, Wait
from services.allocator.core.place import place
from services.allocator.core.state import State


def wake(state: State) -> None:
    """Serve whom the changes since the last call may help; serving may help others in turn."""
    while state.altered or state.freed:
        altered, state.altered = state.altered, []
        for name in dict.fromkeys(altered):
            _wake_for_pool(state, name)
        freed, state.freed = state.freed, []
        for name, address in freed:
            _wake_for_address(state, name, address)


def _wake_for_address(state: State, name: str, address: int) -> None:
    pool = state.pools.get(name)
    family = addresses.family(address)
    space = pool.spaces.get(family) if pool is not None else None
    asked: Wait = ("address", address)
    if space is None or pool is None or not pool.usable:
        _serve(state, [asked], None, family)
        return
    if space.is_free(address):
        _serve(state, [asked, ("pool", name, family)], pool, family)


def _wake_for_pool(state: State, name: str) -> None:
    """The pool is new, has changed, or is gone: whoever named it learns what holds now."""
    pool = state.pools.get(name)
    waits: list[Wait] = [("name", name), ("pool", name, 4), ("pool", name, 6)]
    if pool is None or not pool.usable:
        _all(state, waits)
        return
    _all(state, [("name", name)])
    for wait in state.queues.needs():
        need = wait[1]
        assert isinstance(need, selection.Need)
        if selection.fit(pool.view, need, state.rules.selection) is not None:
            waits.append(wait)
    for family in pool.spaces:
        _serve(state, waits, pool, family)
    _all_unmatched(state, waits)


def _serve(state: State, waits: list[Wait], pool: Pool | None, family: int) -> None:
    """Place waiting owners in order while there is something to give."""
    again: list[tuple[Wait, Owner]] = []
    while pool is None or pool.spaces[family].available > 0:
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
    again: list[tuple[Wait, Owner]] = []
    while (found := state.queues.pop(waits)) is not None:
        wait, owner = found
        place(state, owner)
        if owner.ticket and wait in owner.waits:
            again.append(found)
    for wait, owner in again:
        state.queues.put_back(wait, owner)


def _all_unmatched(state: State, waits: list[Wait]) -> None:
    """Owners that no pool fitted have one now: from here on they wait for its capacity."""
    for wait in waits:
        if wait[0] != "need":
            continue
        found = state.queues.pop([wait])
        if found is None:
            continue
        state.queues.put_back(*found)
        refusal = found[1].refusal
        if refusal is not None and refusal.reason == "NoMatchingPool":
            _all(state, [wait])
