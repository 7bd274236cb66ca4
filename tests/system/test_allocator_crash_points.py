"""SIGKILL at every point of a commit and of what follows it: as if nothing had happened.

Three allocators die, each at a point of its own, and a fourth goes on. Afterwards ledger, memory
and the LB stream are what one allocator decides, in one go, from the facts of the stream.
"""

import asyncio
import signal
from collections import defaultdict

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from schema import addresses, events
from services.allocator import store
from services.allocator.core import State, account, decide
from services.allocator.core.evolve import replay
from services.allocator.core.state_of import fingerprint
from services.allocator.main import rules_of
from services.kit import config
from services.kit.batches import decode, read
from services.kit.bus import Bus
from services.kit.db import driver_url
from tests import crashing
from tests.system.allocator_rig import Replica, cluster_of, environment

# Never by the clock: the facts alone say what is to be decided.
SETTINGS = {"retire_s": "1e9"}
SHARED = {"lbledger.io/allow-shared-ip": "k"}
SUMMARIES = events.PoolAccounted | events.LeasesRestated
MANUAL = "loadbalancer.harvesterhci.io/manuallyReleaseIP"


def turn(cluster, tag):
    """Facts that lead to every kind of statement, twice, some transactions apart."""
    for half in ("x", "y"):
        tag += half
        cluster.namespace("default", f"local:p-{tag}")
        cluster.pool(f"p-{tag}", "198.51.100.0/28", "2001:db8::/64", priority=len(tag))
        for n in range(6):
            cluster.lb(f"lb{n}-{tag}", ip_pool=f"p-{tag}" if n % 2 else "")
        cluster.lb(f"greedy-{tag}", ip_pool="small")
        cluster.lb(f"waiting-{tag}", ip_pool="small")
        cluster.svc(f"dual-{tag}", ip_families=["IPv4", "IPv6"], ip_family_policy="PreferDualStack")
        cluster.svc(f"share0-{tag}", annotations=SHARED, ports=["TCP/80"])
        cluster.svc(f"share1-{tag}", annotations=SHARED, ports=[f"TCP/{100 + cluster.seq}"])
        cluster.svc(f"share1-{tag}", annotations=SHARED, ports=[f"TCP/{100 + cluster.seq}"])
        cluster.lb(f"lb0-{tag}", ip_pool="base")
        cluster.lb(f"lb1-{tag}", ipam="dhcp")
        cluster.gone("loadbalancers", f"greedy-{tag}")
        cluster.gone("loadbalancers", f"lb2-{tag}")
        cluster.lb(f"lb2-{tag}", uid=f"again-{tag}")
        cluster.lb(f"lb3-{tag}", uid=f"other-{tag}")
        cluster.gone("services", f"dual-{tag}")
        cluster.pool("base", "192.0.2.0/26", annotations={MANUAL: f"192.0.2.9: no/{tag}"})
        cluster.pool("bad", "192.0.2.0/33", description=tag)
        cluster.gone("loadbalancers", f"waiting-{tag}")
        cluster.sync()


POINTS = list(crashing.POINTS)
THIRD = len(POINTS) // 3
# Three deaths in each history; those while it is read come when there is something to read.
DEATHS = list(zip(POINTS[THIRD : 2 * THIRD], POINTS[2 * THIRD :], POINTS[:THIRD], strict=True))


@pytest.mark.parametrize("points", DEATHS, ids=" ".join)
async def test_a_crash_changes_no_decision(points, nats_url, database_url):
    """[report-2] [report-42] Nothing is held twice, lost, decided anew or published twice."""
    settings = environment(nats_url, database_url, **SETTINGS)
    async with cluster_of(nats_url, database_url) as cluster:
        cluster.pool("base", "192.0.2.0/26")
        cluster.pool("small", "203.0.113.5/32")
        cluster.sync()
        async with Replica(nats_url, database_url):  # from here on the log is read, not a summary
            await cluster.caught_up()
        for point in points:
            turn(cluster, f"t-{point}")
            batch = "8"
            if "batch" in point:  # which takes many decisions at once
                batch = "1000"
                for n in range(200):
                    cluster.lb(f"many{n}-{point}")
            await cluster.flush()
            process = crashing.start(settings | {"LBLEDGER_PROJECTOR_BATCH": batch}, point)
            await asyncio.to_thread(process.join, 60)
            process.kill()
            assert process.exitcode == -signal.SIGKILL, f"it never came to {point}"
        turn(cluster, "last")
        async with Replica(nats_url, database_url, **SETTINGS):
            await cluster.caught_up()
        await check(cluster, nats_url, database_url, rules_of(config.load(settings)))


