"""Rows of the applier: documents of owners and pools, how each write goes, and nothing derived.

What can be told from others is not stored: who holds an address now follows from the leases in the
owners' documents. Rows are written in one order, so two transactions never wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.ext.asyncio import AsyncConnection

from schema.tables import applier as tables
from services.applier.core import State, Unsaved
from services.applier.documents import Bookings, ImportDoc, OwnerDoc, PoolDoc
from services.applier.targets import Key, Target

CHUNK = 500  # rows of one statement


async def load(conn: AsyncConnection, state: State) -> None:
    """Fill an empty state with what is stored."""
    for row in await conn.execute(sa.select(tables.form)):
        form = state.forms[row.plural]
        state.forms[row.plural] = form._replace(pruned=frozenset(row.pruned))
    async for row in await conn.stream(sa.select(tables.owner)):
        doc = msgspec.convert(row.doc, OwnerDoc)
        doc.generation, doc.applied = row.generation, row.applied
        state.owners[doc.uid] = doc
        for lease in doc.leases:
            book = state.books.setdefault(lease.pool, Bookings())
            book.live[lease.address] = (*book.live.get(lease.address, ()), doc.uid)
    for row in await conn.execute(sa.select(tables.pool.c.doc)):
        pool = msgspec.convert(row.doc, PoolDoc)
        state.pools[pool.name] = pool
    for row in await conn.execute(sa.select(tables.pool_import.c.doc)):
        imported = msgspec.convert(row.doc, ImportDoc)
        state.imports[imported.uid] = imported
    query = sa.select(tables.history).order_by(tables.history.c.seq)
    for row in await conn.execute(query):
        state.books.setdefault(row.pool, Bookings()).history[row.address] = row.holder
    async for row in await conn.stream(sa.select(tables.target)):
        key = Key(row.plural, row.namespace, row.name, row.part)
        state.targets[key] = msgspec.convert(row.doc, Target)


async def save(conn: AsyncConnection, state: State, unsaved: Unsaved) -> None:
    """Store what changed since the last save."""
    await _save_owners(conn, state, sorted(unsaved.owners))
    await _save_generations(conn, state, sorted(unsaved.bumped - unsaved.owners))
    await _save_docs(conn, tables.pool, state.pools, sorted(unsaved.pools))
    await _save_docs(conn, tables.pool_import, state.imports, sorted(unsaved.imports))
    await _save_history(conn, state, sorted(unsaved.history))
    await _save_targets(conn, state, sorted(unsaved.targets))
    forms = [
        {"plural": plural, "pruned": sorted(state.forms[plural].pruned)}
        for plural in sorted(unsaved.forms)
    ]
    await _upsert(conn, tables.form, forms)


async def _save_owners(conn: AsyncConnection, state: State, uids: list[str]) -> None:
    docs = [state.owners[uid] for uid in uids if uid in state.owners]
    rows = [
        {
            "uid": doc.uid,
            "plural": doc.plural,
            "namespace": doc.namespace,
            "name": doc.name,
            "generation": doc.generation,
            "applied": doc.applied,
            "doc": doc,
        }
        for doc in docs
    ]
    await _upsert(conn, tables.owner, rows)
    gone = [uid for uid in uids if uid not in state.owners]
    if gone:
        await conn.execute(
            sa.delete(tables.owner).where(tables.owner.c.uid == sa.bindparam("gone_uid")),
            [{"gone_uid": uid} for uid in gone],
        )


async def _save_generations(conn: AsyncConnection, state: State, uids: list[str]) -> None:
    docs = [state.owners[uid] for uid in uids if uid in state.owners]
    if docs:
        table = tables.owner
        await conn.execute(
            sa.update(table)
            .where(table.c.uid == sa.bindparam("u"))
            .values(generation=sa.bindparam("g"), applied=sa.bindparam("a")),
            [{"u": doc.uid, "g": doc.generation, "a": doc.applied} for doc in docs],
        )


async def _save_docs(
    conn: AsyncConnection, table: sa.Table, docs: Mapping[str, object], names: list[str]
) -> None:
    """Rows of a key and a document; what is not there any more is deleted."""
    (key,) = table.primary_key
    await _upsert(conn, table, [{key.name: n, "doc": docs[n]} for n in names if n in docs])
    gone = [{"gone": name} for name in names if name not in docs]
    if gone:
        await conn.execute(sa.delete(table).where(key == sa.bindparam("gone")), gone)


async def _save_history(conn: AsyncConnection, state: State, places: list[tuple[str, str]]) -> None:
    """An address that was released again moves to the end: its row is made anew."""
    table = tables.history
    if not places:
        return
    await conn.execute(
        sa.delete(table).where(
            table.c.pool == sa.bindparam("p"), table.c.address == sa.bindparam("a")
        ),
        [{"p": pool, "a": address} for pool, address in places],
    )
    rows = [
        {"pool": pool, "address": address, "holder": holder}
        for pool, address, holder in _released(state, places)
    ]
    for chunk in _chunks(rows):
        await conn.execute(sa.insert(table), chunk)


def _released(state: State, places: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    """The places that are in a history, in its order."""
    wanted: dict[str, set[str]] = {}
    for pool, address in places:
        wanted.setdefault(pool, set()).add(address)
    for pool, addresses in wanted.items():
        history = state.books[pool].history if pool in state.books else {}
        for address, holder in history.items():
            if address in addresses:
                yield pool, address, holder


async def _save_targets(conn: AsyncConnection, state: State, keys: list[Key]) -> None:
    table = tables.target
    rows = [
        {**key._asdict(), "attempts": target.attempts, "next_at": target.next_at, "doc": target}
        for key in keys
        if (target := state.targets.get(key)) is not None
    ]
    await _upsert(conn, table, rows)
    gone = [
        {f"k_{field}": value for field, value in key._asdict().items()}
        for key in keys
        if key not in state.targets
    ]
    if gone:
        same = [table.c[field] == sa.bindparam(f"k_{field}") for field in Key._fields]
        await conn.execute(sa.delete(table).where(*same), gone)


async def _upsert(conn: AsyncConnection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    insert = pg.insert(table)
    keys = [column.name for column in table.primary_key]
    others = {column.name: insert.excluded[column.name] for column in table.c}
    for key in keys:
        del others[key]
    statement = insert.on_conflict_do_update(index_elements=keys, set_=others)
    for chunk in _chunks(rows):
        await conn.execute(statement, chunk)


def _chunks(rows: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    for start in range(0, len(rows), CHUNK):
        yield rows[start : start + CHUNK]
