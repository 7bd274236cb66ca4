"""Applier: the only service that writes to the Kubernetes API.

Folds facts and decisions into what each object ought to be, and keeps writing the difference until
the watcher shows it. It decides nothing that another service decides; what it adds is the
rendering, the conditions, and the patience.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from schema import events
from schema.subjects import ObjectRef
from schema.tables import applier as tables
from services.applier import store, views
from services.applier.core import FOLLOWED, State, Unsaved, pool_entity
from services.applier.shapes import Announcing
from services.applier.targets import Options
from services.applier.workers import Done, Workers
from services.applier.writing import RESOURCES
from services.kit.config import ApplierSettings
from services.kit.kube import CredentialsError, Kube, KubeError
from services.kit.mirror import Mirror
from services.kit.projector import Projector
from services.kit.records import Record, Source, Work
from services.kit.retry import Backoff, wait_or_stop
from services.kit.runtime import Runtime

log = structlog.get_logger()
SOURCES: Final = (
    Source(
        "KUBE",
        (*(f"kube.{kind}.>" for kind in FOLLOWED), "kube.sync.>", "kube.epoch"),
    ),
    Source("LB", ("lb.lease.>", "lb.backends.>", "lb.health.>", "lb.provider.>")),
)
DISCOVER_S: Final = 60.0


class Applier:
    """The projection: what is stored, what is kept in memory, and who is woken after a commit."""

    name = "applier"
    sources = SOURCES

    def __init__(self, options: Options) -> None:
        self._options = options
        self._mirror = Mirror(tables.mirror, views.REDUCE)
        self._subresource: dict[str, bool] = {}
        self.state = State(options)
        self.workers: Workers | None = None

    async def load(self, conn: AsyncConnection) -> None:
        self.state = State(self._options)
        self._mirror = Mirror(tables.mirror, views.REDUCE)
        await self._mirror.load(conn)
        await store.load(conn, self.state)
        for kind in FOLLOWED:
            for ref, view in self._mirror.all(kind):
                self.state.observe(ref, None, view, view.metadata.uid)
        self.state.unsaved = Unsaved()
        self.state.dirty = {}
        self._forms()
        self._synced()
        self.state.resume()
        self.committed()

    def apply(self, record: Record, work: Work) -> None:
        self.state.cause = record.cause
        if record.stream == "LB":
            self.state.decide(record.event)
            return
        for change in self._mirror.observe(record):
            self.state.observe(change.ref, change.old, change.new, change.uid)
        if isinstance(record.event, events.SyncFinished | events.EpochStarted):
            before = self.state.synced
            self._synced()
            if self.state.synced - before:
                self.state.resume()

    def local(self, item: object, work: Work) -> None:
        if isinstance(item, Done):
            work.emit(item.applied, cause=item.cause)

    async def save(self, conn: AsyncConnection) -> None:
        unsaved, self.state.unsaved = self.state.unsaved, Unsaved()
        await self._mirror.save(conn)
        await store.save(conn, self.state, unsaved)

    def restate(self, work: Work) -> None:
        """Outcomes are history; there is nothing to state again."""

    def known(self) -> Iterable[tuple[ObjectRef, str]]:
        return self._mirror.known()

    def committed(self) -> None:
        if self.workers is not None:
            self.workers.wake()

    def subresources(self, found: dict[str, bool]) -> None:
        """Take what discovery says about the kinds whose form varies."""
        if found != self._subresource:
            log.info("applier.discovered", status_subresource=found)
            self._subresource = found
            self._forms()
            for uid in self.state.owners:
                self.state.touch(uid)
            for name in self.state.pools:
                self.state.touch(pool_entity(name))
            self.committed()

    def _forms(self) -> None:
        for plural, status in self._subresource.items():
            form = self.state.forms[plural]
            self.state.forms[plural] = form._replace(subresource=status)

    def _synced(self) -> None:
        self.state.synced = {kind for kind in FOLLOWED if self._mirror.synced(kind)}


def options_of(settings: ApplierSettings) -> Options:
    return Options(
        announcing=Announcing(settings.announcer, settings.metallb_legacy_annotation),
        echo_s=settings.echo_s,
        undecided_s=settings.undecided_s,
        pool_status_s=settings.pool_status_s,
        pool_map_entries=settings.pool_map_entries,
        backend_entries=settings.backend_entries,
    )


async def run(rt: Runtime) -> None:
    settings = rt.settings.applier
    applier = Applier(options_of(settings))
    projector = Projector(rt, applier)
    kube = await connect(rt)
    if kube is None:
        return
    rediscover = asyncio.Event()
    async with kube:
        applier.workers = Workers(
            kube,
            projector,
            lambda: applier.state,
            rediscover.set,
            count=settings.workers,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_discover(rt, kube, applier, rediscover))
            tasks.create_task(applier.workers.run(rt.stop))
            await projector.run()


async def connect(rt: Runtime) -> Kube | None:
    """The API client, waited for; None when the stop came first. No request is made yet."""
    backoff = Backoff(first=0.5, cap=15.0)
    settings = rt.settings.kube
    while not rt.stop.is_set():
        try:
            return await Kube.connect(
                settings.kubeconfig or None, settings.context or None, user_agent="lbledger-applier"
            )
        except CredentialsError as error:
            rt.health.set("kube", False, str(error))
            log.warning("kube.waiting", why=str(error))
            await wait_or_stop(rt.stop, backoff.delay())
    return None


async def _discover(rt: Runtime, kube: Kube, applier: Applier, now: asyncio.Event) -> None:
    """Learn, and learn again, whether status is a subresource of each of our kinds."""
    group_version = RESOURCES["loadbalancers"].group_version
    backoff = Backoff(first=0.2, cap=10.0)
    while not rt.stop.is_set():
        try:
            found = await kube.resources(group_version, refresh=True)
        except KubeError as error:
            rt.health.set("kube", False, str(error))
            await wait_or_stop(rt.stop, backoff.delay())
            continue
        rt.health.set("kube", True)
        backoff.reset()
        applier.subresources(
            {
                plural: found[plural].status
                for plural in ("loadbalancers", "ippools")
                if plural in found
            }
        )
        now.clear()
        waits = [asyncio.create_task(now.wait()), asyncio.create_task(rt.stop.wait())]
        await asyncio.wait(waits, timeout=DISCOVER_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.sleep(0.1)  # a burst of refusals is one look
