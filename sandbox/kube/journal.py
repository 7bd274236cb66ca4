"""Objects kept in a folder: an append-only journal, folded into a snapshot at each start.

Every change is one line of JSON, written and flushed to the system before the answer goes out,
so killing the process loses nothing; a machine that loses power may lose the last moments. A
torn last line is dropped. Not meant for anything but development.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from sandbox.kube.resources import Registry
from sandbox.kube.store import Change, Key, Store, Stored

_encode = msgspec.json.encode


class StateError(Exception):
    """A folder that cannot be used, and why."""


class Journal:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._lock: BinaryIO | None = None

    def load(self, store: Store, registry: Registry) -> None:
        """Read what is there into an empty store, then record what it does from now on."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._take()
            self._read(store, registry)
        except BaseException:
            self.close()
            raise
        store.observers.append(self._record)

    def _read(self, store: Store, registry: Registry) -> None:
        snapshot = self._folder / "objects.jsonl"
        journal = self._folder / "journal.jsonl"
        for path in (snapshot, journal):
            if path.exists():
                self._replay(path, store)
        # Definitions first: they make the kinds whose objects follow.
        for collection in ("customresourcedefinitions.apiextensions.k8s.io", *store.collections):
            resource = registry.by_collection(collection)
            if resource is not None:
                for stored in store.collection(collection).objects.values():
                    resource.rules.written(stored.obj, None)
        # Versions that a crash of the machine lost must not be given out a second time.
        store.version += 1000
        store.compact()
        self._fold(store, snapshot)
        self._file = journal.open("wb", buffering=0)

    def _take(self) -> None:
        """Keep other servers out of the folder while this one runs."""
        self._lock = (self._folder / "lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StateError(f"{self._folder} is in use by another server") from error

    def _replay(self, path: Path, store: Store) -> None:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break  # torn by a crash; it was never answered
                try:
                    self._repeat(msgspec.json.decode(line), store)
                except (msgspec.DecodeError, LookupError, TypeError) as error:
                    text = f"{path}, line {number} cannot be read ({error}); remove the folder"
                    raise StateError(text) from error

    def _repeat(self, entry: dict[str, Any], store: Store) -> None:
        if "collection" not in entry:
            store.version = max(store.version, entry["version"])
            return
        key: Key = (entry["key"][0], entry["key"][1])
        before = store.get(entry["collection"], key)
        stored = Stored(entry["object"], _encode(entry["object"]), entry["version"])
        change = Change(entry["version"], entry["type"], key, stored, before)
        if change.type != "DELETED" or before is not None:
            store.record(entry["collection"], change)

    def _fold(self, store: Store, snapshot: Path) -> None:
        draft = snapshot.with_suffix(".new")
        with draft.open("wb") as file:
            file.write(_encode({"version": store.version}) + b"\n")
            for collection, key, stored in store.everything():
                file.write(_line(collection, "ADDED", key, stored))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(snapshot)

    def _record(self, collection: str, change: Change) -> None:
        if self._file is not None:
            self._file.write(_line(collection, change.type, change.key, change.now))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _line(collection: str, kind: str, key: Key, stored: Stored) -> bytes:
    head = {"collection": collection, "type": kind, "key": key, "version": stored.version}
    return _encode(head)[:-1] + b',"object":' + stored.raw + b"}\n"
