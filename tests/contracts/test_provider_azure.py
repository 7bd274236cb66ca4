"""What only the Azure client has to get right: long-running answers, lost ones, waiting, secrets.

The rows named W.. are those of the conformance table for the client.
"""

import asyncio
import contextlib
import logging
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from sandbox.nrp import Fault, NrpServer, Plan
from sandbox.nrp.admin import Edit, apply
from sandbox.nrp.server import SUBSCRIPTION
from services.kit.config import NrpSettings, Secret
from services.nrp_sync.connecting import connect, provider_settings
from services.nrp_sync.provider import (
    AuthFailed,
    Conflict,
    Invalid,
    LoadBalancer,
    NatGateway,
    NotFound,
    OverlayMappings,
    Provider,
    ProviderError,
    PublicAddress,
    ServiceKind,
    Throttled,
    Unknown,
    Unreachable,
    Unreadable,
    open_provider,
)
from tests.contracts.test_provider import (
    at,
    azure_settings,
    gone,
    held,
    inbound,
    locations,
    registered,
    services,
)

Call = Callable[[Provider], Awaitable[Any]]
ACTIONS: dict[str, Call] = {
    "update_services": lambda p: p.update_services(services(inbound("a"))),
    "update_address_locations": lambda p: p.update_address_locations(
        locations(at("10.0.0.1", {"10.1.0.1": ("base",)}))
    ),
}
CHANGES: dict[str, Call] = ACTIONS | {
    "put_public_ip": lambda p: p.put_public_ip(PublicAddress(name="a")),
    "delete_public_ip": lambda p: p.delete_public_ip("there"),
}


@pytest.fixture
async def server() -> AsyncIterator[NrpServer]:
    async with NrpServer(page_size=2) as running:
        yield running


@contextlib.asynccontextmanager
async def opened(server: NrpServer, **settings: Any) -> AsyncIterator[Provider]:
    provider = await open_provider(azure_settings(server, **settings))
    try:
        yield provider
    finally:
        await provider.close()


@pytest.fixture
async def provider(server: NrpServer) -> AsyncIterator[Provider]:
    async with opened(server) as provider:
        await provider.update_services(services(inbound("base")))
        await provider.put_public_ip(PublicAddress(name="there"))
        server.journal.reset()
        yield provider


async def was_applied(provider: Provider, op: str) -> bool:
    match op:
        case "update_services":
            return "a" in await registered(provider)
        case "update_address_locations":
            return await held(provider) != {}
        case "put_public_ip":
            return await provider.get_public_ip("a") is not None
    return await provider.get_public_ip("there") is None


