"""Between the port's structs and the JSON of Azure's network resource provider.

Pure. Bodies are built by hand, not from the SDK's models, because three things must really be on
the wire: `[]` where a list is empty, null where a reference is cleared, and SKUs in their exact
case (one of them is in no enumeration of the SDK).
"""

from typing import Any

import msgspec

from services.nrp_sync.provider import (
    Address,
    AddressLocation,
    LoadBalancer,
    LocationBatch,
    NatGateway,
    ProviderSettings,
    PublicAddress,
    Rule,
    ServiceBatch,
    ServiceKind,
    ServiceRegistration,
    ServiceUpdate,
    canonical_ip,
    canonical_names,
)

Doc = dict[str, Any]

PUBLIC_IPS = "publicIPAddresses"
LOAD_BALANCERS = "loadBalancers"
NAT_GATEWAYS = "natGateways"
SERVICE_GATEWAYS = "serviceGateways"
FRONTEND = "frontend"

_KINDS = {kind.value.lower(): kind for kind in ServiceKind}
_PROTOCOLS = {"tcp": "Tcp", "udp": "Udp"}


class NotUnderstood(ValueError):
    """The provider holds something that this code has no word for."""


class Ids:
    """Builds resource ids, and reads names out of them."""

    def __init__(self, settings: ProviderSettings) -> None:
        subscription = settings.network_subscription_id or settings.subscription_id
        self.subscription = subscription
        self.group = settings.resource_group
        self.region = settings.region
        self.base = (
            f"/subscriptions/{subscription}/resourceGroups/{settings.resource_group}"
            "/providers/Microsoft.Network"
        )
        self.gateway = self.of(SERVICE_GATEWAYS, settings.service_gateway)
        network_group = settings.vnet_resource_group or settings.resource_group
        self.network = (
            f"/subscriptions/{settings.subscription_id}/resourceGroups/{network_group}"
            f"/providers/Microsoft.Network/virtualNetworks/{settings.vnet}"
        )

    def of(self, kind: str, name: str) -> str:
        """The id of a resource of ours."""
        return f"{self.base}/{kind}/{name}"

    def pool(self, balancer: str) -> str:
        """The id of the one backend pool of a load balancer of ours."""
        return f"{self.of(LOAD_BALANCERS, balancer)}/backendAddressPools/{balancer}"


def name_in(target: str, kind: str) -> str:
    """The name behind a segment of an id, in lower case; empty when the id has no such segment."""
    parts = target.lower().split("/")
    try:
        return parts[parts.index(kind.lower()) + 1]
    except (ValueError, IndexError):
        return ""


# -- services -------------------------------------------------------------------------------


def services_body(batch: ServiceBatch, ids: Ids) -> bytes:
    """The body of `updateServices`."""
    return msgspec.json.encode(
        {
            "action": batch.action,
            "serviceRequests": [_service_request(update, ids) for update in batch.services],
        }
    )


def _service_request(update: ServiceUpdate, ids: Ids) -> Doc:
    service = update.service
    properties: Doc = {"serviceType": service.kind, "loadBalancerBackendPools": []}
    if not update.delete:
        if service.load_balancer is not None:
            pool = {
                "id": ids.pool(service.load_balancer),
                "name": service.load_balancer,
                "properties": {"virtualNetwork": {"id": ids.network}},
            }
            properties["loadBalancerBackendPools"] = [pool]
        if service.kind.outbound:
            nat = service.nat_gateway
            properties["publicNatGatewayId"] = ids.of(NAT_GATEWAYS, nat) if nat else None
    return {
        "isDelete": update.delete,
        "service": {"name": service.name, "properties": properties},
    }


class _Pool(msgspec.Struct):
    id: str = ""


class _ServiceProperties(msgspec.Struct, rename="camel"):
    service_type: str = ""
    is_default: bool | None = None
    load_balancer_backend_pools: list[_Pool] | None = None
    public_nat_gateway_id: str | None = None


class _Service(msgspec.Struct):
    name: str
    properties: _ServiceProperties


class Page(msgspec.Struct, rename="camel"):
    """One page of any list, its entries still as bytes."""

    value: list[msgspec.Raw]
    next_link: str | None = None


class _LocationAddress(msgspec.Struct):
    address: str
    services: list[str] | None = None


class _Location(msgspec.Struct, rename="camel"):
    address_location: str
    addresses: list[_LocationAddress] | None = None


def service_from(raw: msgspec.Raw) -> ServiceRegistration:
    """A registration from a list entry. An unknown type is an error: it would look like no
    service at all, and what belongs to it like an orphan."""
    doc = msgspec.json.decode(raw, type=_Service)
    kind = _KINDS.get(doc.properties.service_type.lower())
    if kind is None:
        raise NotUnderstood(
            f"service {doc.name} has the unknown type {doc.properties.service_type!r}"
        )
    pools = doc.properties.load_balancer_backend_pools or []
    return ServiceRegistration(
        name=doc.name.lower(),
        kind=kind,
        load_balancer=(name_in(pools[0].id, LOAD_BALANCERS) or None) if pools else None,
        nat_gateway=name_in(doc.properties.public_nat_gateway_id or "", NAT_GATEWAYS) or None,
        default=bool(doc.properties.is_default),
    )


# -- locations ------------------------------------------------------------------------------


def locations_body(batch: LocationBatch) -> bytes:
    """The body of `updateAddressLocations`, every key once and in canonical text."""
    batch = batch.canonical()
    return msgspec.json.encode(
        {
            "action": batch.action,
            "addressLocations": [
                {
                    "addressLocation": location.location,
                    "addressUpdateAction": location.action,
                    "addresses": [
                        {"address": item.address, "services": item.services}
                        for item in location.addresses
                    ],
                }
                for location in batch.locations
            ],
        }
    )


