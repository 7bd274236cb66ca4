"""From the allocator's memory to its rows: what changed, in one transaction of the caller.

What is to be written is taken out of the memory at once, as statements, and written when its turn
comes: meanwhile the memory goes on. Leases end before new ones begin, so that an address may change
hands within one batch. New rows go in by COPY: it is several times faster than INSERT.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.ext.asyncio import AsyncConnection

from schema import addresses
from schema.tables import allocator as tables
from schema.tables import service_tables
from services.allocator import rows
from services.allocator.core.model import Owner
from services.allocator.core.state import State
from services.kit import direct
from services.kit.records import Saver


class Steps:
    """Statements with their values, in the order in which they are to run."""

    def __init__(self) -> None:
        self._steps: list[Callable[[AsyncConnection], Awaitable[object]]] = []

    async def run(self, conn: AsyncConnection) -> None:
        for step in self._steps:
            await step(conn)

    def execute(self, statement: sa.Executable, values: Any = None) -> None:
        self._steps.append(lambda conn: conn.execute(statement, values))

    def fetch(self, query: str, *values: object) -> None:
        self._steps.append(lambda conn: direct.fetch(conn, query, *values))

    def copy(self, table: sa.Table, columns: Sequence[str], lines: list[str]) -> None:
        self._steps.append(lambda conn: direct.copy_text(conn, table, columns, lines))


def take_changes(state: State) -> Saver:
    """What changed since the last load or take, as a function that writes it.

    Its transaction must have had a statement already: SQLAlchemy begins it with its first one. When
    it is not written, the state is of no more use.
    """
    steps = Steps()
    if state.changes:
        _take_clock(steps, state)
        _take_marks(steps, state)
        _take_owners(steps, state)
        _take_leases(steps, state)
        _take_memos(steps, state)
        _take_pools(steps, state)
        _take_projects(steps, state)
        state.forget_changes()
    return steps.run


_CLOCK = """
    insert into allocator.clock (one, epoch, now, serial, legacy, imported)
    values (true, $1, $2, $3, $4, $5)
    on conflict (one) do update set epoch = excluded.epoch, now = excluded.now,
        serial = excluded.serial, legacy = excluded.legacy, imported = excluded.imported
