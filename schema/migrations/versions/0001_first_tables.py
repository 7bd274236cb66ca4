"""First tables: one schema per service, and the extension that the lease ledger needs."""

import sqlalchemy as sa
from alembic import op

from schema.tables import SERVICES, metadata, service_tables

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("create extension if not exists btree_gist")
    for service in SERVICES:
        op.execute(f"create schema if not exists {service}")
    metadata.create_all(op.get_bind())
    for service in SERVICES:
        op.execute(sa.insert(service_tables(service).instance).values(one=True))
