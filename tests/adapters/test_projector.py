"""The projector against real NATS and Postgres: every fact counts once, whatever happens."""

import asyncio
import contextlib
import random
import signal
import subprocess
import sys

import asyncpg
import nats
import pytest

from schema import events, objects
from services.kit import config
from services.kit.bus import Bus
from services.kit.projector import Projector
from services.kit.runtime import Runtime
from tests.fakes.tally import TABLE, tally
from tests.feeding import T0, Feeder
from tests.waiting import eventually


def namespace(name, version="1"):
    meta = objects.ObjectMeta(name=name, uid="u", resource_version=version)
    return objects.Namespace(metadata=meta)


@contextlib.asynccontextmanager
async def feeder_of(url):
    feeder = await Feeder.start(url)
    try:
        yield feeder
    finally:
        await feeder.close()


class Replica:
    def __init__(self, nats_url, database_url):
        env = {
            "LBLEDGER_NATS_URL": nats_url,
            "LBLEDGER_DATABASE_URL": database_url,
            "LBLEDGER_PROJECTOR_TAKEOVER_POLL_S": "0.05",
        }
        self.rt = Runtime.create("prober", config.load(env))
        self.tally = tally()
        self.projector = Projector(self.rt, self.tally)
        self.task = None

    async def __aenter__(self):
        self.task = asyncio.create_task(self.projector.run())
        return self

    async def __aexit__(self, *_):
        self.rt.stop.set()
        await asyncio.wait_for(self.task, 10)
        await self.rt.close()


@pytest.fixture(autouse=True, params=["in-turn", "ahead"])
def pace(request, monkeypatch):
    """Whether the projection goes on while a batch is being written."""
    monkeypatch.setenv("TALLY", request.param)
    return request.param


@pytest.fixture
async def table(database_url):
    conn = await asyncpg.connect(database_url)
    await conn.execute(TABLE)
    yield conn
    await conn.close()


async def counts(conn):
    return {r["name"]: r["count"] for r in await conn.fetch("select * from prober.tally")}


async def begun(conn):
    """Wait until a service has its place in the log: what comes from then on is all counted."""
    query = (
        "select count(*) = 2 from prober.stream_offset where created <> ''"
        " and (stream = 'KUBE' or stream = 'LB (produced)' and seq = 0)"
    )
    await eventually(lambda: conn.fetchval(query), timeout=30)


async def stored(conn, **wanted):
    """Wait until these counts, at least, are committed."""

    async def there():
        return wanted.items() <= (await counts(conn)).items()

    await eventually(there, timeout=30)


async def decisions(url, stream="LB"):
    bus = await Bus.connect(url, name="reader")
    try:
        state = await bus.stream_state(stream)
        puller = bus.puller(stream, start_seq=1)
        found = []
        while len(found) < state.messages:
            found += await puller.fetch(1000, timeout=1.0)
        await puller.close()
        return found
    finally:
        await bus.close()


async def test_each_fact_counts_once_and_each_decision_is_published(nats_url, database_url, table):
    """A fact becomes a row and a decision; the decision names its cause and leaves the outbox."""
    async with feeder_of(nats_url) as feeder, Replica(nats_url, database_url):
        seqs = [await feeder.seen(namespace(f"n{i}")) for i in range(5)]
        await stored(table, **{f"n{i}": 1 for i in range(5)})
        await eventually(lambda: table.fetchval("select count(*) = 0 from prober.outbox"))

        found = await decisions(nats_url)

        assert {f"n{i}": 1 for i in range(5)} == await counts(table)
        assert [f"e1:{seq}" for seq in seqs] == [m.headers["Lb-Cause"] for m in found]
        assert {"LeaseRefused.v1"} == {m.headers["Lb-Type"] for m in found}


async def test_poison_costs_one_dead_letter_and_holds_up_nobody(nats_url, database_url, table):
    """[report-43] Refused, undecodable, crashing and constraint-breaking events become dead letters
    with reason and sequence; every other event, also of the same objects, is applied."""
    async with feeder_of(nats_url) as feeder, Replica(nats_url, database_url):
        bad = [
            await feeder.seen(namespace("poison-1")),
            (await feeder.raw("kube.namespaces._.bad1", b"")).seq,
            (await feeder.raw("kube.namespaces._.bad2", b"\xff\xfe")).seq,
            (await feeder.raw("kube.namespaces._.bad3", b"null")).seq,
            await feeder.seen(namespace("broken-1")),
            await feeder.seen(namespace("overflow-1")),
        ]
        await feeder.raw("kube.namespaces._.later", b'{"type":"Invention.v99"}')
        for i in range(100):
            await feeder.seen(namespace(f"n{i}"))
        await eventually(lambda: table.fetchval("select count(*) = 100 from prober.tally"))

        dead = await table.fetch("select seq, reason from prober.dead_letter order by seq")

        assert bad == [row["seq"] for row in dead]
        assert "must not be called poison" in dead[0]["reason"]
        assert "count" in dead[-1]["reason"] or "constraint" in dead[-1]["reason"]
        async with asyncio.timeout(10):
            letters = []
            while len(letters) < 6:
                letters = [m for m in await decisions(nats_url) if m.subject == "lb.dead.prober"]
        assert bad == [events.decode(m.data).sequence for m in letters]


