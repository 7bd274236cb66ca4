"""From the allocator's rows to its memory."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from schema import addresses, objects
from schema.tables import allocator as tables
from schema.tables import service_tables
from services.allocator import rows
from services.allocator.core import restore
from services.allocator.core.model import Lease, Owner, Pool, Request
from services.allocator.core.space import Memo
from services.allocator.core.state import State

_CHUNK = 20_000


async def load(conn: AsyncConnection, state: State) -> None:
    """Fill an empty state from the rows."""
    await _load_clock(conn, state)
    for row in await conn.execute(sa.select(tables.project)):
        state.projects[row.namespace] = (row.project, row.uid, row.epoch)
    for row in await conn.execute(sa.select(tables.pool).order_by(tables.pool.c.name)):
        view = msgspec.convert(row.view, objects.IPPool)
        good = msgspec.convert(row.good, objects.IPPool) if row.good else None
        pool = Pool(row.name, row.uid, view, row.epoch, row.generation, good=good)
        if row.last_allocated:
            pool.last_allocated = addresses.parse(row.last_allocated)
        pool.claims, pool.history = row.claims, row.history
        restore.pool(state, pool)
    await _load_owners(conn, state)
    await _load_leases(conn, state)
    await _load_memos(conn, state)
    offset = service_tables("allocator").stream_offset
    last = await conn.scalar(sa.select(offset.c.seq).where(offset.c.stream == "KUBE"))
    restore.finish(state, last or 0)


async def _load_clock(conn: AsyncConnection, state: State) -> None:
    row = (await conn.execute(sa.select(tables.clock))).one_or_none()
    if row is not None:
        state.epoch, state.now, state.serial = row.epoch, row.now, row.serial
        state.imported = row.imported
        if row.legacy:
            state.legacy = msgspec.json.decode(row.legacy, type=tuple[str, dict[str, str]])
    for mark in await conn.execute(sa.select(service_tables("allocator").sync_mark)):
        state.synced[mark.plural] = (mark.epoch, mark.seq, mark.absent)


async def _load_owners(conn: AsyncConnection, state: State) -> None:
    requests: dict[str, Request] = {}
    words: dict[str, str] = {}
    columns = [tables.owner.c[name] for name in rows.OWNER_COLUMNS]
    result = await conn.stream(sa.select(*columns).execution_options(yield_per=_CHUNK))
    async for part in result.partitions():
        for (
            plural, uid, namespace, name, epoch, generation, phase, ticket, request,
            refusal, claims, created, gone_at, gone_how, condemned,
        ) in part:  # fmt: skip
            known = requests.get(request)
            if known is None:
                known = requests[request] = state.intern(rows.read_request(request))
            plural, epoch = words.setdefault(plural, plural), words.setdefault(epoch, epoch)
            owner = Owner(plural, f"{namespace}/{name}", uid, known, epoch, generation)
            owner.phase, owner.ticket = words.setdefault(phase, phase), ticket
            owner.stored = True
            if refusal or claims or created or gone_at is not None or condemned:
                owner.note(
                    refusal=rows.read_refusal(refusal),
                    claims=rows.read_claims(claims),
                    created=created,
                    gone_at=gone_at,
                    gone_how=gone_how,
                    condemned=condemned,
                )
            restore.owner(state, owner)


async def _load_leases(conn: AsyncConnection, state: State) -> None:
    lease = tables.lease
    pools: dict[str, str] = {}
    # Two questions, each answered by its own partial index however long the history is.
    for shared in (lease.c.sharing_key == "", lease.c.sharing_key != ""):
        query = sa.select(
            lease.c.id,
            lease.c.plural,
            lease.c.namespace,
            lease.c.name,
            lease.c.uid,
            sa.func.host(lease.c.address),
            lease.c.pool,
            lease.c.sharing_key,
            sa.cast(lease.c.slots, sa.Text),
            lease.c.retiring,
        ).where(sa.func.upper_inf(lease.c.during), shared)
        result = await conn.stream(query.execution_options(yield_per=_CHUNK))
        async for part in result.partitions():
            for (
                lease_id, plural, namespace, name, uid, address, pool, share, slots, retiring,
            ) in part:  # fmt: skip
                owner = restore.holder(state, plural, f"{namespace}/{name}", uid)
                number = addresses.parse_canonical(address)
                held = Lease.of(lease_id, owner, number, pools.setdefault(pool, pool))
                covers = rows.read_slots(slots) if share else ()
                restore.lease(state, held, share, covers, retiring)


async def _load_memos(conn: AsyncConnection, state: State) -> None:
    memo = tables.memo
    columns = (
        sa.func.host(memo.c.address),
        memo.c.pool,
        memo.c.plural,
        memo.c.key,
        memo.c.released,
        memo.c.order,
    )
    query = sa.select(*columns).order_by(memo.c.order).execution_options(yield_per=_CHUNK)
    result = await conn.stream(query)
    async for part in result.partitions():
        for address, pool, plural, key, released, order in part:
            number = addresses.parse_canonical(address)
            restore.memo(state, Memo(number, pool, plural, key, released, order))
