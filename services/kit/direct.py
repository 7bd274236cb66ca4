"""Statements that go straight to the driver, where SQLAlchemy costs more than the statement.

For the few that every batch of every service runs, inside a transaction that SQLAlchemy began (the
driver knows of it only after a first statement through SQLAlchemy). Errors come out as
SQLAlchemy's, so callers sort them as they do all others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import asyncpg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection


async def fetch(conn: AsyncConnection, query: str, *parameters: object) -> list[Any]:
    """The rows of a query with $1, $2, ...; it is prepared once per connection."""
    with errors(query):
        rows: list[Any] = await (await _driver(conn)).fetch(query, *parameters)
        return rows


async def copy_text(
    conn: AsyncConnection, table: sa.Table, columns: Sequence[str], lines: Iterable[str]
) -> None:
    """Insert rows by COPY, half the work of an INSERT on both sides, from lines in its text format.

    They go as one piece: of a file the driver reads each part in a thread of its own.
    """

    async def source() -> AsyncIterator[bytes]:
        yield "".join(lines).encode()

    with errors(f"copy {table.fullname}"):
        await (await _driver(conn)).copy_to_table(
            table.name,
            schema_name=table.schema,
            columns=columns,
            source=source(),
            format="text",
        )


@contextmanager
def errors(statement: str) -> Iterator[None]:
    """The driver's errors as SQLAlchemy's: class 23 is a broken constraint, 22 a bad value."""
    try:
        yield
    except asyncpg.PostgresError as error:
        kinds = {"23": sa.exc.IntegrityError, "22": sa.exc.DataError}
        kind = kinds.get((error.sqlstate or "")[:2], sa.exc.OperationalError)
        raise kind(statement, None, error) from error
    except asyncpg.InterfaceError as error:
        raise sa.exc.InterfaceError(statement, None, error) from error


async def _driver(conn: AsyncConnection) -> Any:
    return (await conn.get_raw_connection()).driver_connection
