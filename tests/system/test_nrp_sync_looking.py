"""Drift and its repair, and what an operator sees of nrp_sync."""

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from sandbox.nrp import Fault, Plan
from sandbox.nrp.admin import Edit, apply
from services.kit import config, db
from services.nrp_sync import effects, looking
from services.nrp_sync.connecting import connect
from services.nrp_sync.main import policy_of
from tests.system.nrp_rig import node, rig, service, slice_of, uid
from tests.waiting import eventually


@pytest.fixture
async def engine(database_url):
    engine = create_async_engine(db.driver_url(database_url))
    yield engine
    await engine.dispose()


async def running(r):
    await r.seen(node("n1", "172.16.0.1"), service(), slice_of("web-a", "web", ["10.0.0.1"]))
    await r.synced()
    await r.start()
    await r.settled(1, "10.0.0.1")
    await r.reason("web", "Registered")


async def test_drift_is_shown_and_repaired_on_demand(nats_url, database_url, engine):
    """What somebody changed at the provider is found by a reading, shown, and put right."""
    async with rig(nats_url, database_url) as r:
        await running(r)
        apply(r.server, Edit(locations={"172.16.0.1": None, "172.16.0.7": {"10.0.0.9": [uid(1)]}}))
        settings = config.load(r.env).nrp
        provider = await connect(settings)
        snapshot = await effects.read(provider)
        await provider.close()
        async with engine.connect() as conn:
            shown = await looking.compare(conn, policy_of(settings), snapshot)
        assert [line for line in shown.drift if line.startswith("address")] == [
            f"address 10.0.0.1 at 172.16.0.1: believed {uid(1)}, the provider has none",
            f"address 10.0.0.9 at 172.16.0.7: believed absent, the provider has {uid(1)}",
        ]
        assert shown.requests == ["update_address_locations: 172.16.0.1 (1), 172.16.0.7 (delete)"]
        assert r.locations() == {"172.16.0.7": {"10.0.0.9": {uid(1)}}}
        async with engine.begin() as conn:
            await looking.ask_for_repair(conn)
        await eventually(lambda: r.locations() == {"172.16.0.1": {"10.0.0.1": {uid(1)}}})
        rows = await r.rows("select drift_found from nrp_sync.view")
        assert rows[0]["drift_found"] >= 2


async def test_status_and_explanation(nats_url, database_url, engine):
    """Status names what is not in step; an explanation gives the requests behind a service."""
    async with rig(nats_url, database_url) as r:
        await running(r)
        await r.seen(service("odd", 2, session_affinity="ClientIP"))
        await r.reason("odd", "UnsupportedSessionAffinity")
        async with engine.connect() as conn:
            status = await looking.status(conn)
            web = await looking.explain(conn, "default/web")
            odd = await looking.explain(conn, "default/odd")
            nothing = await looking.explain(conn, "default/none")
        assert not status.in_step
        assert status.not_in_step == ["default/odd: UnsupportedSessionAffinity"]
        assert status.services == {"inbound created": 1}
        assert (status.addresses, status.locations, status.unknown) == (1, 1, 0)
        assert web.backends == ["10.0.0.1 at 172.16.0.1"]
        assert [made.verb for made in reversed(web.history)] == [
            "put_public_ip",
            "put_balancer",
            "update_services",
            "update_address_locations",
        ]
        assert all(made.state == "ok" for made in web.history)
        assert all(made.duration is not None for made in web.history)
        assert odd.phase == ""
        assert odd.image["message"].startswith("spec.sessionAffinity is 'ClientIP'")
        assert nothing is None


async def test_refused_address_is_put_aside_alone(nats_url, database_url, engine):
    """An address that the provider refuses is quarantined, shown, and tried again on demand."""
    async with rig(nats_url, database_url) as r:
        fault = Fault(
            kind="error", op="update_address_locations", status=400, contains='"10.0.0.66"'
        )
        r.server.faults.add(fault)
        await running(r)
        await r.seen(
            slice_of("web-a", "web", [f"10.0.0.{n}" for n in (1, 2, 3, 66, 4, 5)]),
        )
        await r.settled(1, *(f"10.0.0.{n}" for n in range(1, 6)))
        image = await r.reason("web", "Quarantined")
        assert "10.0.0.66" in image.message
        async with engine.connect() as conn:
            status = await looking.status(conn)
        assert [trouble.what for trouble in status.quarantined] == ["10.0.0.66 at 172.16.0.1"]
        r.server.faults.set(Plan())
        async with engine.begin() as conn:
            await looking.ask_for_repair(conn)
        await r.settled(1, "10.0.0.66", *(f"10.0.0.{n}" for n in range(1, 6)))
        await r.reason("web", "Registered")


async def test_rows_hold_what_constraints_say(database_url):
    """The database itself refuses an address under a location of the other family."""
    conn = await asyncpg.connect(database_url)
    try:
        statement = "insert into nrp_sync.address values ($1, $2, '{x}', true)"
        await conn.execute(statement, "172.16.0.1", "10.0.0.1")
        for location, address in (("172.16.0.1", "2001:db8::1"), ("172.16.0.1", "10.0.0.01")):
            with pytest.raises(asyncpg.PostgresError):
                await conn.execute(statement, location, address)
    finally:
        await conn.close()
