"""Bringing a database to the revision that this code needs (`lbledger migrate`)."""

from __future__ import annotations

import asyncio

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from services.kit import db

LOCK_KEY = 0x1B1ED6E2  # any constant of ours: two migrations at once take turns


def upgrade(url: str) -> str:
    """Migrate to head and return the revision; running it twice, or twice at once, is safe."""
    return asyncio.run(upgrade_async(url))


async def upgrade_async(url: str, to: str = "head") -> str:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(db.MIGRATIONS))
    engine = create_async_engine(db.driver_url(url), connect_args={"timeout": 10})
    try:
        async with engine.connect() as lock, engine.connect() as conn:
            await lock.execute(sa.text("select pg_advisory_lock(:key)"), {"key": LOCK_KEY})

            def run(sync: sa.Connection) -> None:
                config.attributes["connection"] = sync
                command.upgrade(config, to)

            await conn.run_sync(run)
            return await db.revision(conn) or ""
    finally:
        await engine.dispose()
