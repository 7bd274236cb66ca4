"""What the Kubernetes client takes and gives: places in the API, pages, watch events."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Resource(NamedTuple):
    """A kind by its place in the API, from which paths are built."""

    group: str  # "" is the core group
    version: str
    plural: str
    namespaced: bool = True

    @property
    def group_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The collection (of one namespace, or of all), an object, or a part of one."""
        parts = [f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"]
        if namespace and self.namespaced:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name:
            parts.append(name)
        if subresource:
            parts.append(subresource)
        return "/".join(parts)


class WatchEvent(msgspec.Struct, frozen=True):
    """ADDED, MODIFIED, DELETED or BOOKMARK, with the object as it came."""

    type: str
    object: msgspec.Raw


class ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")
    remaining_item_count: int | None = None


class Page(msgspec.Struct, frozen=True):
    """One page of a list. The first page's version is the version of the whole list."""

    items: list[msgspec.Raw] | None = None
    metadata: ListMeta = ListMeta()


class ResourceInfo(msgspec.Struct, frozen=True):
    """One kind of a group version, as discovery tells it."""

    name: str
    kind: str = ""
    namespaced: bool = False
    verbs: tuple[str, ...] = ()
    status: bool = False  # has a status subresource
