"""Where a consumer goes on when the log is not what it was: nothing lost, nobody held up."""

import pytest

from schema import events
from services.kit.bus import Bus
from tests.adapters.test_projector import (
    Replica,
    counts,
    decisions,
    feeder_of,
    namespace,
    purge,
    stored,
    table,
)
from tests.feeding import T0 as FEED_TIME
from tests.feeding import Feeder
from tests.waiting import eventually

__all__ = ["table"]


@pytest.mark.parametrize("bad", ["poison-1", "broken-1", "overflow-1"])
async def test_a_bad_fact_does_not_hold_up_a_compacted_read(nats_url, database_url, table, bad):
    """[report-43] Retention overtook, and among the last facts of all objects is one that can't be
    taken: it costs one dead letter, all others are applied, the service goes on."""
    async with feeder_of(nats_url) as feeder:
        async with Replica(nats_url, database_url):
            await feeder.seen(namespace("n1"))
            await stored(table, n1=1)
        for i in range(5):
            await feeder.seen(namespace("n2", str(i)))
        wrong = await feeder.seen(namespace(bad))
        garbled = (await feeder.raw("kube.namespaces._.garbled", b"null")).seq
        await feeder.seen(namespace("n3"))
        await purge(nats_url, keep=4)
        async with Replica(nats_url, database_url):
            await stored(table, n2=1, n3=1)
            await feeder.seen(namespace("n4"))
            await stored(table, n4=1)

    dead = await table.fetch("select seq from prober.dead_letter order by seq")
    assert [wrong, garbled] == [row["seq"] for row in dead]
    assert bad not in await counts(table)


async def test_reading_again_repeats_no_dead_letter(nats_url, database_url, table):
    """What was refused in its turn is not refused again when the compacted log is read."""
    async with feeder_of(nats_url) as feeder:
        async with Replica(nats_url, database_url):
            await feeder.seen(namespace("poison-1"))
            await feeder.raw("kube.namespaces._.garbled", b"null")
            await feeder.seen(namespace("n1"))
            await stored(table, n1=1)
        for i in range(5):
            await feeder.seen(namespace("n2", str(i)))
        await table.execute("update prober.stream_offset set seq = seq - 1 where stream = 'KUBE'")
        async with Replica(nats_url, database_url) as replica:
            replica.projector._reread_next = True
            await feeder.seen(namespace("n3"))
            await stored(table, n3=1)

    assert 2 == await table.fetchval("select count(*) from prober.dead_letter")


async def test_a_lost_tail_that_grew_again_is_noticed(nats_server, database_url, table):
    """The log lost messages that were taken, and by the time that the consumer looks it is longer
    than before: what was said at the numbers that it believes to know is taken all the same."""
    url = nats_server.url
    async with feeder_of(url) as feeder, Replica(url, database_url):
        for i in range(10):
            await feeder.seen(namespace("n1", str(i)))
        await stored(table, n1=10)
    # The same stream with another history, as after a power cut of the server.
    await nats_server.restart(wipe=True)
    feeder = await Feeder.start(url, epoch="e2")
    try:
        await feeder.seen(namespace("n2"))
        await feeder.synced("namespaces")
        for i in range(20):
            await feeder.seen(namespace("n3", str(i)))
        bus = await Bus.connect(url, name="test")
        created = (await bus.stream_state("KUBE")).created
        await bus.close()
        await table.execute("update prober.stream_offset set created = $1", created)
        async with Replica(url, database_url):
            await feeder.seen(namespace("n4"))
            await stored(table, n4=1, n2=1)

        epoch = await table.fetchval("select epoch from prober.stream_offset where stream = 'KUBE'")
        assert "e2" == epoch
    finally:
        await feeder.close()


async def test_a_compacted_read_that_was_cut_off_is_begun_again(nats_url, database_url, table):
    """A replica that ends in the middle of it leaves a mark, so that the next one reads all."""
    async with feeder_of(nats_url) as feeder:
        async with Replica(nats_url, database_url):
            await feeder.seen(namespace("n1"))
            await feeder.seen(namespace("n2"))
            await stored(table, n1=1, n2=1)
        await table.execute(
            "update prober.stream_offset set seq = 1 where stream = 'LB (produced)'"
        )
        await table.execute("delete from prober.tally where name = 'n1'")
        async with Replica(nats_url, database_url):
            await stored(table, n1=1)
            await eventually(
                lambda: table.fetchval(
                    "select seq = 0 from prober.stream_offset where stream = 'LB (produced)'"
                )
            )


async def test_decisions_in_flight_leave_the_outbox_when_memory_is_read_again(
    nats_url, database_url, table
):
    """Inputs that can't be taken make memory be loaded again, also while decisions are on their
    way: each is published once, and none is forgotten in the table."""
    async with feeder_of(nats_url) as feeder, Replica(nats_url, database_url):
        for turn in range(20):
            facts = [namespace(f"n{turn}-{i}") for i in range(60)]
            facts.insert(30, namespace(f"broken-{turn}"))
            await feeder.send_all(
                [events.NamespaceSeen(at=FEED_TIME, object=fact) for fact in facts]
            )
        await stored(table, **{"n19-59": 1})
        await eventually(
            lambda: table.fetchval("select count(*) = 0 from prober.outbox"), timeout=20
        )
        found = await decisions(nats_url)

    said = [m.headers["Nats-Msg-Id"] for m in found]
    assert 1220 == len(said) == len(set(said))
