"""The bodies that Azure receives, byte for byte in what matters, and what is read from its own.

Ids are those of the conformance table for the client (W..).
"""

from typing import Any

import msgspec
import pytest

from services.nrp_sync import azure_wire as wire
from services.nrp_sync.provider import (
    Action,
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
    asked,
)

BASE = "/subscriptions/sub/resourceGroups/rg/providers/Microsoft.Network"
SETTINGS = ProviderSettings(
    subscription_id="sub",
    resource_group="rg",
    region="westeurope",
    vnet="vnet",
    vnet_resource_group="nets",
)
IDS = wire.Ids(SETTINGS)


def service(kind: ServiceKind, delete: bool = False, **more: Any) -> Any:
    update = ServiceUpdate(service=ServiceRegistration(name="x", kind=kind, **more), delete=delete)
    body = msgspec.json.decode(wire.services_body(ServiceBatch(services=(update,)), IDS))
    assert body["action"] == "PartialUpdate"
    (request,) = body["serviceRequests"]
    assert request["isDelete"] is delete
    assert request["service"]["name"] == "x"
    return request["service"]["properties"]


def located(*entries: AddressLocation, action: Action = Action.PARTIAL) -> Any:
    return msgspec.json.decode(wire.locations_body(LocationBatch(locations=entries, action=action)))


