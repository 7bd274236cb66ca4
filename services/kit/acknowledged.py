"""How far the LB stream has acknowledged our decisions, and whether it still knows them.

A stream server that dies with its machine can come back without the last acknowledged messages,
under the same name and age. Whoever read them before is as it should be; the log is not. So the
place of the last acknowledged decision is kept (a row of `stream_offset`: sequence, and in `epoch`
the `Lb-Outbox` header of that message), and compared with the stream at every start and after every
reconnection. A tail that is lost is stated anew, as is a log that is lost.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from schema import subjects
from schema.tables import service_tables
from services.kit.bus import Bus, Gap
from services.kit.bus_types import StreamState

STREAM: Final = "LB"
MARK_ROW: Final = "LB (acknowledged)"


class Acknowledged:
    """The last acknowledged decision of one service."""

    def __init__(self, service: str) -> None:
        self._offset = service_tables(service).stream_offset
        self._seq = 0
        self._mark = ""
        self.created = ""  # of the stream that is published to

    async def load(self, conn: AsyncConnection) -> None:
        table = self._offset
        row = (await conn.execute(sa.select(table).where(table.c.stream == MARK_ROW))).one_or_none()
        self._seq, self._mark, self.created = (
            (row.seq, row.epoch, row.created) if row is not None else (0, "", "")
        )

    def note(self, seq: int, mark: str) -> None:
        """A message of ours was stored there, with this header."""
        if seq > self._seq:
            self._seq, self._mark = seq, mark

    def forget(self, created: str) -> None:
        """What follows is published to that stream, and nothing in it is known to be ours."""
        self._seq, self._mark, self.created = 0, "", created

    @property
    def values(self) -> tuple[int, str, str]:
        """Sequence, header and stream, for the statement that moves the offsets."""
        return self._seq, self._mark, self.created

    async def save(self, conn: AsyncConnection) -> None:
        table = self._offset
        await conn.execute(
            sa.update(table)
            .where(table.c.stream == MARK_ROW)
            .values(seq=self._seq, epoch=self._mark, created=self.created)
        )

    async def lost(self, bus: Bus, state: StreamState) -> bool:
        """Whether the stream, which is the one we published to, has lost what it acknowledged."""
        if not self._seq or self.created != state.created or self._seq < state.first_seq:
            return False
        if state.last_seq < self._seq:
            return True
        there = await bus.get(STREAM, self._seq)  # none: somebody deleted that one message
        return there is not None and there.headers.get(subjects.HEADER_OUTBOX, "") != self._mark

    async def check(self, bus: Bus) -> None:
        """Raises Gap when the tail is lost, BusError when that can't be told."""
        state = await bus.stream_state(STREAM)
        if await self.lost(bus, state):
            detail = f"ends at {state.last_seq} without it"
            raise Gap("tail_lost", STREAM, f"acknowledged {self._seq}, but the stream {detail}")
