"""One write: the request, and what its answer means.

Every refusal has one meaning. 409: the object is not what we thought, so it is read again and the
plan made anew. 404: it is gone, which is fine for a status. 422 and 403: wait long and say so,
until the content changes. 429: wait as long as the server says. The rest: try again, ever more
slowly.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import structlog

from schema import names, objects
from services.applier import statuses, views
from services.applier.plans import RETRY_INVALID_S, Notice, Write
from services.applier.targets import ABSENT, Absent, Key, Outcome, View
from services.kit.kube import (
    JSON_PATCH,
    MERGE,
    AlreadyExists,
    BadRequest,
    Conflict,
    Forbidden,
    Invalid,
    Kube,
    KubeError,
    NotFound,
    Resource,
    TooManyRequests,
    UnsupportedMediaType,
)

log = structlog.get_logger()
GROUP: Final = "loadbalancer.harvesterhci.io"
RESOURCES: Final = {
    "loadbalancers": Resource(GROUP, "v1beta1", "loadbalancers"),
    "ippools": Resource(GROUP, "v1beta1", "ippools", namespaced=False),
    "services": Resource("", "v1", "services"),
    "endpointslices": Resource("discovery.k8s.io", "v1", "endpointslices"),
    "pods": Resource("", "v1", "pods"),
    "configmaps": Resource("", "v1", "configmaps"),
}
EVENTS: Final = Resource("events.k8s.io", "v1", "events")
BACKOFF_FIRST_S: Final = 0.1
BACKOFF_CAP_S: Final = 30.0
FORBIDDEN_CAP_S: Final = 60.0
# No object has it: an apply with this version creates, and is a conflict where the name is taken.
NO_VERSION: Final = "1"


class Result(NamedTuple):
    outcome: Outcome
    version: str = ""
    rediscover: bool = False  # the kind seems to have another form than we think
    pause: float = 0.0  # the server asks everybody to wait


class Refused(NamedTuple):
    """What a KubeError means for a write."""

    outcome: str
    reason: str
    retry_in: float


async def perform(kube: Kube, write: Write, attempts: int) -> Result:
    """Make the request; never raises for what a server or a network may do."""
    try:
        body = await _request(kube, write)
    except KubeError as error:
        return await _refused(kube, write, error, attempts)
    seen = views.decode(write.key.plural, body)
    if write.verb == "delete":
        return Result(_outcome(write, "deleted", seen=ABSENT))
    sent = write.body.get("status", {}) if write.verb == "merge" else {}
    if isinstance(seen, objects.LoadBalancer | objects.IPPool) and sent:
        return _status_answer(write, sent, seen)
    version = seen.metadata.resource_version if seen is not None else ""
    return Result(_outcome(write, "written", seen=seen), version)


def _status_answer(
    write: Write, sent: dict[str, Any], seen: objects.LoadBalancer | objects.IPPool
) -> Result:
    """A status is written when the answer shows it: a kind without the subresource ignores a write
    there, and one with it ignores a status in the main resource."""
    if not statuses.kept(sent, seen):
        failed = _outcome(
            write,
            "failed",
            seen=seen,
            reason="StatusNotKept",
            message="the API server did not keep the status",
            retry_in=_delay(3),
        )
        return Result(failed, seen.metadata.resource_version, rediscover=True)
    lost = tuple(statuses.lost(sent, seen))
    if lost:
        log.info("status.fields_pruned", kind=write.key.plural, fields=lost)
    done = _outcome(write, "written", seen=seen, pruned=lost)
    return Result(done, seen.metadata.resource_version)


async def _request(kube: Kube, write: Write) -> bytes:
    key = write.key
    path = RESOURCES[key.plural].path(key.namespace, key.name)
    manager = names.FIELD_MANAGER
    if write.verb == "delete":
        return await kube.delete(path, uid=write.uid)
    if write.verb == "create":
        collection = RESOURCES[key.plural].path(key.namespace)
        return await kube.create(collection, write.body, field_manager=manager)
    if write.verb == "apply":
        if not write.creates:
            return await kube.apply(path, write.body, field_manager=manager)
        return await _create(kube, write, path)
    content = JSON_PATCH if write.verb == "json" else MERGE
    return await kube.patch(
        path, write.body, content, field_manager=manager, subresource=write.subresource
    )


async def _create(kube: Kube, write: Write, path: str) -> bytes:
    """Server-side apply that makes the object, and never takes over one that is there."""
    guarded = {**write.body["metadata"], "resourceVersion": NO_VERSION}
    body = {**write.body, "metadata": guarded}
    try:
        return await kube.apply(path, body, field_manager=names.FIELD_MANAGER)
    except (Invalid, BadRequest, Conflict) as error:
        # Told by the object itself: a server that takes no version on a create says so in its
        # own words.
        if not isinstance(await _read(kube, write.key), Absent) or "ersion" not in error.message:
            raise
    return await kube.apply(path, write.body, field_manager=names.FIELD_MANAGER)


async def _refused(kube: Kube, write: Write, error: KubeError, attempts: int) -> Result:
    refused = _meaning(write, error, attempts)
    seen: View | Absent | None = None
    rediscover = False
    if refused.outcome in ("conflict", "gone"):
        seen = await _read(kube, write.key)
        if refused.outcome == "gone" and not isinstance(seen, Absent | None):
            # It is there, and its status is not: the kind has no such subresource (any more).
            rediscover = True
            refused = Refused("failed", "NotFound", _delay(attempts))
        elif isinstance(seen, Absent) and write.verb == "delete":
            refused = Refused("deleted", "", 0.0)
    outcome = _outcome(
        write,
        refused.outcome,
        seen=seen,
        reason=refused.reason,
        message=error.message,
        retry_in=refused.retry_in,
    )
    pause = refused.retry_in if isinstance(error, TooManyRequests) else 0.0
    return Result(outcome, rediscover=rediscover, pause=pause)


def _meaning(write: Write, error: KubeError, attempts: int) -> Refused:
    # At once the first time: the object was only newer. Then with growing pauses.
    soon = 0.0 if attempts == 0 else _delay(attempts)
    match error:
        case Conflict() | AlreadyExists():
            return Refused("conflict", "Conflict", soon)
        case NotFound() if write.creates:
            return Refused("failed", "NotFound", _delay(attempts))  # the namespace is gone
        case NotFound():
            return Refused("gone", "NotFound", soon)
        case Invalid() if write.verb == "json" or "metadata.uid" in error.message:
            return Refused("conflict", "Conflict", soon)
        case Invalid() | BadRequest() | UnsupportedMediaType():
            return Refused("failed", "Invalid", RETRY_INVALID_S)
        case TooManyRequests():
            wait = error.retry_after if error.retry_after is not None else _delay(attempts)
            return Refused("failed", "Throttled", wait)
        case Forbidden():
            return Refused("failed", "Forbidden", _delay(attempts, FORBIDDEN_CAP_S))
        case _:
            wait = error.retry_after if error.retry_after is not None else _delay(attempts)
            return Refused("failed", "Unavailable", wait)


async def _read(kube: Kube, key: Key) -> View | Absent | None:
    """The object as it is now; None when it can't be told."""
    try:
        body = await kube.get(RESOURCES[key.plural].path(key.namespace, key.name))
    except NotFound:
        return ABSENT
    except KubeError:
        return None
    seen: View | None = views.decode(key.plural, body)
    return seen


