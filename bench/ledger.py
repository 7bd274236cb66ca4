"""The lease ledger: deciding, loading, explaining, waking; and the same job done plainly.

Peers in the same run: a first-fit scan over the addresses in Python, and SQL that looks for a free
row and locks it, one transaction for each owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta

import asyncpg

from bench.harness import Figure, Row, cpu_s, percentile
from bench.pipeline import EPOCH, T0
from sandbox.servers import PostgresServer
from schema import events, names, objects
from services.allocator.core import State, decide
from services.kit.migrate import upgrade_async

EVERYBODY = objects.PoolScope(project="*", namespace="*", guest_cluster="*")
FIRST_FIT = 5_000  # addresses for the scan, whose time grows with the square


def pool(name: str, *ranges: str, priority: int = 0, **spec: object) -> events.IPPoolSeen:
    selector = objects.PoolSelector(priority=priority, scope=[EVERYBODY])
    view = objects.IPPoolSpec(
        ranges=[objects.PoolRange(subnet=text) for text in ranges],
        selector=selector,
        **spec,  # type: ignore[arg-type]
    )
    meta = objects.ObjectMeta(name=name, uid=f"uid-{name}")
    return events.IPPoolSeen(at=T0, object=objects.IPPool(metadata=meta, spec=view))


def service(number: int, *, pool_name: str = "", **spec: object) -> events.ServiceSeen:
    """One in sixteen shares its address with others of a key, one in eight wants IPv6."""
    annotations = {"lbledger.io/pool": pool_name} if pool_name else None
    if not pool_name and number % 16 == 0:
        annotations = {"lbledger.io/allow-shared-ip": f"k{number // 64}"}
    families = ["IPv6"] if not pool_name and number % 8 == 1 else ["IPv4"]
    return events.ServiceSeen(
        at=T0 + timedelta(microseconds=10 * number),
        object=objects.Service(
            metadata=objects.ObjectMeta(
                name=f"s{number}",
                namespace=f"ns-{number % 50}",
                uid=f"{number:08x}-0000-4000-8000-000000000000",
                annotations=annotations,
            ),
            spec=objects.ServiceSpec(
                type="LoadBalancer",
                load_balancer_class=names.POOL_CLASS,
                ip_families=families,
                ports=[objects.ServicePort(port=1 + number // 16 % 60_000)],
                **spec,  # type: ignore[arg-type]
            ),
            status=objects.ServiceStatus(load_balancer=objects.LoadBalancerIngress()),
        ),
    )


def gone(number: int) -> events.ObjectGone:
    seen = service(number).object.metadata
    return events.ObjectGone(
        at=T0, plural="services", namespace=seen.namespace, name=seen.name, uid=seen.uid
    )


class Decider:
    """The core alone, told of one fact after the other."""

    def __init__(self, *pools: events.IPPoolSeen) -> None:
        self.state, self.seq = State(), 0
        self.state.epoch = EPOCH
        for fact in pools:
            self.tell(fact)
        for plural in ("ippools", "namespaces", "loadbalancers", "services"):
            self.tell(events.SyncFinished(at=T0, plural=plural, epoch=EPOCH))

    def tell(self, fact: events.AnyEvent) -> list[events.Event]:
        self.seq += 1
        return decide(self.state, fact, epoch=EPOCH, seq=self.seq)

    def all(self, facts: list[events.AnyEvent]) -> float:
        """Tell all of them; returns the CPU seconds that it took."""
        began = cpu_s()
        for start in range(0, len(facts), 1000):
            for fact in facts[start : start + 1000]:
                self.tell(fact)
            self.state.forget_changes()  # as after each commit
        return cpu_s() - began


@contextlib.contextmanager
def as_a_service() -> Iterator[None]:
    """The collector as the allocator's process has it."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


