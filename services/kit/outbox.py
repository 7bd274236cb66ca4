"""The outbox: decisions go into a table with the effects that they speak of, and from there out.

A transaction's decisions are one row. The relay publishes in commit order and deletes a row once
all of it is acknowledged. What a replica finds at its start may already have been sent by the one
before it: the last message of the subject says so in its `Lb-Outbox` header (database instance and
message id), however long ago that was. So ids must never be given twice, also not by a database
that was restored from a backup: they follow the clock. What is left over beyond the bound stays in
the table until its turn, and so does what comes after it. Rows that someone else committed are
found by a slow poll, so an id that becomes visible late is not passed over. Nothing is sent while
the replica may have lost its place to another.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, NamedTuple

import msgspec
import sqlalchemy as sa
import structlog
from prometheus_client import Counter, Gauge
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from schema import events, subjects
from schema.tables import service_tables
from services.kit import direct
from services.kit.acknowledged import Acknowledged
from services.kit.bus import Bus, Outgoing, Published, Publisher, TooLarge
from services.kit.records import Emitted

log = structlog.get_logger()
_published = Counter("lbledger_outbox_published_total", "Decisions acknowledged by the stream")
_pending = Gauge("lbledger_outbox_pending", "Decisions committed and not yet acknowledged")

STREAM = "LB"
_NONE: Final[dict[str, str]] = {}
CHUNK = 1000  # what the server takes in one atomic batch
BATCH_FROM = 24  # below this, single publishes answer sooner than one atomic batch
IDS_AT_ONCE = 2000
LOOKS_AT_ONCE = 64
BACKLOG_LIMIT = 20_000
PUBLISH_DEADLINE_S = 15.0
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(list[tuple[str, str, str, msgspec.Raw]]).decode


Span = tuple[int, int]  # ids from the first to the last


class Row:
    """What one transaction left (or a part of it): messages with the ids from `first` to `last`."""

    __slots__ = ("first", "last", "left")

    def __init__(self, first: int, count: int) -> None:
        self.first, self.last = first, first + count - 1
        self.left = count  # messages that are not acknowledged


class Waiting(NamedTuple):
    """One message on its way out."""

    id: int
    subject: str
    msg_id: str
    lines: str  # its headers, as they are sent
    body: bytes
    row: Row


class Outbox:
    """Storage and relay of one service's decisions."""

    def __init__(self, service: str, engine: AsyncEngine) -> None:
        self._service = service
        self._tables = service_tables(service)
        self._insert = (
            f"insert into {self._tables.outbox.fullname} (id, count, messages)"  # noqa: S608
            " overriding system value values ($1, $2, $3)"
        )
        self._engine = engine
        self.acknowledged = Acknowledged(service)
        self._instance = ""
        self._waiting: deque[Waiting] = deque()
        # First ids of the rows in memory: waiting, in flight, or acknowledged and not deleted.
        self._held: set[int] = set()
        self._acked: list[Span] = []
        self._ids = range(0)
        self._behind = False  # the table holds more than was taken into memory, from _last on
        self._passed = False  # something was committed meanwhile, and left in the table
        self._unchecked = False  # some of what waits may have been sent by somebody else
        self._last = 0
        self._loads = 0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()

    async def load(self, conn: AsyncConnection) -> None:
        """Forget memory and take over the rows that are left."""
        self._instance = str(await conn.scalar(sa.select(self._tables.instance.c.id)))
        self._waiting.clear()
        self._held.clear()
        self._acked.clear()
        self._ids = range(0)  # somebody else may have taken later ones meanwhile
        self._loads += 1
        self._behind, self._last = True, 0
        await self.acknowledged.load(conn)
        await self._take_more(conn)
        self._unchecked = bool(self._waiting)

    async def raise_ids(self, conn: AsyncConnection) -> None:
        """Let the next id be above all that this database gave, also before it was restored.

        The caller holds the lock under which ids are reserved. The clock outruns the ids: nobody
        decides a million times a second.
        """
        await conn.execute(
            sa.text(
                "select setval(name, greatest(nextval(name), now)) from (select"
                " pg_get_serial_sequence(:box, 'id')::regclass name,"
                " (extract(epoch from clock_timestamp()) * 1000000)::bigint now) it"
            ),
            {"box": self._tables.outbox.fullname},
        )

    async def insert(self, conn: AsyncConnection, emitted: Sequence[Emitted]) -> list[Waiting]:
        """Store decisions in the caller's transaction; push() the result after its commit.

        The caller holds the fence by then, so ids are in the order of the commits.
        """
        waiting: list[Waiting] = []
        for start in range(0, len(emitted), CHUNK):
            chunk = emitted[start : start + CHUNK]
            await self._reserve(conn, len(chunk))
            row = Row(self._ids[0], len(chunk))
            messages = [
                self._waiting_of(*one, row_id, row)
                for row_id, one in zip(self._ids, chunk, strict=False)
            ]
            text = _encode([(m.subject, m.msg_id, m.lines, msgspec.Raw(m.body)) for m in messages])
            await direct.fetch(conn, self._insert, row.first, len(chunk), text.decode())
            self._ids = self._ids[len(chunk) :]
            waiting += messages
        return waiting

    def _waiting_of(
        self, event: events.Event, cause: str, msg_id: str, trace: str, row_id: int, row: Row
    ) -> Waiting:
        # All of these came as header values, or are ours: nothing is to be checked.
        lines = f"{subjects.HEADER_TYPE}: {events.tag_of(event)}\r\n"
        if cause:
            epoch = cause.partition(":")[0]
            lines += f"{subjects.HEADER_CAUSE}: {cause}\r\n{subjects.HEADER_EPOCH}: {epoch}\r\n"
        if trace:
            lines += f"{subjects.HEADER_TRACE}: {trace}\r\n"
        msg_id = msg_id or f"{self._service}:{uuid.uuid4().hex}"
        return Waiting(row_id, events.subject_of(event), msg_id, lines, events.encode(event), row)

    async def _reserve(self, conn: AsyncConnection, count: int) -> None:
        """Have enough ids of our own; nobody else gets those between the first and the last."""
        while len(self._ids) < count:
            [(first, last)] = await direct.fetch(
                conn,
                "select min(id), max(id) from (select nextval((select"
                " pg_get_serial_sequence($1, 'id')::regclass)) id from generate_series(1, $2)) ids",
                self._tables.outbox.fullname,
                max(count, IDS_AT_ONCE),
            )
            block = range(first, last + 1)
            if len(block) == max(count, IDS_AT_ONCE):
                self._ids = block

    def push(self, messages: list[Waiting]) -> None:
        if self._behind and messages:
            self._passed = True  # its turn comes after that of the rows before it
            self._idle.clear()
            return
        self._waiting.extend(messages)
        self._held.update([message.row.first for message in messages])
        if messages:
            self._idle.clear()
            self._wake.set()
        _pending.set(len(self._waiting))

    def take_acked(self) -> list[Span]:
        """What may be deleted now; afterwards forget() it, or keep() it when that failed."""
        done, self._acked = self._acked, []
        return joined(done)

    async def delete(self, conn: AsyncConnection, done: Sequence[Span]) -> None:
        """Delete rows in the caller's transaction."""
        box = self._tables.outbox
        for first, last in done:
            await conn.execute(sa.delete(box).where(box.c.id.between(first, last)))

    def forget(self, done: Sequence[Span]) -> None:
        for first, last in done:
            self._held.difference_update(range(first, last + 1))

    def keep(self, done: Sequence[Span]) -> None:
        """The transaction that was to delete these failed."""
        self._acked.extend(done)

    async def room(self, timeout: float) -> bool:
        """Wait until the backlog is below its bound."""
        try:
            async with asyncio.timeout(timeout):
                while self._behind or len(self._waiting) >= BACKLOG_LIMIT:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            return False
        return True

    async def drained(self, timeout: float) -> bool:
        """Wait until everything committed was acknowledged and deleted."""
        try:
            async with asyncio.timeout(timeout):
                while self._waiting or self._held or self._behind:
                    await self._idle.wait()
                    self._idle.clear()
        except TimeoutError:
            return False
        return True

    async def run(self, bus: Bus, allowed: Callable[[], bool]) -> None:
        """Relay until cancelled; a BusError ends it (the projector makes the stream again)."""
        publisher = bus.publisher(STREAM, deadline=PUBLISH_DEADLINE_S)
        connection = bus.connections
        try:
            while True:
                if connection != bus.connections:  # the server may have lost its last moments
                    now = bus.connections
                    await self.acknowledged.check(bus)
                    connection = now
                if self._unchecked:
                    self._unchecked = False
                    await self._skip_sent(bus)
                elif not allowed():
                    await asyncio.sleep(0.05)
                elif self._waiting:
                    await self._send(publisher)
                else:
                    await self._rest()
        finally:
            await publisher.close()

    async def _send(self, publisher: Publisher) -> None:
        loads, chunk = self._loads, list(islice(self._waiting, CHUNK))
        own = f"{subjects.HEADER_OUTBOX}: {self._instance}:"
        messages = [
            Outgoing(subject, body, _NONE, msg_id, None, f"{lines}{own}{row_id}\r\n")
            for row_id, subject, msg_id, lines, body, _ in chunk
        ]
        stored = await self._send_together(publisher, messages)
        if stored is None:
            stored = await self._send_singly(publisher, messages)
        _published.inc(len(chunk))
        if loads != self._loads:
            return  # memory is another one; a look at the stream will tell that these are there
        self._note(chunk, stored)
        for message in chunk:
            self._waiting.popleft()
            self._done(message.row)
        _pending.set(len(self._waiting))

    def _done(self, row: Row) -> None:
        """One message of it is acknowledged."""
        row.left -= 1
        if not row.left:
            self._acked.append((row.first, row.last))

    def _note(self, sent: list[Waiting], stored: list[Published | None]) -> None:
        """Remember the newest of them; one that was there before has another's header, perhaps."""
        for message, found in zip(reversed(sent), reversed(stored), strict=True):
            if found is not None and not found.duplicate:
                self.acknowledged.note(found.seq, f"{self._instance}:{message.id}")
                return

    async def _send_together(
        self, publisher: Publisher, messages: list[Outgoing]
    ) -> list[Published | None] | None:
        """Where they are stored; None: one of them is too large, and nothing was sent."""
        if len(messages) < BATCH_FROM:
            return None
        try:
            return list(await publisher.publish_batch(messages))
        except TooLarge:
            return None

    async def _send_singly(
        self, publisher: Publisher, messages: list[Outgoing]
    ) -> list[Published | None]:
        """Where each is stored; None for one that is too large."""
        stored: list[Published | None] = []
        futures: list[asyncio.Future[Published] | None] = []
        for m in messages:
            try:
                futures.append(publisher.give(m))
            except TooLarge as error:
                log.error("outbox.too_large", why=str(error))
                futures.append(None)
        await asyncio.gather(*filter(None, futures), return_exceptions=True)
        for future in futures:
            try:
                stored.append(future.result() if future is not None else None)
            except TooLarge as error:
                log.error("outbox.too_large", why=str(error))
                stored.append(None)
        return stored

    async def _rest(self) -> None:
        """Nothing to send: delete what was acked, look for other rows, wait for a push."""
        if not self._behind:
            self._wake.clear()
            try:
                async with asyncio.timeout(0.05 if self._acked else 1.0):
                    await self._wake.wait()
                    return
            except TimeoutError:
                pass
        done = self.take_acked()
        try:
            async with asyncio.timeout(10), self._engine.begin() as conn:
                await self.delete(conn, done)
                if done:
                    await self.acknowledged.save(conn)
                if self._behind:
                    await self._take_more(conn)
                elif not done:
                    await self._take_late(conn)
        except (sa.exc.SQLAlchemyError, OSError, TimeoutError) as error:
            self.keep(done)
            log.warning("outbox.tidy_failed", why=type(error).__name__)
            await asyncio.sleep(0.5)
            return
        self.forget(done)
        if not self._held and not self._behind:
            self._idle.set()

    async def _take_more(self, conn: AsyncConnection) -> None:
        """The next rows in the order of their ids, up to the bound."""
        self._passed = False
        box = self._tables.outbox
        found = await self._read(conn, box.c.id > self._last)
        more = len(found) >= BACKLOG_LIMIT or self._passed
        self._behind = False
        self.push([message for message in found if message.row.first not in self._held])
        self._behind, self._unchecked = more, True
        self._last = found[-1].row.first if found else self._last

    async def _take_late(self, conn: AsyncConnection) -> None:
        """Rows that became visible after later ones were taken."""
        others = self._tables.outbox.c.id.not_in(self._held) if self._held else sa.true()
        found = await self._read(conn, others)
        self.push([message for message in found if message.row.first not in self._held])

    async def _read(self, conn: AsyncConnection, which: sa.ColumnElement[bool]) -> list[Waiting]:
        """Rows until they hold as many messages as memory takes."""
        box = self._tables.outbox.c
        upto = sa.func.sum(box["count"]).over(order_by=box.id).label("upto")
        query = sa.select(box.id, box["count"], box.messages, upto).where(which)
        rows = query.order_by(box.id).limit(BACKLOG_LIMIT).subquery().c
        few = sa.select(rows.id, rows.messages).where(rows.upto - rows["count"] < BACKLOG_LIMIT)
        found: list[Waiting] = []
        for stored in await conn.execute(few.order_by(rows.id)):
            messages = _decode(stored.messages)
            row = Row(stored.id, len(messages))
            found += [
                Waiting(number, subject, msg_id, lines, bytes(body), row)
                for number, (subject, msg_id, lines, body) in enumerate(messages, row.first)
            ]
        return found

    async def _skip_sent(self, bus: Bus) -> None:
        """Leave out the rows that the replica before us published without deleting them."""
        names = list(dict.fromkeys(message.subject for message in self._waiting))
        last: dict[str, int] = {}
        for start in range(0, len(names), LOOKS_AT_ONCE):
            some = names[start : start + LOOKS_AT_ONCE]
            found = await asyncio.gather(*(bus.last(STREAM, subject) for subject in some))
            for subject, message in zip(some, found, strict=True):
                header = message.headers.get(subjects.HEADER_OUTBOX, "") if message else ""
                instance, _, row_id = header.partition(":")
                last[subject] = int(row_id) if instance == self._instance else -1
        # Taken out of what is there now: more may have been pushed meanwhile.
        left: deque[Waiting] = deque()
        for waiting in self._waiting:
            if waiting.id <= last.get(waiting.subject, -1):
                self._done(waiting.row)
            else:
                left.append(waiting)
        self._waiting = left


def joined(spans: Sequence[Span]) -> list[Span]:
    """Runs of ids without a hole; they come in order, so mostly there is one."""
    found: list[Span] = []
    for first, last in sorted(spans):
        if found and found[-1][1] == first - 1:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    return found
