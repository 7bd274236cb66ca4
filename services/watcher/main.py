"""The watcher: what the Kubernetes API shows becomes facts on the bus. Only it reads that API.

Two things are waited for and may come in any order, go and come back: the API server and the bus.
A term (see epochs) holds as long as the stream is the same; within it each kind of the table below
is followed by a task of its own. Readiness is red while the bus, or the API server for any kind,
does not answer.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import structlog

from schema.subjects import STREAMS, StreamSpec
from services.kit.bus import Bus, BusError
from services.kit.kube import CredentialsError, Kube, Resource
from services.kit.retry import Backoff, wait_or_stop
from services.kit.runtime import Runtime
from services.watcher import core, epochs, upkeep
from services.watcher.kinds import Kind
from services.watcher.listing import Follower
from services.watcher.publishing import Publishing

DRAIN_S: Final = 6.0  # of the ten seconds that a service has to stop
STEADY_S: Final = 60.0  # a term that held this long was a good one
HARVESTER: Final = "loadbalancer.harvesterhci.io"
EGRESS_LABEL: Final = "kubernetes.azure.com/service-egress-gateway"

KINDS: Final = (
    Kind(resource=Resource(HARVESTER, "v1beta1", "loadbalancers"), optional=True),
    Kind(resource=Resource(HARVESTER, "v1beta1", "ippools", namespaced=False), optional=True),
    Kind(resource=Resource("kubevirt.io", "v1", "virtualmachineinstances"), optional=True),
    Kind(resource=Resource("kubevirt.io", "v1", "virtualmachines"), optional=True),
    Kind(
        resource=Resource("k8s.cni.cncf.io", "v1", "network-attachment-definitions"), optional=True
    ),
    Kind(resource=Resource("", "v1", "namespaces", namespaced=False)),
    Kind(resource=Resource("", "v1", "nodes", namespaced=False)),
    # Served since Kubernetes 1.33.
    Kind(
        resource=Resource("networking.k8s.io", "v1", "servicecidrs", namespaced=False),
        optional=True,
    ),
    Kind(resource=Resource("", "v1", "services")),
    Kind(resource=Resource("discovery.k8s.io", "v1", "endpointslices")),
    Kind(resource=Resource("", "v1", "pods"), selector=EGRESS_LABEL),
    Kind(resource=Resource("", "v1", "configmaps"), namespace="kube-system", name="kubevip"),
)

log = structlog.get_logger()


async def run(rt: Runtime) -> None:
    rt.health.set("kube", False, "nothing listed yet")
    bus = await rt.bus()
    kube = await _connect(rt)
    if kube is None:
        return
    try:
        await Watcher(rt, bus, kube).run()
    finally:
        await kube.close()


async def _connect(rt: Runtime) -> Kube | None:
    """Wait until there are credentials: a kubeconfig may be written after we start."""
    settings, backoff = rt.settings.kube, Backoff(0.2, 10.0)
    while not rt.stop.is_set():
        try:
            return await Kube.connect(
                settings.kubeconfig or None, settings.context or None, user_agent="lbledger-watcher"
            )
        except CredentialsError as error:
            rt.health.set("kube", False, str(error))
            log.warning("watcher.kube.waiting", why=str(error))
        await wait_or_stop(rt.stop, backoff.delay())
    return None


class Watcher:
    """One term after the other, until the stop."""

    def __init__(self, rt: Runtime, bus: Bus, kube: Kube, kinds: tuple[Kind, ...] = KINDS) -> None:
        self._rt, self._bus, self._kube, self._kinds = rt, bus, kube, kinds
        self._memory = core.Memory()
        self._troubles = {kind.plural: "not listed yet" for kind in kinds}

    async def run(self) -> None:
        backoff, reason = Backoff(0.1, 5.0), ""
        while not self._rt.stop.is_set():
            try:
                term = await epochs.begin(
                    self._bus, self._streams(), [k.plural for k in self._kinds], self._memory,
                    reason,
                )  # fmt: skip
            except BusError as error:
                log.warning("watcher.term.waiting", why=str(error))
                await wait_or_stop(self._rt.stop, backoff.delay())
                continue
            began = time.monotonic()
            reason = await self._hold(term)
            if time.monotonic() - began > STEADY_S:
                backoff.reset()
            await wait_or_stop(self._rt.stop, backoff.delay() if reason else 0.0)

    def _streams(self) -> list[StreamSpec]:
        return [self._rt.stream(name) for name in STREAMS]

    async def _hold(self, term: epochs.Term) -> str:
        """Follow every kind until the stop ("") or until the stream is lost (why)."""
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def lost(why: str) -> None:
            if not ended.done():
                log.warning("watcher.stream.lost", why=why, epoch=term.epoch)
                ended.set_result(why)

        def defect(error: BaseException) -> None:
            if not ended.done():
                ended.set_exception(error)

        followers: dict[str, Follower] = {}
        publishing = Publishing(
            self._bus,
            term.epoch,
            term.known,
            base=term.state.last_seq,
            lost=lost,
            diverged=lambda plural: followers[plural].ask_relist(),
            defect=defect,
        )
        settings = self._rt.settings.watcher
        for kind in self._kinds:
            followers[kind.plural] = Follower(
                kind, self._kube, publishing, settings, self._report
            )  # fmt: skip
        republisher = upkeep.Republisher(
            self._bus, publishing, list(followers.values()), settings.republish_s
        )
        tasks = [
            *(asyncio.create_task(f.run(), name=f"watch {p}") for p, f in followers.items()),
            asyncio.create_task(republisher.run(), name="republish"),
            asyncio.create_task(
                upkeep.check(self._bus, publishing, self._memory, settings.check_s, lost),
                name="check",
            ),
        ]
        stopping = asyncio.create_task(self._rt.stop.wait())
        try:
            waited: set[asyncio.Future[Any]] = {ended, stopping, *tasks}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and not task.cancelled():
                    task.result()  # none of them ends by itself: this is a defect, and is raised
            return ended.result() if ended.done() else ""
        finally:
            stopping.cancel()
            await _cancel(tasks)
            if not ended.done() and not await publishing.drained(DRAIN_S):
                log.warning("watcher.stop.undrained", pending=publishing.pending)
            self._memory.top = publishing.top
            await publishing.close()

    def _report(self, plural: str, why: str) -> None:
        """What the API server said, or did not say, about one kind."""
        self._troubles[plural] = why
        bad = {p: w for p, w in self._troubles.items() if w}
        self._rt.health.set("kube", not bad, "; ".join(f"{p}: {w}" for p, w in bad.items()))


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
