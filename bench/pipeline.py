"""From a fact in JetStream to a lease in Postgres to an acknowledged decision.

Both servers sync every acknowledgement to disk (NATS `sync_interval: always`, Postgres as it is by
default). The allocator is the real one, a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime

from bench.harness import Figure, Row, cpu_s, percentile, rss_mb
from sandbox.servers import NatsServer, PostgresServer
from schema import events, objects, subjects
from schema.events import Event
from services.kit.bus import Bus, Outgoing
from services.kit.migrate import upgrade_async

EPOCH = "bench"
T0 = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


def pool(name: str, subnet: str) -> Event:
    scope = [objects.PoolScope(project="*", namespace="*", guest_cluster="*")]
    return events.IPPoolSeen(
        at=T0,
        object=objects.IPPool(
            metadata=objects.ObjectMeta(name=name, uid=f"uid-{name}", resource_version="1"),
            spec=objects.IPPoolSpec(
                ranges=[objects.PoolRange(subnet=subnet)],
                selector=objects.PoolSelector(scope=scope),
            ),
        ),
    )


def service(i: int) -> Event:
    return events.ServiceSeen(
        at=T0,
        object=objects.Service(
            metadata=objects.ObjectMeta(
                name=f"s{i}", namespace=f"ns-{i % 50}", uid=f"u{i}", resource_version=str(10 + i)
            ),
            spec=objects.ServiceSpec(
                type="LoadBalancer",
                load_balancer_class="lbledger.io/pool",
                cluster_ips=[str(ipaddress.IPv4Address(0x0A600000 + i))],
                ip_families=["IPv4"],
                ports=[objects.ServicePort(name="http", port=80)],
            ),
            status=objects.ServiceStatus(load_balancer=objects.LoadBalancerIngress()),
        ),
    )


def message(event: Event, number: int) -> Outgoing:
    headers = {subjects.HEADER_EPOCH: EPOCH, subjects.HEADER_TYPE: events.tag_of(event)}
    return Outgoing(events.subject_of(event), events.encode(event), headers, f"bench:{number}")


def opening() -> list[Event]:
    """An epoch, a /8 of addresses, and every kind complete."""
    marks: list[Event] = [
        events.SyncFinished(at=T0, plural=plural, epoch=EPOCH) for plural in objects.VIEWS
    ]
    return [
        events.EpochStarted(at=T0, epoch=EPOCH, reason="bench"),
        pool("p1", "10.0.0.0/8"),
        *marks,
    ]


@contextlib.asynccontextmanager
async def servers() -> AsyncIterator[tuple[str, str]]:
    async with NatsServer(sync_always=True) as nats, PostgresServer() as postgres:
        await upgrade_async(postgres.url)
        yield nats.url, postgres.url


@contextlib.contextmanager
def allocator(nats_url: str, database_url: str):  # type: ignore[no-untyped-def]
    env = {
        **os.environ,
        "LBLEDGER_NATS_URL": nats_url,
        "LBLEDGER_DATABASE_URL": database_url,
        "LBLEDGER_LOG_LEVEL": "warning",
        "LBLEDGER_HEALTH_PORT": "-1",
    }
    process = subprocess.Popen([sys.executable, "-m", "services.cli", "allocator"], env=env)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(15)


async def _publish(bus: Bus, facts: list[Event], first: int) -> None:
    publisher = bus.publisher("KUBE")
    for start in range(0, len(facts), 500):
        chunk = facts[start : start + 500]
        await publisher.publish_batch(
            [message(event, first + start + i) for i, event in enumerate(chunk)]
        )
    await publisher.close()


async def fact_to_lease(quick: bool) -> list[Figure]:
    """All facts are in the stream; the allocator, which knows its pool, decides until every lease
    is out."""
    return await _drain("fact_to_lease", 10_000 if quick else 100_000)


async def fact_to_lease_long(quick: bool) -> list[Figure]:
    return await _drain("fact_to_lease_long", 20_000 if quick else 1_000_000)


async def _drain(name: str, count: int) -> list[Figure]:
    async with servers() as (nats_url, database_url):
        bus = await Bus.connect(nats_url, name="bench")
        for spec in (subjects.KUBE, subjects.LB):
            await bus.ensure_stream(spec)
        await _publish(bus, opening(), 0)
        with allocator(nats_url, database_url):
            await _reached(bus, 2)
        for start in range(0, count, 10_000):
            await _publish(bus, [service(i) for i in range(start, start + 10_000)], 100 + start)
        first = (await bus.stream_state("LB")).last_seq
        with allocator(nats_url, database_url) as process:
            begun = await _reached(bus, first + 1)
            began, cpu = time.perf_counter(), cpu_s(process.pid)
            last = await _reached(bus, first + count)
            took = time.perf_counter() - began
            cpu = cpu_s(process.pid) - cpu
            memory = rss_mb(process.pid)
        await bus.close()
    done = last - begun
    note = f"{count:,} Services, both servers syncing every acknowledgement"
    return [
        Figure(name, done / took, "/s", 30_000, 50_000, note=note),
        Figure(f"{name}.cpu", cpu / done * 1e6, "us", better="lower", note="allocator's CPU"),
        Figure(f"{name}.rss", memory, "MB", better="lower"),
    ]


async def _reached(bus: Bus, count: int) -> int:
    """Wait until the stream of decisions holds so many; returns how many there are."""
    deadline = time.perf_counter() + 900
    while (last := (await bus.stream_state("LB")).last_seq) < count:
        if time.perf_counter() > deadline:
            raise TimeoutError(f"only {last} decisions of {count} after 900 s")
        await asyncio.sleep(0.02)  # asking costs both servers' cores
    return last


async def lease_latency(quick: bool) -> list[Figure]:
    """One fact at a time, 100 a second: from publishing it to seeing the decision."""
    count = 200 if quick else 1000
    async with servers() as (nats_url, database_url):
        bus = await Bus.connect(nats_url, name="bench")
        for spec in (subjects.KUBE, subjects.LB):
            await bus.ensure_stream(spec)
        await _publish(bus, opening(), 0)
        with allocator(nats_url, database_url):
            puller = bus.puller("LB", start_seq=1, filters=("lb.lease.services.>",))
            publisher = bus.publisher("KUBE")
            took = []
            for i in range(-20, count):
                out = message(service(i + 1000), 10_000 + i)
                began = time.perf_counter()
                publisher.submit(out.subject, out.data, out.headers, msg_id=out.msg_id)
                while not await puller.fetch(10, timeout=10.0):
                    pass
                elapsed = (time.perf_counter() - began) * 1000
                if i >= 0:
                    took.append(elapsed)
                await asyncio.sleep(max(0.0, 0.01 - elapsed / 1000))
            await puller.close()
            await publisher.close()
        await bus.close()
    return [
        Figure("lease_latency.p50", percentile(took, 0.5), "ms", better="lower"),
        Figure("lease_latency.p99", percentile(took, 0.99), "ms", 15, 6, better="lower"),
    ]


ROWS = [
    Row("fact_to_lease", fact_to_lease),
    Row("fact_to_lease_long", fact_to_lease_long, repeats=1),
    Row("lease_latency", lease_latency),
]
