"""What to write next for one owner or pool: the difference between wanted and known.

Level-triggered and pure: the same state gives the same plan, whatever events led to it. A plan is
empty when the cluster shows everything. Order: the slice (with its dummy) stands before an
announcer hears of the address; the load balancer's own status comes last and waits, for a moment,
for the echoes of the other writes, so that one write tells the whole story.

Nothing is planned before every kind has been listed completely, for an owner that nobody has
decided about, or for an object of our name that is not ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from schema import events, names, objects
from schema.subjects import ObjectRef
from services.applier import conditions, shapes, statuses
from services.applier.conditions import Part, Problem
from services.applier.core import Key, State, Target, repair_delay
from services.applier.documents import Bookings, Mark, OwnerDoc, PoolDoc
from services.applier.shapes import Body

LB_API: Final = shapes.LB_API
RETRY_INVALID_S: Final = 600.0
SAID_BY_TARGET: Final = {
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
        self.pending = False  # some part is not as wanted, whether or not it can be written now
        self.problems: list[Problem] = []

    def wake(self, at: datetime) -> None:
        if self.wake_at is None or at < self.wake_at:
            self.wake_at = at

    def add(self, write: Write) -> None:
        """Plan a write, for now or for when its time comes."""
        self.pending = True
        target = self.state.target(write.key)
        achieved = target.applied == write.digest
        self._say(write, target)
        due = _due(target, write.digest, achieved, self.now)
        if due > self.now:
            self.wake(due)
        else:
            self.writes.append(msgspec.structs.replace(write, repair=achieved))

    def contested(self, key: Key) -> None:
        """Tell of somebody who keeps undoing what we write."""
        target = self.state.targets.get(key)
        if target is None or not target.contested(self.now):
            return
        about, thing = SAID_BY_TARGET[key.plural]
        text = f"another controller keeps changing the {thing} {key.name}"
        self.problems.append(Problem(about, "Conflict", text))
        self.wake(target.calm_at(self.now))

    def _say(self, write: Write, target: Target) -> None:
        """Tell of a write that can't be made."""
        about, thing = SAID_BY_TARGET.get(write.key.plural, ("", ""))
        if not about or target.digest != write.digest or target.reason in ("", "Conflict"):
            return
        if target.attempts > 1 or target.reason in ("Invalid", "Forbidden"):
            doing = "create" if write.creates else "update"
            text = f"fail to {doing} {thing}, error: {target.message}"
            self.problems.append(Problem(about, target.reason, text))


def plan(state: State, entity: str, now: datetime) -> Plan:
    """What to write now for an entity."""
    if entity.startswith("pool:"):
        name = entity.removeprefix("pool:")
        doc = state.pools.get(name)
        uid = doc.uid if doc else ""
        made = Plan(
            state, entity, events.Owner(plural="ippools", namespace="", name=name, uid=uid), now
        )
        if doc is not None and doc.accounted and state.ready():
            _pool(made, doc)
        return made
    owner_doc = state.owners.get(entity)
    if owner_doc is None:
        return Plan(state, entity, events.Owner(plural="", namespace="", name="", uid=""), now)
    made = Plan(state, entity, owner_doc.owner, now)
    if owner_doc.decided and state.ready():
        view = state.shown.get(owner_doc.owner.ref)
        if view is not None and view.metadata.uid == owner_doc.uid:
            if isinstance(view, objects.LoadBalancer):
                _load_balancer(made, owner_doc, view)
            elif isinstance(view, objects.Service):
                _service(made, owner_doc)
    return made


# --- LoadBalancer ---


