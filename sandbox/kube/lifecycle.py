"""Rules that every write follows, whatever the kind.

Which fields a path may write, what an update keeps, when a write changed nothing, and when a
deleted object is done with.
"""

from __future__ import annotations

from typing import Any

from sandbox.kube.errors import ApiError, FieldError, forbidden_field
from sandbox.kube.options import Options
from sandbox.kube.resources import Object, Resource
from sandbox.kube.schema import copy

#: What an update cannot change, whatever it sends.
FIXED = (
    "name",
    "namespace",
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "selfLink",
)


def is_done(obj: Object) -> bool:
    """Whether a deleted object has nothing left that holds it."""
    metadata = obj["metadata"]
    if not metadata.get("deletionTimestamp") or metadata.get("finalizers"):
        return False
    return not (obj["kind"] == "Namespace" and (obj.get("spec") or {}).get("finalizers"))


def in_namespace(metadata: Object, namespace: str) -> None:
    if not namespace:
        metadata.pop("namespace", None)
    elif metadata.setdefault("namespace", namespace) != namespace:
        raise ApiError(
            400,
            f"the namespace of the provided object does not match the namespace sent on the "
            f"request ({metadata['namespace']} != {namespace})",
        )


def other_name(have: str, wanted: str) -> ApiError:
    return ApiError(
        400,
        f"the name of the object ({have}) does not match the name on the URL ({wanted})",
    )


def resets(resource: Resource, options: Options) -> frozenset[str]:
    """The top-level fields that this path does not write."""
    if options.subresource == "status":
        top = frozenset(resource.schema.properties) - {"status"}
        return top if resource.custom else top - {"metadata"}
    return frozenset({"status"}) if resource.status else frozenset()


def joined(resource: Resource, old: Object, new: Object, options: Options) -> Object:
    """The new object with the parts that this path does not write taken from the old one."""
    if not resource.status:
        return new
    if options.subresource != "status":
        kept = {k: v for k, v in new.items() if k != "status"}
        return kept | ({"status": _own(old["status"])} if "status" in old else {})
    kept = {k: v for k, v in copy(old).items() if k != "status"}
    if not resource.custom:
        kept["metadata"] = new["metadata"]
    return kept | ({"status": new["status"]} if "status" in new else {})


def _own(value: Any) -> Any:
    """A copy that may be changed: what is in the store may not."""
    return copy({"": value})[""]


def equal(new: Object, old: Object) -> bool:
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


def late_finalizers(metadata: Object, before: Object) -> list[FieldError]:
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
