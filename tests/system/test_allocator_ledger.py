"""The allocator with real NATS and Postgres: the ledger says what was decided, exactly once."""

import asyncio
import contextlib
import json
from datetime import timedelta

import nats
import pytest

from services.cli import explain
from services.kit.bus import BusError
from tests.core.allocating import kinds, shown
from tests.system.allocator_rig import Replica, cluster_of, spawn
from tests.waiting import eventually

SUMMARIES = {"PoolAccounted", "LeasesRestated"}


@pytest.fixture
async def cluster(nats_url, database_url):
    async with cluster_of(nats_url, database_url) as cluster:
        yield cluster


async def test_addresses_are_granted_refused_released_and_passed_on(
    cluster, nats_url, database_url
):
    """Two addresses for three load balancers; the third gets the one that a deletion frees."""
    async with Replica(nats_url, database_url):
        cluster.sync()
        cluster.pool("p1", "192.0.2.0/29 192.0.2.2-192.0.2.3")
        for name in ("a", "b", "c"):
            cluster.lb(name)
        await cluster.flush()
        held = await cluster.holds(2)
        assert {"default/a": "192.0.2.2", "default/b": "192.0.2.3"} == held
        assert await cluster.waits(1) == {"default/c"}

        cluster.gone("loadbalancers", "a")
        await cluster.caught_up()

        held = await cluster.holds(2)
        assert {"default/b": "192.0.2.3", "default/c": "192.0.2.2"} == held
        decided = [kind for kind in kinds(await cluster.decided()) if kind not in SUMMARIES]
        assert decided == [
            "LeaseGranted",
            "LeaseGranted",
            "LeaseRefused",
            "LeaseReleased",
            "LeaseGranted",
        ]


@pytest.mark.parametrize("rounds", [200], ids=lambda n: f"report-45-{n}-rounds")
async def test_parallel_requests_get_distinct_addresses(cluster, nats_url, database_url, rounds):
    """Sixteen addresses, four replicas, sixteen or twenty requests at once, one replica after the
    other leaving: in each round no twin, and as many refusals as there are too many."""
    async with contextlib.AsyncExitStack() as stack:
        replicas = [Replica(nats_url, database_url) for _ in range(4)]
        for replica in replicas:
            await stack.enter_async_context(replica)
        cluster.sync()
        cluster.pool("p1", "192.0.2.0/27 192.0.2.1-192.0.2.16 192.0.2.30")
        before: list[str] = []
        for round_ in range(rounds):
            names = [f"r{round_}-{n}" for n in range(20 if round_ % 2 else 16)]
            for name in before:
                cluster.gone("loadbalancers", name)
            for name in names:
                cluster.lb(name)
            if round_ in (50, 100, 150):
                replicas.pop(0).rt.stop.set()
            await cluster.taken()
            held, waiting = await cluster.held(), await cluster.waiting()
            assert len(held) == 16, round_
            assert len(waiting) == len(names) - 16, round_
            assert {f"default/{name}" for name in names} == held.keys() | waiting
            before = names


async def test_a_killed_allocator_decides_everything_once(cluster, nats_url, database_url):
    """[report-2] [report-42] SIGKILL in the middle of work, again and again: no lease is double,
    none is lost, each decision is on the stream once, and releases find their lease by uid."""
    async with Replica(nats_url, database_url):
        cluster.sync()
        cluster.pool("p1", "192.0.2.0/24")
        await cluster.caught_up()
    for round_ in range(4):
        process = spawn(nats_url, database_url)
        try:
            for n in range(40):
                cluster.lb(f"lb-{round_}-{n}")
                if round_ and n % 2:
                    cluster.gone("loadbalancers", f"lb-{round_ - 1}-{n}")
            sending = asyncio.create_task(cluster.flush())
            await cluster.holds_at_least(round_ * 20 + 10)
        finally:
            process.kill()
            process.wait(10)
        await sending
    async with Replica(nats_url, database_url):
        await cluster.caught_up()
        held = await cluster.holds(40 + 3 * 20)
    decided = await cluster.decided()
    grants = [e for e in decided if type(e).__name__ == "LeaseGranted"]
    releases = [e for e in decided if type(e).__name__ == "LeaseReleased"]
    assert len({e.lease for e in grants}) == len(grants) == 160
    assert len({e.lease for e in releases}) == len(releases) == 60
    assert sorted(held) == sorted(
        {f"default/{e.owner.name}" for e in grants} - {f"default/{e.owner.name}" for e in releases}
    )


async def test_a_restart_decides_nothing_new(cluster, nats_url, database_url):
    """Rows are the memory: the next allocator goes on where the last one stopped, waiting owners
    at their old place in the order, and a deletion while nobody was there is made up for."""
    async with Replica(nats_url, database_url):
        cluster.sync()
        cluster.pool("p1", "192.0.2.0/29 192.0.2.2-192.0.2.3")
        for name in ("a", "b", "first", "second"):
            cluster.lb(name)
        await cluster.caught_up()
    before = await cluster.held()
    decided = len(await cluster.decided())
    for name in ("a", "first"):
        cluster.lb(name)
    async with Replica(nats_url, database_url):
        await cluster.caught_up()
        assert before == await cluster.held()
        assert decided == len(await cluster.decided())
    cluster.gone("loadbalancers", "a")
    async with Replica(nats_url, database_url):
        await cluster.caught_up()
        assert {"default/b": "192.0.2.3", "default/first": "192.0.2.2"} == await cluster.held()
        assert {"default/second"} == await cluster.waiting()


