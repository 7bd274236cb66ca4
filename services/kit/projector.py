"""The loop under every consuming service: facts in, effects exactly once.

One transaction per batch holds the compare-and-set of the offset rows, the service's own rows, its
decisions (outbox) and its dead letters. The offset row is the fence: whoever commits second on the
same version gets nothing and starts over from what is stored. A session lock in Postgres tells the
other replicas, cheaply, that one is alive; it saves work and is never what safety rests on.

A batch is what is queued when the loop looks, never waited for. Memory is valid only while the
compare-and-set succeeds: on any error it is dropped and loaded again. An event that can't be taken
(or breaks a constraint) is found by going through its batch one by one, costs one dead letter, and
holds up nobody. This is the one place of the product that catches broadly.

A projection that detaches its changes is one batch ahead of the database (services.kit.batches).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

import sqlalchemy as sa
import structlog
from prometheus_client import Counter, Gauge
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from services.kit import positions
from services.kit.batches import FENCE_ROW, Arrival, Batch, Committer, Fenced, read
from services.kit.bus import Bus, BusError, Puller
from services.kit.db import plain_error
from services.kit.outbox import Outbox
from services.kit.patience import Patience
from services.kit.records import Hole, Projection, Source
from services.kit.retry import Backoff, wait_or_stop
from services.kit.runtime import Runtime

log = structlog.get_logger()
_restarts = Counter("lbledger_projector_restarts_total", "Sessions that ended early", ["why"])
_lag = Gauge("lbledger_lag", "Messages of the stream still to be read", ["stream"])
_active_gauge = Gauge("lbledger_active", "1 on the replica that holds the fence")

LOCAL_LIMIT: Final = 20_000
STOP_S: Final = 5.0  # after a stop, for what was begun
GIVE_UP_S: Final = 2.0
ARRIVED_BATCHES: Final = 3  # read ahead while one is being committed


class Projector:
    """Runs one Projection until the runtime stops."""

    def __init__(self, rt: Runtime, projection: Projection) -> None:
        self._rt = rt
        self._projection = projection
        self._settings = rt.settings.projector
        self._arrived: deque[Arrival] = deque()
        self._local: deque[object] = deque()
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._holding = False
        self._proved = 0.0
        self._patience = Patience(self._settings.silence_s)
        self._activity = asyncio.Event()
        self._reread_next = False
        self._doubtful: tuple[int, list[object]] | None = None
        self._behind: dict[str, int] = {}  # stream -> what it held when the session began

    # --- for the service ---

    @property
    def active(self) -> bool:
        """Whether effects outside the transaction are allowed now.

        Not before all is taken that the streams held when this replica began: what an old event
        asks for may be long over.
        """
        return self._holding and not self._behind and self._fresh()

    def _fresh(self) -> bool:
        """Whether the proof that nobody else took over is recent."""
        return time.monotonic() - self._proved < self._settings.effects_deadline_s

    async def until_active(self) -> None:
        while not self.active:
            self._activity.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.beat_s):
                    await self._activity.wait()

    def submit(self, item: object) -> None:
        """Add an input of our own making; raises asyncio.QueueFull at the bound."""
        if len(self._local) >= LOCAL_LIMIT:
            raise asyncio.QueueFull
        self._local.append(item)
        self._wake.set()

    async def asubmit(self, item: object) -> None:
        """Add an input of our own making, waiting while the queue is full."""
        while len(self._local) >= LOCAL_LIMIT:
            await asyncio.sleep(0.02)
        self.submit(item)

    # --- life ---

    async def run(self) -> None:
        """Take part until the runtime stops, and not much longer, whatever does not answer."""
        part = asyncio.create_task(self._take_part())
        stopping = asyncio.create_task(self._rt.stop.wait())
        try:
            await asyncio.wait({part, stopping}, return_when="FIRST_COMPLETED")
            await asyncio.wait({part}, timeout=STOP_S)
            if part.done():
                part.result()
            else:  # what was begun is in a transaction, or is not done at all
                log.warning("projector.stop_forced", after_s=STOP_S)
        finally:
            stopping.cancel()
            part.cancel()
            await asyncio.wait({part}, timeout=GIVE_UP_S)

    async def _take_part(self) -> None:
        """Stand by, lead, recover."""
        stop = self._rt.stop
        self._rt.health.set("projector", False, "has not read its state yet")
        backoff = Backoff(first=0.1, cap=5.0)
        bus = await self._rt.bus()
        engine = await self._rt.engine()
        while not stop.is_set():
            began = time.monotonic()
            try:
                async with self._fence(engine) as beat:
                    if not stop.is_set():
                        await self._session(bus, engine, beat)
            except Fenced:
                self._failed("fenced", "another replica moved the offset")
                self._local.clear()
            except Hole as hole:
                self._failed("hole", str(hole))
                self._reread_next = True
            except BusError as error:
                self._failed("bus", str(error))
            except (sa.exc.SQLAlchemyError, OSError, TimeoutError) as error:
                self._failed("database", plain_error(error))
            except Exception:
                self._failed("error", "see the log")
                log.exception("projector.failed")
            if time.monotonic() - began > 10:
                backoff.reset()
            if not stop.is_set():
                await wait_or_stop(stop, backoff.delay())

    def _failed(self, why: str, detail: str) -> None:
        _restarts.labels(why).inc()
        self._rt.health.set("projector", False, f"{why}: {detail}")
        log.warning("projector.restarting", why=why, detail=detail)

    @contextlib.asynccontextmanager
    async def _fence(self, engine: AsyncEngine) -> AsyncIterator[asyncio.Task[None]]:
        """Hold the session lock that keeps other replicas in stand-by; yields the beat."""
        key = {"k": _lock_key(self._projection.name)}
        async with engine.connect() as conn:
            await conn.execution_options(isolation_level="AUTOCOMMIT")
            await self._prove(conn)  # one that freezes with the lock just in hand is replaced too
            await self._stand_by(conn, key)
            await self._prove(conn)
            beat = asyncio.create_task(self._beat(conn))
            try:
                yield beat
            finally:
                self._holding = False
                _active_gauge.set(0)
                await _cancel([beat])
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(2):
                        await conn.execute(sa.text("select pg_advisory_unlock(:k)"), key)
                await conn.invalidate()  # its settings, and a lock that was not given up, go too

    async def _stand_by(self, conn: AsyncConnection, key: dict[str, int]) -> None:
        """Wait for the session lock, or for the stop."""
        waiting = False
        while not await conn.scalar(sa.text("select pg_try_advisory_lock(:k)"), key):
            if not waiting:
                waiting = True
                log.info("projector.standing_by")
                self._rt.health.set("projector", True)
            if await wait_or_stop(self._rt.stop, self._settings.takeover_poll_s):
                return

    async def _prove(self, conn: AsyncConnection) -> None:
        """Hear from the server that the session, and with it the lock, is still there.

        One that is frozen keeps its connection: the server is told to end it when it is silent.
        """
        sent = time.monotonic()
        silence = self._patience.give(active=self._holding)
        await conn.execute(
            sa.text("select set_config('idle_session_timeout', :ms, false)"),
            {"ms": str(int(silence * 1000))},
        )
        self._proved = sent

    async def _beat(self, conn: AsyncConnection) -> None:
        while True:
            await asyncio.sleep(self._settings.beat_s)
            now = time.monotonic()
            self._patience.silent(now - self._proved, now)
            async with asyncio.timeout(self._settings.effects_deadline_s):
                await self._prove(conn)

    # --- one session: from loading to the first error ---

    async def _session(self, bus: Bus, engine: AsyncEngine, beat: asyncio.Task[None]) -> None:
        sources = self._projection.sources
        for name in sorted({source.stream for source in sources} | {"LB"}):
            await bus.ensure_stream(self._rt.stream(name))
        outbox = Outbox(self._projection.name, engine)
        committer = Committer(self._projection, engine, outbox)
        await committer.load()
        self._settle_doubt(committer.offsets[FENCE_ROW].version)
        self._arrived.clear()
        self._room.set()
        tasks = [
            asyncio.create_task(outbox.run(bus, self._fresh)),
            asyncio.create_task(self._wake_on_stop()),
        ]
        try:
            await positions.state_again(committer, bus)
            reread = self._reread_next or positions.unfinished(committer)
            starts = [
                await positions.position(committer, bus, source, reread=reread)
                for source in sources
            ]
            self._reread_next = False
            self._behind = {s.stream: (await bus.stream_state(s.stream)).last_seq for s in sources}
            tasks += [
                asyncio.create_task(self._pump(bus, source, start, committer))
                for source, start in zip(sources, starts, strict=True)
            ]
            self._rt.health.set("projector", True)
            self._holding = True
            self._catch_up(committer)
            loop = asyncio.create_task(self._loop(committer))
            tasks.append(loop)
            # Whatever ends first ends the session; only the loop ends well, at a stop.
            await asyncio.wait({loop, beat, *tasks[2:], tasks[0]}, return_when="FIRST_COMPLETED")
            for task in (loop, beat, *tasks):
                if task.done():
                    task.result()
            await outbox.drained(3.0)
        finally:
            self._holding = False
            await _cancel(tasks)
            await committer.close()

    def _catch_up(self, committer: Committer) -> None:
        """See which streams are taken as far as they went when the session began."""
        behind = {s: goal for s, goal in self._behind.items() if committer.offsets[s].seq < goal}
        self._behind = behind
        if behind:
            return
        self._activity.set()
        _active_gauge.set(1)
        log.info("projector.active", position={s: o.seq for s, o in committer.offsets.items()})

    def _settle_doubt(self, version: int) -> None:
        """Take our own inputs of the failed batch again, unless something was committed since."""
        if self._doubtful is None:
            return
        before, local = self._doubtful
        self._doubtful = None
        if version == before:
            self._local.extendleft(reversed(local))
        else:
            self._local.clear()

    async def _wake_on_stop(self) -> None:
        await self._rt.stop.wait()
        self._wake.set()

    async def _loop(self, committer: Committer) -> None:
        while not self._rt.stop.is_set():
            batch = await self._collect()
            if batch and not await committer.outbox.room(self._settings.effects_deadline_s):
                self._rt.health.set("outbox", False, "the stream does not acknowledge decisions")
                self._put_back(batch)
                continue
            self._rt.health.set("outbox", True)
            try:
                if batch:
                    await committer.take(batch)
                else:
                    await committer.settled()
                if self._behind:
                    self._catch_up(committer)
            except Fenced:
                raise
            except BaseException:
                self._remember(committer, batch)
                raise
        await committer.settled()

    def _remember(self, committer: Committer, batch: Batch) -> None:
        """Keep our own inputs when the session fails; the bus will bring its own again.

        The answer to a commit can be lost after it: settled when rows are read again. What comes
        after a transaction that is under way is not committed.
        """
        doubtful = committer.under_way
        if doubtful is None:
            doubtful = batch.local
        else:
            self._local.extendleft(reversed(batch.local))
        self._doubtful = (committer.offsets[FENCE_ROW].version, doubtful)

    async def _collect(self) -> Batch:
        """What is queued now, waiting (up to a beat) only for the first."""
        if not self._arrived and not self._local:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.beat_s):
                    await self._wake.wait()
        limit = self._settings.batch
        arrivals = [self._arrived.popleft() for _ in range(min(len(self._arrived), limit))]
        if len(self._arrived) <= (ARRIVED_BATCHES - 1) * limit:
            self._room.set()
        local = [self._local.popleft() for _ in range(min(len(self._local), limit))]
        return Batch(arrivals, local)

    def _put_back(self, batch: Batch) -> None:
        self._arrived.extendleft(reversed(batch.arrivals))
        self._local.extendleft(reversed(batch.local))

    async def _pump(self, bus: Bus, source: Source, start: int, committer: Committer) -> None:
        puller: Puller = bus.puller(
            source.stream,
            start_seq=start,
            filters=source.filters,
            name=self._projection.name,
            # What this position was compared with; it may be another one by the first read.
            created=committer.offsets[source.stream].created,
        )
        lag = _lag.labels(source.stream)
        try:
            while True:
                timeout = 0.05 if source.stream in self._behind else 1.0
                messages = await puller.fetch(self._settings.batch, timeout)
                lag.set(max(puller.lag, 0))
                if not puller.lag and source.stream in self._behind:  # the rest is not for us
                    self._behind[source.stream] = puller.position
                    self._catch_up(committer)
                if messages:
                    # Here, where it is done while the batch before is in the database.
                    self._arrived.extend([read(message) for message in messages])
                    self._wake.set()
                    if len(self._arrived) >= ARRIVED_BATCHES * self._settings.batch:
                        self._room.clear()
                        await self._room.wait()
        finally:
            await puller.close()


def _lock_key(name: str) -> int:
    digest = hashlib.blake2b(f"lbledger.{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
