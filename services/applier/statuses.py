"""Statuses as they ought to be, and the smallest patch from what the object shows.

A patch holds only what differs. Fields that we never set are no difference, and conditions of other
writers are sent back as they are. The resourceVersion that the comparison was made on goes along,
so a patch that was thought out on an older object is refused instead of applied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from schema import objects
from services.applier import conditions
from services.applier.documents import Bookings, Mark, OwnerDoc, PoolDoc
from services.applier.shapes import Body

OUR_TYPES: Final = frozenset(
    {
        conditions.READY,
        conditions.ALLOCATED,
        conditions.PUBLISHED,
        conditions.RESOLVED,
        conditions.HEALTHY,
        conditions.SYNCED,
        conditions.LISTED,
    }
)
INT64: Final = (1 << 63) - 1
MAX_SERVERS: Final = 10_000  # of status.backendServers, by the CRD


class Form(NamedTuple):
    """What the API server makes of a kind's status."""

    subresource: bool = True
    pruned: frozenset[str] = frozenset()  # fields of ours that its schema does not keep


class Patch(NamedTuple):
    """`status` is empty when nothing differs. `soft`: nothing but observedGeneration does."""

    status: Body
    soft: bool = False


# --- LoadBalancer ---


def load_balancer(doc: OwnerDoc, address: str, *, cluster: bool, entries: int) -> Body:
    """The wanted status, conditions aside; None stands for a field that is to be absent."""
    wanted: Body = {"allocatedAddress": _allocated(doc)}
    if not cluster:
        wanted["address"] = address or None
        backends = doc.backends.backends if doc.backends else []
        wanted["backendServers"] = [b.address for b in backends[:MAX_SERVERS]] or None
        wanted["backends"] = [
            _backend(backend, checked=bool(doc.backends and doc.backends.checked))
            for backend in backends[:entries]
        ] or None
    return wanted


def _allocated(doc: OwnerDoc) -> Body | None:
    if doc.delegated:
        return {"ipPool": "", "ip": doc.delegated, "mask": "", "gateway": ""}
    leases = doc.addresses()
    if not leases:
        return None
    first = leases[0]
    return {
        "ipPool": first.pool,
        "ip": first.address,
        "mask": first.mask,
        "gateway": first.gateway,
    }


def _backend(backend: Any, *, checked: bool) -> Body:
    sent: Body = {
        "name": backend.name,
        "address": backend.address,
        "ready": backend.ready,
        "state": backend.state,
    }
    if backend.reason and backend.state != "healthy":
        sent["message"] = backend.reason[: conditions.MESSAGE_LIMIT]
    if checked and backend.since is not None:
        sent["since"] = conditions.stamp(backend.since)
    if checked and backend.last_error and backend.state != "unhealthy":
        sent["lastError"] = backend.last_error[: conditions.MESSAGE_LIMIT]
    return sent


def load_balancer_patch(
    wanted: Body, marks: Mapping[str, Mark], known: objects.LoadBalancer, form: Form
) -> Patch:
    shown = known.status or objects.LoadBalancerStatus()
    current: Body = {
        "allocatedAddress": _shown_allocated(shown.allocated_address),
        "address": shown.address or None,
        "backendServers": shown.backend_servers or None,
        "backends": [_shown_backend(backend) for backend in shown.backends or []] or None,
    }
    status = {
        field: value
        for field, value in wanted.items()
        if value != current[field] and field not in form.pruned
    }
    return _with_conditions(
        status, marks, shown.conditions or [], known.metadata.generation, form, update_time=True
    )


def _shown_allocated(shown: objects.AllocatedAddress | None) -> Body | None:
    if shown is None or shown == objects.AllocatedAddress():
        return None
    return {
        "ipPool": shown.ip_pool,
        "ip": shown.ip,
        "mask": shown.mask,
        "gateway": shown.gateway,
    }


def _shown_backend(shown: objects.BackendStatus) -> Body:
    sent = {
        "name": shown.name,
        "address": shown.address,
        "ready": shown.ready,
        "state": shown.state,
        "message": shown.message,
        "since": shown.since,
        "lastError": shown.last_error,
    }
    return {key: value for key, value in sent.items() if value != ""}


# --- Service ---


def ingress_ips(known: objects.Service) -> list[str]:
    balancer = known.status.load_balancer if known.status else None
    entries = balancer.ingress if balancer else None
    return [entry.ip for entry in entries or [] if entry.ip]


def ingress_patch(wanted: list[str], known: objects.Service) -> Body:
    """`status.loadBalancer` with the wanted addresses, empty when they are what is shown.

    Entries with a host name only are another writer's. What that writer added to an address that
    stays (ipMode, ports) is sent back with it.
    """
    shown = ingress_ips(known)
    if sorted(shown) == sorted(wanted):
        return {}
    balancer = known.status.load_balancer if known.status else None
    entries = (balancer.ingress if balancer else None) or []
    by_ip = {entry.ip: entry for entry in entries if entry.ip}
    sent: list[Any] = [
        msgspec.to_builtins(by_ip[address]) if address in by_ip else {"ip": address}
        for address in wanted
    ]
    sent += [msgspec.to_builtins(entry) for entry in entries if not entry.ip]
    return {"loadBalancer": {"ingress": sent or None}}


