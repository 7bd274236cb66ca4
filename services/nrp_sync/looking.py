"""Looking in from outside: what the rows say, and what would be done. Changes nothing.

For the command line. `status` and `explain` are a few queries; `compare` loads the whole state as
the service would, reads the provider, and shows the drift between the two and the requests that
would follow. `ask_for_repair` is the one exception: it leaves a note that the running service acts
on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.ext.asyncio import AsyncConnection

from schema.tables import nrp_sync as t
from schema.tables import service_tables
from services.nrp_sync import planning, readback
from services.nrp_sync.batches import LocationCall
from services.nrp_sync.diff import Maybe, possible
from services.nrp_sync.projection import NrpProjection
from services.nrp_sync.provider import ServiceBatch
from services.nrp_sync.state import Flight, Policy, Request, Snapshot, State

HISTORY = 50


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """Something that keeps a service or an address from being in step."""

    what: str
    why: str
    until: datetime | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    in_step: bool
    services: dict[str, int]
    """Kind and phase (`inbound created`) to how many."""
    not_in_step: list[str]
    """Services (namespace/name) whose image says that they are not."""
    addresses: int
    locations: int
    unknown: int
    """Addresses of which a request was never answered."""
    requests_open: int
    requests_last_hour: dict[str, int]
    """State (ok, failed, unknown, sent) to how many."""
    parked: list[Trouble]
    quarantined: list[Trouble]
    pods_held: int
    read_at: datetime | None
    gate_until: datetime | None
    drift_found: int
    position: int
    """Stream sequence up to which facts have been taken."""


async def status(conn: AsyncConnection) -> Status:
    """Where everything stands, from the rows alone."""
    operations = (await conn.execute(sa.select(t.operation))).all()
    phases: dict[str, int] = {}
    for op in operations:
        phases[f"{op.kind} {op.phase}"] = phases.get(f"{op.kind} {op.phase}", 0) + 1
    images = [
        row.image for row in await conn.execute(sa.select(t.told)) if row.plural == "services"
    ]
    behind = [image for image in images if not image.get("in_step", False)]
    hour = sa.select(t.request.c.state, sa.func.count().label("n")).where(
        t.request.c.sent_at > sa.func.now() - sa.text("interval '1 hour'")
    )
    made = await conn.execute(hour.group_by(t.request.c.state))
    requests: dict[str, int] = {row.state: row.n for row in made}
    view = (await conn.execute(sa.select(t.view))).one_or_none()
    offset = service_tables(t.SCHEMA).stream_offset
    parked = [_parked(op) for op in operations if op.parked]
    quarantined = await _quarantined(conn)
    unknown = await _count(conn, t.address, t.address.c.sure.is_(sa.false()))
    return Status(
        in_step=not (behind or parked or quarantined or unknown),
        services=dict(sorted(phases.items())),
        not_in_step=sorted(_who(image) for image in behind),
        addresses=await _count(conn, t.address),
        locations=await _count(conn, t.location),
        unknown=unknown,
        requests_open=await _count(conn, t.request, t.request.c.state == "sent"),
        requests_last_hour=dict(sorted(requests.items())),
        parked=parked,
        quarantined=quarantined,
        pods_held=await _count(conn, t.release, t.release.c.leaving),
        read_at=view.read_at if view else None,
        gate_until=view.gate_until if view else None,
        drift_found=view.drift_found if view else 0,
        position=await conn.scalar(sa.select(offset.c.seq).where(offset.c.stream == "KUBE")) or 0,
    )


async def _count(conn: AsyncConnection, table: sa.Table, *where: sa.ColumnElement[bool]) -> int:
    return await conn.scalar(sa.select(sa.func.count()).select_from(table).where(*where)) or 0


def _who(image: Mapping[str, Any]) -> str:
    owner = image["owner"]
    return f"{owner['namespace']}/{owner['name']}: {image.get('reason', '')}"


def _parked(op: Any) -> Trouble:
    name = f"{op.namespace}/{op.name}" if op.namespace else op.identity
    return Trouble(
        what=f"{op.kind} {name}",
        why=f"{op.parked}: {op.error_code}: {op.error_message}",
        until=op.retry_at,
    )


async def _quarantined(conn: AsyncConnection, service: str = "") -> list[Trouble]:
    query = sa.select(t.quarantine).order_by(t.quarantine.c.location, t.quarantine.c.address)
    if service:
        query = query.where(t.quarantine.c.wish.contains([service]))
    return [
        Trouble(
            what=f"{row.address or 'everything'} at {row.location}",
            why=f"{row.code}: {row.message} (tried {row.attempts} times)",
            until=row.retry_at,
        )
        for row in await conn.execute(query)
    ]


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """One request in a service's history."""

    number: int
    id: str
    verb: str
    size: int
    attempt: int
    state: str
    sent_at: datetime
    duration: float | None
    provider_request: str
    code: str
    message: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    identity: str
    namespace: str
    name: str
    phase: str
    wanted: Any
    applied: Any
    has: dict[str, str]
    """What of it is at the provider: public IPs by name, balancer, registration, pool."""
    public_addresses: dict[str, str]
    image: Any
    """The last ProviderStateChanged, None for an egress gateway."""
    backends: list[str]
    """`address at location`, as the provider acknowledged them."""
    trouble: list[Trouble]
    cause: str
    history: list[Made]
    """The last requests about it, newest first."""


