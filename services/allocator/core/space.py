"""The addresses of one pool and family: which are held, and which to give out next.

Never used ones come first, in ascending order, then those whose release is longest ago. A frontier
walks over the spans of the shape; addresses beyond it that were taken out of turn (asked for by
value, adopted, returned to their old owner) are marked and stepped over when it gets there. Every
operation is O(1) amortised, whatever the size of the range.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from schema.pools import Shape, is_buggy

if TYPE_CHECKING:
    from services.allocator.core.model import Lease


@dataclass(slots=True, eq=False)
class Memo:
    """A free address that somebody had: who, and since when it is free."""

    address: int
    pool: str
    plural: str
    key: str
    released: datetime
    order: int  # of the release among all; below zero: before everything that we saw


def in_order(leases: Iterable[Lease]) -> tuple[Lease, ...]:
    """As they were granted, in whatever order they were read."""
    return tuple(sorted(leases, key=lambda lease: lease.serial))


class Space:
    __slots__ = ("_ahead", "_next", "_queue", "_span", "free", "held", "inside", "shape")

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.held: dict[int, Lease | tuple[Lease, ...]] = {}
        self.inside = 0  # held addresses that the shape contains
        self.free: dict[int, Memo] = {}
        self._queue: deque[Memo] = deque()
        self._span = 0
        self._next = shape.spans[0][0] if shape.spans else 0
        self._ahead: set[int] = set()

    @property
    def available(self) -> int:
        return self.shape.total - self.inside

    def is_free(self, address: int) -> bool:
        return address in self.shape and address not in self.held

    def holders(self, address: int) -> tuple[Lease, ...]:
        held = self.held.get(address)
        if held is None:
            return ()
        return held if isinstance(held, tuple) else (held,)

    # --- choosing ---

    def fresh(self) -> int | None:
        """The lowest address that nobody ever had."""
        spans, ahead, avoid = self.shape.spans, self._ahead, self.shape.avoid_buggy
        while self._span < len(spans):
            address, last = self._next, spans[self._span][1]
            while address <= last:
                if address in ahead:
                    ahead.discard(address)
                elif not (avoid and is_buggy(address)):
                    self._next = address
                    return address
                address += 1
            self._span += 1
            self._next = spans[self._span][0] if self._span < len(spans) else 0
        return None

    def longest_released(self) -> Memo | None:
        queue, free = self._queue, self.free
        while queue:
            memo = queue[0]
            if free.get(memo.address) is memo:
                return memo
            queue.popleft()
        return None

    def released_after(self, since: datetime) -> int:
        """How many free addresses were let go after a time."""
        count = 0
        for memo in reversed(self._queue):
            if memo.released <= since:
                break
            count += self.free.get(memo.address) is memo
        return count

    # --- changing ---

    def hold(self, address: int, lease: Lease, *, inside: bool) -> Memo | None:
        """Take the address for the lease; returns the memory of its last holder, now forgotten.

        `inside`: whether the shape has the address.
        """
        if address in self.held:
            self.held[address] = (*self.holders(address), lease)
            return None
        self.held[address] = lease
        if not inside:
            return None
        self.inside += 1
        memo = self.free.pop(address, None) if self.free else None
        if memo is None:
            if address == self._next:
                self._next = address + 1
            elif not self._passed(address):
                self._ahead.add(address)
        return memo

    def hold_fresh(self, address: int, lease: Lease) -> None:
        """hold() for what fresh() has just given."""
        self.held[address] = lease
        self.inside += 1
        self._next = address + 1

    def release(self, address: int, lease: Lease, memo: Memo) -> bool:
        """Undo hold(); true when nobody holds the address now and it may be given out again."""
        left = tuple(one for one in self.holders(address) if one is not lease)
        if left:
            self.held[address] = left if len(left) > 1 else left[0]
            return False
        del self.held[address]
        if address not in self.shape:
            return False
        self.inside -= 1
        self.remember(memo)
        return True

    def remember(self, memo: Memo) -> None:
        """Count a free address as used before (its last holder is told by the memo)."""
        fresh = memo.address not in self.free and not self._passed(memo.address)
        self.free[memo.address] = memo
        if memo.order < 0:
            self._queue.appendleft(memo)
        else:
            self._queue.append(memo)
        if fresh:
            self._ahead.add(memo.address)

    def _passed(self, address: int) -> bool:
        """Whether the frontier has gone by."""
        return self._span >= len(self.shape.spans) or address < self._next

    def reshape(self, shape: Shape, leases: Iterable[Lease]) -> list[Memo]:
        """Other ranges and holders; returns the memories that fell out of them."""
        self.shape = shape
        self.held = {}
        for lease in leases:
            self.held[lease.address] = (*self.holders(lease.address), lease)
        for address, held in self.held.items():
            if isinstance(held, tuple):
                self.held[address] = held[0] if len(held) == 1 else in_order(held)
        dropped = [memo for memo in self.free.values() if not self.is_free(memo.address)]
        for memo in dropped:
            del self.free[memo.address]
        self._queue = deque(memo for memo in self._queue if self.free.get(memo.address) is memo)
        self.settle()
        return dropped

    def put(self, lease: Lease) -> None:
        """Note a holder from storage; settle() follows when all are in."""
        before = self.holders(lease.address)
        self.held[lease.address] = in_order((*before, lease)) if before else lease

    def put_memo(self, memo: Memo) -> None:
        self.free[memo.address] = memo
        self._queue.append(memo)

    def settle(self) -> None:
        used = [address for address in self.held if address in self.shape]
        self.inside = len(used)
        used.extend(self.free)
        self._rewind(sorted(used))

    def _rewind(self, used: list[int]) -> None:
        """Set the frontier to the first address that is not among `used` (ascending)."""
        self._span, self._ahead = 0, set()
        self._next = self.shape.spans[0][0] if self.shape.spans else 0
        for index, address in enumerate(used):
            if self.fresh() != address:
                self._ahead.update(used[index:])
                return
            self._next = address + 1

    def in_order(self) -> Iterator[Memo]:
        """Free addresses that were used before, longest released first."""
        return (memo for memo in self._queue if self.free.get(memo.address) is memo)