async def check(cluster, nats_url, database_url, rules):
    """Ledger, memory and stream against one run in memory over the same facts."""
    facts = [decode(message) for message in await messages(nats_url, "KUBE")]
    decided = [
        (message, event)
        for message in await messages(nats_url, "LB")
        if not isinstance(event := read(message).record.event, SUMMARIES)
    ]
    model, expected = State(rules), defaultdict(list)
    by_cause = defaultdict(list)
    for message, event in decided:
        by_cause[message.headers["Lb-Cause"]].append(event)
    again = State(rules)
    for fact in facts:
        for event in decide(model, fact.event, epoch=fact.epoch, seq=fact.seq):
            expected[events.subject_of(event)].append((fact.cause, event))
        replay(again, fact.event, by_cause[fact.cause], epoch=fact.epoch, seq=fact.seq)

    found = defaultdict(list)
    for message, event in decided:
        found[message.subject].append((message.headers["Lb-Cause"], event))
    assert expected == found
    assert fingerprint(model) == fingerprint(await stored(database_url, rules))
    assert fingerprint(model) == fingerprint(again)
    await check_ledger(cluster, model, [event for _, event in decided])
    await check_accounts(nats_url, model)


async def messages(nats_url, stream):
    bus = await Bus.connect(nats_url, name="checker")
    try:
        state = await bus.stream_state(stream)
        puller = bus.puller(stream, start_seq=1)
        found = []
        while len(found) < state.messages:
            found += await puller.fetch(1000, timeout=1.0)
        await puller.close()
        return found
    finally:
        await bus.close()


async def stored(database_url, rules):
    """The memory of an allocator that would start now."""
    engine = create_async_engine(driver_url(database_url))
    state = State(rules)
    async with engine.connect() as conn:
        await store.load(conn, state)
    await engine.dispose()
    return state


async def check_ledger(cluster, model, decided):
    """Each lease has one row, open while the model holds it, closed as the stream says."""
    rows = await cluster.database.fetch(
        "select id, host(address) as address, uid, upper_inf(during) as held, release_reason "
        "from allocator.lease"
    )
    begun = [e for e in decided if isinstance(e, events.LeaseGranted | events.LeaseAdopted)]
    ended = {e.lease: e.reason for e in decided if isinstance(e, events.LeaseReleased)}
    assert sorted(e.lease for e in begun) == sorted(row["id"] for row in rows)
    assert ended == {row["id"]: row["release_reason"] for row in rows if not row["held"]}
    held = {
        (lease.id, addresses.text(lease.address), owner.uid)
        for owner in model.all_owners()
        for lease in owner.leases
    }
    assert held == {(row["id"], row["address"], row["uid"]) for row in rows if row["held"]}
    twice = await cluster.database.fetch(
        "select a.id, b.id from allocator.lease a join allocator.lease b on a.id < b.id and "
        "a.address = b.address and a.during && b.during and a.slots && b.slots"
    )
    assert not twice


async def check_accounts(nats_url, model):
    """The last account of every pool is that of the model."""
    last = {}
    for message in await messages(nats_url, "LB"):
        event = read(message).record.event
        if isinstance(event, events.PoolAccounted):
            last[event.pool] = (event.total, event.available, event.waiting, event.reason)
    model.touched = dict.fromkeys(model.pools)
    assert last == {e.pool: (e.total, e.available, e.waiting, e.reason) for e in account(model)}