async def alloc_core(quick: bool) -> list[Figure]:
    """Pools by priority, exclusions, sharing and a /64; then one pool up to its last address."""
    figures = []
    with as_a_service():
        for count in (100_000,) if quick else (100_000, 1_000_000):
            decider = Decider(
                pool("first", "10.0.0.0/9", "fd00::/64", priority=9, exclude=["10.0.9.0/24"]),
                pool("other", "172.16.0.0/12", priority=1),
                pool("last", "192.168.0.0/16", "fd01::/64"),
            )
            facts: list[events.AnyEvent] = [service(number) for number in range(count)]
            took = decider.all(facts)
            floor, goal = (1.0, 0.5) if count == 100_000 else (None, 5.0)
            name = "alloc_core" if count == 100_000 else "alloc_core.1m"
            note = f"{count:,} Services; priorities, exclusions, sharing, a /64"
            figures.append(Figure(name, took, "CPU s", floor, goal, better="lower", note=note))
        figures.append(_fullness())
        figures += _first_fit()
    return figures


def _fullness() -> Figure:
    """What an address costs in the last thousandth before the pool is full, and at the start:
    releases and grants in turn, so that it stays as full as it is."""
    times = []
    size = 65_536 - 3
    for fill in (size // 100, size - size // 1000):
        decider = Decider(pool("p", "10.0.0.0/16"))
        decider.all([service(n, pool_name="p") for n in range(fill)])
        churn: list[events.AnyEvent] = []
        for n in range(20_000):
            churn += [gone(n % fill), service(n % fill, pool_name="p")]
        times.append(min(decider.all(churn[i : i + 10_000]) for i in range(0, len(churn), 10_000)))
    note = "time of a release and a grant, pool 99.9 % full against 1 % full"
    return Figure("alloc_core.flat", times[1] / times[0], "x", 1.2, 1.2, better="lower", note=note)


def _first_fit() -> list[Figure]:
    """The peer: look from the first address on for one that nobody holds."""
    hosts = [str(host) for host in ipaddress.ip_network("10.0.0.0/16")][1 : FIRST_FIT + 1]
    began = cpu_s()
    held: dict[str, str] = {}
    for number in range(FIRST_FIT):
        for host in hosts:
            if host not in held:
                held[host] = f"s{number}"
                break
    scanned = cpu_s() - began
    ours = Decider(pool("p", "10.0.0.0/16")).all(
        [service(n, pool_name="p") for n in range(FIRST_FIT)]
    )
    note = f"a first-fit scan over {FIRST_FIT:,} addresses; it grows with the square"
    return [Figure("alloc_core.first_fit", scanned / ours, "x ours", note=note)]


@contextlib.asynccontextmanager
async def database() -> AsyncIterator[tuple[str, asyncpg.Connection]]:
    async with PostgresServer() as server:
        await upgrade_async(server.url)
        conn = await asyncpg.connect(server.url)
        try:
            yield server.url, conn
        finally:
            await conn.close()


async def fill(conn: asyncpg.Connection, count: int, *, past: int = 0) -> None:
    """So many Services with a lease each, as the allocator writes them; and leases that ended."""
    for statement in _FILL:
        await conn.execute(statement.replace("$count", str(count)).replace("$past", str(past)))
    await conn.execute("vacuum analyze")


_UID = "lpad(to_hex(n), 8, '0') || '-0000-4000-8000-000000000000'"
_LEASE = (
    "insert into allocator.lease (id, plural, namespace, name, uid, address, pool, during, rule,"
    " cause)"
)
_FILL = (
    f"insert into allocator.clock (epoch, now, serial) values ('{EPOCH}', '{T0.isoformat()}',"
    " 10000000)",
    "insert into allocator.sync_mark (plural, epoch, seq, absent) select unnest(array['ippools',"
    f" 'namespaces', 'loadbalancers', 'services']), '{EPOCH}', 1, false",
    "insert into allocator.pool (name, uid, epoch, generation, view, claims, history, good)"
    f" select 'p', 'uid-p', '{EPOCH}', 1, view, '{{}}', '{{}}', view from (select"
    """ '{"metadata": {"name": "p", "uid": "uid-p"}, "spec": {"ranges": [{"subnet":"""
    """ "10.0.0.0/8"}], "selector": {"scope": [{"project": "*", "namespace": "*","""
    """ "guestCluster": "*"}]}}}'::jsonb view) it""",
    "insert into allocator.owner (plural, uid, namespace, name, epoch, generation, phase, ticket,"
    f" request) select 'services', {_UID}, 'ns-' || n % 50, 's' || n, '{EPOCH}', 1, 'held', 0,"
    """ '["pool","ns-' || n % 50 || '","",[4],false,[],"","","",[],"","","",""]'"""
    " from generate_series(1, $count) n",
    f"{_LEASE} select '{EPOCH}:' || n || ':' || n, 'services', 'ns-' || n % 50, 's' || n, {_UID},"
    " '10.0.0.1'::inet + n, 'p', tstzrange('2026-01-02', null), 'never-used', 'bench:1'"
    " from generate_series(1, $count) n",
    f"{_LEASE} select 'old:' || n || ':' || n, 'services', 'ns-' || n % 50, 's' || n, {_UID},"
    " '10.0.0.1'::inet + n, 'p', tstzrange('2026-01-01', '2026-01-02'), 'never-used', 'bench:0'"
    " from generate_series(1, $past) n",
)
_LOAD = """
import asyncio, gc, resource, sys, time
from sqlalchemy.ext.asyncio import create_async_engine
from services.allocator.core import Rules
from services.allocator.main import COLLECT, AllocatorProjection
from services.kit.db import driver_url
from services.kit.garbage import loading

async def main():
    gc.set_threshold(*COLLECT)
    projection = AllocatorProjection(Rules())
    engine = create_async_engine(driver_url(sys.argv[1]))
    async with engine.connect() as conn:
        await conn.get_raw_connection()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        with loading():
            await projection.load(conn)
        took = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = sum(pool.total - pool.available() for pool in projection.state.pools.values())
    print(took, peak / 1024, (peak - before) / 1024, held)

asyncio.run(main())
"""


async def lease_load(quick: bool) -> list[Figure]:
    """A new process reads all leases and could decide."""
    count = 100_000 if quick else 1_000_000
    async with database() as (url, conn):
        await fill(conn, count)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _LOAD, url, stdout=subprocess.PIPE
        )
        out, _ = await process.communicate()
    took, peak, grown, held = map(float, out.split())
    if held != count:
        raise RuntimeError(f"{held:.0f} leases of {count} were read")
    note = f"{count:,} leases" + (", limits are those of 1,000,000" if quick else "")
    return [
        Figure("lease_load", took, "s", 10, 4, better="lower", note=note),
        Figure("lease_load.rss", peak, "MB", 600, 250, better="lower", note="peak of the process"),
        Figure("lease_load.grown", grown, "MB", better="lower", note="of that, by loading"),
    ]


