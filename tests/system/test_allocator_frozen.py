"""Two allocators, frozen and killed under load: each decision is made and published once."""

import contextlib
import random
import signal

import pytest

from schema import events
from tests.system.allocator_rig import cluster_of, spawn


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """A frozen replica is replaced soon."""
    for name, value in (("BEAT", "0.05"), ("EFFECTS_DEADLINE", "1"), ("SILENCE", "1.5")):
        monkeypatch.setenv(f"LBLEDGER_PROJECTOR_{name}_S", value)
    # It may have been frozen between two statements, or in the middle of sending rows.
    monkeypatch.setenv("LBLEDGER_DATABASE_IDLE_TRANSACTION_S", "1.5")
    monkeypatch.setenv("LBLEDGER_DATABASE_STATEMENT_TIMEOUT_S", "4")


async def test_report_45_frozen_and_killed_allocators_decide_once(nats_url, database_url):
    """Whichever is active is frozen or killed in each round while owners come and go; afterwards
    every owner holds one address, and was told so once."""
    rng = random.Random(45)

    async with cluster_of(nats_url, database_url) as cluster:
        with contextlib.ExitStack() as stack:

            def start():
                process = spawn(nats_url, database_url)
                stack.callback(process.wait, 10)
                stack.callback(process.kill)
                return process

            active = start()
            cluster.sync()
            cluster.pool("p1", "192.0.2.0/24 192.0.2.1-192.0.2.200")
            await cluster.caught_up()
            frozen = []
            for turn in range(4):
                spare = start()
                for n in range(40):
                    cluster.lb(f"lb-{turn}-{n}")
                await cluster.flush()
                await cluster.holds_at_least(40 * turn + rng.randrange(1, 40))
                if turn % 2:
                    active.kill()
                else:
                    active.send_signal(signal.SIGSTOP)
                    frozen.append(active)
                active = spare
                await cluster.holds(40 * (turn + 1))
            for process in frozen:
                process.send_signal(signal.SIGCONT)
            for n in range(40):
                cluster.gone("loadbalancers", f"lb-0-{n}")
            await cluster.caught_up()
            await cluster.holds(120)

            assert all(process.poll() is None for process in [active, *frozen])
            decided = await cluster.decided()

    granted = [e.owner.name for e in decided if isinstance(e, events.LeaseGranted)]
    released = [e.owner.name for e in decided if isinstance(e, events.LeaseReleased)]
    assert sorted(f"lb-{turn}-{n}" for turn in range(4) for n in range(40)) == sorted(granted)
    assert sorted(f"lb-0-{n}" for n in range(40)) == sorted(released)
    assert not [e for e in decided if isinstance(e, events.DeadLettered)]
