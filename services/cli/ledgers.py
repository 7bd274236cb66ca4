"""The commands that read the ledger: leases now and at any moment, and one pool."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from schema import addresses
from services.allocator import queries
from services.allocator.queries import LeaseRow
from services.cli import printing, reading, session
from services.cli.printing import Trouble
from services.kit.config import ConfigError, public_url

T = TypeVar("T")
SHOWN = 100


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
    """Who holds what, or held it at a moment; the history of one address or owner."""
    moment = parse_time(at) if at else None
    if address:
        _checked(address)
    ref = reading.owner_ref(owner) if owner else None

    async def read(conn: AsyncConnection) -> list[LeaseRow]:
        if address:
            return await queries.leases_of_address(conn, address)
        if ref is not None:
            found = await queries.leases_of_owner(conn, *ref)
            if owner.count("/") < 2:  # a name without its kind means both
                found += await queries.leases_of_owner(conn, "services", *ref[1:])
            return found
        return await queries.leases_at(conn, moment or datetime.now(UTC))

    found = query(read)
    if moment is not None:
        found = [row for row in found if row.since <= moment and not over(row, moment)]
    if as_json:
        printing.emit_json(found)
        return 0
    if not found:
        print("no lease fits")
    printing.table(
        ["ADDRESS", "POOL", "SINCE (UTC)", "UNTIL (UTC)", "OWNER"],
        [
            [row.address, row.pool, _instant(row.since), _instant(row.until), _owner(row)]
            for row in found
        ],
    )
    return 0


def over(row: LeaseRow, moment: datetime) -> bool:
    """Whether it had ended by then."""
    return row.until is not None and row.until <= moment


def parse_time(text: str) -> datetime:
    """RFC 3339, UTC where no zone is given; raises ConfigError."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"--at {text!r}: write a time like 2026-11-30T12:00:00Z") from error
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _checked(address: str) -> None:
    try:
        addresses.parse(address)
    except addresses.AddressError as error:
        raise ConfigError(f"--address: {error}") from error


def _owner(row: LeaseRow) -> str:
    prefix = "services/" if row.plural == "services" else ""
    released = f" ({row.release_reason})" if row.release_reason else ""
    return f"{prefix}{row.namespace}/{row.name}{released}"


def _instant(at: datetime | None) -> str:
    return "" if at is None else at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


# --- pools ---


def pool_show(name: str, as_json: bool) -> int:
    """Use, holders, waiting owners, and the addresses that were used before."""
    found = query(lambda conn: queries.pool_usage(conn, name))
    if found is None:
        return printing.fail(f"no pool {name!r} is known; `lbledger pool list` lists them")
    if as_json:
        printing.emit_json(found)
        return 0
    printing.table(
        ["FIELD", "VALUE"],
        [
            ["pool", name],
            ["state", "ready" if found.ready else found.problem],
            ["total", found.total],
            ["held", found.held],
            ["waiting", len(found.waiting)],
        ],
    )
    print(f"\nholders ({len(found.holders)})")
    printing.table(
        ["ADDRESS", "SINCE (UTC)", "OWNER"],
        [[row.address, _instant(row.since), _owner(row)] for row in found.holders[:SHOWN]],
        indent="  ",
    )
    _more(len(found.holders))
    if found.waiting:
        print("\nwaiting, the next one first")
        printing.table(["OWNER"], [[one] for one in found.waiting[:SHOWN]], indent="  ")
        _more(len(found.waiting))
    if found.remembered:
        print("\nfree, and whose it was (the longest free first)")
        shown = list(found.remembered.items())[:SHOWN]
        printing.table(["ADDRESS", "OWNER"], [list(pair) for pair in shown], indent="  ")
        _more(len(found.remembered))
    return 0


def _more(count: int) -> None:
    if count > SHOWN:
        print(f"  and {count - SHOWN} more (--json shows all)")
