"""How much is under way: counted, bounded, and waited for.

Every message counts from when it is given until it is settled. Up to a window of them, by number
and by bytes, may be on the wire; the others wait here, in order.
"""

import asyncio
from collections import deque

from services.kit.bus_item import Item
from services.kit.bus_types import BusError, Published, Unavailable


class Window:
    def __init__(self, size: int, size_bytes: int, deadline: float | None) -> None:
        self._size, self._size_bytes, self._deadline = size, size_bytes, deadline
        self._loop = asyncio.get_running_loop()
        self._items: set[Item] = set()
        self._waiting: list[asyncio.Future[None]] = []
        self._open = self._open_bytes = self._together = 0
        self.backlog: deque[Item] = deque()

    def __len__(self) -> int:
        return len(self._items) + self._together

    @property
    def full(self) -> bool:
        return self._open >= self._size or self._open_bytes >= self._size_bytes

    def begin(self, item: Item) -> None:
        """From now on it counts, and its time runs."""
        self._items.add(item)
        if self._deadline is not None:
            reason = f"{item.subject}: not acknowledged in {self._deadline:g} s, outcome unknown"
            item.timer = self._loop.call_later(
                self._deadline, self.settle, item, Unavailable(reason)
            )

    def count(self, messages: int) -> None:
        """Of batches, which settle as a whole."""
        self._together += messages
        if self._waiting and len(self) <= self._size // 2:
            self._wake()

    def enter(self, item: Item) -> None:
        """It goes to the wire, or to the queue of its subject."""
        self._open += 1
        self._open_bytes += item.size

    def leave(self, item: Item, outcome: Published | BusError | None = None) -> None:
        """The end of what entered."""
        self._open -= 1
        self._open_bytes -= item.size
        self.settle(item, outcome)

    def settle(self, item: Item, outcome: Published | BusError | None = None) -> None:
        """Tell its caller, if nobody did; none: it was given up. It counts no longer."""
        self._items.discard(item)
        if item.timer is not None:
            item.timer.cancel()
        if not item.future.done():
            if isinstance(outcome, BusError):
                item.future.set_exception(outcome)
            elif outcome is None:
                item.future.cancel()
            else:
                item.future.set_result(outcome)
        if self._waiting and len(self) <= self._size // 2:
            self._wake()

    async def room(self) -> None:
        while len(self) >= self._size or self._open_bytes >= self._size_bytes:
            await self._news()

    async def empty(self) -> None:
        while len(self):
            await self._news()

    def drop_given_up(self) -> None:
        """From the backlog: callers that gave up and come again must not pile up."""
        for item in self.backlog:
            if item.future.done():
                self.settle(item)
        self.backlog = deque(item for item in self.backlog if not item.future.done())

    def close(self, reason: str) -> None:
        for item in list(self._items):
            self.settle(item, Unavailable(reason))
        self._wake()

    async def _news(self) -> None:
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiting = self._waiting, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
