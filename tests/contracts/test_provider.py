"""What every provider promises to the engine: one suite, run against each implementation.

`azure` is the real client on Microsoft's SDK against the sandbox's server; `memory` lives in this
process. A further provider joins with one entry in `OPENERS`.
"""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from sandbox.nrp import Fault, NrpServer
from sandbox.nrp.server import GATEWAY, GROUP, REGION, SUBSCRIPTION, VNET
from services.nrp_sync.memory import MemoryProvider
from services.nrp_sync.provider import (
    DEFAULT_SERVICE,
    Action,
    Address,
    AddressLocation,
    Conflict,
    InUse,
    Invalid,
    LoadBalancer,
    LocationBatch,
    NatGateway,
    OverlayMappings,
    PreconditionFailed,
    Provider,
    ProviderError,
    ProviderSettings,
    PublicAddress,
    QuotaExceeded,
    Rule,
    ServiceBatch,
    ServiceKind,
    ServiceRegistration,
    ServiceUpdate,
    Throttled,
    Unknown,
    asked,
    open_provider,
)

WEB = "0c6d1f2e-7a52-4d0c-9d5b-5a3c7d9e0001"
API = "0c6d1f2e-7a52-4d0c-9d5b-5a3c7d9e0002"


@dataclass(frozen=True)
class Subject:
    """A provider, and a way to make its next calls fail: status, applied or not."""

    provider: Provider
    fail: Callable[..., None]


def azure_settings(server: NrpServer, **more: Any) -> ProviderSettings:
    given: dict[str, Any] = {
        "base_url": server.url,
        "token": "sandbox-token",
        "subscription_id": SUBSCRIPTION,
        "resource_group": GROUP,
        "region": REGION,
        "service_gateway": GATEWAY,
        "vnet": VNET,
        "poll_interval": 0.05,
        **more,
    }
    return ProviderSettings(**given)


@contextlib.asynccontextmanager
async def open_azure() -> AsyncIterator[Subject]:
    async with NrpServer(page_size=2) as server:
        provider = await open_provider(azure_settings(server))

        def fail(op: str, status: int, code: str = "", *, applied: bool = False) -> None:
            kind: Any = "applied_error" if applied else "error"
            server.faults.add(Fault(kind=kind, op=op, status=status, code=code, count=1))

        try:
            yield Subject(provider, fail)
        finally:
            await provider.close()


@contextlib.asynccontextmanager
async def open_memory() -> AsyncIterator[Subject]:
    provider = await open_provider(ProviderSettings(provider="memory"))
    assert isinstance(provider, MemoryProvider)
    kinds: dict[int, type[ProviderError]] = {
        409: Conflict,
        412: PreconditionFailed,
        429: Throttled,
        400: Invalid,
        503: Unknown,
    }

    def fail(op: str, status: int, code: str = "", *, applied: bool = False) -> None:
        kind = QuotaExceeded if code == "QuotaExceeded" else kinds[status]
        provider.fail(kind(op, "as asked", code=code, status=status), applied=applied)

    yield Subject(provider, fail)
    await provider.close()


OPENERS = {"azure": open_azure, "memory": open_memory}


@pytest.fixture(params=sorted(OPENERS))
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    async with OPENERS[request.param]() as opened:
        yield opened


@pytest.fixture
def provider(subject: Subject) -> Provider:
    return subject.provider


def inbound(name: str, balancer: str | None = None) -> ServiceUpdate:
    kind = ServiceKind.INBOUND
    return ServiceUpdate(service=ServiceRegistration(name=name, kind=kind, load_balancer=balancer))


def outbound(name: str, gateway: str | None = None) -> ServiceUpdate:
    kind = ServiceKind.OUTBOUND
    return ServiceUpdate(service=ServiceRegistration(name=name, kind=kind, nat_gateway=gateway))


def gone(name: str, kind: ServiceKind = ServiceKind.INBOUND) -> ServiceUpdate:
    return ServiceUpdate(service=ServiceRegistration(name=name, kind=kind), delete=True)


def services(*updates: ServiceUpdate, action: Action = Action.PARTIAL) -> ServiceBatch:
    return ServiceBatch(services=updates, action=action)


