"""One batch of inputs as one transaction, and the search for the one input that can't be taken.

The transaction holds the compare-and-set of the offsets, the service's own rows, its decisions and
its dead letters. Memory and stored state agree after it; when it fails, memory is loaded again.

A projection that detaches its changes goes on with the next batch while one is being written, so
memory may be one batch ahead of what is stored. Transactions still follow one another, and when one
fails, the batch that was applied after it is taken again from the loaded state.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter as Tally
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec
import sqlalchemy as sa
import structlog
from prometheus_client import Counter, Gauge, Histogram
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from schema import events, subjects
from schema.tables import service_tables
from services.kit import garbage
from services.kit.acknowledged import MARK_ROW
from services.kit.bus import Message, header_mark
from services.kit.db import plain_error
from services.kit.mirror import next_epoch
from services.kit.outbox import Outbox, Span
from services.kit.records import (
    Detaching,
    Hole,
    Poison,
    Projection,
    Record,
    Saver,
    Settling,
    Work,
)

log = structlog.get_logger()
_applied = Counter("lbledger_events_applied_total", "Events taken by this service", ["stream"])
_dead = Counter("lbledger_dead_letters_total", "Events that this service could not take")
_unknown = Counter("lbledger_unknown_events_total", "Events of a newer version, skipped", ["type"])
_position = Gauge(
    "lbledger_position", "Stream sequence that this service has committed", ["stream"]
)
_batch_seconds = Histogram(
    "lbledger_batch_seconds",
    "From taking a batch to its commit",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5),
)

# The row that every commit moves, also one that advances in no stream. Its `created` is that of
# the LB stream that our decisions were last published to.
FENCE_ROW: Final = "LB (produced)"
APPLY_AT_ONCE: Final = 50  # while a transaction waits for us to go on with it
ISOLATE_ERRORS: Final = (sa.exc.IntegrityError, sa.exc.DataError)


class Fenced(Exception):
    """Another replica has moved the offset: what this one knows is out of date."""


class _Misapplied(Exception):
    """The projection raised on one input; memory may be half changed."""


@dataclass(frozen=True, slots=True)
class Offset:
    """How far a stream is taken; `created` tells the stream from a later one of its name."""

    epoch: str = ""
    seq: int = 0
    version: int = 0
    created: str = ""

    @property
    def place(self) -> tuple[str, int, str]:
        return self.epoch, self.seq, self.created


class Arrival(NamedTuple):
    """A message, and what it says: a record, or why it can't be one, or nothing that we know."""

    message: Message
    record: Record | None
    problem: str = ""


@dataclass(slots=True)
class Batch:
    """What came from the bus, then inputs of our own; what was committed is taken out."""

    arrivals: list[Arrival] = field(default_factory=list)
    local: list[object] = field(default_factory=list)
    snapshot: bool = False  # of the compacted log: the position stays where it is

    def __len__(self) -> int:
        return len(self.arrivals) + len(self.local)


class Prepared(NamedTuple):
    """A batch that the memory has taken, and what its transaction is to hold."""

    batch: Batch
    work: Work
    dead: list[tuple[Message, str]]
    offsets: dict[str, Offset]
    counts: Tally[str]
    save: Saver
    began: float