async def explain(quick: bool) -> list[Figure]:
    """What `lb explain` and `leases --at` ask the ledger, at 100,000 load balancers with a past."""
    from sqlalchemy.ext.asyncio import create_async_engine

    from services.allocator import queries
    from services.kit.db import driver_url

    count = 100_000
    now, then = [], []
    async with database() as (url, conn):
        await fill(conn, count, past=count)
        engine = create_async_engine(driver_url(url))
        async with engine.connect() as asked:
            for number in range(1, 60 if quick else 400):
                n = number * 239 % count + 1
                began = time.perf_counter()
                found = await queries.explain_owner(asked, "services", f"ns-{n % 50}", f"s{n}")
                now.append((time.perf_counter() - began) * 1000)
                began = time.perf_counter()
                past = await queries.leases_of_owner(asked, "services", f"ns-{n % 50}", f"s{n}")
                then.append((time.perf_counter() - began) * 1000)
                if found is None or len(found.leases) != 1 or len(past) != 2:
                    raise RuntimeError(f"s{n} is not explained")
        await engine.dispose()
    note = "p99 at 100,000 owners with 200,000 leases"
    return [
        Figure("explain", percentile(now, 0.99), "ms", 100, 20, better="lower", note=note),
        Figure("explain.past", percentile(then, 0.99), "ms", 100, 20, better="lower"),
    ]


