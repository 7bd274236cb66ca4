"""What the provider really holds, compared with what we believe; the difference is repaired.

A reading says nothing about what changed, or was under way, while it went on. What it shows that we
did not know becomes what we know, and the ordinary difference then repairs it. What is not wanted
and carries a name of our making is swept, once every source was listed completely; names are
compared whole, never by their beginning, and what is not ours by its exact name stays.
"""

from __future__ import annotations

from services.nrp_sync import operations
from services.nrp_sync.core import member_of, settle, start, stirred
from services.nrp_sync.desired import NONE, Kind, Name
from services.nrp_sync.operations import BALANCER, POOL, REGISTRATION, Mark, Operation, Phase
from services.nrp_sync.provider import (
    DEFAULT_SERVICE,
    LoadBalancer,
    NatGateway,
    PublicAddress,
    ServiceRegistration,
    asked,
    canonical_ip,
    canonical_names,
)
from services.nrp_sync.state import Flight, OpKey, Snapshot, State
from services.nrp_sync.wishes import (
    InboundSpec,
    OutboundSpec,
    Spec,
    is_uid,
    load_balancer,
    nat_gateway,
    owner_of_public_ip,
)


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
    """Take a complete reading."""
    shown = _Shown(snapshot)
    first = not state.read_at
    found = 0
    for key in sorted(state.operations):
        if key not in flight.touched_ops and not state.operations[key].flight:
            found += _compare(state, state.operations[key], shown, now)
    if state.complete:
        for kind, identity in shown.unclaimed(set(state.operations) | flight.touched_ops):
            found += 1
            _adopt(state, kind, identity, shown, now)
    found += _locations(state, flight, snapshot)
    state.read_at = now
    state.dirty_view = True
    if first:
        state.note("first_read")
    elif found:
        state.drift_found += found
        state.note("drift_found_total", value=found)
    stirred(state, now)


def _compare(state: State, op: Operation, shown: _Shown, now: float) -> int:
    marks = shown.marks(op)
    applied = shown.put_with(op)
    addresses = {
        name: shown.public_ips[name].address or "" for name in marks if name in shown.public_ips
    }
    if (marks, applied, addresses) == (op.marks, op.applied, op.addresses):
        return 0
    op.marks, op.applied, op.addresses = marks, applied, addresses
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


def _locations(state: State, flight: Flight, snapshot: Snapshot) -> int:
    provided = state.provided
    shown: dict[str, dict[str, tuple[str, ...]]] = {}
    for entry in snapshot.locations:
        addresses = {
            canonical_ip(item.address): tuple(
                name for name in canonical_names(item.services) if name != DEFAULT_SERVICE
            )
            for item in entry.addresses
        }
        # What only the provider's own service uses is none of our business.
        ours = {address: names for address, names in addresses.items() if names}
        if ours or not addresses:
            shown.setdefault(canonical_ip(entry.location), {}).update(ours)
    held = {key.location for key, _ in provided.held()}
    found = 0
    for location in sorted(shown.keys() | held | provided.located.keys()):
        if location in flight.touched_locations or location in provided.busy:
            continue
        found += _location(state, location, shown.get(location))
    return found


def _location(state: State, location: str, shown: dict[str, tuple[str, ...]] | None) -> int:
    provided = state.provided
    found = 0
    known = provided.desired.at.get(location, {}).keys() | provided.deviant.get(location, {}).keys()
    for address in sorted(known | (shown or {}).keys()):
        there = (shown or {}).get(address, NONE)
        if provided.seen(location, address) != there:
            provided.see(location, address, there)
            found += 1
    there_at_all = True if shown is not None else None
    if provided.located.get(location) is not there_at_all:
        provided.locate(location, there_at_all)
        found += 1
    return found