class TestAnswers:
    """A change that succeeded, and the many ways to say so or to say the contrary."""

    @pytest.mark.parametrize("op", ACTIONS)
    @pytest.mark.parametrize(
        ("kind", "status"),
        [
            pytest.param("bare", 200, id="W11-bare-200"),
            pytest.param("headers", 200, id="W11-200-with-headers-left"),
            pytest.param("async", 202, id="202-polled"),
        ],
    )
    async def test_an_action_that_succeeds(
        self, server: NrpServer, provider: Provider, op: str, kind: Any, status: int
    ) -> None:
        """A 200 is done at once whatever headers it has; a 202 is done when it ends."""
        server.faults.add(Fault(kind=kind, op=op, seconds=0.1, count=1))
        ack = await CHANGES[op](provider)
        assert await was_applied(provider, op)
        assert ack.status == status
        assert ack.request_id

    @pytest.mark.parametrize("op", sorted(CHANGES.keys() - ACTIONS.keys()))
    async def test_a_resource_that_takes_its_time(
        self, server: NrpServer, provider: Provider, op: str
    ) -> None:
        """A long-running PUT or DELETE returns when it is done, a PUT with what came out."""
        server.faults.add(Fault(kind="async", op=op, seconds=0.1, count=1))
        made = await CHANGES[op](provider)
        assert await was_applied(provider, op)
        assert made is None or made.address

    @pytest.mark.parametrize("op", CHANGES)
    @pytest.mark.parametrize(
        ("code", "expected"),
        [
            ("DuplicateLocationsInRequest", Invalid),
            ("ServiceWithOverlayMappingsCannotBeDeleted", OverlayMappings),
            ("InternalServerError", Unknown),
        ],
    )
    async def test_a_failed_operation(
        self,
        server: NrpServer,
        provider: Provider,
        op: str,
        code: str,
        expected: type[ProviderError],
    ) -> None:
        """[W12] The last poll has status 200 and says Failed: its code decides the class."""
        server.faults.add(Fault(kind="async_failed", op=op, seconds=0.05, code=code, count=1))
        with pytest.raises(expected) as caught:
            await CHANGES[op](provider)
        assert type(caught.value) is expected
        assert caught.value.code == code
        assert not await was_applied(provider, op)

    @pytest.mark.parametrize("op", ACTIONS)
    @pytest.mark.parametrize(
        ("code", "expected"),
        [("InvalidRequestFormat", Invalid), ("SomethingElse", Unknown)],
    )
    async def test_an_error_inside_of_200(
        self,
        server: NrpServer,
        provider: Provider,
        op: str,
        code: str,
        expected: type[ProviderError],
    ) -> None:
        """[W13] The body's error code counts, not the status."""
        server.faults.add(Fault(kind="error_in_200", op=op, code=code, count=1))
        with pytest.raises(expected) as caught:
            await CHANGES[op](provider)
        assert caught.value.code == code

    async def test_a_failing_poll_is_not_a_failed_action(
        self, server: NrpServer, provider: Provider
    ) -> None:
        """503, 429 and a lost connection while asking for the end: it is asked again."""
        server.faults.set(
            Plan(
                faults=[
                    Fault(kind="async", op="update_services", seconds=0.3),
                    Fault(kind="error", op="get_operation", status=503, count=1),
                    Fault(kind="drop", op="get_operation", count=1),
                    Fault(kind="error", op="get_operation", status=429, retry_after=0.05, count=1),
                ]
            )
        )
        ack = await provider.update_services(services(inbound("a")))
        assert ack.status == 202
        assert "a" in await registered(provider)

    @pytest.mark.parametrize("status", [404, 403])
    @pytest.mark.parametrize("op", CHANGES)
    async def test_an_end_that_nobody_tells_is_unknown(
        self, server: NrpServer, provider: Provider, op: str, status: int
    ) -> None:
        """Accepted, and then the page of the operation is refused: it may have been applied."""
        server.faults.set(
            Plan(
                faults=[
                    Fault(kind="async", op=op, seconds=0.05),
                    Fault(kind="error", op="get_operation*", status=status),
                ]
            )
        )
        with pytest.raises(Unknown):
            await CHANGES[op](provider)

    @pytest.mark.parametrize("op", CHANGES)
    async def test_an_operation_has_a_deadline(self, server: NrpServer, op: str) -> None:
        """A long-running change that does not end is given up as unknown, not waited for."""
        async with opened(server, operation_timeout=0.3) as provider:
            await provider.update_services(services(inbound("base")))
            await provider.put_public_ip(PublicAddress(name="there"))
            server.faults.add(Fault(kind="async", op=op, seconds=60))
            with pytest.raises(Unknown) as caught:
                await CHANGES[op](provider)
        assert caught.value.metric_class == "timeout"

    async def test_unregistering_what_the_provider_does_not_know(
        self, server: NrpServer, provider: Provider
    ) -> None:
        """404 of a single unregistration is success; of a registration, or without the gateway,
        it is not."""
        server.faults.add(Fault(kind="error", op="update_services", status=404))
        await provider.update_services(services(gone("a")))
        with pytest.raises(NotFound):
            await provider.update_services(services(inbound("a")))
        with pytest.raises(NotFound):
            await provider.update_services(services(gone("a"), gone("b")))
        server.faults.add(Fault(kind="error", op="get_service_gateway", status=404))
        with pytest.raises(NotFound):
            await provider.update_services(services(gone("a")))

    @pytest.mark.parametrize("kind", ["public_ip", "load_balancer", "nat_gateway"])
    async def test_a_deletion_answered_404(
        self, server: NrpServer, provider: Provider, kind: str
    ) -> None:
        """[W14] Gone is what was asked for; any other error is one."""
        server.faults.add(Fault(kind="error", op="delete_*", status=404))
        delete = getattr(provider, f"delete_{kind}")
        await delete("x")
        server.faults.set(Plan(faults=[Fault(kind="error", op="delete_*", status=409)]))
        with pytest.raises(Conflict):
            await delete("x")