def at(
    location: str, addresses: dict[str, tuple[str, ...]], action: Action = Action.PARTIAL
) -> AddressLocation:
    return AddressLocation(
        location=location,
        action=action,
        addresses=tuple(
            Address(address=address, services=names) for address, names in addresses.items()
        ),
    )


def locations(*entries: AddressLocation, action: Action = Action.PARTIAL) -> LocationBatch:
    return LocationBatch(locations=entries, action=action)


async def held(provider: Provider) -> dict[str, dict[str, tuple[str, ...]]]:
    return {
        entry.location: {item.address: item.services for item in entry.addresses}
        for entry in await provider.list_address_locations()
    }


async def registered(provider: Provider) -> dict[str, ServiceRegistration]:
    return {service.name: service for service in await provider.list_services()}


async def make_balancer(provider: Provider, name: str, *rules: Rule) -> LoadBalancer:
    await provider.put_public_ip(PublicAddress(name=f"{name}-pip"))
    return await provider.put_load_balancer(
        LoadBalancer(name=name, public_ip=f"{name}-pip", rules=rules)
    )


async def make_gateway(provider: Provider, name: str) -> NatGateway:
    await provider.put_public_ip(PublicAddress(name=f"{name}-pip"))
    await provider.put_public_ip(PublicAddress(name=f"{name}-pip-v6", family=6))
    wanted = NatGateway(name=name, public_ips=(f"{name}-pip",), public_ips_v6=(f"{name}-pip-v6",))
    return await provider.put_nat_gateway(wanted)


class TestServices:
    """Registrations."""

    async def test_the_reserved_default_is_there_and_marked(self, provider: Provider) -> None:
        """The provider's own service is listed with `default`, so that nobody takes it for ours."""
        default = (await registered(provider))[DEFAULT_SERVICE]
        assert default.default
        assert default.kind.outbound

    async def test_what_is_registered_is_listed(self, provider: Provider) -> None:
        """A registration is read back as it was put, with its load balancer or NAT gateway."""
        await make_balancer(provider, WEB)
        await make_gateway(provider, "egress")
        ack = await provider.update_services(
            services(inbound(WEB, WEB), outbound("egress", "egress"))
        )
        assert ack.request_id
        seen = await registered(provider)
        assert seen[WEB] == inbound(WEB, WEB).service
        assert seen["egress"] == outbound("egress", "egress").service

    async def test_names_have_no_case(self, provider: Provider) -> None:
        """A service registered in capitals is the same service."""
        await provider.update_services(services(inbound(WEB.upper())))
        await provider.update_services(services(inbound(WEB)))
        assert {WEB, DEFAULT_SERVICE} == set(await registered(provider))

    async def test_lists_are_complete(self, provider: Provider) -> None:
        """All entries of many pages come, in order of name."""
        names = [f"svc-{n:02}" for n in range(9)]
        await provider.update_services(services(*(inbound(name) for name in names)))
        assert [s.name for s in await provider.list_services()] == [DEFAULT_SERVICE, *names]

    async def test_a_reference_is_cleared(self, provider: Provider) -> None:
        """A registration without load balancer or NAT gateway gives up the one it had."""
        await make_balancer(provider, WEB)
        await make_gateway(provider, "egress")
        await provider.update_services(services(inbound(WEB, WEB), outbound("egress", "egress")))
        await provider.update_services(services(inbound(WEB), outbound("egress")))
        seen = await registered(provider)
        assert seen[WEB].load_balancer is None
        assert seen["egress"].nat_gateway is None

    async def test_unregistering_twice_is_fine(self, provider: Provider) -> None:
        """So that a request of unknown outcome may be sent again."""
        await provider.update_services(services(inbound(WEB)))
        await provider.update_services(services(gone(WEB)))
        await provider.update_services(services(gone(WEB)))
        assert {DEFAULT_SERVICE} == set(await registered(provider))

    async def test_a_mapped_service_is_not_unregistered(self, provider: Provider) -> None:
        """`OverlayMappings` while an address maps to it, however its name begins (report 53)."""
        await provider.update_services(services(inbound("web"), inbound("web-api")))
        await provider.update_address_locations(locations(at("10.0.0.1", {"10.1.0.1": ("web",)})))
        with pytest.raises(OverlayMappings):
            await provider.update_services(services(gone("web")))
        await provider.update_services(services(gone("web-api")))
        assert {"web", DEFAULT_SERVICE} == set(await registered(provider))

    async def test_a_full_update_replaces_all_but_the_default(self, provider: Provider) -> None:
        """FULL with nothing wipes the registrations, and the default stays."""
        await provider.update_services(services(inbound("a"), inbound("b")))
        await provider.update_services(services(inbound("b"), action=Action.FULL))
        assert {"b", DEFAULT_SERVICE} == set(await registered(provider))
        await provider.update_services(services(action=Action.FULL))
        assert {DEFAULT_SERVICE} == set(await registered(provider))

    async def test_an_empty_partial_batch_sends_nothing(self, subject: Subject) -> None:
        """[W10] Nothing to do is success without a request, even where a request would fail."""
        subject.fail("update_services", 409)
        subject.fail("update_address_locations", 409)
        assert (await subject.provider.update_services(services())).status == 0
        assert (await subject.provider.update_address_locations(locations())).status == 0

    @pytest.mark.parametrize(
        "bad",
        [
            pytest.param(inbound(DEFAULT_SERVICE.upper()), id="reserved-name"),
            pytest.param(gone(DEFAULT_SERVICE, ServiceKind.OUTBOUND), id="reserved-delete"),
            pytest.param(inbound("x", "absent"), id="absent-balancer"),
            pytest.param(outbound("x", "absent"), id="absent-gateway"),
            pytest.param(inbound("good"), id="duplicate"),
        ],
    )
    async def test_one_bad_entry_refuses_the_batch(
        self, provider: Provider, bad: ServiceUpdate
    ) -> None:
        """`Invalid`, and nothing of the batch is kept: the engine may bisect it."""
        with pytest.raises(Invalid):
            await provider.update_services(services(inbound("good"), bad))
        assert {DEFAULT_SERVICE} == set(await registered(provider))


