"""Objects, their history and the resource version that orders every write.

Everything here is synchronous, so that a write is atomic for all readers: it takes the next
resource version, replaces the object, appends to the bounded history of its collection and wakes
the watches. An object in the store is never changed; a write stores another one. The history
lets a watch start in the past and a paged list read a consistent past; what falls out of it is
gone, as after a compaction.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

Key = tuple[str, str]  # namespace ("" where there is none), name

_encode = msgspec.json.encode


class Stored:
    """One object as it was written: decoded, encoded, and its resource version."""

    __slots__ = ("obj", "raw", "version")

    def __init__(self, obj: dict[str, Any], raw: bytes, version: int) -> None:
        self.obj = obj
        self.raw = raw
        self.version = version


class Change(NamedTuple):
    """One write: what became of the object (for DELETED its last state), and what it was."""

    version: int
    type: str
    key: Key
    now: Stored
    before: Stored | None


class Collection:
    """The objects of one kind, whatever versions it is served in."""

    def __init__(self, name: str, floor: int) -> None:
        self.name = name
        self.objects: dict[Key, Stored] = {}
        self.history: list[Change] = []
        #: Watches and exact reads older than this are refused.
        self.floor = floor
        #: The last change that is no longer in the history.
        self.dropped = 0
        self._sorted: list[Key] | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    def keys(self) -> list[Key]:
        """The keys of all objects by namespace and name; not to be changed."""
        if self._sorted is None:
            self._sorted = sorted(self.objects)
        return self._sorted

    def put(self, key: Key, stored: Stored) -> None:
        if key not in self.objects:
            self._sorted = None
        self.objects[key] = stored

    def remove(self, key: Key) -> None:
        if self.objects.pop(key, None) is not None:
            self._sorted = None

    def in_order(self, namespace: str | None) -> list[tuple[Key, Stored]]:
        """Objects by namespace and name; of one namespace where one is given."""
        keys = of_namespace(self.keys(), namespace)
        return [(key, self.objects[key]) for key in keys]

    def at(self, version: int) -> tuple[list[Key], dict[Key, Stored]]:
        """Keys and objects as they stood at a past version (not below the floor)."""
        if not self.history or self.history[-1].version <= version:
            return self.keys(), self.objects
        past = dict(self.objects)
        for change in reversed(self.history):
            if change.version <= version:
                break
            if change.before is None:
                past.pop(change.key, None)
            else:
                past[change.key] = change.before
        return sorted(past), past

    def since(self, version: int, limit: int = 500) -> list[Change]:
        """Up to `limit` changes after a version, in order."""
        start = bisect_right(self.history, version, key=_version_of)
        return self.history[start : start + limit]

    async def changed(self, version: int, timeout: float) -> bool:
        """Wait until there is a change after `version`; False when the time is up first."""
        if self.history and self.history[-1].version > version:
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait_for(waiter, timeout)
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True

    def wake(self) -> None:
        """Let every waiting watch look again."""
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def append(self, change: Change, most: int) -> None:
        self.history.append(change)
        if len(self.history) > most + most // 4:
            # Trim in steps: removing one at a time from the front would cost every write.
            self._cut(len(self.history) - most)
            self.floor = max(self.floor, self.dropped)

    def compact(self, version: int) -> None:
        self.floor = max(self.floor, version)
        self._cut(bisect_right(self.history, version, key=_version_of))

    def _cut(self, count: int) -> None:
        if count:
            self.dropped = self.history[count - 1].version
            del self.history[:count]


def of_namespace(keys: list[Key], namespace: str | None) -> list[Key]:
    """The part of sorted keys that lies in a namespace."""
    if namespace is None:
        return keys
    return keys[bisect_left(keys, (namespace, "")) : bisect_left(keys, (namespace + "\0", ""))]


def _version_of(change: Change) -> int:
    return change.version


class TooLargeError(Exception):
    """An object that is larger than the store takes."""


class Store:
    """All collections under one resource version."""

    def __init__(
        self, *, version: int = 100, history: int = 10_000, max_object: int = 1536 * 1024
    ) -> None:
        self.version = version
        self.collections: dict[str, Collection] = {}
        self.observers: list[Callable[[str, Change], None]] = []
        self._history = history
        self._max_object = max_object
        #: No history reaches back beyond this, whatever the collection.
        self.floor = version

    def collection(self, name: str) -> Collection:
        found = self.collections.get(name)
        if found is None:
            found = self.collections[name] = Collection(name, self.floor)
        return found

    def get(self, collection: str, key: Key) -> Stored | None:
        return self.collection(collection).objects.get(key)

    def put(self, collection: str, key: Key, obj: dict[str, Any]) -> Stored:
        """Write an object; it gets the next resource version."""
        before = self.collection(collection).objects.get(key)
        stored = self._stamped(obj)
        if len(stored.raw) > self._max_object:
            raise TooLargeError(f"{len(stored.raw)} bytes, of at most {self._max_object}")
        self.record(collection, Change(stored.version, _kind_of_put(before), key, stored, before))
        return stored

    def delete(self, collection: str, key: Key) -> Stored:
        """Remove an object; its last state carries the resource version of the removal."""
        before = self.collection(collection).objects[key]
        stored = self._stamped(before.obj)
        self.record(collection, Change(stored.version, "DELETED", key, stored, before))
        return stored

    def _stamped(self, obj: dict[str, Any]) -> Stored:
        version = self.version + 1
        metadata = obj["metadata"] | {"resourceVersion": str(version)}
        head = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "metadata": metadata}
        stamped = head | {k: v for k, v in obj.items() if k not in head}
        return Stored(stamped, _encode(stamped), version)

    def record(self, collection: str, change: Change) -> None:
        """Make a change take effect: here for a live write, and when a journal is replayed."""
        place = self.collection(collection)
        self.version = max(self.version, change.version)
        if change.type == "DELETED":
            place.remove(change.key)
        else:
            place.put(change.key, change.now)
        place.append(change, self._history)
        for observer in self.observers:
            observer(collection, change)
        place.wake()

    def compact(self, version: int | None = None) -> int:
        """Forget history up to a version (the present one by default)."""
        version = self.version if version is None else min(version, self.version)
        self.floor = max(self.floor, version)
        for collection in self.collections.values():
            collection.compact(version)
        return version

    def everything(self) -> Iterator[tuple[str, Key, Stored]]:
        for name, collection in self.collections.items():
            for key, stored in collection.objects.items():
                yield name, key, stored


def _kind_of_put(before: Stored | None) -> str:
    return "ADDED" if before is None else "MODIFIED"