async def test_a_cluster_with_addresses_is_adopted_by_an_empty_database(
    cluster, nats_url, database_url
):
    """[report-7] What is shown is taken over before anything is granted, whatever the order of
    the lists; who comes late gets what is left."""
    cluster.svc("late")
    cluster.pool("p1", "192.0.2.0/29 192.0.2.2-192.0.2.4")
    cluster.svc("a", ingress=["192.0.2.4"])
    cluster.lb("b", status=shown("192.0.2.2", "p1"))
    cluster.sync()
    async with Replica(nats_url, database_url):
        await cluster.caught_up()
        held = await cluster.held()
    assert {"default/a": "192.0.2.4", "default/b": "192.0.2.2", "default/late": "192.0.2.3"} == held
    decided = [kind for kind in kinds(await cluster.decided()) if kind not in SUMMARIES]
    assert ["LeaseAdopted", "LeaseAdopted", "LeaseGranted"] == decided


async def test_a_column_added_in_the_middle_of_work_is_no_trouble(cluster, nats_url, database_url):
    """[report-48] Prepared statements that a migration made invalid cost no event."""
    async with Replica(nats_url, database_url):
        cluster.sync()
        cluster.pool("p1", "192.0.2.0/24")
        cluster.lb("before")
        await cluster.caught_up()
        await cluster.database.execute("alter table allocator.lease add column note text")
        await cluster.database.execute("alter table allocator.owner add column note text")
        for n in range(20):
            cluster.lb(f"lb{n}")
        cluster.gone("loadbalancers", "before")
        await cluster.caught_up()
        assert len(await cluster.holds(20)) == 20
    assert not await cluster.database.fetchval("select count(*) from allocator.dead_letter")


async def test_a_lease_written_by_hand_is_found_out(cluster, nats_url, database_url):
    """The database refuses the grant that memory believed in; memory is read anew, everybody is
    served beside what stands there, and the lease that has no owner is reclaimed."""
    async with Replica(nats_url, database_url):
        cluster.sync()
        cluster.pool("p1", "192.0.2.0/29")
        cluster.lb("a")
        await cluster.caught_up()
        await cluster.database.execute(
            "insert into allocator.lease (id, plural, namespace, name, uid, address, pool, during, "
            "rule, cause) values ('x:0:0', 'services', 'hand', 'made', 'x', '192.0.2.3', 'p1', "
            "tstzrange('2020-01-01', null), '', '')"
        )
        for name in ("b", "c", "d"):
            cluster.lb(name)
        await cluster.caught_up()
        assert not await cluster.database.fetchval("select count(*) from allocator.dead_letter")
        assert {f"default/{name}" for name in "abcd"} == set(await cluster.held())
        row = "select release_reason from allocator.lease where id = 'x:0:0'"
        assert "reclaimed" == await cluster.database.fetchval(row)


async def test_a_lost_decision_log_is_stated_anew(cluster, nats_url, database_url):
    """[report-39] The LB stream is gone with everything in it: leases, refusals and accounts are
    said once more from the ledger, and nobody's address changes."""
    async with Replica(nats_url, database_url):
        cluster.sync()
        cluster.pool("p1", "192.0.2.0/29 192.0.2.2-192.0.2.3")
        for name in ("a", "b", "c"):
            cluster.lb(name)
        await cluster.caught_up()
        held = await cluster.holds(2)
    client = await nats.connect(nats_url)
    try:
        await client.jetstream().delete_stream("LB")
    finally:
        await client.close()
    async with Replica(nats_url, database_url):

        async def stated() -> bool:
            try:
                said = kinds(await cluster.decided())
            except BusError:
                return False  # the stream is not there again yet
            return {"LeaseAdopted", "LeaseRefused", "PoolAccounted"} <= set(said)

        await eventually(stated, 30)
        await cluster.caught_up()
        decided = await cluster.decided()
        assert held == await cluster.held()
    adopted = {e.owner.name: e.address for e in decided if type(e).__name__ == "LeaseAdopted"}
    assert adopted == {"a": "192.0.2.2", "b": "192.0.2.3"}
    assert {"c"} == {e.owner.name for e in decided if type(e).__name__ == "LeaseRefused"}


async def test_what_an_owner_had_at_a_moment(cluster, nats_url, database_url, monkeypatch, capsys):
    """`lb explain --at` shows the lease of then, and of the chain what had happened by then."""
    monkeypatch.setenv("LBLEDGER_NATS_URL", nats_url)
    monkeypatch.setenv("LBLEDGER_DATABASE_URL", database_url)

    async def told(*options):
        capsys.readouterr()
        code = await asyncio.to_thread(explain.lb_explain, "default/a", *options)
        return code, capsys.readouterr().out

    async with Replica(nats_url, database_url):
        cluster.sync()
        cluster.pool("p1", "192.0.2.0/29")
        cluster.lb("a")
        await cluster.caught_up()
        then = await cluster.database.fetchval("select clock_timestamp()")
        cluster.gone("loadbalancers", "a")
        await cluster.caught_up()
    # The facts of this test have a clock of their own, which is not that of the stream.
    move = "update allocator.lease set during = tstzrange($1::timestamptz - interval '1h', now())"
    await cluster.database.execute(move, then)

    code, text = await told(then.isoformat(), True)
    assert code == 0
    answer = json.loads("{" + text.partition("{")[2])
    assert [row["address"] for row in answer["held"]] == ["192.0.2.2"]
    assert [e["event"]["type"].partition(".")[0] for e in answer["chain"]] == [
        "LoadBalancerSeen",
        "LeaseGranted",
    ]
    code, text = await told(then.isoformat(), False)
    assert "192.0.2.2 of pool p1: never-used" in text
    code, text = await told((then - timedelta(days=1)).isoformat(), False)
    assert code == 1
    code, text = await told("", False)
    assert "LeaseReleased" in text
    assert "of pool p1: never-used" not in text
