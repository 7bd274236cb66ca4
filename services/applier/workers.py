"""The workers: they take entities with something to do, plan, write, and plan again.

One worker drives one entity at a time, so an object never has two writes of ours in flight; writes
of one plan go out together. Nothing is written while this replica does not hold the fence. What a
write brought is known at once; that it happened is committed with the next batch, as an Applied
event. A crash in between repeats the write, which then changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, Protocol

import msgspec
import structlog
from prometheus_client import Counter, Gauge, Histogram

from schema import events
from services.applier import writing
from services.applier.core import State
from services.applier.planning import plan
from services.applier.plans import Notice, Plan, Write
from services.kit.kube import Kube

log = structlog.get_logger()
_writes = Counter(
    "lbledger_applier_writes_total", "Requests by target and outcome", ["target", "outcome"]
)
_queued = Gauge("lbledger_applier_queued", "Entities waiting for a worker")
_seconds = Histogram(
    "lbledger_applier_write_seconds",
    "Of one request",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 30),
)
_notices_dropped = Counter("lbledger_applier_notices_dropped_total", "Kubernetes Events not posted")

ROUNDS: Final = 12  # plans in a row for one entity, before others get their turn
NOTICES: Final = 1000
PLAN_FAILED_S: Final = 5.0
PAUSE_CAP_S: Final = 60.0
STOP_S: Final = 5.0


class Done(msgspec.Struct, frozen=True):
    """A write that was made, on its way to the bus."""

    applied: events.Applied
    cause: str


class Fence(Protocol):
    """The part of the projector that the workers need."""

    @property
    def active(self) -> bool: ...

    async def until_active(self) -> None: ...

    async def asubmit(self, item: object) -> None: ...


class Workers:
    """`state` gives the state of the moment: it is made anew when the projector starts over."""

    def __init__(
        self,
        kube: Kube,
        fence: Fence,
        state: Callable[[], State],
        rediscover: Callable[[], None],
        *,
        count: int,
    ) -> None:
        self._kube, self._fence, self._state = kube, fence, state
        self._rediscover = rediscover
        self._count = count
        self._queue: asyncio.Queue[str] = asyncio.Queue()  # each entity once: bounded by owners
        self._queued: set[str] = set()
        self._busy: set[str] = set()
        self._again: set[str] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._paused_until = 0.0
        self._stopping = False
        self._notices: asyncio.Queue[tuple[Notice, datetime]] = asyncio.Queue(NOTICES)
        self._instance = f"{socket.gethostname()}-{os.getpid()}"[:128]

    def wake(self) -> None:
        """Take over what became dirty; called after each commit."""
        state = self._state()
        entities, state.dirty = state.dirty, {}
        for entity in entities:
            self.enqueue(entity)

    def enqueue(self, entity: str) -> None:
        timer = self._timers.pop(entity, None)
        if timer is not None:
            timer.cancel()
        if entity in self._busy:
            self._again.add(entity)
        elif entity not in self._queued:
            self._queued.add(entity)
            self._queue.put_nowait(entity)
        _queued.set(len(self._queued))

    async def run(self, stop: asyncio.Event) -> None:
        """Work until the stop; then end what is in flight, begin nothing."""
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._work()) for _ in range(self._count)
        ]
        tasks.append(asyncio.create_task(self._post_notices()))
        stopped: asyncio.Task[Any] = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({stopped, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            self._stopping = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    while self._busy:
                        await asyncio.sleep(0.01)
        finally:
            for timer in self._timers.values():
                timer.cancel()
            for task in (stopped, *tasks):
                task.cancel()
            await asyncio.gather(stopped, *tasks, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            entity = await self._queue.get()
            self._queued.discard(entity)
            self._busy.add(entity)
            try:
                await self._drive(entity)
            except Exception:
                # A fault of ours in one entity: said, retried, and no harm to the others.
                log.exception("applier.plan_failed", entity=entity)
                self._later(entity, PLAN_FAILED_S)
            finally:
                self._busy.discard(entity)
                if entity in self._again:
                    self._again.discard(entity)
                    self.enqueue(entity)

    async def _drive(self, entity: str) -> None:
        """Plan and write until there is nothing to write now."""
        for _ in range(ROUNDS):
            await self._allowed()
            if self._stopping:
                return
            self._again.discard(entity)
            state = self._state()
            made = plan(state, entity, datetime.now(UTC))
            if made.notices:
                for notice in made.notices:
                    self._notify(notice, made.now)
                state.told(entity)
            if not made.writes:
                self._rest(state, made)
                return
            await asyncio.gather(*(self._write(write) for write in made.writes))
        self._again.add(entity)

    async def _allowed(self) -> None:
        """Wait for the fence, and for a server that asked us to wait."""
        while not self._stopping:
            if not self._fence.active:
                await self._fence.until_active()
            pause = self._paused_until - asyncio.get_running_loop().time()
            if pause <= 0:
                return
            await asyncio.sleep(min(pause, 1.0))

    def _rest(self, state: State, made: Plan) -> None:
        if made.wake_at is not None:
            self._later(made.entity, (made.wake_at - made.now).total_seconds())
        elif not made.pending:
            state.settled(made.entity)

    def _later(self, entity: str, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        old = self._timers.pop(entity, None)
        if old is not None:
            old.cancel()
        self._timers[entity] = loop.call_later(max(0.001, seconds), self._due, entity)

    def _due(self, entity: str) -> None:
        self._timers.pop(entity, None)
        self.enqueue(entity)

    async def _write(self, write: Write) -> None:
        state = self._state()
        began = asyncio.get_running_loop().time()
        target = state.target(write.key)
        attempts = target.attempts if target.digest == write.digest else 0
        result = await writing.perform(self._kube, write, attempts)
        took = asyncio.get_running_loop().time() - began
        outcome = result.outcome
        _seconds.observe(took)
        _writes.labels(write.target, outcome.outcome).inc()
        if result.pause:
            self._paused_until = asyncio.get_running_loop().time() + min(result.pause, PAUSE_CAP_S)
        if result.rediscover:
            self._rediscover()
        self._state().settle(outcome)
        if outcome.outcome == "written" and write.notice is not None:
            self._notify(write.notice, outcome.at)
        if attempts == 0 or outcome.outcome in ("written", "deleted"):
            await self._fence.asubmit(
                Done(self._applied(write, result, took), state.causes.get(write.entity, ""))
            )

    def _applied(self, write: Write, result: writing.Result, took: float) -> events.Applied:
        outcome = result.outcome
        written = outcome.outcome in ("written", "deleted")
        log.info(
            "applier.write" if written else "applier.write_failed",
            target=write.target,
            object=str(write.key.ref),
            outcome=outcome.outcome,
            reason=outcome.reason or write.reason,
            why=outcome.message,
            ms=round(took * 1000, 1),
        )
        return events.Applied(
            at=outcome.at,
            owner=write.owner,
            target=write.target,
            outcome=outcome.outcome,
            resource_version=result.version,
            ready=write.ready if written else None,
            reason=write.reason if written else outcome.reason,
            message=write.message if written else outcome.message,
            duration_ms=round(took * 1000, 3),
        )

    # --- Kubernetes Events: worth telling, never worth waiting for ---

    def _notify(self, notice: Notice, at: datetime) -> None:
        try:
            self._notices.put_nowait((notice, at))
        except asyncio.QueueFull:
            _notices_dropped.inc()

    async def _post_notices(self) -> None:
        while True:
            notice, at = await self._notices.get()
            if self._fence.active:
                await writing.post(self._kube, notice, self._instance, at)
            else:
                _notices_dropped.inc()
