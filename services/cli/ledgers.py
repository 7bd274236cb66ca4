"""The commands that read the ledger: leases now and at any moment, and one pool."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from schema.tables import allocator as ledger
from services.cli import looking, printing, reading, session
from services.cli.printing import Trouble
from services.kit.config import ConfigError, public_url

T = TypeVar("T")
HOLDERS_SHOWN = 100


def query(job: Callable[[AsyncConnection], Awaitable[T]]) -> T:
    """Run one read on the database; Trouble says in one line why it can't be."""
    from services.kit import db

    settings = session.settings().database

    async def main() -> T:
        engine = db.create_engine(settings, application="cli")
        try:
            async with asyncio.timeout(15), engine.connect() as conn:
                return await job(conn)
        except (sa.exc.SQLAlchemyError, OSError, TimeoutError) as error:
            raise Trouble(
                f"can't read {public_url(settings.url.reveal())}: {db.plain_error(error)}"
            ) from error
        finally:
            await engine.dispose()

    return asyncio.run(main())


def command(job: Callable[[AsyncConnection], Awaitable[None]]) -> None:
    """Run one small change in a transaction of its own."""

    async def change(conn: AsyncConnection) -> None:
        await job(conn)
        await conn.commit()

    query(change)


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
