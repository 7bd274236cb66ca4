"""Several probers share the checks: real processes, told apart by the network that each dials.

Every object address is mapped to another part of loopback by each replica, so that the listeners
there tell who has checked what, and a replica's own network can be taken away.
"""

import os
import signal
import time

import pytest

from schema import objects
from tests.system.prober_rig import SECOND_S, balancer, machine, rig_of
from tests.system.test_prober_outages import unready_events
from tests.waiting import eventually

PERIOD = 8  # seconds of a check; shorter ones here
NETWORKS = {"a": "127.10", "b": "127.20", "c": "127.30"}  # of the replicas
LBS, EACH = 4, 4
HOSTS = [f"{lb}.{part}" for lb in range(1, LBS + 1) for part in range(1, EACH + 1)]


class Crew:
    """Replicas a, b, c, each on its own network."""

    def __init__(self, rig):
        self.rig = rig
        self.processes = {}

    async def start(self, name, **settings):
        dial = f"10.0.0.0/16={NETWORKS[name]}.0.0/16"
        settings = {"LBLEDGER_PROBER_REPLICA_SILENCE_S": "1", **settings}
        self.processes[name] = await self.rig.spawn(LBLEDGER_PROBER_DIAL_MAP=dial, **settings)

    def signal(self, name, number):
        os.kill(self.processes[name].pid, number)

    def seen(self):
        """Connections by (host, replica)."""
        counts = self.rig.backends.connections
        return {
            (host, name): counts.get(f"{network}.{host}", 0)
            for host in HOSTS
            for name, network in NETWORKS.items()
        }

    def takes_part(self, name, times=1, before=None):
        """Whether it has checked a host so many times (more than before)."""
        seen, known = self.seen(), before or {}
        return any(seen[host, name] - known.get((host, name), 0) >= times for host in HOSTS)

    async def settled(self, *names, all_take_part=True, timeout=30):
        """Until every host is checked by exactly one of these and nobody else, time after time."""
        shared = None
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            shared = await self.shares(deadline - time.monotonic())
            told = set().union(*shared.values())
            one_each = all(len(who) == 1 for who in shared.values())
            if one_each and told <= set(names) and (told == set(names) or not all_take_part):
                return shared
        raise AssertionError(f"not settled on {names}: {shared}")

    async def shares(self, timeout=30):
        """Who checks each host, looked at until every one was checked three times more."""
        before = self.seen()

        def again():
            now = self.seen()
            more = {key: now[key] - before[key] for key in now}
            shared = {h: {n for n in NETWORKS if more[h, n]} for h in HOSTS}
            return shared if all(sum(more[h, n] for n in NETWORKS) >= 3 for h in HOSTS) else None

        return await eventually(
            again, timeout=max(timeout, 5.0), message="not every host is checked"
        )

    async def populate(self, period=PERIOD):
        rig = self.rig
        check = objects.HealthCheck(
            port=rig.port, failure_threshold=2, period_seconds=period, timeout_seconds=period
        )
        for network in NETWORKS.values():
            await rig.backends.answer_all([f"{network}.{host}" for host in HOSTS], rig.port)
        for number in range(1, LBS + 1):
            listeners = [objects.Listener(name="http", port=80, backend_port=rig.port)]
            selector = {"lb": [f"lb{number}"]}
            await rig.feed.seen(
                balancer(f"lb{number}", selector=selector, listeners=listeners, check=check)
            )
            for part in range(1, EACH + 1):
                labels = {"lb": f"lb{number}"}
                name = f"lb{number}-{part}"
                await rig.feed.seen(machine(name, f"10.0.{number}.{part}", labels=labels))
        await rig.synced()
        await self.all_ready()

    async def all_ready(self):
        for number in range(1, LBS + 1):
            names = [f"lb{number}-{part}" for part in range(1, EACH + 1)]
            await self.rig.until(f"lb{number}", ready=names)

    async def cut(self, name, hosts=HOSTS):
        """This replica's connections are refused from now on."""
        where = [f"{NETWORKS[name]}.{host}" for host in hosts]
        await self.rig.backends.refuse_all(where, self.rig.port)

    async def mend(self, name):
        where = [f"{NETWORKS[name]}.{host}" for host in HOSTS]
        missing = [a for a in where if not self.rig.backends.answers(a, self.rig.port)]
        await self.rig.backends.answer_all(missing, self.rig.port)


