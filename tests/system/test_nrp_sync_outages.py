"""nrp_sync through outages of its servers, deaths of its process, and a second replica."""

import asyncio
import random
import signal

import pytest

from sandbox.nrp import Fault, Plan
from services.kit import migrate
from tests.system.nrp_rig import node, pod, rig, service, slice_of, uid
from tests.waiting import eventually


@pytest.fixture
async def own_servers(nats_server, postgres_server):
    """Servers that this test may stop, with our tables."""
    await migrate.upgrade_async(postgres_server.url)
    return nats_server, postgres_server


@pytest.mark.parametrize("which", ["nats", "postgres"], ids="report-21-{}".format)
async def test_outage_of_our_own_takes_nothing_away(own_servers, which):
    """[report-21] What can't be recorded is not decided: the provider hears nothing meanwhile.

    What changed before the end of the outage is applied after it.
    """
    nats, postgres = own_servers
    server = nats if which == "nats" else postgres
    async with rig(nats.url, postgres.url) as r:
        await r.seen(node("n1", "172.16.0.1"), service(), slice_of("web-a", "web", ["10.0.0.1"]))
        await r.synced()
        await r.start()
        await r.settled(1, "10.0.0.1")
        await r.reason("web", "Registered")
        sent = len(r.changes())
        await server.kill()
        await asyncio.sleep(2.0)
        assert len(r.changes()) == sent
        assert r.addresses(1) == {"10.0.0.1"}
        await server.start()
        await eventually(lambda: fed(r, ["10.0.0.1", "10.0.0.2"]), 30)
        await r.settled(1, "10.0.0.1", "10.0.0.2", timeout=40)
        await eventually(lambda: all_answered(r))


async def all_answered(r):
    return not await r.rows("select 1 from nrp_sync.request where state = 'sent'")


async def fed(r, addresses):
    """Publish the slice, once the bus takes it again."""
    try:
        async with asyncio.timeout(5):
            await r.feeder.seen(slice_of("web-a", "web", addresses))
    except Exception:
        return False
    return True


async def test_two_replicas_send_nothing_twice(nats_url, database_url):
    """Of two replicas one acts; when it dies the other goes on where it was."""
    async with rig(nats_url, database_url) as r:
        await r.seen(node("n1", "172.16.0.1"), service(), slice_of("web-a", "web", ["10.0.0.1"]))
        await r.synced()
        first = await r.spawn()
        await r.settled(1, "10.0.0.1", timeout=60)
        await r.start()
        await r.seen(slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2"]))
        await r.settled(1, "10.0.0.1", "10.0.0.2")
        made = [entry.op for entry in r.changes()]
        assert made.count("put_load_balancer") == 1
        assert made.count("update_address_locations") == 2
        first.send_signal(signal.SIGKILL)
        await first.wait()
        await r.seen(slice_of("web-a", "web", ["10.0.0.3"]))
        await r.settled(1, "10.0.0.3", timeout=30)
        assert [e.op for e in r.changes()].count("put_load_balancer") == 1


class Cluster:
    """Services, pods and what the provider should hold for them, changed at random."""

    def __init__(self, r, chance):
        self.r, self.chance = r, chance
        self.services = {}  # name -> (number of its uid, {address: node})
        self.pods = {}  # number -> (gateway, address, node)
        self.made = 0

    async def change(self):
        """One thing happens."""
        change = self.chance.choices(
            [self.backends, self.service_replaced, self.pod_seen, self.pod_gone], [6, 1, 3, 2]
        )
        await change[0]()

    def place(self):
        return f"n{self.chance.randint(1, 3)}"

    async def backends(self):
        name = f"s{self.chance.randint(1, 4)}"
        number = self.services.get(name, (0,))[0] or self.fresh()
        ends = {f"10.0.{name[1]}.{self.chance.randint(1, 20)}": self.place() for _ in range(5)}
        self.services[name] = number, ends
        await self.r.seen(service(name, number), self.slice(name))

    def fresh(self):
        self.made += 1
        return self.made

    def slice(self, name):
        return slice_of(f"{name}-a", name, list(self.services[name][1].items()), 100 + int(name[1]))

    async def service_replaced(self):
        """Deleted, and at once another one of the same name."""
        if self.services:
            name = self.chance.choice(sorted(self.services))
            number, ends = self.services[name]
            await self.r.feeder.gone(service(name, number))
            self.services[name] = self.fresh(), ends
            await self.r.seen(service(name, self.services[name][0]))

    async def pod_seen(self):
        number = self.chance.randint(200, 205)
        gateway = self.chance.choice(["shop", "mail"])
        self.pods[number] = gateway, f"10.0.9.{number}", self.place()
        await self.r.seen(self.pod(number))

    def pod(self, number):
        gateway, address, place = self.pods[number]
        return pod(f"p{number}", number, gateway, address, node_name=place)

    async def pod_gone(self):
        if self.pods:
            number = self.chance.choice(sorted(self.pods))
            await self.r.feeder.gone(self.pod(number))
            del self.pods[number]

    def held(self):
        """Location to address to services, registrations, and names of resources."""
        places = {}
        ends = [(a, n, uid(number)) for number, e in self.services.values() for a, n in e.items()]
        ends += [(address, n, gateway) for gateway, address, n in self.pods.values()]
        for address, n, owner in ends:
            places.setdefault(f"172.16.0.{n[1]}", {}).setdefault(address, set()).add(owner)
        names = {uid(number) for number, _ in self.services.values()}
        names |= {gateway for gateway, _, _ in self.pods.values()}
        return places, names, names | {f"{name}-pip" for name in names}


@pytest.mark.parametrize("seed", [1])
@pytest.mark.timeout(300)
async def test_killed_again_and_again_it_ends_at_equality(nats_url, database_url, seed):
    """SIGKILL at any moment, under faults: in the end the provider holds exactly what is wanted."""
    chance = random.Random(seed)
    async with rig(nats_url, database_url, LBLEDGER_NRP_REQUEST_TIMEOUT_S="2") as r:
        cluster = Cluster(r, chance)
        await r.seen(*(node(f"n{n}", f"172.16.0.{n}", number=900 + n) for n in (1, 2, 3)))
        await r.synced()
        kinds = ("error", "applied_error", "drop", "applied_drop", "slow")
        faults = [
            Fault(kind=kind, op="*", status=503, probability=0.08, seconds=0.5) for kind in kinds
        ]
        r.server.faults.set(Plan(seed=seed, faults=faults))
        for _ in range(3):
            process = await r.spawn()
            for _ in range(25):
                await cluster.change()
            moment = len(r.changes()) + chance.randint(1, 20)
            async with asyncio.timeout(60):
                while len(r.changes()) < moment:
                    await cluster.change()
                    await asyncio.sleep(0.01)
            await asyncio.sleep(chance.random() * 0.05)  # before, at or after an answer or a commit
            process.send_signal(signal.SIGKILL)
            await process.wait()
        r.server.faults.set(Plan())
        await r.start()
        await eventually(
            lambda: (r.locations(), r.registered(), r.resources()) == cluster.held(), 60
        )

        async def sure():
            return not await r.rows("select 1 from nrp_sync.address where not sure")

        await eventually(sure)
        await eventually(lambda: all_answered(r))