class TestBodies:
    """What is sent."""

    def test_w01_inbound_has_one_pool_and_its_network(self) -> None:
        """The pool has the name of the load balancer; the network's id has its own group (W05)."""
        network = BASE.replace("/rg/", "/nets/") + "/virtualNetworks/vnet"
        assert service(ServiceKind.INBOUND, load_balancer="x") == {
            "serviceType": "Inbound",
            "loadBalancerBackendPools": [
                {
                    "id": f"{BASE}/loadBalancers/x/backendAddressPools/x",
                    "name": "x",
                    "properties": {"virtualNetwork": {"id": network}},
                }
            ],
        }

    def test_w02_an_inbound_without_balancer_clears_its_pools(self) -> None:
        """`[]`, present, and no gateway field of the other direction."""
        assert service(ServiceKind.INBOUND) == {
            "serviceType": "Inbound",
            "loadBalancerBackendPools": [],
        }

    def test_w03_outbound_names_its_gateway_unless_it_is_deleted(self) -> None:
        """The id on registration; no field at all on removal."""
        kind = ServiceKind.OUTBOUND
        assert service(kind, nat_gateway="g") == {
            "serviceType": "Outbound",
            "loadBalancerBackendPools": [],
            "publicNatGatewayId": f"{BASE}/natGateways/g",
        }
        assert "publicNatGatewayId" not in service(kind, delete=True, nat_gateway="g")

    def test_w15_a_cleared_gateway_is_an_explicit_null(self) -> None:
        """Omission would leave it as it was."""
        update = ServiceUpdate(service=ServiceRegistration(name="x", kind=ServiceKind.OUTBOUND))
        body = wire.services_body(ServiceBatch(services=(update,)), IDS)
        assert b'"publicNatGatewayId":null' in body
        detached = wire.nat_gateway_body(NatGateway(name="g", attached=False), IDS)
        assert detached["properties"]["serviceGateway"] is None

    def test_w05_without_a_network_group_its_id_has_the_common_one(self) -> None:
        """The setting is optional."""
        settings = msgspec.structs.replace(SETTINGS, vnet_resource_group="")
        assert wire.Ids(settings).network == f"{BASE}/virtualNetworks/vnet"

    def test_w06_empty_lists_are_sent(self) -> None:
        """A drained location and an address without services carry `[]`, never null."""
        body = located(
            AddressLocation(location="10.0.0.1"),
            AddressLocation(location="10.0.0.2", addresses=(Address(address="10.1.0.1"),)),
        )
        assert body["addressLocations"] == [
            {
                "addressLocation": "10.0.0.1",
                "addressUpdateAction": "PartialUpdate",
                "addresses": [],
            },
            {
                "addressLocation": "10.0.0.2",
                "addressUpdateAction": "PartialUpdate",
                "addresses": [{"address": "10.1.0.1", "services": []}],
            },
        ]
        wipe = msgspec.json.decode(
            wire.services_body(ServiceBatch(services=(), action=Action.FULL), IDS)
        )
        assert wipe == {"action": "FullUpdate", "serviceRequests": []}

    def test_w08_a_location_is_sent_once(self) -> None:
        """Two spellings are merged: addresses of both, FULL if one said so, in a fixed order."""
        body = located(
            AddressLocation(
                location="2001:DB8::1",
                action=Action.FULL,
                addresses=(Address(address="2001:db8::B", services=("Z", "a")),),
            ),
            AddressLocation(
                location="2001:db8:0:0::1",
                addresses=(Address(address="2001:db8::a", services=("b",)),),
            ),
        )
        assert body["addressLocations"] == [
            {
                "addressLocation": "2001:db8::1",
                "addressUpdateAction": "FullUpdate",
                "addresses": [
                    {"address": "2001:db8::a", "services": ["b"]},
                    {"address": "2001:db8::b", "services": ["a", "z"]},
                ],
            }
        ]

    def test_the_order_of_entries_does_not_matter(self) -> None:
        """The same batch gives the same bytes, so that it can be known by its hash."""
        one = AddressLocation(
            location="10.0.0.1", addresses=(Address(address="10.1.0.1", services=("b", "a")),)
        )
        two = AddressLocation(location="10.0.0.2")
        same = AddressLocation(
            location="10.0.0.1", addresses=(Address(address="10.1.0.1", services=("a", "b")),)
        )
        assert wire.locations_body(LocationBatch(locations=(one, two))) == wire.locations_body(
            LocationBatch(locations=(two, same))
        )

    def test_w16_exact_spelling_of_a_load_balancer(self) -> None:
        """SKU `Service`, `Tcp`/`Udp`; TCP reset only for TCP; names that follow from the port."""
        rules = (
            Rule(protocol="Udp", frontend_port=53, backend_port=5353),
            Rule(protocol="Tcp", frontend_port=80, backend_port=8080, idle_timeout_minutes=9),
        )
        body = wire.load_balancer_body(LoadBalancer(name="x", public_ip="x-pip", rules=rules), IDS)
        assert body["sku"] == {"name": "Service"}
        properties = body["properties"]
        assert properties["scope"] == "Public"
        assert properties["backendAddressPools"] == [{"name": "x"}]
        (frontend,) = properties["frontendIPConfigurations"]
        assert frontend["properties"]["publicIPAddress"]["id"] == f"{BASE}/publicIPAddresses/x-pip"
        tcp, udp = properties["loadBalancingRules"]
        assert (tcp["name"], udp["name"]) == ("rule-tcp-80", "rule-udp-53")
        assert tcp["properties"] == {
            "protocol": "Tcp",
            "frontendPort": 80,
            "backendPort": 8080,
            "idleTimeoutInMinutes": 9,
            "enableFloatingIP": False,
            "enableTcpReset": True,
            "frontendIPConfiguration": {
                "id": f"{BASE}/loadBalancers/x/frontendIPConfigurations/frontend"
            },
            "backendAddressPool": {"id": f"{BASE}/loadBalancers/x/backendAddressPools/x"},
        }
        assert udp["properties"]["protocol"] == "Udp"
        assert udp["properties"]["enableTcpReset"] is False
        assert udp["properties"]["idleTimeoutInMinutes"] == 4

    def test_w16_public_ips_and_nat_gateways(self) -> None:
        """SKU `StandardV2`, static, each family in its own list, IPv6 absent when there is none."""
        six = wire.public_ip_body(PublicAddress(name="x", family=6), IDS)
        assert six == {
            "location": "westeurope",
            "sku": {"name": "StandardV2"},
            "properties": {
                "publicIPAllocationMethod": "Static",
                "publicIPAddressVersion": "IPv6",
            },
        }
        gateway = wire.nat_gateway_body(NatGateway(name="g", public_ips=("g-pip",)), IDS)
        assert gateway["sku"] == {"name": "StandardV2"}
        assert gateway["properties"] == {
            "serviceGateway": {"id": f"{BASE}/serviceGateways/servicegateway"},
            "publicIpAddresses": [{"id": f"{BASE}/publicIPAddresses/g-pip"}],
        }
        both = NatGateway(name="g", public_ips=("a",), public_ips_v6=("b",))
        assert wire.nat_gateway_body(both, IDS)["properties"]["publicIpAddressesV6"] == [
            {"id": f"{BASE}/publicIPAddresses/b"}
        ]

    def test_w12_the_gateway_has_the_canonical_path(self) -> None:
        """[S12] Subscription, group, type, name."""
        assert IDS.gateway == f"{BASE}/serviceGateways/servicegateway"


