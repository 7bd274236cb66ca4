"""The outbox keeps a batch in one row, and owners have one index."""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

SERVICES = ("allocator", "prober", "nrp_sync", "applier")


def upgrade() -> None:
    for service in SERVICES:
        box = f"{service}.outbox"
        op.execute(f"alter table {box} add count integer not null default 1, add messages text")
        # Compressed by Postgres it would cost more than all the rest of a commit.
        op.execute(f"alter table {box} alter messages set storage external")
        op.execute(
            f"""
            update {box} set messages = json_build_array(json_build_array(
                subject, msg_id,
                (select coalesce(string_agg(key || ': ' || value || e'\\r\\n', ''), '')
                 from jsonb_each_text(headers)),
                convert_from(body, 'UTF8')::json
            ))
            """
        )
        op.execute(
            f"alter table {box} alter messages set not null, drop subject, drop msg_id,"
            " drop headers, drop body"
        )
        op.execute(
            f"comment on column {box}.count is 'Of messages; they have the ids from this one on.'"
        )
        op.execute(
            f"comment on column {box}.messages is"
            " 'JSON: [[subject, message id, header lines, body], ...]'"
        )
    op.execute("drop index allocator.ix_owner_name")
    op.execute("alter table allocator.owner drop constraint pk_owner")
    op.execute(
        "alter table allocator.owner add constraint pk_owner"
        " primary key (plural, namespace, name, uid)"
    )
