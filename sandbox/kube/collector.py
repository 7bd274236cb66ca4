"""What goes when its owner goes: garbage collection and the end of namespaces.

Runs behind the writes as the controllers of a real cluster do: an object whose owners are all
gone is deleted (also when they were gone before it came), a foreground deletion waits for its
dependents, an orphaning one releases them, and a terminating namespace is emptied before it
disappears; so is a kind before its definition does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any

from sandbox.kube.deletes import CLEANUP, FOREGROUND, ORPHAN, Deleter
from sandbox.kube.errors import ApiError
from sandbox.kube.lifecycle import is_done
from sandbox.kube.resources import Object, Registry, Resource
from sandbox.kube.schema import copy
from sandbox.kube.store import Change, Key, Store
from sandbox.kube.writes import Writer

Place = tuple[str, Key]
_DEFINITIONS = "customresourcedefinitions.apiextensions.k8s.io"


class Collector:
    def __init__(self, registry: Registry, store: Store, writer: Writer, deleter: Deleter) -> None:
        self._registry = registry
        self._store = store
        self._writer = writer
        self._deleter = deleter
        self._uids: dict[str, Place] = {}
        self._dependents: dict[str, set[Place]] = {}
        # Bounded by the number of objects: a place is queued once at a time.
        self._queue: deque[Place] = deque()
        self._queued: set[Place] = set()
        self._work = asyncio.Event()
        store.observers.append(self.note)

    def note(self, collection: str, change: Change) -> None:
        """Keep the index of owners, and look at whoever a change may concern."""
        place = (collection, change.key)
        metadata = change.now.obj["metadata"]
        for owner in _owners(change.before.obj) if change.before else ():
            self._dependents.get(owner["uid"], set()).discard(place)
        if change.type == "DELETED":
            self._uids.pop(metadata["uid"], None)
            for dependent in self._dependents.pop(metadata["uid"], ()):
                self._look_at(dependent)
            for owner in _owners(change.now.obj):
                if (above := self._uids.get(owner["uid"])) is not None:
                    self._look_at(above)
            if metadata.get("namespace"):
                self._look_at(("namespaces", ("", metadata["namespace"])))
            # A collection of custom objects is called like its definition.
            self._look_at((_DEFINITIONS, ("", collection)))
            return
        self._uids[metadata["uid"]] = place
        for owner in _owners(change.now.obj):
            self._dependents.setdefault(owner["uid"], set()).add(place)
        if metadata.get("ownerReferences") or metadata.get("deletionTimestamp"):
            self._look_at(place)

    def _look_at(self, place: Place) -> None:
        if place not in self._queued:
            self._queued.add(place)
            self._queue.append(place)
            self._work.set()

    async def run(self) -> None:
        """Work until cancelled, a few objects at a time so that requests are not held up."""
        while True:
            await self._work.wait()
            for _ in range(min(len(self._queue), 20)):
                place = self._queue.popleft()
                self._queued.discard(place)
                with contextlib.suppress(ApiError):
                    self._settle(*place)  # what is refused has changed, and is queued again
            if not self._queue:
                self._work.clear()
            await asyncio.sleep(0)

    def _settle(self, collection: str, key: Key) -> None:
        found = self._store.get(collection, key)
        resource = self._registry.by_collection(collection)
        if found is None or resource is None:
            return
        metadata = found.obj["metadata"]
        if metadata.get("deletionTimestamp"):
            finalizers = metadata.get("finalizers") or []
            if FOREGROUND in finalizers:
                self._foreground(resource, key, found.obj)
            elif ORPHAN in finalizers:
                self._orphan(resource, key, found.obj)
            elif CLEANUP in finalizers:
                self._clean(resource, key)
            elif resource.kind == "Namespace":
                self._empty(key, found.obj)
            return
        owners = _owners(found.obj)
        if owners:
            self._check_owners(resource, key, found.obj, owners)

    def _check_owners(
        self, resource: Resource, key: Key, obj: Object, owners: list[Object]
    ) -> None:
        there = [owner for owner in owners if self._is_there(owner, key[0])]
        if not there:
            self._delete(resource, key, "Background")
        elif len(there) < len(owners):
            self._set_owners(resource, key, obj, there)

    def _is_there(self, owner: Object, namespace: str) -> bool:
        """Whether an owner exists: in the namespace of its dependent, or in none."""
        place = self._uids.get(owner["uid"])
        return place is not None and place[1][0] in ("", namespace)

    def _foreground(self, resource: Resource, key: Key, obj: Object) -> None:
        blocking = False
        for collection, below in sorted(self._dependents.get(obj["metadata"]["uid"], ())):
            found = self._store.get(collection, below)
            kind = self._registry.by_collection(collection)
            if found is None or kind is None:
                continue
            blocking |= any(
                owner["uid"] == obj["metadata"]["uid"] and owner.get("blockOwnerDeletion")
                for owner in _owners(found.obj)
            )
            if not found.obj["metadata"].get("deletionTimestamp"):
                self._delete(kind, below, "Foreground")
        if not blocking:
            self._drop_finalizer(resource, key, FOREGROUND)

    def _orphan(self, resource: Resource, key: Key, obj: Object) -> None:
        uid = obj["metadata"]["uid"]
        for collection, below in sorted(self._dependents.get(uid, ())):
            found = self._store.get(collection, below)
            kind = self._registry.by_collection(collection)
            if found is not None and kind is not None:
                others = [owner for owner in _owners(found.obj) if owner["uid"] != uid]
                self._set_owners(kind, below, found.obj, others)
        self._drop_finalizer(resource, key, ORPHAN)

    def _clean(self, resource: Resource, key: Key) -> None:
        """The end of a definition: first the objects of its kind go."""
        kind = self._registry.by_collection(key[1])
        objects = self._store.collection(key[1]).in_order(None)
        for below, stored in objects:
            if kind is not None and not stored.obj["metadata"].get("deletionTimestamp"):
                self._delete(kind, below, "Background")
        if not objects:
            self._drop_finalizer(resource, key, CLEANUP)

    def _empty(self, key: Key, obj: Object) -> None:
        name = key[1]
        left = False
        for resource in self._registry.all():
            if not (resource.namespaced and resource.stored):
                continue
            for below, stored in self._store.collection(resource.collection).in_order(name):
                left = True
                if not stored.obj["metadata"].get("deletionTimestamp"):
                    self._delete(resource, below, "Background")
        if left:
            # What went at once has queued this namespace again.
            return
        spaces = self._registry.find("", "v1", "namespaces")
        assert spaces is not None
        emptied = copy(obj)
        emptied["spec"] = {}
        if is_done(emptied):
            self._writer.forget(spaces, key)

    def _delete(self, resource: Resource, key: Key, policy: str) -> None:
        options = {"propagationPolicy": policy}
        self._deleter.delete(resource, key[0], key[1], options, dry_run=False)

    def _set_owners(self, resource: Resource, key: Key, obj: Object, owners: list[Object]) -> None:
        kept = copy(obj)
        kept["metadata"].pop("ownerReferences", None)
        if owners:
            kept["metadata"]["ownerReferences"] = owners
        self._writer.replace_unchecked(resource, key, kept)

    def _drop_finalizer(self, resource: Resource, key: Key, name: str) -> None:
        found = self._store.get(resource.collection, key)
        if found is None:
            return
        obj = copy(found.obj)
        left = [item for item in obj["metadata"]["finalizers"] if item != name]
        obj["metadata"]["finalizers"] = left
        if not left:
            del obj["metadata"]["finalizers"]
        if is_done(obj):
            self._writer.forget(resource, key)
        else:
            self._writer.replace_unchecked(resource, key, obj)


def _owners(obj: Any) -> list[Object]:
    owners: list[Object] = obj["metadata"].get("ownerReferences") or []
    return owners
