"""Questions to the ledger: who held what when, why an owner has what it has, what an edit would do.

Plain functions over a connection, for whoever shows the answers. They read and never write (but
for `forget_closed`, which ends the retention); a simulation decides on a state of its own, which is
thrown away.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from schema import addresses, events, objects
from schema.pools import PoolError, read_plan, read_quotas
from schema.tables import allocator as tables
from services.allocator import rows, store
from services.allocator.core import Rules, State, decide
from services.allocator.core.place import OUTSIDE


class LeaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the ledger. `until` None: it holds now."""

    id: str
    plural: str
    namespace: str
    name: str
    uid: str
    address: str
    pool: str
    since: datetime
    until: datetime | None
    rule: str
    adopted: bool
    sharing_key: str
    cause: str
    release_reason: str
    release_cause: str


class Considered(msgspec.Struct, frozen=True, kw_only=True):
    pool: str
    reason: str
    message: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why an owner has what it has: its request, its leases with their rules, what stands against
    the rest, and its place among those who wait for the same."""

    plural: str
    namespace: str
    name: str
    uid: str
    phase: str
    request: dict[str, Any]
    leases: list[LeaseRow]
    history: list[LeaseRow]
    reason: str
    message: str
    considered: list[Considered]
    kept: str
    ahead: int  # owners that wait and asked earlier


class PoolUsage(msgspec.Struct, frozen=True, kw_only=True):
    pool: str
    ready: bool
    problem: str
    total: int
    held: int
    holders: list[LeaseRow]
    waiting: list[str]
    remembered: dict[str, str]  # free address -> who had it


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """What an edited pool would do. Nobody ever moves because of an edit: who is outside of the
    new ranges keeps the address."""

    pool: str
    problem: str  # why the pool could not be used as it is written
    total: int
    available: int
    stranded: dict[str, str]  # owner -> address that would be outside
    woken: dict[str, str]  # owner -> address that it would get
    waiting: dict[str, str]  # owner -> reason, of those who would wait for this pool


_lease = tables.lease
_COLUMNS = (
    _lease.c.id,
    _lease.c.plural,
    _lease.c.namespace,
    _lease.c.name,
    _lease.c.uid,
    sa.func.host(_lease.c.address).label("address"),
    _lease.c.pool,
    sa.func.lower(_lease.c.during).label("since"),
    sa.func.upper(_lease.c.during).label("until"),
    _lease.c.rule,
    _lease.c.adopted,
    _lease.c.sharing_key,
    _lease.c.cause,
    _lease.c.release_reason,
    _lease.c.release_cause,
)


async def _leases(conn: AsyncConnection, *conditions: sa.ColumnElement[bool]) -> list[LeaseRow]:
    query = sa.select(*_COLUMNS).where(*conditions)
    result = await conn.execute(query.order_by(_lease.c.address, sa.func.lower(_lease.c.during)))
    return [LeaseRow(**row) for row in result.mappings()]


async def leases_at(conn: AsyncConnection, at: datetime, *, pool: str = "") -> list[LeaseRow]:
    """Every lease that held at that moment, by address."""
    begun = sa.func.lower(_lease.c.during) <= at
    upper = sa.func.upper(_lease.c.during)
    held = sa.or_(sa.func.upper_inf(_lease.c.during), upper > at)
    return await _leases(conn, begun, held, *([_lease.c.pool == pool] if pool else []))


async def leases_of_address(conn: AsyncConnection, address: str) -> list[LeaseRow]:
    """The history of one address, in any spelling; AddressError for what is none."""
    text = addresses.text(addresses.parse(address))
    return await _leases(conn, _lease.c.address == sa.cast(text, _lease.c.address.type))


async def leases_of_owner(
    conn: AsyncConnection, plural: str, namespace: str, name: str
) -> list[LeaseRow]:
    """The history of one name, whatever uids it had."""
    found = await _leases(
        conn,
        _lease.c.plural == plural,
        _lease.c.namespace == namespace,
        _lease.c.name == name,
    )
    return sorted(found, key=lambda row: row.since)


async def explain_owner(
    conn: AsyncConnection, plural: str, namespace: str, name: str
) -> Explanation | None:
    """Why the owner has what it has; None for one that asks for nothing."""
    owner = tables.owner
    query = (
        sa.select(owner)
        .where(owner.c.plural == plural, owner.c.namespace == namespace, owner.c.name == name)
        .order_by(owner.c.gone_at.desc().nulls_first())
    )
    row = (await conn.execute(query)).first()
    if row is None:
        return None
    history = await leases_of_owner(conn, plural, namespace, name)
    refusal = rows.read_refusal(row.refusal)
    ahead = sa.select(sa.func.count()).where(
        owner.c.phase == "waiting", owner.c.ticket < row.ticket, owner.c.ticket > 0
    )
    request = rows.read_request(row.request)._asdict()
    request["addresses"] = [addresses.text(address) for address in request["addresses"]]
    return Explanation(
        plural=plural,
        namespace=namespace,
        name=name,
        uid=row.uid,
        phase=row.phase,
        request={key: value for key, value in request.items() if value},
        leases=[lease for lease in history if lease.uid == row.uid and lease.until is None],
        history=history,
        reason=refusal.reason if refusal else "",
        message=refusal.message if refusal else "",
        considered=[
            Considered(pool=pool, reason=reason, message=message)
            for pool, reason, message in (refusal.considered if refusal else ())
        ],
        kept=refusal.kept if refusal else "",
        ahead=int(await conn.scalar(ahead) or 0) if row.ticket else 0,
    )


async def pool_usage(conn: AsyncConnection, name: str) -> PoolUsage | None:
    """Who holds addresses of a pool, who waits for it, who had what is free; None: no such pool."""
    row = (await conn.execute(sa.select(tables.pool).where(tables.pool.c.name == name))).first()
    if row is None:
        return None
    view = msgspec.convert(row.view, objects.IPPool)
    problem, total = _problem(view)
    if problem and row.good:
        total = read_plan(msgspec.convert(row.good, objects.IPPool)).total
    owner, memo = tables.owner, tables.memo
    waiting = (
        sa.select(owner.c.plural, owner.c.namespace, owner.c.name, owner.c.refusal)
        .where(owner.c.phase == "waiting", owner.c.gone_at.is_(None))
        .order_by(owner.c.ticket)
    )
    memos = (
        sa.select(sa.func.host(memo.c.address), memo.c.key)
        .where(memo.c.pool == name)
        .order_by(memo.c.order)
    )
    holders = await _leases(conn, _lease.c.pool == name, sa.func.upper_inf(_lease.c.during))
    return PoolUsage(
        pool=name,
        ready=not problem,
        problem=problem,
        total=total,
        held=len({lease.address for lease in holders}),
        holders=holders,
        waiting=[
            f"{w.plural}/{w.namespace}/{w.name}"
            for w in await conn.execute(waiting)
            if (refusal := rows.read_refusal(w.refusal)) is not None and refusal.pool == name
        ],
        remembered={row[0]: row[1] for row in await conn.execute(memos)},
    )


def _problem(view: objects.IPPool) -> tuple[str, int]:
    try:
        plan = read_plan(view)
        read_quotas(view)
    except PoolError as error:
        return str(error), 0
    return "", plan.total


async def simulate(conn: AsyncConnection, edited: objects.IPPool, rules: Rules) -> Simulation:
    """What applying this pool would do, by the very decisions that would be taken."""
    state = State(rules)
    await store.load(conn, state)
    name = edited.metadata.name
    known = state.pools.get(name)
    uid = known.uid if known is not None else "simulated"
    metadata = msgspec.structs.replace(edited.metadata, uid=uid)
    pool = msgspec.structs.replace(edited, metadata=metadata, status=None)
    fact = events.IPPoolSeen(at=state.now, object=pool)
    decisions = decide(state, fact, epoch=state.epoch, seq=0)
    stranded, woken = {}, {}
    for event in decisions:
        match event:
            case events.LeaseRefused() if event.reason == OUTSIDE:
                stranded[_name(event.owner)] = event.kept
            case events.LeaseGranted():
                woken[_name(event.owner)] = event.address
    after = state.pools[name]
    return Simulation(
        pool=name,
        problem=after.problem,
        total=after.total,
        available=max(0, state.available(after)),
        stranded=stranded,
        woken=woken,
        waiting={
            f"{owner.plural}/{owner.key}": owner.refusal.reason
            for owner in sorted(state.all_owners(), key=lambda owner: owner.ticket)
            if owner.ticket and owner.refusal is not None and owner.refusal.pool == name
        },
    )


def _name(owner: events.Owner) -> str:
    return f"{owner.plural}/{owner.namespace}/{owner.name}"


async def forget_closed(conn: AsyncConnection, older_than: timedelta, limit: int = 10_000) -> int:
    """Delete leases that ended so long ago, some at a time; returns how many."""
    ended = sa.func.upper(_lease.c.during)
    before = datetime.now(UTC) - older_than
    some = sa.select(_lease.c.id).where(~sa.func.upper_inf(_lease.c.during), ended < before)
    done = await conn.execute(sa.delete(_lease).where(_lease.c.id.in_(some.limit(limit))))
    return done.rowcount