async def test_killed_replicas_lose_nothing_and_repeat_nothing(nats_url, database_url, table):
    """[report-42] Three competing replicas, killed with SIGKILL at random moments: a count that is
    not idempotent ends exact, and every decision was published exactly once, in order."""
    total, names = 3000, 20
    rng = random.Random(7)
    replicas = []

    def spawn():
        return subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.tally", nats_url, database_url],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    async def done():
        rows = await counts(table)
        return sum(rows.values()) >= total

    async with feeder_of(nats_url) as feeder:
        try:
            replicas = [spawn() for _ in range(3)]
            await begun(table)
            facts = [namespace(f"n{i % names}", str(i)) for i in range(total)]
            for start in range(0, total, 500):
                await feeder.send_all(
                    [events.NamespaceSeen(at=T0, object=obj) for obj in facts[start : start + 500]]
                )
                victim = rng.randrange(3)
                replicas[victim].send_signal(signal.SIGKILL)
                replicas[victim].wait(10)
                replicas[victim] = spawn()
            await eventually(done, timeout=60)
            await eventually(
                lambda: table.fetchval("select count(*) = 0 from prober.outbox"), timeout=30
            )
        finally:
            for replica in replicas:
                replica.send_signal(signal.SIGKILL)
                replica.wait(10)

    assert {f"n{i}": total // names for i in range(names)} == await counts(table)
    said = {}
    for message in await decisions(nats_url):
        event = events.decode(message.data)
        said.setdefault(event.owner.name, []).append(int(event.message))
    assert {f"n{i}": list(range(1, total // names + 1)) for i in range(names)} == said


async def test_local_inputs_are_applied_once_also_when_one_is_bad(nats_url, database_url, table):
    """A local input shares the transaction; one that raises is dropped alone."""
    async with feeder_of(nats_url), Replica(nats_url, database_url) as replica:
        await replica.projector.until_active()
        for item in ("a", "broken", "b"):
            replica.projector.submit(item)
        await eventually(lambda: table.fetchval("select count(*) = 2 from prober.tally"))

        assert {"local-a": 1, "local-b": 1} == await counts(table)


async def test_only_one_replica_is_active_and_another_takes_over(nats_url, database_url, table):
    """Effects outside are allowed on one replica; when it stops the next one is active."""
    async with feeder_of(nats_url) as feeder:
        async with Replica(nats_url, database_url) as first:
            await first.projector.until_active()
            async with Replica(nats_url, database_url) as second:
                await feeder.seen(namespace("n1"))
                await stored(table, n1=1)
                assert not second.projector.active

                first.rt.stop.set()
                await eventually(lambda: second.projector.active)
                await feeder.seen(namespace("n1", "2"))
                await stored(table, n1=2)


async def test_report_39_empty_bus_is_taken_up_without_a_restart(nats_server, database_url, table):
    """NATS comes back with an empty store: streams are made again, standing decisions are stated
    again, and new facts are applied by the same process."""
    async with Replica(nats_server.url, database_url):
        async with feeder_of(nats_server.url) as feeder:
            await feeder.seen(namespace("n1"))
            await stored(table, n1=1)
        await nats_server.restart(wipe=True)
        async with feeder_of(nats_server.url) as feeder:
            await feeder.seen(namespace("n2"))
            await stored(table, n2=1)
        found = await eventually(lambda: decisions(nats_server.url), timeout=10)

        assert "Restated" in {events.decode(m.data).reason for m in found}


async def test_report_50_late_and_missing_outbox_ids_do_not_stop_the_relay(
    nats_url, database_url, table
):
    """A row that becomes visible after a later one is published, once; a hole is passed."""
    other = await asyncpg.connect(database_url)
    insert = (
        "insert into prober.outbox (messages)"
        " values (json_build_array(json_build_array($1::text, $2::text, '', 'x'))) returning id"
    )
    try:
        async with feeder_of(nats_url), Replica(nats_url, database_url) as replica:
            await replica.projector.until_active()
            slow = other.transaction()
            await slow.start()
            await other.fetchval(insert, "lb.lease.services.x.late", "m1")
            await table.fetchval(insert, "lb.lease.services.x.early", "m2")
            rolled = table.transaction()
            await rolled.start()
            await table.fetchval(insert, "lb.lease.services.x.never", "m3")
            await rolled.rollback()
            async with asyncio.timeout(10):
                while not await decisions(nats_url):
                    await asyncio.sleep(0.05)
            await slow.commit()
            await eventually(
                lambda: table.fetchval("select count(*) = 0 from prober.outbox"), timeout=10
            )

            subjects = [m.subject.rpartition(".")[2] for m in await decisions(nats_url)]
            assert ["early", "late"] == subjects
    finally:
        await other.close()


LEAVE = """
insert into prober.outbox (messages)
select json_build_array(json_build_array('lb.lease.services.left.n' || n, 'left:' || n, '', ''))
from generate_series(1, 4000) n
"""


async def test_decisions_made_during_a_takeover_are_published(nats_url, database_url, table):
    """While a relay finds out which rows of the replica before it were sent, new decisions are
    committed: they are published too, after what was left."""
    await table.execute(LEAVE)
    async with feeder_of(nats_url) as feeder:
        for i in range(20):
            await feeder.seen(namespace(f"n{i}"))
        async with Replica(nats_url, database_url):
            for i in range(20, 40):
                await feeder.seen(namespace(f"n{i}"))
            await stored(table, n39=1)
            await eventually(
                lambda: table.fetchval("select count(*) = 0 from prober.outbox"), timeout=30
            )

        found = await decisions(nats_url)

        assert 4040 == len({m.subject for m in found}) == len(found)
        assert ["left"] * 4000 == [m.subject.split(".")[3] for m in found[:4000]]


@pytest.mark.parametrize("others", [1, 100], ids=["singly", "in a batch"])
async def test_decision_over_the_limit_of_the_bus_stops_nothing(
    nats_url, database_url, table, others
):
    """A decision that the bus does not carry is given up with an error; all others go out."""
    insert = (
        "insert into prober.outbox (messages) values (json_build_array("
        "json_build_array('lb.lease.services.x.big', 'big', '', repeat('x', 2000000))))"
    )
    await table.execute(insert)
    async with feeder_of(nats_url) as feeder:
        await feeder.send_all(
            [events.NamespaceSeen(at=T0, object=namespace(f"n{i}")) for i in range(others)]
        )
        async with Replica(nats_url, database_url):
            await stored(table, **{f"n{i}": 1 for i in range(others)})
            await eventually(
                lambda: table.fetchval("select count(*) = 0 from prober.outbox"), timeout=30
            )

        found = await decisions(nats_url)

        assert others == len({m.subject for m in found}) == len(found)


async def test_ids_of_the_outbox_follow_the_commits_of_all_replicas(nats_url, database_url, table):
    """A relay tells by the id what was already sent, so who takes over never goes back in it."""
    async with feeder_of(nats_url) as feeder:
        for turn in range(3):
            async with Replica(nats_url, database_url):
                await feeder.seen(namespace("n1", str(turn)))
                await stored(table, n1=turn + 1)

        found = await decisions(nats_url)

        ids = [int(m.headers["Lb-Outbox"].partition(":")[2]) for m in found]
        assert 3 == len(ids)
        assert sorted(set(ids)) == ids


@pytest.mark.parametrize("code", ["40001", "40P01"], ids=["serialization", "deadlock"])
async def test_report_51_a_failed_transaction_is_run_again_as_a_whole(
    nats_url, database_url, table, code
):
    """A serialization failure or deadlock re-runs the batch; one effect, one decision."""
    await table.execute(
        f"""
        create table prober.failures (left_over int); insert into prober.failures values (2);
        create sequence prober.attempts;
        create function prober.fail() returns trigger language plpgsql as $$
        begin
          if nextval('prober.attempts') <= 2 then
            raise exception 'on purpose' using errcode = '{code}';
          end if;
          return new;
        end $$;
        create trigger fail before insert on prober.tally
          for each row execute function prober.fail()
        """
    )
    async with feeder_of(nats_url) as feeder, Replica(nats_url, database_url):
        await feeder.seen(namespace("n1"))
        await eventually(lambda: table.fetchval("select count(*) = 1 from prober.tally"))
        await eventually(lambda: table.fetchval("select count(*) = 0 from prober.outbox"))

        assert {"n1": 1} == await counts(table)
        assert 1 == len(await decisions(nats_url))
        assert 0 == await table.fetchval("select count(*) from prober.dead_letter")


async def test_retention_that_overtook_is_healed_by_a_compacted_read(nats_url, database_url, table):
    """Facts pruned before they were read: the last fact of each object is taken, and an object
    whose complete list does not show it any more is reported gone."""
    async with feeder_of(nats_url) as feeder:
        async with Replica(nats_url, database_url) as replica:
            await feeder.seen(namespace("n1"))
            await stored(table, n1=1)
        for i in range(5):
            await feeder.seen(namespace("n2", str(i)))
        await purge(nats_url, keep=1)
        async with Replica(nats_url, database_url) as replica:
            await eventually(
                lambda: table.fetchval("select count(*) = 1 from prober.tally where name = 'n2'")
            )
            await feeder.seen(namespace("n3"))
            await stored(table, n3=1)

            assert 1 == replica.tally.counts["n2"]


async def purge(url, keep):
    """Let retention take all but the newest messages, as the server does it."""
    client = await nats.connect(url)
    manager = client.jetstream()
    config = (await manager.stream_info("KUBE")).config
    config.max_msgs = keep
    await manager.update_stream(config)
    await client.close()
