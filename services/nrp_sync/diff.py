"""What the provider holds, kept as its difference from what we want.

For an address that is in step nothing is stored: what is held is what is wanted. Only the others
have an entry, with what the provider held when it last said so, or `Maybe` while a request about it
is under way or ended without an answer. So the difference is never computed, it is there, and one
changed address costs one entry.

Guarantees: what is held changes only by what was acknowledged or read; an acknowledgement counts
for what was sent, not for what is wanted by then; a `Maybe` always differs, until an
acknowledgement or a reading settles it. A location is sent as FullUpdate exactly when the provider
surely or possibly lacks it, and then no address of it is surely held, so nothing is lost. What
other people map stays: it is sent along, and their locations are neither replaced nor deleted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

import msgspec

from services.nrp_sync.batches import WHOLE, Builder, Key, Limits, LocationCall
from services.nrp_sync.desired import Desired
from services.nrp_sync.provider import Action, Address
from services.nrp_sync.sources import NONE, Refs


class Maybe(msgspec.Struct, frozen=True, gc=False):
    """Not known: any of these services may be there, all of them, or none."""

    refs: Refs


Seen: TypeAlias = Refs | Maybe


class Before(NamedTuple):
    """What was held before a batch was sent, to return to when it was surely not applied."""

    seen: dict[Key, Seen]
    located: dict[str, bool | None]


class Provided:
    """The addresses at the provider."""

    def __init__(self) -> None:
        self.desired = Desired(self._wish_changed, self._touched)
        self.deviant: dict[str, dict[str, Seen]] = {}
        self.located: dict[str, bool] = {}
        """Locations that the provider holds: True surely, False possibly (or without addresses)."""
        self.idle: set[str] = set()
        """Those of `located` behind which no source lists an address: to be deleted."""
        self.mapped: dict[str, int] = {}
        """Service to the number of addresses that (possibly) refer to it at the provider."""
        self.unsettled: dict[str, int] = {}
        """Service to the number of addresses that differ and concern it."""
        self.population: dict[str, int] = {}
        self.foreign: dict[str, dict[str, Refs]] = {}
        """What other people map, by location and address."""
        self.foreign_known = False
        """Whether that was read since we started; before, no location is deleted as a whole."""
        self.unknown = 0
        """Addresses of which it is not known what the provider holds."""
        self.busy: set[str] = set()
        """Locations with a request under way."""
        self.stirred = False
        """The wish changed since somebody last looked."""
        self.dirty: set[Key] = set()
        self.dirty_locations: set[str] = set()
        self.cursor = ""

    # --- questions ---

    def seen(self, location: str, address: str) -> Seen:
        addresses = self.deviant.get(location)
        found = addresses.get(address) if addresses is not None else None
        return self.desired.refs(location, address) if found is None else found

    def differing(self) -> int:
        return sum(map(len, self.deviant.values())) + len(self.idle)

    def held(self) -> Iterator[tuple[Key, Seen]]:
        """Everything that the provider (possibly) holds. Costs as much as there is."""
        for location in sorted(self.desired.at.keys() | self.deviant.keys()):
            odd = self.deviant.get(location, {})
            for address in sorted(self.desired.at.get(location, {}).keys() | odd.keys()):
                seen = odd.get(address)
                if seen is None:
                    seen = self.desired.refs(location, address)
                if seen != NONE:
                    yield Key(location, address), seen

    # --- changes of the wish ---

    def _wish_changed(self, location: str, address: str, before: Refs, after: Refs) -> None:
        self.stirred = True
        odd = self.deviant.get(location)
        seen = odd.get(address) if odd is not None else None
        if seen is None:
            seen = before
        else:
            self._settle(seen, before, -1)
        self._store(location, address, seen, after)

    def _store(self, location: str, address: str, seen: Seen, wish: Refs) -> None:
        odd = self.deviant.get(location)
        if seen == wish:
            if odd is not None and odd.pop(address, None) is not None and not odd:
                del self.deviant[location]
            return
        if odd is None:
            odd = self.deviant[location] = {}
        odd[address] = seen
        self._settle(seen, wish, 1)

    def _settle(self, seen: Seen, wish: Refs, step: int) -> None:
        if isinstance(seen, Maybe):
            self.unknown += step
            seen = seen.refs
        for name in {*seen, *wish} if seen and wish else seen or wish:
            add(self.unsettled, name, step)

    def _touched(self, location: str, present: bool) -> None:
        self.stirred = True
        if present:
            self.idle.discard(location)
        elif location in self.located and location not in self.foreign:
            self.idle.add(location)

    # --- changes of what is held ---

    def see(self, location: str, address: str, seen: Seen, *, keep: bool = True) -> None:
        """Learn what the provider holds. `keep`: as a row too (not so for a request under way)."""
        wish = self.desired.refs(location, address)
        odd = self.deviant.get(location)
        old = odd.get(address) if odd is not None else None
        if old is None:
            old = wish
        else:
            self._settle(old, wish, -1)
        was, now = possible(old), possible(seen)
        if was != now:
            for name in was:
                add(self.mapped, name, -1)
            for name in now:
                add(self.mapped, name, 1)
            add(self.population, location, bool(now) - bool(was))
        self._store(location, address, seen, wish)
        if keep:
            self.dirty.add(Key(location, address))

    def locate(self, location: str, state: bool | None, *, keep: bool = True) -> None:
        """Learn whether the provider holds a location: surely, possibly (False), or not (None)."""
        if state is None:
            self.located.pop(location, None)
            self.idle.discard(location)
        else:
            self.located[location] = state
            if location not in self.desired.at and location not in self.foreign:
                self.idle.add(location)
        if keep:
            self.dirty_locations.add(location)

    def set_foreign(self, location: str, addresses: dict[str, Refs]) -> None:
        """Learn what other people map at a location."""
        if addresses:
            self.foreign[location] = addresses
            self.idle.discard(location)
        elif self.foreign.pop(location, None):
            self._touched(location, location in self.desired.at)

    def _own(self, location: str, item: Address) -> Refs:
        """Of the services in an entry, those that are ours."""
        foreign = self.foreign.get(location, {}).get(item.address)
        if not foreign:
            return item.services
        return tuple(name for name in item.services if name not in foreign)

    def fill(self, rows: Iterable[tuple[str, str, Seen]], located: dict[str, bool]) -> None:
        """Take over what was held when we stopped. Rows come ordered by location."""
        visited: set[str] = set()
        for location, group in itertools.groupby(rows, key=lambda row: row[0]):
            visited.add(location)
            held = {address: seen for _, address, seen in group}
            for address, seen in held.items():
                for name in possible(seen):
                    add(self.mapped, name, 1)
                add(self.population, location, bool(possible(seen)))
                self._compare(location, address, seen)
            self._lacking(location, held)
        for location in self.desired.at.keys() - visited:
            self._lacking(location, {})
        self.located = located
        self.idle = located.keys() - self.desired.at.keys()
        self.desired.loading = False
        self.stirred = bool(self.deviant or self.idle)

    def _lacking(self, location: str, held: dict[str, Seen]) -> None:
        """All that a location should have beyond what is held there."""
        odd = {a: NONE for a, wish in self.desired.wishes(location) if wish and a not in held}
        if not odd:
            return
        self.deviant.setdefault(location, {}).update(odd)
        for address in odd:
            for name in self.desired.refs(location, address):
                add(self.unsettled, name, 1)

    def _compare(self, location: str, address: str, seen: Seen) -> None:
        wish = self.desired.refs(location, address)
        if seen != wish:
            self._store(location, address, seen, wish)

    # --- requests ---

    def begin(self, call: LocationCall) -> Before:
        """A request leaves: what it carries is not known until its outcome is."""
        before = Before({}, {location: self.located.get(location) for location in call.locations()})
        for entry in call.batch.locations:
            for item in entry.addresses:
                own = self._own(entry.location, item)
                self._doubt(before, entry.location, item.address, own)
            for address in call.emptied.get(entry.location, ()):
                self._doubt(before, entry.location, address, NONE)
            self.busy.add(entry.location)
            if entry.action is Action.FULL or not entry.addresses:
                self.locate(entry.location, False, keep=False)
        return before

    def _doubt(self, before: Before, location: str, address: str, sent: Iterable[str]) -> None:
        seen = self.seen(location, address)
        before.seen[Key(location, address)] = seen
        union = tuple(sorted({*possible(seen), *sent}))
        self.see(location, address, Maybe(union), keep=False)

    def acknowledge(self, call: LocationCall) -> None:
        """The provider took it: exactly what was sent is what it holds there now."""
        for entry in call.batch.locations:
            location = entry.location
            self.busy.discard(location)
            if not entry.addresses or entry.action is Action.FULL:
                listed = {item.address for item in entry.addresses}
                for address in [a for a in self.deviant.get(location, ()) if a not in listed]:
                    self.see(location, address, NONE)
            for item in entry.addresses:
                self.see(location, item.address, self._own(location, item))
            if not entry.addresses:
                self.locate(location, None)
            else:
                # A location that was emptied address by address may be left there, or be gone.
                left = location in self.foreign or bool(self.population.get(location))
                self.locate(location, left)

    def give_up(self, call: LocationCall, before: Before, *, applied: bool | None) -> None:
        """It failed. `applied` False: surely not done. None: nobody knows, and the rows say so."""
        for location in call.locations():
            self.busy.discard(location)
            if applied is None:
                self.dirty_locations.add(location)
            else:
                self.locate(location, before.located[location])
        for key, seen in before.seen.items():
            if applied is None:
                self.dirty.add(key)
            else:
                self.see(*key, seen)

    def next_batch(
        self,
        limits: Limits,
        *,
        removals: bool,
        skip: Callable[[Key], bool],
        suspects: dict[Key, int],
    ) -> LocationCall | None:
        """The next batch, in an order that follows from the state alone.

        `removals`: whether anything may be taken away yet. `skip`: keys in quarantine. `suspects`:
        keys of a batch that was refused, with the size that a batch with them may have.
        """
        places = sorted(self.deviant.keys() | self.idle)
        start = next((i for i, place in enumerate(places) if place > self.cursor), 0)
        builder = Builder(limits, suspects)
        for place in places[start:] + places[:start]:
            if place in self.busy:
                continue
            if not self._add(builder, place, removals, skip):
                break
            self.cursor = place
        return builder.call()

    def _add(
        self, builder: Builder, location: str, removals: bool, skip: Callable[[Key], bool]
    ) -> bool:
        """Put one location into the batch; False when the batch is full."""
        odd = self.deviant.get(location, {})
        foreign = self.foreign.get(location, {})
        if location not in self.desired.at and self.foreign_known and not foreign:
            gone = skip(Key(location, WHOLE)) or not removals
            return gone or builder.delete(location, odd)
        full = self.located.get(location) is not True and not foreign
        full = full and location in self.desired.at
        wishes: dict[str, Refs] = {}
        shrinking = growing = False
        for address in sorted(odd):
            wish = self.desired.refs(location, address)
            less = not set(possible(odd[address])) <= set(wish)
            if less and not removals:
                if full:  # it would take this one away unsaid
                    return True
                continue
            if skip(Key(location, address)):
                continue
            shrinking, growing = shrinking or less, growing or bool(wish)
            if wish or not full:
                wishes[address] = wish
        if not wishes:
            # Nothing to put, but what may be left of an earlier request has to go.
            doubtful = full and removals and location in self.located and bool(odd)
            return not doubtful or builder.delete(location, odd)
        for address in wishes.keys() & foreign.keys():
            wishes[address] = tuple(sorted({*wishes[address], *foreign[address]}))
        return builder.put(location, wishes, full=full, whole=shrinking and growing)


def possible(seen: Seen) -> Refs:
    """Every service that may be there."""
    return seen.refs if isinstance(seen, Maybe) else seen


def add(counts: dict[str, int], name: str, step: int) -> None:
    """Count, and forget what is back at nothing."""
    value = counts.get(name, 0) + step
    if value:
        counts[name] = value
    else:
        counts.pop(name, None)
