"""The allocator with real NATS and Postgres: the ledger says what was decided, exactly once."""

import asyncio

import pytest

from tests.core.allocating import kinds
from tests.system.allocator_rig import Replica, cluster_of, spawn


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
        decided = [kind for kind in kinds(await cluster.decided()) if kind != "PoolAccounted"]
        assert decided == [
            "LeaseGranted",
            "LeaseGranted",
            "LeaseRefused",
            "LeaseReleased",
            "LeaseGranted",
        ]


@pytest.mark.parametrize(("owners", "leases"), [(16, 16), (20, 16)], ids=lambda n: f"report-45-{n}")
async def test_parallel_requests_get_distinct_addresses(
    cluster, nats_url, database_url, owners, leases
):
    """Sixteen addresses, four replicas, all requests at once: no twin, and exact refusals."""
    replicas = [Replica(nats_url, database_url) for _ in range(4)]
    for replica in replicas:
        await replica.__aenter__()
    try:
        cluster.sync()
        cluster.pool("p1", "192.0.2.0/27 192.0.2.1-192.0.2.16 192.0.2.30")
        for round_ in range(4):
            for n in range(owners):
                cluster.lb(f"r{round_}-{n}")
            await cluster.caught_up()
            assert len(await cluster.holds(leases)) == leases
            assert len(await cluster.waits(owners - leases)) == owners - leases
            for n in range(owners):
                cluster.gone("loadbalancers", f"r{round_}-{n}")
            await cluster.caught_up()
            await cluster.holds(0)
    finally:
        for replica in replicas:
            await replica.__aexit__()


async def test_a_killed_allocator_decides_everything_once(cluster, nats_url, database_url):
    """[report-2] [report-42] SIGKILL in the middle of work, again and again: no lease is double,
    none is lost, each decision is on the stream once, and releases find their lease by uid."""
    cluster.sync()
    cluster.pool("p1", "192.0.2.0/24")
    await cluster.flush()
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