async def explain(conn: AsyncConnection, what: str) -> Explanation | None:
    """One service by `namespace/name`, uid, or egress identity; None when it is not known."""
    op_table = t.operation
    namespace, _, name = what.rpartition("/")
    by_name = sa.and_(op_table.c.namespace == namespace, op_table.c.name == name)
    query = sa.select(op_table).where(sa.or_(op_table.c.identity == what.lower(), by_name))
    op = (await conn.execute(query.order_by(op_table.c.created_at.desc()).limit(1))).one_or_none()
    if op is None:
        return await _refused(conn, namespace, name)
    addresses = sa.select(t.address).where(t.address.c.services.contains([op.identity]))
    found = await conn.execute(addresses.order_by(t.address.c.address))
    return Explanation(
        kind=op.kind,
        identity=op.identity,
        namespace=op.namespace,
        name=op.name,
        phase=op.phase,
        wanted=op.wanted,
        applied=op.applied,
        has=op.marks,
        public_addresses=op.addresses,
        image=await _image(conn, op.namespace, op.name),
        backends=[
            f"{row.address} at {row.location}{'' if row.sure else ' (not known for sure)'}"
            for row in found
        ],
        trouble=[*([_parked(op)] if op.parked else []), *await _quarantined(conn, op.identity)],
        cause=op.cause,
        history=await _history(conn, op.identity),
    )


async def _image(conn: AsyncConnection, namespace: str, name: str) -> Any:
    told = t.told
    return await conn.scalar(
        sa.select(told.c.image).where(
            told.c.plural == "services", told.c.namespace == namespace, told.c.name == name
        )
    )


async def _refused(conn: AsyncConnection, namespace: str, name: str) -> Explanation | None:
    """A Service that we follow without having asked anything of the provider."""
    image = await _image(conn, namespace, name)
    if image is None:
        return None
    identity = image["owner"]["uid"].lower()
    return Explanation(
        kind="inbound",
        identity=identity,
        namespace=namespace,
        name=name,
        phase="",
        wanted=None,
        applied=None,
        has={},
        public_addresses={},
        image=image,
        backends=[],
        trouble=[],
        cause="",
        history=await _history(conn, identity),
    )


async def _history(conn: AsyncConnection, identity: str) -> list[Made]:
    r = t.request
    rows = await conn.execute(
        sa.select(r)
        .where(r.c.services.contains([identity]))
        .order_by(r.c.number.desc())
        .limit(HISTORY)
    )
    return [
        Made(
            number=row.number,
            id=row.id,
            verb=row.verb,
            size=row.size,
            attempt=row.attempt,
            state=row.state,
            sent_at=row.sent_at,
            duration=row.duration,
            provider_request=row.provider_request,
            code=row.code,
            message=row.message,
        )
        for row in rows
    ]