class TestLocations:
    """Addresses and what they map to."""

    @pytest.fixture(autouse=True)
    async def registrations(self, provider: Provider) -> None:
        await provider.update_services(services(*(inbound(name) for name in ("a", "b", "c"))))

    async def test_an_address_carries_its_whole_service_list(self, provider: Provider) -> None:
        """A listed address is replaced, one that is not listed stays."""
        await provider.update_address_locations(
            locations(at("10.0.0.1", {"10.1.0.1": ("a", "b"), "10.1.0.2": ("c",)}))
        )
        await provider.update_address_locations(locations(at("10.0.0.1", {"10.1.0.1": ("b",)})))
        assert await held(provider) == {"10.0.0.1": {"10.1.0.1": ("b",), "10.1.0.2": ("c",)}}

    async def test_a_batch_may_be_sent_twice(self, provider: Provider) -> None:
        """Replaying a batch of additions and removals changes nothing more."""
        await provider.update_address_locations(locations(at("10.0.0.2", {"10.1.0.9": ("a",)})))
        batch = locations(
            at("10.0.0.1", {"10.1.0.1": ("a",)}, Action.FULL), at("10.0.0.2", {"10.1.0.9": ()})
        )
        await provider.update_address_locations(batch)
        once = await held(provider)
        await provider.update_address_locations(batch)
        assert await held(provider) == once == {"10.0.0.1": {"10.1.0.1": ("a",)}}

    async def test_empty_means_delete(self, provider: Provider) -> None:
        """[W06] An address without services goes, a location without addresses goes, the last
        address takes its location along, and what is not there may be deleted."""
        await provider.update_address_locations(
            locations(
                at("10.0.0.1", {"10.1.0.1": ("a",), "10.1.0.2": ("a",)}),
                at("10.0.0.2", {"10.1.0.3": ("a",)}),
                at("10.0.0.3", {"10.1.0.4": ("a",)}),
            )
        )
        await provider.update_address_locations(
            locations(
                at("10.0.0.1", {"10.1.0.1": ()}),
                at("10.0.0.2", {}),
                at("10.0.0.3", {"10.1.0.4": ()}),
                at("10.0.0.4", {}),
            )
        )
        assert await held(provider) == {"10.0.0.1": {"10.1.0.2": ("a",)}}

    async def test_full_update_of_a_location(self, provider: Provider) -> None:
        """Leaves there only what it lists, and other locations as they are."""
        await provider.update_address_locations(
            locations(
                at("10.0.0.1", {"10.1.0.1": ("a",), "10.1.0.2": ("a",)}),
                at("10.0.0.2", {"10.1.0.3": ("a",)}),
            )
        )
        await provider.update_address_locations(
            locations(at("10.0.0.1", {"10.1.0.7": ("a",)}, Action.FULL))
        )
        assert await held(provider) == {
            "10.0.0.1": {"10.1.0.7": ("a",)},
            "10.0.0.2": {"10.1.0.3": ("a",)},
        }

    async def test_full_update_of_all(self, provider: Provider) -> None:
        """Drops the locations that it does not list, and of those that it lists the addresses that
        it does not list, whatever the action of the location says."""
        await provider.update_address_locations(
            locations(
                at("10.0.0.1", {"10.1.0.1": ("a",)}),
                at("10.0.0.2", {"10.1.0.2": ("a",), "10.1.0.3": ("a",)}),
            )
        )
        await provider.update_address_locations(
            locations(at("10.0.0.2", {"10.1.0.2": ("a",)}), action=Action.FULL)
        )
        assert await held(provider) == {"10.0.0.2": {"10.1.0.2": ("a",)}}

    async def test_two_spellings_are_one_location(self, provider: Provider) -> None:
        """[W08] [report-52] Entries of one location are merged, none is lost, none is refused."""
        await provider.update_address_locations(
            locations(
                at("2001:DB8:0::1", {"2001:db8::A": ("A",)}),
                at("2001:db8::1", {"2001:db8::b": ("b",), "2001:DB8::a": ("c",)}),
            )
        )
        assert await held(provider) == {
            "2001:db8::1": {"2001:db8::a": ("a", "c"), "2001:db8::b": ("b",)}
        }

    async def test_lists_are_complete_and_ordered(self, provider: Provider) -> None:
        """All locations of many pages come, each with its addresses, in a fixed order."""
        wanted = {
            f"10.0.0.{n}": {f"10.1.{n}.{m}": ("a", "b") for m in range(1, 4)} for n in range(7)
        }
        await provider.update_address_locations(
            locations(*(at(place, addresses) for place, addresses in wanted.items()))
        )
        seen = await provider.list_address_locations()
        assert await held(provider) == wanted
        assert seen == sorted(seen, key=lambda entry: entry.location)

    @pytest.mark.parametrize(
        "bad",
        [
            pytest.param(at("10.0.0.1", {"2001:db8::1": ("a",)}), id="family-report-28"),
            pytest.param(at("2001:db8::1", {"10.1.0.1": ("a",)}), id="family-other-way"),
            pytest.param(at("10.0.0.1", {"10.1.0.1": ("nobody",)}), id="unregistered"),
            pytest.param(at("node-1", {}), id="no-address"),
        ],
    )
    async def test_one_bad_entry_refuses_the_batch(
        self, provider: Provider, bad: AddressLocation
    ) -> None:
        """`Invalid`, and nothing of the batch is kept: the engine may bisect it."""
        good = at("10.9.0.1", {"10.9.1.1": ("a",)})
        with pytest.raises(Invalid):
            await provider.update_address_locations(locations(good, bad))
        assert await held(provider) == {}


