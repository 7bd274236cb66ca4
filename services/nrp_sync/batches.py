"""A batch of addresses: what it touches, and how it is filled up to its caps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import msgspec

from services.nrp_sync.provider import Action, Address, AddressLocation, LocationBatch
from services.nrp_sync.sources import Refs

ENTRY_BYTES: Final = 40  # of JSON around one address: names of fields, quotes, commas
LOCATION_BYTES: Final = 120
WHOLE: Final = ""
"""Stands for the whole location where an address is expected."""


class Key(NamedTuple):
    location: str
    address: str


class LocationCall(msgspec.Struct, frozen=True, kw_only=True):
    """One batch, and for each location that it deletes the addresses that go with it."""

    batch: LocationBatch
    emptied: dict[str, tuple[str, ...]] = {}

    def keys(self) -> Iterator[Key]:
        for entry in self.batch.locations:
            for item in entry.addresses:
                yield Key(entry.location, item.address)
        for location, addresses in self.emptied.items():
            for address in addresses:
                yield Key(location, address)

    def locations(self) -> Iterator[str]:
        return (entry.location for entry in self.batch.locations)

    def size(self) -> int:
        return sum(len(entry.addresses) or 1 for entry in self.batch.locations)


class Limits(NamedTuple):
    addresses: int = 500
    bytes: int = 1 << 20


class Builder:
    """A batch that grows until it is full."""

    def __init__(self, limits: Limits, suspects: dict[Key, int]) -> None:
        self._limits, self._suspects = limits, suspects
        self._most = limits.addresses
        self._bytes = limits.bytes
        self._size = 0
        self._entries: list[AddressLocation] = []
        self._emptied: dict[str, tuple[str, ...]] = {}

    def delete(self, location: str, odd: Iterable[str]) -> bool:
        if not self._room(Key(location, WHOLE), LOCATION_BYTES):
            return False
        self._entries.append(AddressLocation(location=location))
        self._emptied[location] = tuple(sorted(odd))
        return True

    def put(self, location: str, wishes: dict[str, Refs], *, full: bool, whole: bool) -> bool:
        """False when not all of it went in. `whole`: better in the next batch than in two."""
        if whole and self._size and self._size + len(wishes) > self._most:
            return False
        self._bytes -= LOCATION_BYTES
        taken = []
        for address, refs in wishes.items():
            weight = ENTRY_BYTES + len(address) + sum(len(name) + 3 for name in refs)
            if not self._room(Key(location, address), weight):
                break
            taken.append(Address(address=address, services=refs))
        if taken:
            action = Action.FULL if full else Action.PARTIAL
            self._entries.append(
                AddressLocation(location=location, addresses=tuple(taken), action=action)
            )
        return len(taken) == len(wishes)

    def _room(self, key: Key, weight: int) -> bool:
        most = min(self._most, self._suspects.get(key, self._most))
        if self._size and (self._size + 1 > most or weight > self._bytes):
            return False
        self._most, self._size, self._bytes = most, self._size + 1, self._bytes - weight
        return True

    def call(self) -> LocationCall | None:
        if not self._entries:
            return None
        entries = tuple(sorted(self._entries, key=lambda entry: entry.location))
        return LocationCall(batch=LocationBatch(locations=entries), emptied=self._emptied)
