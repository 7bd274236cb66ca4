"""What the provider really holds, compared with what we believe; the difference is repaired.

A reading says nothing about what changed, or was under way, while it went on. What it shows that we
did not know becomes what we know, and the ordinary difference then repairs it. What is not wanted
and carries a name of our making is swept, once every source was listed completely; names are
compared whole, never by their beginning, and what is not ours by its exact name stays.
"""

from __future__ import annotations

from typing import Final

from services.nrp_sync import operations
from services.nrp_sync.core import member_of, settle, start, stirred
from services.nrp_sync.operations import Operation
from services.nrp_sync.provider import (
    DEFAULT_SERVICE,
    LoadBalancer,
    NatGateway,
    PublicAddress,
    ServiceRegistration,
    asked,
)
from services.nrp_sync.shapes import parse_ip
from services.nrp_sync.sources import NONE, Kind, Name, Refs, family_of
from services.nrp_sync.state import Comparing, Flight, OpKey, Snapshot, State
from services.nrp_sync.steps import BALANCER, POOL, REGISTRATION, Mark, Phase
from services.nrp_sync.wishes import (
    InboundSpec,
    OutboundSpec,
    Spec,
    is_uid,
    load_balancer,
    nat_gateway,
    owner_of_public_ip,
)

AT_ONCE: Final = 20_000
"""Addresses that are compared in one go, some 10 ms."""


class _Shown:
    """A snapshot by name, the provider's own default left out."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.services: dict[str, ServiceRegistration] = {
            s.name.lower(): s
            for s in snapshot.services
            if s.name.lower() != DEFAULT_SERVICE and not s.default
        }
        self.balancers: dict[str, LoadBalancer] = {
            x.name.lower(): x for x in snapshot.load_balancers
        }
        self.gateways: dict[str, NatGateway] = {
            x.name.lower(): x for x in snapshot.nat_gateways if x.name.lower() != DEFAULT_SERVICE
        }
        self.public_ips: dict[str, PublicAddress] = {x.name.lower(): x for x in snapshot.public_ips}

    def marks(self, op: Operation) -> dict[str, Mark]:
        marks: dict[str, Mark] = {}
        service = self.services.get(op.identity)
        inbound = op.kind == "inbound"
        if service is not None and (service.kind.inbound if inbound else service.kind.outbound):
            marks[REGISTRATION] = Mark.YES
            feeds = service.load_balancer if inbound else service.nat_gateway
            if (feeds or "").lower() == op.identity:
                marks[POOL] = Mark.YES
        if op.identity in (self.balancers if inbound else self.gateways):
            marks[BALANCER] = Mark.YES
            if not inbound and self.gateways[op.identity].attached:
                marks.setdefault(POOL, Mark.MAYBE)
        for name in operations.public_ip_names(op.kind, op.identity):
            if name in self.public_ips:
                marks[name] = Mark.YES
        return marks

    def put_with(self, op: Operation) -> Spec | None:
        """The spec that explains the resource, None when it is absent or someone changed it."""
        for spec in (op.wanted, op.applied):
            if isinstance(spec, InboundSpec):
                balancer = self.balancers.get(op.identity)
                wanted = load_balancer(op.identity, spec)
                if balancer is not None and asked(balancer) == asked(wanted):
                    return spec
            elif isinstance(spec, OutboundSpec):
                gateway = self.gateways.get(op.identity)
                if gateway is not None and asked(gateway) == asked(nat_gateway(op.identity, spec)):
                    return spec
        return None

    def foreign(self, known: set[OpKey]) -> set[str]:
        """Services that are not ours: the provider's own, and inbound ones not named by us."""
        return {DEFAULT_SERVICE} | {
            name
            for name, service in self.services.items()
            if not service.kind.outbound and not is_uid(name) and ("inbound", name) not in known
        }

    def unclaimed(self, known: set[OpKey]) -> list[OpKey]:
        """Services at the provider that have a name of our making and no operation."""
        found: set[OpKey] = set()
        for name, service in self.services.items():
            if service.kind.inbound and is_uid(name):
                found.add(("inbound", name))
            if service.kind.outbound and not is_uid(name):
                found.add(("outbound", name))
        for name, balancer in self.balancers.items():
            if is_uid(name) and balancer.public_ip.lower() == f"{name}-pip":
                found.add(("inbound", name))
        for name, gateway in self.gateways.items():
            if gateway.attached and not is_uid(name):
                found.add(("outbound", name))
        for name, ip in self.public_ips.items():
            owner = owner_of_public_ip(name)
            if is_uid(owner) and (ip.attached_to or owner).lower() == owner:
                found.add(("inbound", owner))
        return sorted(found - known)


