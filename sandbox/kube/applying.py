"""What only patches, and among them server-side apply, have to look after."""

from __future__ import annotations

import msgspec

from sandbox.kube import patches
from sandbox.kube.errors import ApiError, FieldError, forbidden_field, invalid
from sandbox.kube.options import Options
from sandbox.kube.ownership import LAST_APPLIED
from sandbox.kube.resources import Object, Resource
from sandbox.kube.schema import copy, prune


def check_patch_options(kind: str, options: Options) -> None:
    if kind == patches.APPLY:
        if not options.manager:
            error = FieldError(
                "fieldManager", "FieldValueRequired", "Required value: is required for apply patch"
            )
            raise invalid("PatchOptions", "meta.k8s.io", "", [error])
    elif options.force is not None:
        error = forbidden_field("force", "may not be specified for non-apply patch")
        raise invalid("PatchOptions", "meta.k8s.io", "", [error])


def declared(resource: Resource, config: Object) -> None:
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


def refresh_last_applied(live: Object, applied: Object, config: Object, options: Options) -> None:
    """`kubectl apply --server-side` keeps the record of client-side apply up to date."""
    had = (live["metadata"].get("annotations") or {}).get(LAST_APPLIED)
    if options.manager != "kubectl" or not had:
        return
    record = copy(config)
    (record["metadata"].get("annotations") or {}).pop(LAST_APPLIED, None)
    text = msgspec.json.encode(record, order="sorted").decode() + "\n"
    applied["metadata"].setdefault("annotations", {})[LAST_APPLIED] = text
