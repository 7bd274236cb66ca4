"""Which backends a load balancer has, which are ready, and whether the dummy endpoint stands in.

Pure: facts and verdicts in, events out, times as inputs. The image of a load balancer is its last
BackendsResolved with every HealthChanged since folded in; it is a function of the current facts and
of the verdicts that counted.

Guarantees: an image always has a ready endpoint in each of its families, a backend or else the
dummy, and both change in one event. A new backend is not ready until it has passed; what was ready
when checks came on stays so until it fails; without checks everything is ready. A verdict on
another configuration, an older time or a backend that left changes nothing. Before a kind has been
listed completely nothing is decided from it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from schema import objects
from schema.events import Backend, BackendsResolved, HealthChange, HealthChanged, Owner
from schema.subjects import ObjectRef
from services.prober.members import PODS, VMIS, Member, Members, member
from services.prober.plan import Defaults, Plan, read

BALANCERS: Final = "loadbalancers"
KINDS: Final = (BALANCERS, VMIS, PODS)
_NO_TIME: Final = float("-inf")

BackendKey = tuple[str, str]  # uid and address


class Verdict(NamedTuple):
    """What the checks of one backend came to. `started` is monotonic, of the last check's start."""

    owner: str
    uid: str
    address: str
    config: str
    started: float
    healthy: bool
    reason: str
    ended: datetime


class Hold(NamedTuple):
    """Failures of an owner's backends are not acted on, for this reason ("": they are again)."""

    owner: str
    reason: str


@dataclass(slots=True)
class Balancer:
    owner: Owner
    generation: int
    spec: objects.LoadBalancerSpec
    plan: Plan
    image: BackendsResolved | None = None
    heard: dict[BackendKey, float] = field(default_factory=dict)

    @property
    def needs(self) -> Iterator[str]:
        """Kinds that the image depends on."""
        yield BALANCERS
        if self.plan.vms:
            yield VMIS
        if self.plan.pods:
            yield PODS


class Dummies(NamedTuple):
    """The address that stands in for a family without a ready backend."""

    ipv4: str
    ipv6: str

    def inside(self, networks: Iterable[str]) -> tuple[str, str] | None:
        """A dummy that could be somebody's address after all, and the network that it is in."""
        for text in networks:
            try:
                network = ipaddress.ip_network(text, strict=False)
            except ValueError:
                continue
            for dummy in self:
                if ipaddress.ip_address(dummy) in network:
                    return dummy, text
        return None


