"""Tables of the applier."""

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

from schema.tables.base import metadata, mirror_table

mirror = mirror_table("applier")

owner = sa.Table(
    "owner",
    metadata,
    sa.Column("uid", sa.Text, primary_key=True),
    sa.Column("plural", sa.Text, nullable=False),
    sa.Column("namespace", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("applied", sa.BigInteger, nullable=False),
    sa.Column("doc", pg.JSONB, nullable=False),
    sa.Index(None, "plural", "namespace", "name"),
    sa.CheckConstraint("applied <= generation", name="applied"),
    schema="applier",
    comment="All that is decided about one object, and up to where the cluster shows it.",
)

pool = sa.Table(
    "pool",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("doc", pg.JSONB, nullable=False),
    schema="applier",
    comment="The newest account of each pool.",
)

pool_import = sa.Table(
    "pool_import",
    metadata,
    sa.Column("uid", sa.Text, primary_key=True),
    sa.Column("doc", pg.JSONB, nullable=False),
    schema="applier",
    comment="Pools of kube-vip's ConfigMaps that are still to be created.",
)

history = sa.Table(
    "history",
    metadata,
    sa.Column("pool", sa.Text, primary_key=True),
    sa.Column("address", sa.Text, primary_key=True),
    sa.Column("holder", sa.Text, nullable=False),
    sa.Column("seq", sa.BigInteger, sa.Identity(always=True), nullable=False),
    schema="applier",
    comment="Who held an address before it was released, for the status of its pool.",
)

target = sa.Table(
    "target",
    metadata,
    sa.Column("plural", sa.Text, primary_key=True),
    sa.Column("namespace", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("part", sa.Text, primary_key=True),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("next_at", sa.DateTime(timezone=True)),
    sa.Column("doc", pg.JSONB, nullable=False),
    schema="applier",
    comment="How writing one thing goes: what was tried, what succeeded, when to try again.",
)

form = sa.Table(
    "form",
    metadata,
    sa.Column("plural", sa.Text, primary_key=True),
    sa.Column("pruned", pg.ARRAY(sa.Text), nullable=False),
    schema="applier",
    comment="Status fields of ours that the schema in the cluster does not keep.",
)
