"""A plan: the writes that one entity needs now, and the words in which each is asked for.

Whatever is planned for an object that is known carries what it was thought out on (its uid or its
resourceVersion), so it is refused where the object is another by now. A write that failed rests; a
write that somebody keeps undoing is repeated ever more slowly, and a person is told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from schema import events, objects
from services.applier import conditions, shapes
from services.applier.conditions import Part, Problem
from services.applier.core import State
from services.applier.documents import Mark, OwnerDoc, PoolDoc, Said
from services.applier.folding import event_reason
from services.applier.shapes import Body
from services.applier.targets import Key, Target, repair_delay

RETRY_INVALID_S: Final = 600.0
# Reasons of what mostly passes by itself: no warning.
PASSING: Final = ("Waiting", "Pending", "Throttled", "Retrying")
# Whose condition speaks of a write that can't be made, and how it calls the object.
SAID_BY: Final = {
    "services": (conditions.PUBLISHED, "service"),
    "endpointslices": (conditions.RESOLVED, "endpointslice"),
}


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """A Kubernetes Event to be posted once the status it speaks of is written."""

    kind: str
    api_version: str
    namespace: str
    name: str
    uid: str
    warning: bool
    reason: str
    message: str
    event_name: str


class Write(msgspec.Struct, frozen=True, kw_only=True):
    """One request to the API server."""

    key: Key
    entity: str
    owner: events.Owner
    target: str  # as the Applied event names it
    verb: str  # apply | merge | json | delete
    body: Any
    digest: str
    subresource: str = ""
    uid: str = ""
    creates: bool = False
    repair: bool = False
    ready: bool | None = None
    reason: str = ""
    message: str = ""
    marks: dict[str, Mark] | None = None
    noticed: str = ""
    notice: Notice | None = None


class Plan:
    """What to write now, and when to look again."""

    def __init__(self, state: State, entity: str, owner: events.Owner, now: datetime) -> None:
        self.state, self.entity, self.owner, self.now = state, entity, owner, now
        self.writes: list[Write] = []
        self.wake_at: datetime | None = None
        self.notices: list[Notice] = []
        self.pending = False  # some part is not as wanted, whether or not it can be written now
        self.problems: list[Problem] = []

    def wake(self, at: datetime) -> None:
        if self.wake_at is None or at < self.wake_at:
            self.wake_at = at

    def add(self, write: Write) -> bool:
        """Plan a write, for now or for when its time comes; returns whether it is for now."""
        self.pending = True
        target = self.state.target(write.key)
        achieved = target.applied == write.digest
        self._say(write, target)
        due = _due(target, write.digest, achieved, self.now)
        if due > self.now:
            self.wake(due)
            return False
        self.writes.append(msgspec.structs.replace(write, repair=achieved))
        return True

    def contested(self, key: Key) -> None:
        """Tell of somebody who keeps undoing what we write."""
        target = self.state.targets.get(key)
        if target is None or not target.contested(self.now):
            return
        about, thing = SAID_BY[key.plural]
        text = f"another controller keeps changing the {thing} {key.name}"
        self.problems.append(Problem(about, "Conflict", text))
        self.wake(target.calm_at(self.now))

    def _say(self, write: Write, target: Target) -> None:
        """Tell of a write that can't be made."""
        about, thing = SAID_BY.get(write.key.plural, ("", ""))
        if not about or target.digest != write.digest or target.reason in ("", "Conflict"):
            return
        if target.attempts > 1 or target.reason in ("Invalid", "Forbidden"):
            doing = "create" if write.creates else "update"
            text = f"fail to {doing} {thing}, error: {target.message}"
            self.problems.append(Problem(about, target.reason, text))


def marks_of(
    made: Plan,
    marks: Mapping[str, Mark],
    parts: list[Part],
    status: Any,
) -> dict[str, Mark]:
    shown = (status.conditions if status is not None else None) or []
    return conditions.marked(parts, marks, shown, made.now)


def slice_write(
    made: Plan, key: Key, owner: events.Owner, target: str, body: Body, uid: str
) -> Write:
    """A server-side apply. With the uid it can't bring back what was deleted meanwhile."""
    if uid:
        body = {**body, "metadata": {**body["metadata"], "uid": uid}}
    digest = digest_of({**body, "metadata": {**body["metadata"], "uid": ""}})
    return Write(
        key=key,
        entity=made.entity,
        owner=owner,
        target=target,
        verb="apply",
        body=body,
        digest=digest,
        creates=not uid,
    )


