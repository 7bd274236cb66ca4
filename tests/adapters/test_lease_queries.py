"""Questions to the ledger: past moments, histories, reasons, simulations, retention."""

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from schema import objects
from services.allocator import queries, store
from services.allocator.core import Rules
from services.kit.db import driver_url
from tests.core.allocating import EVERYWHERE, World, pool_range


@pytest.fixture
async def conn(database_url: str) -> AsyncIterator[AsyncConnection]:
    engine = create_async_engine(driver_url(database_url))
    async with engine.connect() as conn, conn.begin():
        await conn.execute(sa.text("select 1"))  # begins the transaction
        yield conn
    await engine.dispose()


@pytest.fixture
async def world(conn: AsyncConnection) -> World:
    """Two addresses: a had one and is gone, b and c hold them, d waits."""
    world = World()
    world.pool("p1", "192.0.2.0/29 192.0.2.2-192.0.2.3")
    for name in "abc":
        world.lb(name)
    world.gone("loadbalancers", "a")
    world.lb("d")
    await store.take_changes(world.state)(conn)
    return world


async def test_who_held_what_at_a_moment(conn: AsyncConnection, world: World) -> None:
    """The ledger answers for every past moment, and moments before there was a lease."""
    grants = {row.name: row.since for row in await queries.leases_at(conn, world.state.now)}
    assert sorted(grants) == ["b", "c"]
    before = await queries.leases_at(conn, grants["c"] - timedelta(microseconds=1))
    assert [(row.name, row.address) for row in before] == [("a", "192.0.2.2"), ("b", "192.0.2.3")]
    earlier = await queries.leases_at(conn, grants["b"])
    assert [row.name for row in earlier] == ["a", "b"]
    assert await queries.leases_at(conn, grants["b"] - timedelta(days=1)) == []


@pytest.mark.parametrize("spelling", ["192.0.2.2", "::ffff:192.0.2.2", "192.0.2.2/32"])
async def test_the_history_of_an_address(
    conn: AsyncConnection, world: World, spelling: str
) -> None:
    """[report-49] In any spelling, one row after the other, each with why it ended."""
    history = await queries.leases_of_address(conn, spelling)
    assert [(row.name, row.release_reason) for row in history] == [
        ("a", "owner-deleted"),
        ("c", ""),
    ]
    assert history[0].until == history[1].since


async def test_why_an_owner_has_what_it_has(conn: AsyncConnection, world: World) -> None:
    """For a holder its rule; for one that waits the pools it was refused by, and its place."""
    holder = await queries.explain_owner(conn, "loadbalancers", "default", "c")
    assert holder is not None
    assert (holder.phase, holder.leases[0].rule) == ("held", "longest-released")
    waiting = await queries.explain_owner(conn, "loadbalancers", "default", "d")
    assert waiting is not None
    assert (waiting.phase, waiting.reason, waiting.ahead) == ("waiting", "PoolExhausted", 0)
    assert [(c.pool, c.reason) for c in waiting.considered] == [("p1", "PoolExhausted")]
    assert await queries.explain_owner(conn, "loadbalancers", "default", "nobody") is None
    gone = await queries.leases_of_owner(conn, "loadbalancers", "default", "a")
    assert [row.release_reason for row in gone] == ["owner-deleted"]


async def test_the_use_of_a_pool(conn: AsyncConnection, world: World) -> None:
    """Totals, holders, who waits for it, and who had what is free."""
    usage = await queries.pool_usage(conn, "p1")
    assert usage is not None
    assert (usage.total, usage.held, usage.ready) == (2, 2, True)
    assert [row.name for row in usage.holders] == ["c", "b"]
    assert usage.waiting == ["loadbalancers/default/d"]
    world.gone("loadbalancers", "d")
    world.gone("loadbalancers", "b")
    await store.take_changes(world.state)(conn)
    usage = await queries.pool_usage(conn, "p1")
    assert usage is not None
    assert usage.remembered == {"192.0.2.3": "default/b"}
    assert await queries.pool_usage(conn, "p9") is None


@pytest.mark.parametrize(
    ("text", "stranded", "woken", "problem"),
    [
        ("192.0.2.0/29 192.0.2.2-192.0.2.2", {"b": "192.0.2.3"}, {}, ""),
        ("192.0.2.0/29 192.0.2.2-192.0.2.4", {}, {"d": "192.0.2.4"}, ""),
        ("192.0.2.0/33", {}, {}, "spec.ranges[0].subnet"),
    ],
    ids=["smaller", "larger", "broken"],
)
async def test_a_simulation_tells_and_changes_nothing(
    conn: AsyncConnection,
    world: World,
    text: str,
    stranded: dict[str, str],
    woken: dict[str, str],
    problem: str,
) -> None:
    """Who would be outside, who would be served; afterwards everything is as it was."""
    held = await queries.leases_at(conn, world.state.now)
    spec = objects.IPPoolSpec(
        ranges=[pool_range(text)], selector=objects.PoolSelector(scope=[EVERYWHERE])
    )
    edited = objects.IPPool(metadata=objects.ObjectMeta(name="p1"), spec=spec)
    found = await queries.simulate(conn, edited, Rules())
    assert {k.rpartition("/")[2]: v for k, v in found.stranded.items()} == stranded
    assert {k.rpartition("/")[2]: v for k, v in found.woken.items()} == woken
    assert found.problem.startswith(problem)
    assert bool(found.problem) == bool(problem)
    assert await queries.leases_at(conn, world.state.now) == held


async def test_the_retention_ends_for_closed_leases_only(
    conn: AsyncConnection, world: World
) -> None:
    """What holds is never forgotten; what ended is, when it is old enough."""
    assert await queries.forget_closed(conn, timedelta(days=36500)) == 0
    move = "update allocator.lease set during = tstzrange('2001-01-01', '2001-01-02') "
    await conn.execute(sa.text(move + "where name = 'a'"))
    assert await queries.forget_closed(conn, timedelta(days=365)) == 1
    left = await conn.scalars(sa.text("select name from allocator.lease order by name"))
    assert left.all() == ["b", "c"]
