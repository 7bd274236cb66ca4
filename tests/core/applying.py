"""A pure world around the applier's core: an API server in a dict, a watcher that may lag, a clock.

`Api` does what a real one does with the requests that the applier makes: server-side apply by
fields, merge patches that are refused on an older version, versions that grow with every change,
a 409 for an apply that must create. `World` lets the test decide when facts arrive and plans run.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from schema import events, names, objects
from schema.subjects import ObjectRef
from services.applier import views
from services.applier.core import KINDS, State
from services.applier.planning import plan
from services.applier.plans import RETRY_INVALID_S, Plan, Write
from services.applier.statuses import lost
from services.applier.targets import ABSENT, Options, Outcome

T0 = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
DUMMY = "192.0.0.8"
LISTENERS = [{"name": "http", "port": 80, "protocol": "TCP", "backendPort": 8080}]


class Refused(Exception):
    """The model's API server refused: by status code."""

    def __init__(self, code: int) -> None:
        super().__init__(str(code))
        self.code = code


class Api:
    """Objects as plain data; `subresource` and `prunes` give the form of our kinds."""

    def __init__(self, *, subresource: bool = True, prunes: bool = False) -> None:
        self.objects: dict[ObjectRef, dict[str, Any]] = {}
        self.subresource, self.prunes = subresource, prunes
        self.version = 5  # so that versions of more digits come soon
        self.uids = itertools.count(1)
        self.events: list[tuple[ObjectRef, Any, Any, str]] = []
        self.writes: list[Write] = []
        self.fail: deque[int] = deque()  # codes for the next writes, 0 to let one pass

    def view(self, ref: ObjectRef) -> Any:
        found = self.objects.get(ref)
        if found is None:
            return None
        return views.decode(ref.plural, msgspec.json.encode(found))

    def put(self, ref: ObjectRef, new: dict[str, Any] | None) -> None:
        """Store a state of an object and tell the watcher."""
        old_view, old = self.view(ref), self.objects.get(ref)
        self.version += 1
        if new is None:
            del self.objects[ref]
            self.events.append((ref, old_view, None, old_view.metadata.uid))
            return
        meta = new["metadata"]
        if old is None:
            meta |= {"uid": f"uid-{next(self.uids)}", "generation": 1}
            meta |= {"name": ref.name, **({"namespace": ref.namespace} if ref.namespace else {})}
        elif _without(new, "metadata") != _without(old, "metadata"):
            whole = not self.subresource and ref.plural in ("loadbalancers", "ippools")
            if new.get("spec") != old.get("spec") or whole:
                meta["generation"] = old["metadata"]["generation"] + 1
        meta["resourceVersion"] = str(self.version)
        self.objects[ref] = new
        view = self.view(ref)
        if old_view is None or _bare(old_view) != _bare(view):
            self.events.append((ref, old_view, view, view.metadata.uid))

    def edit(self, ref: ObjectRef, **parts: Any) -> None:
        """A change by somebody else: parts are merged."""
        self._changed(ref, self.objects[ref], _merged(self.objects[ref], parts))

    def perform(self, write: Write, at: datetime) -> Outcome:
        self.writes.append(write)
        ref = write.key.ref
        try:
            code = self.fail.popleft() if self.fail else 0
            if code:
                raise Refused(code)
            self._request(write, ref)
        except Refused as refused:
            return self._refused(write, refused.code, at)
        seen = self.view(ref)
        sent = write.body.get("status", {}) if write.verb == "merge" else {}
        ours = ref.plural in ("loadbalancers", "ippools")
        return Outcome(
            key=write.key,
            entity=write.entity,
            digest=write.digest,
            at=at,
            outcome="deleted" if write.verb == "delete" else "written",
            seen=seen if seen is not None else ABSENT,
            repair=write.repair,
            marks=write.marks,
            noticed=write.noticed,
            pruned=tuple(lost(sent, seen)) if ours and sent else (),
        )

    def _refused(self, write: Write, code: int, at: datetime) -> Outcome:
        kinds = {409: "conflict", 404: "gone"}
        reasons = {422: "Invalid", 429: "Throttled", 403: "Forbidden", 409: "Conflict"}
        waits = {409: 0.0, 422: RETRY_INVALID_S, 429: 3.0}
        seen = self.view(write.key.ref) or ABSENT if code in kinds else None
        return Outcome(
            key=write.key,
            entity=write.entity,
            digest=write.digest,
            at=at,
            outcome=kinds.get(code, "failed"),
            seen=seen,
            reason=reasons.get(code, "Unavailable"),
            message=f"refused with {code}",
            retry_in=waits.get(code, 0.5),
        )

    def _request(self, write: Write, ref: ObjectRef) -> None:
        found = self.objects.get(ref)
        if write.verb == "delete":
            if found is not None and found["metadata"]["uid"] != write.uid:
                raise Refused(409)
            if found is not None:
                self.put(ref, None)
        elif write.verb == "apply":
            self._apply(write, ref, found)
        elif write.verb == "json":
            self._json(write, ref, found)
        elif write.verb == "create":
            if found is not None:
                raise Refused(409)
            self._changed(ref, None, copy.deepcopy(write.body))
        else:
            self._patch(write, ref, found)

    def _apply(self, write: Write, ref: ObjectRef, found: dict[str, Any] | None) -> None:
        body = copy.deepcopy(write.body)
        uid = body["metadata"].pop("uid", "")
        if write.creates:
            if found is not None:
                raise Refused(409)
            body.setdefault("status", {})
            self._changed(ref, None, body)
            return
        if found is None or found["metadata"]["uid"] != uid:
            raise Refused(409)
        new = copy.deepcopy(found)
        for part in ("endpoints", "ports", "addressType"):
            if part in body:
                new[part] = body[part]
        meta = new["metadata"]
        for part in ("labels", "annotations"):
            meta[part] = {**meta.get(part, {}), **body["metadata"].get(part, {})}
        references = {r["uid"]: r for r in meta.get("ownerReferences", [])}
        references |= {r["uid"]: r for r in body["metadata"]["ownerReferences"]}
        meta["ownerReferences"] = list(references.values())
        if "spec" in body:
            new["spec"] = {**new["spec"], **body["spec"]}
            kept = {(p["port"], p["protocol"]): p for p in found["spec"].get("ports", [])}
            owned = {(p["port"], p["protocol"]): p for p in body["spec"]["ports"]}
            foreign = [p for key, p in kept.items() if key not in owned and p.get("foreign")]
            new["spec"]["ports"] = [*owned.values(), *foreign]
        self._changed(ref, found, new)

    def _json(self, write: Write, ref: ObjectRef, found: dict[str, Any] | None) -> None:
        if found is None:
            raise Refused(404)
        new = copy.deepcopy(found)
        for step in write.body:
            if step["op"] == "test":
                if found["metadata"]["resourceVersion"] != step["value"]:
                    raise Refused(409)
                continue
            *way, last = step["path"].strip("/").split("/")
            place: Any = new
            for part in way:
                place = place[part]
            del place[int(last) if isinstance(place, list) else last]
        self._changed(ref, found, new)

    def _patch(self, write: Write, ref: ObjectRef, found: dict[str, Any] | None) -> None:
        if found is None:
            raise Refused(404)
        wanted = write.body["metadata"].get("resourceVersion", "")
        if wanted and wanted != found["metadata"]["resourceVersion"]:
            raise Refused(409)
        body = copy.deepcopy(write.body)
        body["metadata"].pop("resourceVersion", None)
        if body["metadata"].get("uid", found["metadata"]["uid"]) != found["metadata"]["uid"]:
            raise Refused(409)
        ours = ref.plural in ("loadbalancers", "ippools")
        if ours and "status" in body and (write.subresource == "status") != self.subresource:
            raise Refused(404)
        if ours and self.prunes and body.get("status", {}).get("conditions"):
            body["status"].pop("backends", None)
            for condition in body["status"]["conditions"]:
                condition.pop("observedGeneration", None)
        new = _merged(found, body)
        if new["metadata"].get("deletionTimestamp") and not new["metadata"].get("finalizers"):
            self.put(ref, None)
        else:
            self._changed(ref, found, new)

    def _changed(self, ref: ObjectRef, found: dict[str, Any] | None, new: dict[str, Any]) -> None:
        if found != new:
            self.put(ref, new)


