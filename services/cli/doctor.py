"""`lbledger doctor`: is everything there that the services need, and do they keep up?"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from schema.subjects import STREAMS
from schema.tables import SERVICES, service_tables
from services.cli import printing, reading, session
from services.cli.printing import Trouble
from services.kit.bus import Bus, StreamMissing
from services.kit.config import Settings, public_url

LAG_LIMIT = 1000
KUBE_S = 10.0


class Check(NamedTuple):
    """One question, its answer, and what to do when the answer is no."""

    name: str
    ok: bool
    detail: str


def doctor(as_json: bool) -> int:
    settings = session.settings()
    checks = asyncio.run(_examine(settings))
    bad = [check for check in checks if not check.ok]
    if as_json:
        printing.emit_json([check._asdict() for check in checks])
        return 1 if bad else 0
    printing.table(
        ["CHECK", "OK", "DETAIL"], [[c.name, "ok" if c.ok else "NO", c.detail] for c in checks]
    )
    if bad:
        print(f"\n{len(bad)} of {len(checks)} checks failed")
    return 1 if bad else 0


async def _examine(settings: Settings) -> list[Check]:
    checks: list[Check] = []
    last: dict[str, int] = {}
    try:
        async with reading.connected() as bus:
            checks.append(Check("NATS", True, bus.address))
            checks += await _streams(bus, last)
    except Trouble as error:
        checks.append(Check("NATS", False, str(error)))
    checks += await _database(settings, last)
    checks.append(await _kubernetes(settings))
    return checks


async def _streams(bus: Bus, last: dict[str, int]) -> list[Check]:
    checks = []
    for name in STREAMS:
        try:
            state = await bus.stream_state(name)
        except StreamMissing:
            checks.append(Check(f"stream {name}", False, "absent: no service has started yet"))
            continue
        last[name] = state.last_seq
        checks.append(
            Check(f"stream {name}", True, f"{state.messages} messages, {state.bytes >> 10} KiB")
        )
    return checks


async def _database(settings: Settings, last: dict[str, int]) -> list[Check]:
    from services.kit import db

    address = public_url(settings.database.url.reveal())
    engine = db.create_engine(settings.database, application="doctor")
    try:
        async with asyncio.timeout(15), engine.connect() as conn:
            found, wanted = await db.revision(conn), db.head()
            checks = [
                Check("Postgres", True, address),
                Check(
                    "schema",
                    found == wanted,
                    f"revision {found or 'none'}"
                    + ("" if found == wanted else f", {wanted} is needed: run `lbledger migrate`"),
                ),
            ]
            if found == wanted:
                for service in SERVICES:
                    checks += await _service(conn, service, last)
            return checks
    except Exception as error:  # noqa: BLE001  (whatever it is, it is the finding)
        return [Check("Postgres", False, f"{address}: {db.plain_error(error)}")]
    finally:
        await engine.dispose()


async def _service(conn: AsyncConnection, service: str, last: dict[str, int]) -> list[Check]:
    tables = service_tables(service)
    rows = await conn.execute(sa.select(tables.stream_offset))
    positions = {row.stream: row.seq for row in rows}
    if not positions:
        return [Check(service, False, "never started against this database")]
    pending = await conn.scalar(sa.select(sa.func.sum(tables.outbox.c["count"]))) or 0
    dead = await conn.scalar(sa.select(sa.func.count()).select_from(tables.dead_letter)) or 0
    lags = {s: last[s] - seq for s, seq in positions.items() if s in last}
    behind = {stream: lag for stream, lag in lags.items() if lag > LAG_LIMIT}
    detail = ", ".join(f"{stream} at {positions[stream]}" for stream in sorted(lags))
    checks = [
        Check(service, not behind, detail + (f"; behind by {behind}" if behind else "")),
    ]
    if pending > LAG_LIMIT:
        checks.append(Check(f"{service} outbox", False, f"{pending} decisions not published"))
    if dead:
        checks.append(
            Check(
                f"{service} dead letters",
                False,
                f"{dead}; see `lbledger events --subject lb.dead.{service}`",
            )
        )
    return checks


async def _kubernetes(settings: Settings) -> Check:
    from services.kit.kube import CredentialsError, Kube, KubeError

    try:
        async with asyncio.timeout(KUBE_S):
            kube = await Kube.connect(
                settings.kube.kubeconfig or None, settings.kube.context or None
            )
            try:
                found = await kube.resources("loadbalancer.harvesterhci.io/v1beta1")
            finally:
                await kube.close()
    except (CredentialsError, KubeError, OSError, TimeoutError) as error:
        return Check("API server", False, str(error) or type(error).__name__)
    if "loadbalancers" not in found:
        return Check("API server", False, "the CRDs are not installed: `lbledger crds`")
    status = "a" if found["loadbalancers"].status else "no"
    return Check("API server", True, f"CRDs installed, with {status} status subresource")
