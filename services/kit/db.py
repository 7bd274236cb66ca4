"""Postgres: the engine, and waiting for a server that is migrated to what this code needs.

SQLAlchemy Core on asyncpg, no ORM. Prepared-statement caching is left to asyncpg; a schema change
under a running service surfaces as an error of one transaction, which the projector re-runs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import msgspec
import sqlalchemy as sa
import structlog
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

import schema
from schema.tables import SERVICES, metadata, service_tables
from services.kit.config import DatabaseSettings
from services.kit.retry import Backoff, wait_or_stop

log = structlog.get_logger()
MIGRATIONS: Final = Path(schema.__file__).parent / "migrations"


class StoreError(Exception):
    """Base of what the storage of a service refuses."""


def driver_url(url: str) -> sa.URL:
    """The asyncpg form of a plain `postgresql://` URL."""
    return make_url(str.__str__(url)).set(drivername="postgresql+asyncpg")


def create_engine(settings: DatabaseSettings, *, application: str) -> AsyncEngine:
    return create_async_engine(
        driver_url(settings.url),
        pool_size=settings.pool_size,
        max_overflow=2,
        pool_timeout=settings.connect_timeout_s,
        pool_pre_ping=True,
        json_serializer=lambda value: msgspec.json.encode(value).decode(),
        json_deserializer=msgspec.json.decode,
        connect_args={
            "timeout": settings.connect_timeout_s,
            "command_timeout": settings.statement_timeout_s,
            "server_settings": {
                "application_name": f"lbledger-{application}",
                "statement_timeout": str(int(settings.statement_timeout_s * 1000)),
                "idle_in_transaction_session_timeout": str(int(settings.idle_transaction_s * 1000)),
                "tcp_keepalives_idle": "5",
                "tcp_keepalives_interval": "2",
                "tcp_keepalives_count": "3",
                "jit": "off",  # our queries are short; compiling them costs more than it gives
            },
        },
    )


async def wait_ready(engine: AsyncEngine, address: str, stop: asyncio.Event) -> None:
    """Wait until Postgres answers and is migrated to what this code needs, for ever, with logs."""
    backoff = Backoff(first=0.2, cap=10.0)
    while not stop.is_set():
        try:
            async with asyncio.timeout(15), engine.connect() as conn:
                found, wanted = await revision(conn), head()
                if found == wanted:
                    return
                why = (
                    f"schema is at revision {found or 'none'}, {wanted} is needed: "
                    "run `lbledger migrate`"
                )
        except Exception as error:  # noqa: BLE001  (whatever it is: say it and go on waiting)
            why = plain_error(error)
        log.warning("db.waiting", address=address, why=why)
        await wait_or_stop(stop, backoff.delay())


def plain_error(error: BaseException) -> str:
    """One line without the statement's parameters and without any URL."""
    origin = getattr(error, "orig", None) or error
    text = str(origin).strip().splitlines()
    return f"{type(origin).__name__}: {text[0]}"[:300] if text else type(origin).__name__


async def revision(conn: AsyncConnection) -> str | None:
    """The Alembic revision of the database, None when it was never migrated."""
    exists = await conn.scalar(sa.text("select to_regclass('public.alembic_version')"))
    if exists is None:
        return None
    return str(await conn.scalar(sa.text("select version_num from public.alembic_version")))


def head() -> str:
    """The newest revision: the files in schema/migrations/versions are numbered in order."""
    versions = (MIGRATIONS / "versions").glob("[0-9]*.py")
    return max((path.name.partition("_")[0] for path in versions), default="")


async def create_all(url: str) -> None:
    """Create every table straight from the definitions (tests of single tables)."""
    engine = create_async_engine(driver_url(url))
    try:
        async with engine.begin() as conn:
            await conn.execute(sa.text("create extension if not exists btree_gist"))
            for service in SERVICES:
                await conn.execute(sa.text(f"create schema if not exists {service}"))
            await conn.run_sync(metadata.create_all)
            for service in SERVICES:
                instance = pg.insert(service_tables(service).instance)
                await conn.execute(instance.on_conflict_do_nothing().values(one=True))
    finally:
        await engine.dispose()
