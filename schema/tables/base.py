"""What every consuming service keeps beside its own tables.

`stream_offset` is the fence: a batch commits only if `(epoch, seq, version)` is still what this
replica last saw, so any number of replicas is safe and one makes progress. `version` grows with
every commit, also with one that moves no sequence.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

SERVICES: Final = ("allocator", "prober", "nrp_sync", "applier")

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class ServiceTables(NamedTuple):
    stream_offset: sa.Table
    outbox: sa.Table
    dead_letter: sa.Table
    instance: sa.Table
    sync_mark: sa.Table


def _now() -> sa.Function[object]:
    return sa.func.clock_timestamp()


def service_tables(service: str) -> ServiceTables:
    """The common tables of one service, created once and shared from then on."""
    if f"{service}.stream_offset" not in metadata.tables:
        _define(service)
    names = ServiceTables._fields
    return ServiceTables(*(metadata.tables[f"{service}.{name}"] for name in names))


def _define(service: str) -> None:
    sa.Table(
        "stream_offset",
        metadata,
        sa.Column("stream", sa.Text, primary_key=True),
        sa.Column("epoch", sa.Text, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("created", sa.Text, nullable=False, server_default=""),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False, server_default=_now()),
        sa.CheckConstraint("seq >= 0", name="seq"),
        schema=service,
        comment="Position in each stream, moved in the transaction that holds its effects.",
    )
    sa.Table(
        "outbox",
        metadata,
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column(
            "count",
            sa.Integer,
            nullable=False,
            server_default="1",
            comment="Of messages; they have the ids from this one on.",
        ),
        sa.Column(
            "messages",
            sa.Text,
            nullable=False,
            comment="JSON: [[subject, message id, header lines, body], ...]",
        ),
        schema=service,
        comment="Decisions committed and not yet acknowledged by the stream.",
    )
    sa.Table(
        "dead_letter",
        metadata,
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("stream", sa.Text, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False, server_default=_now()),
        sa.Index(None, "at"),
        schema=service,
        comment="Events that this service could not take, with why.",
    )
    sa.Table(
        "instance",
        metadata,
        sa.Column("one", sa.Boolean, primary_key=True, server_default=sa.true()),
        sa.Column("id", sa.Uuid, nullable=False, server_default=sa.func.gen_random_uuid()),
        sa.CheckConstraint("one", name="single_row"),
        schema=service,
        comment="Identity of this database, part of the outbox header.",
    )
    sa.Table(
        "sync_mark",
        metadata,
        sa.Column("plural", sa.Text, primary_key=True),
        sa.Column("epoch", sa.Text, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("absent", sa.Boolean, nullable=False, server_default=sa.false()),
        schema=service,
        comment="Kinds whose complete list has been seen, by the epoch in which it was.",
    )


def mirror_table(service: str, name: str = "mirror") -> sa.Table:
    """A table for services.kit.mirror: the last fact of each object that a service follows."""
    return sa.Table(
        name,
        metadata,
        sa.Column("plural", sa.Text, primary_key=True),
        sa.Column("namespace", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("uid", sa.Text, nullable=False),
        sa.Column("epoch", sa.Text, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("view", pg.JSONB, nullable=False),
        schema=service,
        comment="Last fact of each object, as far as this service needs it.",
    )


for _service in SERVICES:
    service_tables(_service)
