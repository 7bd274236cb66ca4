"""The whole system with the accounts of deploy/: each service as a user for its job alone."""

import asyncio
import contextlib
import re
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from sandbox.servers import NatsServer, PostgresServer
from sandbox.stack import SERVICES, Stack
from services.kit.bus import Bus, BusError
from tests.waiting import eventually

DEPLOY = Path(__file__).parents[2] / "deploy"
EXAMPLES = Path(__file__).parents[2] / "examples"


def accounts():
    """deploy/nats/accounts.conf with every password equal to its user's name."""
    text = (DEPLOY / "nats" / "accounts.conf").read_text()
    return re.sub(
        r"\$LBLEDGER_(\w+)_PASSWORD", lambda m: f'"{m[1].lower().replace("_", "-")}"', text
    )


async def roles(url):
    """deploy/postgres/roles.sql, with every password equal to its role's name."""
    conn = await asyncpg.connect(url)
    try:
        await conn.execute((DEPLOY / "postgres" / "roles.sql").read_text())
        for row in await conn.fetch(
            "select rolname from pg_roles where rolname like 'lbledger\\_%'"
        ):
            await conn.execute(f"alter role {row[0]} password '{row[0]}'")
    finally:
        await conn.close()


def as_role(url, role):
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{role}:{role}@{parts.hostname}:{parts.port}"))


def environment(nats, postgres):
    found = {
        name: {
            "LBLEDGER_NATS_USER": name,
            "LBLEDGER_NATS_PASSWORD": name,
            "LBLEDGER_DATABASE_URL": as_role(postgres.url, f"lbledger_{name.replace('-', '_')}"),
        }
        for name in SERVICES
    }
    found["watcher"].pop("LBLEDGER_DATABASE_URL")
    found["migrate"] = {"LBLEDGER_DATABASE_URL": as_role(postgres.url, "lbledger_owner")}
    reader = {
        "LBLEDGER_NATS_USER": "lbledger-reader",
        "LBLEDGER_NATS_PASSWORD": "reader",
        "LBLEDGER_DATABASE_URL": as_role(postgres.url, "lbledger_reader"),
    }
    for command in ("lb", "pool", "leases", "events", "nrp", "doctor"):
        found[command] = reader
    return found


@pytest.mark.timeout(180)
async def test_the_main_job_works_with_least_privilege():
    """Every service and the looking commands do their job with the roles and accounts of deploy/,
    and an account can't publish what is another's."""
    async with NatsServer(config=accounts()) as nats, PostgresServer() as postgres:
        await roles(postgres.url)
        stack = Stack(
            settings={"LBLEDGER_NATS_URL": nats.url, "LBLEDGER_DATABASE_URL": postgres.url},
            per_service=environment(nats, postgres),
        )
        try:
            await stack.start()
            for folder in (EXAMPLES / "cluster", EXAMPLES):
                await stack.kubectl("apply", "-f", str(folder))

            async def settled():
                listed = await stack.cli("lb", "list")
                return "203.0.113." in listed and "192.0.2.12" in listed and listed

            await eventually(settled, timeout=60)
            for argv in (["pool", "list"], ["leases"], ["nrp", "status"], ["doctor"]):
                assert await stack.cli(*argv)
            with pytest.raises(BusError):
                await publish_as("prober", nats.url, "lb.lease.services.default.x")
            assert await heard_by_probers(nats.url, "prober", "allocator", "prober") == [
                b"prober",
                b"prober",
            ]
        finally:
            await stack.stop()


async def heard_by_probers(url, *tellers):
    """What a prober hears of those who speak to it, one after the other, until it hears two."""
    heard = []
    async with contextlib.AsyncExitStack() as stack:
        buses = []
        for user in ("prober", *tellers):
            bus = await Bus.connect(url, name=user, user=user, password=user)
            stack.push_async_callback(bus.close)
            buses.append(bus)
        buses[0].listen("prober.v1.seen.test", heard.append)
        await buses[0].stream_state("LB")  # the subscription is before it on the wire
        for user, bus in zip(tellers, buses[1:], strict=True):
            assert bus.tell("prober.v1.seen.test", user.encode())
            await bus.stream_state("LB")
        await eventually(lambda: len(heard) >= 2)
    return heard


async def publish_as(user, url, subject):
    bus = await Bus.connect(url, name="intruder", user=user, password=user)
    try:
        publisher = bus.publisher("LB", deadline=3)
        try:
            async with asyncio.timeout(10):
                await publisher.publish(subject, b"{}", {}, msg_id="x")
        finally:
            await publisher.close()
    finally:
        await bus.close()
