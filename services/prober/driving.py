"""Turns the engine from the event loop.

While few checks are under way the loop waits on the engine's epoll descriptor; while many are, it
looks every other millisecond instead, which takes results by the hundred.
"""

from __future__ import annotations

import asyncio
from typing import Final

from services.prober.checks import Engine

BUSY: Final = 64
TICK_S: Final = 0.002


class Driver:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._listening = False
        self._failed = asyncio.Event()  # or ended
        self._error: Exception | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Until the stop; raises what the engine raises."""
        waits = [asyncio.create_task(event.wait()) for event in (stop, self._failed)]
        try:
            self.nudge()
            await asyncio.wait(waits, return_when="FIRST_COMPLETED")
            if self._error is not None:
                raise self._error
        finally:
            for wait in waits:
                wait.cancel()
            self._failed.set()
            self._plan(float("inf"))
            self._listen(False)
            self._engine.close()

    def nudge(self) -> None:
        """Targets were added: there may be something to do earlier than planned."""
        if not self._failed.is_set():
            self._plan(0.0)

    def _turn(self) -> None:
        if self._failed.is_set():
            return
        try:
            wake = self._engine.step()
        except Exception as error:  # noqa: BLE001  # run() raises it
            self._error = error
            self._failed.set()
            return
        busy = self._engine.in_flight >= BUSY
        self._listen(not busy)
        self._plan(TICK_S if busy else wake - self._loop.time())

    def _plan(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds < float("inf"):
            self._timer = self._loop.call_later(max(seconds, 0.0), self._turn)

    def _listen(self, on: bool) -> None:
        if on == self._listening:
            return
        self._listening = on
        if on:
            self._loop.add_reader(self._engine.fileno(), self._turn)
        else:
            self._loop.remove_reader(self._engine.fileno())
