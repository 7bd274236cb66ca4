"""Images of load balancers: what facts and verdicts make of the one before.

Pure. The image is the last BackendsResolved of a load balancer with every HealthChanged since
folded in. A backend that stays keeps its verdict, whatever else changes; a new one is not ready
while checks are on. In each family where no backend is ready the dummy stands in, as part of the
same event.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from schema import objects
from schema.events import Backend, BackendsResolved, HealthChange, HealthChanged, Owner
from services.prober.members import KINDS, PODS, VMIS, Member
from services.prober.plan import Plan

BALANCERS: Final = "loadbalancers"
NO_POD: Final = (
    "spec.backendPodSelector matches no pod with an address among those that are watched (of pods"
    " the watcher follows only those with the label of egress gateways, unless watcher.all_pods is"
    " set)"
)
MOST_BYTES: Final = 900_000  # of the backends in one event; NATS carries 1 MiB unless it is told so
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
    carried = [_carry(b, known.get(key_of(b)), plan) for b in listed]
    backends = _fitting(carried)
    dummy, dummy6 = stand_ins(backends, plan.families, dummies)
    remarks = [plan.message] if plan.message else []
    if plan.pods and not any(backend.kind == KINDS[PODS] for backend in backends):
        remarks.append(NO_POD)
    if len(backends) < len(carried):
        remarks.append(
            f"only the first {len(backends)} of {len(carried)} backends are used: more do not fit"
            " into one event"
        )
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
        message="; ".join(remarks),
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


def _fitting(backends: list[Backend]) -> list[Backend]:
    """As many as one event carries: of thousands without the texts of their errors, of more only
    the first. How many must not depend on how they are."""
    room = MOST_BYTES - sum(map(_bytes, backends))
    if room >= sum(len(b.reason) + len(b.last_error) for b in backends):
        return backends
    fit = len(backends)
    while room < 0:
        fit -= 1
        room += _bytes(backends[fit])
    return [msgspec.structs.replace(b, reason="", last_error="") for b in backends[:fit]]


def _bytes(backend: Backend) -> int:
    """Of its JSON at most, without errors."""
    b = backend
    names = len(b.kind) + len(b.namespace) + len(b.name) + len(b.uid) + len(b.node)
    return 200 + names + len(b.address)


def _carry(backend: Backend, before: Backend | None, plan: Plan) -> Backend:
    """Give a backend the verdict that it has, or the one that it starts with."""
    if plan.checking == "off":
        return msgspec.structs.replace(backend, ready=True, state="unchecked")
    if before is None:
        return backend
    state = "unknown" if before.state == "unchecked" else before.state
    return msgspec.structs.replace(
        backend,
        ready=before.ready,
        state=state,
        reason=before.reason,
        since=before.since,
        last_error=before.last_error,
    )


def _judged(backends: Iterable[Backend], changes: dict[BackendKey, HealthChange]) -> list[Backend]:
    return [b if (change := changes.get(key_of(b))) is None else b.after(change) for b in backends]


def of_member(obj: Member, plan: Plan) -> Iterator[Backend]:
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


def of_explicit(balancer: Balancer) -> Iterator[Backend]:
    for item in balancer.plan.explicit:
        yield Backend(
            kind="Address",
            namespace=balancer.owner.namespace,
            name=item.name,
            # At another port it is another backend: no verdict may carry over.
            uid=f"address:{item.name}:{item.port}" if item.port else f"address:{item.name}",
            address=item.address,
            port=item.port,
            ready=False,
            state="unknown",
        )
