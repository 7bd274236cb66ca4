"""The sandbox's provider behind our port, in this process and without HTTP.

Bodies and answers are those of the wire: what Azure's client would send is decoded as the sandbox's
server does, and its rules decide. `Hand` is somebody who changes a provider behind our back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from sandbox.nrp import arm
from sandbox.nrp.arm import ArmError
from sandbox.nrp.resources import Quota, Resources
from services.nrp_sync import azure_wire as wire
from services.nrp_sync.azure_errors import classify
from services.nrp_sync.provider import (
    Ack,
    AddressLocation,
    LoadBalancer,
    LocationBatch,
    NatGateway,
    ProviderSettings,
    PublicAddress,
    ServiceBatch,
    ServiceRegistration,
    ServiceUpdate,
)

T = TypeVar("T")
SETTINGS = ProviderSettings(subscription_id="s", resource_group="g", region="local", vnet="v")
ACK = Ack(request_id="sandbox")


class SandboxProvider:
    """Implements `provider.Provider`."""

    def __init__(self) -> None:
        self.ids = wire.Ids(SETTINGS)
        self.resources = Resources("local", Quota())
        body = {
            "location": "local",
            "sku": {"name": "Standard"},
            "properties": {"virtualNetwork": {"id": self.ids.network}},
        }
        self.resources.put(arm.SERVICE_GATEWAYS, self.ids.gateway, "gateway", body, "")()
        self.gateway = self.resources.gateway(self.ids.gateway)

    async def close(self) -> None:
        """Nothing to give back."""

    # --- what it holds, by name ---

    @property
    def services(self) -> dict[str, ServiceRegistration]:
        docs = self.gateway.service_page("", 1 << 30)[0]
        return {s.name: s for s in map(wire.service_from, map(_raw, docs))}

    @property
    def locations(self) -> dict[str, dict[str, tuple[str, ...]]]:
        return self.gateway.locations

    @property
    def public_ips(self) -> dict[str, PublicAddress]:
        return self._held(arm.PUBLIC_IPS, wire.public_ip_from)

    @property
    def load_balancers(self) -> dict[str, LoadBalancer]:
        return self._held(arm.LOAD_BALANCERS, wire.load_balancer_from)

    @property
    def nat_gateways(self) -> dict[str, NatGateway]:
        return self._held(arm.NAT_GATEWAYS, self._nat_gateway)

    def _held(self, kind: str, read: Callable[[wire.Doc], T]) -> dict[str, T]:
        docs = self.resources.page(kind, self.ids.base, "", 1 << 30)[0]
        return {str(doc["name"]).lower(): read(doc) for doc in docs}

    def _nat_gateway(self, doc: wire.Doc) -> NatGateway:
        return wire.nat_gateway_from(doc, self.ids)

    # --- the port ---

    async def update_services(self, batch: ServiceBatch, *, request_id: str = "") -> Ack:
        with _errors("update_services"):
            self.gateway.update_services(_doc(wire.services_body(batch, self.ids)))()
        return ACK

    async def update_address_locations(self, batch: LocationBatch, *, request_id: str = "") -> Ack:
        with _errors("update_address_locations"):
            self.gateway.update_locations(_doc(wire.locations_body(batch)))()
        return ACK

    async def list_services(self) -> list[ServiceRegistration]:
        return list(self.services.values())

    async def list_address_locations(self) -> list[AddressLocation]:
        docs = self.gateway.location_page("", 1 << 30)[0]
        return [wire.location_from(_raw(doc)) for doc in docs]

    async def put_public_ip(
        self, wanted: PublicAddress, *, if_match: str = "", request_id: str = ""
    ) -> PublicAddress:
        body = wire.public_ip_body(wanted, self.ids)
        return wire.public_ip_from(self._put(arm.PUBLIC_IPS, wanted.name, body, if_match))

    async def get_public_ip(self, name: str) -> PublicAddress | None:
        return self.public_ips.get(name.lower())

    async def list_public_ips(self) -> list[PublicAddress]:
        return list(self.public_ips.values())

    async def delete_public_ip(self, name: str, *, request_id: str = "") -> None:
        self._delete(arm.PUBLIC_IPS, name)

    async def put_load_balancer(
        self, wanted: LoadBalancer, *, if_match: str = "", request_id: str = ""
    ) -> LoadBalancer:
        body = wire.load_balancer_body(wanted, self.ids)
        return wire.load_balancer_from(self._put(arm.LOAD_BALANCERS, wanted.name, body, if_match))

    async def get_load_balancer(self, name: str) -> LoadBalancer | None:
        return self.load_balancers.get(name.lower())

    async def list_load_balancers(self) -> list[LoadBalancer]:
        return list(self.load_balancers.values())

    async def delete_load_balancer(self, name: str, *, request_id: str = "") -> None:
        self._delete(arm.LOAD_BALANCERS, name)

    async def put_nat_gateway(
        self, wanted: NatGateway, *, if_match: str = "", request_id: str = ""
    ) -> NatGateway:
        body = wire.nat_gateway_body(wanted, self.ids)
        return self._nat_gateway(self._put(arm.NAT_GATEWAYS, wanted.name, body, if_match))

    async def get_nat_gateway(self, name: str) -> NatGateway | None:
        return self.nat_gateways.get(name.lower())

    async def list_nat_gateways(self) -> list[NatGateway]:
        return list(self.nat_gateways.values())

    async def delete_nat_gateway(self, name: str, *, request_id: str = "") -> None:
        self._delete(arm.NAT_GATEWAYS, name)

    async def detach(self, name: str, *, request_id: str = "") -> None:
        service = self.services.get(name)
        if service is not None and service.nat_gateway and not service.default:
            cleared = msgspec.structs.replace(service, nat_gateway=None)
            await self.update_services(ServiceBatch(services=(ServiceUpdate(service=cleared),)))
        seen = self.nat_gateways.get(name)
        if seen is not None and seen.attached:
            cleared_gateway = msgspec.structs.replace(seen, attached=False)
            await self.put_nat_gateway(cleared_gateway, if_match=seen.etag)

    def _put(self, kind: str, name: str, body: wire.Doc, if_match: str) -> wire.Doc:
        with _errors(f"put {kind}"):
            return self.resources.put(kind, self.ids.of(kind, name), name, body, if_match)()

    def _delete(self, kind: str, name: str) -> None:
        with _errors(f"delete {kind}"):
            applied = self.resources.delete(kind, self.ids.of(kind, name), "")
            if applied is not None:
                applied()


@contextmanager
def _errors(op: str) -> Iterator[None]:
    try:
        yield
    except ArmError as error:
        raise classify(op, error.status, error.code, error.message) from error


def _doc(body: bytes) -> wire.Doc:
    doc: wire.Doc = msgspec.json.decode(body)
    return doc


def _raw(doc: wire.Doc) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(doc))


class Hand:
    """Edits by hand, unchecked, of either provider that tests have."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider

    def set_location(self, place: str, addresses: dict[str, tuple[str, ...]]) -> None:
        """All of a location's addresses; none takes it away."""
        if isinstance(self._provider, SandboxProvider):
            self._provider.gateway.set_location(place, addresses)
        elif addresses:
            self._provider.locations[place] = addresses
        else:
            self._provider.locations.pop(place, None)

    def drop_rules(self, name: str) -> None:
        """Of a load balancer."""
        if isinstance(self._provider, SandboxProvider):
            key = self._provider.ids.of(arm.LOAD_BALANCERS, name).lower()
            doc = self._provider.resources.docs[arm.LOAD_BALANCERS][key]
            doc["properties"]["loadBalancingRules"] = []
        else:
            held = self._provider.load_balancers
            held[name] = msgspec.structs.replace(held[name], rules=())

    def drop_service(self, name: str) -> None:
        """A registration, and every mapping to it."""
        for place, held in list(self._provider.locations.items()):
            left = {a: tuple(n for n in names if n != name) for a, names in held.items()}
            self.set_location(place, {a: names for a, names in left.items() if names})
        if isinstance(self._provider, SandboxProvider):
            del self._provider.gateway.services[name]
        else:
            del self._provider.services[name]
