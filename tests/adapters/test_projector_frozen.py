"""Replicas that are frozen and wake up again: they are replaced meanwhile, and repeat nothing."""

import contextlib
import random
import signal
import subprocess
import sys

from schema import events
from tests.adapters.proxy import Proxy
from tests.adapters.test_projector import (
    begun,
    counts,
    decisions,
    feeder_of,
    namespace,
    stored,
    table,
)
from tests.feeding import T0
from tests.waiting import eventually

__all__ = ["table"]


@contextlib.contextmanager
def replica(nats_url, database_url, window="0.1"):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.tally", nats_url, database_url, window],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)


def said(messages):
    found = {}
    for message in messages:
        event = events.decode(message.data)
        found.setdefault(event.owner.name, []).append(int(event.message))
    return found


async def emptied(conn):
    await eventually(lambda: conn.fetchval("select count(*) = 0 from prober.outbox"), timeout=30)


async def test_report_42_a_frozen_replica_is_replaced_and_wakes_up_harmless(
    nats_url, database_url, table
):
    """Stopped with decisions under way that no one has acknowledged to it: another one takes over
    and publishes them. Continued after the stream has forgotten the ids, the first one adds
    nothing, to no object."""
    async with feeder_of(nats_url) as feeder, Proxy(nats_url) as proxy:
        with replica(proxy.url, database_url) as first:
            await feeder.seen(namespace("n0"))
            await stored(table, n0=1)
            await emptied(table)
            proxy.hold()
            await table.execute(
                "insert into prober.outbox (messages) select json_build_array(json_build_array("
                "'lb.lease.services.x.n' || n % 3, 'left:' || n, '', $1::json))"
                " from generate_series(1, 6) n",
                events.encode(
                    events.LeaseRefused(at=T0, owner=OWNER, reason="Count", message="0")
                ).decode(),
            )
            await eventually(lambda: landed(nats_url, 4))  # one of each owner
            first.send_signal(signal.SIGSTOP)
            with replica(nats_url, database_url):
                await feeder.send_all(
                    [events.NamespaceSeen(at=T0, object=namespace(f"n{i % 3}")) for i in range(30)]
                )
                await stored(table, n0=11, n1=10, n2=10)
                await emptied(table)
                proxy.let_through()
                first.send_signal(signal.SIGCONT)
                await feeder.seen(namespace("n1"))
                await stored(table, n1=11)
                await emptied(table)
                assert first.poll() is None
                await eventually(lambda: standing_by(table), timeout=20)

    ids = [m.headers["Nats-Msg-Id"] for m in await decisions(nats_url)]
    assert len(ids) == len(set(ids)) == 7 + 31


OWNER = events.Owner(plural="services", namespace="x", name="n", uid="u")


async def landed(url, count):
    return len(await decisions(url)) >= count


async def standing_by(conn):
    """Two processes ask, one holds the lock."""
    return 1 == await conn.fetchval("select count(*) from pg_locks where locktype = 'advisory'")


async def test_report_42_frozen_and_killed_at_random_nothing_is_lost_or_repeated(
    nats_url, database_url, table
):
    """Three replicas, each frozen or killed at moments drawn from a seed: counts end exact, and
    every decision is published once, in order, though the stream forgets ids at once."""
    total, names, rng = 1200, 12, random.Random(42)
    frozen = []
    async with feeder_of(nats_url) as feeder:
        with contextlib.ExitStack() as stack:
            alive = [stack.enter_context(replica(nats_url, database_url)) for _ in range(3)]
            await begun(table)
            for start in range(0, total, 200):
                await feeder.send_all(
                    [
                        events.NamespaceSeen(at=T0, object=namespace(f"n{i % names}", str(i)))
                        for i in range(start, start + 200)
                    ]
                )
                victim = alive.pop(rng.randrange(len(alive)))
                if rng.random() < 0.5:
                    victim.send_signal(signal.SIGSTOP)
                    frozen.append(victim)
                    alive.append(stack.enter_context(replica(nats_url, database_url)))
                else:
                    victim.send_signal(signal.SIGKILL)
                    alive.append(stack.enter_context(replica(nats_url, database_url)))
                if frozen and rng.random() < 0.5:
                    frozen.pop(0).send_signal(signal.SIGCONT)
            for victim in frozen:
                victim.send_signal(signal.SIGCONT)

            async def done():
                return sum((await counts(table)).values()) >= total

            await eventually(done, timeout=60)
            await emptied(table)

    assert {f"n{i}": total // names for i in range(names)} == await counts(table)
    wanted = list(range(1, total // names + 1))
    assert {f"n{i}": wanted for i in range(names)} == said(await decisions(nats_url))
