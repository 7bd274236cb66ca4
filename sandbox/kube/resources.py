"""The kinds that are served: names, versions, shapes and rules.

A `Resource` is one kind in one version. Versions of a kind share a collection of the store; the
registry holds the built-in ones and those of installed CRDs.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from sandbox.kube import names
from sandbox.kube.errors import FieldError
from sandbox.kube.schema import Schema

if TYPE_CHECKING:
    from sandbox.kube.store import Store

Object = dict[str, Any]

VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
#: The same verbs in the order in which a real server lists them for custom resources.
CUSTOM_VERBS = ("delete", "deletecollection", "get", "list", "patch", "create", "update", "watch")
META_FIELDS = frozenset({"metadata.name", "metadata.namespace"})


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: what `kubectl get` prints, and how a cell is found."""

    name: str
    cell: Callable[[Object], Any]
    type: str = "string"
    format: str = ""
    description: str = ""
    priority: int = 0


class Rules:
    """What one kind does beyond its shape. The plain case does nothing."""

    #: Whether the kind counts its changes in `metadata.generation`.
    generation = False
    #: Whether an update may leave out the resource version.
    unconditional = True
    #: Whether PUT of an absent object creates it.
    create_by_put = False
    #: Whether deleting answers with the object instead of a Status.
    returns_deleted = False
    #: What may stand in a field selector beside name and namespace.
    selectable: frozenset[str] = frozenset()
    #: What an object of this kind looks like to field ownership before it exists.
    empty: ClassVar[Mapping[str, Any]] = {}

    #: A create may carry the status: kubelets register a Node with its addresses.
    born_with_status: ClassVar[bool] = False

    check_name: Callable[[str], str | None] = staticmethod(names.subdomain)

    def default(self, obj: Object) -> None:
        """Fill in what depends on more than one field; in place, whenever one is decoded."""

    def prepare(self, obj: Object, old: Object | None, store: Store) -> list[FieldError]:
        """Allocate and drop what depends on the cluster, just before validation."""
        return []

    def validate(self, obj: Object, old: Object | None, *, status: bool) -> Iterable[FieldError]:
        return ()

    def changed(self, obj: Object, old: Object) -> bool:
        """Whether a write counts as a new generation."""
        return bool(obj.get("spec") != old.get("spec"))

    def to_storage(self, obj: Object) -> Object:
        """The object as it is stored, from how this version shows it."""
        return obj

    def from_storage(self, obj: Object) -> Object:
        return obj

    def written(self, obj: Object, old: Object | None) -> None:
        """Take note of an object that was stored, in the place of `old`."""

    def removed(self, obj: Object) -> None:
        """Give back what an object held."""


@dataclass(eq=False, slots=True)
class Resource:
    """One kind in one version."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool
    schema: Schema
    rules: Rules
    collection: str
    singular: str = ""
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    verbs: tuple[str, ...] = VERBS
    status: bool = False
    custom: bool = False
    #: Whether objects are stored in this version.
    stored: bool = True
    columns: Sequence[Column] = ()
    meta: Schema = field(init=False)
    #: The first bytes of every encoded object, left out in lists of built-in kinds.
    head: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.singular = self.singular or self.kind.lower()
        self.meta = self.schema.child("metadata")
        self.head = f'{{"apiVersion":"{self.api_version}","kind":"{self.kind}",'.encode()

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def full_name(self) -> str:
        """The plural with its group, as refusals name the resource."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def storage_hash(self) -> str:
        """The hash by which clients notice that the storage version changed."""
        text = f"{self.group}/{self.version}/{self.kind}".encode()
        return base64.b64encode(hashlib.sha256(text).digest()[:8]).decode()

    @property
    def selectable(self) -> frozenset[str]:
        return META_FIELDS | self.rules.selectable

    def is_native(self, obj: Object) -> bool:
        """Whether a stored object is already as this version shows it."""
        return bool(obj["apiVersion"] == self.api_version)

    def show(self, obj: Object) -> Object:
        """A stored object as this version shows it."""
        if self.is_native(obj):
            return obj
        shown = self.rules.from_storage(obj)
        return {"apiVersion": self.api_version, "kind": self.kind} | {
            k: v for k, v in shown.items() if k not in ("apiVersion", "kind")
        }


class Registry:
    """Every resource that is served now."""

    def __init__(self, builtin: Iterable[Resource]) -> None:
        self._by_path: dict[tuple[str, str, str], Resource] = {}
        self._groups: dict[str, list[str]] = {}
        for resource in builtin:
            self.add(resource)

    def add(self, resource: Resource) -> None:
        self._by_path[resource.group, resource.version, resource.plural] = resource
        versions = self._groups.setdefault(resource.group, [])
        if resource.version not in versions:
            versions.append(resource.version)

    def remove_custom(self, group: str, plural: str) -> None:
        for key in [k for k, r in self._by_path.items() if r.custom and k[::2] == (group, plural)]:
            del self._by_path[key]
        left: dict[str, list[str]] = {}
        for own_group, version, _ in self._by_path:
            versions = left.setdefault(own_group, [])
            if version not in versions:
                versions.append(version)
        self._groups = left

    def find(self, group: str, version: str, plural: str) -> Resource | None:
        return self._by_path.get((group, version, plural))

    def serves(self, group: str, version: str) -> bool:
        return version in self._groups.get(group, ())

    def versions(self, group: str) -> list[str]:
        return self._groups.get(group, [])

    def groups(self) -> list[str]:
        """Group names: the built-in ones in their order, then those of CRDs by name."""
        builtin = {r.group for r in self._by_path.values() if not r.custom}
        ordered = [group for group in self._groups if group in builtin]
        return ordered + sorted(group for group in self._groups if group not in builtin)

    def of(self, group: str, version: str) -> list[Resource]:
        return [r for (g, v, _), r in self._by_path.items() if (g, v) == (group, version)]

    def all(self) -> list[Resource]:
        return list(self._by_path.values())

    def by_collection(self, collection: str) -> Resource | None:
        """The stored version of a collection."""
        for resource in self._by_path.values():
            if resource.collection == collection and resource.stored:
                return resource
        return None
