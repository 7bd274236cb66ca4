"""Wiring of nrp_sync: the projection, the provider, and the worker between them.

The worker sends requests only after their rows are committed and only while this replica holds the
fence. A request whose replica lost the fence, or died, is taken up by the next one.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime

import sqlalchemy as sa
import structlog

from services.kit.config import NrpSettings
from services.kit.projector import Projector
from services.kit.retry import wait_or_stop
from services.kit.runtime import Runtime
from services.nrp_sync import effects, metrics, store
from services.nrp_sync.batches import Limits
from services.nrp_sync.connecting import connect
from services.nrp_sync.projection import Ended, NrpProjection, Repair, Tick
from services.nrp_sync.provider import Provider
from services.nrp_sync.state import Done, Failed, Outcome, Policy, Request
from services.nrp_sync.steps import Failure, Retrying

log = structlog.get_logger()
LONGEST_REST = 1.0
PATIENCE = 5  # ticks in a row that may begin nothing, before the next ones are spaced out
REPAIR_POLL = 1.0
NOT_OURS = Failed(
    failure=Failure(
        kind="unreachable",
        code="StandingBy",
        message="not sent: this replica could not prove that it may act",
    )
)
WORRYING = ("unreachable", "unknown", "auth_failed", "unreadable")


async def run(rt: Runtime) -> None:
    """Run until the runtime stops."""
    settings = rt.settings.nrp
    provider = await connect(settings)
    try:
        projection = NrpProjection(policy_of(settings), keep_requests=settings.keep_requests)
        projector = Projector(rt, projection)
        worker = Worker(rt, projector, projection, provider)
        async with asyncio.TaskGroup() as group:
            group.create_task(worker.run())
            group.create_task(watch_for_repairs(rt, projector))
            group.create_task(projector.run())
    finally:
        await provider.close()


def policy_of(settings: NrpSettings) -> Policy:
    return Policy(
        classless=settings.classless,
        first_family=settings.dual_stack == "first-family",
        egress_allowed=settings.egress_allowed,
        limits=Limits(settings.batch_addresses, settings.batch_bytes),
        quiet=settings.quiet_s,
        latency=settings.latency_s,
        interval=settings.interval_s,
        workers=settings.workers,
        lanes=settings.batches,
        read_interval=settings.read_interval_s,
        orphan_grace=settings.orphan_grace_s,
        retrying=Retrying(
            first=settings.retry_first_s,
            cap=settings.retry_cap_s,
            cooldown=settings.park_s,
        ),
    )


async def watch_for_repairs(rt: Runtime, projector: Projector) -> None:
    """Look for the note that `lbledger nrp repair` leaves."""
    engine = await rt.engine()
    since = datetime.now(UTC)
    while not await wait_or_stop(rt.stop, REPAIR_POLL):
        try:
            async with asyncio.timeout(10):
                asked = await store.repair_asked_at(engine)
        except (sa.exc.SQLAlchemyError, OSError, TimeoutError):
            continue  # the projector says what is wrong with the database
        if asked is not None and asked > since:
            since = asked
            if projector.active:
                log.info("nrp.repair_asked")
                await projector.asubmit(Repair())


class Worker:
    """Ticks the core when something is due, and makes the calls that it began."""

    def __init__(
        self, rt: Runtime, projector: Projector, projection: NrpProjection, provider: Provider
    ) -> None:
        self._rt, self._projector = rt, projector
        self._projection, self._provider = projection, provider
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._unheard: dict[int, Outcome] = {}
        """Outcomes that no transaction has taken yet."""
        self._wake = asyncio.Event()
        self._shown = 0.0
        self._recoveries = metrics.Recoveries()
        self._fruitless = 0  # ticks since the last that began a request
        projection.start = self._start
        projection.reloaded = self._reloaded

    async def run(self) -> None:
        stopping = asyncio.create_task(self._rt.stop.wait())
        stopping.add_done_callback(lambda _: self._wake.set())
        try:
            while not self._rt.stop.is_set():
                await self._rest()
                self._show()
                if self._projector.active and not self._rt.stop.is_set():
                    self._fruitless += 1
                    await self._projector.asubmit(Tick())
        finally:
            stopping.cancel()
            await self._end()

    def _show(self) -> None:
        """Refresh the gauges, at most once a second."""
        now = time.time()
        if now >= self._shown + 1.0:
            self._shown = now
            active = self._projector.active
            metrics.gauge(self._projection.state, now, active=active)
            self._recoveries.look(self._projection.state, active=active)

    async def _rest(self) -> None:
        """Until something is due, or something has been committed that may change what is."""
        deadline = time.monotonic() + LONGEST_REST
        while not self._rt.stop.is_set():
            self._wake.clear()
            rest = min(self._projection.due(), deadline - time.monotonic())
            try:
                async with asyncio.timeout(max(0.0, rest)):
                    await self._wake.wait()
            except TimeoutError:
                break
            if self._projection.due() <= 0:
                break  # else what was committed, perhaps a tick of our own, asks for nothing now
        if not self._projector.active:
            await wait_or_stop(self._rt.stop, 0.2)
        elif self._fruitless > PATIENCE:
            # What is due can't be begun yet, whatever holds it up: do not ask in a hot loop.
            doublings = min(self._fruitless - PATIENCE, 10)
            await wait_or_stop(self._rt.stop, min(0.005 * 2**doublings, LONGEST_REST))

    def _start(self, requests: list[Request]) -> None:
        for number in [n for n in self._unheard if n not in self._projection.flying]:
            del self._unheard[number]
        if requests:
            self._fruitless = 0
        for request in requests:
            self._projection.flying.add(request.number)
            self._calls[request.number] = asyncio.create_task(self._call(request))
        self._wake.set()

    def _reloaded(self) -> None:
        """Memory was dropped, and with it perhaps outcomes that were on their way."""
        for number, outcome in self._unheard.items():
            self._projector.submit(Ended(number, outcome))

    async def _call(self, request: Request) -> None:
        try:
            outcome: Outcome = NOT_OURS
            if self._projector.active:
                outcome = await effects.perform(self._provider, request)
                self._watch(outcome)
                self._log(request, outcome)
            self._unheard[request.number] = outcome
            self._fruitless = 0
            await self._projector.asubmit(Ended(request.number, outcome))
        finally:
            self._calls.pop(request.number, None)

    def _watch(self, outcome: Outcome) -> None:
        """Say on /readyz when the provider can't be reached; it is no reason to stop."""
        if isinstance(outcome, Done):
            self._rt.health.set("provider", True)
        elif outcome.failure.kind in WORRYING:
            self._rt.health.set("provider", False, outcome.failure.message)

    def _log(self, request: Request, outcome: Outcome) -> None:
        facts = {"verb": request.verb, "target": request.target, "request": request.id}
        if isinstance(outcome, Failed):
            failure = outcome.failure
            log.warning("nrp.failed", kind=failure.kind, why=failure.message, **facts)
        elif request.lane != "read":
            log.info("nrp.done", ms=round(outcome.duration * 1000, 1), **facts)

    async def _end(self) -> None:
        """Give calls under way a moment; what is then open is taken up at the next start."""
        calls = list(self._calls.values())
        if calls:
            await asyncio.wait(calls, timeout=2.0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
