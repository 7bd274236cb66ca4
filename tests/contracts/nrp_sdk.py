"""Microsoft's SDK against the sandbox's provider, and bodies for it written by hand."""

import gc
from typing import Any

import pytest
from azure.core.exceptions import HttpResponseError
from azure.core.pipeline.policies import SansIOHTTPPolicy
from azure.mgmt.network.aio import NetworkManagementClient

from sandbox.nrp import NrpServer
from sandbox.nrp.server import GATEWAY, GROUP, REGION, SUBSCRIPTION

# What the SDK's import leaves behind would slow down every collection in every later test.
gc.collect()
gc.freeze()

Doc = dict[str, Any]


class Bearer(SansIOHTTPPolicy[Any, Any]):
    """The sandbox takes any token; the SDK's own policy insists on TLS."""

    def on_request(self, request: Any) -> None:
        request.http_request.headers["Authorization"] = "Bearer sandbox"


class NoToken(SansIOHTTPPolicy[Any, Any]):
    """Sends none."""


class Credential:
    """Never asked: the policy above stands in."""

    async def get_token(self, *_: str, **__: Any) -> Any:
        raise AssertionError("the SDK asked for a token")

    async def close(self) -> None:
        return


def sdk(server: NrpServer, policy: Any = None) -> NetworkManagementClient:
    return NetworkManagementClient(
        Credential(),  # type: ignore[arg-type]
        SUBSCRIPTION,
        base_url=server.url,
        authentication_policy=policy or Bearer(),
        retry_total=0,
        polling_interval=0.02,
    )


def rid(kind: str, name: str) -> str:
    return (
        f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}"
        f"/providers/Microsoft.Network/{kind}/{name}"
    )


def public_ip(version: str = "IPv4", **properties: Any) -> Doc:
    return {
        "location": REGION,
        "sku": {"name": "StandardV2"},
        "properties": {
            "publicIPAllocationMethod": "Static",
            "publicIPAddressVersion": version,
            **properties,
        },
    }


def rule(name: str, port: int, backend: int, protocol: str = "Tcp", lb: str = "web") -> Doc:
    return {
        "name": name,
        "properties": {
            "protocol": protocol,
            "frontendPort": port,
            "backendPort": backend,
            "frontendIPConfiguration": {
                "id": rid("loadBalancers", lb) + "/frontendIPConfigurations/frontend"
            },
            "backendAddressPool": {"id": rid("loadBalancers", lb) + f"/backendAddressPools/{lb}"},
        },
    }


def balancer(lb: str = "web", *rules: Doc, sku: str = "Service") -> Doc:
    return {
        "location": REGION,
        "sku": {"name": sku},
        "properties": {
            "frontendIPConfigurations": [
                {
                    "name": "frontend",
                    "properties": {
                        "publicIPAddress": {"id": rid("publicIPAddresses", f"{lb}-pip")}
                    },
                }
            ],
            "backendAddressPools": [{"name": lb}],
            "loadBalancingRules": list(rules),
        },
    }


def inbound(name: str, *, pool: str | None = None, delete: bool = False, **more: Any) -> Doc:
    pools = (
        [{"id": rid("loadBalancers", pool) + f"/backendAddressPools/{pool}", "name": pool}]
        if pool
        else []
    )
    properties = {"serviceType": "Inbound", "loadBalancerBackendPools": pools, **more}
    return {"isDelete": delete, "service": {"name": name, "properties": properties}}


def outbound(name: str, delete: bool = False, **properties: Any) -> Doc:
    return {
        "isDelete": delete,
        "service": {"name": name, "properties": {"serviceType": "Outbound", **properties}},
    }


def at(where: str, addresses: dict[str, list[str]], action: str = "PartialUpdate") -> Doc:
    return {
        "addressLocation": where,
        "addressUpdateAction": action,
        "addresses": [
            {"address": address, "services": services} for address, services in addresses.items()
        ],
    }


async def register(client: NetworkManagementClient, *entries: Doc, full: bool = False) -> Any:
    body = {"action": "FullUpdate" if full else "PartialUpdate", "serviceRequests": list(entries)}
    return await client.service_gateways.update_services(GROUP, GATEWAY, body)


async def locate(client: NetworkManagementClient, *entries: Doc, full: bool = False) -> Any:
    body = {"action": "FullUpdate" if full else "PartialUpdate", "addressLocations": list(entries)}
    return await client.service_gateways.update_address_locations(GROUP, GATEWAY, body)


async def held(client: NetworkManagementClient) -> dict[str, dict[str, list[str]]]:
    return {
        entry["addressLocation"]: {a["address"]: a["services"] for a in entry["addresses"]}
        async for entry in client.service_gateways.get_address_locations(GROUP, GATEWAY)
    }


async def registered(client: NetworkManagementClient) -> dict[str, str]:
    return {
        entry["name"]: entry["properties"]["serviceType"]
        async for entry in client.service_gateways.get_services(GROUP, GATEWAY)
    }


async def refused(awaitable: Any) -> HttpResponseError:
    with pytest.raises(HttpResponseError) as caught:
        await awaitable
    return caught.value


def code(error: HttpResponseError) -> str:
    assert error.error is not None
    return str(error.error.code)


async def put_ip(client: NetworkManagementClient, name: str, **kwargs: Any) -> Any:
    poller = await client.public_ip_addresses.begin_create_or_update(
        GROUP, name, public_ip(**kwargs)
    )
    return await poller.result()


async def put_balancer(client: NetworkManagementClient, lb: str, *rules: Doc) -> Any:
    await put_ip(client, f"{lb}-pip")
    poller = await client.load_balancers.begin_create_or_update(GROUP, lb, balancer(lb, *rules))
    return await poller.result()