# --- what would be done -------------------------------------------------------------------------


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One address that is not as it should be; a name with `?` is not known for sure."""

    location: str
    address: str
    wanted: list[str]
    held: list[str]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    pending: list[Difference]
    """What we know to differ and are about to send."""
    drift: list[str]
    """What the provider holds otherwise than we believe, in words. Empty without a reading."""
    requests: list[str]
    """What would be sent next, in words."""


async def compare(
    conn: AsyncConnection, policy: Policy, snapshot: Snapshot | None = None
) -> Comparison:
    """Load the state as the service would, take a reading if there is one, and plan."""
    projection = NrpProjection(policy)
    await projection.load(conn)
    state = projection.state
    pending = differences(state)
    drift: list[str] = []
    now = time.time()
    if snapshot is not None:
        believed = _believed(state)
        readback.reconcile(state, Flight(_reading(now)), snapshot, now)
        while state.comparing is not None:
            readback.compare_some(state, now)
        drift = drifted(believed, _believed(state))
    return Comparison(pending=pending, drift=drift, requests=planned(state, now))


def differences(state: State) -> list[Difference]:
    """Every address that differs, in order."""
    provided = state.provided
    found = []
    for location in sorted(provided.deviant):
        for address, seen in sorted(provided.deviant[location].items()):
            doubt = "?" if isinstance(seen, Maybe) else ""
            found.append(
                Difference(
                    location=location,
                    address=address,
                    wanted=list(provided.desired.refs(location, address)),
                    held=[name + doubt for name in possible(seen)],
                )
            )
    return found


def planned(state: State, now: float) -> list[str]:
    """The requests that are due once every window and wait is over, in words."""
    later = max(now, state.gate_until) + state.policy.latency
    state.read_wanted = False
    before = len(state.outgoing)
    planning.plan(state, later)
    return [_in_words(request) for request in state.outgoing[before:] if request.lane != "read"]


def _in_words(request: Request) -> str:
    payload = request.payload
    if isinstance(payload, LocationCall):
        places = ", ".join(
            f"{entry.location} ({len(entry.addresses) or 'delete'})"
            for entry in payload.batch.locations[:5]
        )
        more = len(payload.batch.locations) - 5
        return f"{request.verb}: {places}" + (f" and {more} more" if more > 0 else "")
    if isinstance(payload, ServiceBatch):
        return f"{request.verb}: " + ", ".join(
            f"{part.step.verb} {part.identity}" for part in request.parts
        )
    return f"{request.verb} {request.target}"


def _reading(now: float) -> Request:
    return Request(number=0, id="", lane="read", verb="read", sent_at=now)


def _believed(state: State) -> dict[str, str]:
    believed = {
        f"address {key.address} at {key.location}": ", ".join(possible(seen))
        for key, seen in state.provided.held()
    }
    for location, sure in state.provided.located.items():
        believed[f"location {location}"] = "there" if sure else "perhaps there"
    for (kind, identity), op in state.operations.items():
        for resource, mark in op.marks.items():
            believed[f"{kind} {identity}: {resource}"] = str(mark)
        believed[f"{kind} {identity}: configuration"] = msgspec.json.encode(op.applied).decode()
    return believed


def drifted(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """What changed between two beliefs, in words."""
    return [
        f"{what}: believed {before.get(what, 'absent')}, the provider has {after.get(what, 'none')}"
        for what in sorted(before.keys() | after.keys())
        if before.get(what) != after.get(what)
    ]


async def ask_for_repair(conn: AsyncConnection) -> None:
    """Leave a note: read the provider now, and try again what is parked or in quarantine."""
    asked = sa.func.clock_timestamp()
    insert = pg.insert(t.view).values(one=True, repair_asked_at=asked)
    await conn.execute(
        insert.on_conflict_do_update(index_elements=["one"], set_={"repair_asked_at": asked})
    )
