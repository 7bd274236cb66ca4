"""Facts into the core, the core's decisions into rows, events and requests: one transaction each.

The projector calls this; requests that the core has begun are handed out in `committed`, so that
nothing is ever sent whose row could be lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from sys import intern

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from schema import events, objects
from schema.names import EGRESS_LABEL, NRP_FINALIZER
from schema.subjects import ObjectRef
from schema.tables import nrp_sync as tables
from services.kit.mirror import Mirror
from services.kit.records import Hole, Record, Source, Work
from services.nrp_sync import (
    core,
    egress,
    images,
    metrics,
    nodes,
    outcomes,
    planning,
    store,
)
from services.nrp_sync.sources import Name
from services.nrp_sync.state import SOURCES, Outcome, Policy, Request, State
from services.nrp_sync.wishes import IDLE_TIMEOUT, INTERNAL

SLICES = "endpointslices"


class Tick(msgspec.Struct, frozen=True):
    """Time has passed: begin what is due."""


class Repair(msgspec.Struct, frozen=True):
    """Somebody asked for a reading and a new try of what was put aside."""


class Ended(msgspec.Struct, frozen=True):
    """A request of ours ended."""

    number: int
    outcome: Outcome


class NrpProjection:
    name = "nrp_sync"
    sources = (
        Source(
            "KUBE",
            (
                *(f"kube.{plural}.>" for plural in SOURCES),
                *(f"kube.sync.{plural}" for plural in SOURCES),
                "kube.epoch",
            ),
        ),
    )

    def __init__(
        self,
        policy: Policy,
        *,
        keep_requests: int = 5000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._policy, self._keep, self._clock = policy, keep_requests, clock
        self.state = State(policy)
        self.flying: set[int] = set()
        """Requests that this process waits for, or knows the outcome of; outlives a reload."""
        self.start: Callable[[list[Request]], None] = lambda requests: None
        """Told of requests whose rows are committed."""
        self.reloaded: Callable[[], None] = lambda: None
        self._mirror = self._new_mirror()
        self._slices: set[Name] = set()
        self._saved: list[Request] = []

    def _new_mirror(self) -> Mirror:
        return Mirror(
            tables.mirror,
            {"services": reduce_service, "nodes": reduce_node, "pods": reduce_pod},
        )

    # --- rows ---

    async def load(self, conn: AsyncConnection) -> None:
        self._mirror = self._new_mirror()
        await self._mirror.load(conn)
        self._slices.clear()
        self._saved = []
        now = self._clock()
        state = self.state = await store.load(conn, self._policy)
        for _, node in self._mirror.all("nodes"):
            nodes.see_node(state, node, now=now)
        for ref, service in self._mirror.all("services"):
            core.see_service(state, service, cause=self._known_cause(ref, service), now=now)
        for _, pod in self._mirror.all("pods"):
            egress.see_pod(state, pod, cause="", now=now)
        self._note_marks()
        await store.finish_load(conn, state, now, self.flying)
        self.reloaded()

    def _known_cause(self, ref: ObjectRef, service: objects.Service) -> str:
        op = self.state.operations.get(("inbound", service.metadata.uid.lower()))
        return op.cause if op is not None else ""

    async def save(self, conn: AsyncConnection) -> None:
        await self._mirror.save(conn)
        self._saved = self.state.outgoing
        self.state.outgoing = []
        await store.save(
            conn,
            self.state,
            slices=self._slices,
            requests=self._saved,
            keep_requests=self._keep,
        )
        self._slices.clear()

    def committed(self) -> None:
        requests, self._saved = self._saved, []
        metrics.count(self.state.notes)
        self.state.notes.clear()
        self.start(requests)

    def known(self) -> Iterable[tuple[ObjectRef, str]]:
        yield from self._mirror.known()
        for name, source in self.state.provided.desired.slices.items():
            yield ObjectRef(SLICES, *name), source.uid

    # --- inputs ---

    def apply(self, record: Record, work: Work) -> None:
        now = self._clock()
        ref = events.fact_ref(record.event)
        if ref is not None and ref.plural == SLICES:
            self._slice(ref, record, now)
            return
        epoch = self._mirror.marks.epoch
        for change in self._mirror.observe(record):
            self._changed(change.ref, change.new, change.uid, record.cause, now)
        if self._mirror.marks.epoch != epoch:
            core.new_epoch(self.state)
        if isinstance(record.event, events.SyncFinished):
            self._sweep_slices(record.event.plural, now)
            self._note_marks()

    def local(self, item: object, work: Work) -> None:
        now = self._clock()
        match item:
            case Tick():
                outcomes.release_orphans(self.state, now)
                planning.plan(self.state, now)
            case Repair():
                core.repair(self.state, now)
            case Ended(number, outcome):
                outcomes.finish(self.state, number, outcome, now)
                self.flying.discard(number)

    def settle(self, work: Work) -> None:
        """Once a batch: say what it came to."""
        now = self._clock()
        egress.release(self.state)
        images.tell_all(self.state, now)
        egress.tell_pods(self.state, now)
        for event, cause in self.state.said:
            work.emit(event, cause)
        self.state.said.clear()

    def restate(self, work: Work) -> None:
        images.restate(self.state, self._clock())
        self.settle(work)

    def due(self) -> float:
        """Seconds until something may have to be sent."""
        now = self._clock()
        return max(0.0, planning.next_due(self.state, now) - now)

    # --- facts ---

    def _changed(
        self, ref: ObjectRef, view: objects.AnyObject | None, uid: str, cause: str, now: float
    ) -> None:
        name = Name(ref.namespace, ref.name)
        match view:
            case objects.Service():
                core.see_service(self.state, view, cause=cause, now=now)
            case objects.Node():
                nodes.see_node(self.state, view, now=now)
            case objects.Pod():
                egress.see_pod(self.state, view, cause=cause, now=now)
            case None if ref.plural == "services":
                core.gone_service(self.state, name, uid, cause=cause, now=now)
            case None if ref.plural == "nodes":
                nodes.gone_node(self.state, ref.name, now=now)
            case None if ref.plural == "pods":
                egress.gone_pod(self.state, name, uid, now=now)

    def _slice(self, ref: ObjectRef, record: Record, now: float) -> None:
        """The same rules as for mirrored objects, on rows of our own."""
        name = Name(ref.namespace, ref.name)
        slices = self.state.provided.desired.slices
        source = slices.get(name)
        if source is not None and source.epoch == record.epoch:
            if record.seq <= source.seq:
                return
            if 0 <= record.expected != source.seq and not record.snapshot:
                raise Hole(ref, expected=record.expected, known=source.seq)
        match record.event:
            case events.EndpointSliceSeen(object=view):
                core.see_slice(self.state, view, now=now)
            case events.ObjectGone(uid=uid) if source is not None and source.uid == uid:
                core.gone_slice(self.state, name, now=now)
        source = slices.get(name)
        if source is not None:
            source.epoch, source.seq = intern(record.epoch), record.seq
        self._slices.add(name)

    def _sweep_slices(self, plural: str, now: float) -> None:
        """The list is complete: what this epoch did not show is gone."""
        marks = self._mirror.marks
        if plural != SLICES or not marks.synced(SLICES):
            return
        slices = self.state.provided.desired.slices
        for name in sorted(n for n, source in slices.items() if source.epoch != marks.epoch):
            core.gone_slice(self.state, name, now=now)
            self._slices.add(name)

    def _note_marks(self) -> None:
        for plural in SOURCES:
            if self._mirror.marks.synced(plural):
                core.finished(self.state, plural)


# --- what of an object matters here ---------------------------------------------------------------


def _meta(meta: objects.ObjectMeta, **kept: object) -> objects.ObjectMeta:
    return objects.ObjectMeta(
        name=meta.name,
        namespace=meta.namespace,
        uid=meta.uid,
        deletion_timestamp=meta.deletion_timestamp,
        finalizers=[NRP_FINALIZER] if NRP_FINALIZER in (meta.finalizers or ()) else None,
        **kept,  # type: ignore[arg-type]
    )


def reduce_service(view: objects.Service) -> objects.Service:
    """Only Services of type LoadBalancer are kept whole."""
    meta, spec = view.metadata, view.spec
    if spec.type != "LoadBalancer":
        return objects.Service(metadata=_meta(meta), spec=objects.ServiceSpec(type=spec.type))
    annotations = {
        key: value
        for key, value in (meta.annotations or {}).items()
        if key in (IDLE_TIMEOUT, INTERNAL)
    }
    return objects.Service(
        metadata=_meta(meta, generation=meta.generation, annotations=annotations or None),
        spec=objects.ServiceSpec(
            type=spec.type,
            load_balancer_class=spec.load_balancer_class,
            load_balancer_ip=spec.load_balancer_ip,
            ip_families=spec.ip_families,
            session_affinity=spec.session_affinity,
            ports=[
                objects.ServicePort(
                    name=port.name,
                    protocol=port.protocol,
                    port=port.port,
                    target_port=port.target_port,
                )
                for port in spec.ports or ()
            ],
        ),
    )


def reduce_node(view: objects.Node) -> objects.Node:
    addresses = (view.status.addresses if view.status else None) or ()
    internal = [entry for entry in addresses if entry.type == "InternalIP"]
    return objects.Node(
        metadata=objects.ObjectMeta(name=view.metadata.name, uid=view.metadata.uid),
        status=objects.NodeStatus(addresses=internal),
    )


def reduce_pod(view: objects.Pod) -> objects.Pod:
    label = (view.metadata.labels or {}).get(EGRESS_LABEL)
    return objects.Pod(
        metadata=_meta(view.metadata, labels=None if label is None else {EGRESS_LABEL: label}),
        spec=view.spec,
        status=view.status,
    )
