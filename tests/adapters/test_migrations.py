"""Migrations and table definitions say the same, and a migration is safe to repeat."""

import asyncio
import json

import asyncpg
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.ext.asyncio import create_async_engine

from schema.tables import SERVICES, metadata
from services.kit import db, migrate

CATALOGUE = """
select n.nspname || '.' || c.relname as name, x.text from pg_class c
join pg_namespace n on n.oid = c.relnamespace
join lateral (
  select 'constraint ' || conname || ' ' || pg_get_constraintdef(o.oid) as text
    from pg_constraint o where o.conrelid = c.oid and o.contype <> 'n'
  union all select 'index ' || pg_get_indexdef(i.indexrelid) from pg_index i
    where i.indrelid = c.oid
  union all select 'column ' || a.attname || ' ' || format_type(a.atttypid, a.atttypmod) ||
      case when a.attnotnull then ' not null' else '' end || coalesce(' default ' ||
      pg_get_expr(d.adbin, d.adrelid), '') || ' ' || a.attidentity::text ||
      a.attgenerated::text
    from pg_attribute a left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
    where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
  union all select 'comment ' || obj_description(c.oid)
  union all select 'trigger ' || pg_get_triggerdef(g.oid) || ' ' || pg_get_functiondef(g.tgfoid)
    from pg_trigger g where g.tgrelid = c.oid and not g.tgisinternal
) x on true
where n.nspname = any($1) and c.relkind in ('r', 'p') order by 1, 2
"""


async def catalogue(url):
    """Every column, constraint, index and comment of our schemas, as Postgres words it."""
    conn = await asyncpg.connect(url)
    try:
        rows = await conn.fetch(CATALOGUE, list(SERVICES))
        return [tuple(row) for row in rows]
    finally:
        await conn.close()


async def test_migrations_make_what_the_tables_say(database_url, empty_database_url):
    """A migrated database and one created from the definitions have one and the same catalogue."""
    await db.create_all(empty_database_url)

    assert await catalogue(empty_database_url) == await catalogue(database_url)


async def test_alembic_sees_no_difference(database_url):
    """Autogenerate, the tool of whoever writes the next migration, starts from nothing to do."""
    engine = create_async_engine(db.driver_url(database_url))
    options = {"include_schemas": True, "compare_type": True}
    try:
        async with engine.connect() as conn:
            difference = await conn.run_sync(
                lambda sync: compare_metadata(
                    MigrationContext.configure(
                        sync,
                        opts=options
                        | {"include_name": lambda n, kind, _: kind != "schema" or n in SERVICES},
                    ),
                    metadata,
                )
            )
    finally:
        await engine.dispose()

    assert [] == difference


async def test_two_migrations_at_once_end_at_head(empty_database_url):
    """Two replicas that migrate at the same time both succeed."""
    done = await asyncio.gather(
        migrate.upgrade_async(empty_database_url), migrate.upgrade_async(empty_database_url)
    )

    assert [db.head(), db.head()] == done


async def test_instance_identity_exists_once_per_service(database_url):
    """Each service's database has one identity, and a second is refused by the database."""
    engine = create_async_engine(db.driver_url(database_url))
    try:
        async with engine.connect() as conn:
            counts = [
                await conn.scalar(sa.text(f"select count(*) from {service}.instance"))
                for service in SERVICES
            ]
    finally:
        await engine.dispose()

    assert [1] * len(SERVICES) == counts


async def test_decisions_that_wait_survive_the_migration_of_their_table(empty_database_url):
    """0002 puts what 0001 left in the outbox into the new form, and loses nothing of it."""
    await migrate.upgrade_async(empty_database_url, "0001")
    conn = await asyncpg.connect(empty_database_url)
    try:
        await conn.execute(
            "insert into prober.outbox (subject, msg_id, headers, body) values"
            ' (\'lb.a\', \'m1\', \'{"Lb-Type": "X.v1", "Lb-Cause": "e:1"}\', $1),'
            " ('lb.b', 'm2', '{}', $2)",
            '{"a": "ä\\n"}'.encode(),
            b'{"b":[1, 2]}',
        )
        await migrate.upgrade_async(empty_database_url)
        rows = await conn.fetch("select id, count, messages from prober.outbox order by id")
    finally:
        await conn.close()

    assert [(1, 1), (2, 1)] == [(row["id"], row["count"]) for row in rows]
    [[first], [second]] = [json.loads(row["messages"]) for row in rows]
    assert first[:2] == ["lb.a", "m1"]
    assert sorted(first[2].split("\r\n")) == ["", "Lb-Cause: e:1", "Lb-Type: X.v1"]
    assert first[3] == {"a": "ä\n"}
    assert second == ["lb.b", "m2", "", {"b": [1, 2]}]
