"""nrp_sync through outages of its servers, deaths of its process, and a second replica."""

import asyncio
import random
import signal

import pytest

from sandbox.nrp import Fault, Plan
from services.kit import migrate
from tests.system.nrp_rig import node, rig, service, slice_of, uid
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


@pytest.mark.parametrize("seed", [1])
@pytest.mark.timeout(300)
async def test_killed_again_and_again_it_ends_at_equality(nats_url, database_url, seed):
    """SIGKILL at any moment, under faults: in the end the provider holds exactly what is wanted."""
    chance = random.Random(seed)
    async with rig(nats_url, database_url, LBLEDGER_NRP_REQUEST_TIMEOUT_S="2") as r:
        await r.seen(*(node(f"n{n}", f"172.16.0.{n}", number=900 + n) for n in (1, 2, 3)))
        await r.synced()
        kinds = ("error", "applied_error", "drop", "applied_drop", "slow")
        faults = [
            Fault(kind=kind, op="*", status=503, probability=0.08, seconds=0.5) for kind in kinds
        ]
        r.server.faults.set(Plan(seed=seed, faults=faults))
        wanted = {}
        for _ in range(3):
            process = await r.spawn()
            seen = len(r.server.journal.entries)
            for _ in range(25):
                number = chance.randint(1, 4)
                wanted[number] = {f"10.0.{number}.{chance.randint(1, 20)}" for _ in range(5)}
                places = [(address, f"n{len(address) % 3 + 1}") for address in wanted[number]]
                await r.seen(
                    service(f"s{number}", number),
                    slice_of(f"s{number}-a", f"s{number}", places, 100 + number),
                )
            moment = chance.randint(1, 25)
            await eventually(
                lambda n=seen + moment: len(r.server.journal.entries) >= n, 60, interval=0.001
            )
            process.send_signal(signal.SIGKILL)
            await process.wait()
        r.server.faults.set(Plan())
        await r.start()
        for number, addresses in wanted.items():
            await r.settled(number, *addresses, timeout=60)
        assert r.registered() == {uid(number) for number in wanted}
        names = {uid(number) for number in wanted}
        await eventually(lambda: r.resources() == names | {f"{name}-pip" for name in names})

        async def sure():
            return not await r.rows("select 1 from nrp_sync.address where not sure")

        await eventually(sure)
