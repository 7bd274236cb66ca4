"""The sandbox's provider, driven by Microsoft's SDK alone: nothing of ours is in between.

What these tests promise about the sandbox is what the provider's client and the engine of
nrp_sync rely on when they are developed and tested against it.
"""

from collections.abc import AsyncIterator

import aiohttp
import pytest
from azure.core.exceptions import (
    ClientAuthenticationError,
    ResourceNotFoundError,
)
from azure.mgmt.network.aio import NetworkManagementClient
from azure.mgmt.network.models import (
    ServiceGatewayAddress,
    ServiceGatewayAddressLocation,
    ServiceGatewayUpdateAddressLocationsRequest,
)

from sandbox.nrp import NrpServer
from sandbox.nrp.resources import Quota
from sandbox.nrp.server import GATEWAY, GROUP, REGION
from tests.contracts.nrp_sdk import (
    Doc,
    NoToken,
    at,
    balancer,
    code,
    held,
    inbound,
    locate,
    outbound,
    public_ip,
    put_balancer,
    put_ip,
    refused,
    register,
    registered,
    rid,
    rule,
    sdk,
)


@pytest.fixture
async def server() -> AsyncIterator[NrpServer]:
    async with NrpServer(page_size=3) as running:
        yield running


@pytest.fixture
async def client(server: NrpServer) -> AsyncIterator[NetworkManagementClient]:
    async with sdk(server) as opened:
        yield opened