def location_from(raw: msgspec.Raw) -> AddressLocation:
    """A location from a list entry, canonical and ordered."""
    doc = msgspec.json.decode(raw, type=_Location)
    addresses = sorted(
        (canonical_ip(item.address), canonical_names(item.services or ()))
        for item in doc.addresses or ()
    )
    return AddressLocation(
        location=canonical_ip(doc.address_location),
        addresses=tuple(Address(address=ip, services=names) for ip, names in addresses),
    )


# -- public IPs -----------------------------------------------------------------------------


def public_ip_body(wanted: PublicAddress, ids: Ids) -> Doc:
    """The body of a PUT: static, of the SKU that service gateways need."""
    return {
        "location": ids.region,
        "sku": {"name": "StandardV2"},
        "properties": {
            "publicIPAllocationMethod": "Static",
            "publicIPAddressVersion": f"IPv{wanted.family}",
        },
    }


def public_ip_from(doc: Doc) -> PublicAddress:
    """As read: with its address, and with what uses it."""
    properties = doc.get("properties") or {}
    user = str((properties.get("natGateway") or properties.get("ipConfiguration") or {}).get("id"))
    attached = name_in(user, LOAD_BALANCERS) or name_in(user, NAT_GATEWAYS)
    if not attached and user != "None":
        attached = user.rsplit("/", 1)[-1].lower()
    address = properties.get("ipAddress")
    return PublicAddress(
        name=str(doc["name"]).lower(),
        family=6 if properties.get("publicIPAddressVersion") == "IPv6" else 4,
        address=canonical_ip(address) if address else None,
        attached_to=attached or None,
        etag=doc.get("etag") or "",
    )


# -- load balancers -------------------------------------------------------------------------


def load_balancer_body(wanted: LoadBalancer, ids: Ids) -> Doc:
    """The body of a PUT: one frontend, one pool whose members are the gateway's business."""
    target = ids.of(LOAD_BALANCERS, wanted.name)
    return {
        "location": ids.region,
        "sku": {"name": "Service"},
        "properties": {
            "scope": "Public",
            "frontendIPConfigurations": [
                {
                    "name": FRONTEND,
                    "properties": {"publicIPAddress": {"id": ids.of(PUBLIC_IPS, wanted.public_ip)}},
                }
            ],
            "backendAddressPools": [{"name": wanted.name}],
            "loadBalancingRules": [
                _rule_body(rule, target, ids.pool(wanted.name)) for rule in sorted(wanted.rules)
            ],
        },
    }


def _rule_body(rule: Rule, target: str, pool: str) -> Doc:
    return {
        "name": rule.name,
        "properties": {
            "protocol": rule.protocol,
            "frontendPort": rule.frontend_port,
            "backendPort": rule.backend_port,
            "idleTimeoutInMinutes": rule.idle_timeout_minutes,
            "enableFloatingIP": False,
            "enableTcpReset": rule.protocol == "Tcp",
            "frontendIPConfiguration": {"id": f"{target}/frontendIPConfigurations/{FRONTEND}"},
            "backendAddressPool": {"id": pool},
        },
    }


def load_balancer_from(doc: Doc) -> LoadBalancer:
    """As read. What a foreign one has beyond our shape is left out."""
    properties = doc.get("properties") or {}
    frontends = properties.get("frontendIPConfigurations") or []
    public_ip = next(
        (
            name_in(str(front["properties"]["publicIPAddress"]["id"]), PUBLIC_IPS)
            for front in frontends
            if (front.get("properties") or {}).get("publicIPAddress")
        ),
        "",
    )
    rules = []
    for entry in properties.get("loadBalancingRules") or []:
        given = entry.get("properties") or {}
        protocol = _PROTOCOLS.get(str(given.get("protocol", "")).lower())
        if protocol is not None:
            rules.append(
                Rule(
                    protocol="Tcp" if protocol == "Tcp" else "Udp",
                    frontend_port=given["frontendPort"],
                    backend_port=given["backendPort"],
                    idle_timeout_minutes=given.get("idleTimeoutInMinutes", 4),
                )
            )
    return LoadBalancer(
        name=str(doc["name"]).lower(),
        public_ip=public_ip,
        rules=tuple(sorted(rules)),
        etag=doc.get("etag") or "",
    )


# -- NAT gateways ---------------------------------------------------------------------------


def nat_gateway_body(wanted: NatGateway, ids: Ids) -> Doc:
    """The body of a PUT. The reference to the service gateway is always there: an omitted one
    would stay what it was."""
    properties: Doc = {
        "serviceGateway": {"id": ids.gateway} if wanted.attached else None,
        "publicIpAddresses": [{"id": ids.of(PUBLIC_IPS, name)} for name in wanted.public_ips],
    }
    if wanted.public_ips_v6:
        properties["publicIpAddressesV6"] = [
            {"id": ids.of(PUBLIC_IPS, name)} for name in wanted.public_ips_v6
        ]
    return {"location": ids.region, "sku": {"name": "StandardV2"}, "properties": properties}


def nat_gateway_from(doc: Doc, ids: Ids) -> NatGateway:
    """As read; attached means: to our gateway."""
    properties = doc.get("properties") or {}
    gateway = str((properties.get("serviceGateway") or {}).get("id", ""))

    def names(field: str) -> tuple[str, ...]:
        refs = properties.get(field) or []
        return tuple(sorted(name_in(str(ref.get("id", "")), PUBLIC_IPS) for ref in refs))

    return NatGateway(
        name=str(doc["name"]).lower(),
        public_ips=names("publicIpAddresses"),
        public_ips_v6=names("publicIpAddressesV6"),
        attached=gateway.lower() == ids.gateway.lower(),
        etag=doc.get("etag") or "",
    )
