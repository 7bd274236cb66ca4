"""The loop under every consuming service: facts in, effects exactly once.

One transaction per batch holds the compare-and-set of the offset rows, the service's own rows, its
decisions (outbox) and its dead letters. The offset row is the fence: whoever commits second on the
same version gets nothing and starts over from what is stored. A session lock in Postgres tells the
other replicas, cheaply, that one is alive; it saves work and is never what safety rests on.

A batch is what is queued when the loop looks, never waited for. Memory is valid only while the
compare-and-set succeeds: on any error it is dropped and loaded again. An event that can't be taken
(or breaks a constraint) is found by going through its batch one by one, costs one dead letter, and
holds up nobody. This is the one place of the product that catches broadly.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

import msgspec
import sqlalchemy as sa
import structlog
from prometheus_client import Counter, Gauge, Histogram
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from schema import events, subjects
from schema.subjects import STREAMS, ObjectRef
from schema.tables import service_tables
from services.kit.bus import Bus, BusError, Message, Puller
from services.kit.db import plain_error
from services.kit.mirror import next_epoch
from services.kit.outbox import Outbox
from services.kit.records import Hole, Poison, Projection, Record, Settling, Source, Work
from services.kit.retry import Backoff, wait_or_stop
from services.kit.runtime import Runtime

log = structlog.get_logger()
_applied = Counter("lbledger_events_applied_total", "Events taken by this service", ["stream"])
_dead = Counter("lbledger_dead_letters_total", "Events that this service could not take")
_unknown = Counter("lbledger_unknown_events_total", "Events of a newer version, skipped", ["type"])
_restarts = Counter("lbledger_projector_restarts_total", "Sessions that ended early", ["why"])
_position = Gauge(
    "lbledger_position", "Stream sequence that this service has committed", ["stream"]
)
_lag = Gauge("lbledger_lag", "Messages of the stream still to be read", ["stream"])
_active_gauge = Gauge("lbledger_active", "1 on the replica that holds the fence")
_batch_seconds = Histogram(
    "lbledger_batch_seconds",
    "From taking a batch to its commit",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5),
)

LOCAL_LIMIT: Final = 20_000
PRODUCER_ROW: Final = "LB (produced)"
ISOLATE_ERRORS = (sa.exc.IntegrityError, sa.exc.DataError)


class Fenced(Exception):
    """Another replica has moved the offset: what this one knows is out of date."""


class _Misapplied(Exception):
    """The projection raised on one record; memory may be half changed."""


@dataclass(frozen=True, slots=True)
class _Offset:
    epoch: str = ""
    seq: int = 0
    version: int = 0
    created: str = ""


@dataclass(slots=True)
class _Batch:
    messages: list[Message]
    local: list[object]

    def __len__(self) -> int:
        return len(self.messages) + len(self.local)


class Projector:
    """Runs one Projection until the runtime stops."""

    def __init__(self, rt: Runtime, projection: Projection) -> None:
        self._rt = rt
        self._projection = projection
        self._settings = rt.settings.projector
        self._tables = service_tables(projection.name)
        self._offsets: dict[str, _Offset] = {}
        self._arrived: deque[list[Message]] = deque()
        self._local: deque[object] = deque()
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._holding = False
        self._proved = 0.0
        self._activity = asyncio.Event()
        self._reread_next = False
        self._starts: dict[str, int] = {}

    # --- for the service ---

    @property
    def active(self) -> bool:
        """Whether effects outside the transaction are allowed now."""
        fresh = time.monotonic() - self._proved < self._settings.effects_deadline_s
        return self._holding and fresh

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
        """Take part until the runtime stops: stand by, lead, recover."""
        stop = self._rt.stop
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
            await self._stand_by(conn, key)
            self._proved = time.monotonic()
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

    async def _beat(self, conn: AsyncConnection) -> None:
        while True:
            await asyncio.sleep(self._settings.beat_s)
            sent = time.monotonic()
            async with asyncio.timeout(self._settings.effects_deadline_s):
                await conn.execute(sa.text("select 1"))
            self._proved = sent

    # --- one session: from loading to the first error ---

    async def _session(self, bus: Bus, engine: AsyncEngine, beat: asyncio.Task[None]) -> None:
        sources = self._projection.sources
        for name in sorted({source.stream for source in sources} | {"LB"}):
            await bus.ensure_stream(self._rt.stream(name))
        outbox = Outbox(self._projection.name, engine)
        await self._load(engine, outbox)
        self._arrived.clear()
        self._room.set()
        tasks = [asyncio.create_task(outbox.run(bus)), asyncio.create_task(self._wake_on_stop())]
        try:
            produced = (await bus.stream_state("LB")).created
            if self._offsets[PRODUCER_ROW].created != produced:
                await self._restate(engine, outbox, produced)
            for source in sources:
                await self._position(bus, engine, outbox, source)
            self._reread_next = False
            tasks += [asyncio.create_task(self._pump(bus, source)) for source in sources]
            self._holding = True
            self._activity.set()
            _active_gauge.set(1)
            self._rt.health.set("projector", True)
            log.info("projector.active", position={s: o.seq for s, o in self._offsets.items()})
            loop = asyncio.create_task(self._loop(engine, outbox))
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

    async def _wake_on_stop(self) -> None:
        await self._rt.stop.wait()
        self._wake.set()

    async def _loop(self, engine: AsyncEngine, outbox: Outbox) -> None:
        while not self._rt.stop.is_set():
            batch = await self._collect()
            if not batch:
                continue
            if not await outbox.room(self._settings.effects_deadline_s):
                self._rt.health.set("outbox", False, "the stream does not acknowledge decisions")
                self._put_back(batch)
                continue
            self._rt.health.set("outbox", True)
            try:
                await self._process(batch, engine, outbox)
            except Fenced:
                raise
            except BaseException:
                self._local.extendleft(reversed(batch.local))
                raise

    async def _collect(self) -> _Batch:
        """What is queued now, waiting (up to a beat) only for the first."""
        if not self._arrived and not self._local:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.beat_s):
                    await self._wake.wait()
        messages: list[Message] = []
        while self._arrived and len(messages) < self._settings.batch:
            messages.extend(self._arrived.popleft())
        self._room.set()
        local = [self._local.popleft() for _ in range(min(len(self._local), self._settings.batch))]
        return _Batch(messages, local)

    def _put_back(self, batch: _Batch) -> None:
        if batch.messages:
            self._arrived.appendleft(batch.messages)
        self._local.extendleft(reversed(batch.local))

    async def _pump(self, bus: Bus, source: Source) -> None:
        puller: Puller = bus.puller(
            source.stream,
            start_seq=self._starts[source.stream],
            filters=source.filters,
            name=self._projection.name,
        )
        lag = _lag.labels(source.stream)
        try:
            while True:
                messages = await puller.fetch(self._settings.batch, timeout=1.0)
                lag.set(puller.lag)
                if messages:
                    if len(self._arrived) >= 4:
                        self._room.clear()
                        await self._room.wait()
                    self._arrived.append(messages)
                    self._wake.set()
        finally:
            await puller.close()

    # --- a batch ---

    async def _process(self, batch: _Batch, engine: AsyncEngine, outbox: Outbox) -> None:
        try:
            await self._commit(batch, engine, outbox)
            return
        except ISOLATE_ERRORS as error:
            log.warning("projector.isolating", why=plain_error(error), events=len(batch))
        except _Misapplied:
            pass
        await self._load(engine, outbox)
        for message in batch.messages:
            await self._isolate(_Batch([message], []), engine, outbox)
        for item in batch.local:
            await self._isolate(_Batch([], [item]), engine, outbox)

    async def _isolate(self, single: _Batch, engine: AsyncEngine, outbox: Outbox) -> None:
        try:
            await self._commit(single, engine, outbox)
        except (*ISOLATE_ERRORS, _Misapplied) as error:
            cause = error.__cause__ if isinstance(error, _Misapplied) else error
            why = plain_error(cause or error)
            await self._load(engine, outbox)
            if single.local:
                log.error("projector.local_dropped", item=type(single.local[0]).__name__, why=why)
            else:
                await self._commit(single, engine, outbox, refuse=why)

    async def _commit(
        self, batch: _Batch, engine: AsyncEngine, outbox: Outbox, *, refuse: str = ""
    ) -> None:
        began = time.monotonic()
        work = Work(self._projection.name)
        dead: list[tuple[Message, str]] = []
        offsets = dict(self._offsets)
        for message in batch.messages:
            record = self._take(message, work, dead, refuse)
            before = offsets[message.stream]
            epoch = next_epoch(before.epoch, record) if record else before.epoch
            offsets[message.stream] = replace(before, epoch=epoch, seq=message.seq)
        for item in batch.local:
            work.begin(None)
            try:
                self._projection.local(item, work)
            except Exception as error:
                raise _Misapplied from error
        if isinstance(self._projection, Settling):
            work.begin(None)
            try:
                self._projection.settle(work)
            except Exception as error:
                raise _Misapplied from error
        await self._write(work, dead, offsets, engine, outbox)
        for stream in {message.stream for message in batch.messages}:
            _applied.labels(stream).inc(sum(m.stream == stream for m in batch.messages))
        _batch_seconds.observe(time.monotonic() - began)

    def _take(
        self, message: Message, work: Work, dead: list[tuple[Message, str]], refuse: str
    ) -> Record | None:
        if refuse:
            dead.append((message, refuse))
            return None
        try:
            record = _decode(message)
        except events.UnknownEvent as error:
            _unknown.labels(str(error)[:80]).inc()
            log.warning("projector.unknown_event", subject=message.subject, why=str(error))
            return None
        except (msgspec.MsgspecError, ValueError) as error:
            dead.append((message, f"not a valid event: {error}"))
            return None
        work.begin(record)
        try:
            self._projection.apply(record, work)
        except Poison as poison:
            dead.append((message, str(poison)))
        except Hole:
            raise
        except Exception as error:
            raise _Misapplied from error
        return record

    async def _write(
        self,
        work: Work,
        dead: list[tuple[Message, str]],
        offsets: dict[str, _Offset],
        engine: AsyncEngine,
        outbox: Outbox,
    ) -> None:
        """The transaction. On success memory and stored state agree again."""
        now = datetime.now(UTC)
        work.begin(None)
        for message, reason in dead:
            work.emit(_dead_letter(self._projection.name, message, reason, now))
        acked: list[int] = []
        try:
            async with engine.begin() as conn:
                stored = await self._compare_and_set(conn, offsets)
                if dead:
                    await conn.execute(sa.insert(self._tables.dead_letter), _dead_rows(dead))
                await self._projection.save(conn)
                acked = await outbox.delete_acked(conn)
                rows = await outbox.insert(conn, work.emitted)
        except BaseException:
            outbox.keep(acked)
            raise
        self._offsets = stored
        outbox.forget(acked)
        outbox.push(rows)
        for message, reason in dead:
            _dead.inc()
            log.error("event.dead_lettered", stream=message.stream, seq=message.seq, why=reason)
        for stream, offset in stored.items():
            _position.labels(stream).set(offset.seq)
        self._projection.committed()

    async def _compare_and_set(
        self, conn: AsyncConnection, offsets: dict[str, _Offset]
    ) -> dict[str, _Offset]:
        table = self._tables.stream_offset
        stored: dict[str, _Offset] = {}
        for stream in sorted(offsets):
            known, wanted = self._offsets[stream], offsets[stream]
            done = await conn.execute(
                sa.update(table)
                .where(table.c.stream == stream, table.c.version == known.version)
                .values(
                    epoch=wanted.epoch,
                    seq=wanted.seq,
                    created=wanted.created,
                    version=known.version + 1,
                    updated_at=sa.func.clock_timestamp(),
                )
            )
            if done.rowcount != 1:
                raise Fenced
            stored[stream] = replace(wanted, version=known.version + 1)
        return stored

    # --- loading, positions, gaps ---

    async def _load(self, engine: AsyncEngine, outbox: Outbox) -> None:
        """Forget memory; read offsets, rows and outbox from one snapshot."""
        table = self._tables.stream_offset
        names = sorted({s.stream for s in self._projection.sources} | {PRODUCER_ROW})
        async with engine.begin() as conn:
            first = [{"stream": name, "epoch": "", "seq": 0, "version": 0} for name in names]
            await conn.execute(pg.insert(table).on_conflict_do_nothing(), first)
        async with engine.connect() as conn:
            await conn.execution_options(isolation_level="REPEATABLE READ")
            async with conn.begin():
                result = await conn.execute(sa.select(table).where(table.c.stream.in_(names)))
                self._offsets = {
                    row.stream: _Offset(row.epoch, row.seq, row.version, row.created)
                    for row in result
                }
                await self._projection.load(conn)
                await outbox.load(conn)

    async def _restate(self, engine: AsyncEngine, outbox: Outbox, created: str) -> None:
        """The LB stream is another one than the last time: state the standing decisions in it."""
        offsets = dict(self._offsets)
        known = offsets[PRODUCER_ROW].created
        offsets[PRODUCER_ROW] = replace(offsets[PRODUCER_ROW], created=created)
        work = Work(self._projection.name)
        if known:
            log.warning("projector.restating", why="the LB stream was re-created")
            self._projection.restate(work)
        await self._write(work, [], offsets, engine, outbox)

    async def _position(
        self, bus: Bus, engine: AsyncEngine, outbox: Outbox, source: Source
    ) -> None:
        """Compare the stored offset with the stream and heal what does not fit."""
        state = await bus.stream_state(source.stream)
        stream, offset = source.stream, self._offsets[source.stream]
        if offset.created and offset.created != state.created:
            log.warning("projector.stream_recreated", stream=stream, was=offset.seq)
            offset = replace(offset, seq=0, created=state.created)
            await self._move(stream, offset, engine, outbox)
        elif state.last_seq < offset.seq:
            log.warning("projector.tail_lost", stream=stream, was=offset.seq, now=state.last_seq)
            await self._move(stream, replace(offset, seq=state.last_seq), engine, outbox)
        elif offset.seq and (self._reread_next or state.first_seq > offset.seq + 1):
            log.warning("projector.rereading", stream=stream, was=offset.seq, first=state.first_seq)
            await self._reread(bus, engine, outbox, source)
        elif not offset.created:
            await self._move(stream, replace(offset, created=state.created), engine, outbox)
        # A service that is born late starts where the log starts now.
        seq = self._offsets[stream].seq
        self._starts[stream] = seq + 1 if seq else max(1, state.first_seq)

    async def _move(
        self, stream: str, offset: _Offset, engine: AsyncEngine, outbox: Outbox
    ) -> None:
        await self._write(
            Work(self._projection.name), [], {**self._offsets, stream: offset}, engine, outbox
        )

    async def _reread(self, bus: Bus, engine: AsyncEngine, outbox: Outbox, source: Source) -> None:
        """Take the last message of every subject, then drop what the log does not show any more."""
        state = await bus.stream_state(source.stream)
        seen: set[ObjectRef] = set()
        complete: set[str] = set()
        chunk: list[Message] = []
        start = self._offsets[source.stream]
        for pattern in source.filters or STREAMS[source.stream].subjects:
            async for message in bus.last_per_subject(source.stream, pattern):
                ref = subjects.subject_ref(message.subject)
                if ref is not None:
                    seen.add(ref)
                elif message.headers.get(subjects.HEADER_TYPE, "").startswith("SyncFinished"):
                    complete.add(subjects.untoken(message.subject.rpartition(".")[2]))
                chunk.append(message)
                if len(chunk) >= self._settings.batch:
                    await self._take_snapshot(chunk, engine, outbox)
                    chunk = []
        await self._take_snapshot(chunk, engine, outbox)
        if source.stream == "KUBE":
            await self._drop_unseen(seen, complete, state.last_seq, engine, outbox)
        await self._move(
            source.stream,
            replace(self._offsets[source.stream], seq=max(state.last_seq, start.seq)),
            engine,
            outbox,
        )

    async def _take_snapshot(
        self, chunk: list[Message], engine: AsyncEngine, outbox: Outbox
    ) -> None:
        work = Work(self._projection.name)
        dead: list[tuple[Message, str]] = []
        offsets = dict(self._offsets)
        for message in chunk:
            try:
                record = msgspec.structs.replace(_decode(message), snapshot=True)
            except (msgspec.MsgspecError, ValueError):
                continue  # it was, or will be, a dead letter in its turn
            work.begin(record)
            try:
                self._projection.apply(record, work)
            except Poison as poison:
                dead.append((message, str(poison)))
            before = offsets[message.stream]
            offsets[message.stream] = replace(before, epoch=next_epoch(before.epoch, record))
        await self._write(work, dead, offsets, engine, outbox)

    async def _drop_unseen(
        self,
        seen: set[ObjectRef],
        complete: set[str],
        seq: int,
        engine: AsyncEngine,
        outbox: Outbox,
    ) -> None:
        work = Work(self._projection.name)
        now = datetime.now(UTC)
        epoch = self._offsets["KUBE"].epoch
        for ref, uid in list(self._projection.known()):
            if ref in seen or ref.plural not in complete:
                continue
            gone = events.ObjectGone(at=now, **ref._asdict(), uid=uid, reason="vanished")
            record = Record(
                stream="KUBE",
                seq=seq,
                subject=subjects.fact_subject(ref),
                epoch=epoch,
                event=gone,
                snapshot=True,
            )
            work.begin(record)
            self._projection.apply(record, work)
        await self._write(work, [], dict(self._offsets), engine, outbox)


def _decode(message: Message) -> Record:
    headers = message.headers
    event = events.decode(message.data, headers.get(subjects.HEADER_TYPE))
    expected = headers.get(subjects.HEADER_EXPECTED_LAST, "")
    return Record(
        stream=message.stream,
        seq=message.seq,
        subject=message.subject,
        epoch=headers.get(subjects.HEADER_EPOCH, ""),
        event=event,
        expected=int(expected) if expected.isdigit() else -1,
        trace=headers.get(subjects.HEADER_TRACE, ""),
        origin=headers.get(subjects.HEADER_CAUSE, ""),
    )


def _dead_letter(service: str, message: Message, reason: str, now: datetime) -> events.DeadLettered:
    return events.DeadLettered(
        at=now,
        service=service,
        stream=message.stream,
        sequence=message.seq,
        subject=message.subject,
        reason=reason[:2000],
        payload=message.data[:2000].decode("utf-8", "backslashreplace"),
    )


def _dead_rows(dead: list[tuple[Message, str]]) -> list[dict[str, object]]:
    return [
        {
            "stream": message.stream,
            "seq": message.seq,
            "subject": message.subject,
            "reason": reason[:2000],
            "payload": message.data[:65_536],
        }
        for message, reason in dead
    ]


def _lock_key(name: str) -> int:
    digest = hashlib.blake2b(f"lbledger.{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