class TestCollections:
    """Services and address locations of the gateway."""

    async def test_lists_are_paged_and_complete(
        self, server: NrpServer, client: NetworkManagementClient
    ) -> None:
        """Every entry is listed exactly once over several pages, the default among them."""
        names = [f"svc-{n}" for n in range(8)]
        await register(client, *(inbound(name) for name in names))
        await locate(client, *(at(f"10.0.0.{n}", {f"10.1.0.{n}": [names[n]]}) for n in range(8)))
        assert sorted([*names, "default-natgw"]) == sorted(await registered(client))
        assert {f"10.0.0.{n}" for n in range(8)} == set(await held(client))
        assert server.journal.counts["list_services"] == 3
        assert server.journal.counts["list_address_locations"] == 3

    async def test_models_of_the_sdk_are_understood(self, client: NetworkManagementClient) -> None:
        """The SDK's typed request gives the same as JSON by hand."""
        await register(client, inbound("web"))
        await client.service_gateways.update_address_locations(
            GROUP,
            GATEWAY,
            ServiceGatewayUpdateAddressLocationsRequest(
                action="PartialUpdate",
                address_locations=[
                    ServiceGatewayAddressLocation(
                        address_location="10.0.0.1",
                        address_update_action="FullUpdate",
                        addresses=[ServiceGatewayAddress(address="10.1.0.1", services=["web"])],
                    )
                ],
            ),
        )
        assert await held(client) == {"10.0.0.1": {"10.1.0.1": ["web"]}}

    async def test_partial_update_touches_what_is_listed(
        self, client: NetworkManagementClient
    ) -> None:
        """Listed addresses are replaced with their whole service list, others stay."""
        await register(client, inbound("a"), inbound("b"))
        await locate(client, at("10.0.0.1", {"10.1.0.1": ["a"], "10.1.0.2": ["a", "b"]}))
        await locate(client, at("10.0.0.1", {"10.1.0.1": ["b"]}))
        assert await held(client) == {"10.0.0.1": {"10.1.0.1": ["b"], "10.1.0.2": ["a", "b"]}}

    async def test_full_update_of_a_location_replaces_its_addresses(
        self, client: NetworkManagementClient
    ) -> None:
        """FullUpdate of one location leaves only what it lists there, other locations stay."""
        await register(client, inbound("a"))
        await locate(
            client,
            at("10.0.0.1", {"10.1.0.1": ["a"], "10.1.0.2": ["a"]}),
            at("10.0.0.2", {"10.1.0.3": ["a"]}),
        )
        await locate(client, at("10.0.0.1", {"10.1.0.9": ["a"]}, "FullUpdate"))
        expected = {"10.0.0.1": {"10.1.0.9": ["a"]}, "10.0.0.2": {"10.1.0.3": ["a"]}}
        assert expected == await held(client)

    async def test_full_update_replaces_the_collection(
        self, client: NetworkManagementClient
    ) -> None:
        """The top-level FullUpdate drops unlisted locations and services, never the default."""
        await register(client, inbound("a"), inbound("b"))
        await locate(
            client, at("10.0.0.1", {"10.1.0.1": ["a"]}), at("10.0.0.2", {"10.1.0.2": ["a"]})
        )
        await locate(client, at("10.0.0.2", {"10.1.0.2": ["a"]}), full=True)
        assert {"10.0.0.2"} == set(await held(client))
        await locate(client, full=True)
        await register(client, inbound("b"), full=True)
        assert await registered(client) == {"b": "Inbound", "default-natgw": "Outbound"}

    async def test_empty_lists_delete(self, client: NetworkManagementClient) -> None:
        """An address without services goes; a listed location without addresses goes; the last
        address takes its location along; deleting what is not there is fine."""
        await register(client, inbound("a"))
        await locate(
            client,
            at("10.0.0.1", {"10.1.0.1": ["a"], "10.1.0.2": ["a"]}),
            at("10.0.0.2", {"10.1.0.3": ["a"]}),
            at("10.0.0.3", {"10.1.0.4": ["a"]}),
        )
        await locate(
            client,
            at("10.0.0.1", {"10.1.0.1": []}),
            at("10.0.0.2", {}),
            at("10.0.0.3", {"10.1.0.4": []}),
            at("10.0.0.9", {}),
        )
        assert await held(client) == {"10.0.0.1": {"10.1.0.2": ["a"]}}

    async def test_addresses_are_canonical(self, client: NetworkManagementClient) -> None:
        """One address in two spellings is one address."""
        await register(client, inbound("a"))
        await locate(client, at("2001:DB8:0::1", {"2001:0db8::0007": ["A"]}))
        await locate(client, at("2001:db8::1", {"2001:db8::8": ["a"]}))
        expected = {"2001:db8::1": {"2001:db8::7": ["a"], "2001:db8::8": ["a"]}}
        assert expected == await held(client)

    @pytest.mark.parametrize(
        ("entries", "expected"),
        [
            pytest.param(
                [at("10.0.0.1", {"10.1.0.1": ["a"]}), at("10.0.0.1", {"10.1.0.2": ["a"]})],
                "DuplicateLocationsInRequest",
                id="duplicate-report-52",
            ),
            pytest.param(
                [at("2001:db8::1", {}), at("2001:DB8:0::1", {})],
                "DuplicateLocationsInRequest",
                id="duplicate-in-two-spellings",
            ),
            pytest.param(
                [at("10.0.0.1", {"2001:db8::1": ["a"]})],
                "IPv4LocationCannotContainIPv6Addresses",
                id="family-report-28",
            ),
            pytest.param(
                [at("2001:db8::1", {"10.1.0.1": ["a"]})],
                "IPv6LocationCannotContainIPv4Addresses",
                id="family-other-way",
            ),
            pytest.param(
                [at("10.0.0.1", {"10.1.0.1": ["nobody"]})], "ServiceNotFound", id="unregistered"
            ),
            pytest.param([at("10.0.0", {})], "InvalidIPAddress", id="no-address"),
            pytest.param(
                [{"addressLocation": "10.0.0.1", "addresses": None}],
                "InvalidRequestFormat",
                id="null-addresses",
            ),
            pytest.param(
                [{"addressLocation": "10.0.0.1"}], "InvalidRequestFormat", id="absent-addresses"
            ),
            pytest.param(
                [
                    {
                        "addressLocation": "10.0.0.1",
                        "addresses": [{"address": "10.1.0.1", "services": None}],
                    }
                ],
                "InvalidRequestFormat",
                id="null-services",
            ),
            pytest.param([at("10.0.0.1", {}, "Update")], "InvalidRequestFormat", id="action"),
        ],
    )
    async def test_a_refused_location_batch_changes_nothing(
        self, client: NetworkManagementClient, entries: list[Doc], expected: str
    ) -> None:
        """One bad entry refuses the whole batch with 400, and a good one beside it is not kept."""
        await register(client, inbound("a"))
        error = await refused(locate(client, at("10.9.0.1", {"10.9.1.1": ["a"]}), *entries))
        assert (400, expected) == (error.status_code, code(error))
        assert await held(client) == {}

    @pytest.mark.parametrize(
        ("entries", "expected"),
        [
            pytest.param(
                [outbound("Default-NatGW")],
                "MultipleDefaultServicesNotAllowedInServiceGateway",
                id="reserved-name",
            ),
            pytest.param(
                [outbound("default-natgw", delete=True)],
                "MultipleDefaultServicesNotAllowedInServiceGateway",
                id="reserved-name-delete",
            ),
            pytest.param(
                [outbound("x", isDefault=True)],
                "MultipleDefaultServicesNotAllowedInServiceGateway",
                id="second-default",
            ),
            pytest.param(
                [inbound("x"), inbound("X")], "DuplicateServicesInRequest", id="duplicate"
            ),
            pytest.param([inbound("x", pool="gone")], "InvalidResourceReference", id="no-pool"),
            pytest.param(
                [outbound("x", publicNatGatewayId=rid("natGateways", "gone"))],
                "InvalidResourceReference",
                id="no-nat-gateway",
            ),
            pytest.param(
                [inbound("x", loadBalancerBackendPools=None)],
                "InvalidRequestFormat",
                id="null-pools",
            ),
            pytest.param(
                [{"service": {"name": "x", "properties": {"serviceType": "Sideways"}}}],
                "InvalidServiceType",
                id="type",
            ),
            pytest.param([inbound("../x")], "InvalidResourceName", id="name"),
        ],
    )
    async def test_a_refused_service_batch_changes_nothing(
        self, client: NetworkManagementClient, entries: list[Doc], expected: str
    ) -> None:
        """One bad entry refuses the whole batch with 400, and a good one beside it is not kept."""
        error = await refused(register(client, inbound("good"), *entries))
        assert (400, expected) == (error.status_code, code(error))
        assert {"default-natgw"} == set(await registered(client))

    async def test_null_instead_of_a_list(self, client: NetworkManagementClient) -> None:
        """A null where a list belongs is refused, not taken for an empty list."""
        gateway = client.service_gateways
        for call, field in (
            (gateway.update_services, "serviceRequests"),
            (gateway.update_address_locations, "addressLocations"),
        ):
            error = await refused(call(GROUP, GATEWAY, {"action": "FullUpdate", field: None}))
            assert (error.status_code, code(error)) == (400, "InvalidRequestFormat")

    async def test_a_mapped_service_cannot_be_unregistered(
        self, client: NetworkManagementClient
    ) -> None:
        """Unregistering waits for the last address, whether by name or by a FullUpdate."""
        await register(client, inbound("a"), inbound("ab"))
        await locate(client, at("10.0.0.1", {"10.1.0.1": ["a"]}))
        for attempt in (register(client, inbound("a", delete=True)), register(client, full=True)):
            error = await refused(attempt)
            assert code(error) == "ServiceWithOverlayMappingsCannotBeDeleted"
        await register(client, inbound("ab", delete=True))  # the name alone decides, not a prefix
        await locate(client, at("10.0.0.1", {}))
        await register(client, inbound("A", delete=True))
        assert {"default-natgw"} == set(await registered(client))

    async def test_unregistering_what_is_gone_is_fine(
        self, client: NetworkManagementClient
    ) -> None:
        """A repeated unregistration succeeds, so that a request may be sent twice."""
        await register(client, inbound("never", delete=True))

    async def test_an_absent_gateway_is_404(self, client: NetworkManagementClient) -> None:
        """Nothing is made up for a gateway that does not exist."""
        with pytest.raises(ResourceNotFoundError):
            await client.service_gateways.get(GROUP, "other")
        error = await refused(
            client.service_gateways.update_services(GROUP, "other", {"serviceRequests": []})
        )
        assert error.status_code == 404


