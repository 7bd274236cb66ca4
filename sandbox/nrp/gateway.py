"""One service gateway: its registered services and the addresses that map to them.

Every update is checked in full before anything of it is applied, so a refused request changes
nothing. The cost of an update grows with the request, never with what the gateway holds.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sandbox.nrp.arm import ArmError, Doc, bad, check_name, ip, listed, new_etag, objects

DEFAULT = "default-natgw"
FULL, PARTIAL = "FullUpdate", "PartialUpdate"

_TYPES = {name.lower(): name for name in ("Inbound", "Outbound", "InboundOutbound")}
_ABSENT = object()


@dataclass(slots=True)
class Service:
    """A registration, as the list of services shows it."""

    name: str
    kind: str
    pools: list[Doc] = field(default_factory=list)
    nat_gateway: str | None = None
    default: bool = False
    etag: str = field(default_factory=new_etag)

    def doc(self) -> Doc:
        """As the wire has it."""
        shown: Doc = {
            "serviceType": self.kind,
            "isDefault": self.default,
            "loadBalancerBackendPools": self.pools,
            "provisioningState": "Succeeded",
        }
        if self.nat_gateway is not None:
            shown["publicNatGatewayId"] = self.nat_gateway
        return {"name": self.name, "etag": self.etag, "properties": shown}


Locations = dict[str, dict[str, tuple[str, ...]]]
"""Location to address to names of services, all in canonical text."""


class Gateway:
    """The two collections of a gateway. `exists` says whether a referenced resource does."""

    def __init__(self, exists: Callable[[str], bool], *, max_services: int, max_addresses: int):
        self.services: dict[str, Service] = {}
        self.locations: Locations = {}
        self._mapped: Counter[str] = Counter()
        self._addresses = 0
        self._exists = exists
        self._max_services = max_services
        self._max_addresses = max_addresses

    # -- services ---------------------------------------------------------------------------

    def update_services(self, body: Doc) -> Callable[[], None]:
        """Check the request; the answer applies it. ArmError when it is refused."""
        full = _action(body, "action") == FULL
        puts: dict[str, Service] = {}
        gone: set[str] = set()
        for position, entry in enumerate(_entries(body, "serviceRequests")):
            where = f"serviceRequests[{position}]"
            service = entry.get("service")
            if not isinstance(service, dict):
                raise bad("InvalidRequestFormat", f"{where}.service must be an object")
            key = check_name(service.get("name"), f"{where}.service.name").lower()
            _refuse_default(key, service)
            if key in puts or key in gone:
                raise bad("DuplicateServicesInRequest", f"{where}: service {key} is listed twice")
            if entry.get("isDelete") is True:
                gone.add(key)
            else:
                puts[key] = self._merged(where, service, None if full else self.services.get(key))
        if full:
            gone |= {k for k, s in self.services.items() if k not in puts and not s.default}
        self._check_unmapped(gone)
        fewer = sum(key in self.services for key in gone)
        more = sum(key not in self.services for key in puts)
        if more > fewer and len(self.services) - fewer + more > self._max_services:
            raise bad("QuotaExceeded", f"the gateway takes at most {self._max_services} services")

        def apply() -> None:
            for key in gone:
                self.services.pop(key, None)
            self.services.update(puts)

        return apply

    def _merged(self, where: str, service: Doc, old: Service | None) -> Service:
        """What the entry makes of the registration: absent fields keep what they had."""
        given = service.get("properties")
        if not isinstance(given, dict):
            raise bad("InvalidRequestFormat", f"{where}.service.properties must be an object")
        kind = _TYPES.get(str(given.get("serviceType", "")).lower())
        if kind is None:
            raise bad(
                "InvalidServiceType",
                f"{where}: serviceType is {given.get('serviceType')!r}, "
                f"it must be one of {', '.join(_TYPES.values())}",
            )
        pools = listed(given, "loadBalancerBackendPools")
        if pools is None:
            pools = old.pools if old else []
        else:
            pools = [self._pool(where, pool) for pool in objects(pools, f"{where} pools")]
        if pools and kind == "Outbound":
            raise bad("InvalidServiceType", f"{where}: an Outbound service has no backend pools")
        nat = given.get("publicNatGatewayId", _ABSENT)
        if nat is _ABSENT:
            nat = old.nat_gateway if old else None
        elif nat is not None:
            self._known(f"{where}.publicNatGatewayId", nat)
            if kind == "Inbound":
                raise bad("InvalidServiceType", f"{where}: an Inbound service has no NAT gateway")
        return Service(name=service["name"], kind=kind, pools=pools, nat_gateway=nat)

    def _pool(self, where: str, pool: Doc) -> Doc:
        self._known(f"{where}.loadBalancerBackendPools.id", pool.get("id"))
        return {key: value for key, value in pool.items() if key in ("id", "name", "properties")}

    def _known(self, where: str, target: Any) -> None:
        if not isinstance(target, str) or not self._exists(target):
            raise bad("InvalidResourceReference", f"{where}: {target!r} does not exist")

    def _check_unmapped(self, names: set[str]) -> None:
        for name in sorted(names):
            if self._mapped[name]:
                raise bad(
                    "ServiceWithOverlayMappingsCannotBeDeleted",
                    f"service {name} still has {self._mapped[name]} overlay mappings",
                )

    # -- address locations ------------------------------------------------------------------

    def update_locations(self, body: Doc) -> Callable[[], None]:
        """Check the request; the answer applies it. ArmError when it is refused."""
        full = _action(body, "action") == FULL
        changes: dict[str, tuple[bool, dict[str, tuple[str, ...]]]] = {}
        for position, entry in enumerate(_entries(body, "addressLocations")):
            where = f"addressLocations[{position}]"
            location = ip(entry.get("addressLocation"), f"{where}.addressLocation")
            key = str(location)
            if key in changes:
                raise bad("DuplicateLocationsInRequest", f"{where}: location {key} is listed twice")
            # Where the whole collection is replaced, nothing old is left to be partly updated.
            replace = _action(entry, "addressUpdateAction") == FULL or full
            changes[key] = (replace, self._addresses_of(where, entry, location.version))
        result = {key: self._location_after(key, *change) for key, change in changes.items()}
        if full:
            result = {key: {} for key in self.locations} | result
        before = sum(len(self.locations.get(key, ())) for key in result)
        total = self._addresses - before + sum(map(len, result.values()))
        if total > self._max_addresses and total > self._addresses:
            raise bad("QuotaExceeded", f"the gateway takes at most {self._max_addresses} addresses")

        def apply() -> None:
            for key, addresses in result.items():
                self.set_location(key, addresses)

        return apply

    def _addresses_of(self, where: str, entry: Doc, family: int) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        values = listed(entry, "addresses", required=True) or []
        for position, item in enumerate(objects(values, f"{where}.addresses")):
            at = f"{where}.addresses[{position}]"
            address = ip(item.get("address"), f"{at}.address")
            if address.version != family:
                raise bad(
                    f"IPv{family}LocationCannotContainIPv{address.version}Addresses",
                    f"{at}: {address} does not belong under an IPv{family} location",
                )
            if str(address) in found:
                raise bad("DuplicateAddressesInRequest", f"{at}: {address} is listed twice")
            found[str(address)] = self._services_of(at, item)
        return found

    def _services_of(self, at: str, item: Doc) -> tuple[str, ...]:
        names = []
        for name in listed(item, "services", required=True) or []:
            key = str(name).lower()
            if key not in self.services:
                raise bad("ServiceNotFound", f"{at}: service {name!r} is not registered")
            names.append(key)
        return tuple(sorted(set(names)))

    def _location_after(
        self, key: str, replace: bool, listed_now: dict[str, tuple[str, ...]]
    ) -> dict[str, tuple[str, ...]]:
        if not listed_now:  # a listed location without addresses is a deletion
            return {}
        after = {} if replace else dict(self.locations.get(key, {}))
        after.update(listed_now)
        return {address: services for address, services in after.items() if services}

    def set_location(self, key: str, addresses: dict[str, tuple[str, ...]]) -> None:
        """Replace one location as it is given, and keep the counts that checks rely on."""
        old = self.locations.pop(key, {})
        self._addresses += len(addresses) - len(old)
        for services in old.values():
            self._mapped.subtract(services)
        for services in addresses.values():
            self._mapped.update(services)
        for services in old.values():
            for name in services:
                if not self._mapped[name]:
                    del self._mapped[name]
        if addresses:
            self.locations[key] = addresses

    # -- reading ----------------------------------------------------------------------------

    def service_page(self, after: str, size: int) -> tuple[list[Doc], str | None]:
        """The services behind a key, in order, and the key to go on from."""
        keys = sorted(key for key in self.services if key > after)
        return _page(keys, size, lambda key: self.services[key].doc())

    def location_page(self, after: str, size: int) -> tuple[list[Doc], str | None]:
        """The locations behind a key, in order, and the key to go on from."""
        keys = sorted(key for key in self.locations if key > after)
        return _page(keys, size, self.location_doc)

    def location_doc(self, key: str) -> Doc:
        """One location as the wire has it."""
        return {
            "addressLocation": key,
            "addresses": [
                {"address": address, "services": list(services)}
                for address, services in self.locations[key].items()
            ],
        }

    def users_of(self, target: str) -> list[str]:
        """Names of the services that refer to a resource (or to a part of it)."""
        key = target.lower()
        return [
            service.name
            for service in self.services.values()
            if (service.nat_gateway or "").lower() == key
            or any(str(pool.get("id", "")).lower().startswith(key + "/") for pool in service.pools)
        ]


def _page(keys: list[str], size: int, show: Callable[[str], Doc]) -> tuple[list[Doc], str | None]:
    shown = keys[:size]
    return [show(key) for key in shown], shown[-1] if len(keys) > size else None


def _entries(body: Doc, name: str) -> list[Doc]:
    return objects(listed(body, name, required=True) or [], name)


def _action(doc: Doc, name: str) -> str:
    value = doc.get(name, PARTIAL)
    if value not in (FULL, PARTIAL):
        raise bad("InvalidRequestFormat", f"{name} is {value!r}, it must be {FULL} or {PARTIAL}")
    return str(value)


def _refuse_default(key: str, service: Doc) -> None:
    given = service.get("properties")
    if key == DEFAULT or (isinstance(given, dict) and given.get("isDefault") is True):
        raise ArmError(
            400,
            "MultipleDefaultServicesNotAllowedInServiceGateway",
            f"service {service.get('name')!r}: the gateway has its default service already",
        )