def _load_balancer(made: Plan, doc: OwnerDoc, lb: objects.LoadBalancer) -> None:
    state = made.state
    if lb.metadata.deletion_timestamp is not None:
        return
    known = state.known(doc.owner.ref)
    if known is None:
        return  # the API server says that it is gone; the watcher will
    cluster = lb.spec.workload_type == "cluster"
    shown = None
    if not cluster and doc.backends is not None:
        _data_path(made, doc, lb)
        shown = state.shown.get(ObjectRef("services", doc.namespace, doc.name))
    published: list[str] = []
    if isinstance(shown, objects.Service) and shapes.standing(doc, shown) == "ours":
        published = statuses.ingress_ips(shown)
    parts = conditions.of_load_balancer(doc, published, made.problems, cluster=cluster)
    marks = _marks(made, doc.marks, parts, known.status)
    wanted = statuses.load_balancer(
        doc,
        published[0] if published else "",
        cluster=cluster,
        entries=state.options.backend_entries,
    )
    form = state.forms["loadbalancers"]
    patch = statuses.load_balancer_patch(wanted, marks, known, form)
    if not patch.status:
        state.holds.pop(made.entity, None)
        return
    if _held(made, doc, patch, new=not (known.status and known.status.conditions)):
        return
    made.add(_status_write(made, doc, known, patch.status, wanted, marks))


def _data_path(made: Plan, doc: OwnerDoc, lb: objects.LoadBalancer) -> None:
    """Slices, Service and, where nobody else announces, the ingress."""
    state = made.state
    ref = ObjectRef("services", doc.namespace, doc.name)
    service = state.known(ref)
    addresses = shapes.wanted_addresses(doc)
    if service is None and not addresses:
        return
    if service is not None and not _ours(made, doc, service, conditions.PUBLISHED):
        return
    made.contested(Key(*ref))
    made.contested(Key(*ref, "status"))
    sliced = _slices(made, doc, lb)
    announcing = state.options.announcing
    wanted = shapes.service(lb, doc, announcing)
    digest = _digest(wanted)
    if service is None:
        if sliced or announcing.ours:
            made.add(_service_write(made, doc, wanted, digest, creates=True))
        return
    if shapes.service_differs(wanted, service):
        made.add(_service_write(made, doc, wanted, digest, uid=service.metadata.uid))
    else:
        foreign = shapes.foreign_parts(wanted, service)
        if foreign:
            made.add(_service_write(made, doc, foreign, digest, verb="json"))
    if announcing.ours:
        _announce(made, doc, service, addresses, sliced)


def _announce(
    made: Plan, doc: OwnerDoc, service: objects.Service, addresses: list[str], sliced: bool
) -> None:
    """Publish the addresses in the Service's status; withdraw at once what is not ours any more."""
    wanted = [address for address in addresses if address != shapes.BY_DHCP]
    if not sliced or made.pending:
        shown = statuses.ingress_ips(service)
        wanted = [address for address in wanted if address in shown]
    status = statuses.ingress_patch(wanted, service)
    if status:
        made.add(_ingress_write(made, doc.owner, service, status, _digest(wanted)))


def _slices(made: Plan, doc: OwnerDoc, lb: objects.LoadBalancer) -> bool:
    """Returns whether every slice stands as wanted."""
    state = made.state
    standing = True
    names_wanted = set()
    for wanted in shapes.slices(lb, doc):
        name = wanted["metadata"]["name"]
        names_wanted.add(name)
        known = state.known(ObjectRef("endpointslices", doc.namespace, name))
        key = Key("endpointslices", doc.namespace, name)
        made.contested(key)
        if known is not None and not _ours(made, doc, known, conditions.RESOLVED):
            standing = False
        elif known is None or shapes.slice_differs(wanted, known):
            standing = False
            uid = known.metadata.uid if known is not None else ""
            made.add(_apply(made, key, doc.owner, "EndpointSlice", wanted, uid))
    for ref in state.slices_of(doc.uid):
        if ref.name not in names_wanted:
            _drop(made, doc, ref)
    return standing


def _drop(made: Plan, doc: OwnerDoc, ref: ObjectRef) -> None:
    """Delete a slice of ours that is not wanted any more."""
    known = made.state.known(ref)
    if known is None or known.metadata.deletion_timestamp is not None:
        return
    uid = known.metadata.uid
    made.add(
        Write(
            key=Key(*ref),
            entity=made.entity,
            owner=doc.owner,
            target="EndpointSlice",
            verb="delete",
            body=None,
            digest=f"delete {uid}",
            uid=uid,
        )
    )


