"""A running allocator for tests: facts go in by the KUBE stream, leases come out of the ledger.

`Cluster` speaks the words of tests.core.allocating, and puts the facts on the stream. `Replica`
is an allocator in this process; `spawn` starts one as a process of its own, to be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg

from schema import events
from services.allocator import main
from services.kit import config
from services.kit.runtime import Runtime
from tests.core.allocating import World
from tests.feeding import Feeder
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]


class Cluster(World):
    """Facts are queued by the words of World, and sent by flush()."""

    def __init__(self, feeder: Feeder, database: asyncpg.Connection) -> None:
        self._feeder = feeder
        self._queued: list[events.Event] = []
        self.database = database
        super().__init__(synced=False)
        self.epoch = feeder.epoch

    def feed(self, fact: events.AnyEvent) -> list[events.Event]:
        self.seq += 1
        self._queued.append(fact)
        return []

    async def flush(self) -> None:
        queued, self._queued = self._queued, []
        await self._feeder.send_all(queued)

    # --- the ledger ---

    async def held(self) -> dict[str, str]:
        """namespace/name -> address of the leases that hold now; asserts that none is double."""
        rows = await self.database.fetch(
            "select namespace || '/' || name as owner, host(address) as address "
            "from allocator.lease where upper_inf(during)"
        )
        taken = [row["address"] for row in rows]
        assert len(taken) == len(set(taken)), f"an address is held twice: {sorted(taken)}"
        return {row["owner"]: row["address"] for row in rows}

    async def holds(self, count: int, timeout: float = 30.0) -> dict[str, str]:
        async def there() -> bool:
            return len(await self.held()) == count

        await eventually(there, timeout, message=f"{count} leases")
        return await self.held()

    async def holds_at_least(self, count: int, timeout: float = 30.0) -> None:
        async def there() -> bool:
            return len(await self.held()) >= count

        await eventually(there, timeout, message=f"{count} leases or more")

    async def waiting(self) -> set[str]:
        rows = await self.database.fetch(
            "select namespace || '/' || name as owner from allocator.owner where phase = 'waiting'"
        )
        return {row["owner"] for row in rows}

    async def waits(self, count: int, timeout: float = 30.0) -> set[str]:
        async def there() -> bool:
            return len(await self.waiting()) == count

        await eventually(there, timeout, message=f"{count} owners waiting")
        return await self.waiting()

    async def caught_up(self, timeout: float = 30.0) -> None:
        """Everything that was sent is committed and published."""
        await self.flush()
        last = (await self._feeder.bus.stream_state("KUBE")).last_seq

        async def there() -> bool:
            seq = await self.database.fetchval(
                "select seq from allocator.stream_offset where stream = 'KUBE'"
            )
            left = await self.database.fetchval("select count(*) from allocator.outbox")
            assert (seq or 0) >= last, f"offset {seq}"
            assert not left, f"{left} decisions in the outbox"
            return True

        await eventually(there, timeout, message=f"offset {last} and an empty outbox")

    async def taken(self, timeout: float = 30.0) -> None:
        """Everything that was sent is committed."""
        await self.flush()
        last = (await self._feeder.bus.stream_state("KUBE")).last_seq
        query = (
            "select coalesce(max(seq), 0) >= $1 from allocator.stream_offset where stream = 'KUBE'"
        )

        async def there() -> bool:
            return bool(await self.database.fetchval(query, last))

        await eventually(there, timeout, interval=0.005, message=f"offset {last}")

    async def decided(self) -> list[events.AnyEvent]:
        """Every decision on the LB stream."""
        state = await self._feeder.bus.stream_state("LB")
        puller = self._feeder.bus.puller("LB", start_seq=max(1, state.first_seq))
        found: list[events.AnyEvent] = []
        while len(found) < state.messages:
            found += [events.decode(m.data) for m in await puller.fetch(1000, timeout=1.0)]
        await puller.close()
        return found


def environment(nats_url: str, database_url: str, **settings: str) -> dict[str, str]:
    return {
        "LBLEDGER_NATS_URL": nats_url,
        "LBLEDGER_DATABASE_URL": database_url,
        "LBLEDGER_PROJECTOR_TAKEOVER_POLL_S": "0.05",
        "LBLEDGER_ALLOCATOR_GRACE_S": "0",
        "LBLEDGER_HEALTH_PORT": "-1",
        **{f"LBLEDGER_ALLOCATOR_{key.upper()}": value for key, value in settings.items()},
    }


class Replica:
    """An allocator in this process."""

    def __init__(self, nats_url: str, database_url: str, **settings: str) -> None:
        self.rt = Runtime.create(
            "allocator", config.load(environment(nats_url, database_url, **settings))
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Replica:
        self._task = asyncio.create_task(main.run(self.rt))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.rt.stop.set()
        assert self._task is not None
        await asyncio.wait_for(self._task, 10)
        await self.rt.close()


def spawn(nats_url: str, database_url: str, **settings: str) -> subprocess.Popen[bytes]:
    """An allocator as a process of its own. The caller stops it."""
    program = (
        "import sys; from services.kit import config; from services.kit.runtime import "
        "run_service; from services.allocator import main; "
        "sys.exit(run_service('allocator', main.run, config.load()))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **environment(nats_url, database_url, **settings)},
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )


@contextlib.asynccontextmanager
async def cluster_of(nats_url: str, database_url: str) -> AsyncIterator[Cluster]:
    feeder = await Feeder.start(nats_url)
    database = await asyncpg.connect(database_url)
    try:
        yield Cluster(feeder, database)
    finally:
        await database.close()
        await feeder.close()
