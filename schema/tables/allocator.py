"""Tables of the allocator.

`lease` is the ledger: history that is only added to, a release being the end of its row's `during`.
The database refuses two leases of one address that overlap in time, unless they share it by ports
that do not overlap. `address_key` stands for the address in that constraint: a GiST index over a
number takes a row in a third of the time that one over `inet` needs. For IPv6 it is a 64-bit hash;
that two addresses in use at the same time had the same one would be refused, not granted wrongly.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

from schema.tables.base import metadata

SCHEMA: Final = "allocator"

lease = sa.Table(
    "lease",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("plural", sa.Text, nullable=False),
    sa.Column("namespace", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("uid", sa.Text, nullable=False),
    sa.Column("address", pg.INET, nullable=False),
    sa.Column("pool", sa.Text, nullable=False),
    sa.Column("during", pg.TSTZRANGE, nullable=False),
    sa.Column("rule", sa.Text, nullable=False),
    sa.Column("adopted", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("sharing_key", sa.Text, nullable=False, server_default=""),
    sa.Column(
        "slots",
        pg.INT4MULTIRANGE,
        nullable=False,
        server_default=sa.text("'{(,)}'::int4multirange"),
        comment="Ports that the lease covers: TCP as they are, UDP from 65536, SCTP from 131072.",
    ),
    sa.Column(
        "retiring",
        sa.DateTime(timezone=True),
        comment="Since when it waits for its owner to show the address that it moved to.",
    ),
    sa.Column("cause", sa.Text, nullable=False),
    sa.Column("release_cause", sa.Text, nullable=False, server_default=""),
    sa.Column("release_reason", sa.Text, nullable=False, server_default=""),
    sa.Column(
        "address_key",
        sa.BigInteger,
        sa.Computed(
            "case family(address) when 4 then address - '0.0.0.0'::inet "
            "else hashinetextended(address, 0) end",
            persisted=True,
        ),
        nullable=False,
    ),
    sa.CheckConstraint(
        "masklen(address) = case family(address) when 4 then 32 else 128 end", name="one_address"
    ),
    sa.CheckConstraint("not isempty(during) and not lower_inf(during)", name="during"),
    sa.CheckConstraint("not isempty(slots)", name="slots"),
    pg.ExcludeConstraint(
        ("address_key", "="),
        ("slots", "&&"),
        ("during", "&&"),
        using="gist",
        name="ex_lease_one_holder",
    ),
    sa.Index("ix_lease_owner", "plural", "namespace", "name"),
    sa.Index("ix_lease_address", "address"),
    sa.Index("ix_lease_live", "uid", postgresql_where=sa.text("upper_inf(during)")),
    sa.Index(
        "ix_lease_ended",
        sa.text("upper(during)"),
        postgresql_where=sa.text("not upper_inf(during)"),
    ),
    schema=SCHEMA,
    comment="Who held which address when, and why. Never deleted before its retention is over.",
)

owner = sa.Table(
    "owner",
    metadata,
    sa.Column("plural", sa.Text, primary_key=True),
    sa.Column("uid", sa.Text, primary_key=True),
    sa.Column("namespace", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("epoch", sa.Text, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("phase", sa.Text, nullable=False),
    sa.Column("ticket", sa.BigInteger, nullable=False),
    sa.Column("request", sa.Text, nullable=False, comment="JSON; what it asked for last"),
    sa.Column("refusal", sa.Text, nullable=False, server_default="", comment="JSON; why it waits"),
    sa.Column("claims", sa.Text, nullable=False, server_default="", comment="JSON; until adopted"),
    sa.Column("created", sa.Text, nullable=False, server_default=""),
    sa.Column("gone_at", sa.DateTime(timezone=True)),
    sa.Column("gone_how", sa.Text, nullable=False, server_default=""),
    sa.Column("condemned", sa.Text, nullable=False, server_default=""),
    sa.CheckConstraint("phase in ('pending', 'held', 'delegated', 'waiting')", name="phase"),
    sa.Index("ix_owner_name", "plural", "namespace", "name"),
    schema=SCHEMA,
    comment="Load balancers and Services that ask for an address, and what they last asked for.",
)

pool = sa.Table(
    "pool",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("uid", sa.Text, nullable=False),
    sa.Column("epoch", sa.Text, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("view", pg.JSONB, nullable=False),
    sa.Column("good", pg.JSONB, comment="The last view whose ranges could be read"),
    sa.Column("last_allocated", sa.Text, nullable=False, server_default=""),
    sa.Column("claims", pg.JSONB, nullable=False, comment="status.allocated, until adopted"),
    sa.Column("history", pg.JSONB, nullable=False, comment="status.allocatedHistory, likewise"),
    schema=SCHEMA,
    comment="Pools as last seen.",
)

memo = sa.Table(
    "memo",
    metadata,
    sa.Column("pool", sa.Text, primary_key=True),
    sa.Column("address", pg.INET, primary_key=True),
    sa.Column("plural", sa.Text, nullable=False),
    sa.Column("key", sa.Text, nullable=False, comment="namespace/name of the last holder"),
    sa.Column("released", sa.DateTime(timezone=True), nullable=False),
    sa.Column("order", sa.BigInteger, nullable=False),
    schema=SCHEMA,
    comment="Free addresses that were used before: the order of reuse, and who gets his back.",
)

project = sa.Table(
    "project",
    metadata,
    sa.Column("namespace", sa.Text, primary_key=True),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("uid", sa.Text, nullable=False),
    sa.Column("epoch", sa.Text, nullable=False),
    schema=SCHEMA,
    comment="Namespaces and the projects that they belong to.",
)

clock = sa.Table(
    "clock",
    metadata,
    sa.Column("one", sa.Boolean, primary_key=True, server_default=sa.true()),
    sa.Column("epoch", sa.Text, nullable=False),
    sa.Column("now", sa.DateTime(timezone=True), nullable=False),
    sa.Column("serial", sa.BigInteger, nullable=False),
    sa.Column("legacy", sa.Text, nullable=False, server_default="", comment="JSON; to be imported"),
    sa.Column("imported", sa.Text, nullable=False, server_default=""),
    sa.CheckConstraint("one", name="single_row"),
    schema=SCHEMA,
    comment="Where the deciding stands: epoch, time of the last decision, last number given out.",
)
