"""Tables of the allocator.

`lease` is the ledger: history that is only added to, a release being the end of its row's `during`.
The database refuses two leases of one address that overlap in time, unless they share it by ports
that do not overlap. Three constraints do that together, because a GiST index takes three times as
long for a row as all the rest, and most rows are born as the only holder of their address:
- `uq_lease_held`: one unshared lease per address holds at a time (a unique index);
- `ex_lease_one_holder`: leases that are over, and shared ones, do not overlap (an exclusion);
- `lease_overlap`, a trigger for each statement: what is written overlaps nothing of the other kind.

`address_key` stands for the address in the exclusion: GiST takes a number in a third of the time
that it needs for `inet`. For IPv6 it is a 64-bit hash; two addresses that had the same one at the
same time would be refused, not granted wrongly.
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
        where=sa.text("not upper_inf(during) or sharing_key <> ''"),
        name="ex_lease_one_holder",
    ),
    sa.Index("ix_lease_owner", "plural", "namespace", "name"),
    sa.Index("ix_lease_address", "address"),
    sa.Index(
        "uq_lease_held",
        "address",
        unique=True,
        postgresql_where=sa.text("upper_inf(during) and sharing_key = ''"),
    ),
    sa.Index("ix_lease_shared", "sharing_key", postgresql_where=sa.text("sharing_key <> ''")),
    sa.Index(
        "ix_lease_ended",
        sa.text("upper(during)"),
        postgresql_where=sa.text("not upper_inf(during)"),
    ),
    schema=SCHEMA,
    comment="Who held which address when, and why. Never deleted before its retention is over.",
)

# Joins by index whatever the statistics say: the plan is made once, perhaps on an empty table.
_OVERLAP: Final = """
create or replace function allocator.lease_overlap() returns trigger language plpgsql
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
declare
    found record;
begin
    select n.address, n.id as one, l.id as other into found
    from fresh n join allocator.lease l on l.address = n.address
    where l.id <> n.id and l.during && n.during and l.slots && n.slots limit 1;
    if found.one is not null then
        raise exclusion_violation using message = format(
            'lease %s of %s overlaps lease %s', found.one, host(found.address), found.other);
    end if;
    return null;
end $$
"""
for _statement in (
    _OVERLAP,
    "create trigger lease_overlap_insert after insert on allocator.lease "
    "referencing new table as fresh for each statement execute function allocator.lease_overlap()",
    "create trigger lease_overlap_update after update on allocator.lease "
    "referencing new table as fresh for each statement execute function allocator.lease_overlap()",
):
    _ddl = sa.DDL(_statement.replace("%", "%%"))  # type: ignore[no-untyped-call]
    sa.event.listen(lease, "after_create", _ddl)

owner = sa.Table(
    "owner",
    metadata,
    sa.Column("plural", sa.Text, primary_key=True),
    sa.Column("namespace", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("uid", sa.Text, primary_key=True),
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