def _ours(made: Plan, doc: OwnerDoc, known: Any, about: str) -> bool:
    """Whether an object of our name may be written; says so where it may not."""
    standing = shapes.standing(doc, known)
    kind = type(known).__name__
    if standing == "foreign":
        text = (
            f"{kind} {doc.namespace}/{known.metadata.name} exists and does not belong to this "
            "load balancer; rename one of them"
        )
        made.problems.append(Problem(about, "NameConflict", text))
        return False
    if standing == "former" or known.metadata.deletion_timestamp is not None:
        text = f"the former {kind} {doc.namespace}/{known.metadata.name} is being removed"
        made.problems.append(Problem(about, "WaitingForRemoval", text))
        return False
    return True


def _held(made: Plan, doc: OwnerDoc, patch: statuses.Patch, *, new: bool) -> bool:
    """Whether to wait with the status: for echoes a moment, for a first word on backends longer.

    A load balancer that already tells something is never told to be unknown because the prober's
    word has not been read yet.
    """
    state = made.state
    since = state.holds.setdefault(made.entity, made.now)
    options = state.options
    unresolved = doc.plural == "loadbalancers" and doc.backends is None
    lb = state.shown.get(doc.owner.ref)
    cluster = isinstance(lb, objects.LoadBalancer) and lb.spec.workload_type == "cluster"
    if unresolved and not cluster:
        if not new:
            return True
        limit = options.undecided_s
    elif patch.soft or (made.pending and not made.problems) or _echoes(made, doc):
        limit = options.echo_s
    else:
        return False
    until = since + timedelta(seconds=limit)
    if made.now >= until:
        return False
    made.wake(until)
    return True


def _echoes(made: Plan, doc: OwnerDoc) -> bool:
    """Whether the watcher has yet to show a write of ours to the Service."""
    if doc.plural != "loadbalancers":
        return False
    return made.state.awaited(ObjectRef("services", doc.namespace, doc.name))


# --- Service that asked for an address ---


def _service(made: Plan, doc: OwnerDoc) -> None:
    state = made.state
    known = state.known(doc.owner.ref)
    if known is None or known.metadata.uid != doc.uid:
        return
    shown = state.shown.get(doc.owner.ref)
    asks = known.spec.type == "LoadBalancer" and known.spec.load_balancer_class in (
        "",
        names.POOL_CLASS,
        names.NRP_CLASS,
    )
    if doc.provider is not None:
        _finalizer(made, doc, known, doc.provider.finalizer)
    if known.metadata.deletion_timestamp is not None:
        return
    announcing = state.options.announcing
    ours = doc.provider is not None or announcing.ours
    addresses = doc.provider.addresses if doc.provider else shapes.wanted_addresses(doc)
    if not ours:
        _annotate(made, doc, known, announcing.annotations(addresses) if asks else {})
    if not asks:
        _withdraw(made, doc, known, ours=ours)
        return
    published = statuses.ingress_ips(shown) if isinstance(shown, objects.Service) else []
    made.contested(Key(*doc.owner.ref, "status"))
    told = addresses if ours else published
    parts = conditions.of_service(doc, told, made.problems)
    marks = _marks(made, doc.marks, parts, known.status)
    patch = statuses.service_patch(addresses if ours else None, marks, known)
    if not patch.status or (patch.soft and _held(made, doc, patch, new=False)):
        if not patch.status:
            state.holds.pop(made.entity, None)
        return
    made.add(_status_write(made, doc, known, patch.status, addresses, marks))


def _withdraw(made: Plan, doc: OwnerDoc, known: objects.Service, *, ours: bool) -> None:
    """The Service does not ask any more: take back what we had written into its status."""
    patch = statuses.service_patch([] if ours and doc.noticed else None, {}, known)
    if patch.status:
        made.add(_ingress_write(made, doc.owner, known, patch.status, _digest(["withdrawn"])))


def _finalizer(made: Plan, doc: OwnerDoc, known: objects.Service, stands: bool) -> None:
    held = known.metadata.finalizers or []
    if stands == (names.NRP_FINALIZER in held):
        return
    if stands and known.metadata.deletion_timestamp is not None:
        return  # nothing can be added any more
    finalizers = [f for f in held if f != names.NRP_FINALIZER]
    if stands:
        finalizers.append(names.NRP_FINALIZER)
    body = _patch_body(known, {"finalizers": finalizers or None})
    _merge(made, doc, "finalizers", "Service/finalizers", body, [stands])


