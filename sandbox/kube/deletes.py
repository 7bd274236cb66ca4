"""Deleting: preconditions, finalizers, propagation, and the answer."""

from __future__ import annotations

from typing import Any

from sandbox.kube.errors import ApiError, conflict, invalid, not_found, unsupported
from sandbox.kube.options import now
from sandbox.kube.resources import Object, Resource
from sandbox.kube.schema import copy
from sandbox.kube.store import Store, Stored
from sandbox.kube.writes import Writer

FOREGROUND = "foregroundDeletion"
ORPHAN = "orphan"
#: Holds a CRD until the objects of its kind are gone.
CLEANUP = "customresourcecleanup.apiextensions.k8s.io"
_POLICIES = ("Foreground", "Background", "Orphan")


class Deleter:
    def __init__(self, store: Store, writer: Writer) -> None:
        self._store = store
        self._writer = writer

    def delete(
        self, resource: Resource, namespace: str, name: str, options: Object, *, dry_run: bool
    ) -> Object:
        """Delete one object; the answer is a Status, or the object where it stays for now."""
        policy = options.get("propagationPolicy")
        if policy not in (None, *_POLICIES):
            error = unsupported("propagationPolicy", policy, _POLICIES)
            raise invalid("DeleteOptions", "meta.k8s.io", "", [error])
        key = (namespace, name)
        found = self._store.get(resource.collection, key)
        if found is None:
            raise not_found(resource, name)
        _check_preconditions(resource, found, options.get("preconditions") or {})
        finalizers = _finalizers(found.obj, policy, options.get("orphanDependents"))
        if resource.plural == "customresourcedefinitions" and CLEANUP not in finalizers:
            finalizers.append(CLEANUP)
        held = bool(finalizers) or (
            resource.kind == "Namespace" and bool(found.obj["spec"].get("finalizers"))
        )
        if dry_run:
            return _answer(resource, found.obj, removed=not held)
        if not held:
            return _answer(resource, self._writer.forget(resource, key), removed=True)
        marked = self._marked(resource, found, finalizers)
        return _answer(resource, marked, removed=False)

    def _marked(self, resource: Resource, found: Stored, finalizers: list[str]) -> Object:
        obj = copy(found.obj)
        metadata = obj["metadata"]
        changed = (metadata.get("finalizers") or []) != finalizers
        if finalizers:
            metadata["finalizers"] = finalizers
        else:
            metadata.pop("finalizers", None)
        if not metadata.get("deletionTimestamp"):
            changed = True
            metadata |= {"deletionTimestamp": now(), "deletionGracePeriodSeconds": 0}
            if metadata.get("generation"):
                metadata["generation"] += 1
            if resource.kind == "Namespace":
                metadata.pop("deletionGracePeriodSeconds")
                obj["status"] = (obj.get("status") or {}) | {"phase": "Terminating"}
        if not changed:
            return found.obj
        key = (metadata.get("namespace", ""), metadata["name"])
        return self._writer.replace_unchecked(resource, key, obj).obj


def _check_preconditions(resource: Resource, found: Stored, wanted: Any) -> None:
    name = found.obj["metadata"]["name"]
    uid = found.obj["metadata"]["uid"]
    if wanted.get("uid") not in (None, uid):
        why = (
            f"the UID in the precondition ({wanted['uid']}) does not match the UID in record "
            f"({uid}). The object might have been deleted and then recreated"
        )
        raise conflict(resource, name, why, by_kind=True)
    if wanted.get("resourceVersion") not in (None, str(found.version)):
        why = (
            f"the ResourceVersion in the precondition ({wanted['resourceVersion']}) does not "
            f"match the ResourceVersion in record ({found.version}). The object might have been "
            "modified"
        )
        raise conflict(resource, name, why, by_kind=True)


def _finalizers(obj: Object, policy: str | None, orphan: bool | None) -> list[str]:
    """The finalizers that hold a deletion, with the one its propagation policy asks for."""
    have = list(obj["metadata"].get("finalizers") or [])
    if policy is None and orphan is not None:
        policy = "Orphan" if orphan else "Background"
    if policy is None:
        return have
    have = [name for name in have if name not in (FOREGROUND, ORPHAN)]
    if policy == "Foreground":
        have.append(FOREGROUND)
    elif policy == "Orphan":
        have.append(ORPHAN)
    return have


def _answer(resource: Resource, obj: Object, *, removed: bool) -> Object:
    if not removed or resource.rules.returns_deleted:
        return resource.show(obj)
    details = {"name": obj["metadata"]["name"]}
    if resource.group:
        details["group"] = resource.group
    details |= {"kind": resource.plural, "uid": obj["metadata"]["uid"]}
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "details": details,
    }


def delete_options(body: Any, query: dict[str, str]) -> Object:
    """DeleteOptions from the body, with what the query says on top."""
    if body is None:
        body = {}
    if not isinstance(body, dict):
        raise ApiError(400, "the object provided is unrecognized (must be of type DeleteOptions)")
    options = dict(body)
    if policy := query.get("propagationPolicy"):
        options["propagationPolicy"] = policy
    if "orphanDependents" in query:
        options["orphanDependents"] = query["orphanDependents"] == "true"
    return options