@dataclass(slots=True)
class State:
    defaults: Defaults
    dummies: Dummies
    balancers: dict[str, Balancer] = field(default_factory=dict)  # by uid
    members: Members = field(default_factory=Members)
    # Owners whose image may have changed; the value says whether the spec did.
    dirty: dict[str, bool] = field(default_factory=dict)
    waiting: dict[str, bool] = field(default_factory=dict)  # as dirty, until a kind is complete
    changed: set[str] = field(default_factory=set)  # owners whose image or checks are others now

    # --- facts ---

    def see_balancer(self, uid: str, new: objects.LoadBalancer | None) -> list[str]:
        """A load balancer's newest form; None when it is gone. Returns who became dirty."""
        if new is None or not _wanted(new):
            self._forget(uid)
            return []
        meta = new.metadata
        known = self.balancers.get(uid)
        plan = read(new, self.defaults)
        if known is None:
            owner = Owner(plural=BALANCERS, namespace=meta.namespace, name=meta.name, uid=uid)
            known = Balancer(owner, meta.generation, new.spec, plan)
            self.balancers[uid] = known
            self.dirty[uid] = True
        elif known.spec != new.spec or known.plan != plan:
            known.generation, known.spec, known.plan = meta.generation, new.spec, plan
            self.dirty[uid] = True
        else:
            return []
        self.members.select(uid, VMIS, meta.namespace, plan.vms)
        self.members.select(uid, PODS, meta.namespace, plan.pods)
        return [uid]

    def see_member(
        self, ref: ObjectRef, new: objects.VirtualMachineInstance | objects.Pod | None
    ) -> list[str]:
        """A possible backend's newest form; None when it is gone. Returns who became dirty."""
        concerned = sorted(self.members.put(ref, member(new)))
        for uid in concerned:
            self.dirty.setdefault(uid, False)
        return concerned

    def see_complete(self) -> None:
        """Another kind is listed completely: who waited may try again."""
        for uid, spec_changed in self.waiting.items():
            self.dirty[uid] = self.dirty.get(uid, False) or spec_changed
        self.waiting.clear()

    def restore(self, image: BackendsResolved) -> None:
        """An image as it was stored; one that nobody owns any more is to be deleted."""
        known = self.balancers.get(image.owner.uid)
        if known is None:
            self.changed.add(image.owner.uid)
            return
        known.image = image

    def _forget(self, uid: str) -> None:
        if self.balancers.pop(uid, None) is not None:
            self.changed.add(uid)
            self.members.select(uid, VMIS, "", {})
            self.members.select(uid, PODS, "", {})
        self.dirty.pop(uid, None)
        self.waiting.pop(uid, None)

    # --- decisions ---

    def resolve(self, synced: Collection[str], at: datetime, limit: int) -> list[BackendsResolved]:
        """Images that the facts changed, of at most `limit` owners; the rest stay dirty."""
        decided = []
        for uid in list(islice(self.dirty, limit)):
            balancer, spec_changed = self.balancers[uid], self.dirty.pop(uid)
            if not all(kind in synced for kind in balancer.needs):
                self.waiting[uid] = self.waiting.get(uid, False) or spec_changed
                continue
            event = decide(
                balancer, self.backends(uid), self.dummies, at=at, spec_changed=spec_changed
            )
            if spec_changed:  # what is to be checked may be another thing now
                self.changed.add(uid)
            if event is not None:
                self.evolve(event)
                decided.append(event)
        return decided

    def judge(
        self, verdicts: Iterable[Verdict], holds: Iterable[Hold], at: datetime
    ) -> list[HealthChanged]:
        """What verdicts and holds change: one event for each owner concerned."""
        by_owner: dict[str, list[Verdict]] = {}
        held: dict[str, str] = {}
        for verdict in verdicts:
            by_owner.setdefault(verdict.owner, []).append(verdict)
        for hold in holds:
            held[hold.owner] = hold.reason
            by_owner.setdefault(hold.owner, [])
        decided = []
        for uid, given in by_owner.items():
            balancer = self.balancers.get(uid)
            if balancer is None or balancer.image is None or balancer.plan.checking != "on":
                continue
            event = weigh(balancer, balancer.image, given, held.get(uid), self.dummies, at)
            if event is not None:
                self.evolve(event)
                decided.append(event)
        return decided

    def evolve(self, event: BackendsResolved | HealthChanged) -> None:
        """Take a decision into the state; also how the state is rebuilt from the log."""
        balancer = self.balancers.get(event.owner.uid)
        if balancer is None:
            return
        self.changed.add(event.owner.uid)
        if isinstance(event, BackendsResolved):
            balancer.image = event
        elif balancer.image is not None:
            balancer.image = fold(balancer.image, event)
        if balancer.image is not None:
            left = balancer.heard.keys() - {key_of(b) for b in balancer.image.backends}
            for key in left:
                del balancer.heard[key]

    def backends(self, uid: str) -> tuple[list[Backend], int]:
        """The backends with an address in the slice's order (not judged), and how many match."""
        balancer = self.balancers[uid]
        plan = balancer.plan
        found = self.members.matching(uid, VMIS) + self.members.matching(uid, PODS)
        listed = [backend for obj in found for backend in _of_member(obj, plan)]
        listed += _of_explicit(balancer)
        listed.sort(key=lambda b: (b.namespace, b.name, b.address, b.kind, b.uid))
        return listed, len(found) + len(plan.explicit)


def decide(
    balancer: Balancer,
    found: tuple[list[Backend], int],
    dummies: Dummies,
    *,
    at: datetime,
    spec_changed: bool,
) -> BackendsResolved | None:
    """The complete image of an owner, or None when it is as it was."""
    plan, before = balancer.plan, balancer.image
    listed, matched = found
    known = {key_of(b): b for b in before.backends} if before is not None else {}
    backends = [_carry(b, known.get(key_of(b)), plan) for b in listed]
    dummy, dummy6 = stand_ins(backends, plan.families, dummies)
    image = BackendsResolved(
        at=at,
        owner=balancer.owner,
        revision=before.revision if before is not None else 0,
        generation=balancer.generation if spec_changed or before is None else before.generation,
        ports=list(plan.ports),
        backends=backends,
        matched=matched,
        dummy=dummy,
        dummy6=dummy6,
        families=[] if plan.families == ("IPv4",) else list(plan.families),
        checked=plan.checking != "off",
        held=before.held if before is not None and plan.checking == "on" else "",
        reason=plan.reason,
        message=plan.message,
    )
    if before is not None and image == msgspec.structs.replace(before, at=at):
        return None
    return msgspec.structs.replace(image, revision=image.revision + 1)