def service_patch(
    wanted: list[str] | None, marks: Mapping[str, Mark], known: objects.Service
) -> Patch:
    """Ingress (None: not ours to write) and conditions of a Service that asked for an address."""
    status = ingress_patch(wanted, known) if wanted is not None else {}
    shown = (known.status.conditions if known.status else None) or []
    return _with_conditions(
        status, marks, shown, known.metadata.generation, Form(), update_time=False
    )


# --- IPPool ---


def pool(doc: PoolDoc, book: Bookings, holder: Callable[[str], str], limit: int) -> Body:
    """The wanted status, conditions aside. A map with more than `limit` entries is left out."""
    allocated: Body = {}
    if len(book.live) <= limit:
        allocated = {address: holder(uids[0]) for address, uids in book.live.items()}
    return {
        "total": _int64(doc.total),
        "available": _int64(doc.available),
        "lastAllocated": doc.last_allocated,
        "allocated": allocated,
        "allocatedHistory": dict(list(book.history.items())[-limit:]) if limit else {},
    }


def pool_patch(wanted: Body, marks: Mapping[str, Mark], known: objects.IPPool, form: Form) -> Patch:
    shown = known.status or objects.IPPoolStatus()
    blank = known.status is None
    status: Body = {}
    for field, value in (
        ("total", shown.total),
        ("available", shown.available),
        ("lastAllocated", shown.last_allocated),
    ):
        if wanted[field] != value or blank:  # Harvester's schema requires all three
            status[field] = wanted[field]
    for field, held in (
        ("allocated", shown.allocated or {}),
        ("allocatedHistory", shown.allocated_history or {}),
    ):
        changes: Body = {ip: who for ip, who in wanted[field].items() if held.get(ip) != who}
        changes |= {ip: None for ip in held if ip not in wanted[field]}
        if changes:
            status[field] = changes
    if status:
        status |= {field: wanted[field] for field in ("total", "available", "lastAllocated")}
    return _with_conditions(
        status, marks, shown.conditions or [], known.metadata.generation, form, update_time=True
    )


def _int64(count: int) -> int:
    return max(0, min(count, INT64))


# --- conditions ---


def _with_conditions(
    status: Body,
    marks: Mapping[str, Mark],
    shown: Iterable[objects.Condition],
    generation: int,
    form: Form,
    *,
    update_time: bool,
) -> Patch:
    """Add the list of conditions to a patch where any of ours is not as wanted."""
    by_type = {condition.type: condition for condition in shown}
    stale = [type_ for type_ in by_type if _ours(type_) and type_ not in marks]
    hard = bool(stale) or any(
        _differs(mark, by_type.get(type_), update_time) for type_, mark in marks.items()
    )
    observed = 0 if "observedGeneration" in form.pruned else generation
    # Without a status subresource each status write raises the generation: never a reason there.
    soft = (
        form.subresource
        and observed != 0
        and any(
            by_type[type_].observed_generation != observed for type_ in marks if type_ in by_type
        )
    )
    if hard or soft:
        others = [msgspec.to_builtins(c) for t, c in by_type.items() if not _ours(t)]
        ours = [
            conditions.body(type_, mark, observed, update_time=update_time)
            for type_, mark in marks.items()
        ]
        status["conditions"] = [*ours, *others] or None
    return Patch(status, soft=soft and not hard and len(status) == 1)


def _ours(type_: str) -> bool:
    return type_ in OUR_TYPES or type_.startswith("lbledger.io/")


def _differs(mark: Mark, shown: objects.Condition | None, update_time: bool) -> bool:
    if shown is None:
        return True
    return (mark.status, mark.reason, mark.message, mark.since) != (
        shown.status,
        shown.reason,
        shown.message,
        shown.last_transition_time,
    ) or (update_time and mark.updated != shown.last_update_time)


def kept(sent: Body, answer: objects.LoadBalancer | objects.IPPool) -> bool:
    """Whether the answer shows the status that was sent: a kind with a status subresource ignores
    one in the main resource, without a word."""
    status = answer.status
    shown = {c.type: (c.status, c.reason) for c in (status.conditions if status else None) or []}
    for condition in sent.get("conditions") or []:
        if shown.get(condition["type"]) != (condition["status"], condition.get("reason", "")):
            return False
    if isinstance(status, objects.IPPoolStatus) and "available" in sent:
        return bool((status.total, status.available) == (sent["total"], sent["available"]))
    if isinstance(status, objects.LoadBalancerStatus) and "backendServers" in sent:
        return bool((status.backend_servers or None) == sent["backendServers"])
    return status is not None


def lost(sent: Body, known: objects.LoadBalancer | objects.IPPool) -> Collection[str]:
    """Fields that were sent and that the answer does not hold: the schema there prunes them."""
    status = known.status
    found: list[str] = []
    if status is None:
        return found
    if (
        isinstance(status, objects.LoadBalancerStatus)
        and sent.get("backends")
        and not status.backends
    ):
        found.append("backends")
    ours = {c["type"] for c in sent.get("conditions") or [] if c.get("observedGeneration")}
    if ours and not any(c.observed_generation for c in status.conditions or [] if c.type in ours):
        found.append("observedGeneration")
    return found