def _outcome(
    write: Write,
    outcome: str,
    *,
    seen: View | Absent | None = None,
    reason: str = "",
    message: str = "",
    retry_in: float = 0.0,
    pruned: tuple[str, ...] = (),
) -> Outcome:
    return Outcome(
        key=write.key,
        entity=write.entity,
        digest=write.digest,
        at=datetime.now(UTC),
        outcome=outcome,
        seen=seen,
        reason=reason,
        message=message,
        retry_in=retry_in,
        repair=write.repair,
        marks=write.marks,
        noticed=write.noticed,
        pruned=pruned,
    )


def _delay(attempts: int, cap: float = BACKOFF_CAP_S) -> float:
    return min(cap, BACKOFF_FIRST_S * 2.0 ** min(attempts, 16)) * random.uniform(0.5, 1.0)


# --- Kubernetes Events ---


async def post(kube: Kube, notice: Notice, instance: str, at: datetime) -> None:
    """Post a notice. Its name follows from what it says, so saying it again changes nothing."""
    namespace = notice.namespace or "default"
    body = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": notice.event_name, "namespace": namespace},
        "eventTime": at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": "lbledger.io/applier",
        "reportingInstance": instance,
        "action": "Reconcile",
        "type": "Warning" if notice.warning else "Normal",
        "reason": notice.reason[:128],
        "note": notice.message[:1024],
        "regarding": {
            "apiVersion": notice.api_version,
            "kind": notice.kind,
            "namespace": notice.namespace,
            "name": notice.name,
            "uid": notice.uid,
        },
    }
    try:
        await kube.create(EVENTS.path(namespace), body, field_manager=names.FIELD_MANAGER)
    except AlreadyExists:
        return
    except KubeError as error:
        log.info("notice.dropped", name=notice.name, reason=notice.reason, why=str(error))