def weigh(
    balancer: Balancer,
    image: BackendsResolved,
    verdicts: Iterable[Verdict],
    held: str | None,
    dummies: Dummies,
    at: datetime,
) -> HealthChanged | None:
    """What verdicts on one owner's backends change; None when that is nothing."""
    known = {key_of(b): b for b in image.backends}
    changes: dict[BackendKey, HealthChange] = {}
    for verdict in verdicts:
        key = (verdict.uid, verdict.address)
        backend = known.get(key)
        if (
            backend is None
            or verdict.config != balancer.plan.config
            or verdict.started <= balancer.heard.get(key, _NO_TIME)
        ):
            continue
        balancer.heard[key] = verdict.started
        state = "healthy" if verdict.healthy else "unhealthy"
        if backend.state == state:
            changes.pop(key, None)  # there and back within one tick
            continue
        changes[key] = HealthChange(
            uid=verdict.uid,
            address=verdict.address,
            state=state,
            ready=verdict.healthy,
            reason=verdict.reason,
            since=verdict.ended,
        )
    now_held = image.held if held is None else held
    if not changes and now_held == image.held:
        return None
    backends = _judged(image.backends, changes)
    dummy, dummy6 = stand_ins(backends, image.families or ("IPv4",), dummies)
    return HealthChanged(
        at=at,
        owner=balancer.owner,
        revision=image.revision + 1,
        changes=list(changes.values()),
        healthy=sum(b.ready for b in backends),
        total=len(backends),
        dummy=dummy,
        dummy6=dummy6,
        held=now_held,
    )


def fold(image: BackendsResolved, event: HealthChanged) -> BackendsResolved:
    """The image after a change of health."""
    return msgspec.structs.replace(
        image,
        revision=event.revision,
        backends=_judged(image.backends, {(c.uid, c.address): c for c in event.changes}),
        dummy=event.dummy,
        dummy6=event.dummy6,
        held=event.held,
    )


def stand_ins(
    backends: Iterable[Backend], families: Collection[str], dummies: Dummies
) -> tuple[str, str]:
    """The dummies that must stand in: one for each family in which nothing is ready."""
    ready = {"IPv6" if ":" in b.address else "IPv4" for b in backends if b.ready}
    missing = set(families) - ready
    return (
        dummies.ipv4 if "IPv4" in missing else "",
        dummies.ipv6 if "IPv6" in missing else "",
    )


def key_of(backend: Backend) -> BackendKey:
    return backend.uid, backend.address


def _carry(backend: Backend, before: Backend | None, plan: Plan) -> Backend:
    """Give a backend the verdict that it has, or the one that it starts with."""
    if plan.checking == "off":
        return msgspec.structs.replace(backend, ready=True, state="unchecked")
    if before is None:
        return backend
    state = "unknown" if before.state == "unchecked" else before.state
    return msgspec.structs.replace(
        backend, ready=before.ready, state=state, reason=before.reason, since=before.since
    )


def _judged(backends: Iterable[Backend], changes: dict[BackendKey, HealthChange]) -> list[Backend]:
    return [
        b
        if (change := changes.get(key_of(b))) is None
        else msgspec.structs.replace(
            b, state=change.state, ready=change.ready, reason=change.reason, since=change.since
        )
        for b in backends
    ]


def _of_member(obj: Member, plan: Plan) -> Iterator[Backend]:
    for family in plan.families:
        address = obj.address(family, plan.network)
        if address:
            yield Backend(
                kind=obj.kind,
                namespace=obj.namespace,
                name=obj.name,
                uid=obj.uid,
                address=address,
                node=obj.node,
                ready=False,
                state="unknown",
            )


def _of_explicit(balancer: Balancer) -> Iterator[Backend]:
    for item in balancer.plan.explicit:
        family = "IPv6" if ":" in item.address else "IPv4"
        if family in balancer.plan.families:
            yield Backend(
                kind="Address",
                namespace=balancer.owner.namespace,
                name=item.name,
                uid=f"address:{item.name}",
                address=item.address,
                port=item.port,
                ready=False,
                state="unknown",
            )


def _wanted(balancer: objects.LoadBalancer) -> bool:
    """Whether we answer for its backends: a cluster's are its own, a deleting one needs none."""
    return balancer.metadata.deletion_timestamp is None and balancer.spec.workload_type in (
        "",
        "vm",
    )