def service_write(
    made: Plan,
    doc: OwnerDoc,
    body: Any,
    digest: str,
    *,
    uid: str = "",
    creates: bool = False,
    verb: str = "apply",
) -> Write:
    if uid:
        body = {**body, "metadata": {**body["metadata"], "uid": uid}}
    return Write(
        key=Key("services", doc.namespace, doc.name),
        entity=made.entity,
        owner=doc.owner,
        target="Service",
        verb=verb,
        body=body,
        digest=digest,
        creates=creates,
    )


def ingress_write(
    made: Plan, owner: events.Owner, known: objects.Service, status: Body, digest: str
) -> Write:
    return Write(
        key=Key("services", known.metadata.namespace, known.metadata.name, "status"),
        entity=made.entity,
        owner=owner,
        target="Service/status",
        verb="merge",
        body=patch_body(known, {}, status),
        digest=digest,
        subresource="status",
    )


def merge_write(
    made: Plan, doc: OwnerDoc, part: str, target: str, body: Body, wanted: list[Any]
) -> None:
    made.add(
        Write(
            key=Key(doc.plural, doc.namespace, doc.name, part),
            entity=made.entity,
            owner=doc.owner,
            target=target,
            verb="merge",
            body=body,
            digest=digest_of(wanted),
        )
    )


def status_write(
    made: Plan,
    doc: OwnerDoc | PoolDoc,
    known: Any,
    status: Body,
    wanted: object,
    marks: dict[str, Mark],
) -> Write:
    ref = made.owner.ref
    kind = type(known).__name__
    form = made.state.forms.get(ref.plural)
    ready = marks.get(conditions.READY) or marks[f"lbledger.io/{conditions.READY}"]
    said = {name: (mark.status, mark.reason, mark.message) for name, mark in marks.items()}
    mark = f"{ready.status} {ready.reason}"
    return Write(
        key=Key(*ref, "status"),
        entity=made.entity,
        owner=made.owner,
        target=f"{kind}/status",
        verb="merge",
        body=patch_body(known, {}, status),
        digest=digest_of([wanted, said]),  # without times: a later try is the same write
        subresource="status" if form is None or form.subresource else "",
        ready=ready.status == "True",
        reason=ready.reason,
        message=ready.message,
        marks=marks,
        noticed=mark,
        notice=_notice(known, ready) if mark != doc.noticed else None,
    )


def _notice(known: Any, ready: Mark) -> Notice:
    kind = type(known).__name__
    warning = ready.status == "False" and not ready.reason.startswith(PASSING)
    text = ready.message or f"the {kind} is ready"
    said = Said(event_reason(ready.reason), text, warning=warning)
    return notice_of(known, said, ready.since, ready.updated)


def notice_of(known: Any, said: Said, *more: str) -> Notice:
    """A Kubernetes Event about an object. Its name follows from what it says (and from `more`), so
    telling it again makes no new one."""
    kind, meta = type(known).__name__, known.metadata
    told = digest_of([meta.uid, said, more])
    return Notice(
        kind=kind,
        api_version=shapes.LB_API if kind in ("LoadBalancer", "IPPool") else "v1",
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
        warning=said.warning,
        reason=said.reason,
        message=said.message,
        event_name=f"{meta.name[:200].rstrip('.-')}.{told}",
    )


def patch_body(known: Any, metadata: Body, status: Body | None = None) -> Body:
    """A merge patch that is refused when the object is not the one it was thought out on."""
    version = known.metadata.resource_version
    body: Body = {"metadata": {**metadata, "resourceVersion": version} if version else metadata}
    if status is not None:
        body["status"] = status
    return body


def _due(target: Target, digest: str, achieved: bool, now: datetime) -> datetime:
    """When a write may be made: not while a failed one rests, and undoing ever more slowly."""
    if target.next_at is not None and target.digest == digest:
        return max(now, target.next_at)
    if achieved and target.repaired_at is not None and now < target.calm_at(now):
        return max(now, target.repaired_at + timedelta(seconds=repair_delay(target.repairs)))
    return now


def digest_of(wanted: object) -> str:
    encoded = msgspec.json.encode(wanted, order="sorted")
    return hashlib.blake2b(encoded, digest_size=12).hexdigest()
