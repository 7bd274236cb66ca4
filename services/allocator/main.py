"""The allocator as a service: facts from KUBE, through the core, into the ledger and LB."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Final

import sqlalchemy as sa
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from schema import selection
from schema.subjects import ObjectRef
from services.allocator import queries, store
from services.allocator.core import Rules, State, Tick, account, decide, next_deadline, tick
from services.allocator.core.state_of import restated, standing_leases
from services.kit.config import Settings
from services.kit.projector import Projector
from services.kit.records import Record, Saver, Source, Work
from services.kit.runtime import Runtime

log = structlog.get_logger()
FORGET_EVERY_S: Final = 60.0
COLLECT: Final = (50_000, 20, 100)  # nearly all that is made is kept: look for garbage rarely
FILTERS: Final = (
    "kube.loadbalancers.>",
    "kube.services.>",
    "kube.ippools.>",
    "kube.namespaces.>",
    "kube.virtualmachines.>",
    "kube.configmaps.kube-system.kubevip",
    "kube.sync.>",
    "kube.epoch",
)


def rules_of(settings: Settings) -> Rules:
    mine = settings.allocator
    return Rules(
        classless=mine.classless,
        selection=selection.Rules(
            global_per_network=mine.global_per_network,
            open_pools=mine.open_pools,
            explicit_bypasses_scope=mine.explicit_bypasses_scope,
        ),
        overflow=mine.overflow,
        grace=timedelta(seconds=mine.grace_s),
        cooldown=timedelta(seconds=mine.cooldown_s),
        retire=timedelta(seconds=mine.retire_s),
    )


class AllocatorProjection:
    """Glue between the projector, the core and the store."""

    name = "allocator"
    sources = (Source("KUBE", FILTERS),)

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.state = State(rules)

    async def load(self, conn: AsyncConnection) -> None:
        """Read everything anew. The result is long-lived: the collector need not look at it."""
        gc.unfreeze()
        self.state = State(self._rules)
        gc.collect()
        gc.disable()
        try:
            await store.load(conn, self.state)
        finally:
            gc.enable()
        gc.freeze()

    def apply(self, record: Record, work: Work) -> None:
        was_ready = self.state.ready
        for event in decide(self.state, record.event, epoch=record.epoch, seq=record.seq):
            work.emit(event)
        if self.state.ready and not was_ready:
            # The log may know of leases that this ledger, a new one perhaps, does not.
            for event in standing_leases(self.state):
                work.emit(event)

    def local(self, item: object, work: Work) -> None:
        if isinstance(item, Tick):
            for event in tick(self.state, item.at):
                work.emit(event, self.state.cause.text)

    def settle(self, work: Work) -> None:
        for event in account(self.state):
            work.emit(event, self.state.cause.text)

    def take_changes(self) -> Saver:
        return store.take_changes(self.state)

    async def save(self, conn: AsyncConnection) -> None:
        await self.take_changes()(conn)

    def restate(self, work: Work) -> None:
        for event in (*restated(self.state), *account(self.state)):
            work.emit(event)

    def known(self) -> Iterable[tuple[ObjectRef, str]]:
        return self.state.known()

    def committed(self) -> None:
        return


async def run(rt: Runtime) -> None:
    gc.set_threshold(*COLLECT)
    projection = AllocatorProjection(rules_of(rt.settings))
    projector = Projector(rt, projection)
    timers = [
        asyncio.create_task(_tick(projection, projector)),
        asyncio.create_task(_forget(rt, projector)),
    ]
    running = asyncio.create_task(projector.run())
    try:
        # A timer only ends by an error of its own, which ends the service.
        await asyncio.wait([running, *timers], return_when=asyncio.FIRST_COMPLETED)
        for task in (running, *timers):
            if task.done():
                task.result()
    finally:
        for task in (running, *timers):
            task.cancel()
        await asyncio.gather(running, *timers, return_exceptions=True)


async def _tick(projection: AllocatorProjection, projector: Projector) -> None:
    """Tell the core the time when something is due by it."""
    while True:
        await asyncio.sleep(1.0)
        due = next_deadline(projection.state)
        now = datetime.now(UTC)
        if projector.active and due is not None and due <= now:
            await projector.asubmit(Tick(now))


async def _forget(rt: Runtime, projector: Projector) -> None:
    """End the retention of leases that are over, a little at a time, on the active replica."""
    keep = timedelta(days=rt.settings.allocator.retention_days)
    while True:
        await asyncio.sleep(FORGET_EVERY_S)
        if not keep or not projector.active:
            continue
        try:
            engine = await rt.engine()
            async with asyncio.timeout(30), engine.begin() as conn:
                count = await queries.forget_closed(conn, keep)
            if count:
                log.info("ledger.forgotten", leases=count, older_than_days=keep.days)
        except (sa.exc.SQLAlchemyError, OSError, TimeoutError) as error:
            log.warning("ledger.forgetting_failed", why=type(error).__name__)