class TestResources:
    """Public IPs, load balancers, NAT gateways, service gateways."""

    async def test_public_ips_keep_their_address(self, client: NetworkManagementClient) -> None:
        """Each gets an address of its family that no other has, and a repeated PUT keeps it."""
        four = await put_ip(client, "a")
        other = await put_ip(client, "b")
        six = await put_ip(client, "c", version="IPv6")
        again = await put_ip(client, "a")
        assert four.ip_address.startswith("203.0.113.")
        assert six.ip_address.startswith("2001:db8:")
        assert four.ip_address == again.ip_address != other.ip_address
        listed = [entry.name async for entry in client.public_ip_addresses.list(GROUP)]
        assert listed == ["a", "b", "c", "default-natgw-pip"]

    async def test_an_attached_public_ip_cannot_be_deleted(
        self, client: NetworkManagementClient
    ) -> None:
        """400 PublicIPAddressCannotBeDeleted until its load balancer is gone."""
        await put_balancer(client, "web", rule("r", 80, 8080))
        seen = await client.public_ip_addresses.get(GROUP, "web-pip")
        assert seen.ip_configuration.id.startswith(rid("loadBalancers", "web") + "/")
        error = await refused(client.public_ip_addresses.begin_delete(GROUP, "web-pip"))
        assert (error.status_code, code(error)) == (400, "PublicIPAddressCannotBeDeleted")
        await (await client.load_balancers.begin_delete(GROUP, "web")).result()
        await (await client.public_ip_addresses.begin_delete(GROUP, "web-pip")).result()
        with pytest.raises(ResourceNotFoundError):
            await client.public_ip_addresses.get(GROUP, "web-pip")

    async def test_deleting_what_is_gone_is_fine(self, client: NetworkManagementClient) -> None:
        """DELETE of an absent resource is 204, of every kind."""
        for operations in (
            client.public_ip_addresses,
            client.load_balancers,
            client.nat_gateways,
        ):
            await (await operations.begin_delete(GROUP, "absent")).result()

    async def test_a_put_without_a_rule_removes_it(self, client: NetworkManagementClient) -> None:
        """A load balancer is replaced as a whole."""
        await put_balancer(client, "web", rule("one", 80, 8080), rule("two", 443, 8443))
        seen = await put_balancer(client, "web", rule("two", 443, 8443))
        assert [entry.name for entry in seen.load_balancing_rules] == ["two"]
        assert seen.sku.name == "Service"

    @pytest.mark.parametrize(
        ("rules", "expected"),
        [
            pytest.param(
                [rule("a", 80, 8080), rule("b", 81, 8080)],
                "RulesUseSameBackendPortProtocolAndPool",
                id="same-backend-port",
            ),
            pytest.param(
                [rule("a", 80, 8080), rule("b", 80, 8081)],
                "RulesUseSameFrontendPortProtocolAndIPConfig",
                id="same-frontend-port",
            ),
            pytest.param([rule("a", 65535, 80)], "InvalidValue", id="frontend-port"),
            pytest.param([rule("a", 80, 0)], "InvalidValue", id="backend-port"),
            pytest.param([rule("a", 80, 80, "Sctp")], "InvalidProtocol", id="protocol"),
            pytest.param(
                [rule("a", 80, 80, lb="other")], "InvalidResourceReference", id="other-pool"
            ),
        ],
    )
    async def test_rules_that_cannot_be(
        self, client: NetworkManagementClient, rules: list[Doc], expected: str
    ) -> None:
        """A load balancer with a bad rule is refused with the provider's code."""
        await put_ip(client, "web-pip")
        error = await refused(
            client.load_balancers.begin_create_or_update(GROUP, "web", balancer("web", *rules))
        )
        assert (400, expected) == (error.status_code, code(error))

    async def test_same_backend_port_of_two_protocols_is_fine(
        self, client: NetworkManagementClient
    ) -> None:
        """TCP and UDP on one port are two rules."""
        seen = await put_balancer(
            client, "dns", rule("t", 53, 53, lb="dns"), rule("u", 53, 53, "Udp", lb="dns")
        )
        assert len(seen.load_balancing_rules) == 2

    async def test_skus_are_exact(self, client: NetworkManagementClient) -> None:
        """`service` in lower case is not the SKU `Service`."""
        await put_ip(client, "web-pip")
        error = await refused(
            client.load_balancers.begin_create_or_update(
                GROUP, "web", balancer("web", sku="service")
            )
        )
        assert code(error) == "InvalidSku"

    async def test_a_public_ip_has_one_user(self, client: NetworkManagementClient) -> None:
        """A second load balancer cannot take the address of the first."""
        await put_balancer(client, "web")
        body = balancer("web")
        error = await refused(client.load_balancers.begin_create_or_update(GROUP, "web-api", body))
        assert code(error) == "PublicIPAddressInUse"

    async def test_a_registered_load_balancer_cannot_be_deleted(
        self, client: NetworkManagementClient
    ) -> None:
        """First the registration gives up the pool, then the load balancer may go."""
        await put_balancer(client, "web")
        await register(client, inbound("web", pool="web"))
        error = await refused(client.load_balancers.begin_delete(GROUP, "web"))
        assert code(error) == "InUseLoadBalancerCannotBeDeleted"
        await register(client, inbound("web"))
        await (await client.load_balancers.begin_delete(GROUP, "web")).result()

    async def test_an_explicit_null_clears_and_omission_keeps(
        self, server: NrpServer, client: NetworkManagementClient
    ) -> None:
        """Of the gateway of a service and of the service gateway of a NAT gateway; only then
        may the NAT gateway be deleted."""
        await put_ip(client, "out-pip")
        nat = {
            "location": REGION,
            "sku": {"name": "StandardV2"},
            "properties": {
                "serviceGateway": {"id": server.gateway_id},
                "publicIpAddresses": [{"id": rid("publicIPAddresses", "out-pip")}],
            },
        }
        put = client.nat_gateways.begin_create_or_update
        await (await put(GROUP, "out", nat)).result()
        await register(client, outbound("out", publicNatGatewayId=rid("natGateways", "out")))

        await register(client, outbound("out"))
        nat["properties"] = {}
        seen = await (await put(GROUP, "out", nat)).result()
        assert seen.service_gateway.id == server.gateway_id
        assert not seen.public_ip_addresses  # a list is replaced, a reference is not
        error = await refused(client.nat_gateways.begin_delete(GROUP, "out"))
        assert code(error) == "InUseNatGatewayCannotBeDeleted"

        await register(client, outbound("out", publicNatGatewayId=None))
        error = await refused(client.nat_gateways.begin_delete(GROUP, "out"))
        assert code(error) == "InUseNatGatewayCannotBeDeleted"
        nat["properties"] = {"serviceGateway": None}
        seen = await (await put(GROUP, "out", nat)).result()
        assert seen.service_gateway is None
        await (await client.nat_gateways.begin_delete(GROUP, "out")).result()

    async def test_nat_gateways_take_each_family_in_its_list(
        self, client: NetworkManagementClient
    ) -> None:
        """An IPv6 address in the IPv4 list is refused."""
        await put_ip(client, "six", version="IPv6")
        body = {
            "location": REGION,
            "sku": {"name": "StandardV2"},
            "properties": {"publicIpAddresses": [{"id": rid("publicIPAddresses", "six")}]},
        }
        error = await refused(client.nat_gateways.begin_create_or_update(GROUP, "out", body))
        assert code(error) == "InvalidIPAddressVersion"

    async def test_etags_guard_a_put(self, client: NetworkManagementClient) -> None:
        """A stale If-Match is 412 and changes nothing; the current one passes."""
        first = await put_ip(client, "a")
        second = await put_ip(client, "a")
        assert first.etag != second.etag
        put = client.public_ip_addresses.begin_create_or_update
        error = await refused(put(GROUP, "a", public_ip(), headers={"If-Match": first.etag}))
        assert (error.status_code, code(error)) == (412, "PreconditionFailed")
        await (await put(GROUP, "a", public_ip(), headers={"If-Match": second.etag})).result()

    async def test_a_service_gateway_comes_with_its_default(
        self, server: NrpServer, client: NetworkManagementClient
    ) -> None:
        """A new gateway has the reserved service, can be tagged and listed, and goes when empty."""
        body = {
            "location": REGION,
            "sku": {"name": "Standard", "tier": "Regional"},
            "properties": {"virtualNetwork": {"id": rid("virtualNetworks", "net")}},
        }
        gateways = client.service_gateways
        await (await gateways.begin_create_or_update(GROUP, "second", body)).result()
        names = [entry.name async for entry in gateways.get_services(GROUP, "second")]
        assert names == ["default-natgw"]
        tagged = await gateways.update_tags(GROUP, "second", {"tags": {"a": "b"}})
        assert tagged.tags == {"a": "b"}
        assert sorted([entry.name async for entry in gateways.list(GROUP)]) == [GATEWAY, "second"]
        assert len([entry async for entry in gateways.list_all()]) == 2
        await (await gateways.begin_delete(GROUP, "second")).result()
        with pytest.raises(ResourceNotFoundError):
            await gateways.get(GROUP, "second")

    @pytest.mark.parametrize(
        ("quota", "expected"),
        [
            pytest.param(Quota(public_ips=2), "PublicIPCountLimitReached", id="public-ips"),
            pytest.param(Quota(load_balancers=0), "QuotaExceeded", id="load-balancers"),
            pytest.param(Quota(services=1), "QuotaExceeded", id="services"),
            pytest.param(Quota(addresses=1), "QuotaExceeded", id="addresses"),
        ],
    )
    async def test_quota(self, quota: Quota, expected: str) -> None:
        """What is beyond the subscription's limits is refused with the code for it."""
        async with NrpServer(quota=quota) as server, sdk(server) as client:

            async def fill() -> None:
                await put_balancer(client, "web")
                await register(client, inbound("a"))
                addresses = {"10.1.0.1": ["a"], "10.1.0.2": ["a"]}
                await locate(client, at("10.0.0.1", addresses))
                await put_ip(client, "more")

            error = await refused(fill())
            assert (400, expected) == (error.status_code, code(error))