class Committer:
    """Applies batches to a projection and commits them."""

    def __init__(self, projection: Projection, engine: AsyncEngine, outbox: Outbox) -> None:
        self.projection = projection
        self.outbox = outbox
        self.offsets: dict[str, Offset] = {}
        self._engine = engine
        self._conn: AsyncConnection | None = None
        self._applied: dict[str, Offset] = {}  # what memory has taken: the offsets, or beyond
        self._writing: tuple[asyncio.Task[None], Batch] | None = None
        self._tables = service_tables(projection.name)
        self._move = _move_statement(projection.name)

    async def close(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing[0].cancel()
            await asyncio.gather(writing[0], return_exceptions=True)
        conn, self._conn = self._conn, None
        if conn is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(2):
                    await conn.close()

    async def load(self) -> None:
        """Forget memory; read offsets, rows and outbox from one snapshot."""
        await self.close()
        table = self._tables.stream_offset
        names = sorted({s.stream for s in self.projection.sources} | {FENCE_ROW})
        async with self._engine.begin() as conn:
            first = [
                {"stream": name, "epoch": "", "seq": 0, "version": 0} for name in (*names, MARK_ROW)
            ]
            await conn.execute(pg.insert(table).on_conflict_do_nothing(), first)
            # Ids are reserved by those who hold this row.
            fence = sa.select(table.c.version).where(table.c.stream == FENCE_ROW)
            await conn.execute(fence.with_for_update())
            await self.outbox.raise_ids(conn)
        async with self._engine.connect() as conn:
            await conn.execution_options(isolation_level="REPEATABLE READ")
            async with conn.begin():
                result = await conn.execute(sa.select(table).where(table.c.stream.in_(names)))
                self.offsets = {
                    row.stream: Offset(row.epoch, row.seq, row.version, row.created)
                    for row in result
                }
                self._applied = self.offsets
                with garbage.loading():
                    await self.projection.load(conn)
                await self.outbox.load(conn)
        # Kept: taking one from the pool for every batch costs as much as a statement.
        self._conn = await self._engine.connect()

    async def take(self, batch: Batch) -> None:
        """Take a batch, and let its transaction run on if the projection can go on meanwhile."""
        if not isinstance(self.projection, Detaching):
            await self.process(batch)
            return
        try:
            prepared = await self._prepare(batch)
        except _Misapplied:
            await self.settled()
            await self.load()
            await self.process(batch)
            return
        if await self.settled():
            self._writing = (asyncio.create_task(self._write(prepared)), batch)
        else:
            await self.process(batch)

    async def settled(self) -> bool:
        """Wait for the transaction that is under way. False: it held an input that can't be taken,
        which is set apart by now; memory was loaded again and holds nothing that came after it."""
        if self._writing is None:
            return True
        task, batch = self._writing
        try:
            await task
        except ISOLATE_ERRORS as error:
            log.warning("projector.isolating", why=plain_error(error), events=len(batch))
            self._writing = None
            await self._set_apart(batch)
            return False
        self._writing = None
        return True

    @property
    def under_way(self) -> list[object] | None:
        """Inputs of our own in the transaction that is under way; None when there is none."""
        return None if self._writing is None else self._writing[1].local

    async def process(self, batch: Batch) -> None:
        """Take and commit a batch; an input that can't be taken is set apart."""
        try:
            await self._commit(batch)
        except ISOLATE_ERRORS as error:
            log.warning("projector.isolating", why=plain_error(error), events=len(batch))
        except _Misapplied as error:
            log.warning("projector.isolating", why=repr(error.__cause__), events=len(batch))
        else:
            batch.arrivals, batch.local = [], []
            return
        await self._set_apart(batch)

    async def _set_apart(self, batch: Batch) -> None:
        await self.load()
        while batch.arrivals:
            await self._isolate(Batch(arrivals=batch.arrivals[:1], snapshot=batch.snapshot))
            del batch.arrivals[0]
        while batch.local:
            await self._isolate(Batch(local=batch.local[:1]))
            del batch.local[0]

    async def _isolate(self, single: Batch) -> None:
        try:
            await self._commit(single)
        except (*ISOLATE_ERRORS, _Misapplied) as error:
            cause = error.__cause__ if isinstance(error, _Misapplied) else error
            why = plain_error(cause or error)
            await self.load()
            if single.local:
                log.error("projector.local_dropped", item=type(single.local[0]).__name__, why=why)
            else:
                await self._commit(single, refuse=why)

    async def _commit(self, batch: Batch, *, refuse: str = "") -> None:
        await self._write(await self._prepare(batch, refuse=refuse))

    async def _prepare(self, batch: Batch, *, refuse: str = "") -> Prepared:
        """Apply a batch to the memory."""
        began = time.monotonic()
        work = Work(self.projection.name)
        dead: list[tuple[Message, str]] = []
        reached: dict[str, tuple[str, int]] = {}
        counts: Tally[str] = Tally()
        known = self._applied
        for number, (message, record, problem) in enumerate(batch.arrivals, 1):
            stream = message.stream
            epoch = reached[stream][0] if stream in reached else known[stream].epoch
            if refuse or problem:
                dead.append((message, refuse or problem))
            elif record is not None:
                self._apply(message, record, work, dead)
                epoch = next_epoch(epoch, record)
            reached[stream] = (epoch, message.seq)
            counts[stream] += 1
            if self._writing is not None and not number % APPLY_AT_ONCE:
                await asyncio.sleep(0)
        if batch.snapshot:
            passed = {stream: known[stream].seq for stream in reached}
            dead = [letter for letter in dead if letter[0].seq > passed[letter[0].stream]]
            reached = {stream: (reached[stream][0], seq) for stream, seq in passed.items()}
        offsets = known | {
            stream: replace(known[stream], epoch=epoch, seq=seq)
            for stream, (epoch, seq) in reached.items()
        }
        try:
            for item in batch.local:
                work.begin(None)
                self.projection.local(item, work)
            self.settle(work)
            save = self._changes()
        except Exception as error:
            raise _Misapplied from error
        self._applied = offsets
        return Prepared(batch, work, dead, offsets, counts, save, began)

    def _changes(self) -> Saver:
        if isinstance(self.projection, Detaching):
            return self.projection.take_changes()
        return self.projection.save

    async def _write(self, prepared: Prepared) -> None:
        await self._transact(prepared.work, prepared.dead, prepared.offsets, prepared.save)
        for stream, count in prepared.counts.items():
            _applied.labels(stream).inc(count)
        _batch_seconds.observe(time.monotonic() - prepared.began)

    def settle(self, work: Work) -> None:
        """Let a projection that decides once for several inputs do so now."""
        if isinstance(self.projection, Settling):
            work.begin(None)
            self.projection.settle(work)

    def _apply(
        self, message: Message, record: Record, work: Work, dead: list[tuple[Message, str]]
    ) -> None:
        work.begin(record)
        try:
            self.projection.apply(record, work)
        except Poison as poison:
            dead.append((message, str(poison)))
        except Hole:
            raise
        except Exception as error:
            raise _Misapplied from error

    async def write(
        self,
        work: Work,
        dead: list[tuple[Message, str]],
        offsets: dict[str, Offset],
    ) -> None:
        """Commit decisions, offsets and the projection's changes; nothing may be under way."""
        await self._transact(work, dead, offsets, self._changes())
        self._applied = self.offsets

    async def _transact(
        self,
        work: Work,
        dead: list[tuple[Message, str]],
        offsets: dict[str, Offset],
        save: Saver,
    ) -> None:
        """The transaction. On success what is stored is as memory was after this batch."""
        now = datetime.now(UTC)
        work.begin(None)
        for message, reason in dead:
            work.emit(_dead_letter(self.projection.name, message, reason, now))
        assert self._conn is not None
        done = self.outbox.take_acked()
        try:
            async with self._conn.begin():
                stored = await self._compare_and_set(self._conn, offsets, done[:1])
                await self.outbox.delete(self._conn, done[1:])
                if dead:
                    await self._conn.execute(sa.insert(self._tables.dead_letter), _dead_rows(dead))
                await save(self._conn)
                rows = await self.outbox.insert(self._conn, work.emitted)
        except BaseException:
            self.outbox.keep(done)
            raise
        self.offsets = stored
        self.outbox.forget(done)
        self.outbox.push(rows)
        for message, reason in dead:
            _dead.inc()
            log.error("event.dead_lettered", stream=message.stream, seq=message.seq, why=reason)
        for stream, offset in stored.items():
            _position.labels(stream).set(offset.seq)
        self.projection.committed()

    async def _compare_and_set(
        self, conn: AsyncConnection, offsets: dict[str, Offset], done: list[Span]
    ) -> dict[str, Offset]:
        """Move the offsets, and on the way delete one span of the outbox, and note how far the
        stream acknowledged."""
        known = self.offsets
        moved = sorted(s for s, o in offsets.items() if s == FENCE_ROW or o.place != known[s].place)
        first, last = done[0] if done else (0, -1)
        result = await conn.exec_driver_sql(
            self._move,
            (
                moved,
                [offsets[s].epoch for s in moved],
                [offsets[s].seq for s in moved],
                [offsets[s].created for s in moved],
                [known[s].version for s in moved],
                first,
                last,
                *self.outbox.acknowledged.values,
            ),
        )
        if result.rowcount != len(moved):
            raise Fenced
        return known | {s: replace(offsets[s], version=known[s].version + 1) for s in moved}


_TYPE, _EXPECTED, _EPOCH, _TRACE, _CAUSE = map(
    header_mark,
    (
        subjects.HEADER_TYPE,
        subjects.HEADER_EXPECTED_LAST,
        subjects.HEADER_EPOCH,
        subjects.HEADER_TRACE,
        subjects.HEADER_CAUSE,
    ),
)


def read(message: Message) -> Arrival:
    try:
        return Arrival(message, decode(message))
    except events.UnknownEvent as error:
        _unknown.labels(str(error)[:80]).inc()
        log.warning("projector.unknown_event", subject=message.subject, why=str(error))
        return Arrival(message, None)
    except (msgspec.MsgspecError, ValueError) as error:
        return Arrival(message, None, f"not a valid event: {error}")


def decode(message: Message) -> Record:
    """Raises UnknownEvent, or ValueError (msgspec's included) for what is no event."""
    header = message.header
    event = events.decode(message.data, header(_TYPE))
    expected = header(_EXPECTED)
    return Record(
        stream=message.stream,
        seq=message.seq,
        subject=message.subject,
        epoch=header(_EPOCH),
        event=event,
        expected=int(expected) if expected.isdigit() else -1,
        trace=header(_TRACE),
        origin=header(_CAUSE),
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


def _move_statement(service: str) -> str:
    """Move several offsets at once, each only from the version that we know.

    Text, as it is the first statement of every batch of every service; and with the deletion of
    what the stream acknowledged, which would be a round trip of its own.
    """
    return f"""
        with gone as (delete from {service}.outbox where id between $6 and $7),
        marked as (
            update {service}.stream_offset set seq = $8, epoch = $9, created = $10
            where stream = '{MARK_ROW}' and (seq, epoch, created) <> ($8, $9, $10)
        )
        update {service}.stream_offset o set
            epoch = n.epoch, seq = n.seq, created = n.created, version = n.version + 1,
            updated_at = clock_timestamp()
        from unnest($1::text[], $2::text[], $3::bigint[], $4::text[], $5::bigint[])
            as n (stream, epoch, seq, created, version)
        where o.stream = n.stream and o.version = n.version
        """  # noqa: S608  (the names are those of our services)
