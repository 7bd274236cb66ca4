"""CustomResourceDefinitions: checking them, and serving what they define.

A CRD is accepted when its names, versions and schemas hold together, is established at once, and
from then on each served version is a `Resource` like a built-in one: pruned and defaulted by its
schema, checked against it and its CEL rules, printed in its columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from sandbox.kube import columns, shapes
from sandbox.kube.checks import check
from sandbox.kube.errors import FieldError, required, unsupported, wrong
from sandbox.kube.fields import MISSING
from sandbox.kube.resources import CUSTOM_VERBS, Column, Object, Registry, Resource, Rules
from sandbox.kube.schema import Schema

if TYPE_CHECKING:
    from sandbox.kube.store import Store

_DNS1035 = re.compile("[a-z]([-a-z0-9]*[a-z0-9])?")


class CustomRules(Rules):
    """Rules of a custom resource: those of its schema."""

    generation = True
    unconditional = False

    def __init__(self, schema: Schema, *, status: bool, selectable: frozenset[str]) -> None:
        self._schema = schema
        self._status = status
        self.selectable = selectable

    def changed(self, obj: Object, old: Object) -> bool:
        ignored = {"metadata", "status"} if self._status else {"metadata"}
        names = (obj.keys() | old.keys()) - ignored
        return any(obj.get(name) != old.get(name) for name in names)

    def validate(self, obj: Object, old: Object | None, *, status: bool) -> Iterator[FieldError]:
        found = False
        for error in check(obj, self._schema, "", MISSING if old is None else old):
            found = True
            yield error
        if self._schema.ruled and not found:
            # Imported where there are rules: most servers have none.
            from sandbox.kube.rules import check_rules

            yield from check_rules(obj, old, self._schema)


class CrdRules(Rules):
    generation = True
    unconditional = False

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def default(self, obj: Object) -> None:
        spec = obj.get("spec") or {}
        names = spec.get("names") or {}
        if kind := names.get("kind"):
            names.setdefault("singular", kind.lower())
            names.setdefault("listKind", f"{kind}List")
        if isinstance(spec, dict):
            spec.setdefault("conversion", {"strategy": "None"})

    def prepare(self, obj: Object, old: Object | None, store: Store) -> list[FieldError]:
        spec = obj["spec"]
        if any(self.validate(obj, old, status=False)):
            return []
        stored = [version["name"] for version in spec["versions"] if version.get("storage")]
        before = (obj.get("status") or {}).get("storedVersions") or []
        kept = {k: v for k, v in spec["names"].items() if v}
        obj["status"] = (obj.get("status") or {}) | {
            "conditions": _established(obj, old),
            "acceptedNames": kept,
            "storedVersions": before + [name for name in stored if name not in before],
        }
        return []

    def validate(self, obj: Object, old: Object | None, *, status: bool) -> Iterator[FieldError]:
        spec = obj.get("spec") or {}
        names = spec.get("names") or {}
        group, plural = spec.get("group", ""), names.get("plural", "")
        for field, value in (("group", group), ("names.plural", plural)):
            if not value:
                yield required(f"spec.{field}")
        if not names.get("kind"):
            yield required("spec.names.kind")
        if spec.get("scope") not in ("Cluster", "Namespaced"):
            supported = ("Cluster", "Namespaced")
            yield unsupported("spec.scope", spec.get("scope", ""), supported)
        if plural and group and obj["metadata"].get("name") != f"{plural}.{group}":
            name = obj["metadata"].get("name", "")
            yield wrong("metadata.name", name, 'must be spec.names.plural+"."+spec.group')
        yield from _versions(spec.get("versions") or [])

    def written(self, obj: Object, old: Object | None) -> None:
        spec = obj["spec"]
        self._registry.remove_custom(spec["group"], spec["names"]["plural"])
        for resource in serve(obj):
            self._registry.add(resource)

    def removed(self, obj: Object) -> None:
        spec = obj["spec"]
        self._registry.remove_custom(spec["group"], spec["names"]["plural"])


def _versions(versions: list[Any]) -> Iterator[FieldError]:
    if not versions:
        yield required("spec.versions")
        return
    for index, version in enumerate(versions):
        where = f"spec.versions[{index}]"
        name = version.get("name", "")
        if not _DNS1035.fullmatch(name):
            yield wrong(f"{where}.name", name, "a DNS-1035 label, such as v1 or v1beta1")
        if not (version.get("schema") or {}).get("openAPIV3Schema"):
            yield required(f"{where}.schema.openAPIV3Schema", "schemas are required")
            continue
        yield from _structural(
            version["schema"]["openAPIV3Schema"], f"{where}.schema.openAPIV3Schema"
        )
        for number, column in enumerate(version.get("additionalPrinterColumns") or ()):
            for field in ("name", "type", "jsonPath"):
                if not column.get(field):
                    yield required(f"{where}.additionalPrinterColumns[{number}].{field}")
    stored = [version for version in versions if version.get("storage")]
    if len(stored) != 1:
        text = "must have exactly one version marked as storage version"
        yield wrong("spec.versions", [v.get("name") for v in versions], text)


_TYPES = ("array", "boolean", "integer", "number", "object", "string")


def _structural(raw: Any, where: str) -> Iterator[FieldError]:
    """What keeps a schema from being structural: every node needs a type of its own."""
    if not isinstance(raw, dict):
        yield wrong(where, raw, "must be a schema")
        return
    free = raw.get("x-kubernetes-int-or-string") or raw.get("x-kubernetes-preserve-unknown-fields")
    kind = raw.get("type", "")
    if not kind and not free:
        yield required(f"{where}.type", "must not be empty for specified object fields")
    elif kind and kind not in _TYPES:
        yield unsupported(f"{where}.type", kind, _TYPES)
    if raw.get("x-kubernetes-list-type") == "map" and not raw.get("x-kubernetes-list-map-keys"):
        text = "must be set if x-kubernetes-list-type is map"
        yield required(f"{where}.x-kubernetes-list-map-keys", text)
    if raw.get("x-kubernetes-validations"):
        from sandbox.kube.rules import faults_of

        yield from faults_of(raw, where)
    if (pattern := raw.get("pattern")) is not None:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            yield wrong(f"{where}.pattern", pattern, f"must be a valid pattern: {error}")
    properties = raw.get("properties") or {}
    if not isinstance(properties, dict):
        yield wrong(f"{where}.properties", properties, "must be a map of schemas")
        return
    for name, child in properties.items():
        yield from _structural(child, f"{where}.properties[{name}]")
    if kind == "array" and "items" not in raw:
        yield required(f"{where}.items", "must be specified")
    for name in ("items", "additionalProperties"):
        if not isinstance(raw.get(name), bool | None):
            yield from _structural(raw[name], f"{where}.{name}")


def _established(obj: Object, old: Object | None) -> list[Object]:
    before = ((old or {}).get("status") or {}).get("conditions")
    if before:
        return list(before)
    since = obj["metadata"].get("creationTimestamp")
    texts = {
        "NamesAccepted": ("NoConflicts", "no conflicts found"),
        "Established": ("InitialNamesAccepted", "the initial names have been accepted"),
    }
    return [
        {
            "type": kind,
            "status": "True",
            "lastTransitionTime": since,
            "reason": reason,
            "message": message,
        }
        for kind, (reason, message) in texts.items()
    ]


def serve(crd: Object) -> list[Resource]:
    """The resources of every served version of a CRD, the preferred version first."""
    spec = crd["spec"]
    names = spec["names"]
    resources = []
    served = [version for version in spec["versions"] if version.get("served")]
    served.sort(key=lambda version: _preference(version["name"]))
    # Objects of a storage version that is not served are kept in the preferred one.
    storage = next((v for v in served if v.get("storage")), served[0] if served else None)
    for version in served:
        raw = version["schema"]["openAPIV3Schema"]
        properties = raw.get("properties", {}) | {
            "apiVersion": shapes.STRING,
            "kind": shapes.STRING,
            "metadata": shapes.METADATA,
        }
        schema = Schema(raw | {"properties": properties})
        status = "status" in (version.get("subresources") or {})
        fields = frozenset(
            field["jsonPath"].lstrip(".") for field in version.get("selectableFields") or ()
        )
        resources.append(
            Resource(
                group=spec["group"],
                version=version["name"],
                plural=names["plural"],
                kind=names["kind"],
                namespaced=spec["scope"] == "Namespaced",
                schema=schema,
                rules=CustomRules(schema, status=status, selectable=fields),
                collection=f"{names['plural']}.{spec['group']}",
                singular=names.get("singular", ""),
                short_names=tuple(names.get("shortNames") or ()),
                categories=tuple(names.get("categories") or ()),
                verbs=CUSTOM_VERBS,
                status=status,
                custom=True,
                stored=version is storage,
                columns=_columns(version.get("additionalPrinterColumns")),
            )
        )
    return resources


def _preference(version: str) -> tuple[int, int, int, str]:
    """GA before beta before alpha, larger numbers first, anything else last."""
    found = re.fullmatch(r"v(\d+)(?:(alpha|beta)(\d+))?", version)
    if found is None:
        return (3, 0, 0, version)
    stage = {None: 0, "beta": 1, "alpha": 2}[found[2]]
    return (stage, -int(found[1]), -int(found[3] or 0), version)


def _columns(raw: list[Any] | None) -> list[Column]:
    if not raw:
        raw = [{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}]
    made = [columns.NAME]
    for column in raw:
        path = column["jsonPath"]
        described = f"Custom resource definition column (in JSONPath format): {path}"
        made.append(
            Column(
                column["name"],
                _cell(path, column.get("type", "string")),
                type=column.get("type", "string"),
                format=column.get("format", ""),
                description=column.get("description") or described,
                priority=column.get("priority", 0),
            )
        )
    return made


_STEP = re.compile(
    r"""\.(?P<name>[^.\[\]]+)"""
    r"""|\[(?P<index>\d+|\*)\]"""
    r"""|\['(?P<quoted>[^']+)'\]"""
    r"""|\[\?\(@\.(?P<field>[\w.]+)\s*==\s*(?P<mark>["'])(?P<value>.*?)(?P=mark)\)\]"""
)