class TestConventions:
    """What Azure's resource manager asks of every request."""

    async def test_a_bearer_token_is_required(self, server: NrpServer) -> None:
        """Without one the answer is 401 and nothing happens."""
        async with sdk(server, NoToken()) as client:
            with pytest.raises(ClientAuthenticationError) as caught:
                await client.service_gateways.get(GROUP, GATEWAY)
        assert caught.value.status_code == 401

    @pytest.mark.parametrize(
        ("method", "path", "status", "expected"),
        [
            ("GET", rid("serviceGateways", GATEWAY), 400, "MissingApiVersionParameter"),
            ("GET", rid("toasters", "x") + "?api-version=1", 404, "InvalidResourceType"),
            (
                "GET",
                f"/subscriptions/me{rid('natGateways', 'x')[51:]}?api-version=1",
                404,
                "InvalidSubscriptionId",
            ),
            ("POST", rid("natGateways", "x") + "?api-version=1", 404, "NotFound"),
            ("GET", "/", 404, "NotFound"),
            (
                "POST",
                rid("serviceGateways", GATEWAY) + "/updateServices?api-version=1",
                400,
                "InvalidRequestContent",
            ),
        ],
    )
    async def test_malformed_requests(
        self, server: NrpServer, method: str, path: str, status: int, expected: str
    ) -> None:
        """Each gets an ARM error that says what is wrong."""
        async with (
            aiohttp.ClientSession(headers={"Authorization": "Bearer x"}) as session,
            session.request(method, server.url + path, data=b"{") as response,
        ):
            assert response.status == status
            assert (await response.json())["error"]["code"] == expected

    async def test_paths_are_matched_without_case(self, server: NrpServer) -> None:
        """Azure's ids come back in any case."""
        path = f"{server.gateway_id.upper()}?api-version=1"
        async with (
            aiohttp.ClientSession(headers={"Authorization": "Bearer x"}) as session,
            session.get(server.url + path) as response,
        ):
            assert response.status == 200
            assert response.headers["x-ms-request-id"]
