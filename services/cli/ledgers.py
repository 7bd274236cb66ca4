"""The commands that read the databases: leases now and then, one pool, the provider's state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from schema.tables import allocator as ledger
from schema.tables import nrp_sync
from services.cli import looking, printing, reading, session
from services.kit.config import ConfigError, public_url

T = TypeVar("T")
HOLDERS_SHOWN = 100


def query(job: Callable[[AsyncConnection], Awaitable[T]]) -> T:
    """Run one read on the database; ConfigError says in one line why it can't be."""
    from services.kit import db

    settings = session.settings().database

    async def main() -> T:
        engine = db.create_engine(settings, application="cli")
        try:
            async with asyncio.timeout(15), engine.connect() as conn:
                return await job(conn)
        except (sa.exc.SQLAlchemyError, OSError, TimeoutError) as error:
            raise ConfigError(
                f"can't read {public_url(settings.url.reveal())}: {db.plain_error(error)}"
            ) from error
        finally:
            await engine.dispose()

    return asyncio.run(main())


# --- leases ---


def leases(at: str, address: str, owner: str, as_json: bool) -> int:
    """Who holds what, or held it at a moment; or the history of one address or owner."""
    lease = ledger.lease
    wanted = (
        sa.select(
            sa.func.host(lease.c.address).label("address"),
            lease.c.pool,
            lease.c.plural,
            lease.c.namespace,
            lease.c.name,
            sa.func.lower(lease.c.during).label("since"),
            sa.func.upper(lease.c.during).label("until"),
            lease.c.rule,
            lease.c.release_reason,
            lease.c.cause,
            lease.c.release_cause,
        )
        .order_by(lease.c.address, sa.func.lower(lease.c.during))
        .where(*_conditions(at, address, owner))
    )

    async def read(conn: AsyncConnection) -> list[dict[str, Any]]:
        return [dict(row) for row in (await conn.execute(wanted)).mappings()]

    found = query(read)
    if as_json:
        printing.emit_json(found)
        return 0
    if not found:
        print("no lease fits")
    printing.table(
        ["ADDRESS", "POOL", "SINCE (UTC)", "UNTIL (UTC)", "OWNER"],
        [
            [
                row["address"],
                row["pool"],
                _instant(row["since"]),
                _instant(row["until"]),
                _owner(row),
            ]
            for row in found
        ],
    )
    return 0


def _conditions(at: str, address: str, owner: str) -> list[sa.ColumnElement[bool]]:
    lease = ledger.lease
    found: list[sa.ColumnElement[bool]] = []
    if at:
        moment = sa.literal(parse_time(at), sa.DateTime(timezone=True))
        found.append(lease.c.during.op("@>", is_comparison=True)(moment))
    elif not address and not owner:
        found.append(sa.func.upper_inf(lease.c.during))
    if address:
        found.append(lease.c.address == sa.cast(_address(address), lease.c.address.type))
    if owner:
        ref = reading.owner_ref(owner)
        found += [lease.c.namespace == ref.namespace, lease.c.name == ref.name]
        if owner.count("/") == 2:
            found.append(lease.c.plural == ref.plural)
    return found