class TestResources:
    """Public IPs, load balancers, NAT gateways."""

    async def test_a_public_ip_keeps_its_address(self, provider: Provider) -> None:
        """Given on creation, of its family, of nobody else, kept when put again."""
        four = await provider.put_public_ip(PublicAddress(name=f"{WEB}-pip"))
        six = await provider.put_public_ip(PublicAddress(name=f"{API}-pip", family=6))
        again = await provider.put_public_ip(PublicAddress(name=f"{WEB}-pip"))
        assert four.address is not None
        assert "." in four.address
        assert six.address is not None
        assert ":" in six.address
        assert again.address == four.address
        read = await provider.get_public_ip(f"{WEB}-pip")
        assert read == again
        assert asked(again) == PublicAddress(name=f"{WEB}-pip")

    async def test_absent_resources_read_as_none(self, provider: Provider) -> None:
        """Absence is a value, an error is an error."""
        assert await provider.get_public_ip("absent") is None
        assert await provider.get_load_balancer("absent") is None
        assert await provider.get_nat_gateway("absent") is None

    async def test_deleting_what_is_gone_is_success(self, provider: Provider) -> None:
        """[W14] For every kind."""
        await provider.delete_public_ip("absent")
        await provider.delete_load_balancer("absent")
        await provider.delete_nat_gateway("absent")
        await provider.detach("absent")

    async def test_a_load_balancer_reads_as_it_was_put(self, provider: Provider) -> None:
        """Rules in any order, two protocols on one port, an idle timeout: no false drift."""
        rules = (
            Rule(protocol="Udp", frontend_port=53, backend_port=53),
            Rule(protocol="Tcp", frontend_port=53, backend_port=53, idle_timeout_minutes=30),
            Rule(protocol="Tcp", frontend_port=443, backend_port=8443),
        )
        put = await make_balancer(provider, WEB, *rules)
        wanted = LoadBalancer(name=WEB, public_ip=f"{WEB}-pip", rules=rules)
        assert asked(put) == asked(wanted)
        read = await provider.get_load_balancer(WEB)
        assert read is not None
        assert asked(read) == asked(wanted)
        assert {rule.name for rule in read.rules} == {"rule-udp-53", "rule-tcp-53", "rule-tcp-443"}

    async def test_an_unlisted_rule_is_removed(self, provider: Provider) -> None:
        """A put replaces the load balancer as a whole (A05)."""
        one = Rule(protocol="Tcp", frontend_port=80, backend_port=8080)
        two = Rule(protocol="Tcp", frontend_port=443, backend_port=8443)
        await make_balancer(provider, WEB, one, two)
        seen = await make_balancer(provider, WEB, two)
        assert seen.rules == (two,)

    async def test_rules_with_one_backend_port_are_refused(self, provider: Provider) -> None:
        """[R06] Same protocol and backend port in one pool."""
        with pytest.raises(Invalid) as caught:
            await make_balancer(
                provider,
                WEB,
                Rule(protocol="Tcp", frontend_port=80, backend_port=8080),
                Rule(protocol="Tcp", frontend_port=81, backend_port=8080),
            )
        assert caught.value.code == "RulesUseSameBackendPortProtocolAndPool"

    async def test_order_of_removal_is_enforced(self, provider: Provider) -> None:
        """Registration before load balancer before public IP; each step too early is `InUse`."""
        await make_balancer(provider, WEB)
        await provider.update_services(services(inbound(WEB, WEB)))
        with pytest.raises(InUse):
            await provider.delete_load_balancer(WEB)
        await provider.update_services(services(inbound(WEB)))
        seen = await provider.get_public_ip(f"{WEB}-pip")
        assert seen is not None
        assert seen.attached_to == WEB
        with pytest.raises(InUse):
            await provider.delete_public_ip(f"{WEB}-pip")
        await provider.delete_load_balancer(WEB)
        await provider.update_services(services(gone(WEB)))
        await provider.delete_public_ip(f"{WEB}-pip")
        assert await provider.get_public_ip(f"{WEB}-pip") is None

    async def test_a_public_ip_has_one_user(self, provider: Provider) -> None:
        """A second load balancer cannot take it, whatever its name begins with."""
        await make_balancer(provider, "web")
        with pytest.raises(ProviderError):
            await provider.put_load_balancer(LoadBalancer(name="web-api", public_ip="web-pip"))

    async def test_a_nat_gateway_reads_as_it_was_put(self, provider: Provider) -> None:
        """With an address of each family in its own list."""
        put = await make_gateway(provider, "egress")
        read = await provider.get_nat_gateway("egress")
        assert read == put
        assert asked(put) == NatGateway(
            name="egress", public_ips=("egress-pip",), public_ips_v6=("egress-pip-v6",)
        )

    async def test_detach_frees_a_nat_gateway(self, provider: Provider) -> None:
        """[W15] Both references are cleared, its addresses stay, and it may be deleted."""
        await make_gateway(provider, "egress")
        await provider.update_services(services(outbound("egress", "egress")))
        with pytest.raises(InUse):
            await provider.delete_nat_gateway("egress")
        await provider.detach("egress")
        assert (await registered(provider))["egress"].nat_gateway is None
        seen = await provider.get_nat_gateway("egress")
        assert seen is not None
        assert not seen.attached
        assert seen.public_ips == ("egress-pip",)
        await provider.detach("egress")
        await provider.delete_nat_gateway("egress")

    async def test_the_halves_of_detach_are_independent(self, subject: Subject) -> None:
        """[W15] When the registration cannot be changed the gateway is detached all the same, and
        the failure is raised; a gateway without registration is detached, too."""
        provider = subject.provider
        await make_gateway(provider, "egress")
        await provider.update_services(services(outbound("egress", "egress")))
        subject.fail("update_services", 409)
        with pytest.raises(Conflict):
            await provider.detach("egress")
        seen = await provider.get_nat_gateway("egress")
        assert seen is not None
        assert not seen.attached
        assert (await registered(provider))["egress"].nat_gateway == "egress"

    async def test_the_default_gateway_is_not_detached(self, provider: Provider) -> None:
        """Its registration is the provider's own."""
        before = (await registered(provider))[DEFAULT_SERVICE]
        with contextlib.suppress(ProviderError):
            await provider.detach(DEFAULT_SERVICE)
        assert (await registered(provider))[DEFAULT_SERVICE] == before

    async def test_lists_of_resources_are_complete(self, provider: Provider) -> None:
        """Every page, ours and the provider's own, ordered by name."""
        for name in ("a", "b", "c"):
            await make_balancer(provider, name)
        await make_gateway(provider, "egress")
        assert [lb.name for lb in await provider.list_load_balancers()] == ["a", "b", "c"]
        assert [gw.name for gw in await provider.list_nat_gateways()] == [DEFAULT_SERVICE, "egress"]
        assert [ip.name for ip in await provider.list_public_ips()] == [
            "a-pip",
            "b-pip",
            "c-pip",
            f"{DEFAULT_SERVICE}-pip",
            "egress-pip",
            "egress-pip-v6",
        ]
        attached = {ip.name: ip.attached_to for ip in await provider.list_public_ips()}
        assert attached["a-pip"] == "a"
        assert attached["egress-pip-v6"] == "egress"

    async def test_a_stale_etag_is_refused(self, provider: Provider) -> None:
        """`PreconditionFailed` when it changed since it was read; the current etag passes."""
        first = await make_balancer(provider, WEB)
        second = await make_balancer(provider, WEB)
        wanted = asked(second)
        with pytest.raises(PreconditionFailed):
            await provider.put_load_balancer(wanted, if_match=first.etag)
        await provider.put_load_balancer(wanted, if_match=second.etag)


