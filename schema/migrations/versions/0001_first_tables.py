"""First tables: one schema per service, and the extension that the lease ledger needs."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql as pg

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SERVICES = ("allocator", "prober", "nrp_sync", "applier")


# Joins by index whatever the statistics say: the plan is made once, perhaps on an empty table.
LEASE_OVERLAP = """
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


def upgrade() -> None:
    op.execute("create extension if not exists btree_gist")
    for service in SERVICES:
        op.execute(f"create schema if not exists {service}")
    create_tables()
    op.execute(LEASE_OVERLAP)
    for when in ("insert", "update"):
        op.execute(
            f"create trigger lease_overlap_{when} after {when} on allocator.lease "
            "referencing new table as fresh for each statement "
            "execute function allocator.lease_overlap()"
        )
    for service in SERVICES:
        op.execute(f"insert into {service}.instance default values")


def create_tables() -> None:
    op.create_table(
        "clock",
        sa.Column("one", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("epoch", sa.Text(), nullable=False),
        sa.Column("now", sa.DateTime(timezone=True), nullable=False),
        sa.Column("serial", sa.BigInteger(), nullable=False),
        sa.Column(
            "legacy", sa.Text(), server_default="", nullable=False, comment="JSON; to be imported"
        ),
        sa.Column("imported", sa.Text(), server_default="", nullable=False),
        sa.CheckConstraint("one", name=op.f("ck_clock_single_row")),
        sa.PrimaryKeyConstraint("one", name=op.f("pk_clock")),
        schema="allocator",
        comment="Where the deciding stands: epoch, time of the last decision, last number given out.",
    )
    op.create_table(
        "dead_letter",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column(
            "at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_dead_letter")),
        schema="allocator",
        comment="Events that this service could not take, with why.",
    )
    op.create_index(
        op.f("ix_dead_letter_at"), "dead_letter", ["at"], unique=False, schema="allocator"
    )
    op.create_table(
        "instance",
        sa.Column("one", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("id", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
        sa.CheckConstraint("one", name=op.f("ck_instance_single_row")),
        sa.PrimaryKeyConstraint("one", name=op.f("pk_instance")),
        schema="allocator",
        comment="Identity of this database, part of the outbox header.",
    )
    op.create_table(
        "lease",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("plural", sa.Text(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("uid", sa.Text(), nullable=False),
        sa.Column("address", pg.INET(), nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("during", pg.TSTZRANGE(), nullable=False),
        sa.Column("rule", sa.Text(), nullable=False),
        sa.Column("adopted", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("sharing_key", sa.Text(), server_default="", nullable=False),
        sa.Column(
            "slots",
            pg.INT4MULTIRANGE(),
            server_default=sa.text("'{(,)}'::int4multirange"),
            nullable=False,
            comment="Ports that the lease covers: TCP as they are, UDP from 65536, SCTP from 131072.",
        ),
        sa.Column(
            "retiring",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="Since when it waits for its owner to show the address that it moved to.",
        ),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("release_cause", sa.Text(), server_default="", nullable=False),
        sa.Column("release_reason", sa.Text(), server_default="", nullable=False),
        sa.Column(
            "address_key",
            sa.BigInteger(),
            sa.Computed(
                "case family(address) when 4 then address - '0.0.0.0'::inet else hashinetextended(address, 0) end",
                persisted=True,
            ),
            nullable=False,
        ),
        pg.ExcludeConstraint(
            (sa.column("address_key"), "="),
            (sa.column("slots"), "&&"),
            (sa.column("during"), "&&"),
            where=sa.text("not upper_inf(during) or sharing_key <> ''"),
            using="gist",
            name="ex_lease_one_holder",
        ),
        sa.CheckConstraint(
            "masklen(address) = case family(address) when 4 then 32 else 128 end",
            name=op.f("ck_lease_one_address"),
        ),
        sa.CheckConstraint(
            "not isempty(during) and not lower_inf(during)", name=op.f("ck_lease_during")
        ),
        sa.CheckConstraint("not isempty(slots)", name=op.f("ck_lease_slots")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_lease")),
        schema="allocator",
        comment="Who held which address when, and why. Never deleted before its retention is over.",
    )
    op.create_index("ix_lease_address", "lease", ["address"], unique=False, schema="allocator")
    op.create_index(
        "ix_lease_ended",
        "lease",
        [sa.literal_column("upper(during)")],
        unique=False,
        schema="allocator",
        postgresql_where=sa.text("not upper_inf(during)"),
    )
    op.create_index(
        "ix_lease_owner", "lease", ["plural", "namespace", "name"], unique=False, schema="allocator"
    )
    op.create_index(
        "ix_lease_shared",
        "lease",
        ["sharing_key"],
        unique=False,
        schema="allocator",
        postgresql_where=sa.text("sharing_key <> ''"),
    )
    op.create_index(
        "uq_lease_held",
        "lease",
        ["address"],
        unique=True,
        schema="allocator",
        postgresql_where=sa.text("upper_inf(during) and sharing_key = ''"),
    )
    op.create_table(
        "memo",
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("address", pg.INET(), nullable=False),
        sa.Column("plural", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False, comment="namespace/name of the last holder"),
        sa.Column("released", sa.DateTime(timezone=True), nullable=False),
        sa.Column("order", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("pool", "address", name=op.f("pk_memo")),
        schema="allocator",
        comment="Free addresses that were used before: the order of reuse, and who gets his back.",
    )
    op.create_table(
        "outbox",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("msg_id", sa.Text(), nullable=False),
        sa.Column("headers", pg.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
        schema="allocator",
        comment="Decisions committed and not yet acknowledged by the stream.",
    )
    op.create_table(
        "owner",
        sa.Column("plural", sa.Text(), nullable=False),
        sa.Column("uid", sa.Text(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("ticket", sa.BigInteger(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False, comment="JSON; what it asked for last"),
        sa.Column(
            "refusal", sa.Text(), server_default="", nullable=False, comment="JSON; why it waits"
        ),
        sa.Column(
            "claims", sa.Text(), server_default="", nullable=False, comment="JSON; until adopted"
        ),
        sa.Column("created", sa.Text(), server_default="", nullable=False),
        sa.Column("gone_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("gone_how", sa.Text(), server_default="", nullable=False),
        sa.Column("condemned", sa.Text(), server_default="", nullable=False),
        sa.CheckConstraint(
            "phase in ('pending', 'held', 'delegated', 'waiting')", name=op.f("ck_owner_phase")
        ),
        sa.PrimaryKeyConstraint("plural", "uid", name=op.f("pk_owner")),
        schema="allocator",
        comment="Load balancers and Services that ask for an address, and what they last asked for.",
    )
    op.create_index(
        "ix_owner_name", "owner", ["plural", "namespace", "name"], unique=False, schema="allocator"
    )
    op.create_table(
        "pool",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("uid", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("view", pg.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column(
            "good",
            pg.JSONB(astext_type=sa.Text()),
            nullable=True,
            comment="The last view whose ranges could be read",
        ),
        sa.Column("last_allocated", sa.Text(), server_default="", nullable=False),
        sa.Column(
            "claims",
            pg.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="status.allocated, until adopted",
        ),
        sa.Column(
            "history",
            pg.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="status.allocatedHistory, likewise",
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_pool")),
        schema="allocator",
        comment="Pools as last seen.",
    )
    op.create_table(
        "project",
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("uid", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("namespace", name=op.f("pk_project")),
        schema="allocator",
        comment="Namespaces and the projects that they belong to.",
    )
    op.create_table(
        "stream_offset",
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Text(), server_default="", nullable=False),
        sa.Column(
            "updated_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.CheckConstraint("seq >= 0", name=op.f("ck_stream_offset_seq")),
        sa.PrimaryKeyConstraint("stream", name=op.f("pk_stream_offset")),
        schema="allocator",
        comment="Position in each stream, moved in the transaction that holds its effects.",
    )
    op.create_table(
        "sync_mark",
        sa.Column("plural", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("absent", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.PrimaryKeyConstraint("plural", name=op.f("pk_sync_mark")),
        schema="allocator",
        comment="Kinds whose complete list has been seen, by the epoch in which it was.",
    )
    op.create_table(
        "dead_letter",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column(
            "at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_dead_letter")),
        schema="applier",
        comment="Events that this service could not take, with why.",
    )
    op.create_index(
        op.f("ix_dead_letter_at"), "dead_letter", ["at"], unique=False, schema="applier"
    )
    op.create_table(
        "form",
        sa.Column("plural", sa.Text(), nullable=False),
        sa.Column("pruned", pg.ARRAY(sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("plural", name=op.f("pk_form")),
        schema="applier",
        comment="Status fields of ours that the schema in the cluster does not keep.",
    )
    op.create_table(
        "history",
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.PrimaryKeyConstraint("pool", "address", name=op.f("pk_history")),
        schema="applier",
        comment="Who held an address before it was released, for the status of its pool.",
    )
    op.create_table(
        "instance",
        sa.Column("one", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("id", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
        sa.CheckConstraint("one", name=op.f("ck_instance_single_row")),
        sa.PrimaryKeyConstraint("one", name=op.f("pk_instance")),
        schema="applier",
        comment="Identity of this database, part of the outbox header.",
    )
    op.create_table(
        "mirror",
        sa.Column("plural", sa.Text(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("uid", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("view", pg.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("plural", "namespace", "name", name=op.f("pk_mirror")),
        schema="applier",
        comment="Last fact of each object, as far as this service needs it.",
    )
    op.create_table(
        "outbox",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("msg_id", sa.Text(), nullable=False),
        sa.Column("headers", pg.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
        schema="applier",
        comment="Decisions committed and not yet acknowledged by the stream.",
    )
    op.create_table(
        "owner",
        sa.Column("uid", sa.Text(), nullable=False),
        sa.Column("plural", sa.Text(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("applied", sa.BigInteger(), nullable=False),
        sa.Column("doc", pg.JSONB(astext_type=sa.Text()), nullable=False),
        sa.CheckConstraint("applied <= generation", name=op.f("ck_owner_applied")),
        sa.PrimaryKeyConstraint("uid", name=op.f("pk_owner")),
        schema="applier",
        comment="All that is decided about one object, and up to where the cluster shows it.",
    )
    op.create_index(
        op.f("ix_owner_plural_namespace_name"),
        "owner",
        ["plural", "namespace", "name"],
        unique=False,
        schema="applier",
    )
    op.create_table(
        "pool",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("doc", pg.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_pool")),
        schema="applier",
        comment="The newest account of each pool.",
    )
    op.create_table(
        "pool_import",
        sa.Column("uid", sa.Text(), nullable=False),
        sa.Column("doc", pg.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("uid", name=op.f("pk_pool_import")),
        schema="applier",
        comment="Pools of kube-vip's ConfigMaps that are still to be created.",
    )
    op.create_table(
        "stream_offset",
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Text(), server_default="", nullable=False),
        sa.Column(
            "updated_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.CheckConstraint("seq >= 0", name=op.f("ck_stream_offset_seq")),
        sa.PrimaryKeyConstraint("stream", name=op.f("pk_stream_offset")),
        schema="applier",
        comment="Position in each stream, moved in the transaction that holds its effects.",
    )
    op.create_table(
        "sync_mark",
        sa.Column("plural", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("absent", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.PrimaryKeyConstraint("plural", name=op.f("pk_sync_mark")),
        schema="applier",
        comment="Kinds whose complete list has been seen, by the epoch in which it was.",
    )
    op.create_table(
        "target",
        sa.Column("plural", sa.Text(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("part", sa.Text(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("doc", pg.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("plural", "namespace", "name", "part", name=op.f("pk_target")),
        schema="applier",
        comment="How writing one thing goes: what was tried, what succeeded, when to try again.",
    )
    op.create_table(
        "address",
        sa.Column("location", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("services", pg.ARRAY(sa.Text()), nullable=False),
        sa.Column("sure", sa.Boolean(), nullable=False),
        sa.CheckConstraint(
            "cardinality(services) > 0 or not sure", name=op.f("ck_address_services_present")
        ),
        sa.CheckConstraint(
            "family(address::inet) = family(location::inet)",
            name=op.f("ck_address_family_of_location"),
        ),
        sa.CheckConstraint(
            "host(address::inet) = address", name=op.f("ck_address_address_canonical")
        ),
        sa.PrimaryKeyConstraint("location", "address", name=op.f("pk_address")),
        schema="nrp_sync",
        comment="Addresses that the provider holds: these services (sure), or some of these.",
    )
    op.create_table(
        "dead_letter",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column(
            "at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_dead_letter")),
        schema="nrp_sync",
        comment="Events that this service could not take, with why.",
    )
    op.create_index(
        op.f("ix_dead_letter_at"), "dead_letter", ["at"], unique=False, schema="nrp_sync"
    )
    op.create_table(
        "endpoint",
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("slice", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.CheckConstraint(
            "host(address::inet) = address", name=op.f("ck_endpoint_address_canonical")
        ),
        sa.PrimaryKeyConstraint("namespace", "slice", "address", name=op.f("pk_endpoint")),
        schema="nrp_sync",
        comment="What each slice contributes; an address of two slices has two rows.",
    )
    op.create_table(
        "instance",
        sa.Column("one", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("id", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
        sa.CheckConstraint("one", name=op.f("ck_instance_single_row")),
        sa.PrimaryKeyConstraint("one", name=op.f("pk_instance")),
        schema="nrp_sync",
        comment="Identity of this database, part of the outbox header.",
    )
    op.create_table(
        "location",
        sa.Column("location", sa.Text(), nullable=False),
        sa.Column("sure", sa.Boolean(), nullable=False),
        sa.CheckConstraint(
            "host(location::inet) = location", name=op.f("ck_location_location_canonical")
        ),
        sa.PrimaryKeyConstraint("location", name=op.f("pk_location")),
        schema="nrp_sync",
        comment="Locations that the provider holds, surely or possibly.",
    )
    op.create_table(
        "mirror",
        sa.Column("plural", sa.Text(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("uid", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("view", pg.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("plural", "namespace", "name", name=op.f("pk_mirror")),
        schema="nrp_sync",
        comment="Last fact of each object, as far as this service needs it.",
    )
    op.create_table(
        "operation",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("identity", sa.Text(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("wanted", pg.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("applied", pg.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("recreate", pg.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("marks", pg.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("addresses", pg.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("orphan", sa.Boolean(), nullable=False),
        sa.Column("retries", sa.Integer(), nullable=False),
        sa.Column("retry_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("parked", sa.Text(), nullable=False),
        sa.Column("error_code", sa.Text(), nullable=False),
        sa.Column("error_message", sa.Text(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "identity <> 'default-natgw'", name=op.f("ck_operation_identity_reserved")
        ),
        sa.CheckConstraint("kind in ('inbound', 'outbound')", name=op.f("ck_operation_kind")),
        sa.CheckConstraint(
            "parked = '' or retry_at is not null", name=op.f("ck_operation_parked_until")
        ),
        sa.CheckConstraint(
            "parked in ('', 'rejected', 'quota_exceeded', 'retries_exceeded')",
            name=op.f("ck_operation_parked"),
        ),
        sa.CheckConstraint(
            "phase in ('not_started', 'creation_in_progress', 'created', 'update_in_progress', 'deletion_pending', 'deletion_in_progress')",
            name=op.f("ck_operation_phase"),
        ),
        sa.CheckConstraint("identity = lower(identity)", name=op.f("ck_operation_identity_lower")),
        sa.PrimaryKeyConstraint("kind", "identity", name=op.f("pk_operation")),
        schema="nrp_sync",
        comment="The life of each service at the provider, with what of it is there.",
    )
    op.create_table(
        "outbox",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("msg_id", sa.Text(), nullable=False),
        sa.Column("headers", pg.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
        schema="nrp_sync",
        comment="Decisions committed and not yet acknowledged by the stream.",
    )
    op.create_table(
        "quarantine",
        sa.Column("location", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("wish", pg.ARRAY(sa.Text()), nullable=False),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("retry_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("location", "address", name=op.f("pk_quarantine")),
        schema="nrp_sync",
        comment="Entries that the provider refused; left out until their wish changes or time is up. An empty address stands for the whole location.",
    )
    op.create_table(
        "release",
        sa.Column("uid", sa.Text(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("traces", pg.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("leaving", sa.Boolean(), nullable=False),
        sa.Column("identity", sa.Text(), nullable=False),
        sa.Column("last", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("uid", name=op.f("pk_release")),
        schema="nrp_sync",
        comment="What egress pods left behind: [gateway, address] that the provider may still hold. A pod that is leaving keeps our finalizer until all of it is gone.",
    )
    op.create_table(
        "request",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("lane", sa.Text(), nullable=False),
        sa.Column("verb", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("services", pg.ARRAY(sa.Text()), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("sent_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("duration", sa.Float(), nullable=True),
        sa.Column("provider_request", sa.Text(), server_default="", nullable=False),
        sa.Column("code", sa.Text(), server_default="", nullable=False),
        sa.Column("message", sa.Text(), server_default="", nullable=False),
        sa.CheckConstraint(
            "(state = 'sent') = (finished_at is null)", name=op.f("ck_request_finished")
        ),
        sa.CheckConstraint(
            "state in ('sent', 'ok', 'failed', 'unknown')", name=op.f("ck_request_state")
        ),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_request")),
        sa.UniqueConstraint("id", name=op.f("uq_request_id")),
        schema="nrp_sync",
        comment="Every request to the provider: written before it is sent, ended with its outcome.",
    )
    op.create_index(
        "ix_request_sent",
        "request",
        ["number"],
        unique=False,
        schema="nrp_sync",
        postgresql_where=sa.text("state = 'sent'"),
    )
    op.create_index(
        "ix_request_services",
        "request",
        ["services"],
        unique=False,
        schema="nrp_sync",
        postgresql_using="gin",
    )
    op.create_table(
        "slice",
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("uid", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("service", sa.Text(), server_default="", nullable=False),
        sa.Column("service_uid", sa.Text(), server_default="", nullable=False),
        sa.Column("left_out", pg.ARRAY(sa.Integer()), nullable=False),
        sa.PrimaryKeyConstraint("namespace", "name", name=op.f("pk_slice")),
        schema="nrp_sync",
        comment="EndpointSlices; left_out counts endpoints: not ready, draining, no node, malformed.",
    )
    op.create_table(
        "stream_offset",
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Text(), server_default="", nullable=False),
        sa.Column(
            "updated_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.CheckConstraint("seq >= 0", name=op.f("ck_stream_offset_seq")),
        sa.PrimaryKeyConstraint("stream", name=op.f("pk_stream_offset")),
        schema="nrp_sync",
        comment="Position in each stream, moved in the transaction that holds its effects.",
    )
    op.create_table(
        "sync_mark",
        sa.Column("plural", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("absent", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.PrimaryKeyConstraint("plural", name=op.f("pk_sync_mark")),
        schema="nrp_sync",
        comment="Kinds whose complete list has been seen, by the epoch in which it was.",
    )
    op.create_table(
        "told",
        sa.Column("plural", sa.Text(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("image", pg.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("plural", "namespace", "name", name=op.f("pk_told")),
        schema="nrp_sync",
        comment="The last ProviderStateChanged of each object.",
    )
    op.create_table(
        "view",
        sa.Column("one", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("read_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("gate_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_number", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("drift_found", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("repair_asked_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("one", name=op.f("ck_view_single_row")),
        sa.PrimaryKeyConstraint("one", name=op.f("pk_view")),
        schema="nrp_sync",
        comment="When the provider was last read completely, and until when it asked us to wait.",
    )
    op.create_table(
        "dead_letter",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column(
            "at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_dead_letter")),
        schema="prober",
        comment="Events that this service could not take, with why.",
    )
    op.create_index(op.f("ix_dead_letter_at"), "dead_letter", ["at"], unique=False, schema="prober")
    op.create_table(
        "image",
        sa.Column("owner_uid", sa.Text(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("image", pg.JSONB(astext_type=sa.Text()), nullable=False),
        sa.CheckConstraint("revision > 0", name=op.f("ck_image_revision")),
        sa.PrimaryKeyConstraint("owner_uid", name=op.f("pk_image")),
        sa.UniqueConstraint("namespace", "name", name=op.f("uq_image_namespace_name")),
        schema="prober",
        comment="Last BackendsResolved of each load balancer, later changes of health folded in.",
    )
    op.create_table(
        "instance",
        sa.Column("one", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("id", sa.Uuid(), server_default=sa.text("gen_random_uuid()"), nullable=False),
        sa.CheckConstraint("one", name=op.f("ck_instance_single_row")),
        sa.PrimaryKeyConstraint("one", name=op.f("pk_instance")),
        schema="prober",
        comment="Identity of this database, part of the outbox header.",
    )
    op.create_table(
        "mirror",
        sa.Column("plural", sa.Text(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("uid", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("view", pg.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("plural", "namespace", "name", name=op.f("pk_mirror")),
        schema="prober",
        comment="Last fact of each object, as far as this service needs it.",
    )
    op.create_table(
        "outbox",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("msg_id", sa.Text(), nullable=False),
        sa.Column("headers", pg.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
        schema="prober",
        comment="Decisions committed and not yet acknowledged by the stream.",
    )
    op.create_table(
        "stream_offset",
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Text(), server_default="", nullable=False),
        sa.Column(
            "updated_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.CheckConstraint("seq >= 0", name=op.f("ck_stream_offset_seq")),
        sa.PrimaryKeyConstraint("stream", name=op.f("pk_stream_offset")),
        schema="prober",
        comment="Position in each stream, moved in the transaction that holds its effects.",
    )
    op.create_table(
        "sync_mark",
        sa.Column("plural", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("absent", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.PrimaryKeyConstraint("plural", name=op.f("pk_sync_mark")),
        schema="prober",
        comment="Kinds whose complete list has been seen, by the epoch in which it was.",
    )
