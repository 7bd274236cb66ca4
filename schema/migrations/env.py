"""Alembic's environment. The connection comes from services.kit.migrate (or a test).

A migration must never queue the services behind it for long: it waits 4 s for a lock and runs
for 60 s at most, then fails and changes nothing (all of it is one transaction).
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context

from schema.tables import metadata

LOCK_TIMEOUT_MS = 4_000
STATEMENT_TIMEOUT_MS = 60_000


def run(connection: sa.Connection) -> None:
    connection.execute(sa.text(f"set lock_timeout = {LOCK_TIMEOUT_MS}"))
    connection.execute(sa.text(f"set statement_timeout = {STATEMENT_TIMEOUT_MS}"))
    connection.commit()
    context.configure(
        connection=connection,
        target_metadata=metadata,
        include_schemas=True,
        version_table_schema="public",
        compare_type=True,
        compare_server_default=True,
    )
    with context.begin_transaction():
        context.run_migrations()


run(context.config.attributes["connection"])
