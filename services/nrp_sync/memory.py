"""A provider in this process: the port without a cloud, held to the same contract suite.

It keeps the rules that a client can meet (what must exist first, what may not go while it is
used, families, duplicates, etags), so the engine can be tried against it at full speed. It also
shows what a further provider takes: one file with these methods and a `connect`.

`fail` makes the next calls of an operation raise, before or after they were applied.
"""

import collections
import ipaddress
import itertools
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import msgspec

from services.nrp_sync.memory_gateway import (
    in_use,
    locations_after,
    refused,
    services_after,
    shown_locations,
)
from services.nrp_sync.provider import (
    DEFAULT_SERVICE,
    Ack,
    Action,
    AddressLocation,
    LoadBalancer,
    LocationBatch,
    NatGateway,
    PreconditionFailed,
    ProviderError,
    ProviderSettings,
    PublicAddress,
    ServiceBatch,
    ServiceKind,
    ServiceRegistration,
    ServiceUpdate,
    canonical_ip,
)


class _Named(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def etag(self) -> str: ...


N = TypeVar("N", bound=_Named)
T = TypeVar("T")

_RANGES = {4: "198.18.0.0/15", 6: "2001:db8:fffe::/64"}


async def connect(_: ProviderSettings) -> "MemoryProvider":
    """An empty provider; it forgets everything when it is closed."""
    return MemoryProvider()


class MemoryProvider:
    """Implements `provider.Provider`."""

    def __init__(self) -> None:
        self.services: dict[str, ServiceRegistration] = {}
        self.locations: dict[str, dict[str, tuple[str, ...]]] = {}
        self.public_ips: dict[str, PublicAddress] = {}
        self.load_balancers: dict[str, LoadBalancer] = {}
        self.nat_gateways: dict[str, NatGateway] = {}
        self.calls: collections.Counter[str] = collections.Counter()
        self._failures: dict[str, collections.deque[tuple[ProviderError, bool]]] = {}
        self._numbers = itertools.count(1)
        self._free = {family: _hosts(network) for family, network in _RANGES.items()}
        self.services[DEFAULT_SERVICE] = ServiceRegistration(
            name=DEFAULT_SERVICE,
            kind=ServiceKind.OUTBOUND,
            nat_gateway=DEFAULT_SERVICE,
            default=True,
        )
        self.public_ips[f"{DEFAULT_SERVICE}-pip"] = PublicAddress(
            name=f"{DEFAULT_SERVICE}-pip", address=next(self._free[4]), etag=self._etag()
        )
        self.nat_gateways[DEFAULT_SERVICE] = NatGateway(
            name=DEFAULT_SERVICE, public_ips=(f"{DEFAULT_SERVICE}-pip",), etag=self._etag()
        )

    async def close(self) -> None:
        """Nothing to give back."""

    def fail(self, error: ProviderError, *, times: int = 1, applied: bool = False) -> None:
        """The next calls of `error.op` raise it; with `applied` only after their work is done."""
        queue = self._failures.setdefault(error.op, collections.deque())
        queue.extend([(error, applied)] * times)

    def _call(self, op: str, work: Callable[[], T]) -> T:
        self.calls[op] += 1
        queue = self._failures.get(op)
        failure = queue.popleft() if queue else None
        if failure is not None and not failure[1]:
            raise failure[0]
        done = work()
        if failure is not None:
            raise failure[0]
        return done

    def _etag(self) -> str:
        return f'"{next(self._numbers)}"'

    def _ack(self) -> Ack:
        return Ack(request_id=f"memory-{next(self._numbers)}")

    # -- the gateway's collections ------------------------------------------------------------

    async def update_services(self, batch: ServiceBatch, *, request_id: str = "") -> Ack:
        """See the port."""
        if not batch.services and batch.action is Action.PARTIAL:
            return Ack(request_id="", status=0)

        def update() -> Ack:
            self.services = services_after(
                self.services, batch, self.locations, self.load_balancers, self.nat_gateways
            )
            return self._ack()

        return self._call("update_services", update)

    async def list_services(self) -> list[ServiceRegistration]:
        """See the port."""
        return self._call("list_services", lambda: _by_name(self.services))

    async def update_address_locations(self, batch: LocationBatch, *, request_id: str = "") -> Ack:
        """See the port."""
        if not batch.locations and batch.action is Action.PARTIAL:
            return Ack(request_id="", status=0)

        def update() -> Ack:
            self.locations = locations_after(self.locations, batch, self.services)
            return self._ack()

        return self._call("update_address_locations", update)

    async def list_address_locations(self) -> list[AddressLocation]:
        """See the port."""
        return self._call("list_address_locations", lambda: shown_locations(self.locations))

    # -- public IPs -------------------------------------------------------------------------

    async def put_public_ip(
        self, wanted: PublicAddress, *, if_match: str = "", request_id: str = ""
    ) -> PublicAddress:
        """See the port."""

        def put() -> PublicAddress:
            old = self._check_etag("put_public_ip", self.public_ips, wanted.name, if_match)
            if old is not None and old.family != wanted.family:
                raise refused(
                    "put_public_ip",
                    "PublicIPAddressVersionCannotBeChanged",
                    f"{wanted.name} is IPv{old.family}, that cannot change",
                )
            self.public_ips[wanted.name.lower()] = PublicAddress(
                name=wanted.name.lower(),
                family=wanted.family,
                address=old.address if old else next(self._free[wanted.family]),
                etag=self._etag(),
            )
            return self._public_ip(wanted.name)

        return self._call("put_public_ip", put)

    def _public_ip(self, name: str) -> PublicAddress:
        return msgspec.structs.replace(
            self.public_ips[name.lower()], attached_to=self._user_of(name.lower())
        )

    def _user_of(self, public_ip: str) -> str | None:
        for balancer in self.load_balancers.values():
            if balancer.public_ip == public_ip:
                return balancer.name
        for gateway in self.nat_gateways.values():
            if public_ip in gateway.public_ips + gateway.public_ips_v6:
                return gateway.name
        return None

    async def get_public_ip(self, name: str) -> PublicAddress | None:
        """See the port."""
        return self._call(
            "get_public_ip",
            lambda: self._public_ip(name) if name.lower() in self.public_ips else None,
        )

    async def list_public_ips(self) -> list[PublicAddress]:
        """See the port."""
        return self._call(
            "list_public_ips", lambda: [self._public_ip(name) for name in sorted(self.public_ips)]
        )

    async def delete_public_ip(self, name: str, *, request_id: str = "") -> None:
        """See the port."""

        def delete() -> None:
            user = self._user_of(name.lower())
            if user is not None:
                raise in_use(
                    "delete_public_ip",
                    "PublicIPAddressCannotBeDeleted",
                    f"public IP {name} is used by {user}",
                )
            self.public_ips.pop(name.lower(), None)

        self._call("delete_public_ip", delete)

    # -- load balancers ---------------------------------------------------------------------

    async def put_load_balancer(
        self, wanted: LoadBalancer, *, if_match: str = "", request_id: str = ""
    ) -> LoadBalancer:
        """See the port."""

        def put() -> LoadBalancer:
            op = "put_load_balancer"
            self._check_etag(op, self.load_balancers, wanted.name, if_match)
            self._check_public_ip(op, wanted.name, wanted.public_ip, 4, 6)
            backends = {(rule.protocol, rule.backend_port) for rule in wanted.rules}
            if len(backends) < len(wanted.rules):
                raise refused(
                    op,
                    "RulesUseSameBackendPortProtocolAndPool",
                    f"{wanted.name}: two rules share protocol and backend port",
                )
            made = LoadBalancer(
                name=wanted.name.lower(),
                public_ip=wanted.public_ip.lower(),
                rules=tuple(sorted(wanted.rules)),
                etag=self._etag(),
            )
            self.load_balancers[made.name] = made
            return made

        return self._call("put_load_balancer", put)

    async def get_load_balancer(self, name: str) -> LoadBalancer | None:
        """See the port."""
        return self._call("get_load_balancer", lambda: self.load_balancers.get(name.lower()))

    async def list_load_balancers(self) -> list[LoadBalancer]:
        """See the port."""
        return self._call("list_load_balancers", lambda: _by_name(self.load_balancers))

    async def delete_load_balancer(self, name: str, *, request_id: str = "") -> None:
        """See the port."""

        def delete() -> None:
            self._check_unregistered("delete_load_balancer", name, "InUseLoadBalancer")
            self.load_balancers.pop(name.lower(), None)

        self._call("delete_load_balancer", delete)

    # -- NAT gateways -----------------------------------------------------------------------

    async def put_nat_gateway(
        self, wanted: NatGateway, *, if_match: str = "", request_id: str = ""
    ) -> NatGateway:
        """See the port."""

        def put() -> NatGateway:
            op = "put_nat_gateway"
            self._check_etag(op, self.nat_gateways, wanted.name, if_match)
            for family, names in ((4, wanted.public_ips), (6, wanted.public_ips_v6)):
                for public_ip in names:
                    self._check_public_ip(op, wanted.name, public_ip, family)
            made = NatGateway(
                name=wanted.name.lower(),
                public_ips=tuple(sorted(name.lower() for name in wanted.public_ips)),
                public_ips_v6=tuple(sorted(name.lower() for name in wanted.public_ips_v6)),
                attached=wanted.attached,
                etag=self._etag(),
            )
            self.nat_gateways[made.name] = made
            return made

        return self._call("put_nat_gateway", put)

    async def get_nat_gateway(self, name: str) -> NatGateway | None:
        """See the port."""
        return self._call("get_nat_gateway", lambda: self.nat_gateways.get(name.lower()))

    async def list_nat_gateways(self) -> list[NatGateway]:
        """See the port."""
        return self._call("list_nat_gateways", lambda: _by_name(self.nat_gateways))

    async def delete_nat_gateway(self, name: str, *, request_id: str = "") -> None:
        """See the port."""

        def delete() -> None:
            self._check_unregistered("delete_nat_gateway", name, "InUseNatGateway")
            held = self.nat_gateways.get(name.lower())
            if held is not None and held.attached:
                raise in_use(
                    "delete_nat_gateway",
                    "InUseNatGatewayCannotBeDeleted",
                    f"{name} is attached to the service gateway",
                )
            self.nat_gateways.pop(name.lower(), None)

        self._call("delete_nat_gateway", delete)

    async def detach(self, name: str, *, request_id: str = "") -> None:
        """See the port. It is the two calls that it is made of, so each may fail by itself."""
        failed: ProviderError | None = None
        service = self.services.get(name.lower())
        if service is not None and service.nat_gateway and not service.default:
            cleared = msgspec.structs.replace(service, nat_gateway=None)
            batch = ServiceBatch(services=(ServiceUpdate(service=cleared),))
            try:
                await self.update_services(batch, request_id=request_id)
            except ProviderError as error:
                failed = error
        gateway = self.nat_gateways.get(name.lower())
        if gateway is not None and gateway.attached:
            cleared_gateway = msgspec.structs.replace(gateway, attached=False)
            await self.put_nat_gateway(cleared_gateway, request_id=request_id)
        if failed is not None:
            raise failed

    # -- rules ------------------------------------------------------------------------------

    def _check_etag(self, op: str, there: dict[str, N], name: str, if_match: str) -> N | None:
        old = there.get(name.lower())
        if if_match and (old is None or old.etag != if_match):
            raise PreconditionFailed(
                op,
                f"{name} has another etag than {if_match}",
                code="PreconditionFailed",
                status=412,
            )
        return old

    def _check_public_ip(self, op: str, user: str, public_ip: str, *families: int) -> None:
        held = self.public_ips.get(public_ip.lower())
        if held is None or held.family not in families:
            raise refused(
                op,
                "InvalidResourceReference",
                f"{user}: public IP {public_ip} does not exist or is of the other family",
            )
        other = self._user_of(public_ip.lower())
        if other is not None and other != user.lower():
            raise in_use(
                op, "PublicIPAddressInUse", f"{user}: public IP {public_ip} is used by {other}"
            )

    def _check_unregistered(self, op: str, name: str, code: str) -> None:
        for service in self.services.values():
            target = service.load_balancer if "Balancer" in code else service.nat_gateway
            if target == name.lower():
                raise in_use(
                    op, f"{code}CannotBeDeleted", f"{name} is used by service {service.name}"
                )


def _by_name(held: dict[str, T]) -> list[T]:
    return [held[name] for name in sorted(held)]


def _hosts(network: str) -> Iterator[str]:
    for address in ipaddress.ip_network(network).hosts():
        yield canonical_ip(str(address))