class TestReading:
    """What is understood of the provider's own documents."""

    @pytest.mark.parametrize(
        ("target", "kind", "name"),
        [
            (f"{BASE}/loadBalancers/Web", "loadBalancers", "web"),
            (f"{BASE}/loadBalancers/web/backendAddressPools/web", "loadBalancers", "web"),
            (f"{BASE.lower()}/loadbalancers/web", "loadBalancers", "web"),
            (f"{BASE}/loadBalancers/web", "natGateways", ""),
            (f"{BASE}/loadBalancers", "loadBalancers", ""),
            ("", "loadBalancers", ""),
        ],
    )
    def test_w09_names_in_ids(self, target: str, kind: str, name: str) -> None:
        """The segment after the type, in lower case; empty when there is none."""
        assert wire.name_in(target, kind) == name

    def test_nulls_are_taken_for_absent(self) -> None:
        """A provider that writes null for what it has not."""
        raw = msgspec.Raw(
            b'{"name":"X","properties":{"serviceType":"outbound","isDefault":null,'
            b'"loadBalancerBackendPools":null,"publicNatGatewayId":null}}'
        )
        assert wire.service_from(raw) == ServiceRegistration(name="x", kind=ServiceKind.OUTBOUND)
        empty = msgspec.Raw(b'{"addressLocation":"10.0.0.1","addresses":null}')
        assert wire.location_from(empty) == AddressLocation(location="10.0.0.1")

    def test_unknown_fields_are_ignored(self) -> None:
        """A newer API version adds some."""
        doc = {"name": "x", "properties": {"futureThing": 1}, "etag": None, "zones": ["1"]}
        assert wire.public_ip_from(doc) == PublicAddress(name="x")
        assert wire.load_balancer_from(doc) == LoadBalancer(name="x", public_ip="")
        assert asked(wire.nat_gateway_from(doc, IDS)) == NatGateway(name="x", attached=False)

    @pytest.mark.parametrize(
        ("properties", "attached"),
        [
            ({}, None),
            ({"natGateway": {"id": f"{BASE}/natGateways/Egress"}}, "egress"),
            (
                {
                    "ipConfiguration": {
                        "id": f"{BASE}/loadBalancers/Web/frontendIPConfigurations/frontend"
                    }
                },
                "web",
            ),
            (
                {
                    "ipConfiguration": {
                        "id": f"{BASE}/networkInterfaces/nic/ipConfigurations/Primary"
                    }
                },
                "primary",
            ),
        ],
    )
    def test_who_uses_a_public_ip(self, properties: dict[str, Any], attached: str | None) -> None:
        """Any user counts: an address in use must not be swept, whoever it is."""
        doc = {"name": "x", "properties": properties}
        assert wire.public_ip_from(doc).attached_to == attached

    def test_another_gateways_nat_gateway_is_not_attached_to_ours(self) -> None:
        """By the whole id, not by a prefix (report 53)."""
        ours = IDS.gateway.upper()
        for target, attached in ((ours, True), (f"{ours}-2", False)):
            doc = {"name": "x", "properties": {"serviceGateway": {"id": target}}}
            assert wire.nat_gateway_from(doc, IDS).attached is attached
