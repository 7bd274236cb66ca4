"""The outbox of the projector when much is left over, or a paused replica wakes up."""

from tests.adapters.test_projector import (
    Replica,
    decisions,
    feeder_of,
    namespace,
    stored,
    table,
)
from tests.waiting import eventually

__all__ = ["table"]

# More than a relay takes into memory at once; the last of them is about the owner n1.
LEAVE = """
insert into prober.outbox (id, count, messages) overriding system value
select min(n), 7, json_agg(json_build_array(
  'lb.lease.services.' || case n when 21000 then 'x.n1' else 'left.n' || n end,
  'left:' || n, '', '') order by n)
from generate_series(1, 21000) n group by (n - 1) / 7 order by (n - 1) / 7
"""


async def test_what_was_left_goes_out_before_what_is_decided_later(nats_url, database_url, table):
    """However much the replica before left behind, a decision of today about the same owner comes
    after its older one."""
    await table.execute(LEAVE)
    async with feeder_of(nats_url) as feeder:
        await feeder.seen(namespace("n1"))
        async with Replica(nats_url, database_url):
            await stored(table, n1=1)
            await eventually(
                lambda: table.fetchval("select count(*) = 0 from prober.outbox"), timeout=30
            )
        found = await decisions(nats_url)

    about = [m.headers["Nats-Msg-Id"] for m in found if m.subject == "lb.lease.services.x.n1"]
    assert 21_001 == len(found)
    assert "left:21000" == about[0]
    assert 2 == len(about)


async def test_a_restored_database_loses_no_decision_and_repeats_none(
    nats_url, database_url, table
):
    """The database comes back as it was some time ago, with rows that have been published since and
    the numbers that were given since: the rows are not sent again, and what is decided now, and was
    not sent by the replica that decided it, is taken for neither of them."""
    async with feeder_of(nats_url) as feeder:
        async with Replica(nats_url, database_url):
            await feeder.seen(namespace("n1"))
            await stored(table, n1=1)
            await emptied(table)
        before = await table.fetchval("select last_value from prober.outbox_id_seq")
        await table.execute(
            "insert into prober.outbox (messages)"
            ' values (\'[["lb.lease.services.x.n1", "old", "", {}]]\')'
        )
        left = await table.fetchrow("select * from prober.outbox")
        async with Replica(nats_url, database_url):
            for turn in range(30):
                await feeder.seen(namespace("n1", str(turn)))
            await stored(table, n1=31)
            await emptied(table)
        # The restored state: the row is back, and so is the sequence.
        await table.execute("select setval('prober.outbox_id_seq', $1)", before)
        await table.execute(
            "insert into prober.outbox (id, count, messages)"
            " overriding system value values ($1, $2, $3)",
            *left.values(),
        )
        async with Replica(nats_url, database_url) as replica:
            await replica.projector.until_active()
            # As left by a replica that decided it after the restore, and was killed.
            await table.execute(
                "insert into prober.outbox (messages)"
                ' values (\'[["lb.lease.services.x.n1", "new", "", {}]]\')'
            )
            await emptied(table)
        found = [m.headers["Nats-Msg-Id"] for m in await decisions(nats_url)]

    ids = [m.headers["Lb-Outbox"] for m in await decisions(nats_url)]
    assert 33 == len(found) == len(set(found)) == len(set(ids))
    assert "new" == found[-1]


async def emptied(conn):
    await eventually(lambda: conn.fetchval("select count(*) = 0 from prober.outbox"), timeout=30)