def parse_time(text: str) -> datetime:
    """RFC 3339, UTC where no zone is given; raises ConfigError."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"--at {text!r}: write a time like 2026-11-30T12:00:00Z") from error
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _address(text: str) -> str:
    import ipaddress

    try:
        return str(ipaddress.ip_address(text.partition("/")[0]))
    except ValueError as error:
        raise ConfigError(f"--address {text!r}: write it like 192.0.2.5 or 2001:db8::5") from error


def _owner(row: dict[str, Any]) -> str:
    prefix = "services/" if row["plural"] == "services" else ""
    released = f" ({row['release_reason']})" if row["release_reason"] else ""
    return f"{prefix}{row['namespace']}/{row['name']}{released}"


def _instant(at: datetime | None) -> str:
    return "" if at is None else at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


# --- pools ---


def pool_show(name: str, as_json: bool) -> int:
    """Use, holders, waiting owners, and the addresses that were used before."""
    pools = {pool["name"]: pool for pool in reading.run(looking.pools)}
    if name not in pools:
        return printing.fail(f"no pool {name!r} is known; there are {', '.join(pools) or 'none'}")
    balancers = reading.run(looking.balancers)
    waiting = [looking.label(one) for one in balancers if one.pool == name and not one.address]
    holders, history = query(lambda conn: _holders(conn, name))
    pool = pools[name]
    if as_json:
        printing.emit_json({**pool, "holders": holders, "waiting": waiting, "history": history})
        return 0
    ranges = ", ".join(pool["ranges"])
    state = "ready" if pool.get("ready") else f"{pool.get('reason', '')}: {pool.get('message', '')}"
    printing.table(
        ["FIELD", "VALUE"],
        [
            ["pool", name],
            ["ranges", ranges],
            ["total", pool.get("total")],
            ["free", pool.get("available")],
            ["priority", pool["priority"]],
            ["state", state],
        ],
    )
    print(f"\nholders ({len(holders)})")
    printing.table(
        ["ADDRESS", "OWNER"],
        [[row["address"], _owner(row)] for row in holders[:HOLDERS_SHOWN]],
        indent="  ",
    )
    if len(holders) > HOLDERS_SHOWN:
        print(f"  and {len(holders) - HOLDERS_SHOWN} more (--json shows all)")
    if waiting:
        print("\nwaiting")
        printing.table(["OWNER"], [[one] for one in waiting], indent="  ")
    return 0


async def _holders(
    conn: AsyncConnection, name: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    lease, memo = ledger.lease, ledger.memo
    held = sa.select(
        sa.func.host(lease.c.address).label("address"),
        lease.c.plural,
        lease.c.namespace,
        lease.c.name,
        lease.c.release_reason,
    ).where(lease.c.pool == name, sa.func.upper_inf(lease.c.during))
    before = sa.select(
        sa.func.host(memo.c.address).label("address"), memo.c.key, memo.c.released
    ).where(memo.c.pool == name)
    return (
        [dict(r) for r in (await conn.execute(held.order_by(lease.c.address))).mappings()],
        [dict(r) for r in (await conn.execute(before.order_by(memo.c.address))).mappings()],
    )


# --- the provider ---


def nrp_status(as_json: bool) -> int:
    """Whether the provider is in step: services, locations, and requests that did not succeed."""
    found = query(_provider)
    troubled = [row for row in found["services"] if row["error"] or row["parked"]]
    in_step = not troubled and not found["in_flight"] and not found["quarantined"]
    if as_json:
        printing.emit_json({"inStep": in_step, **found})
        return 0 if in_step else 1
    print(
        f"{'in step' if in_step else 'NOT in step'}: {len(found['services'])} services, "
        f"{found['locations']} locations with {found['addresses']} addresses, "
        f"{found['in_flight']} requests in flight, {found['quarantined']} entries quarantined"
    )
    printing.table(
        ["SERVICE", "KIND", "PHASE", "ADDRESSES", "TROUBLE"],
        [
            [row["service"], row["kind"], row["phase"], row["addresses"], row["error"]]
            for row in found["services"]
        ],
    )
    return 0 if in_step else 1


async def _provider(conn: AsyncConnection) -> dict[str, Any]:
    op, request = nrp_sync.operation, nrp_sync.request
    operations = (await conn.execute(sa.select(op).order_by(op.c.namespace, op.c.name))).mappings()

    async def count(table: sa.Table, *where: sa.ColumnElement[bool]) -> int:
        counted = sa.select(sa.func.count()).select_from(table).where(*where)
        return int(await conn.scalar(counted) or 0)

    return {
        "services": [
            {
                "service": f"{row['namespace']}/{row['name']}" if row["name"] else row["identity"],
                "kind": row["kind"],
                "phase": row["phase"],
                "addresses": _public(row["addresses"]),
                "parked": row["parked"],
                "error": f"{row['error_code']}: {row['error_message']}"
                if row["error_code"]
                else "",
            }
            for row in operations
        ],
        "locations": await count(nrp_sync.location),
        "addresses": await count(nrp_sync.address),
        "quarantined": await count(nrp_sync.quarantine),
        "in_flight": await count(request, request.c.state == "sent"),
    }


def _public(addresses: Any) -> str:
    found = addresses.values() if isinstance(addresses, dict) else addresses or ()
    return ", ".join(str(address) for address in found)
