"""What a person is told: Ready and its parts, each with a reason for programs and a sentence.

The sentences of `Ready` are Harvester's, because its UI and its guest clusters show and search
them. A condition keeps the time of its last change of status; its text may change without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

from schema import objects
from services.applier.documents import Backends, Mark, OwnerDoc, PoolDoc, Provider
from services.applier.shapes import BY_DHCP

READY: Final = "Ready"
ALLOCATED: Final = "AddressAllocated"
PUBLISHED: Final = "AddressPublished"
RESOLVED: Final = "BackendsResolved"
HEALTHY: Final = "BackendsHealthy"
SYNCED: Final = "ProviderSynced"
LISTED: Final = "AllocationsListed"

WAIT_ADDRESS: Final = "service is waiting for external IP"
NO_BACKEND: Final = "no running backend servers"
NO_ADDRESS: Final = "running backend servers have no IP"
MESSAGE_LIMIT: Final = 1024


class Part(NamedTuple):
    type: str
    status: str  # True | False | Unknown
    reason: str
    message: str = ""


class Problem(NamedTuple):
    """Why a write can't be made; `about` is the condition that it belongs to."""

    about: str
    reason: str
    message: str


def of_load_balancer(
    doc: OwnerDoc,
    published: Iterable[str],
    problems: Iterable[Problem],
    *,
    cluster: bool,
) -> list[Part]:
    """Conditions of a load balancer; `published` are the addresses that its Service shows."""
    allocated = _allocated(doc)
    if cluster:
        return [_ready([allocated]), allocated]
    by_part = {problem.about: problem for problem in problems}
    address = _published(doc, list(published), by_part.get(PUBLISHED))
    resolved = _resolved(doc.backends, by_part.get(RESOLVED))
    healthy = _healthy(doc.backends)
    # What can't be written is the cause of what is missing, so Ready names it first.
    blocked = [part for part in (address, resolved) if part.type in by_part]
    ready = _ready([allocated, *blocked, address, resolved, healthy])
    return [ready, allocated, address, resolved, healthy]


def of_service(doc: OwnerDoc, published: Iterable[str], problems: Iterable[Problem]) -> list[Part]:
    """Conditions of a Service that asked for an address, by the names that a Service may carry."""
    by_part = {problem.about: problem for problem in problems}
    if doc.provider is not None:
        return _of_provider(doc.provider, by_part.get(PUBLISHED))
    parts = [_allocated(doc)]
    if PUBLISHED in by_part or doc.leases:
        parts.append(_published(doc, list(published), by_part.get(PUBLISHED)))
    return _named([_ready(parts), *parts])


def _of_provider(provider: Provider, problem: Problem | None) -> list[Part]:
    """A Service whose address and front end are the provider's. One that is served stays Ready
    while the provider catches up with a change."""
    reason = provider.reason or ("InStep" if provider.in_step else "Pending")
    synced = Part(SYNCED, "True" if provider.in_step else "False", reason, provider.message)
    if problem is not None:
        published = Part(PUBLISHED, "False", problem.reason, problem.message)
    elif provider.addresses:
        published = Part(PUBLISHED, "True", "Published", ", ".join(provider.addresses))
    else:
        published = Part(PUBLISHED, "False", "WaitingForProvider", WAIT_ADDRESS)
    told = [published] if provider.addresses else [synced, published]
    return _named([_ready(told), synced, published])


def _named(parts: list[Part]) -> list[Part]:
    return [part._replace(type=f"lbledger.io/{part.type}") for part in parts]


def of_pool(doc: PoolDoc, entries: int, limit: int) -> list[Part]:
    """Conditions of a pool with so many entries in its maps."""
    status = "True" if doc.ready else "False"
    parts = [Part(READY, status, doc.reason, doc.message)]
    if entries > limit:
        message = (
            f"{entries} allocations are more than the {limit} that are listed here; "
            "the ledger has them all"
        )
        parts.append(Part(LISTED, "False", "TooMany", message))
    return parts


def _ready(parts: list[Part]) -> Part:
    for part in parts:
        if part.status != "True":
            status = "False" if part.status == "False" else "Unknown"
            return Part(READY, status, part.reason, part.message)
    return Part(READY, "True", READY)


