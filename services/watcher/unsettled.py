"""How many observations were taken and are neither acknowledged nor found to be no fact.

This is what bounds the watcher's memory while the bus is slow or away, and what a list waits for
before it says that it is finished.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from prometheus_client import Gauge

ROOM: Final = 4096
_gauge = Gauge("lbledger_watcher_unsettled", "Observations taken and not yet settled")


class Unsettled:
    def __init__(self) -> None:
        self.total = 0
        self._by_plural: Counter[str] = Counter()
        self._changed = asyncio.Event()
        _gauge.set_function(lambda: self.total)

    def took(self, plural: str) -> None:
        self._by_plural[plural] += 1
        self.total += 1

    def settled(self, plural: str) -> None:
        self._by_plural[plural] -= 1
        self.total -= 1
        if self.total <= ROOM // 2 or not self._by_plural[plural]:
            self._changed.set()

    async def room(self) -> None:
        """Wait, once the bound is reached, until half of it is settled."""
        if self.total >= ROOM:
            while self.total > ROOM // 2:
                await self._change()

    async def none_of(self, plural: str) -> None:
        """Wait until everything that was taken of a kind is settled."""
        while self._by_plural[plural]:
            await self._change()

    async def none(self) -> None:
        while self.total:
            await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