"""


def _take_clock(steps: Steps, state: State) -> None:
    values = (
        state.epoch,
        state.now,
        state.serial,
        msgspec.json.encode(state.legacy).decode() if state.legacy is not None else "",
        state.imported,
    )
    steps.fetch(_CLOCK, *values)


def _take_marks(steps: Steps, state: State) -> None:
    values = [
        {"plural": plural, "epoch": epoch, "seq": seq, "absent": absent}
        for plural, (epoch, seq, absent) in sorted(state.synced.items())
        if plural in state.changes.marks
    ]
    if values:
        statement = pg.insert(service_tables("allocator").sync_mark)
        names = ("epoch", "seq", "absent")
        steps.execute(
            statement.on_conflict_do_update(
                index_elements=["plural"],
                set_={name: statement.excluded[name] for name in names},
            ),
            values,
        )


_UPDATE_OWNERS = sa.text(
    """
    update allocator.owner o set
        epoch = n.epoch, generation = n.generation, phase = n.phase, ticket = n.ticket,
        request = n.request, refusal = n.refusal, claims = n.claims,
        gone_at = n.gone_at, gone_how = n.gone_how, condemned = n.condemned
    from unnest(
        cast(:plural as text[]), cast(:namespace as text[]), cast(:name as text[]),
        cast(:uid as text[]), cast(:epoch as text[]),
        cast(:generation as bigint[]), cast(:phase as text[]), cast(:ticket as bigint[]),
        cast(:request as text[]), cast(:refusal as text[]), cast(:claims as text[]),
        cast(:gone_at as timestamptz[]), cast(:gone_how as text[]),
        cast(:condemned as text[])
    ) as n (plural, namespace, name, uid, epoch, generation, phase, ticket, request, refusal,
            claims, gone_at, gone_how, condemned)
    where o.plural = n.plural and o.namespace = n.namespace and o.name = n.name
        and o.uid = n.uid
    """
)
_DELETE_OWNERS = sa.text(
    """
    delete from allocator.owner o
    using unnest(
        cast(:plural as text[]), cast(:namespace as text[]), cast(:name as text[]),
        cast(:uid as text[])
    ) as n (plural, namespace, name, uid)
    where o.plural = n.plural and o.namespace = n.namespace and o.name = n.name
        and o.uid = n.uid
    """
)


def _take_owners(steps: Steps, state: State) -> None:
    new: list[str] = []
    known: list[Owner] = []
    dead: list[Owner] = []
    for owner in state.changes.owners:
        if not state.knows(owner):
            if owner.stored:
                dead.append(owner)
        elif owner.stored:
            known.append(owner)
        else:
            new.append(rows.owner_line(owner))
            owner.stored = True
    if dead:
        steps.execute(_DELETE_OWNERS, _keys(dead))
    if known:
        known.sort(key=lambda owner: (owner.plural, owner.key, owner.uid))
        steps.execute(
            _UPDATE_OWNERS,
            {
                **_keys(known),
                "epoch": [o.epoch for o in known],
                "generation": [o.generation for o in known],
                "phase": [o.phase for o in known],
                "ticket": [o.ticket for o in known],
                "request": [rows.request_text(o.request) for o in known],
                "refusal": [rows.refusal_text(o.refusal) for o in known],
                "claims": [rows.claims_text(o.claims) for o in known],
                "gone_at": [o.gone_at for o in known],
                "gone_how": [o.gone_how for o in known],
                "condemned": [o.condemned for o in known],
            },
        )
    if new:
        steps.copy(tables.owner, rows.OWNER_COLUMNS, new)


def _keys(owners: list[Owner]) -> dict[str, list[str]]:
    parts = [owner.key.partition("/") for owner in owners]
    return {
        "plural": [owner.plural for owner in owners],
        "namespace": [part[0] for part in parts],
        "name": [part[2] for part in parts],
        "uid": [owner.uid for owner in owners],
    }


_CLOSE = sa.text(
    """
    update allocator.lease l set
        during = tstzrange(lower(l.during), n.at), release_reason = n.reason,
        release_cause = n.cause
    from unnest(
        cast(:id as text[]), cast(:at as timestamptz[]), cast(:reason as text[]),
        cast(:cause as text[])
    ) as n (id, at, reason, cause)
    where l.id = n.id
    """
)


_ALTER = sa.text(
    """
    update allocator.lease l set
        sharing_key = n.share, slots = cast(n.slots as int4multirange), retiring = n.retiring
    from unnest(
        cast(:id as text[]), cast(:share as text[]), cast(:slots as text[]),
        cast(:retiring as timestamptz[])
    ) as n (id, share, slots, retiring)
    where l.id = n.id
    """
)


def _take_leases(steps: Steps, state: State) -> None:
    closed = state.changes.closed
    if closed:
        steps.execute(
            _CLOSE,
            {
                "id": [c.id for c in closed],
                "at": [c.at for c in closed],
                "reason": [c.reason for c in closed],
                "cause": [c.cause for c in closed],
            },
        )
    altered = list(state.changes.altered)
    if altered:
        steps.execute(
            _ALTER,
            {
                "id": [lease.id for lease in altered],
                "share": [lease.share for lease in altered],
                "slots": [rows.slots_text(lease.slots) for lease in altered],
                "retiring": [lease.retiring for lease in altered],
            },
        )
    ended = state.changes.ended
    lines = [
        rows.lease_line(lease, granted, ended.get(lease))
        for lease, granted in state.changes.granted.items()
    ]
    if lines:
        steps.copy(tables.lease, rows.LEASE_COLUMNS, lines)


_UPSERT_MEMOS = sa.text(
    """
    insert into allocator.memo (pool, address, plural, key, released, "order")
    select pool, cast(address as inet), plural, key, released, n
    from unnest(
        cast(:pool as text[]), cast(:address as text[]), cast(:plural as text[]),
        cast(:key as text[]), cast(:released as timestamptz[]), cast(:order as bigint[])
    ) as m (pool, address, plural, key, released, n)
    on conflict (pool, address) do update set
        plural = excluded.plural, key = excluded.key, released = excluded.released,
        "order" = excluded."order"
    """
)
_DELETE_MEMOS = sa.text(
    """
    delete from allocator.memo m
    using unnest(cast(:pool as text[]), cast(:address as text[])) as n (pool, address)
    where m.pool = n.pool and m.address = cast(n.address as inet)
    """
)


def _take_memos(steps: Steps, state: State) -> None:
    ordered = sorted(state.changes.memos.items())
    gone = [key for key, memo in ordered if memo is None]
    kept = [memo for _, memo in ordered if memo is not None]
    if gone:
        steps.execute(
            _DELETE_MEMOS,
            {"pool": [p for p, _ in gone], "address": [addresses.text(a) for _, a in gone]},
        )
    if kept:
        steps.execute(
            _UPSERT_MEMOS,
            {
                "pool": [m.pool for m in kept],
                "address": [addresses.text(m.address) for m in kept],
                "plural": [m.plural for m in kept],
                "key": [m.key for m in kept],
                "released": [m.released for m in kept],
                "order": [m.order for m in kept],
            },
        )


_LAST_ALLOCATED = """
    update allocator.pool p set last_allocated = n.last
    from unnest($1::text[], $2::text[]) as n (name, last) where p.name = n.name
"""


def _take_pools(steps: Steps, state: State) -> None:
    changed = sorted(state.changes.pools)
    gone = [name for name in changed if name not in state.pools]
    if gone:
        steps.execute(sa.delete(tables.pool).where(tables.pool.c.name.in_(gone)))
    values = [
        {
            "name": pool.name,
            "uid": pool.uid,
            "epoch": pool.epoch,
            "generation": pool.generation,
            "view": msgspec.to_builtins(pool.view),
            "good": msgspec.to_builtins(pool.good) if pool.good is not None else sa.null(),
            "last_allocated": pool.last_text,
            "claims": dict(pool.claims),
            "history": dict(pool.history),
        }
        for name in changed
        if (pool := state.pools.get(name)) is not None
    ]
    if values:
        insert = pg.insert(tables.pool)
        names = [name for name in values[0] if name != "name"]
        steps.execute(
            insert.on_conflict_do_update(
                index_elements=["name"], set_={name: insert.excluded[name] for name in names}
            ),
            values,
        )
    used = [state.pools[name] for name in sorted(state.changes.used) if name in state.pools]
    if used:
        names, lasts = [pool.name for pool in used], [pool.last_text for pool in used]
        steps.fetch(_LAST_ALLOCATED, names, lasts)


def _take_projects(steps: Steps, state: State) -> None:
    changed = sorted(state.changes.projects)
    gone = [name for name in changed if name not in state.projects]
    if gone:
        steps.execute(sa.delete(tables.project).where(tables.project.c.namespace.in_(gone)))
    values = [
        dict(
            zip(
                ("namespace", "project", "uid", "epoch"), (name, *state.projects[name]), strict=True
            )
        )
        for name in changed
        if name in state.projects
    ]
    if values:
        insert = pg.insert(tables.project)
        names = ("project", "uid", "epoch")
        steps.execute(
            insert.on_conflict_do_update(
                index_elements=["namespace"], set_={name: insert.excluded[name] for name in names}
            ),
            values,
        )