async def wake(quick: bool) -> list[Figure]:
    """A full pool grows by a thousand addresses; before that so many owners wait for it."""
    served, per = 1000, []
    figures = []
    with as_a_service():
        for waiting in (1000, 100_000):
            decider = Decider(pool("p", "192.0.2.1/32"))
            decider.all([service(n, pool_name="p") for n in range(waiting + 1)])
            grown = pool("p", "192.0.2.1/32", "10.0.0.0/22", exclude=["10.0.3.235-10.0.3.254"])
            began = cpu_s()
            out = decider.tell(grown)
            took = cpu_s() - began
            granted = sum(isinstance(event, events.LeaseGranted) for event in out)
            if granted < min(served, waiting):
                raise RuntimeError(f"{granted} of {waiting} were woken")
            per.append(took / granted * 1e6)
            name = f"wake.{waiting // 1000}k"
            note = f"for each of {granted} that are woken while {waiting:,} wait"
            figures.append(Figure(name, per[-1], "us", better="lower", note=note))
    note = "of a woken owner's time, 100,000 waiting against 1,000"
    figures.append(Figure("wake", per[1] / per[0], "x", 2.0, 1.2, better="lower", note=note))
    return figures


async def query_and_lock(quick: bool) -> list[Figure]:
    """The peer: a row for each address; find a free one, lock it, write the owner, commit."""
    count, free = (1000, 10_000) if quick else (5000, 100_000)
    async with database() as (_, conn):
        await conn.execute("create table address (ip inet primary key, owner text)")
        await conn.execute("create index on address (ip) where owner is null")
        await conn.execute(
            "insert into address select '10.0.0.0'::inet + n from generate_series(1, $1) n", free
        )
        await conn.execute("vacuum analyze address")
        began = time.perf_counter()
        for number in range(count):
            async with conn.transaction():
                found = await conn.fetchval(
                    "select ip from address where owner is null order by ip limit 1"
                    " for update skip locked"
                )
                await conn.execute(
                    "update address set owner = $2 where ip = $1", found, f"s{number}"
                )
        rate = count / (time.perf_counter() - began)
    ours = await _ours(count)
    return [
        Figure("leases.query_and_lock", rate, "/s", note="one transaction for each owner"),
        Figure("leases.ours", ours, "/s", note="the same owners, decided and stored by ours"),
        Figure("leases.ratio", ours / rate, "x", note="ours against query-and-lock"),
    ]


async def _ours(count: int) -> float:
    """The same job: decide in memory, store in transactions of a batch."""
    import sqlalchemy as sa
    from sqlalchemy.ext.asyncio import create_async_engine

    from services.allocator import store
    from services.kit.db import driver_url

    async with database() as (url, _):
        engine = create_async_engine(driver_url(url))
        decider = Decider(pool("p", "10.0.0.0/8"))
        facts = [service(n, pool_name="p") for n in range(count)]
        began = time.perf_counter()
        for start in range(0, count, 1000):
            for fact in facts[start : start + 1000]:
                decider.tell(fact)
            async with engine.begin() as conn:
                await conn.execute(sa.text("select 1"))
                await store.take_changes(decider.state)(conn)
        took = time.perf_counter() - began
        await engine.dispose()
    return count / took


ROWS = [
    Row("alloc_core", alloc_core),
    Row("wake", wake),
    Row("lease_load", lease_load, repeats=3),
    Row("explain", explain, repeats=3),
    Row("leases.query_and_lock", query_and_lock, repeats=3),
]