class TestLostAnswers:
    """Nobody knows what happened, or nothing happened for certain."""

    @pytest.mark.parametrize("op", CHANGES)
    @pytest.mark.parametrize(
        ("kind", "applied"),
        [
            ("hang", False),
            ("applied_hang", True),
            ("drop", False),
            ("applied_drop", True),
            ("truncate", True),
            ("applied_error", True),
        ],
    )
    async def test_unknown(self, server: NrpServer, op: str, kind: Any, applied: bool) -> None:
        """Timeout, broken connection, half an answer, 5xx: `Unknown`, applied or not."""
        async with opened(server, request_timeout=0.3) as provider:
            await provider.update_services(services(inbound("base")))
            await provider.put_public_ip(PublicAddress(name="there"))
            # The connection pool repeats a PUT or DELETE once when an old connection is gone.
            server.faults.add(Fault(kind=kind, op=op, status=500, seconds=5))
            with pytest.raises(Unknown) as caught:
                await CHANGES[op](provider)
            metric = {
                "hang": "timeout",
                "applied_hang": "timeout",
                "applied_error": "internal_error",
            }
            assert caught.value.metric_class == metric.get(kind, "unknown")
            server.faults.set(Plan())
            assert await was_applied(provider, op) is applied

    async def test_a_connection_that_was_never_opened(self, server: NrpServer) -> None:
        """`Unreachable`: certainly not applied, and it works again when the provider is back."""
        async with opened(server) as provider:
            await server.stop()
            for call in CHANGES.values():
                with pytest.raises(Unreachable):
                    await call(provider)
            await server.start()
            await provider.list_services()

    async def test_nothing_is_retried_below_the_engine(
        self, server: NrpServer, provider: Provider
    ) -> None:
        """One call is one request: the SDK's own retries are off."""
        server.faults.add(Fault(kind="error", status=503))
        for op, call in CHANGES.items():
            with pytest.raises(Unknown):
                await call(provider)
            assert server.journal.counts[op] == 1


class TestThrottling:
    """429 and our own limit."""

    async def test_a_closed_gate_sends_nothing(self, server: NrpServer, provider: Provider) -> None:
        """[report-54] Until Retry-After is over no further write of that kind is sent; reads and
        other kinds go on."""
        server.faults.add(Fault(kind="error", op="update_*", status=429, retry_after=30, count=1))
        with pytest.raises(Throttled) as first:
            await provider.update_services(services(inbound("a")))
        assert first.value.retry_after == 30
        with pytest.raises(Throttled) as second:
            await provider.update_address_locations(locations(at("10.0.0.1", {})))
        assert second.value.retry_after is not None
        assert 25 < second.value.retry_after <= 30
        assert server.journal.counts == {"update_services": 1}
        await provider.list_services()
        await provider.put_public_ip(PublicAddress(name="a"))

    async def test_a_gate_opens_again(self, server: NrpServer, provider: Provider) -> None:
        """When the time is over the next request is sent."""
        server.faults.add(Fault(kind="error", status=429, retry_after=0.2, count=1))
        with pytest.raises(Throttled):
            await provider.update_services(services(inbound("a")))
        closed = time.monotonic()
        async with asyncio.timeout(10):
            while True:
                try:
                    await provider.update_services(services(inbound("a")))
                    break
                except Throttled as error:
                    await asyncio.sleep(error.retry_after or 0.01)
        assert time.monotonic() - closed >= 0.15
        assert server.journal.counts["update_services"] == 2

    async def test_a_rate_of_our_own(self, server: NrpServer) -> None:
        """Beyond the rate a request is refused here, with the time after which it will pass."""
        async with opened(server, rate_limit=2.0) as provider:
            for _ in range(2):
                await provider.update_services(services(inbound("a")))
            with pytest.raises(Throttled) as caught:
                await provider.update_services(services(inbound("a")))
        assert caught.value.retry_after is not None
        assert 0 < caught.value.retry_after <= 0.5
        assert server.journal.counts["update_services"] == 2


