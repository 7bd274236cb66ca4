"""Structural schemas: one compiled form for built-in kinds and for those of a CRD.

A `Schema` answers what field ownership asks (which lists have keys, which maps are atomic),
fills defaults, prunes what no field declares, and names unknown fields. Checking values is in
`sandbox.kube.checks`. Compiled once per kind version; never changed afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

#: Field names that CEL has for itself, and marks that it does not take in a name.
_CEL_WORDS = (
    "true false null in as break const continue else for function if import let loop package "
    "namespace return var void while"
)
RESERVED = frozenset(_CEL_WORDS.split())
MARKS = {"__": "underscores", ".": "dot", "-": "dash", "/": "slash"}


class Schema:
    """One node of a structural OpenAPI schema."""

    __slots__ = (
        "additional",
        "atomic_map",
        "closed",
        "combined",
        "default",
        "embedded",
        "has_defaults",
        "items",
        "list_keys",
        "list_type",
        "merge_key",
        "nullable",
        "patch_replace",
        "properties",
        "raw",
        "ruled",
        "rules",
        "translated",
        "type",
    )

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.type: str = raw.get("type", "")
        if raw.get("x-kubernetes-int-or-string"):
            self.type = "int-or-string"
        self.properties = {k: Schema(v) for k, v in raw.get("properties", {}).items()}
        additional = raw.get("additionalProperties")
        self.additional = Schema(additional) if isinstance(additional, Mapping) else None
        items = raw.get("items")
        self.items = Schema(items) if isinstance(items, Mapping) else None
        self.embedded = bool(raw.get("x-kubernetes-embedded-resource"))
        # Where fields are declared, others are dropped; a map or an untyped node keeps all.
        self.closed = (
            self.type == "object"
            and additional is not True
            and not raw.get("x-kubernetes-preserve-unknown-fields")
        )
        self.list_type: str = raw.get("x-kubernetes-list-type", "atomic")
        self.list_keys: tuple[str, ...] = tuple(raw.get("x-kubernetes-list-map-keys", ()))
        self.atomic_map = raw.get("x-kubernetes-map-type") == "atomic"
        self.nullable = bool(raw.get("nullable"))
        self.merge_key: str = raw.get("x-kubernetes-patch-merge-key", "")
        self.patch_replace = raw.get("x-kubernetes-patch-strategy") == "replace"
        self.default: Any = raw.get("default")
        self.rules: list[Mapping[str, Any]] = list(raw.get("x-kubernetes-validations", ()))
        self.combined = any(word in raw for word in ("allOf", "anyOf", "oneOf", "not"))
        self.has_defaults: bool = self.default is not None or any(
            child.has_defaults for child in self.children()
        )

        #: Whether there are CEL rules here or below, and whether CEL sees the value changed.
        self.ruled: bool = bool(self.rules) or any(child.ruled for child in self.children())
        self.translated: bool = (
            raw.get("format") == "date-time"
            or any(child.nullable for child in self.properties.values())
            or any(name in RESERVED or any(m in name for m in MARKS) for name in self.properties)
            or any(child.translated for child in self.children())
        )

    def children(self) -> Iterator[Schema]:
        yield from self.properties.values()
        if self.additional is not None:
            yield self.additional
        if self.items is not None:
            yield self.items

    def child(self, key: str) -> Schema:
        """The schema of a map's or object's value; `ANY` where nothing is declared."""
        return self.properties.get(key) or self.additional or ANY

    def element(self) -> Schema:
        return self.items or ANY


ANY = Schema({"x-kubernetes-preserve-unknown-fields": True})


def fill(value: Any, schema: Schema) -> None:
    """Fill the defaults below an object or list, in place.

    A null where a default stands and null is not allowed counts as absent, as on a real server.
    """
    if not schema.has_defaults:
        return
    if isinstance(value, dict):
        for name, child in schema.properties.items():
            if not child.has_defaults:
                continue
            if child.default is not None and (
                name not in value or (value[name] is None and not child.nullable)
            ):
                value[name] = _copy(child.default)
            if name in value:
                fill(value[name], child)
        if schema.additional is not None:
            for name, item in value.items():
                if name not in schema.properties:
                    fill(item, schema.additional)
    elif isinstance(value, list) and schema.items is not None:
        for item in value:
            fill(item, schema.items)


def prune(value: Any, schema: Schema, path: str = "", unknown: list[str] | None = None) -> None:
    """Drop what the schema does not declare, in place; the dropped paths go to `unknown`."""
    if isinstance(value, dict):
        for name in list(value):
            where = f"{path}.{name}" if path else name
            child = schema.properties.get(name) or schema.additional
            if schema.embedded and name in ("apiVersion", "kind", "metadata"):
                continue
            if child is not None:
                prune(value[name], child, where, unknown)
            elif schema.closed:
                del value[name]
                if unknown is not None:
                    unknown.append(where)
    elif isinstance(value, list) and schema.items is not None:
        for index, item in enumerate(value):
            prune(item, schema.items, f"{path}[{index}]", unknown)


def _copy(value: Any) -> Any:
    if isinstance(value, dict | list):
        return msgspec.json.decode(msgspec.json.encode(value))
    return value


def copy(value: dict[str, Any]) -> dict[str, Any]:
    """A deep copy of one decoded JSON object."""
    copied: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return copied
