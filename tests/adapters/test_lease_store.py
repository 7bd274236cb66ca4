"""The ledger's rows: what the database refuses, and that memory comes back as it was."""

from collections.abc import AsyncIterator

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from services.allocator import store
from services.allocator.core import State
from services.allocator.core.state_of import fingerprint
from services.kit.db import driver_url
from tests.core.allocating import World, shown

INSERT = """
    insert into allocator.lease
        (id, plural, namespace, name, uid, address, pool, during, rule, cause, slots, sharing_key)
    values (:id, 'loadbalancers', 'default', :id, :id, cast(cast(:address as text) as inet), 'p1',
        cast(cast(:during as text) as tstzrange), '', '',
        cast(cast(:slots as text) as int4multirange), :key)
"""


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(driver_url(database_url))
    yield engine
    await engine.dispose()


async def insert(
    engine: AsyncEngine,
    lease: str,
    address: str,
    during: str = "[2026-01-01,)",
    slots: str = "{(,)}",
    key: str = "",
) -> None:
    async with engine.begin() as conn:
        await conn.execute(
            sa.text(INSERT),
            {"id": lease, "address": address, "during": during, "slots": slots, "key": key},
        )


async def save(engine: AsyncEngine, state: State) -> None:
    async with engine.begin() as conn:
        await conn.execute(sa.text("select 1"))  # as the projector's move of the offset does
        await store.take_changes(state)(conn)


async def reload(engine: AsyncEngine, world: World) -> State:
    state = State(world.rules)
    async with engine.connect() as conn:
        await store.load(conn, state)
    return state


@pytest.mark.parametrize("address", ["192.0.2.5", "2001:db8::5"])
async def test_two_leases_of_one_address_never_overlap_in_time(
    engine: AsyncEngine, address: str
) -> None:
    """The database refuses a second holder, whatever the code above it believes."""
    await insert(engine, "a", address, "[2026-01-01,)")
    with pytest.raises(sa.exc.IntegrityError):
        await insert(engine, "b", address, "[2026-02-01,)")
    with pytest.raises(sa.exc.IntegrityError):
        await insert(engine, "b", address, "[2026-02-01,2026-03-01)")
    await insert(engine, "b", address, "[2025-01-01,2026-01-01)")
    with pytest.raises(sa.exc.IntegrityError):
        await insert(engine, "c", address, "[2025-06-01,2025-07-01)")
    with pytest.raises(sa.exc.IntegrityError):
        await insert(engine, "c", address, "[2025-06-01,2025-07-01)", key="k")
    with pytest.raises(sa.exc.IntegrityError):
        await insert(engine, "c", address, slots="{[80,81)}", key="k")
    await insert(engine, "free", "192.0.2.77", "[2025-01-01,2026-01-01)")
    with pytest.raises(sa.exc.IntegrityError):
        await insert(engine, "late", "192.0.2.77", "[2025-12-31,)")
    with pytest.raises(sa.exc.IntegrityError):
        async with engine.begin() as conn:
            await conn.execute(sa.text("update allocator.lease set address = '192.0.2.77'"))


async def test_sharers_of_an_address_differ_in_port_or_protocol(engine: AsyncEngine) -> None:
    """80/TCP, 443/TCP and 80/UDP go together; a second 80/TCP, or all ports, does not."""
    await insert(engine, "a", "192.0.2.5", slots="{[80,81)}", key="k")
    await insert(engine, "b", "192.0.2.5", slots="{[443,444)}", key="k")
    await insert(engine, "c", "192.0.2.5", slots="{[65616,65617)}", key="k")
    with pytest.raises(sa.exc.IntegrityError):
        await insert(engine, "d", "192.0.2.5", slots="{[80,81),[8080,8081)}", key="k")
    with pytest.raises(sa.exc.IntegrityError):
        await insert(engine, "e", "192.0.2.5")


@pytest.mark.parametrize(
    "address", ["192.0.2.0/24", "192.0.2.5/31", "2001:db8::/64"], ids=lambda a: f"report-49-{a}"
)
async def test_a_lease_is_of_one_address(engine: AsyncEngine, address: str) -> None:
    """A prefix is not an address: no /0 or /24 twin of a host can exist."""
    with pytest.raises(sa.exc.IntegrityError):
        await insert(engine, "a", address)


async def test_an_empty_time_is_no_lease(engine: AsyncEngine) -> None:
    """A lease that ends when it begins would be invisible to every question."""
    with pytest.raises(sa.exc.IntegrityError):
        await insert(engine, "a", "192.0.2.5", "[2026-01-01,2026-01-01)")


async def test_memory_comes_back_as_it_was(engine: AsyncEngine) -> None:
    """What load() builds equals what save() was given, after every step of a mixed history."""
    world = World(synced=False)
    world.namespace("default", "local:p-1")
    world.pool("p1", "192.0.2.0/29", "2001:db8::/64")
    world.pool("bad", "192.0.2.0/33")
    world.lb("early", status=shown("192.0.2.4", "p1"))
    await save(engine, world.state)
    assert fingerprint(await reload(engine, world)) == fingerprint(world.state)
    world.sync()
    steps = [
        lambda: [world.lb(name) for name in "abcdefg"],
        lambda: world.gone("loadbalancers", "b"),
        lambda: world.gone("loadbalancers", "c"),
        lambda: world.lb("h", ipam="dhcp"),
        lambda: world.lb("c"),
        lambda: world.lb("x", ip_pool="nope"),
        lambda: world.svc("s", ip_families=["IPv4", "IPv6"], ip_family_policy="PreferDualStack"),
        lambda: world.pool("p1", "192.0.2.0/28", "2001:db8::/64"),
        lambda: world.pool("p1", "192.0.2.0/30", "2001:db8::/64"),
        lambda: world.gone("ippools", "p1"),
        lambda: world.new_epoch("e2"),
        lambda: world.pool("p3", "192.0.2.0/28"),
        # Another under the same name, while the leases of the first can't be decided on.
        lambda: [world.gone("loadbalancers", "d"), world.lb("d", uid="later")],
        lambda: world.sync(),
    ]
    for index, step in enumerate(steps):
        step()
        await save(engine, world.state)
        assert fingerprint(await reload(engine, world)) == fingerprint(world.state), index


async def test_an_address_changes_hands_within_one_batch(engine: AsyncEngine) -> None:
    """Release and grant of one address fit into one transaction."""
    world = World()
    world.pool("p1", "192.0.2.5/32")
    world.lb("a")
    await save(engine, world.state)
    world.gone("loadbalancers", "a")
    world.lb("b")
    world.gone("loadbalancers", "b")
    world.lb("c")
    await save(engine, world.state)
    async with engine.connect() as conn:
        query = "select name from allocator.lease where address = '192.0.2.5' order by during"
        assert [row.name for row in await conn.execute(sa.text(query))] == ["a", "b", "c"]
        held = "select name from allocator.lease where upper_inf(during)"
        assert (await conn.scalars(sa.text(held))).all() == ["c"]