class TestReading:
    """What is read is understood, or it is an error."""

    async def test_types_in_any_case_and_both_ways(
        self, server: NrpServer, provider: Provider
    ) -> None:
        """[I07] serviceType is matched without case; InboundOutbound counts as both."""
        apply(server, Edit(services={"x": {"kind": "INBOUND"}, "y": {"kind": "InboundOutbound"}}))
        seen = await registered(provider)
        assert seen["x"].kind is ServiceKind.INBOUND
        assert seen["y"].kind.inbound
        assert seen["y"].kind.outbound

    async def test_an_unknown_type_is_an_error(self, server: NrpServer, provider: Provider) -> None:
        """[I07] A live service that we can't read must not look like an orphan."""
        apply(server, Edit(services={"x": {"kind": "Sideways"}}))
        with pytest.raises(Unreadable, match="x has the unknown type 'Sideways'"):
            await provider.list_services()

    async def test_a_public_ip_without_address(self, server: NrpServer, provider: Provider) -> None:
        """[I09] It exists by name, with no address yet; the next put gives it one."""
        server.faults.add(Fault(kind="no_address", count=1))
        assert (await provider.put_public_ip(PublicAddress(name="a"))).address is None
        seen = await provider.get_public_ip("a")
        assert seen is not None
        assert seen.address is None
        assert (await provider.put_public_ip(PublicAddress(name="a"))).address is not None

    async def test_a_list_that_breaks_off(self, server: NrpServer, provider: Provider) -> None:
        """An error on the second page is an error, not a short list."""
        await provider.update_services(services(*(inbound(f"s{n}") for n in range(6))))
        server.faults.add(Fault(kind="error", op="list_services", status=503, skip=1))
        with pytest.raises(Unknown):
            await provider.list_services()


