"""Waiting between attempts that may go on for ever: jittered, growing, capped.

For a bounded call use stamina. This is for loops that must outlast any outage: a reconnect, a
watch that is opened again, a stand-by that tries to take over. The wait is drawn at random from
the upper half of a growing interval, so that processes that failed together do not return together.
"""

import asyncio
import random


class Backoff:
    """Delays of about `first`, then `factor` times more each, never above `cap` seconds."""

    def __init__(self, first: float = 0.1, cap: float = 10.0, factor: float = 2.0) -> None:
        if not 0 < first <= cap or factor < 1:
            msg = f"need 0 < first <= cap and factor >= 1, got {first=}, {cap=}, {factor=}"
            raise ValueError(msg)
        self._first, self._cap, self._factor = first, cap, factor
        self._next = first
        self.attempts = 0

    def delay(self) -> float:
        """The seconds to wait before the next attempt."""
        interval = self._next
        self._next = min(interval * self._factor, self._cap)
        self.attempts += 1
        return interval * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """After a success."""
        self._next = self._first
        self.attempts = 0

    async def wait(self) -> None:
        await asyncio.sleep(self.delay())


async def wait_or_stop(stop: asyncio.Event, seconds: float) -> bool:
    """Wait, but not past a stop; returns whether to stop."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return stop.is_set()
    return True
