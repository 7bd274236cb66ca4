"""Who owns which field: `metadata.managedFields`, and server-side apply on top of it.

`track` records an ordinary write, `apply` merges an applied configuration into the live object,
takes away what its manager no longer claims, and refuses what another manager owns. Both follow
the rules of a real API server; neither changes the objects it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sandbox.kube import fields
from sandbox.kube.errors import ApiError
from sandbox.kube.fields import Paths
from sandbox.kube.schema import Schema

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_META_UNOWNED = (
    "name",
    "namespace",
    "creationTimestamp",
    "selfLink",
    "uid",
    "generation",
    "resourceVersion",
    "managedFields",
)
_UNOWNED: Paths = {("f:apiVersion",), ("f:kind",), ("f:metadata",)} | {
    ("f:metadata", "f:" + name) for name in _META_UNOWNED
}


@dataclass(frozen=True, slots=True)
class Manager:
    """What distinguishes one entry of managedFields from another."""

    name: str
    operation: str
    api_version: str
    subresource: str = ""


@dataclass(slots=True)
class Claims:
    """The managers of one object, with their paths and the times of their last write."""

    paths: dict[Manager, Paths] = field(default_factory=dict)
    times: dict[Manager, str | None] = field(default_factory=dict)

    @classmethod
    def read(cls, entries: Any) -> Claims:
        claims = cls()
        for entry in entries or ():
            manager = Manager(
                entry.get("manager", ""),
                entry.get("operation", "Update"),
                entry.get("apiVersion", ""),
                entry.get("subresource", ""),
            )
            claims.paths[manager] = fields.decode(entry.get("fieldsV1") or {})
            claims.times[manager] = entry.get("time")
        return claims

    def entries(self) -> list[dict[str, Any]]:
        """As managedFields: appliers first, then by time, then by name."""

        def order(manager: Manager) -> tuple[str, ...]:
            time = self.times.get(manager) or ""
            return (
                manager.operation,
                time,
                manager.name,
                manager.api_version,
                manager.subresource,
            )

        entries = []
        for manager in sorted(self.paths, key=order):
            entry: dict[str, Any] = {
                "manager": manager.name,
                "operation": manager.operation,
                "apiVersion": manager.api_version,
            }
            if time := self.times.get(manager):
                entry["time"] = time
            entry["fieldsType"] = "FieldsV1"
            entry["fieldsV1"] = fields.encode(self.paths[manager])
            if manager.subresource:
                entry["subresource"] = manager.subresource
            entries.append(entry)
        return entries

    def without_empty(self) -> None:
        for manager in [m for m, paths in self.paths.items() if not paths]:
            del self.paths[manager]
            self.times.pop(manager, None)


def _bare(obj: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {k: v for k, v in (obj.get("metadata") or {}).items() if k not in _META_UNOWNED}
    bare = {k: v for k, v in obj.items() if k not in ("apiVersion", "kind", "metadata")}
    return {"metadata": metadata} | bare


def _within(paths: Paths, resets: frozenset[str]) -> Paths:
    """The paths that this way of writing can set; the rest it ignores."""
    if not resets:
        return paths
    return {path for path in paths if path[0][2:] not in resets}


def track(
    live: Mapping[str, Any],
    new: Mapping[str, Any],
    schema: Schema,
    manager: Manager,
    now: str,
    *,
    resets: frozenset[str] = frozenset(),
) -> list[dict[str, Any]]:
    """managedFields after an ordinary create, update or patch.

    Entries that the writer sends along replace the recorded ones, as `kubectl` relies on when it
    moves an object from client-side to server-side apply.
    """
    sent = (new.get("metadata") or {}).get("managedFields")
    if sent == [{}]:
        return []  # the way to ask that ownership be forgotten
    recorded = (live.get("metadata") or {}).get("managedFields")
    claims = Claims.read(sent if sent else recorded)
    found = fields.compare(_bare(live), _bare(new), schema)
    found = fields.Comparison(*(_within(paths - _UNOWNED, resets) for paths in found))
    gained = found.added | found.modified
    for other in claims.paths:
        claims.paths[other] = claims.paths[other] - found.removed - gained
    if gained:
        claims.paths[manager] = claims.paths.get(manager, set()) | gained
        claims.times[manager] = now
    claims.without_empty()
    return claims.entries()


def apply(
    live: dict[str, Any],
    config: dict[str, Any],
    schema: Schema,
    manager: Manager,
    now: str,
    *,
    force: bool,
    resets: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """`live` after applying `config`; refuses fields of other managers unless forced."""
    claims = Claims.read((live.get("metadata") or {}).get("managedFields"))
    bare_live, bare_config = _bare(live), _bare(config)
    last = claims.paths.get(manager)
    claimed = _within(fields.owned_by_config(bare_config, schema) - _UNOWNED, resets)
    claims.paths[manager] = claimed
    merged = fields.merge(bare_live, bare_config, schema)
    if last:
        merged = _taken_away(merged, last, claims, schema)
    found = fields.compare(bare_live, merged, schema)
    found = fields.Comparison(*(_within(paths - _UNOWNED, resets) for paths in found))
    changed = found.added | found.modified
    conflicts = {
        other: paths & changed
        for other, paths in claims.paths.items()
        if other != manager and paths & changed
    }
    if not force:
        allowed = _last_applied(live, bare_live, schema) if manager.name == "kubectl" else set()
        left = {other: paths - allowed for other, paths in conflicts.items() if paths - allowed}
        if left:
            raise _conflict(left)
    for other in claims.paths:
        if other != manager:
            claims.paths[other] = claims.paths[other] - changed - found.removed
    claims.times[manager] = now
    claims.without_empty()
    return _rebuilt(live, merged, claims)


def _last_applied(live: Mapping[str, Any], bare: Any, schema: Schema) -> Paths:
    """What client-side apply had set and nobody changed since: `kubectl` may take that over."""
    text = ((live.get("metadata") or {}).get("annotations") or {}).get(LAST_APPLIED)
    try:
        applied = _bare(msgspec.json.decode(text or "{}", type=dict[str, Any]))
    except msgspec.MsgspecError:
        return set()
    found = fields.compare(applied, bare, schema)
    return fields.owned_by_config(applied, schema) - found.added - found.modified - found.removed


def _rebuilt(live: dict[str, Any], merged: dict[str, Any], claims: Claims) -> dict[str, Any]:
    fixed = {k: v for k, v in (live.get("metadata") or {}).items() if k in _META_UNOWNED}
    metadata = merged.get("metadata") or {}
    head = {"apiVersion": live.get("apiVersion"), "kind": live.get("kind")}
    fixed["managedFields"] = claims.entries()
    return head | merged | {"metadata": fixed | metadata}


def _taken_away(merged: Any, last: Paths, claims: Claims, schema: Schema) -> Any:
    """Without what the manager applied last time, applies no longer, and nobody else owns."""
    left = fields.remove(merged, fields.named_members(last, schema), schema)
    if left is fields.MISSING:
        left = {}
    everything = fields.named_members(fields.owned_by_config(merged, schema), schema)
    kept = fields.named_members(fields.owned_by_config(left, schema), schema)
    owned: Paths = set().union(*claims.paths.values())
    owned = fields.named_members(owned, schema)
    lost = everything - kept - owned
    # Only what this manager itself had set may go.
    lost &= fields.named_members(last, schema)
    pruned = fields.remove(merged, lost, schema, keep=owned)
    return {} if pruned is fields.MISSING else pruned


def _conflict(conflicts: Mapping[Manager, Paths]) -> ApiError:
    causes = []
    lines = []
    for manager in sorted(conflicts, key=lambda m: (m.name, m.operation, m.api_version)):
        said = f'"{manager.name}"'
        if manager.subresource:
            said += f' with subresource "{manager.subresource}"'
        if manager.operation == "Update":
            said += f" using {manager.api_version}"
        paths = sorted(fields.dotted(path) for path in conflicts[manager])
        lines += [f"conflicts with {said}:", *(f"- {path}" for path in paths)]
        message = f"conflict with {said}"
        causes += [
            {"reason": "FieldManagerConflict", "message": message, "field": path} for path in paths
        ]
    if len(causes) == 1:
        text = f"1 conflict: {causes[0]['message']}: {causes[0]['field']}"
    else:
        text = f"{len(causes)} conflicts: " + "\n".join(lines)
    return ApiError(409, f"Apply failed with {text}", details={"causes": causes})
