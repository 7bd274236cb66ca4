"""Tables of nrp_sync: what the cluster wants, what the provider acknowledged, and every request.

Addresses are canonical text, which the database checks. What is held at the provider (`address`,
`location`) changes only with an acknowledgement, a reading, or a request whose outcome is unknown.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

from schema.tables.base import metadata, mirror_table

SCHEMA = "nrp_sync"


def _time(name: str, *, nullable: bool = True) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _canonical(column: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(f"host({column}::inet) = {column}", name=f"{column}_canonical")


mirror = mirror_table(SCHEMA)
"""Services, Nodes and egress Pods, as far as they matter here."""

slice_ = sa.Table(
    "slice",
    metadata,
    sa.Column("namespace", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("uid", sa.Text, nullable=False),
    sa.Column("epoch", sa.Text, nullable=False),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("service", sa.Text, nullable=False, server_default=""),
    sa.Column("service_uid", sa.Text, nullable=False, server_default=""),
    sa.Column("left_out", pg.ARRAY(sa.Integer), nullable=False),
    schema=SCHEMA,
    comment="EndpointSlices; left_out counts endpoints: not ready, draining, no node, malformed.",
)

endpoint = sa.Table(
    "endpoint",
    metadata,
    sa.Column("namespace", sa.Text, primary_key=True),
    sa.Column("slice", sa.Text, primary_key=True),
    sa.Column("address", sa.Text, primary_key=True),
    sa.Column("node", sa.Text, nullable=False),
    _canonical("address"),
    schema=SCHEMA,
    comment="What each slice contributes; an address of two slices has two rows.",
)

operation = sa.Table(
    "operation",
    metadata,
    sa.Column("kind", sa.Text, primary_key=True),
    sa.Column("identity", sa.Text, primary_key=True),
    sa.Column("namespace", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("phase", sa.Text, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("wanted", pg.JSONB(none_as_null=True)),
    sa.Column("applied", pg.JSONB(none_as_null=True)),
    sa.Column("recreate", pg.JSONB(none_as_null=True)),
    sa.Column("marks", pg.JSONB, nullable=False),
    sa.Column("addresses", pg.JSONB, nullable=False),
    sa.Column("orphan", sa.Boolean, nullable=False),
    sa.Column("retries", sa.Integer, nullable=False),
    _time("retry_at"),
    sa.Column("parked", sa.Text, nullable=False),
    sa.Column("error_code", sa.Text, nullable=False),
    sa.Column("error_message", sa.Text, nullable=False),
    sa.Column("cause", sa.Text, nullable=False),
    _time("created_at", nullable=False),
    sa.CheckConstraint("kind in ('inbound', 'outbound')", name="kind"),
    sa.CheckConstraint(
        "phase in ('not_started', 'creation_in_progress', 'created', 'update_in_progress', "
        "'deletion_pending', 'deletion_in_progress')",
        name="phase",
    ),
    sa.CheckConstraint("identity = lower(identity)", name="identity_lower"),
    sa.CheckConstraint("identity <> 'default-natgw'", name="identity_reserved"),
    sa.CheckConstraint(
        "parked in ('', 'rejected', 'quota_exceeded', 'retries_exceeded')", name="parked"
    ),
    sa.CheckConstraint("parked = '' or retry_at is not null", name="parked_until"),
    schema=SCHEMA,
    comment="The life of each service at the provider, with what of it is there.",
)

location = sa.Table(
    "location",
    metadata,
    sa.Column("location", sa.Text, primary_key=True),
    sa.Column("sure", sa.Boolean, nullable=False),
    _canonical("location"),
    schema=SCHEMA,
    comment="Locations that the provider holds, surely or possibly.",
)

address = sa.Table(
    "address",
    metadata,
    sa.Column("location", sa.Text, primary_key=True),
    sa.Column("address", sa.Text, primary_key=True),
    sa.Column("services", pg.ARRAY(sa.Text), nullable=False),
    sa.Column("sure", sa.Boolean, nullable=False),
    sa.CheckConstraint("family(address::inet) = family(location::inet)", name="family_of_location"),
    sa.CheckConstraint("cardinality(services) > 0 or not sure", name="services_present"),
    _canonical("address"),
    schema=SCHEMA,
    comment="Addresses that the provider holds: these services (sure), or some of these.",
)

quarantine = sa.Table(
    "quarantine",
    metadata,
    sa.Column("location", sa.Text, primary_key=True),
    sa.Column("address", sa.Text, primary_key=True),
    sa.Column("wish", pg.ARRAY(sa.Text), nullable=False),
    sa.Column("code", sa.Text, nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    _time("since", nullable=False),
    _time("retry_at", nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    schema=SCHEMA,
    comment="Entries that the provider refused; left out until their wish changes or time is up. "
    "An empty address stands for the whole location.",
)

release = sa.Table(
    "release",
    metadata,
    sa.Column("uid", sa.Text, primary_key=True),
    sa.Column("namespace", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("traces", pg.JSONB, nullable=False),
    sa.Column("leaving", sa.Boolean, nullable=False),
    sa.Column("identity", sa.Text, nullable=False),
    sa.Column("last", sa.Boolean, nullable=False),
    schema=SCHEMA,
    comment="What egress pods left behind: [gateway, address] that the provider may still hold. "
    "A pod that is leaving keeps our finalizer until all of it is gone.",
)

request = sa.Table(
    "request",
    metadata,
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("id", sa.Text, nullable=False),
    sa.Column("lane", sa.Text, nullable=False),
    sa.Column("verb", sa.Text, nullable=False),
    sa.Column("target", sa.Text, nullable=False),
    sa.Column("services", pg.ARRAY(sa.Text), nullable=False),
    sa.Column("size", sa.Integer, nullable=False),
    sa.Column("hash", sa.Text, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    _time("sent_at", nullable=False),
    _time("finished_at"),
    sa.Column("duration", sa.Float),
    sa.Column("provider_request", sa.Text, nullable=False, server_default=""),
    sa.Column("code", sa.Text, nullable=False, server_default=""),
    sa.Column("message", sa.Text, nullable=False, server_default=""),
    sa.CheckConstraint("state in ('sent', 'ok', 'failed', 'unknown')", name="state"),
    sa.CheckConstraint("(state = 'sent') = (finished_at is null)", name="finished"),
    sa.UniqueConstraint("id"),
    sa.Index("ix_request_sent", "number", postgresql_where=sa.text("state = 'sent'")),
    sa.Index("ix_request_services", "services", postgresql_using="gin"),
    schema=SCHEMA,
    comment="Every request to the provider: written before it is sent, ended with its outcome.",
)

told = sa.Table(
    "told",
    metadata,
    sa.Column("plural", sa.Text, primary_key=True),
    sa.Column("namespace", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("image", pg.JSONB, nullable=False),
    schema=SCHEMA,
    comment="The last ProviderStateChanged of each object.",
)

view = sa.Table(
    "view",
    metadata,
    sa.Column("one", sa.Boolean, primary_key=True, server_default=sa.true()),
    _time("read_at"),
    _time("gate_until"),
    sa.Column("last_number", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("drift_found", sa.BigInteger, nullable=False, server_default="0"),
    _time("repair_asked_at"),
    sa.CheckConstraint("one", name="single_row"),
    schema=SCHEMA,
    comment="When the provider was last read completely, and until when it asked us to wait.",
)
