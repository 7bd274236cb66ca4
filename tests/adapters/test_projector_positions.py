"""Where a consumer goes on when the log is not what it was: nothing lost, nobody held up."""

import asyncio
import shutil

import pytest

from sandbox.servers import NatsServer
from schema import events
from services.kit.bus import Bus
from tests.adapters.test_projector import (
    Replica,
    begun,
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
        await begun(table)
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


async def test_a_service_without_a_past_does_not_decide_history_again(
    nats_url, database_url, table
):
    """Beside a log that is older than its database, it begins with the last fact of each object,
    and goes on with every fact after that. Nothing is done outside before it has caught up."""
    async with feeder_of(nats_url) as feeder:
        for i in range(30):
            await feeder.seen(namespace(f"n{i % 3}", str(i)))
        async with Replica(nats_url, database_url) as replica:
            await begun(table)
            await feeder.seen(namespace("n1", "30"))
            await feeder.seen(namespace("n1", "31"))
            await stored(table, n0=1, n1=3, n2=1)
            await eventually(lambda: replica.projector.active)

        found = await decisions(nats_url)

    assert 5 == len(found)


async def test_nothing_is_done_outside_before_the_log_is_taken(nats_url, database_url, table):
    """Back after a long time: effects are allowed when all that was missed is taken, and also when
    the end of the log holds nothing for this service."""
    async with feeder_of(nats_url) as feeder:
        async with Replica(nats_url, database_url) as replica:
            await begun(table)
        facts = [namespace("n1", str(i)) for i in range(3000)]
        await feeder.send_all([events.NamespaceSeen(at=FEED_TIME, object=o) for o in facts])
        async with Replica(nats_url, database_url) as replica:
            await asyncio.wait_for(replica.projector.until_active(), 30)
            assert {"n1": 3000} == await counts(table)


@pytest.mark.parametrize("how", ["running", "stopped", "stopped, and grown again"])
async def test_a_lost_tail_of_decisions_is_stated_again(tmp_path, database_url, table, how):
    """The stream of decisions comes back without its last acknowledged messages, with the same age:
    who made them says them again."""
    state, copy = tmp_path / "state", tmp_path / "copy"
    where = state / "jetstream" / "$G" / "streams" / "LB"

    async def published():
        return await table.fetchval("select count(*) = 0 from prober.outbox")

    async def restated(url):
        found = [events.decode(m.data) for m in await decisions(url) if "other" not in m.subject]
        return {e.owner.name: e.message for e in found if e.reason == "Restated"}

    async with NatsServer(state) as server:
        replica = Replica(server.url, database_url)
        async with replica, feeder_of(server.url) as feeder:
            await begun(table)
            await feeder.seen(namespace("n1"))
            await stored(table, n1=1)
            await eventually(published)
            await server.halt()
            shutil.copytree(where, copy)
            await server.start()
            await feeder.bus.wait_connected(20)
            for i in range(3):
                await feeder.seen(namespace("n2", str(i)))
            await stored(table, n2=3)
            await eventually(published)
            if how != "running":
                replica.rt.stop.set()
                await asyncio.wait_for(replica.task, 10)
            await server.kill()
            shutil.rmtree(where)
            shutil.copytree(copy, where)
            await server.start()
            await feeder.bus.wait_connected(20)
            if "grown" in how:
                other = feeder.bus.publisher("LB")
                for i in range(9):
                    await other.publish("lb.applied.services.x.other", b"{}", {}, msg_id=f"o{i}")
                await other.close()
            if how == "running":
                await eventually(lambda: restated(server.url), timeout=30)
        if how != "running":
            async with Replica(server.url, database_url):
                await eventually(lambda: restated(server.url), timeout=30)
        assert {"n1": "1", "n2": "3"} == await restated(server.url)