def reconcile(state: State, flight: Flight, snapshot: Snapshot, now: float) -> None:
    """Take a complete reading: resources at once, locations by `compare_some`."""
    shown = _Shown(snapshot)
    found = 0
    for key in sorted(state.operations):
        if key not in flight.touched_ops and not state.operations[key].flight:
            found += _compare(state, state.operations[key], shown, now)
    if state.complete:
        for kind, identity in shown.unclaimed(set(state.operations) | flight.touched_ops):
            found += 1
            _adopt(state, kind, identity, shown, now)
    provided = state.provided
    held, others = _split(snapshot, shown.foreign(set(state.operations)))
    left = held.keys() | provided.desired.at.keys() | provided.deviant.keys()
    left |= provided.located.keys() | others.keys() | provided.foreign.keys()
    state.comparing = Comparing(flight, held, others, sorted(left, reverse=True), found)
    compare_some(state, now)


def compare_some(state: State, now: float) -> None:
    """Compare some thousand addresses, so that a big reading holds up nobody for long."""
    work = state.comparing
    if work is None:
        return
    provided, budget = state.provided, AT_ONCE
    while work.left and budget > 0:
        location = work.left.pop()
        budget -= 1 + len(provided.desired.at.get(location, ()))
        if location not in work.flight.touched_locations and location not in provided.busy:
            provided.set_foreign(location, work.foreign.get(location, {}))
            work.found += _location(state, location, work.shown.get(location))
    stirred(state, now)
    if not work.left:
        state.comparing = None
        _finish(state, work.found, now)


def _finish(state: State, found: int, now: float) -> None:
    if not state.read_at:
        state.note("first_read")
    elif found:
        state.drift_found += found
        state.note("drift_found_total", value=found)
    state.read_at = now
    state.provided.foreign_known = True
    state.stuck = False
    state.dirty_view = True
    state.check_releases = True


def _compare(state: State, op: Operation, shown: _Shown, now: float) -> int:
    marks = shown.marks(op)
    applied = shown.put_with(op)
    addresses = {
        name: shown.public_ips[name].address or "" for name in marks if name in shown.public_ips
    }
    if (marks, applied, addresses) == (op.marks, op.applied, op.addresses):
        return 0
    op.marks, op.applied, op.addresses = marks, applied, addresses
    for key in [key for key, kept in state.quarantine.items() if op.identity in kept.wish]:
        del state.quarantine[key]  # what it was refused for is found, perhaps
        state.dirty_quarantine.add(key)
    operations.conclude(op)
    settle(state, op, now)
    return 1


def _adopt(state: State, kind: Kind, identity: str, shown: _Shown, now: float) -> None:
    """Something of ours that we have no row of: kept while its Service stands, else swept."""
    service = next((s for s in state.services.values() if s.identity == identity), None)
    op = start(state, (kind, identity), service.name if service else Name("", ""), now)
    op.marks = shown.marks(op)
    op.addresses = {
        name: shown.public_ips[name].address or "" for name in op.marks if name in shown.public_ips
    }
    op.phase = Phase.CREATED
    if kind == "inbound" and service is not None and service.claimed:
        op.cause = service.cause  # refused as it is now: what was provided stays served
        member_of(state, op)
    else:
        operations.unwish(op, orphan=True)
    settle(state, op, now)


def _split(
    snapshot: Snapshot, foreign: set[str]
) -> tuple[dict[str, dict[str, Refs]], dict[str, dict[str, Refs]]]:
    """Addresses with the services that are ours, and with those that are not, by location. Left out
    is what can be nobody's: no address, or another family than its location's."""
    ours: dict[str, dict[str, Refs]] = {}
    others: dict[str, dict[str, Refs]] = {}
    for entry in snapshot.locations:
        if parse_ip(entry.location) != entry.location:
            continue
        if not entry.addresses:
            ours[entry.location] = {}
        for item in entry.addresses:
            address, family = parse_ip(item.address), family_of(entry.location)
            if address != item.address or family_of(address) != family:
                continue
            theirs = foreign.intersection(item.services)
            own = tuple(name for name in item.services if name not in theirs)
            if own:
                ours.setdefault(entry.location, {})[address] = own
            if theirs:
                others.setdefault(entry.location, {})[address] = tuple(sorted(theirs))
    return ours, others


def _location(state: State, location: str, shown: dict[str, Refs] | None) -> int:
    provided = state.provided
    there = shown or {}
    known = provided.desired.at.get(location, {}).keys() | provided.deviant.get(location, {}).keys()
    wrong = [
        address
        for address in known | there.keys()
        if provided.seen(location, address) != there.get(address, NONE)
    ]
    for address in sorted(wrong):
        provided.see(location, address, there.get(address, NONE))
    found = len(wrong)
    there_at_all = True if shown is not None or location in provided.foreign else None
    if provided.located.get(location) is not there_at_all:
        provided.locate(location, there_at_all)
        found += 1
    return found
