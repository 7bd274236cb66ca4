"""What is said to a network resource provider and read from it: plain values, in canonical form.

Services, locations, addresses, public IPs, load balancers and NAT gateways as the engine sees them,
whichever cloud stands behind the port in `provider.py`. An address has one spelling, so that what
is read equals what was put.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from enum import StrEnum
from typing import Final, Literal, TypeVar

import msgspec

DEFAULT_SERVICE = "default-natgw"
"""The provider's own egress: never created, changed, deleted or counted by us."""


class Action(StrEnum):
    """How far an update reaches: the listed entries, or the whole collection."""

    PARTIAL = "PartialUpdate"
    FULL = "FullUpdate"


class ServiceKind(StrEnum):
    """In which direction a registered service carries traffic."""

    INBOUND = "Inbound"
    OUTBOUND = "Outbound"
    BOTH = "InboundOutbound"

    @property
    def inbound(self) -> bool:
        """True when load balancers may send traffic to its addresses."""
        return self is not ServiceKind.OUTBOUND

    @property
    def outbound(self) -> bool:
        """True when its addresses leave through a NAT gateway."""
        return self is not ServiceKind.INBOUND


class ServiceRegistration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A service as the gateway knows it.

    `load_balancer` names the load balancer whose pool (of the same name) it feeds, `nat_gateway`
    the gateway it leaves by; None clears the reference, explicitly.
    """

    name: str
    kind: ServiceKind
    load_balancer: str | None = None
    nat_gateway: str | None = None
    default: bool = False
    """As read: the provider's default for its direction."""


class ServiceUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of a service batch: put this registration, or remove it."""

    service: ServiceRegistration
    delete: bool = False


class ServiceBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One `updateServices` call. FULL replaces every registration, also with nothing."""

    services: tuple[ServiceUpdate, ...]
    action: Action = Action.PARTIAL


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A pod address and all services it backs. Without services: delete this address."""

    address: str
    services: tuple[str, ...] = ()


class AddressLocation(msgspec.Struct, frozen=True, kw_only=True):
    """A node address and the pod addresses behind it. Without addresses: delete this location."""

    location: str
    addresses: tuple[Address, ...] = ()
    action: Action = Action.PARTIAL


class LocationBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One `updateAddressLocations` call."""

    locations: tuple[AddressLocation, ...]
    action: Action = Action.PARTIAL

    def canonical(self) -> LocationBatch:
        """The same batch with every key once, in canonical text and in a fixed order.

        Entries that name one location in two spellings are merged (the provider refuses
        duplicates, and dropping the second would lose its addresses).
        """
        merged: dict[str, dict[str, set[str]]] = {}
        full: set[str] = set()
        for entry in self.locations:
            key = canonical_ip(entry.location)
            addresses = merged.setdefault(key, {})
            if entry.action is Action.FULL:
                full.add(key)
            for item in entry.addresses:
                addresses.setdefault(canonical_ip(item.address), set()).update(
                    name.lower() for name in item.services
                )
        return LocationBatch(
            action=self.action,
            locations=tuple(
                AddressLocation(
                    location=location,
                    action=Action.FULL if location in full else Action.PARTIAL,
                    addresses=tuple(
                        Address(address=address, services=tuple(sorted(addresses[address])))
                        for address in sorted(addresses)
                    ),
                )
                for location, addresses in sorted(merged.items())
            ),
        )


class PublicAddress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A public IP of ours by name. Static: it keeps its address until it is deleted."""

    name: str
    family: Literal[4, 6] = 4
    address: str | None = None
    """As read: the address the provider gave, None while it has given none."""
    attached_to: str | None = None
    """As read: the name of the load balancer or NAT gateway that uses it."""
    etag: str = ""


class Rule(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One forwarded port. Its name at the provider follows from protocol and frontend port."""

    protocol: Literal["Tcp", "Udp"]
    frontend_port: int
    backend_port: int
    idle_timeout_minutes: int = 4

    @property
    def name(self) -> str:
        """`rule-tcp-80` and the like."""
        return f"rule-{self.protocol.lower()}-{self.frontend_port}"


class LoadBalancer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A load balancer of ours: one frontend on a public IP, one pool of its own name, rules."""

    name: str
    public_ip: str
    """Name of the public IP of the frontend."""
    rules: tuple[Rule, ...] = ()
    """Kept in order of protocol and port, so that what is read equals what was put."""
    etag: str = ""


class NatGateway(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A NAT gateway of ours, its public IPs by name, and whether our gateway uses it."""

    name: str
    public_ips: tuple[str, ...] = ()
    public_ips_v6: tuple[str, ...] = ()
    attached: bool = True
    etag: str = ""


Resource = TypeVar("Resource", PublicAddress, LoadBalancer, NatGateway)


def asked(resource: Resource) -> Resource:
    """The part of a resource that we decide, in fixed order: compare two of these for drift."""
    if isinstance(resource, PublicAddress):
        return msgspec.structs.replace(resource, address=None, attached_to=None, etag="")
    if isinstance(resource, LoadBalancer):
        return msgspec.structs.replace(resource, rules=tuple(sorted(resource.rules)), etag="")
    return msgspec.structs.replace(
        resource,
        public_ips=tuple(sorted(resource.public_ips)),
        public_ips_v6=tuple(sorted(resource.public_ips_v6)),
        etag="",
    )


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    """The provider has taken a batch. `request_id` is its own, for its support and our history."""

    request_id: str
    status: int = 200
    """200: done at once. 202: it took a while and we waited for its end. 0: nothing was sent."""


_COMPATIBLE: Final = ipaddress.ip_network("::/96")


def parse_ip(text: str) -> str | None:
    """The canonical address in a text, None when it is none (a name, a zone, a prefix).

    IPv4 in IPv6 clothes (`::ffff:10.0.0.1`) is that IPv4 address. The rest of ::/96 is nothing that
    a pod or a node can have, and is spelled differently by different libraries.
    """
    try:
        address = ipaddress.ip_address(text.strip())
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        if address.scope_id is not None or address in _COMPATIBLE:
            return None
    return str(address)


def canonical_ip(text: str) -> str:
    """The one spelling of an address; text that is no address stays as it is, in lower case."""
    return parse_ip(text) or text.strip().lower()


def canonical_names(names: Iterable[str]) -> tuple[str, ...]:
    """Service names as a set: lower case, once each, ordered."""
    return tuple(sorted({name.lower() for name in names}))
