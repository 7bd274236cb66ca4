"""The prober as a projection: facts and verdicts into images, once per batch.

However many facts of a batch concern a load balancer, one BackendsResolved tells their sum, caused
by the last of them. After a large change (the first complete list) images are decided in portions,
so that no transaction grows without bound; what is left over is not lost with the memory, since
every image is decided anew after loading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

import structlog
from prometheus_client import Counter
from sqlalchemy.ext.asyncio import AsyncConnection

from schema.events import BackendsResolved, HealthChanged, SyncFinished
from schema.subjects import ObjectRef
from services.kit.mirror import Mirror
from services.kit.records import Record, Source, Work
from services.prober import store
from services.prober.core import KINDS, State
from services.prober.images import BALANCERS, Dummies, Hold, Verdict
from services.prober.plan import Defaults

log = structlog.get_logger()
_decisions = Counter("lbledger_prober_decisions_total", "Decisions committed", ["kind"])
PORTION = 500
LOGGED = 20  # changes named in one line of the log
NETWORKS = (store.NODES, store.SERVICE_CIDRS)  # kinds that say which addresses are the cluster's
SOURCES = (
    Source(
        "KUBE",
        (*(f"kube.{plural}.>" for plural in (*KINDS, *NETWORKS)), "kube.sync.>", "kube.epoch"),
    ),
)


class Judgement(NamedTuple):
    """What the checks came to in one tick."""

    verdicts: tuple[Verdict, ...]
    holds: tuple[Hold, ...]
    at: datetime


class Settle(NamedTuple):
    """Decide what is left over."""


class Prober:
    """Implements the kit's Projection."""

    name = "prober"
    sources = SOURCES

    def __init__(
        self,
        defaults: Defaults,
        dummies: Dummies,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._defaults = defaults
        self._dummies = dummies
        self._clock = clock
        self._facts: Mirror = store.facts()
        self._causes: dict[str, str] = {}
        self._decided: list[BackendsResolved | HealthChanged] = []  # not yet committed
        self.state = State(defaults, dummies)
        self._dummies_checked = False
        self.loads = 0  # grows whenever memory was replaced
        self.on_commit: Callable[[set[str]], None] = lambda _: None

    async def load(self, conn: AsyncConnection) -> None:
        facts, state = store.facts(), State(self._defaults, self._dummies)
        await facts.load(conn)
        for plural in KINDS:
            for ref, view in facts.all(plural):
                _see(state, ref, view.metadata.uid, view)
        for image in await store.load_images(conn):
            state.restore(image)
        for uid in state.dirty:
            state.dirty[uid] = False
        self._facts, self.state = facts, state
        self._causes.clear()
        self._decided.clear()
        self._dummies_checked = False
        self.loads += 1

    def apply(self, record: Record, work: Work) -> None:
        for change in self._facts.observe(record):
            if change.ref.plural in NETWORKS:
                self._dummies_checked = False
                continue
            for uid in _see(self.state, change.ref, change.uid, change.new):
                self._causes[uid] = record.cause
        if isinstance(record.event, SyncFinished):
            for uid in self.state.waiting:
                self._causes.setdefault(uid, record.cause)
            self.state.see_complete()

    def local(self, item: object, work: Work) -> None:
        if isinstance(item, Judgement):
            for event in self.state.judge(item.verdicts, item.holds, item.at):
                work.emit(event)
                self._decided.append(event)

    def settle(self, work: Work) -> None:
        if not self.unsettled:
            return
        synced = [plural for plural in KINDS if self._facts.synced(plural)]
        for event in self.state.resolve(synced, self._clock(), PORTION):
            work.emit(event, self._causes.get(event.owner.uid, ""))
            self._decided.append(event)
        left = self.state.dirty.keys() | self.state.waiting.keys()
        self._causes = {uid: cause for uid, cause in self._causes.items() if uid in left}

    @property
    def unsettled(self) -> bool:
        """Whether there are images to decide, and facts enough to do so."""
        return bool(self.state.dirty) and self._facts.synced(BALANCERS)

    def misplaced_dummy(self) -> tuple[str, str] | None:
        """A dummy within a network of pods or Services, and the network; "" for both when there is
        none.

        None while nothing has changed since it was asked the last time.
        """
        if self._dummies_checked:
            return None
        self._dummies_checked = True
        return self._dummies.inside(self._networks()) or ("", "")

    def _networks(self) -> Iterator[str]:
        """The networks that objects of the cluster name as its own."""
        for _, node in self._facts.all(store.NODES):
            yield from node.spec.pod_cidrs or ()
        for _, cidr in self._facts.all(store.SERVICE_CIDRS):
            yield from cidr.spec.cidrs or ()

    async def save(self, conn: AsyncConnection) -> None:
        await self._facts.save(conn)
        images, gone = [], []
        for uid in self.state.changed:
            balancer = self.state.balancers.get(uid)
            if balancer is None:
                gone.append(uid)
            elif balancer.image is not None:
                images.append(balancer.image)
        await store.save_images(conn, images, gone)

    def restate(self, work: Work) -> None:
        """The LB stream is empty: say again what stands."""
        for balancer in self.state.balancers.values():
            if balancer.image is not None:
                work.emit(balancer.image)

    def known(self) -> Iterable[tuple[ObjectRef, str]]:
        return self._facts.known()

    def committed(self) -> None:
        for event in self._decided:
            _tell(event)
        self._decided.clear()
        changed, self.state.changed = self.state.changed, set()
        if changed:
            self.on_commit(changed)


def _tell(event: BackendsResolved | HealthChanged) -> None:
    owner = str(event.owner.ref)
    if isinstance(event, BackendsResolved):
        _decisions.labels("backends").inc()
        log.debug(
            "backends.resolved",
            owner=owner,
            revision=event.revision,
            backends=len(event.backends),
            matched=event.matched,
            dummy=event.dummy or event.dummy6,
            reason=event.reason,
        )
        return
    _decisions.labels("health").inc()
    log.info(
        "health.changed",
        owner=owner,
        revision=event.revision,
        changes={change.address: change.state for change in event.changes[:LOGGED]},
        healthy=event.healthy,
        total=event.total,
        dummy=event.dummy or event.dummy6,
        held=event.held,
    )


def _see(state: State, ref: ObjectRef, uid: str, view: Any) -> list[str]:
    if ref.plural == BALANCERS:
        return state.see_balancer(uid, view)
    return state.see_member(ref, view)
