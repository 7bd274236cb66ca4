"""Tables of the prober."""

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

from schema.tables.base import metadata, mirror_table

mirror = mirror_table("prober")

image = sa.Table(
    "image",
    metadata,
    sa.Column("owner_uid", sa.Text, primary_key=True),
    sa.Column("namespace", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("image", pg.JSONB, nullable=False),
    sa.UniqueConstraint("namespace", "name"),
    sa.CheckConstraint("revision > 0", name="revision"),
    schema="prober",
    comment="Last BackendsResolved of each load balancer, later changes of health folded in.",
)