@contextlib.asynccontextmanager
async def odd_server(answer: Callable[[web.Request], web.Response]) -> AsyncIterator[str]:
    """Something that is no provider, or a strange one."""

    async def handle(request: web.Request) -> web.Response:
        return answer(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class TestStrangeProviders:
    """Answers that no well-behaved provider gives."""

    async def ask(self, answer: Callable[[web.Request], web.Response], call: Call) -> Any:
        async with odd_server(answer) as url:
            settings = azure_settings(NrpServer(), base_url=url, operation_timeout=5.0)
            provider = await open_provider(settings)
            try:
                return await call(provider)
            finally:
                await provider.close()

    async def test_the_token_stays_with_its_host(self) -> None:
        """A list or an operation that leads to another host is not followed."""
        elsewhere = "http://127.0.0.2:9/next"
        with pytest.raises(Unreadable, match="on another host"):
            await self.ask(
                lambda _: web.json_response({"value": [], "nextLink": elsewhere}),
                lambda p: p.list_services(),
            )
        headers = {"Azure-AsyncOperation": elsewhere}
        with pytest.raises(Unknown, match="another host"):
            await self.ask(
                lambda _: web.Response(status=202, headers=headers), CHANGES["update_services"]
            )
        for status in (200, 201):
            body = {"properties": {"provisioningState": "Updating"}}
            with pytest.raises(Unknown):
                await self.ask(
                    lambda _: web.json_response(body, status=status, headers=headers),  # noqa: B023
                    CHANGES["put_public_ip"],
                )

    async def test_an_endless_list(self) -> None:
        """A page that leads to itself ends the reading with an error."""
        with pytest.raises(Unreadable, match="does not end"):
            await self.ask(
                lambda r: web.json_response({"value": [], "nextLink": str(r.url)}),
                lambda p: p.list_services(),
            )

    @pytest.mark.parametrize("op", CHANGES)
    async def test_a_page_for_people(self, op: str) -> None:
        """HTML with status 200 (a proxy's) is no acknowledgement."""
        with pytest.raises(Unknown):
            await self.ask(
                lambda _: web.Response(text="<html>hello</html>", content_type="text/html"),
                CHANGES[op],
            )

    async def test_accepted_without_a_place_to_ask(self) -> None:
        """202 without any header: it may be applied."""
        with pytest.raises(Unknown, match="without a link"):
            await self.ask(lambda _: web.Response(status=202), CHANGES["update_services"])

    async def test_resources_that_are_none(self) -> None:
        """A document without a name is an error: of a change it leaves the outcome open."""
        calls: dict[str, Call] = {
            "get_public_ip": lambda p: p.get_public_ip("a"),
            "get_load_balancer": lambda p: p.get_load_balancer("a"),
            "get_nat_gateway": lambda p: p.get_nat_gateway("a"),
        }
        for call in calls.values():
            with pytest.raises(Unreadable):
                await self.ask(lambda _: web.json_response({"properties": {"ipAddress": 1}}), call)
        with pytest.raises(Unknown):
            await self.ask(lambda _: web.json_response({"nme": 1}), CHANGES["put_public_ip"])
        entry = {
            "name": "x",
            "properties": {"loadBalancingRules": [{"properties": {"protocol": "Tcp"}}]},
        }
        with pytest.raises(Unreadable):
            await self.ask(
                lambda _: web.json_response({"value": [entry]}), lambda p: p.list_load_balancers()
            )

    @pytest.mark.parametrize(
        "body", [b"", b"[]", b"{}", b'{"value": null}', b'{"value": [{"nme": 1}]}', b"nonsense"]
    )
    async def test_lists_that_are_none(self, body: bytes) -> None:
        """A body that is no list is an error, not an empty list."""
        with pytest.raises(ProviderError):
            await self.ask(
                lambda _: web.Response(body=body, content_type="application/json"),
                lambda p: p.list_address_locations(),
            )


class TestSecrets:
    """Tokens and subscription ids stay out of errors and logs."""

    @pytest.mark.parametrize(
        "fault",
        [
            Fault(kind="error", status=403, message=f"no right on /subscriptions/{SUBSCRIPTION}/x"),
            Fault(kind="error", status=401, message="token Bearer sandbox-token is too old"),
            Fault(kind="error", status=503, message=f"/SUBSCRIPTIONS/{SUBSCRIPTION}"),
            Fault(kind="drop"),
            Fault(kind="hang", seconds=5),
            Fault(kind="async_failed", message=f"in /subscriptions/{SUBSCRIPTION}/x"),
        ],
        ids=lambda fault: f"{fault.kind}-{fault.status}",
    )
    async def test_errors_and_logs(
        self, server: NrpServer, caplog: pytest.LogCaptureFixture, fault: Fault
    ) -> None:
        """Neither the text of an error, nor its traceback, nor any log line holds one."""
        caplog.set_level(logging.DEBUG)
        async with opened(server, request_timeout=0.3) as provider:
            await provider.update_services(services(inbound("base")))
            await provider.put_public_ip(PublicAddress(name="there"))
            server.faults.set(Plan(faults=[fault]))
            for call in CHANGES.values():
                try:
                    await call(provider)
                except ProviderError as error:
                    told = "".join(traceback.format_exception(error)) + str(error)
                    assert SUBSCRIPTION not in told
                    assert "sandbox-token" not in told
                else:
                    raise AssertionError("the fault had no effect")
            await server.stop()
            with pytest.raises(Unreachable) as caught:
                await provider.list_services()
            assert SUBSCRIPTION not in str(caught.value)
        assert SUBSCRIPTION not in caplog.text
        assert "sandbox-token" not in caplog.text

    def test_settings_do_not_show_them(self) -> None:
        """Nor does the text of the settings."""
        settings = azure_settings(NrpServer())
        assert "sandbox-token" not in repr(settings) + str(settings)
        assert SUBSCRIPTION not in repr(settings)


class TestConnecting:
    """Settings, credentials, and what it costs to know the port."""

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ({"subscription_id": ""}, "subscription_id is empty"),
            ({"resource_group": ""}, "resource_group is empty"),
            ({"region": ""}, "region is empty"),
            ({"service_gateway": ""}, "service_gateway is empty"),
            ({"vnet": ""}, "vnet is empty"),
            ({"request_timeout": 0.0}, "request_timeout is 0.0"),
            ({"base_url": "http://example.org"}, "must be https"),
            ({"base_url": "http://127.0.0.1.example.org"}, "must be https"),
            ({"token": ""}, "token is empty"),
            ({"provider": "gcp"}, "'azure', 'memory'"),
            ({"provider": "no.such.module:connect"}, "No module named"),
            ({"provider": "services.nrp_sync.memory:nothing"}, "nothing"),
        ],
    )
    async def test_bad_settings(
        self, server: NrpServer, change: dict[str, Any], expected: str
    ) -> None:
        """[S08] Each is refused by name, with what would be right."""
        with pytest.raises(ValueError, match=expected):
            await open_provider(azure_settings(server, **change))

    async def test_the_services_own_settings_connect(self, server: NrpServer) -> None:
        """Section `nrp` of the settings is enough; its masked token is sent as it really is."""
        settings = NrpSettings(endpoint=server.url, token=Secret("sandbox-token"))
        assert provider_settings(settings).token == "sandbox-token"
        provider = await connect(settings)
        assert [service.default for service in await provider.list_services()] == [True]
        await provider.close()

    async def test_a_refused_token(self, server: NrpServer, provider: Provider) -> None:
        """401 and 403 are `AuthFailed`, so that someone is told and nobody bisects."""
        for status in (401, 403):
            server.faults.set(Plan(faults=[Fault(kind="error", status=status)]))
            with pytest.raises(AuthFailed):
                await provider.list_services()
            with pytest.raises(AuthFailed):
                await provider.update_services(services(inbound("a")))

    async def test_our_request_id_travels(self, server: NrpServer, provider: Provider) -> None:
        """The id of the engine's row reaches the provider with every change, and an error brings
        back the provider's own."""
        await provider.update_services(services(inbound("a")), request_id="row-1")
        await provider.put_public_ip(PublicAddress(name="a"), request_id="row-2")
        await provider.put_load_balancer(LoadBalancer(name="a", public_ip="a"), request_id="row-3")
        await provider.delete_load_balancer("a", request_id="row-4")
        await provider.put_nat_gateway(NatGateway(name="n"), request_id="row-5")
        ids = [entry.client_request_id for entry in server.journal.entries]
        assert ids == ["row-1", "row-2", "row-3", "row-4", "row-5"]
        server.faults.add(Fault(kind="error", status=409))
        with pytest.raises(Conflict) as caught:
            await provider.update_services(services(inbound("a")))
        assert caught.value.request_id == server.journal.entries[-1].request_id

    async def test_another_vnet_group_and_network_subscription(self, server: NrpServer) -> None:
        """[W05] The virtual network's id has its own group; the rest has the network
        subscription."""
        other = "00000000-0000-0000-0000-0000000000ff"
        async with opened(
            server, subscription_id=other, network_subscription_id=SUBSCRIPTION,
            vnet_resource_group="nets",
        ) as provider:  # fmt: skip
            await provider.put_public_ip(PublicAddress(name="a-pip"))
            await provider.put_load_balancer(LoadBalancer(name="a", public_ip="a-pip"))
            await provider.update_services(services(inbound("a", "a")))
        gateway = server.resources.gateway(server.gateway_id)
        pool = gateway.services["a"].pools[0]
        network = pool["properties"]["virtualNetwork"]["id"]
        assert network == (
            f"/subscriptions/{other}/resourceGroups/nets/providers/Microsoft.Network"
            "/virtualNetworks/vnet"
        )
        assert pool["id"].startswith(f"/subscriptions/{SUBSCRIPTION}/")

    def test_the_port_is_cheap_to_import(self) -> None:
        """Whoever only needs the port's types does not load Azure's SDK or an HTTP library."""
        code = (
            "import sys, services.nrp_sync.provider, services.nrp_sync.memory;"
            "print([m for m in ('azure', 'aiohttp', 'sqlalchemy', 'nats') if m in sys.modules])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout.strip() == "[]"
