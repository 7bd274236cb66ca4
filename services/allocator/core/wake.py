"""Waking those who wait, in the order of their tickets, when something frees capacity.

Only those who may be helped are looked at: a freed address wakes the owners that wait for it or
for a place in its pool, one by one, until the place is taken; a changed pool wakes the owners that
wait for that pool, and those whose request it fits now. Whatever one fact frees is offered to all
of them in one order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial

from schema import addresses, selection
from services.allocator.core.model import Owner, Pool, Wait
from services.allocator.core.place import place
from services.allocator.core.quota import QuotaKey
from services.allocator.core.state import State


def wake(state: State) -> None:
    """Serve whom the changes since the last call may help; serving may help others in turn."""
    while state.altered or state.freed or state.freed_quotas or state.rejoinable:
        offers = Offers(state)
        altered, state.altered = state.altered, {}
        for name, serves in altered.items():
            _offer_pool(state, offers, name, serves=serves)
        freed, state.freed = state.freed, []
        for name, address in freed:
            _offer_address(state, offers, name, address)
        quotas, state.freed_quotas = state.freed_quotas, {}
        for key in quotas:
            offers.add(("quota", *key), partial(_has_room, state, key))
        shares, state.rejoinable = state.rejoinable, {}
        for share in shares:
            offers.add(("share", share))
        offers.serve()


def wake_cooled(state: State) -> None:
    """Time has passed: freed addresses may have become free for everybody."""
    offers = Offers(state)
    for wait in state.queues.kind("address"):
        for pool in state.pools_around(int(str(wait[1]))):
            _offer_address(state, offers, pool.name, int(str(wait[1])))
    for wait in state.queues.kind("pool"):
        known, family = state.pools.get(str(wait[1])), int(str(wait[2]))
        if known is not None and known.usable:
            offers.add(wait, partial(state.grantable, known, family))
    offers.serve()


More = Callable[[], bool]


class Offers:
    """What may be had now, by what is waited for, each as long as a condition holds."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._more: dict[Wait, list[More]] = {}

    def add(self, wait: Wait, more: More = lambda: True) -> None:
        if self._state.queues.first(wait) is not None:
            self._more.setdefault(wait, []).append(more)

    def serve(self) -> None:
        """Place those who wait, each once, in the order of their tickets."""
        queues = self._state.queues
        heads = [(queues.first(wait) or 0, number, wait) for number, wait in enumerate(self._more)]
        heapq.heapify(heads)
        placed: set[Owner] = set()
        again: list[tuple[Wait, Owner]] = []
        while heads:
            _, number, wait = heads[0]
            if queues.first(wait) is None or not any(more() for more in self._more[wait]):
                heapq.heappop(heads)
                continue
            owner = queues.pop(wait)
            if owner not in placed:
                placed.add(owner)
                place(self._state, owner)
            if owner.ticket and wait in owner.waits:
                again.append((wait, owner))
            following = queues.first(wait)
            if following is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (following, number, wait))
        for wait, owner in again:
            if owner.ticket and wait in owner.waits:
                queues.put_back(wait, owner)


def _offer_address(state: State, offers: Offers, name: str, address: int) -> None:
    pool = state.pools.get(name)
    family = addresses.family(address)
    space = pool.spaces.get(family) if pool is not None else None
    asked: Wait = ("address", address)
    if space is None or pool is None or not pool.usable:
        offers.add(asked)
        return

    def to_be_had() -> bool:
        holders = space.holders(address)
        if holders:
            return bool(holders[0].share)
        return space.is_free(address) and not state.cooling(space, address)

    offers.add(asked, to_be_had)
    offers.add(("pool", name, family), partial(state.grantable, pool, family))


def _has_room(state: State, key: QuotaKey) -> bool:
    pool = state.pools.get(str(key[0]))
    index = int(str(key[1]))
    if pool is None or index >= len(pool.quotas):
        return True
    return state.usage.get(key, 0) < pool.quotas[index].limit


def _offer_pool(state: State, offers: Offers, name: str, *, serves: bool) -> None:
    """The pool is new, has changed, or is gone. Where that touches whom it serves (`serves`), all
    who named it, wait for it or would be given an address of it learn what holds now; else those
    who may get one."""
    pool = state.pools.get(name)
    queues = state.queues
    told: list[Wait] = [("name", name)]
    told += [wait for wait in queues.kind("quota") if wait[1] == name]
    if serves:
        told += [("pool", name, 4), ("pool", name, 6)]
    if pool is not None and pool.usable:
        told += [wait for wait in queues.kind("fit") if _fits(state, pool, wait)]
        told += [wait for wait in queues.kind("share") if wait[1] in state.shares]
        for family in pool.spaces:
            offers.add(("pool", name, family), partial(state.grantable, pool, family))
        if serves:
            told += [wait for wait in queues.kind("need") if _concerns(state, pool, wait)]
    for wait in told:
        offers.add(wait)


def _need(wait: Wait) -> selection.Need:
    need = wait[1]
    assert isinstance(need, selection.Need)
    return need


def _fits(state: State, pool: Pool, wait: Wait) -> bool:
    return selection.fit(pool.view, _need(wait), state.rules.selection) is not None


def _concerns(state: State, pool: Pool, wait: Wait) -> bool:
    """Whether the pool changes what holds for those with this need: it is one that they would be
    given an address of, or the first that fits at all."""
    return _fits(state, pool, wait) and (state.tries(_need(wait), pool) or _unmatched(state, wait))


def _unmatched(state: State, wait: Wait) -> bool:
    owner = state.queues.peek(wait)
    refusal = owner.refusal if owner is not None else None
    return refusal is not None and refusal.reason == "NoMatchingPool"