class TestFailures:
    """Which class an error has, and what it says about what was applied."""

    @pytest.mark.parametrize(
        ("status", "code", "expected", "metric"),
        [
            (429, "", Throttled, "throttled"),
            (409, "", Conflict, "conflict"),
            (412, "", PreconditionFailed, "conflict"),
            (400, "", Invalid, "invalid"),
            (400, "QuotaExceeded", QuotaExceeded, "quota_exceeded"),
            (503, "", Unknown, "internal_error"),
        ],
    )
    async def test_a_failure_has_its_class(
        self,
        subject: Subject,
        status: int,
        code: str,
        expected: type[ProviderError],
        metric: str,
    ) -> None:
        """It names the operation and the status, and the value of the metrics' label."""
        subject.fail("update_services", status, code)
        with pytest.raises(expected) as caught:
            await subject.provider.update_services(services(inbound(WEB)))
        assert type(caught.value) is expected
        assert (caught.value.op, caught.value.status) == ("update_services", status)
        assert caught.value.metric_class == metric
        assert {DEFAULT_SERVICE} == set(await registered(subject.provider))

    async def test_unknown_may_have_been_applied(self, subject: Subject) -> None:
        """A 5xx says nothing about what happened: after it the change may be there, and sending
        the same again is harmless."""
        subject.fail("update_services", 503, applied=True)
        with pytest.raises(Unknown):
            await subject.provider.update_services(services(inbound(WEB)))
        assert WEB in await registered(subject.provider)
        await subject.provider.update_services(services(inbound(WEB)))
        assert {WEB, DEFAULT_SERVICE} == set(await registered(subject.provider))

    @pytest.mark.parametrize("op", ["list_services", "list_address_locations", "list_public_ips"])
    async def test_a_list_is_complete_or_it_raises(self, subject: Subject, op: str) -> None:
        """A failed read is never an empty list."""
        subject.fail(op, 503)
        with pytest.raises(ProviderError):
            await getattr(subject.provider, op)()