def find(path: str, obj: Any) -> list[Any]:
    """The values at a JSONPath of the kind that printer columns use."""
    values = [obj]
    path = path.replace("\\.", "\0")
    at = 0
    while at < len(path):
        step = _STEP.match(path, at)
        if step is None:
            return []
        at = step.end()
        values = [found for value in values for found in _step(step, value)]
    return values


def _step(step: re.Match[str], value: Any) -> list[Any]:
    name = step["name"] or step["quoted"]
    if name is not None:
        name = name.replace("\0", ".")
        return [value[name]] if isinstance(value, dict) and name in value else []
    if not isinstance(value, list):
        return []
    if step["field"] is not None:
        field = f".{step['field']}"
        return [item for item in value if [str(v) for v in find(field, item)] == [step["value"]]]
    if step["index"] == "*":
        return list(value)
    return value[int(step["index"]) :][:1]


def _cell(path: str, kind: str) -> Any:
    def cell(obj: Object) -> Any:
        found = [value for value in find(path, obj) if value is not None]
        if not found:
            return None
        value = found[0]
        match kind:
            case "date":
                return columns.age(value)
            case "integer" | "number" | "boolean":
                return value if isinstance(value, int | float) else None
        if "[*]" in path or len(found) > 1:
            return ",".join(_text(item) for item in found)
        return _text(value)

    return cell


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def definition(registry: Registry) -> Resource:
    """The resource by which CRDs themselves are served."""
    return Resource(
        group="apiextensions.k8s.io",
        version="v1",
        plural="customresourcedefinitions",
        kind="CustomResourceDefinition",
        namespaced=False,
        schema=Schema(shapes.CRD),
        rules=CrdRules(registry),
        collection="customresourcedefinitions.apiextensions.k8s.io",
        short_names=("crd", "crds"),
        categories=("api-extensions",),
        status=True,
        columns=columns.CRD,
    )
