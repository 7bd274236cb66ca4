"""Watch: what changed since a version, line by line, until the time is up or the client leaves.

A stream follows the history of its collection by position instead of queueing events, so a slow
client costs nothing but its place: once what it has not read yet falls out of the history, its
stream ends with 410, as for any watch that starts too far back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import msgspec

from sandbox.kube import reads, requests
from sandbox.kube.errors import ApiError, gone
from sandbox.kube.requests import Form, Target
from sandbox.kube.resources import Object, Resource
from sandbox.kube.selectors import Selection
from sandbox.kube.store import Change, Collection, Store, Stored

_encode = msgspec.json.encode
_INITIAL_END = {"k8s.io/initial-events-end": "true"}


class Watch:
    """One watch: its place in the history, its selection and the form of its objects."""

    def __init__(
        self,
        store: Store,
        target: Target,
        query: Mapping[str, str],
        form: Form,
        *,
        bookmark_every: float,
        longest: float,
    ) -> None:
        requests.check_list(query, watch=True)
        self._store = store
        self._target = target
        self._resource: Resource = target.resource
        self._collection: Collection = store.collection(self._resource.collection)
        self._selected: Selection = requests.selection(query, self._resource)
        self._form = form
        self._include = query.get("includeObject", "")
        self._columns_sent = False
        self._bookmarks = query.get("allowWatchBookmarks") in ("1", "true", "True")
        self._initial_end = query.get("sendInitialEvents") in ("1", "true", "True")
        self._asked = requests.version_of(query)
        wanted = float(requests.number(query, "timeoutSeconds") or longest)
        self._deadline = time.monotonic() + min(wanted, longest)
        self._every = bookmark_every
        self.closed = asyncio.Event()

    def _initial(self) -> bool:
        return not self._asked or self._initial_end

    async def lines(self) -> AsyncIterator[bytes]:
        """The encoded events, as many at a time as are there."""
        place = self._store.version
        if self._asked and self._asked > place:
            # A version that has not been reached: a real server waits for it, without a word.
            if not await self._reached(self._asked):
                return
            place = self._asked
        elif self._initial():
            for batch in self._present():
                yield batch
            if self._initial_end and self._bookmarks:
                yield self._bookmark(place, _INITIAL_END)
        elif self._asked is not None:
            place = self._asked
            if place < self._collection.floor:
                yield self._expired(place)
                return
        async for batch in self._follow(place):
            yield batch

    async def _reached(self, version: int) -> bool:
        """Wait until a version is reached; False when the time is up first."""
        while self._store.version < version:
            left = self._deadline - time.monotonic()
            if left <= 0 or self.closed.is_set():
                return False
            await self._collection.changed(self._store.version, left)
        return True

    def _present(self) -> Iterator[bytes]:
        batch = []
        for _, stored in self._collection.in_order(self._target.namespace):
            shown = self._resource.show(stored.obj)
            if self._selected.holds(shown):
                batch.append(self._line("ADDED", stored, shown))
                if len(batch) >= 500:
                    yield b"".join(batch)
                    batch = []
        if batch:
            yield b"".join(batch)

    async def _follow(self, place: int) -> AsyncIterator[bytes]:
        start = place
        bookmark_at = self._next_bookmark()
        while not self.closed.is_set():
            if place < self._collection.dropped:
                yield self._expired(place)
                return
            changes = self._collection.since(place)
            if changes:
                place = changes[-1].version
                if lines := b"".join(self._selected_lines(changes)):
                    yield lines
                continue
            now = time.monotonic()
            if now >= self._deadline:
                return
            if now >= bookmark_at:
                bookmark_at = self._next_bookmark()
                # Everything up to the present version has been looked at.
                place = max(place, self._store.version)
                if place > start:
                    yield self._bookmark(place, None)
                continue
            await self._collection.changed(place, min(self._deadline, bookmark_at) - now)

    def _next_bookmark(self) -> float:
        """In a minute or so, or two seconds before the end; never for who did not ask."""
        if not self._bookmarks:
            return float("inf")
        now = time.monotonic()
        at = min(now + self._every, self._deadline - 2)
        return at if at > now else float("inf")

    def _selected_lines(self, changes: list[Change]) -> Iterator[bytes]:
        for change in changes:
            namespace = self._target.namespace
            if namespace is not None and change.key[0] != namespace:
                continue
            if not self._selected:
                yield self._line(change.type, change.now, self._resource.show(change.now.obj))
            elif (line := self._judged(change)) is not None:
                yield line

    def _judged(self, change: Change) -> bytes | None:
        """A change as a selection sees it: what leaves it is deleted, what enters is added."""
        now = self._resource.show(change.now.obj)
        before = None if change.before is None else self._resource.show(change.before.obj)
        was = before is not None and self._selected.holds(before)
        if change.type == "DELETED":
            return self._line("DELETED", change.now, now) if was else None
        is_in = self._selected.holds(now)
        if is_in:
            return self._line("MODIFIED" if was else "ADDED", change.now, now)
        if was and before is not None:
            # The last state that was selected, at the version at which it left.
            metadata = before["metadata"] | {"resourceVersion": str(change.version)}
            return self._encoded("DELETED", before | {"metadata": metadata})
        return None

    def _line(self, kind: str, stored: Stored, shown: Object) -> bytes:
        if self._form.name or not self._resource.is_native(stored.obj):
            return self._encoded(kind, shown)
        return b'{"type":"%b","object":%b}\n' % (kind.encode(), stored.raw)

    def _encoded(self, kind: str, shown: Object) -> bytes:
        made: Any = reads.shaped(self._resource, shown, self._form, self._include)
        if self._form.name == "Table":
            if self._columns_sent:
                made["columnDefinitions"] = None
            self._columns_sent = True
        return _encode({"type": kind, "object": made}) + b"\n"

    def _bookmark(self, version: int, annotations: Mapping[str, str] | None) -> bytes:
        metadata: Object = {"resourceVersion": str(version)}
        if annotations:
            metadata["annotations"] = dict(annotations)
        obj = {
            "kind": self._resource.kind,
            "apiVersion": self._resource.api_version,
            "metadata": metadata,
        }
        if self._form.name:
            return self._encoded("BOOKMARK", obj)
        return _encode({"type": "BOOKMARK", "object": obj}) + b"\n"

    def _expired(self, place: int) -> bytes:
        return error_line(gone(f"too old resource version: {place} ({self._collection.floor})"))

    def close(self) -> None:
        """End the stream as soon as what is due has been sent."""
        self.closed.set()
        self._collection.wake()


def error_line(error: ApiError) -> bytes:
    return _encode({"type": "ERROR", "object": error.body()}) + b"\n"
