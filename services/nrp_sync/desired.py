"""Which address, behind which node, should carry which services: the wish, kept up to date.

Sources are the rows of EndpointSlices and of egress pods, each with its node's name. A source is
filed under the location (the node's InternalIP of the address's own family), so an address that two
slices list stays while one of them does. One changed endpoint costs one dictionary entry, whatever
the size of the cluster; a node that moves costs the addresses behind it.

An address on an unknown node waits for it, visibly. An address counts for a service of its own
family only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from sys import intern
from typing import Literal, TypeAlias

from services.nrp_sync.sources import (
    NONE,
    NOWHERE,
    Location,
    Member,
    Name,
    Reading,
    Refs,
    Source,
)

Held: TypeAlias = Source | tuple[Source, ...]
Changed: TypeAlias = Callable[[str, str, Refs, Refs], None]
"""Told of each (location, address) whose services changed: before and after."""
Touched: TypeAlias = Callable[[str, bool], None]
"""Told of each location that got its first source, or lost its last."""


class Desired:
    """The wish for every address, and what it is made of."""

    def __init__(self, changed: Changed, touched: Touched) -> None:
        self._changed, self._touched = changed, touched
        self.loading = False
        """Rows are being read: nobody is told, who reads them compares in the end."""
        self.slices: dict[Name, Source] = {}
        self.pods: dict[Name, Source] = {}
        self.nodes: dict[str, Location] = {}
        self.at: dict[str, dict[str, Held]] = {}
        self.members: dict[Name, tuple[str, Member]] = {}
        """Service to its uid and member."""
        self.by_service: dict[Name, dict[Source, None]] = {}
        self.waiting: dict[str, set[Source]] = {}
        """Node that is unknown, or lacks an address of the family, to who waits for it."""
        self.changed_rows: set[tuple[Name, str]] = set()
        """(slice, address) whose row has to be written or deleted."""
        self._interned: dict[Refs, Refs] = {NONE: NONE}

    # --- questions ---

    def refs(self, location: str, address: str) -> Refs:
        """The services that the address should carry there, () when it should not be there."""
        addresses = self.at.get(location)
        held = addresses.get(address) if addresses is not None else None
        return NONE if held is None else self._carried(address, held)

    def wishes(self, location: str) -> Iterator[tuple[str, Refs]]:
        """Every address that is listed at a location, with the services that it should carry."""
        for address, held in self.at.get(location, {}).items():
            yield address, self._carried(address, held)

    def _carried(self, address: str, held: Held) -> Refs:
        if isinstance(held, Source):
            member = held.member
            return member.alone if member is not None and member.takes(address) else NONE
        names = {s.member.identity for s in held if s.member and s.member.takes(address)}
        refs = tuple(sorted(names))
        return self._interned.setdefault(refs, refs)

    def addresses_of(self, member: Member) -> Iterator[tuple[str, str]]:
        """Every (location, address) that a member's sources list, some perhaps twice."""
        for source in member.sources:
            for address, node in source.endpoints.items():
                location = self.nodes.get(node, NOWHERE).of(address)
                if location is not None:
                    yield location, address

    def waiting_for(self, member: Member) -> list[str]:
        """The nodes that addresses of a member wait for, in order."""
        return sorted(
            node
            for node, sources in self.waiting.items()
            if any(source.member is member for source in sources)
        )

    # --- slices and pods ---

    def put_slice(self, reading: Reading) -> Source:
        source = self.slices.get(reading.name)
        if source is None:
            source = self.hold(Source(reading.name, reading.uid))
        if (source.service, source.service_uid) != (reading.service, reading.service_uid):
            self._clear(source)
            self._leave_service(source)
            source.service, source.service_uid = reading.service, reading.service_uid
            self._feed_service(source)
            if source.service is not None:
                self._join(source, *self.members.get(source.service, ("", None)))
        source.uid, source.left_out = reading.uid, reading.left_out
        self._replace(source, reading.endpoints)
        return source

    def hold(self, source: Source) -> Source:
        """Take in a slice that is not known yet, without its endpoints. Texts that many slices
        share are held once."""
        name = source.name = Name(intern(source.name.namespace), source.name.name)
        self.slices[name] = source
        self._feed_service(source)
        return source

    def _feed_service(self, source: Source) -> None:
        if source.service is None:
            return
        siblings = self.by_service.setdefault(source.service, {})
        source.service = next(iter(siblings), source).service
        source.service_uid = intern(source.service_uid)
        siblings[source] = None

    def drop_slice(self, name: Name) -> None:
        source = self.slices.pop(name, None)
        if source is not None:
            self._clear(source)
            self._leave_service(source)

    def restore(self, name: Name, address: str, node: str) -> None:
        """Add a row of a slice that is known already."""
        source = self.slices[name]
        node = intern(node)
        source.put(address, node)
        self._file(source, address, node)

    def put_pod(self, reading: Reading, member: Member | None) -> Source:
        source = self.pods.get(reading.name)
        if source is None:
            source = self.pods[reading.name] = Source(reading.name, reading.uid)
        if source.member is not member:
            self._clear(source)
            self._enter(source, member)
        source.uid, source.left_out = reading.uid, reading.left_out
        self._replace(source, reading.endpoints)
        return source

    def drop_pod(self, name: Name) -> None:
        source = self.pods.pop(name, None)
        if source is not None:
            self._clear(source)
            self._enter(source, None)

    def _replace(self, source: Source, endpoints: dict[str, str]) -> None:
        old = source.endpoints
        for address in [a for a, node in old.items() if endpoints.get(a) != node]:
            self._remove(source, address)
        held = source.endpoints
        for address in [a for a in endpoints if a not in held]:
            node = intern(endpoints[address])
            source.put(address, node)
            self.changed_rows.add((source.name, address))
            self._file(source, address, node)

    def _clear(self, source: Source) -> None:
        for address in list(source.endpoints):
            self._remove(source, address)

    def _remove(self, source: Source, address: str) -> None:
        node = source.endpoints[address]
        self._unfile(source, address, node)
        source.drop(address)
        self.changed_rows.add((source.name, address))
        if node in self.waiting:
            self._stop_waiting(source, node)

    def _stop_waiting(self, source: Source, node: str) -> None:
        if node not in source.endpoints.values():
            sources = self.waiting[node]
            sources.discard(source)
            if not sources:
                del self.waiting[node]

    def _file(self, source: Source, address: str, node: str) -> None:
        location = self.nodes.get(node, NOWHERE).of(address)
        if location is None:
            self.waiting.setdefault(node, set()).add(source)
            return
        addresses = self.at.get(location)
        if addresses is None:
            addresses = self.at[location] = {}
            if not self.loading:
                self._touched(location, True)
        before, held = NONE, addresses.get(address)
        if held is None:
            addresses[address] = source
        else:
            before = self._carried(address, held)
            addresses[address] = (*(held if isinstance(held, tuple) else (held,)), source)
        self._tell(location, address, before)

    def _unfile(self, source: Source, address: str, node: str) -> None:
        location = self.nodes.get(node, NOWHERE).of(address)
        addresses = self.at.get(location) if location is not None else None
        if location is None or addresses is None:
            return
        held = addresses[address]
        before = self._carried(address, held)
        rest = tuple(s for s in held if s is not source) if isinstance(held, tuple) else ()
        if rest:
            addresses[address] = rest if len(rest) > 1 else rest[0]
        else:
            del addresses[address]
        if not addresses:
            del self.at[location]
        self._tell(location, address, before)
        if not addresses and not self.loading:
            self._touched(location, False)

    def _tell(self, location: str, address: str, before: Refs) -> None:
        if self.loading:
            return
        after = self.refs(location, address)
        if after != before:
            self._changed(location, address, before, after)

    # --- services ---

    def bind(self, service: Name, uid: str, member: Member | None) -> None:
        """From now on the slices of this Service (the one with this uid) feed this member."""
        if member is None:
            self.members.pop(service, None)
        else:
            self.members[service] = (uid, member)
        for source in self.by_service.get(service, ()):
            fits = member is not None and source.service_uid in ("", uid)
            if source.member is not (member if fits else None):
                self._flip([source], lambda s=source: self._join(s, uid, member))  # type: ignore[misc]

    def set_member(self, member: Member, *, ready: bool, family: Literal[0, 4, 6]) -> None:
        """Change what all addresses of a service depend on."""
        if (member.ready, member.family) == (ready, family):
            return

        def change() -> None:
            member.ready, member.family = ready, family

        self._flip(member.sources, change)

    def _flip(self, sources: Iterable[Source], change: Callable[[], None]) -> None:
        if self.loading:
            change()
            return
        before = {
            (location, address): self.refs(location, address)
            for source in sources
            for address, node in source.endpoints.items()
            if (location := self.nodes.get(node, NOWHERE).of(address)) is not None
        }
        change()
        for (location, address), refs in before.items():
            self._tell(location, address, refs)

    def _join(self, source: Source, uid: str, member: Member | None) -> None:
        self._enter(source, member if source.service_uid in ("", uid) else None)

    def _enter(self, source: Source, member: Member | None) -> None:
        if source.member is not None:
            source.member.sources.pop(source, None)
        source.member = member
        if member is not None:
            member.sources[source] = None

    def _leave_service(self, source: Source) -> None:
        self._enter(source, None)
        if source.service is None:
            return
        sources = self.by_service[source.service]
        del sources[source]
        if not sources:
            del self.by_service[source.service]

    # --- nodes ---

    def put_node(self, name: str, location: Location) -> None:
        """A node appeared, changed its addresses, or (NOWHERE) went away."""
        old = self.nodes.get(name, NOWHERE)
        if location == old:
            if location != NOWHERE:
                self.nodes[name] = location
            return
        moving = [
            (source, address)
            for place, next_place in zip(old, location, strict=True)
            if place is not None and place != next_place
            for address, held in self.at.get(place, {}).items()
            for source in (held if isinstance(held, tuple) else (held,))
            if source.endpoints.get(address) == name
        ]
        moving += [
            (source, address)
            for source in self.waiting.pop(name, ())
            for address, node in source.endpoints.items()
            if node == name and old.of(address) is None
        ]
        for source, address in moving:
            self._unfile(source, address, name)
        if location == NOWHERE:
            self.nodes.pop(name, None)
        else:
            self.nodes[name] = location
        for source, address in moving:
            self._file(source, address, name)
