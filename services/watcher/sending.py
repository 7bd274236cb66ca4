"""Messages on their way to the KUBE stream, each with somebody who wants to know what became of it.

What is handed over in one turn of the event loop goes out at its end: few messages one by one,
many as atomic batches, at a third less cost. Every message is answered exactly once, with where it
is stored or with why it is not; only after `close` is nobody told anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Final, TypeAlias

from services.kit.bus import Bus, BusError, Outgoing, Published, Unavailable

WINDOW: Final = 1024  # messages under way one by one
BATCH: Final = 500
BATCH_FROM: Final = 150  # fewer are acknowledged sooner one by one

Answer: TypeAlias = Callable[[Published | BusError], None]


class Sender:
    """`defect` is told of an error that nothing here expects."""

    def __init__(self, bus: Bus, stream: str, defect: Callable[[BaseException], None]) -> None:
        self.publisher = bus.publisher(stream, window=WINDOW)
        self._defect = defect
        self._due: list[tuple[Outgoing, Answer]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def send(self, message: Outgoing, answer: Answer) -> None:
        if not self._due:
            asyncio.get_running_loop().call_soon(self._flush)
        self._due.append((message, answer))

    def later(self, work: Coroutine[None, None, None]) -> None:
        """Run something that belongs to a message until `close`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def close(self) -> None:
        """Stop at once. What is under way may be stored."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.publisher.close()

    def _flush(self) -> None:
        due, self._due = self._due, []
        if self._closed:
            return
        if len(due) < BATCH_FROM:
            for message, answer in due:
                self._one(message, answer)
            return
        for start in range(0, len(due), BATCH):
            self.later(self._together(due[start : start + BATCH]))

    async def _together(self, due: list[tuple[Outgoing, Answer]]) -> None:
        try:
            stored = await self.publisher.publish_batch([message for message, _ in due])
        except BusError:
            # One of them was refused or is too large. One by one, each learns its own fate; what
            # was stored is recognised by its id.
            for message, answer in due:
                self._one(message, answer)
            return
        for (_, answer), published in zip(due, stored, strict=True):
            self._tell(answer, published)

    def _one(self, message: Outgoing, answer: Answer) -> None:
        try:
            future = self.publisher.give(message)
        except BusError as error:
            self._tell(answer, error)
            return
        future.add_done_callback(partial(self._settled, answer))

    def _settled(self, answer: Answer, future: asyncio.Future[Published]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._tell(answer, future.result())
        elif isinstance(error, BusError):
            self._tell(answer, error)
        else:
            self._tell(answer, Unavailable(f"{type(error).__name__}: {error}"))

    def _tell(self, answer: Answer, outcome: Published | BusError) -> None:
        if self._closed:
            return
        try:
            answer(outcome)
        except Exception as error:  # noqa: BLE001  # a callback's error would only be logged
            self._defect(error)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._defect(error)