def _annotate(made: Plan, doc: OwnerDoc, known: objects.Service, wanted: dict[str, str]) -> None:
    """Tell the announcer, by annotation, which address a user's Service has."""
    notes = known.metadata.annotations or {}
    keys = {key for keys in shapes.ANNOUNCER_KEYS.values() for key in keys}
    changes: dict[str, str | None] = {
        key: value for key, value in wanted.items() if notes.get(key) != value
    }
    held = [lease.address for lease in doc.leases]
    changes |= {key: None for key in keys & notes.keys() - wanted.keys() if not held or doc.noticed}
    if changes:
        body = _patch_body(known, {"annotations": changes})
        _merge(made, doc, "", "Service", body, [wanted])


# --- IPPool ---


def _pool(made: Plan, doc: PoolDoc) -> None:
    state = made.state
    ref = ObjectRef("ippools", "", doc.name)
    known = state.known(ref)
    if not isinstance(known, objects.IPPool) or (doc.uid and known.metadata.uid != doc.uid):
        return
    if known.metadata.deletion_timestamp is not None:
        return
    last = state.target(Key(*ref, "status")).written_at
    due = last + timedelta(seconds=state.options.pool_status_s) if last else made.now
    if due > made.now:
        made.wake(due)
        return
    limit = state.options.pool_map_entries
    book = state.books.get(doc.name) or Bookings()
    parts = conditions.of_pool(doc, len(book.live), limit)
    marks = _marks(made, doc.marks, parts, known.status)
    wanted = statuses.pool(doc, book, limit)
    patch = statuses.pool_patch(wanted, marks, known, state.forms["ippools"])
    if patch.status:
        made.add(_status_write(made, doc, known, patch.status, wanted, marks))


# --- writes ---


def _marks(
    made: Plan,
    marks: Mapping[str, Mark],
    parts: list[Part],
    status: Any,
) -> dict[str, Mark]:
    shown = (status.conditions if status is not None else None) or []
    return conditions.marked(parts, marks, shown, made.now)


def _apply(made: Plan, key: Key, owner: events.Owner, target: str, body: Body, uid: str) -> Write:
    """A server-side apply. With the uid it can't bring back what was deleted meanwhile."""
    if uid:
        body = {**body, "metadata": {**body["metadata"], "uid": uid}}
    digest = _digest({**body, "metadata": {**body["metadata"], "uid": ""}})
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


def _service_write(
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


def _ingress_write(
    made: Plan, owner: events.Owner, known: objects.Service, status: Body, digest: str
) -> Write:
    return Write(
        key=Key("services", known.metadata.namespace, known.metadata.name, "status"),
        entity=made.entity,
        owner=owner,
        target="Service/status",
        verb="merge",
        body=_patch_body(known, {}, status),
        digest=digest,
        subresource="status",
    )


def _merge(
    made: Plan, doc: OwnerDoc, part: str, target: str, body: Body, wanted: list[Any]
) -> None:
    made.add(
        Write(
            key=Key("services", doc.namespace, doc.name, part),
            entity=made.entity,
            owner=doc.owner,
            target=target,
            verb="merge",
            body=body,
            digest=_digest(wanted),
        )
    )


def _status_write(
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
        body=_patch_body(known, {}, status),
        digest=_digest([wanted, said]),  # without times: a later try is the same write
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
    told = _digest([known.metadata.uid, ready.status, ready.reason, ready.since, ready.updated])
    return Notice(
        kind=kind,
        api_version="v1" if kind == "Service" else LB_API,
        namespace=known.metadata.namespace,
        name=known.metadata.name,
        uid=known.metadata.uid,
        warning=ready.status == "False" and not ready.reason.startswith("Waiting"),
        reason=ready.reason,
        message=ready.message or f"the {kind} is ready",
        # Its name follows from what it says: telling it again is no new Event.
        event_name=f"{known.metadata.name[:200].rstrip('.-')}.{told}",
    )


def _patch_body(known: Any, metadata: Body, status: Body | None = None) -> Body:
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


def _digest(wanted: object) -> str:
    encoded = msgspec.json.encode(wanted, order="sorted")
    return hashlib.blake2b(encoded, digest_size=12).hexdigest()
