"""The commands that show load balancers and pools, from the last events of the log."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from schema import events, names, objects, subjects
from schema.subjects import ObjectRef
from services.cli import printing, reading
from services.cli.reading import Entry
from services.kit.bus import Bus

OUR_CLASSES = (names.POOL_CLASS, names.NRP_CLASS)


class Balancer(msgspec.Struct, kw_only=True, omit_defaults=False):
    """What is known of one owner of an address, from the last event of each subject."""

    kind: str
    namespace: str
    name: str
    uid: str
    revision: int = 0  # of the image that `backends` and `healthy` are of
    address: str = ""
    pool: str = ""
    backends: int | None = None
    healthy: int | None = None
    ready: bool = False
    reason: str = ""
    message: str = ""
    conditions: list[objects.Condition] = []
    dummy: str = ""
    provider: str = ""


# --- load balancers ---


async def balancers(bus: Bus) -> list[Balancer]:
    """Every LoadBalancer, and every Service of our classes, in order of namespace and name."""
    found: dict[ObjectRef, Balancer] = {}
    for plural in ("loadbalancers", "services"):
        for entry in await reading.last(bus, "KUBE", f"kube.{plural}.>"):
            if (one := _from_fact(entry.event)) is not None:
                found[ObjectRef(plural, one.namespace, one.name)] = one
    for branch in ("lb.lease", "lb.backends", "lb.health", "lb.provider"):
        for entry in await reading.last(bus, "LB", f"{branch}.>"):
            ref = subjects.subject_ref(entry.subject)
            if ref is not None and ref in found:
                _add_decision(found[ref], entry)
    return [found[ref] for ref in sorted(found)]


def _from_fact(event: events.AnyEvent) -> Balancer | None:
    match event:
        case events.LoadBalancerSeen(object=lb):
            status = lb.status or objects.LoadBalancerStatus()
            allocated = status.allocated_address or objects.AllocatedAddress()
            one = Balancer(
                kind="LoadBalancer",
                namespace=lb.metadata.namespace,
                name=lb.metadata.name,
                uid=lb.metadata.uid,
                address=status.address or allocated.ip,
                pool=allocated.ip_pool,
                conditions=status.conditions or [],
            )
        case events.ServiceSeen(object=service) if _ours(service):
            status_ = service.status or objects.ServiceStatus()
            ingress = (status_.load_balancer or objects.LoadBalancerIngress()).ingress or []
            one = Balancer(
                kind="Service",
                namespace=service.metadata.namespace,
                name=service.metadata.name,
                uid=service.metadata.uid,
                address=", ".join(entry.ip or entry.hostname for entry in ingress),
                conditions=status_.conditions or [],
            )
            one.ready = bool(one.address)
        case _:
            return None
    for condition in one.conditions:
        if condition.type == "Ready":
            one.ready = condition.status == "True"
            one.reason, one.message = condition.reason, condition.message
    return one


def _ours(service: objects.Service) -> bool:
    spec = service.spec
    return spec.type == "LoadBalancer" and spec.load_balancer_class in OUR_CLASSES


def _add_decision(one: Balancer, entry: Entry) -> None:
    owner = getattr(entry.event, "owner", None)
    if owner is None or owner.uid != one.uid:
        return  # about an object that had the name before
    match entry.event:
        case events.LeaseGranted() | events.LeaseAdopted() as lease:
            one.pool = one.pool or lease.pool
        case events.LeaseRefused() as refused:
            one.pool = one.pool or refused.pool
            if not one.ready:
                one.reason, one.message = refused.reason, refused.message
        case events.BackendsResolved() as resolved:
            one.backends = len(resolved.backends)
            one.healthy = sum(backend.ready for backend in resolved.backends)
            one.dummy, one.revision = resolved.dummy, resolved.revision
        case events.HealthChanged() as changed if changed.revision > one.revision:
            one.healthy, one.dummy = changed.healthy, changed.dummy
        case events.ProviderStateChanged() as state:
            one.provider = "in step" if state.in_step else state.reason
            one.backends = state.backends
            one.healthy = state.backends
            if not state.in_step:
                one.reason, one.message = state.reason, state.message
        case _:
            pass


def lb_list(namespace: str, as_json: bool) -> int:
    found = reading.run(balancers)
    found = [one for one in found if not namespace or one.namespace == namespace]
    if as_json:
        printing.emit_json([_short(one) for one in found])
        return 0
    if not found:
        print("no load balancer is known")
    printing.table(
        ["NAME", "ADDRESS", "POOL", "HEALTHY", "READY", "REASON"],
        [
            [label(one), one.address, one.pool, _health(one), one.ready, _reason(one)]
            for one in found
        ],
    )
    return 0


def lb_show(name: str, as_json: bool) -> int:
    ref = reading.owner_ref(name)
    kind = {"loadbalancers": "LoadBalancer", "services": "Service"}[ref.plural]

    async def find(bus: Bus) -> tuple[Balancer | None, list[events.Backend]]:
        for one in await balancers(bus):
            if (one.kind, one.namespace, one.name) == (kind, ref.namespace, ref.name):
                return one, await current_backends(bus, ref)
        return None, []

    one, backends = reading.run(find)
    if one is None:
        return printing.fail(f"no {kind} {ref.namespace}/{ref.name} is known")
    if as_json:
        printing.emit_json({**_short(one), "conditions": one.conditions, "backends": backends})
        return 0
    printing.table(
        ["FIELD", "VALUE"],
        [
            ["name", label(one)],
            ["address", one.address],
            ["pool", one.pool],
            ["healthy", _health(one)],
            ["dummy", one.dummy],
            ["provider", one.provider],
            ["ready", f"{'yes' if one.ready else 'no'} {_reason(one)}".strip()],
        ],
    )
    if one.conditions:
        print("\nconditions")
        printing.table(
            ["TYPE", "STATUS", "SINCE", "REASON"],
            [
                [c.type, c.status, c.last_transition_time, f"{c.reason} {c.message}".strip()]
                for c in one.conditions
            ],
            indent="  ",
        )
    if backends:
        print("\nbackends")
        printing.table(
            ["NAME", "ADDRESS", "READY", "STATE", "SINCE", "REASON"],
            [[b.name, b.address, b.ready, b.state, _time(b.since), _error(b)] for b in backends],
            indent="  ",
        )
    return 0


async def current_backends(bus: Bus, ref: ObjectRef) -> list[events.Backend]:
    """The last complete image with the changes since, as the applier folds them."""
    patterns = [subjects.object_subject(branch, ref) for branch in ("lb.backends", "lb.health")]
    image: dict[tuple[str, str], events.Backend] = {}
    for entry in await reading.history(bus, "LB", patterns):
        match entry.event:
            case events.BackendsResolved() as resolved:
                image = {(b.uid, b.address): b for b in resolved.backends}
            case events.HealthChanged() as changed:
                for change in changed.changes:
                    key = (change.uid, change.address)
                    if key in image:
                        image[key] = image[key].after(change)
            case _:
                pass
    return list(image.values())


def _time(at: datetime | None) -> str:
    """As conditions say it."""
    return f"{at:%Y-%m-%dT%H:%M:%SZ}" if at is not None else ""


def _error(backend: events.Backend) -> str:
    """What is wrong with a backend; of one that has recovered, what was."""
    if backend.reason or not backend.last_error:
        return backend.reason
    return f"was: {backend.last_error}"


def _short(one: Balancer) -> dict[str, Any]:
    plain = msgspec.to_builtins(one)
    for name in ("conditions", "uid", "revision"):
        del plain[name]
    return dict(plain)


def label(one: Balancer) -> str:
    prefix = "services/" if one.kind == "Service" else ""
    return f"{prefix}{one.namespace}/{one.name}"


def _health(one: Balancer) -> str:
    if one.backends is None:
        return "-"
    return f"{one.healthy}/{one.backends}"


def _reason(one: Balancer) -> str:
    if one.ready:
        return one.provider
    return ": ".join(part for part in (one.reason, one.message) if part)


# --- pools ---


async def pools(bus: Bus) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for entry in await reading.last(bus, "KUBE", "kube.ippools.>"):
        if isinstance(entry.event, events.IPPoolSeen):
            pool = entry.event.object
            found[pool.metadata.name] = {
                "name": pool.metadata.name,
                "ranges": [_range(item) for item in pool.spec.ranges or []],
                "priority": pool.spec.selector.priority if pool.spec.selector else 0,
            }
    for entry in await reading.last(bus, "LB", "lb.lease.ippools.>"):
        event = entry.event
        if isinstance(event, events.PoolAccounted) and event.pool in found:
            found[event.pool] |= {
                "total": event.total,
                "available": event.available,
                "waiting": event.waiting,
                "ready": event.ready,
                "reason": event.reason,
                "message": event.message,
            }
    return [found[name] for name in sorted(found)]


def pool_list(as_json: bool) -> int:
    found = reading.run(pools)
    if as_json:
        printing.emit_json(found)
        return 0
    if not found:
        print("no pool is known")
    printing.table(
        ["POOL", "TOTAL", "FREE", "WAITING", "READY", "RANGES"],
        [
            [
                pool["name"],
                pool.get("total"),
                pool.get("available"),
                pool.get("waiting"),
                pool.get("ready"),
                ", ".join(pool["ranges"])
                + (f" ({pool['message']})" if pool.get("message") else ""),
            ]
            for pool in found
        ],
    )
    return 0


def _range(item: objects.PoolRange) -> str:
    if item.range_start or item.range_end:
        return f"{item.range_start or item.subnet}-{item.range_end or item.subnet}"
    return item.subnet
