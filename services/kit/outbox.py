"""The outbox: decisions go into a table with the effects that they speak of, and from there out.

The relay publishes in commit order and deletes a row after its ack. What a replica finds at its
start may already have been sent by the one before it: the last message of the subject says so in
its `Lb-Outbox` header (database instance and row id), however long ago that was. So ids must never
be given twice, also not by a database that was restored from a backup: they follow the clock. What
is left over beyond the bound stays in the table until its turn, and so does what comes after it.
Rows that someone else committed are found by a slow poll, so an id that becomes visible late is not
passed over. Nothing is sent while the replica may have lost its place to another.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec
import sqlalchemy as sa
import structlog
from prometheus_client import Counter, Gauge
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from schema import events, subjects
from schema.tables import service_tables
from services.kit import direct
from services.kit.acknowledged import Acknowledged
from services.kit.bus import Bus, Outgoing, Published, Publisher, TooLarge, format_headers
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
_COLUMNS: Final = ("id", "subject", "msg_id", "headers", "body")
_encode: Final = msgspec.json.Encoder().encode


Span = tuple[int, int]  # ids from the first to the last


class Row(NamedTuple):
    id: int
    subject: str
    msg_id: str
    lines: str  # its headers, as they are sent
    body: bytes


class Outbox:
    """Storage and relay of one service's decisions."""

    def __init__(self, service: str, engine: AsyncEngine) -> None:
        self._service = service
        self._tables = service_tables(service)
        self._engine = engine
        self.acknowledged = Acknowledged(service)
        self._instance = ""
        self._waiting: deque[Row] = deque()
        self._held: set[int] = set()  # ids in memory: waiting, in flight, or acked and not deleted
        self._acked: list[int] = []
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

    async def insert(self, conn: AsyncConnection, emitted: Sequence[Emitted]) -> list[Row]:
        """Store decisions in the caller's transaction; push() the result after its commit.

        The caller holds the fence by then, so ids are in the order of the commits.
        """
        if not emitted:
            return []
        await self._reserve(conn, len(emitted))
        rows: list[Row] = []
        records = []
        for row_id, (event, cause, msg_id, trace) in zip(self._ids, emitted, strict=False):
            headers = {subjects.HEADER_TYPE: events.tag_of(event)}
            if cause:
                headers[subjects.HEADER_CAUSE] = cause
                headers[subjects.HEADER_EPOCH] = cause.partition(":")[0]
            if trace:
                headers[subjects.HEADER_TRACE] = trace
            # All of them came as header values, or are ours: nothing is to be checked.
            lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
            subject, body = events.subject_of(event), events.encode(event)
            msg_id = msg_id or f"{self._service}:{uuid.uuid4().hex}"
            rows.append(Row(row_id, subject, msg_id, lines, body))
            records.append((row_id, subject, msg_id, _encode(headers).decode(), body))
        await direct.copy(conn, self._tables.outbox, _COLUMNS, records)
        self._ids = self._ids[len(rows) :]
        return rows

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

    def push(self, rows: list[Row]) -> None:
        if self._behind and rows:
            self._passed = True  # its turn comes after that of the rows before it
            self._idle.clear()
            return
        self._waiting.extend(rows)
        self._held.update([row.id for row in rows])
        if rows:
            self._idle.clear()
            self._wake.set()
        _pending.set(len(self._waiting))

    def take_acked(self) -> list[Span]:
        """What may be deleted now; afterwards forget() it, or keep() it when that failed."""
        ids, self._acked = self._acked, []
        return spans(ids)

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
        for first, last in done:
            self._acked.extend(range(first, last + 1))

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
            for row_id, subject, msg_id, lines, body in chunk
        ]
        stored = await self._send_together(publisher, messages)
        if stored is None:
            stored = await self._send_singly(publisher, messages)
        _published.inc(len(chunk))
        if loads != self._loads:
            return  # memory is another one; a look at the stream will tell that these are there
        self._note(chunk, stored)
        for row in chunk:
            self._waiting.popleft()
            self._acked.append(row.id)
        _pending.set(len(self._waiting))

    def _note(self, rows: list[Row], stored: list[Published | None]) -> None:
        """Remember the newest of them; one that was there before has another's header, perhaps."""
        for row, found in zip(reversed(rows), reversed(stored), strict=True):
            if found is not None and not found.duplicate:
                self.acknowledged.note(found.seq, f"{self._instance}:{row.id}")
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
        rows = await self._read(conn, sa.select(box).where(box.c.id > self._last))
        more = len(rows) == BACKLOG_LIMIT or self._passed
        self._behind = False
        self.push([row for row in rows if row.id not in self._held])
        self._behind, self._unchecked = more, True
        self._last = rows[-1].id if rows else self._last

    async def _take_late(self, conn: AsyncConnection) -> None:
        """Rows that became visible after later ones were taken."""
        box = self._tables.outbox
        query = sa.select(box)
        if self._held:
            query = query.where(box.c.id.not_in(self._held))
        rows = await self._read(conn, query)
        self.push([row for row in rows if row.id not in self._held])

    async def _read(self, conn: AsyncConnection, query: sa.Select[Any]) -> list[Row]:
        result = await conn.execute(query.order_by(self._tables.outbox.c.id).limit(BACKLOG_LIMIT))
        return [
            Row(r.id, r.subject, r.msg_id, format_headers(dict(r.headers)), r.body) for r in result
        ]

    async def _skip_sent(self, bus: Bus) -> None:
        """Leave out the rows that the replica before us published without deleting them."""
        names = list(dict.fromkeys(row.subject for row in self._waiting))
        last: dict[str, int] = {}
        for start in range(0, len(names), LOOKS_AT_ONCE):
            some = names[start : start + LOOKS_AT_ONCE]
            found = await asyncio.gather(*(bus.last(STREAM, subject) for subject in some))
            for subject, message in zip(some, found, strict=True):
                header = message.headers.get(subjects.HEADER_OUTBOX, "") if message else ""
                instance, _, row_id = header.partition(":")
                last[subject] = int(row_id) if instance == self._instance else -1
        sent = {row.id for row in self._waiting if row.id <= last.get(row.subject, -1)}
        # Taken out of what is there now: more may have been pushed meanwhile.
        self._waiting = deque(row for row in self._waiting if row.id not in sent)
        self._acked.extend(sorted(sent))


def spans(ids: list[int]) -> list[Span]:
    """Ids as runs without a hole; they are given and come back in order, so mostly there is one."""
    if not ids:
        return []
    ids = sorted(ids)
    if ids[-1] - ids[0] == len(ids) - 1:
        return [(ids[0], ids[-1])]
    found: list[Span] = []
    for row_id in ids:
        if found and found[-1][1] == row_id - 1:
            found[-1] = (found[-1][0], row_id)
        else:
            found.append((row_id, row_id))
    return found
