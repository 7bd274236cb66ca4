"""What a batch makes of a gateway's collections, by the rules that a client can meet.

Pure: the collections go in, the collections after the batch come out, or an error and nothing has
changed. `memory.py` is the provider around it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from typing import TypeAlias

import msgspec

from services.nrp_sync.provider import (
    DEFAULT_SERVICE,
    Action,
    Address,
    AddressLocation,
    InUse,
    Invalid,
    LocationBatch,
    OverlayMappings,
    ServiceBatch,
    ServiceRegistration,
)

Services: TypeAlias = dict[str, ServiceRegistration]
Locations: TypeAlias = dict[str, dict[str, tuple[str, ...]]]


def services_after(
    held: Services,
    batch: ServiceBatch,
    locations: Locations,
    load_balancers: Collection[str],
    nat_gateways: Collection[str],
) -> Services:
    """The registrations after `updateServices`."""
    op = "update_services"
    after = dict(held)
    if batch.action is Action.FULL:
        after = {name: kept for name, kept in after.items() if kept.default}
    seen: set[str] = set()
    for update in batch.services:
        wanted = update.service
        name = wanted.name.lower()
        if name == DEFAULT_SERVICE or wanted.default:
            raise refused(
                op,
                "MultipleDefaultServicesNotAllowedInServiceGateway",
                f"service {wanted.name}: the gateway has its default service already",
            )
        if name in seen:
            raise refused(op, "DuplicateServicesInRequest", f"{name} is listed twice")
        seen.add(name)
        if update.delete:
            after.pop(name, None)
        else:
            after[name] = _registration(name, wanted, load_balancers, nat_gateways)
    gone = held.keys() - after.keys()
    if gone:
        _check_unmapped(op, gone, locations)
    return after


def _check_unmapped(op: str, gone: set[str], locations: Locations) -> None:
    for held in locations.values():
        for names in held.values():
            for name in gone.intersection(names):
                raise OverlayMappings(
                    op,
                    f"service {name} still has overlay mappings",
                    code="ServiceWithOverlayMappingsCannotBeDeleted",
                    status=400,
                )


def _registration(
    name: str,
    wanted: ServiceRegistration,
    load_balancers: Collection[str],
    nat_gateways: Collection[str],
) -> ServiceRegistration:
    for what, target, there in (
        ("load balancer", wanted.load_balancer, load_balancers),
        ("NAT gateway", wanted.nat_gateway, nat_gateways),
    ):
        if target is not None and target.lower() not in there:
            raise refused(
                "update_services",
                "InvalidResourceReference",
                f"service {name}: {what} {target} does not exist",
            )
    return msgspec.structs.replace(
        wanted,
        name=name,
        load_balancer=wanted.load_balancer.lower() if wanted.load_balancer else None,
        nat_gateway=wanted.nat_gateway.lower() if wanted.nat_gateway else None,
    )


def locations_after(held: Locations, batch: LocationBatch, services: Services) -> Locations:
    """The locations after `updateAddressLocations`."""
    after = {} if batch.action is Action.FULL else dict(held)
    for entry in batch.canonical().locations:
        _check_location(entry, services)
        kept = {} if entry.action is Action.FULL else dict(after.get(entry.location, {}))
        if not entry.addresses:
            kept = {}
        kept.update({item.address: item.services for item in entry.addresses})
        kept = {address: names for address, names in kept.items() if names}
        if kept:
            after[entry.location] = kept
        else:
            after.pop(entry.location, None)
    return after


def _check_location(entry: AddressLocation, services: Services) -> None:
    op = "update_address_locations"
    try:
        family = ipaddress.ip_address(entry.location).version
        families = [(i, ipaddress.ip_address(i.address).version) for i in entry.addresses]
    except ValueError as error:
        raise refused(op, "InvalidIPAddress", str(error)) from error
    for item, version in families:
        if version != family:
            code = f"IPv{family}LocationCannotContainIPv{version}Addresses"
            raise refused(op, code, f"{item.address} under {entry.location}")
        for name in item.services:
            if name not in services:
                raise refused(op, "ServiceNotFound", f"{item.address}: no service {name}")


def shown_locations(held: Locations) -> list[AddressLocation]:
    """All of them, ordered."""
    return [
        AddressLocation(
            location=location,
            addresses=tuple(
                Address(address=address, services=names)
                for address, names in sorted(addresses.items())
            ),
        )
        for location, addresses in sorted(held.items())
    ]


def refused(op: str, code: str, message: str) -> Invalid:
    """400."""
    return Invalid(op, message, code=code, status=400)


def in_use(op: str, code: str, message: str) -> InUse:
    """400 as well, of what something else uses."""
    return InUse(op, message, code=code, status=400)
