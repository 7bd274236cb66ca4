"""Create, update, patch and apply: from a decoded body to a stored object.

Every write ends in `_insert` or `_rewrite`: ownership is recorded, the kind's rules fill in and
check, the generation is counted, and an object that did not change is not written again. All of
it is synchronous, so nothing can come between reading an object and replacing it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from sandbox.kube import applying, bodies, lifecycle, names, ownership, patches
from sandbox.kube.errors import (
    STALE,
    ApiError,
    FieldError,
    already_exists,
    conflict,
    invalid,
    not_found,
    terminating,
    unsupported_media,
    wrong,
)
from sandbox.kube.options import Options, now
from sandbox.kube.resources import Object, Registry, Resource
from sandbox.kube.schema import copy
from sandbox.kube.store import Key, Store, Stored, TooLargeError


class Writer:
    """The writing half of the API."""

    def __init__(self, registry: Registry, store: Store) -> None:
        self._registry = registry
        self._store = store

    # -- create ------------------------------------------------------------------------------

    def create(
        self, resource: Resource, namespace: str, name: str, obj: Object, options: Options
    ) -> Object:
        """Store a new object and return it as this version shows it."""
        obj = self._admitted(resource, obj, options)
        metadata = obj["metadata"]
        lifecycle.in_namespace(metadata, namespace)
        if name and metadata.setdefault("name", name) != name:
            raise lifecycle.other_name(metadata["name"], name)
        live = self._blank(resource)
        entries = ownership.track(
            live,
            obj,
            resource.schema,
            options.writer(resource),
            now(),
            resets=lifecycle.resets(resource, options),
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
        if metadata.pop("resourceVersion", "") not in ("", "0"):
            text = "resourceVersion should not be set on objects to be created"
            raise ApiError(500, text, reason=None)
        for name in ("deletionTimestamp", "deletionGracePeriodSeconds"):
            metadata.pop(name, None)
        metadata |= {"creationTimestamp": now(), "uid": str(uuid.uuid4())}
        metadata.pop("generation", None)
        if resource.rules.generation:
            metadata["generation"] = 1
        metadata.pop("managedFields", None)
        if entries:
            metadata["managedFields"] = entries
        if resource.status and not resource.rules.born_with_status:
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
            raise terminating(resource, metadata.get("name", ""), name)

    # -- update ------------------------------------------------------------------------------

    def update(
        self, resource: Resource, namespace: str, name: str, obj: Object, options: Options
    ) -> tuple[Object, bool]:
        """Replace an object; returns what is stored, and whether it was created by that."""
        found = self._store.get(resource.collection, (namespace, name))
        metadata = obj["metadata"]
        if metadata.get("name", name) != name:
            raise lifecycle.other_name(metadata["name"], name)
        if found is None:
            if resource.rules.create_by_put and not options.subresource:
                return self.create(resource, namespace, name, obj, options), True
            raise not_found(resource, name)
        lifecycle.in_namespace(metadata, namespace)
        uid = found.obj["metadata"]["uid"]
        if metadata.get("uid", uid) != uid:
            why = (
                f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object "
                f"meta: {uid}"
            )
            raise conflict(resource, name, why)
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
        applying.check_patch_options(kind, options)
        if kind == patches.APPLY:
            return self._apply(resource, namespace, name, bodies.parse_yaml(body), options)
        found = self._store.get(resource.collection, (namespace, name))
        if found is None:
            raise not_found(resource, name)
        new = self._patched(resource, found, kind, body)
        metadata = new["metadata"]
        if metadata.get("name") != name:
            raise lifecycle.other_name(str(metadata.get("name")), name)
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
            raise lifecycle.other_name(metadata["name"], name)
        lifecycle.in_namespace(metadata, namespace)
        if metadata.get("managedFields"):
            raise ApiError(400, "metadata.managedFields must be nil")
        applying.declared(resource, config)
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
            resets=lifecycle.resets(resource, options),
        )
        applied = copy(applied)
        if metadata.get("uid"):
            applied["metadata"]["uid"] = metadata["uid"]
        applying.refresh_last_applied(live, applied, config, options)
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
            # A patch that names another uid is meant for an object that was here before.
            error = wrong("metadata.uid", metadata["uid"], "field is immutable")
            raise invalid(resource.kind, resource.group, before["name"], [error])
        if entries is None:
            manager = options.writer(resource)
            resets = lifecycle.resets(resource, options)
            entries = ownership.track(old, new, resource.schema, manager, now(), resets=resets)
        new = lifecycle.joined(resource, old, new, options)
        metadata = new["metadata"]
        for name in lifecycle.FIXED:
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
        if lifecycle.equal(stored, found.obj):
            return resource.show(found.obj)
        if options.dry_run:
            return resource.show(stored)
        key = (before.get("namespace", ""), before["name"])
        if lifecycle.is_done(stored):
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
            errors += lifecycle.late_finalizers(obj["metadata"], old["metadata"])
        errors += rules.validate(obj, old, status=options.subresource == "status")
        if errors:
            group = "" if resource.kind == "Event" else resource.group
            raise invalid(resource.kind, group, obj["metadata"].get("name", ""), errors)

    def _put(self, resource: Resource, key: Key, obj: Object, found: Stored | None) -> Object:
        try:
            stored = self._store.put(resource.collection, key, obj)
        except TooLargeError as error:
            raise ApiError(500, "etcdserver: request is too large", reason=None) from error
        resource.rules.written(stored.obj, None if found is None else found.obj)
        return resource.show(stored.obj)

    def forget(self, resource: Resource, key: Key) -> Object:
        """Remove an object from the store for good."""
        stored = self._store.delete(resource.collection, key)
        resource.rules.removed(stored.obj)
        return stored.obj

    def replace_unchecked(self, resource: Resource, key: Key, obj: Object) -> Stored:
        """A write of the server itself, as the garbage collector makes."""
        found = self._store.get(resource.collection, key)
        stored = self._store.put(resource.collection, key, obj)
        resource.rules.written(stored.obj, found.obj if found else None)
        return stored
