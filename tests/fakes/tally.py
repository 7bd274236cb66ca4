"""A projection whose effect is not idempotent: it counts, so that a lost or a repeated event shows.

Run as a program it is one replica: `python -m tests.fakes.tally NATS_URL DATABASE_URL`, which gives
up a frozen one soon. With a third argument, so many seconds are what the stream remembers ids for.
`TALLY=ahead` in the environment makes it one that goes on while a batch is being written.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from schema import events
from schema.events import Owner
from schema.subjects import STREAMS, ObjectRef
from services.kit import config
from services.kit.projector import Projector
from services.kit.records import Poison, Record, Saver, Source, Work
from services.kit.runtime import Runtime, run_service

TABLE = """
create table if not exists prober.tally (
  name text primary key,
  count int not null check (count < 1000000)
)
"""


class Tally:
    """Counts facts by object name. Names give orders: `poison-*`, `broken-*`, `overflow-*`."""

    name = "prober"
    sources = (Source("KUBE", ("kube.>",)),)

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.heard: list[object] = []
        self._dirty: set[str] = set()

    async def load(self, conn: AsyncConnection) -> None:
        self._dirty.clear()
        rows = await conn.execute(sa.text("select name, count as count_ from prober.tally"))
        self.counts = {row.name: row.count_ for row in rows}

    def apply(self, record: Record, work: Work) -> None:
        if not isinstance(record.event, events.NamespaceSeen):
            return
        name = record.event.object.metadata.name
        if name.startswith("poison"):
            raise Poison(f"namespace {name}: must not be called poison")
        add = 10_000_000 if name.startswith("overflow") else 1
        self.counts[name] = self.counts.get(name, 0) + add
        self._dirty.add(name)
        if name.startswith("broken"):
            raise RuntimeError("half changed")
        owner = Owner(plural="services", namespace="x", name=name, uid="u")
        work.emit(
            events.LeaseRefused(
                at=datetime.now(UTC), owner=owner, reason="Count", message=str(self.counts[name])
            )
        )

    def local(self, item: object, work: Work) -> None:
        self.heard.append(item)
        if item == "broken":
            raise RuntimeError("a local input that can't be taken")
        self.counts[f"local-{item}"] = self.counts.get(f"local-{item}", 0) + 1
        self._dirty.add(f"local-{item}")

    async def save(self, conn: AsyncConnection) -> None:
        changed = {name: self.counts[name] for name in sorted(self._dirty)}
        await _write(conn, changed)
        self._dirty.clear()

    def restate(self, work: Work) -> None:
        for name, count in sorted(self.counts.items()):
            owner = Owner(plural="services", namespace="x", name=name, uid="u")
            work.emit(
                events.LeaseRefused(
                    at=datetime.now(UTC), owner=owner, reason="Restated", message=str(count)
                )
            )

    def known(self) -> Iterable[tuple[ObjectRef, str]]:
        return [(ObjectRef("namespaces", "", name), "u") for name in self.counts]

    def committed(self) -> None:
        pass


class AheadTally(Tally):
    def take_changes(self) -> Saver:
        changed = {name: self.counts[name] for name in sorted(self._dirty)}
        self._dirty.clear()
        return partial(_write, changed=changed)


async def _write(conn: AsyncConnection, changed: dict[str, int]) -> None:
    for name, count in changed.items():
        await conn.execute(
            sa.text(
                "insert into prober.tally values (:name, :count)"
                " on conflict (name) do update set count = excluded.count"
            ),
            {"name": name, "count": count},
        )


def tally() -> Tally:
    return AheadTally() if os.environ.get("TALLY") == "ahead" else Tally()


async def run(rt: Runtime) -> None:
    await Projector(rt, tally()).run()


if __name__ == "__main__":
    nats_url, database_url, *window = sys.argv[1:]
    for seconds in map(float, window):
        STREAMS["LB"] = msgspec.structs.replace(STREAMS["LB"], duplicate_window_s=seconds)
    env = {
        "LBLEDGER_NATS_URL": nats_url,
        "LBLEDGER_DATABASE_URL": database_url,
        "LBLEDGER_HEALTH_PORT": "-1",
        "LBLEDGER_PROJECTOR_BATCH": "50",
        "LBLEDGER_PROJECTOR_TAKEOVER_POLL_S": "0.05",
        "LBLEDGER_PROJECTOR_BEAT_S": "0.05",
        "LBLEDGER_PROJECTOR_EFFECTS_DEADLINE_S": "1",
        "LBLEDGER_PROJECTOR_SILENCE_S": "1.5",
    }
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(run_service("prober", run, config.load(env)))
