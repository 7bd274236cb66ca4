"""Rows of nrp_sync to state and back. No rules here.

`load` builds a fresh State inside the caller's snapshot; `save` writes what changed since, in one
fixed order. A request that was sent and has no outcome in its row is taken up again as such.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import datetime
from sys import intern
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from schema import events
from schema.tables import nrp_sync as t
from schema.tables import service_tables
from services.nrp_sync import core, egress, planning, rows
from services.nrp_sync.batches import Key
from services.nrp_sync.diff import Maybe, Seen
from services.nrp_sync.sources import LeftOut, Name, Refs, Source
from services.nrp_sync.state import (
    Ended,
    Policy,
    Request,
    State,
)

CHUNK = 500


# --- loading ------------------------------------------------------------------------------------


async def load(conn: AsyncConnection, policy: Policy) -> State:
    """Everything but the mirrored objects; the caller adds those, then calls `finish_load`."""
    tables = service_tables(t.SCHEMA)
    installation = await conn.scalar(sa.select(tables.instance.c.id))
    state = State(policy, str(installation))
    state.provided.desired.loading = True
    await _load_slices(conn, state)
    await _load_view(conn, state)
    for row in await conn.execute(sa.select(t.operation)):
        op = rows.operation_of(row)
        state.operations[op.key] = op
    for row in await conn.execute(sa.select(t.release)):
        state.releases[row.uid] = rows.release_of(row)
    for row in await conn.execute(sa.select(t.told)):
        image = msgspec.convert(row.image, events.ProviderStateChanged)
        state.told[row.plural, Name(row.namespace, row.name)] = image
    for row in await conn.execute(sa.select(t.quarantine)):
        state.quarantine[Key(row.location, row.address)] = rows.quarantined_of(row)
    return state


async def finish_load(conn: AsyncConnection, state: State, now: float, flying: set[int]) -> None:
    """Last: what the provider holds, and what is on its way to it.

    `flying`: requests that this very process is still waiting for.
    """
    egress.tidy(state, now)
    for key in sorted(state.operations):
        core.resume(state, state.operations[key])
    located = {row.location: row.sure for row in await conn.execute(sa.select(t.location))}
    held = [row async for row in _held(conn)]
    state.provided.fill(held, located)
    core.stirred(state, now)
    await _load_backoff(conn, state)
    state.read_wanted = True
    sent = sa.select(t.request).where(t.request.c.state == "sent").order_by(t.request.c.number)
    for row in await conn.execute(sent):
        request = rows.decode_request(row.body)
        known = all(part.key in state.operations for part in request.parts)
        if request.lane == "read" or not known:
            state.ended[request.number] = Ended("unknown", now, code="Interrupted")
            continue
        flight = planning.take_off(state, request, now)
        flight.steps.clear()
        if request.number not in flying:
            flight.orphaned_until = now + state.policy.orphan_grace


async def _load_backoff(conn: AsyncConnection, state: State) -> None:
    """Batches that got no answer before a restart are not sent without a wait after it."""
    r, retrying = t.request.c, state.policy.retrying
    query = sa.select(r.state, r.code, r.finished_at).where(r.lane == "locations")
    last = query.where(r.state != "sent").order_by(r.number.desc()).limit(retrying.tries)
    failed = list(
        itertools.takewhile(
            lambda row: row.state == "unknown" or row.code == "unreachable",
            await conn.execute(last),
        )
    )
    if failed:
        lane = state.lanes["locations"]
        lane.retries = len(failed)
        ended = rows.seconds(failed[0].finished_at)
        lane.retry_at = ended + retrying.backoff(lane.retries, "locations")


async def _held(conn: AsyncConnection) -> AsyncIterator[tuple[str, str, Seen]]:
    """What the provider holds, one row of the database for each location."""
    a, by = t.address.c, t.address.c.address
    query = (
        sa.select(
            a.location,
            sa.func.array_agg(pg.aggregate_order_by(a.address, by)).label("addresses"),
            sa.func.array_agg(
                pg.aggregate_order_by(sa.func.array_to_string(a.services, " "), by)
            ).label("services"),
            sa.func.array_agg(pg.aggregate_order_by(a.sure, by)).label("sure"),
        )
        .group_by(a.location)
        .order_by(a.location)
    )
    same: dict[str, Refs] = {}
    async for row in await conn.stream(query.execution_options(yield_per=CHUNK)):
        for address, text, sure in zip(row.addresses, row.services, row.sure, strict=True):
            refs = same.setdefault(text, tuple(text.split()))
            yield row.location, address, refs if sure else Maybe(refs)


async def _load_slices(conn: AsyncConnection, state: State) -> None:
    desired = state.provided.desired
    for row in await conn.execute(sa.select(t.slice_)):
        name = Name(row.namespace, row.name)
        service = Name(row.namespace, row.service) if row.service else None
        source = Source(
            name=name,
            uid=row.uid,
            service=service,
            service_uid=row.service_uid,
            left_out=LeftOut(*row.left_out),
            epoch=intern(row.epoch),
            seq=row.seq,
        )
        desired.hold(source)
    e = t.endpoint.c
    query = sa.select(
        e.namespace,
        e.slice,
        sa.func.array_agg(e.address).label("addresses"),
        sa.func.array_agg(e.node).label("nodes"),
    ).group_by(e.namespace, e.slice)
    async for row in await conn.stream(query.execution_options(yield_per=CHUNK)):
        name = Name(row.namespace, row.slice)
        for address, node in zip(row.addresses, row.nodes, strict=True):
            desired.restore(name, address, node)


async def _load_view(conn: AsyncConnection, state: State) -> None:
    row = (await conn.execute(sa.select(t.view))).one_or_none()
    if row is None:
        return
    state.read_at = rows.seconds(row.read_at)
    state.gate_until = rows.seconds(row.gate_until)
    state.last_number = row.last_number
    state.drift_found = row.drift_found


async def repair_asked_at(engine: AsyncEngine) -> datetime | None:
    """When somebody last asked for a repair."""
    async with engine.connect() as conn:
        asked: datetime | None = await conn.scalar(sa.select(t.view.c.repair_asked_at))
        return asked


# --- saving -------------------------------------------------------------------------------------


async def save(
    conn: AsyncConnection,
    state: State,
    *,
    slices: set[Name],
    requests: Sequence[Request],
    keep_requests: int,
) -> None:
    """Write what changed. `slices`: whose row changed; `requests`: the new ones."""
    await _save_slices(conn, state, slices)
    await _save_operations(conn, state)
    await _save_held(conn, state)
    await _save_quarantine(conn, state)
    await _save_releases(conn, state)
    await _save_told(conn, state)
    await _save_requests(conn, state, requests, keep_requests)
    if requests or state.dirty_view:
        await _upsert(
            conn,
            t.view,
            [
                {
                    "one": True,
                    "read_at": rows.moment(state.read_at),
                    "gate_until": rows.moment(state.gate_until),
                    "last_number": state.last_number,
                    "drift_found": state.drift_found,
                }
            ],
        )
        state.dirty_view = False


async def _save_slices(conn: AsyncConnection, state: State, slices: set[Name]) -> None:
    desired = state.provided.desired
    found, gone = [], []
    for name in sorted(slices):
        source = desired.slices.get(name)
        if source is None:
            gone.append({"namespace": name.namespace, "name": name.name})
        else:
            found.append(rows.slice_row(source))
    await _upsert(conn, t.slice_, found)
    await _delete(conn, t.slice_, gone)
    found, gone = [], []
    for name, address in sorted(desired.changed_rows):
        source = desired.slices.get(name)
        node = source.endpoints.get(address) if source is not None else None
        key = {"namespace": name.namespace, "slice": name.name, "address": address}
        if node is None:
            gone.append(key)
        else:
            found.append({**key, "node": node})
    await _upsert(conn, t.endpoint, found)
    await _delete(conn, t.endpoint, gone)
    desired.changed_rows.clear()


async def _save_operations(conn: AsyncConnection, state: State) -> None:
    found, gone = [], []
    for key in sorted(state.dirty_ops):
        op = state.operations.get(key)
        if op is None:
            gone.append({"kind": key[0], "identity": key[1]})
        else:
            found.append(rows.operation_row(op))
    await _upsert(conn, t.operation, found)
    await _delete(conn, t.operation, gone)
    state.dirty_ops.clear()


async def _save_held(conn: AsyncConnection, state: State) -> None:
    provided = state.provided
    found, gone = [], []
    for location, address in sorted(provided.dirty):
        seen = provided.seen(location, address)
        if not seen:
            gone.append({"location": location, "address": address})
            continue
        sure = not isinstance(seen, Maybe)
        services = list(seen.refs if isinstance(seen, Maybe) else seen)
        found.append({"location": location, "address": address, "services": services, "sure": sure})
    await _upsert(conn, t.address, found)
    await _delete(conn, t.address, gone)
    provided.dirty.clear()
    found, gone = [], []
    for location in sorted(provided.dirty_locations):
        sure_there = provided.located.get(location)
        if sure_there is None:
            gone.append({"location": location})
        else:
            found.append({"location": location, "sure": sure_there})
    await _upsert(conn, t.location, found)
    await _delete(conn, t.location, gone)
    provided.dirty_locations.clear()


async def _save_quarantine(conn: AsyncConnection, state: State) -> None:
    found, gone = [], []
    for key in sorted(state.dirty_quarantine):
        kept = state.quarantine.get(key)
        if kept is None:
            gone.append(key._asdict())
        else:
            found.append(rows.quarantine_row(key, kept))
    await _upsert(conn, t.quarantine, found)
    await _delete(conn, t.quarantine, gone)
    state.dirty_quarantine.clear()


async def _save_releases(conn: AsyncConnection, state: State) -> None:
    found, gone = [], []
    for uid in sorted(state.dirty_releases):
        held = state.releases.get(uid)
        if held is None:
            gone.append({"uid": uid})
        else:
            found.append(rows.release_row(held))
    await _upsert(conn, t.release, found)
    await _delete(conn, t.release, gone)
    state.dirty_releases.clear()


async def _save_told(conn: AsyncConnection, state: State) -> None:
    found, gone = [], []
    for plural, name in sorted(state.dirty_told):
        key = {"plural": plural, "namespace": name.namespace, "name": name.name}
        image = state.told.get((plural, name))
        if image is None:
            gone.append(key)
        else:
            found.append({**key, "image": msgspec.to_builtins(image)})
    await _upsert(conn, t.told, found)
    await _delete(conn, t.told, gone)
    state.dirty_told.clear()


async def _save_requests(
    conn: AsyncConnection, state: State, requests: Sequence[Request], keep: int
) -> None:
    if requests:
        await conn.execute(
            sa.insert(t.request), [rows.request_row(request) for request in requests]
        )
    if state.ended:
        await conn.execute(
            sa.update(t.request)
            .where(t.request.c.number == sa.bindparam("n"))
            .values(
                state=sa.bindparam("s"),
                finished_at=sa.bindparam("f"),
                duration=sa.bindparam("d"),
                provider_request=sa.bindparam("p"),
                code=sa.bindparam("c"),
                message=sa.bindparam("m"),
            ),
            [rows.ended_row(n, ended) for n, ended in sorted(state.ended.items())],
        )
        state.ended.clear()
    if requests and requests[-1].number // 100 != (requests[0].number - 1) // 100:
        await conn.execute(
            sa.delete(t.request).where(
                t.request.c.number < requests[-1].number - keep, t.request.c.state != "sent"
            )
        )


async def _upsert(conn: AsyncConnection, table: sa.Table, found: Iterable[dict[str, Any]]) -> None:
    found = list(found)
    if not found:
        return
    keys = [column.name for column in table.primary_key]
    insert = pg.insert(table)
    changes = {name: insert.excluded[name] for name in found[0] if name not in keys}
    await conn.execute(insert.on_conflict_do_update(index_elements=keys, set_=changes), found)


async def _delete(conn: AsyncConnection, table: sa.Table, keys: Iterable[dict[str, Any]]) -> None:
    keys = list(keys)
    if not keys:
        return
    where = [table.c[name] == sa.bindparam(f"k_{name}") for name in keys[0]]
    await conn.execute(
        sa.delete(table).where(*where),
        [{f"k_{name}": value for name, value in key.items()} for key in keys],
    )
