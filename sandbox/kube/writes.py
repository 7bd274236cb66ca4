"""Create, update, patch, apply and delete: from a decoded body to a stored object.

Every write runs through `_commit`: ownership is recorded, the kind's rules fill in and check,
the generation is counted, and an object that did not change is not written again. All of it is
synchronous, so nothing can come between reading an object and replacing it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from sandbox.kube import bodies, names, ownership, patches
from sandbox.kube.errors import (
    STALE,
    ApiError,
    FieldError,
    already_exists,
    conflict,
    forbidden_field,
    invalid,
    not_found,
    unsupported_media,
    wrong,
)
from sandbox.kube.ownership import LAST_APPLIED, Manager
from sandbox.kube.resources import Object, Registry, Resource
from sandbox.kube.schema import copy, prune
from sandbox.kube.store import Key, Store, Stored

#: What an update cannot change, whatever it sends.
_FIXED = (
    "name",
    "namespace",
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "selfLink",
)
_META_RESETS = frozenset({"metadata"})


@dataclass(slots=True)
class Options:
    """What a request says about how to write."""

    manager: str = ""
    user_agent: str = ""
    force: bool | None = None
    dry_run: bool = False
    validation: str = "Warn"
    subresource: str = ""
    content_type: str | None = None
    warnings: list[str] = field(default_factory=list)

    def writer(self, resource: Resource, operation: str = "Update") -> Manager:
        name = self.manager or self.user_agent.partition("/")[0]
        return Manager(name, operation, resource.api_version, self.subresource)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Writer:
    """The writing half of the API."""

    def __init__(self, registry: Registry, store: Store, *, max_object: int) -> None:
        self._registry = registry
        self._store = store
        self._max_object = max_object

    # -- create ------------------------------------------------------------------------------

    def create(
        self, resource: Resource, namespace: str, name: str, obj: Object, options: Options
    ) -> Object:
        """Store a new object and return it as this version shows it."""
        obj = self._admitted(resource, obj, options)
        metadata = obj["metadata"]
        _in_namespace(metadata, namespace)
        if name and metadata.setdefault("name", name) != name:
            raise _other_name(metadata["name"], name)
        live = self._blank(resource)
        entries = ownership.track(
            live,
            obj,
            resource.schema,
            options.writer(resource),
            now(),
            resets=_resets(resource, options),
        )
        return self._insert(resource, obj, entries, options)

    def _blank(self, resource: Resource) -> Object:
        head = {"apiVersion": resource.api_version, "kind": resource.kind}
        return head | {"metadata": {}} | dict(resource.rules.empty)

    def _insert(
        self, resource: Resource, obj: Object, entries: list[Object], options: Options
    ) -> Object:
        metadata = obj["metadata"]
        if metadata.get("generateName") and not metadata.get("name"):
            metadata["name"] = names.generated(metadata["generateName"])
        self._check_namespace(resource, metadata)
        for name in ("deletionTimestamp", "deletionGracePeriodSeconds", "resourceVersion"):
            metadata.pop(name, None)
        metadata |= {"creationTimestamp": now(), "uid": str(uuid.uuid4())}
        metadata.pop("generation", None)
        if resource.rules.generation:
            metadata["generation"] = 1
        metadata.pop("managedFields", None)
        if entries:
            metadata["managedFields"] = entries
        if resource.status:
            obj.pop("status", None)
        key = (metadata.get("namespace", ""), metadata.get("name", ""))
        if self._store.get(resource.collection, key) is not None:
            raise already_exists(resource, metadata["name"])
        stored = self._storable(resource, obj)
        self._check(resource, stored, None, options)
        if options.dry_run:
            return resource.show(stored)
        return self._put(resource, key, stored, None)

    def _check_namespace(self, resource: Resource, metadata: Mapping[str, Any]) -> None:
        if not resource.namespaced:
            return
        name = metadata.get("namespace", "")
        found = self._store.get("namespaces", ("", name))
        if found is None:
            spaces = self._registry.find("", "v1", "namespaces")
            assert spaces is not None
            raise not_found(spaces, name)
        if found.obj["metadata"].get("deletionTimestamp"):
            why = f"namespace {name} is being terminated"
            raise ApiError(
                403,
                f'{_noun(resource)} "{metadata.get("name", "")}" is forbidden: unable to create '
                f"new content in namespace {name} because it is being terminated",
                details={
                    "name": metadata.get("name", ""),
                    "group": resource.group,
                    "kind": resource.plural,
                    "causes": [
                        {
                            "reason": "NamespaceTerminating",
                            "message": why,
                            "field": "metadata.namespace",
                        }
                    ],
                },
            )

    # -- update ------------------------------------------------------------------------------

    def update(
        self, resource: Resource, namespace: str, name: str, obj: Object, options: Options
    ) -> tuple[Object, bool]:
        """Replace an object; returns what is stored, and whether it was created by that."""
        found = self._store.get(resource.collection, (namespace, name))
        metadata = obj["metadata"]
        if metadata.get("name", name) != name:
            raise _other_name(metadata["name"], name)
        if found is None:
            if resource.rules.create_by_put and not options.subresource:
                return self.create(resource, namespace, name, obj, options), True
            raise not_found(resource, name)
        _in_namespace(metadata, namespace)
        asked = metadata.get("resourceVersion")
        if asked in (None, "", "0"):
            if not resource.rules.unconditional:
                error = FieldError(
                    "metadata.resourceVersion",
                    "FieldValueInvalid",
                    "Invalid value: 0x0: must be specified for an update",
                )
                raise invalid(resource.kind, resource.group, name, [error])
        elif asked != str(found.version):
            raise conflict(resource, name, STALE)
        new = self._admitted(resource, obj, options)
        return self._rewrite(resource, found, new, None, options), False

    # -- patch -------------------------------------------------------------------------------

    def patch(
        self, resource: Resource, namespace: str, name: str, body: bytes, options: Options
    ) -> tuple[Object, bool]:
        """Patch an object, whatever the kind of patch; returns as `update` does."""
        kind = bodies.media_type(options.content_type)
        accepted = [patches.JSON_PATCH, patches.MERGE, patches.APPLY]
        if not resource.custom:
            accepted.insert(2, patches.STRATEGIC)
        if kind not in accepted:
            raise unsupported_media(accepted)
        _check_patch_options(kind, options)
        if kind == patches.APPLY:
            return self._apply(resource, namespace, name, bodies.parse_yaml(body), options)
        found = self._store.get(resource.collection, (namespace, name))
        if found is None:
            raise not_found(resource, name)
        new = self._patched(resource, found, kind, body)
        metadata = new["metadata"]
        if metadata.get("name") != name:
            raise _other_name(str(metadata.get("name")), name)
        if metadata.get("resourceVersion", str(found.version)) != str(found.version):
            raise conflict(resource, name, STALE)
        new = self._admitted(resource, new, options, patch=body)
        return self._rewrite(resource, found, new, None, options), False

    def _patched(self, resource: Resource, found: Stored, kind: str, body: bytes) -> Object:
        try:
            patch = msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            text = f"error decoding patch: {bodies.json_fault(body, error)}"
            raise ApiError(400, text) from error
        document = copy(resource.show(found.obj))
        if kind == patches.JSON_PATCH:
            new = patches.json_patch(document, patch)
        elif not isinstance(patch, dict):
            raise ApiError(400, "error decoding patch: a merge patch must be an object")
        elif kind == patches.MERGE:
            new = patches.merge(document, patch)
        else:
            new = patches.strategic(document, patch, resource.schema)
        return bodies.expect_kind(new, resource)

    def _apply(
        self, resource: Resource, namespace: str, name: str, body: Any, options: Options
    ) -> tuple[Object, bool]:
        config = bodies.expect_kind(body, resource)
        metadata = config["metadata"]
        if metadata.setdefault("name", name) != name:
            raise _other_name(metadata["name"], name)
        _in_namespace(metadata, namespace)
        if metadata.get("managedFields"):
            raise ApiError(400, "metadata.managedFields must be nil")
        _declared(resource, config)
        found = self._store.get(resource.collection, (namespace, name))
        if found is None:
            if options.subresource:
                raise not_found(resource, name)
            if metadata.get("uid"):
                raise conflict(resource, name, f"uid mismatch: the provided object specified uid "
                               f"{metadata['uid']}, and no existing object was found")  # fmt: skip
            live: Object = {
                "apiVersion": resource.api_version,
                "kind": resource.kind,
                "metadata": {k: metadata[k] for k in ("name", "namespace") if k in metadata},
            }
        else:
            live = resource.show(found.obj)
            if metadata.get("resourceVersion", str(found.version)) != str(found.version):
                raise conflict(resource, name, STALE)
        applied = ownership.apply(
            live,
            config,
            resource.schema,
            options.writer(resource, "Apply"),
            now(),
            force=bool(options.force),
            resets=_resets(resource, options),
        )
        applied = copy(applied)
        _refresh_last_applied(live, applied, config, options)
        entries = applied["metadata"].pop("managedFields", [])
        applied = bodies.admit(applied, resource, [])
        if found is None:
            return self._insert(resource, applied, entries, options), True
        return self._rewrite(resource, found, applied, entries, options), False

    # -- what all rewrites share -------------------------------------------------------------

    def _rewrite(
        self,
        resource: Resource,
        found: Stored,
        new: Object,
        entries: list[Object] | None,
        options: Options,
    ) -> Object:
        """Replace a stored object by its next state, or by nothing when it is done with."""
        old = resource.show(found.obj)
        metadata, before = new["metadata"], old["metadata"]
        if metadata.get("uid", before["uid"]) != before["uid"]:
            raise conflict(
                resource,
                before["name"],
                f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object "
                f"meta: {before['uid']}",
            )
        if entries is None:
            manager = options.writer(resource)
            resets = _resets(resource, options)
            entries = ownership.track(old, new, resource.schema, manager, now(), resets=resets)
        new = _joined(resource, old, new, options)
        metadata = new["metadata"]
        for name in _FIXED:
            metadata.pop(name, None)
            if name in before:
                metadata[name] = before[name]
        metadata.pop("managedFields", None)
        if entries:
            metadata["managedFields"] = entries
        metadata["resourceVersion"] = str(found.version)
        stored = self._storable(resource, new)
        self._check(resource, stored, found.obj, options)
        if resource.rules.generation and resource.rules.changed(stored, found.obj):
            stored["metadata"]["generation"] = before.get("generation", 0) + 1
        if _equal(stored, found.obj):
            return resource.show(found.obj)
        if options.dry_run:
            return resource.show(stored)
        key = (before.get("namespace", ""), before["name"])
        if is_done(stored):
            self.forget(resource, key)
            return resource.show(stored)
        return self._put(resource, key, stored, found)

    def _admitted(
        self, resource: Resource, obj: Object, options: Options, *, patch: bytes | None = None
    ) -> Object:
        unknown: list[str] = []
        obj = bodies.admit(obj, resource, unknown)
        if unknown and options.validation == "Strict":
            if patch is None:
                raise bodies.misfit(resource, unknown)
            shown = patch.decode(errors="replace")
            errors = [wrong("patch", shown, bodies.strict(unknown))]
            raise invalid(resource.kind, resource.group, obj["metadata"].get("name", ""), errors)
        if options.validation == "Warn":
            options.warnings += [f'unknown field "{name}"' for name in unknown]
        return obj

    def _storable(self, resource: Resource, obj: Object) -> Object:
        if resource.stored:
            return obj
        storage = self._registry.by_collection(resource.collection)
        assert storage is not None, resource.collection
        head = {"apiVersion": storage.api_version, "kind": storage.kind}
        return resource.rules.to_storage(obj) | head

    def _check(self, resource: Resource, obj: Object, old: Object | None, options: Options) -> None:
        rules = resource.rules
        errors: list[FieldError] = []
        errors += rules.prepare(obj, old, self._store)
        if old is None:
            errors += names.check_metadata(obj["metadata"], rules.check_name)
        else:
            errors += names.check_metadata(obj["metadata"], lambda name: None)
            errors += _late_finalizers(obj["metadata"], old["metadata"])
        errors += rules.validate(obj, old, status=options.subresource == "status")
        if errors:
            group = "" if resource.kind == "Event" else resource.group
            raise invalid(resource.kind, group, obj["metadata"].get("name", ""), errors)

    def _put(self, resource: Resource, key: Key, obj: Object, found: Stored | None) -> Object:
        size = len(msgspec.json.encode(obj))
        if size > self._max_object:
            raise ApiError(500, "etcdserver: request is too large", reason=None)
        resource.rules.written(obj, None if found is None else found.obj)
        return resource.show(self._store.put(resource.collection, key, obj).obj)

    def forget(self, resource: Resource, key: Key) -> Object:
        """Remove an object from the store for good."""
        stored = self._store.delete(resource.collection, key)
        resource.rules.removed(stored.obj)
        return stored.obj

    def replace_unchecked(self, resource: Resource, key: Key, obj: Object) -> Stored:
        """A write of the server itself, as the garbage collector makes."""
        found = self._store.get(resource.collection, key)
        resource.rules.written(obj, found.obj if found else None)
        return self._store.put(resource.collection, key, obj)


def is_done(obj: Object) -> bool:
    """Whether a deleted object has nothing left that holds it."""
    metadata = obj["metadata"]
    if not metadata.get("deletionTimestamp") or metadata.get("finalizers"):
        return False
    return not (obj["kind"] == "Namespace" and (obj.get("spec") or {}).get("finalizers"))


def _noun(resource: Resource) -> str:
    return f"{resource.plural}.{resource.group}" if resource.group else resource.plural


def _in_namespace(metadata: Object, namespace: str) -> None:
    if not namespace:
        metadata.pop("namespace", None)
    elif metadata.setdefault("namespace", namespace) != namespace:
        raise ApiError(
            400,
            f"the namespace of the provided object does not match the namespace sent on the "
            f"request ({metadata['namespace']} != {namespace})",
        )


def _other_name(have: str, wanted: str) -> ApiError:
    return ApiError(
        400,
        f"the name of the object ({have}) does not match the name on the URL ({wanted})",
    )


def _resets(resource: Resource, options: Options) -> frozenset[str]:
    """The top-level fields that this path does not write."""
    if options.subresource == "status":
        top = frozenset(resource.schema.properties) - {"status"}
        return top if resource.custom else top - _META_RESETS
    return frozenset({"status"}) if resource.status else frozenset()


def _joined(resource: Resource, old: Object, new: Object, options: Options) -> Object:
    """The new object with the parts that this path does not write taken from the old one."""
    if not resource.status:
        return new
    if options.subresource != "status":
        joined = {k: v for k, v in new.items() if k != "status"}
        return joined | ({"status": _own(old["status"])} if "status" in old else {})
    joined = {k: v for k, v in copy(old).items() if k != "status"}
    if not resource.custom:
        joined["metadata"] = new["metadata"]
    return joined | ({"status": new["status"]} if "status" in new else {})


def _own(value: Any) -> Any:
    """A copy that may be changed: what is in the store may not."""
    return copy({"": value})[""]


def _equal(new: Object, old: Object) -> bool:
    """Whether nothing changed but times of managedFields."""
    if new == old:
        return True
    if any(new.get(k) != old.get(k) for k in new.keys() | old.keys() if k != "metadata"):
        return False

    def timeless(metadata: Object) -> Object:
        entries = metadata.get("managedFields") or ()
        bare = [{k: v for k, v in entry.items() if k != "time"} for entry in entries]
        return metadata | {"managedFields": bare}

    return timeless(new["metadata"]) == timeless(old["metadata"])


def _late_finalizers(metadata: Object, before: Object) -> list[FieldError]:
    if not before.get("deletionTimestamp"):
        return []
    held = before.get("finalizers") or []
    late = [name for name in metadata.get("finalizers") or [] if name not in held]
    if not late:
        return []
    shown = ", ".join(f'"{name}"' for name in late)
    text = (
        "no new finalizers can be added if the object is being deleted, found new finalizers "
        f"[]string{{{shown}}}"
    )
    return [forbidden_field("metadata.finalizers", text)]


def _check_patch_options(kind: str, options: Options) -> None:
    if kind == patches.APPLY:
        if not options.manager:
            error = FieldError(
                "fieldManager", "FieldValueRequired", "Required value: is required for apply patch"
            )
            raise invalid("PatchOptions", "meta.k8s.io", "", [error])
    elif options.force is not None:
        error = forbidden_field("force", "may not be specified for non-apply patch")
        raise invalid("PatchOptions", "meta.k8s.io", "", [error])


def _declared(resource: Resource, config: Object) -> None:
    """An applied configuration may not hold fields that its kind does not have."""
    unknown: list[str] = []
    prune(copy(config), resource.schema, "", unknown)
    if unknown:
        metadata = config["metadata"]
        where = f"{metadata.get('namespace', '')}/{metadata['name']}"
        raise ApiError(
            500,
            f"failed to create typed patch object ({where}; {resource.api_version}, "
            f"Kind={resource.kind}): .{unknown[0]}: field not declared in schema",
            reason=None,
        )


def _refresh_last_applied(live: Object, applied: Object, config: Object, options: Options) -> None:
    """`kubectl apply --server-side` keeps the record of client-side apply up to date."""
    had = (live["metadata"].get("annotations") or {}).get(LAST_APPLIED)
    if options.manager != "kubectl" or not had:
        return
    record = copy(config)
    (record["metadata"].get("annotations") or {}).pop(LAST_APPLIED, None)
    text = msgspec.json.encode(record, order="sorted").decode() + "\n"
    applied["metadata"].setdefault("annotations", {})[LAST_APPLIED] = text