def _allocated(doc: OwnerDoc) -> Part:
    if doc.delegated:
        return Part(ALLOCATED, "True", "Delegated", "the announcer obtains the address by DHCP")
    leases, refusal = doc.addresses(), doc.refusal
    if leases:
        text = ", ".join(f"{lease.address} of pool {lease.pool}" for lease in leases)
        if refusal is not None:
            return Part(ALLOCATED, "True", refusal.reason, f"keeps {text}: {refusal.message}")
        return Part(ALLOCATED, "True", "Allocated", text)
    if refusal is not None:
        return Part(ALLOCATED, "False", refusal.reason, refusal.message)
    return Part(ALLOCATED, "False", "Released", "the address was taken back")


def _published(doc: OwnerDoc, published: list[str], problem: Problem | None) -> Part:
    if problem is not None:
        return Part(PUBLISHED, "False", problem.reason, problem.message)
    wanted = [lease.address for lease in doc.addresses()]
    if doc.delegated:
        obtained = [address for address in published if address not in ("", BY_DHCP)]
        if obtained:
            return Part(PUBLISHED, "True", "Published", ", ".join(obtained))
        return Part(PUBLISHED, "False", "WaitingForAddress", WAIT_ADDRESS)
    if wanted and all(address in published for address in wanted):
        return Part(PUBLISHED, "True", "Published", ", ".join(wanted))
    if not wanted:
        return Part(PUBLISHED, "False", "NoAddress", WAIT_ADDRESS)
    return Part(PUBLISHED, "False", "WaitingForAddress", WAIT_ADDRESS)


def _resolved(image: Backends | None, problem: Problem | None) -> Part:
    if problem is not None:
        return Part(RESOLVED, "False", problem.reason, problem.message)
    if image is None:
        message = "the backends have not been looked at yet"
        return Part(RESOLVED, "Unknown", "WaitingForProber", message)
    if image.reason:
        return Part(RESOLVED, "False", image.reason, image.message)
    if not image.matched:
        text = f"{NO_BACKEND}; {image.message}" if image.message else NO_BACKEND
        return Part(RESOLVED, "False", "NoBackendMatched", text)
    if not image.backends:
        return Part(RESOLVED, "False", "NoBackendAddress", NO_ADDRESS)
    text = f"{image.matched} matched, {len(image.backends)} with an address"
    return Part(RESOLVED, "True", "Resolved", f"{text}; {image.message}" if image.message else text)


def _healthy(image: Backends | None) -> Part:
    if image is None or not image.backends:
        return Part(HEALTHY, "False", "NoBackends", "there is no backend to send traffic to")
    ready, total = image.ready, len(image.backends)
    text = f"{ready} of {total} healthy"
    if not ready:
        message = f"running backend servers are not probed as healthy total:{total}, healthy:0"
        if image.held:
            return Part(HEALTHY, "False", "ChecksHeld", f"{message}; {image.held}")
        return Part(HEALTHY, "False", "NotHealthy", message)
    if image.held:
        return Part(HEALTHY, "True", "ChecksHeld", image.held)
    if not image.checked:
        return Part(HEALTHY, "True", "NotChecked", f"{total} in use, checks are off")
    return Part(HEALTHY, "True", "Healthy", text)


# --- times ---


def stamp(now: datetime) -> str:
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")


def marked(
    parts: Iterable[Part],
    marks: Mapping[str, Mark],
    shown: Iterable[objects.Condition],
    now: datetime,
) -> dict[str, Mark]:
    """The parts with their times: kept while the status stays, from `marks` or, where this
    condition was never stated by us, from what the object shows."""
    by_type = {condition.type: condition for condition in shown}
    at = stamp(now)
    made: dict[str, Mark] = {}
    for part in parts:
        message = part.message[:MESSAGE_LIMIT]
        old = marks.get(part.type) or _mark_of(by_type.get(part.type))
        same = old is not None and old.status == part.status
        text_same = old is not None and same and (old.message, old.reason) == (message, part.reason)
        made[part.type] = Mark(
            part.status,
            part.reason,
            message,
            since=old.since if old is not None and same and old.since else at,
            updated=old.updated if old is not None and text_same and old.updated else at,
        )
    return made


def _mark_of(condition: objects.Condition | None) -> Mark | None:
    if condition is None:
        return None
    return Mark(
        condition.status,
        condition.reason,
        condition.message,
        condition.last_transition_time or condition.last_update_time,
        condition.last_update_time,
    )


def body(type_: str, mark: Mark, generation: int, *, update_time: bool) -> dict[str, Any]:
    """One condition as it is sent."""
    sent: dict[str, Any] = {
        "type": type_,
        "status": mark.status,
        "reason": mark.reason,
        "message": mark.message,
        "lastTransitionTime": mark.since,
    }
    if generation:
        sent["observedGeneration"] = generation
    if update_time:
        sent["lastUpdateTime"] = mark.updated
    return sent
