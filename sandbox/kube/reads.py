"""Get and list: consistent pages, exact and past versions, tables and bare metadata."""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from sandbox.kube import columns, requests
from sandbox.kube.errors import ApiError, gone, not_found, too_large_version
from sandbox.kube.requests import Form, Target
from sandbox.kube.resources import Object, Resource
from sandbox.kube.selectors import Selection
from sandbox.kube.store import Collection, Key, Store, Stored, of_namespace

_encode = msgspec.json.encode


def one(store: Store, target: Target, form: Form, include: str) -> bytes:
    """One object, encoded."""
    resource = target.resource
    key = (target.namespace or "", target.name)
    found = store.get(resource.collection, key)
    if found is None:
        raise not_found(resource, target.name)
    if not form.name and resource.is_native(found.obj):
        return found.raw
    return _encode(shaped(resource, resource.show(found.obj), form, include))


def shaped(resource: Resource, obj: Object, form: Form, include: str = "") -> Object:
    """One object in the form that was asked for."""
    if form.name == "Table":
        return _table(resource, [obj], {"resourceVersion": _version(obj)}, form, include)
    if form.name.startswith("PartialObjectMetadata"):
        return columns.partial(obj) | {"apiVersion": f"meta.k8s.io/{form.version}"}
    return obj


def _version(obj: Object) -> str:
    return str(obj["metadata"].get("resourceVersion", ""))


def _table(
    resource: Resource, objects: list[Object], metadata: Object, form: Form, include: str
) -> Object:
    columns_of = resource.columns
    if resource.group == "events.k8s.io":
        # Its columns read the stored form, which core/v1 shows.
        objects = [resource.rules.to_storage(obj) for obj in objects]
    made = columns.table(columns_of, objects, metadata, include)
    made["apiVersion"] = f"meta.k8s.io/{form.version}"
    return made


def listing(store: Store, target: Target, query: Mapping[str, str], form: Form) -> bytes:
    """A list or one page of it, encoded."""
    requests.check_list(query, watch=False)
    resource = target.resource
    selected = requests.selection(query, resource)
    view = _view(store, target, query)
    keys = of_namespace(view.keys, target.namespace)
    if view.after is not None:
        keys = keys[bisect_right(keys, view.after) :]
    if selected:
        keys = [key for key in keys if selected.holds(resource.show(view.objects[key].obj))]
    metadata: Object = {"resourceVersion": str(view.version)}
    if resource.custom and not form.name:
        metadata["continue"] = ""
    limit = requests.number(query, "limit")
    if 0 < limit < len(keys):
        metadata["continue"] = _token(view.version, keys[limit - 1])
        if not selected:
            metadata["remainingItemCount"] = len(keys) - limit
        keys = keys[:limit]
    items = [view.objects[key] for key in keys]
    return _encoded(resource, items, metadata, form, query.get("includeObject", ""))


class _View(NamedTuple):
    """A collection at one version, and the key after which a page begins."""

    keys: list[Key]
    objects: dict[Key, Stored]
    version: int
    after: Key | None


def _view(store: Store, target: Target, query: Mapping[str, str]) -> _View:
    collection = store.collection(target.resource.collection)
    if token := query.get("continue"):
        return _continued(store, collection, token)
    asked = requests.version_of(query)
    if asked is not None and asked > store.version:
        raise too_large_version(asked, store.version)
    if query.get("resourceVersionMatch") != "Exact" or not asked:
        return _View(collection.keys(), collection.objects, store.version, None)
    if asked < collection.floor:
        raise gone("The resourceVersion for the provided list is too old.")
    return _View(*collection.at(asked), asked, None)


def _token(version: int, last: Key) -> str:
    namespace, name = last
    start = f"{namespace}/{name}\0" if namespace else f"/{name}\0"
    text = _encode({"v": "meta.k8s.io/v1", "rv": version, "start": start})
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode()


def _continued(store: Store, collection: Collection, token: str) -> _View:
    try:
        raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    except (binascii.Error, ValueError) as error:
        raise _bad_token("illegal base64 data at input byte 0") from error
    try:
        read = msgspec.json.decode(raw)
        version, start = int(read["rv"]), str(read["start"])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        first = raw[:1].decode("latin-1")
        shown = first if first.isascii() and first.isprintable() else f"\\x{ord(first):02x}"
        raise _bad_token(f"invalid character '{shown}' looking for beginning of value") from error
    except (KeyError, TypeError, ValueError) as error:
        raise _bad_token("it lacks rv or start") from error
    namespace, _, name = start.rstrip("\0").rpartition("/")
    last = (namespace, name)
    if version < 0:
        return _View(collection.keys(), collection.objects, store.version, last)
    if version < collection.floor:
        # The rest can still be had, but not as of the version at which the list began.
        again = _token(-1, last)
        raise gone(
            "The provided continue parameter is too old to display a consistent list result. "
            "You can start a new list without the continue parameter, or use the continue token "
            "in this response to retrieve the remainder of the results.",
            **{"continue": again},
        )
    return _View(*collection.at(version), version, last)


def _bad_token(why: str) -> ApiError:
    return ApiError(400, f"invalid continue token: continue key is not valid: {why}")


def _encoded(
    resource: Resource, items: list[Stored], metadata: Object, form: Form, include: str
) -> bytes:
    if form.name == "Table":
        objects = [resource.show(stored.obj) for stored in items]
        return _encode(_table(resource, objects, metadata, form, include))
    if form.name.startswith("PartialObjectMetadata"):
        partials = [columns.partial(resource.show(stored.obj)) for stored in items]
        made: dict[str, Any] = {
            "kind": "PartialObjectMetadataList",
            "apiVersion": f"meta.k8s.io/{form.version}",
            "metadata": metadata,
            "items": partials,
        }
        return _encode(made)
    head = _encode(
        {
            "kind": f"{resource.kind}List",
            "apiVersion": resource.api_version,
            "metadata": metadata,
        }
    )
    raws = [_item(resource, stored) for stored in items]
    return head[:-1] + b',"items":[' + b",".join(raws) + b"]}"


def _item(resource: Resource, stored: Stored) -> bytes:
    """One item of a list: items of built-in kinds do not repeat their kind."""
    raw = stored.raw if resource.is_native(stored.obj) else _encode(resource.show(stored.obj))
    if resource.custom:
        return raw
    return b"{" + raw[len(resource.head) :]


def matching(store: Store, target: Target, selected: Selection) -> list[Key]:
    """The keys of the objects of a collection that a selection holds."""
    resource = target.resource
    items = store.collection(resource.collection).in_order(target.namespace)
    return [key for key, stored in items if selected.holds(resource.show(stored.obj))]