async def test_replicas_share_the_checks_and_go_on_without_each_other(nats_url, database_url):
    """Each target is checked by exactly one. A stand-by freezes, and what it says of its old share
    afterwards is nobody's business; a third joins and is killed; the active one is killed. The
    others go on, what moves is only what must, and no verdict changes by it."""
    async with rig_of(nats_url, database_url) as rig:
        crew = Crew(rig)
        await crew.start("a")
        await crew.populate()
        before = len(rig.log)
        await crew.settled("a")
        await crew.start("b")
        two = await crew.settled("a", "b")
        crew.signal("b", signal.SIGSTOP)
        try:
            await crew.settled("a")
        finally:
            crew.signal("b", signal.SIGCONT)
        assert await crew.settled("a", "b") == two
        await crew.start("c")
        three = await crew.settled("a", "b", "c")
        moved = {host for host in HOSTS if three[host] != two[host]}
        assert all(three[host] == {"c"} for host in moved)

        crew.processes["c"].kill()
        assert await crew.settled("a", "b") == two
        crew.processes["a"].kill()
        await crew.settled("b")
        await crew.cut("b", ["1.1"])  # and the one that is left judges
        await rig.until("lb1", ready=["lb1-2", "lb1-3", "lb1-4"])
        assert {c.uid for c in unready_events(rig, before)} == {"uid-lb1-1"}


@pytest.mark.parametrize("victim", ["a", "b"], ids=["the-active-one", "the-stand-by"])
async def test_every_target_is_checked_again_within_two_periods(nats_url, database_url, victim):
    """Whichever replica is killed, with the settings and the period that hold by default."""
    period_s = 5.0
    async with rig_of(nats_url, database_url) as rig:
        crew = Crew(rig)
        defaults = {
            "LBLEDGER_PROBER_REPLICA_SILENCE_S": "1.5",
            "LBLEDGER_PROJECTOR_TAKEOVER_POLL_S": "0.5",
        }
        await crew.start("a", **defaults)
        await crew.populate(period=int(period_s / SECOND_S))
        await crew.start("b", **defaults)
        left = "b" if victim == "a" else "a"
        await eventually(lambda: crew.takes_part("a") and crew.takes_part("b"), timeout=30)
        log, before, began = len(rig.log), crew.seen(), time.monotonic()
        crew.processes[victim].kill()

        def again():
            now = crew.seen()
            return all(now[host, left] > before[host, left] for host in HOSTS)

        await eventually(again, timeout=30)
        assert time.monotonic() - began < 2 * period_s
        assert rig.log[log:] == []


async def test_a_frozen_judge_is_replaced_within_two_periods(nats_url, database_url):
    """With the settings that hold by default: what it would have decided another one decides. It
    thaws and adds nothing, takes part again, and no verdict changes by all that."""
    period_s = 5.0
    async with rig_of(nats_url, database_url) as rig:
        crew = Crew(rig)
        await crew.start("a", LBLEDGER_PROJECTOR_TAKEOVER_POLL_S="0.5")
        await crew.populate(period=int(period_s / SECOND_S))
        await crew.start("b", LBLEDGER_PROJECTOR_TAKEOVER_POLL_S="0.5")
        await eventually(lambda: crew.takes_part("a") and crew.takes_part("b"), timeout=30)
        log = len(rig.log)
        crew.signal("a", signal.SIGSTOP)
        try:
            await rig.backends.answer_all(["127.10.1.9", "127.20.1.9"], rig.port)
            await rig.feed.seen(machine("lb1-9", "10.0.1.9", labels={"lb": "lb1"}))
            names = [f"lb1-{part}" for part in (*range(1, EACH + 1), 9)]
            await rig.until("lb1", ready=names, timeout=2 * period_s)
        finally:
            before = crew.seen()
            crew.signal("a", signal.SIGCONT)
        await eventually(lambda: crew.takes_part("a", 2, before), timeout=30)
        told = [type(event).__name__ for event in rig.log[log:]]
        assert told == ["BackendsResolved", "HealthChanged"]


@pytest.mark.parametrize("blind", ["a", "b"], ids=["the-active-one", "the-stand-by"])
async def test_a_replica_without_a_network_takes_nothing_down(nats_url, database_url, blind):
    """What it can't reach others can: they check its share, a real failure is still found, and
    when its network is back it gets its share again."""
    async with rig_of(nats_url, database_url) as rig:
        crew = Crew(rig)
        await crew.start("a")
        await crew.populate()
        before = len(rig.log)
        await crew.start("b")
        both = await crew.settled("a", "b")
        well = "b" if blind == "a" else "a"
        await crew.cut(blind)
        await crew.settled(well)
        assert unready_events(rig, before) == []
        lost = next(host for host in HOSTS if both[host] == {blind})
        await crew.cut(well, [lost])
        number = lost.partition(".")[0]
        gone = f"lb{number}-{lost.partition('.')[2]}"
        names = [f"lb{number}-{part}" for part in range(1, EACH + 1)]
        await rig.until(f"lb{number}", ready=[name for name in names if name != gone])
        await crew.mend(blind)
        await crew.mend(well)
        await crew.all_ready()
        assert await crew.settled("a", "b") == both
        assert {c.uid for c in unready_events(rig, before)} == {f"uid-{gone}"}