class World:
    """The core between a model API server, a lagging watcher, and decisions."""

    def __init__(self, options: Options | None = None, **api: Any) -> None:
        self.api = Api(**api)
        self.state = State(options)
        self.state.synced = set(KINDS)
        for kind in ("loadbalancers", "ippools"):
            self.state.forms[kind] = self.state.forms[kind]._replace(
                subresource=self.api.subresource
            )
        self.now = T0
        self.delivered = 0
        self.later: dict[str, datetime] = {}
        self.leases = itertools.count(1)
        self.revisions: dict[str, int] = {}
        self.checks: list[Any] = []
        self.told: list[Any] = []

    # --- objects ---

    def create(self, plural: str, name: str, spec: dict[str, Any], **more: Any) -> events.Owner:
        namespace = "" if plural == "ippools" else "default"
        ref = ObjectRef(plural, namespace, name)
        self.api.put(ref, {"metadata": more.pop("metadata", {}), "spec": spec, **more})
        return self.owner(ref)

    def owner(self, ref: ObjectRef) -> events.Owner:
        return events.Owner(**ref._asdict(), uid=self.api.objects[ref]["metadata"]["uid"])

    def balancer(self, name: str = "web", **spec: Any) -> events.Owner:
        return self.create("loadbalancers", name, {"listeners": LISTENERS, **spec})

    def ticket(self, name: str = "svc", class_: str = names.POOL_CLASS) -> events.Owner:
        spec = {"type": "LoadBalancer", "loadBalancerClass": class_, "ports": [{"port": 80}]}
        return self.create("services", name, spec, status={})

    def service(self, name: str = "web") -> Any:
        return self.api.view(ObjectRef("services", "default", name))

    def slice(self, name: str = "web") -> Any:
        return self.api.view(ObjectRef("endpointslices", "default", name))

    def status(self, owner: events.Owner) -> Any:
        return self.api.view(owner.ref).status

    def condition(self, owner: events.Owner, type_: str = "Ready") -> Any:
        found = self.status(owner)
        for condition in (found.conditions if found else None) or []:
            if condition.type == type_:
                return condition
        return None

    # --- decisions ---

    def grant(self, owner: events.Owner, address: str, pool: str = "p1") -> str:
        lease = f"l{next(self.leases)}"
        self.state.decide(
            events.LeaseGranted(at=self.now, owner=owner, lease=lease, address=address, pool=pool)
        )
        return lease

    def release(self, owner: events.Owner, lease: str, address: str, pool: str = "p1") -> None:
        self.state.decide(
            events.LeaseReleased(
                at=self.now, owner=owner, lease=lease, address=address, pool=pool, reason="test"
            )
        )

    def refuse(self, owner: events.Owner, reason: str = "PoolExhausted", **more: Any) -> None:
        said = {"message": "no free address in pool p1: total 1, available 0"} | more
        self.state.decide(events.LeaseRefused(at=self.now, owner=owner, reason=reason, **said))

    def resolve(self, owner: events.Owner, *backends: events.Backend, **more: Any) -> Any:
        fields: dict[str, Any] = {
            "ports": [events.SlicePort(name="http", port=8080)],
            "matched": len(backends),
            "dummy": "" if any(b.ready for b in backends) else DUMMY,
        }
        event = events.BackendsResolved(
            at=self.now,
            owner=owner,
            revision=self.revision(owner),
            generation=1,
            backends=list(backends),
            **(fields | more),
        )
        self.state.decide(event)
        return event

    def verdict(
        self, owner: events.Owner, backend: events.Backend, ready: bool, **more: Any
    ) -> Any:
        change = events.HealthChange(
            uid=backend.uid,
            address=backend.address,
            state="healthy" if ready else "unhealthy",
            ready=ready,
            reason="" if ready else "connection refused",
            since=self.now,
        )
        fields: dict[str, Any] = {"dummy": "" if ready else DUMMY} | more
        event = events.HealthChanged(
            at=self.now,
            owner=owner,
            revision=self.revision(owner),
            changes=[change],
            healthy=int(ready),
            total=1,
            **fields,
        )
        self.state.decide(event)
        return event

    def revision(self, owner: events.Owner) -> int:
        self.revisions[owner.uid] = self.revisions.get(owner.uid, 0) + 1
        return self.revisions[owner.uid]

    # --- time ---

    def deliver(self, count: int | None = None) -> None:
        """Let the watcher show what happened, in order."""
        end = len(self.api.events) if count is None else self.delivered + count
        while self.delivered < min(end, len(self.api.events)):
            ref, _, new, uid = self.api.events[self.delivered]
            self.delivered += 1
            old = self.state.shown.get(ref)
            if new is not None and old is not None and old.metadata.uid != new.metadata.uid:
                self.state.observe(ref, old, None, old.metadata.uid)
                old = None
            self.state.observe(ref, old, new, uid)

    def relist(self) -> None:
        """The watcher missed what happened: it will show the difference, and never what came and
        went in between."""
        shown = _shown(self.api.events[: self.delivered])
        missed = {ref: new for ref, _, new, _ in self.api.events[self.delivered :]}
        del self.api.events[self.delivered :]
        for ref, new in missed.items():
            old = shown.get(ref)
            if new is not None or old is not None:
                self.api.events.append((ref, old, new, (new or old).metadata.uid))

    def step(self, entity: str) -> Plan:
        """Plan for one entity and make its writes, the last first: they go out together."""
        self.state.dirty.pop(entity, None)
        made = plan(self.state, entity, self.now)
        if made.notices:
            self.told += made.notices
            self.state.told(entity)
        for outcome in [self.api.perform(w, self.now) for w in reversed(made.writes)]:
            self.state.settle(outcome)
            for check in self.checks:
                check()
        if made.wake_at is not None:
            self.later[entity] = made.wake_at
        elif not made.writes and not made.pending:
            self.state.settled(entity)
        return made

    def run(self, *, show: bool = True, rounds: int = 200) -> list[Write]:
        """Until nothing is to be done now; returns the writes that were made."""
        first = len(self.api.writes)
        for _ in range(rounds):
            if show:
                self.deliver()
            if not self.state.dirty:
                return self.api.writes[first:]
            self.step(next(iter(self.state.dirty)))
        raise AssertionError(f"no end of writes: {self.api.writes[-6:]}")

    def wait(self, seconds: float) -> list[Write]:
        """Let time pass, with every timer on its way."""
        end, first = self.now + timedelta(seconds=seconds), len(self.api.writes)
        self.run()
        while due := [at for at in self.later.values() if at <= end]:
            self.now = max(self.now, min(due))
            for entity, at in list(self.later.items()):
                if at <= self.now:
                    del self.later[entity]
                    self.state.touch(entity)
            self.run()
        self.now = end
        return self.api.writes[first:]

    def restart(self) -> None:
        """A new process: documents as stored, the watcher's last word, nothing else."""
        old = self.state
        self.state = State(old.options)
        self.state.synced = set(old.synced)
        self.state.forms = dict(old.forms)
        for kept in ("owners", "pools", "books", "targets", "imports"):
            stored = msgspec.json.decode(msgspec.json.encode(list(getattr(old, kept).values())))
            cls = {
                "owners": "OwnerDoc",
                "pools": "PoolDoc",
                "books": "Bookings",
                "imports": "ImportDoc",
            }.get(kept)
            from services.applier import documents, targets

            kind = getattr(documents, cls) if cls else targets.Target
            getattr(self.state, kept).update(
                zip(getattr(old, kept), msgspec.convert(stored, list[kind]), strict=True)
            )
        for ref, view in _shown(self.api.events[: self.delivered]).items():
            self.state.observe(ref, None, view, view.metadata.uid)
        self.state.dirty.clear()
        self.later.clear()
        self.state.resume()


def backend(
    name: str = "vm1", address: str = "10.52.1.7", *, ready: bool = True, **more: Any
) -> Any:
    return events.Backend(
        namespace="default",
        name=name,
        uid=f"uid-{name}",
        address=address,
        ready=ready,
        **({"state": "unchecked" if ready else "unhealthy"} | more),
    )


def said(writes: list[Write]) -> list[str]:
    return sorted(write.target for write in writes)


def _shown(happened: list[Any]) -> dict[ObjectRef, Any]:
    shown: dict[ObjectRef, Any] = {}
    for ref, _, new, _ in happened:
        if new is None:
            shown.pop(ref, None)
        else:
            shown[ref] = new
    return shown


def _merged(old: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    made = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            made.pop(key, None)
        else:
            made[key] = _merged(made.get(key), value)
    return copy.deepcopy(made)


def _without(obj: dict[str, Any], part: str) -> dict[str, Any]:
    return {key: value for key, value in obj.items() if key != part}


def _bare(view: Any) -> Any:
    meta = msgspec.structs.replace(view.metadata, resource_version="", generation=0)
    return msgspec.structs.replace(view, metadata=meta)


__all__ = ["Api", "World", "backend", "objects", "said"]
