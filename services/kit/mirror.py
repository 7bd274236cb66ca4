"""The facts that a service follows, in memory and in a table of the service.

`SyncMarks` knows which kinds have been listed completely in the current epoch; before that nothing
may be decided about a kind, least of all a release. `Mirror` adds the last view of each object and
turns facts into changes: duplicates and replays change nothing, a new uid under an old name is a
deletion and a creation, and objects that a new epoch did not show are swept when its list is
complete. A break in the chain of sequences of one object is a `Hole`: the caller reads the
compacted log again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.ext.asyncio import AsyncConnection

from schema import events, objects
from schema.subjects import ObjectRef
from schema.tables import service_tables
from services.kit.records import Hole, Record

View = objects.AnyObject


class Change(NamedTuple):
    """One object that appeared (old None), changed, or went away (new None)."""

    ref: ObjectRef
    old: Any
    new: Any
    uid: str


class SyncMarks:
    """Which kinds are complete in the epoch that the KUBE stream is in."""

    def __init__(self, service: str) -> None:
        self._tables = service_tables(service)
        self.epoch = ""
        self._marks: dict[str, tuple[str, int, bool]] = {}
        self._dirty: set[str] = set()

    async def load(self, conn: AsyncConnection) -> None:
        offset = self._tables.stream_offset
        self.epoch = (
            await conn.scalar(sa.select(offset.c.epoch).where(offset.c.stream == "KUBE")) or ""
        )
        result = await conn.execute(sa.select(self._tables.sync_mark))
        self._marks = {row.plural: (row.epoch, row.seq, row.absent) for row in result}
        self._dirty.clear()

    async def save(self, conn: AsyncConnection) -> None:
        if not self._dirty:
            return
        mark = self._tables.sync_mark
        insert = pg.insert(mark)
        upsert = insert.on_conflict_do_update(
            index_elements=["plural"],
            set_={name: insert.excluded[name] for name in ("epoch", "seq", "absent")},
        )
        values = []
        for plural in sorted(self._dirty):
            epoch, seq, absent = self._marks[plural]
            values.append({"plural": plural, "epoch": epoch, "seq": seq, "absent": absent})
        await conn.execute(upsert, values)
        self._dirty.clear()

    def observe(self, record: Record) -> str | None:
        """Take an epoch or sync mark; returns the plural whose list has just become complete."""
        event = record.event
        if record.stream != "KUBE":
            return None
        self.epoch = next_epoch(self.epoch, record)
        if isinstance(event, events.SyncFinished) and event.epoch == self.epoch:
            self._marks[event.plural] = (event.epoch, record.seq, event.absent)
            self._dirty.add(event.plural)
            return event.plural
        return None

    def synced(self, plural: str) -> bool:
        mark = self._marks.get(plural)
        return mark is not None and mark[0] == self.epoch and self.epoch != ""


def next_epoch(current: str, record: Record) -> str:
    """The epoch after a record: only a mark of a new epoch moves it, a straggler does not."""
    event = record.event
    if type(event) is events.EpochStarted:  # isinstance is ten times slower, and usually wrong
        return event.epoch
    return current or record.epoch


class _Row(msgspec.Struct):
    view: Any
    uid: str
    epoch: str
    seq: int


class Mirror:
    """The last view of each object of some kinds.

    `plurals` names the kinds; as a mapping it gives for each a function that reduces the view (to
    one of the same type) to what the service needs.
    """

    def __init__(
        self,
        table: sa.Table,
        plurals: Mapping[str, Callable[[Any], Any]] | Iterable[str],
    ) -> None:
        self._table = table
        if isinstance(plurals, Mapping):
            self._reduce: dict[str, Callable[[Any], Any] | None] = dict(plurals)
        else:
            self._reduce = dict.fromkeys(plurals)
        self.marks = SyncMarks(table.schema or "")
        self._rows: dict[str, dict[ObjectRef, _Row]] = {plural: {} for plural in self._reduce}
        self._dirty: set[ObjectRef] = set()

    # --- storage ---

    async def load(self, conn: AsyncConnection) -> None:
        await self.marks.load(conn)
        self._dirty.clear()
        for rows in self._rows.values():
            rows.clear()
        result = await conn.stream(sa.select(self._table))
        async for row in result:
            if row.plural in self._rows:
                ref = ObjectRef(row.plural, row.namespace, row.name)
                view = msgspec.convert(row.view, objects.VIEWS[row.plural])
                self._rows[row.plural][ref] = _Row(view, row.uid, row.epoch, row.seq)

    async def save(self, conn: AsyncConnection) -> None:
        await self.marks.save(conn)
        if not self._dirty:
            return
        upserts, deletes = [], []
        for ref in sorted(self._dirty):  # one order for everybody: no deadlocks
            row = self._rows[ref.plural].get(ref)
            if row is None:
                deletes.append({"p": ref.plural, "ns": ref.namespace, "n": ref.name})
            else:
                upserts.append(
                    {**ref._asdict(), "uid": row.uid, "epoch": row.epoch, "seq": row.seq}
                    | {"view": row.view}
                )
        table = self._table
        if upserts:
            insert = pg.insert(table)
            await conn.execute(
                insert.on_conflict_do_update(
                    index_elements=["plural", "namespace", "name"],
                    set_={n: insert.excluded[n] for n in ("uid", "epoch", "seq", "view")},
                ),
                upserts,
            )
        if deletes:
            await conn.execute(
                sa.delete(table).where(
                    table.c.plural == sa.bindparam("p"),
                    table.c.namespace == sa.bindparam("ns"),
                    table.c.name == sa.bindparam("n"),
                ),
                deletes,
            )
        self._dirty.clear()

    # --- facts ---

    def observe(self, record: Record) -> list[Change]:
        """Take one record of the KUBE stream; raises Hole when a fact of the object is missing."""
        finished = self.marks.observe(record)
        if finished is not None:
            return self._sweep(finished) if finished in self._rows else []
        ref = events.fact_ref(record.event)
        if ref is None or ref.plural not in self._rows:
            return []
        rows = self._rows[ref.plural]
        row = rows.get(ref)
        if row is not None and row.epoch == record.epoch:
            if record.seq <= row.seq:
                return []
            if 0 <= record.expected != row.seq and not record.snapshot:
                raise Hole(ref, expected=record.expected, known=row.seq)
        event = record.event
        if isinstance(event, events.ObjectGone):
            return self._gone(ref, row, event.uid, record)
        if isinstance(event, events.ObjectUnfit):
            self._touch(ref, row, record)
            return []
        return self._seen(ref, row, event.object, record)  # type: ignore[union-attr]

    def _seen(self, ref: ObjectRef, row: _Row | None, view: Any, record: Record) -> list[Change]:
        reduce = self._reduce[ref.plural]
        if reduce is not None:
            view = reduce(view)
        uid = view.metadata.uid
        self._rows[ref.plural][ref] = _Row(view, uid, record.epoch, record.seq)
        self._dirty.add(ref)
        if row is None:
            return [Change(ref, None, view, uid)]
        if row.uid != uid:
            return [Change(ref, row.view, None, row.uid), Change(ref, None, view, uid)]
        if row.view == view:
            return []
        return [Change(ref, row.view, view, uid)]

    def _gone(self, ref: ObjectRef, row: _Row | None, uid: str, record: Record) -> list[Change]:
        if row is None:
            return []
        if row.uid != uid:
            self._touch(ref, row, record)
            return []
        del self._rows[ref.plural][ref]
        self._dirty.add(ref)
        return [Change(ref, row.view, None, row.uid)]

    def _touch(self, ref: ObjectRef, row: _Row | None, record: Record) -> None:
        if row is not None:
            row.epoch, row.seq = record.epoch, record.seq
            self._dirty.add(ref)

    def _sweep(self, plural: str) -> list[Change]:
        rows = self._rows[plural]
        stale = sorted(ref for ref, row in rows.items() if row.epoch != self.marks.epoch)
        changes = [Change(ref, rows[ref].view, None, rows[ref].uid) for ref in stale]
        for ref in stale:
            del rows[ref]
            self._dirty.add(ref)
        return changes

    # --- questions ---

    def get(self, ref: ObjectRef) -> Any:
        row = self._rows[ref.plural].get(ref)
        return None if row is None else row.view

    def all(self, plural: str) -> Iterator[tuple[ObjectRef, Any]]:
        for ref, row in self._rows[plural].items():
            yield ref, row.view

    def known(self) -> list[tuple[ObjectRef, str]]:
        """Every object held, with its uid: what a re-read of the log is compared with."""
        return [(ref, row.uid) for rows in self._rows.values() for ref, row in rows.items()]

    def synced(self, plural: str) -> bool:
        return self.marks.synced(plural)
