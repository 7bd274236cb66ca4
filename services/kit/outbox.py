"""The outbox: decisions go into a table with the effects that they speak of, and from there out.

The relay publishes in commit order and deletes a row after its ack. What a replica finds at its
start may already have been sent by the one before it: the last message of the subject says so in
its `Lb-Outbox` header (database instance and row id), however long ago that was. Rows that someone
else committed are found by a slow poll, so an id that becomes visible late is not passed over.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa
import structlog
from prometheus_client import Counter, Gauge
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from schema import events, subjects
from schema.tables import service_tables
from services.kit.bus import Bus, Outgoing, Publisher, TooLarge
from services.kit.records import Emitted

log = structlog.get_logger()
_published = Counter("lbledger_outbox_published_total", "Decisions acknowledged by the stream")
_pending = Gauge("lbledger_outbox_pending", "Decisions committed and not yet acknowledged")

STREAM = "LB"
CHUNK = 500
BATCH_FROM = 64  # below this, single publishes answer sooner than one atomic batch
BACKLOG_LIMIT = 20_000
PUBLISH_DEADLINE_S = 15.0


class Row(NamedTuple):
    id: int
    subject: str
    msg_id: str
    headers: dict[str, str]
    body: bytes


class Outbox:
    """Storage and relay of one service's decisions."""

    def __init__(self, service: str, engine: AsyncEngine) -> None:
        self._service = service
        self._tables = service_tables(service)
        self._engine = engine
        self._instance = ""
        self._waiting: deque[Row] = deque()
        self._held: set[int] = set()  # ids in memory: waiting, in flight, or acked and not deleted
        self._acked: list[int] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()

    async def load(self, conn: AsyncConnection) -> None:
        """Forget memory and take over the rows that are left."""
        self._instance = str(await conn.scalar(sa.select(self._tables.instance.c.id)))
        self._waiting.clear()
        self._held.clear()
        self._acked.clear()
        await self._take_left(conn)

    async def insert(self, conn: AsyncConnection, emitted: Iterable[Emitted]) -> list[Row]:
        """Store decisions in the caller's transaction; push() the result after its commit."""
        values: list[dict[str, Any]] = []
        for event, cause, msg_id, trace in emitted:
            tag = events.tag_of(event)
            headers = {subjects.HEADER_TYPE: tag}
            if cause:
                headers[subjects.HEADER_CAUSE] = cause
                headers[subjects.HEADER_EPOCH] = cause.partition(":")[0]
            if trace:
                headers[subjects.HEADER_TRACE] = trace
            values.append(
                {
                    "subject": events.subject_of(event),
                    "msg_id": msg_id or f"{self._service}:{uuid.uuid4().hex}",
                    "headers": headers,
                    "body": events.encode(event),
                }
            )
        if not values:
            return []
        box = self._tables.outbox
        # One statement with arrays: identity values follow the order of the arrays.
        statement = (
            sa.insert(box)
            .from_select(
                ["subject", "msg_id", "headers", "body"],
                sa.select(
                    sa.func.unnest(sa.bindparam("subjects", type_=pg.ARRAY(sa.Text))),
                    sa.func.unnest(sa.bindparam("ids", type_=pg.ARRAY(sa.Text))),
                    sa.cast(
                        sa.func.unnest(sa.bindparam("heads", type_=pg.ARRAY(sa.Text))), pg.JSONB
                    ),
                    sa.func.unnest(sa.bindparam("bodies", type_=pg.ARRAY(sa.LargeBinary))),
                ),
            )
            .returning(box.c.id)
        )
        result = await conn.execute(
            statement,
            {
                "subjects": [value["subject"] for value in values],
                "ids": [value["msg_id"] for value in values],
                "heads": [msgspec.json.encode(value["headers"]).decode() for value in values],
                "bodies": [value["body"] for value in values],
            },
        )
        ids = sorted(result.scalars())
        return [Row(id=row_id, **value) for row_id, value in zip(ids, values, strict=True)]

    def push(self, rows: list[Row]) -> None:
        self._waiting.extend(rows)
        self._held.update(row.id for row in rows)
        if rows:
            self._idle.clear()
            self._wake.set()
        _pending.set(len(self._waiting))

    async def delete_acked(self, conn: AsyncConnection) -> list[int]:
        """Delete what was acknowledged, in the caller's transaction; forget() after its commit."""
        ids, self._acked = self._acked, []
        if ids:
            box = self._tables.outbox
            await conn.execute(
                sa.delete(box).where(
                    box.c.id == sa.func.any(sa.bindparam("ids", type_=pg.ARRAY(sa.BigInteger)))
                ),
                {"ids": ids},
            )
        return ids

    def forget(self, ids: list[int]) -> None:
        self._held.difference_update(ids)

    def keep(self, ids: list[int]) -> None:
        """The transaction that was to delete these failed."""
        self._acked.extend(ids)

    async def room(self, timeout: float) -> bool:
        """Wait until the backlog is below its bound."""
        try:
            async with asyncio.timeout(timeout):
                while len(self._waiting) >= BACKLOG_LIMIT:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            return False
        return True

    async def drained(self, timeout: float) -> bool:
        """Wait until everything committed was acknowledged and deleted."""
        try:
            async with asyncio.timeout(timeout):
                while self._waiting or self._held:
                    await self._idle.wait()
                    self._idle.clear()
        except TimeoutError:
            return False
        return True

    async def run(self, bus: Bus) -> None:
        """Relay until cancelled; a BusError ends it (the projector makes the stream again)."""
        publisher = bus.publisher(STREAM, deadline=PUBLISH_DEADLINE_S)
        try:
            await self._skip_sent(bus)
            while True:
                if self._waiting:
                    await self._send(publisher)
                else:
                    await self._rest()
        finally:
            await publisher.close()

    async def _send(self, publisher: Publisher) -> None:
        chunk = [self._waiting[i] for i in range(min(CHUNK, len(self._waiting)))]
        messages = [
            Outgoing(row.subject, row.body, self._headers(row), row.msg_id) for row in chunk
        ]
        if len(chunk) >= BATCH_FROM:
            await publisher.publish_batch(messages)
        else:
            futures = [
                publisher.submit(m.subject, m.data, m.headers, msg_id=m.msg_id) for m in messages
            ]
            for result in await asyncio.gather(*futures, return_exceptions=True):
                if isinstance(result, TooLarge):
                    log.error("outbox.too_large", why=str(result))
                elif isinstance(result, BaseException):
                    raise result
        for row in chunk:
            self._waiting.popleft()
            self._acked.append(row.id)
        _published.inc(len(chunk))
        _pending.set(len(self._waiting))

    async def _rest(self) -> None:
        """Nothing to send: delete what was acked, look for rows of others, wait for a push."""
        self._wake.clear()
        try:
            async with asyncio.timeout(0.05 if self._acked else 1.0):
                await self._wake.wait()
                return
        except TimeoutError:
            pass
        try:
            async with asyncio.timeout(10), self._engine.begin() as conn:
                ids = await self.delete_acked(conn)
                if not ids:
                    await self._take_left(conn)
        except (sa.exc.SQLAlchemyError, OSError, TimeoutError) as error:
            log.warning("outbox.tidy_failed", why=type(error).__name__)
            return
        self.forget(ids)
        if not self._held:
            self._idle.set()

    async def _take_left(self, conn: AsyncConnection) -> None:
        box = self._tables.outbox
        query = sa.select(box).order_by(box.c.id).limit(BACKLOG_LIMIT)
        if self._held:
            query = query.where(box.c.id.not_in(self._held))
        result = await conn.execute(query)
        self.push([Row(r.id, r.subject, r.msg_id, dict(r.headers), r.body) for r in result])

    async def _skip_sent(self, bus: Bus) -> None:
        """Leave out the rows that the replica before us published without deleting them."""
        last: dict[str, int] = {}
        kept: deque[Row] = deque()
        for row in list(self._waiting):
            if row.subject not in last:
                message = await bus.last(STREAM, row.subject)
                header = message.headers.get(subjects.HEADER_OUTBOX, "") if message else ""
                instance, _, row_id = header.partition(":")
                last[row.subject] = int(row_id) if instance == self._instance else -1
            if row.id <= last[row.subject]:
                self._acked.append(row.id)
            else:
                kept.append(row)
        self._waiting = kept

    def _headers(self, row: Row) -> dict[str, str]:
        return {**row.headers, subjects.HEADER_OUTBOX: f"{self._instance}:{row.id}"}
