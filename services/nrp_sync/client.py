"""Azure's network resource provider behind the port, on `azure-mgmt-network`.

PUT, GET and DELETE of resources are the SDK's own operations, its poller included. The two actions
and the lists go out through the same client as raw requests, because the generated methods read a
body even where a synchronous 200 has none, take 202 for a failure, and build a model for each of
100,000 addresses. Here a 200 to the POST is success unless its body carries an error, whatever
headers are left on it; a 202 is polled, and a poll that ends in 200 is a failure when it says so.

Importing this module costs seconds and some hundred MB: only `open_provider` does it.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import aiohttp
import msgspec
from azure.core.exceptions import AzureError
from azure.core.rest import AsyncHttpResponse, HttpRequest

from services.nrp_sync import azure_wire as wire
from services.nrp_sync.azure_errors import body_error, classify, retry_after_of, scrub
from services.nrp_sync.azure_pipe import Pipe, problems, request_id_of
from services.nrp_sync.gate import GateClosed
from services.nrp_sync.provider import (
    Ack,
    Action,
    AddressLocation,
    LoadBalancer,
    LocationBatch,
    NatGateway,
    NotFound,
    PreconditionFailed,
    ProviderError,
    ProviderSettings,
    PublicAddress,
    ServiceBatch,
    ServiceRegistration,
    ServiceUpdate,
    Unknown,
    Unreadable,
)

_MAX_PAGES = 100_000
_LEAST_DELAY_S = 0.02

T = TypeVar("T")
R = TypeVar("R", PublicAddress, LoadBalancer, NatGateway)


async def connect(settings: ProviderSettings) -> "AzureProvider":
    """The provider, its credential and its connection pool. ValueError for settings that lack."""
    wrong = problems(settings)
    if wrong:
        raise ValueError("settings of the provider: " + "; ".join(wrong))
    return AzureProvider(settings)


class AzureProvider:
    """Implements `provider.Provider`."""

    def __init__(self, settings: ProviderSettings) -> None:
        self._settings = settings
        self._ids = wire.Ids(settings)
        self._pipe = Pipe(settings, self._ids.subscription)
        self._sdk = self._pipe.sdk

    async def close(self) -> None:
        """See the port."""
        await self._pipe.close()

    # -- the two actions --------------------------------------------------------------------

    async def update_services(self, batch: ServiceBatch, *, request_id: str = "") -> Ack:
        """See the port. A single unregistration of what the provider does not know succeeds."""
        op = "update_services"
        if not batch.services and batch.action is Action.PARTIAL:
            return Ack(request_id="", status=0)
        body = wire.services_body(batch, self._ids)
        try:
            return await self._act(op, "updateServices", body, request_id)
        except NotFound as error:
            alone = len(batch.services) == 1 and batch.services[0].delete
            if alone and batch.action is Action.PARTIAL and await self._gateway_exists(op):
                return Ack(request_id=error.request_id)
            raise

    async def update_address_locations(self, batch: LocationBatch, *, request_id: str = "") -> Ack:
        """See the port."""
        if not batch.locations and batch.action is Action.PARTIAL:
            return Ack(request_id="", status=0)
        body = wire.locations_body(batch)
        return await self._act(
            "update_address_locations", "updateAddressLocations", body, request_id
        )

    async def _act(self, op: str, action: str, body: bytes, request_id: str) -> Ack:
        async with self._pipe.operation(op):
            request = HttpRequest(
                "POST",
                self._pipe.link(f"{self._ids.gateway}/{action}"),
                content=body,
                headers={"Content-Type": "application/json"},
            )
            response = await self._pipe.send(request, request_id)
            if response.status_code == 202:
                await self._wait(op, response)
                return Ack(request_id=request_id_of(response), status=202)
            self._pipe.check(op, response)
            return Ack(request_id=request_id_of(response))

    async def _wait(self, op: str, first: AsyncHttpResponse) -> None:
        """Ask for the end of an accepted action. A failing poll is not a failed action."""
        url = first.headers.get("Azure-AsyncOperation") or first.headers.get("Location")
        request_id = request_id_of(first)
        if not url or not self._pipe.leads_here(url):
            told = "accepted, but it leads to another host" if url else "accepted, without a link"
            raise Unknown(op, f"{told} to ask for its end", request_id=request_id)
        response = first
        while True:
            asked = retry_after_of(response.headers)
            delay = self._settings.poll_interval if asked is None else asked
            await asyncio.sleep(max(delay, _LEAST_DELAY_S))
            request = HttpRequest("GET", url)
            with contextlib.suppress(AzureError, aiohttp.ClientError, GateClosed):
                response = await self._pipe.send(request)
                if response.status_code in (200, 204):
                    if self._ended(op, response, request_id):
                        return
                elif 400 <= response.status_code < 500 and response.status_code not in (408, 429):
                    raise Unknown(
                        op,
                        f"accepted, then asking for its end gave HTTP {response.status_code}",
                        request_id=request_id,
                    )

    def _ended(self, op: str, response: AsyncHttpResponse, request_id: str) -> bool:
        """Whether a poll with status 200 tells of success; raises when it tells of failure."""
        error = body_error(response.content)
        if error is not None:
            raise classify(op, 200, *error, request_id=request_id)
        status = _status(response.content).lower()
        return status in ("", "succeeded")

    # -- lists of the gateway ----------------------------------------------------------------

    async def list_services(self) -> list[ServiceRegistration]:
        """See the port. `Unreadable` when one of them has a type that we do not know."""
        found = await self._list(
            "list_services", f"{self._ids.gateway}/services", wire.service_from
        )
        return sorted(found, key=lambda service: service.name)

    async def list_address_locations(self) -> list[AddressLocation]:
        """See the port."""
        found = await self._list(
            "list_address_locations", f"{self._ids.gateway}/addressLocations", wire.location_from
        )
        return sorted(found, key=lambda location: location.location)

    async def _list(self, op: str, path: str, read: Callable[[msgspec.Raw], T]) -> list[T]:
        """Every entry of every page, or an error."""
        found: list[T] = []
        async with self._pipe.operation(op):
            url: str | None = self._pipe.link(path)
            seen: set[str] = set()
            while url:
                if url in seen or len(seen) >= _MAX_PAGES:
                    raise Unreadable(op, f"the list does not end after {len(seen)} pages")
                seen.add(url)
                response = await self._pipe.send(HttpRequest("GET", url))
                self._pipe.check(op, response)
                try:
                    page = msgspec.json.decode(response.content, type=wire.Page)
                    found.extend(read(entry) for entry in page.value)
                except (msgspec.DecodeError, wire.NotUnderstood) as error:
                    raise Unreadable(op, scrub(str(error))) from error
                url = page.next_link
                if url and not self._pipe.leads_here(url):
                    raise Unreadable(op, "the next page is on another host")
        return found

    # -- public IPs -------------------------------------------------------------------------

    async def put_public_ip(
        self, wanted: PublicAddress, *, if_match: str = "", request_id: str = ""
    ) -> PublicAddress:
        """See the port."""
        body = wire.public_ip_body(wanted, self._ids)
        doc = await self._put(
            self._sdk.public_ip_addresses, "put_public_ip", wanted.name, body, if_match, request_id
        )
        return _understood("put_public_ip", wire.public_ip_from, doc, Unknown)

    async def get_public_ip(self, name: str) -> PublicAddress | None:
        """See the port."""
        doc = await self._get(self._sdk.public_ip_addresses, "get_public_ip", name)
        return _understood("get_public_ip", wire.public_ip_from, doc, Unreadable) if doc else None

    async def list_public_ips(self) -> list[PublicAddress]:
        """See the port."""
        return await self._list_kind("list_public_ips", wire.PUBLIC_IPS, wire.public_ip_from)

    async def delete_public_ip(self, name: str, *, request_id: str = "") -> None:
        """See the port."""
        await self._delete(self._sdk.public_ip_addresses, "delete_public_ip", name, request_id)

    # -- load balancers ---------------------------------------------------------------------

    async def put_load_balancer(
        self, wanted: LoadBalancer, *, if_match: str = "", request_id: str = ""
    ) -> LoadBalancer:
        """See the port."""
        body = wire.load_balancer_body(wanted, self._ids)
        doc = await self._put(
            self._sdk.load_balancers, "put_load_balancer", wanted.name, body, if_match, request_id
        )
        return _understood("put_load_balancer", wire.load_balancer_from, doc, Unknown)

    async def get_load_balancer(self, name: str) -> LoadBalancer | None:
        """See the port."""
        doc = await self._get(self._sdk.load_balancers, "get_load_balancer", name)
        return (
            _understood("get_load_balancer", wire.load_balancer_from, doc, Unreadable)
            if doc
            else None
        )

    async def list_load_balancers(self) -> list[LoadBalancer]:
        """See the port."""
        return await self._list_kind(
            "list_load_balancers", wire.LOAD_BALANCERS, wire.load_balancer_from
        )

    async def delete_load_balancer(self, name: str, *, request_id: str = "") -> None:
        """See the port."""
        await self._delete(self._sdk.load_balancers, "delete_load_balancer", name, request_id)

    # -- NAT gateways -----------------------------------------------------------------------

    async def put_nat_gateway(
        self, wanted: NatGateway, *, if_match: str = "", request_id: str = ""
    ) -> NatGateway:
        """See the port."""
        body = wire.nat_gateway_body(wanted, self._ids)
        doc = await self._put(
            self._sdk.nat_gateways, "put_nat_gateway", wanted.name, body, if_match, request_id
        )
        return _understood("put_nat_gateway", self._nat_gateway, doc, Unknown)

    async def get_nat_gateway(self, name: str) -> NatGateway | None:
        """See the port."""
        doc = await self._get(self._sdk.nat_gateways, "get_nat_gateway", name)
        return _understood("get_nat_gateway", self._nat_gateway, doc, Unreadable) if doc else None

    async def list_nat_gateways(self) -> list[NatGateway]:
        """See the port."""
        return await self._list_kind("list_nat_gateways", wire.NAT_GATEWAYS, self._nat_gateway)

    def _nat_gateway(self, doc: wire.Doc) -> NatGateway:
        return wire.nat_gateway_from(doc, self._ids)

    async def delete_nat_gateway(self, name: str, *, request_id: str = "") -> None:
        """See the port."""
        await self._delete(self._sdk.nat_gateways, "delete_nat_gateway", name, request_id)

    async def detach(self, name: str, *, request_id: str = "") -> None:
        """See the port."""
        failed: ProviderError | None = None
        try:
            await self._detach_service(name, request_id)
        except ProviderError as error:
            failed = error
        await self._detach_gateway(name, request_id)
        if failed is not None:
            raise failed

    async def _detach_service(self, name: str, request_id: str) -> None:
        for service in await self.list_services():
            if service.name == name.lower() and service.nat_gateway and not service.default:
                cleared = msgspec.structs.replace(service, nat_gateway=None)
                batch = ServiceBatch(services=(ServiceUpdate(service=cleared),))
                await self.update_services(batch, request_id=request_id)

    async def _detach_gateway(self, name: str, request_id: str) -> None:
        for attempt in (1, 2):
            seen = await self.get_nat_gateway(name)
            if seen is None or not seen.attached:
                return
            cleared = msgspec.structs.replace(seen, attached=False)
            try:
                await self.put_nat_gateway(cleared, if_match=seen.etag, request_id=request_id)
            except PreconditionFailed:
                if attempt == 2:
                    raise
            else:
                return

    # -- resources, through the SDK's own operations ------------------------------------------

    async def _put(
        self, kind: Any, op: str, name: str, body: wire.Doc, if_match: str, request_id: str
    ) -> wire.Doc:
        headers = {"If-Match": if_match} if if_match else {}
        async with self._pipe.operation(op):
            poller = await kind.begin_create_or_update(
                self._ids.group,
                name,
                body,
                cls=_raw,
                headers=headers,
                **self._options(request_id),
            )
            doc: wire.Doc = await self._pipe.result(op, poller)
            return doc

    async def _delete(self, kind: Any, op: str, name: str, request_id: str) -> None:
        try:
            async with self._pipe.operation(op):
                poller = await kind.begin_delete(
                    self._ids.group, name, cls=_gone, **self._options(request_id)
                )
                await self._pipe.result(op, poller)
        except NotFound:
            return  # gone is what was asked for

    async def _get(self, kind: Any, op: str, name: str) -> wire.Doc | None:
        try:
            async with self._pipe.operation(op):
                doc: wire.Doc = await kind.get(
                    self._ids.group, name, cls=_raw, api_version=self._settings.api_version
                )
                return doc
        except NotFound:
            return None

    async def _list_kind(self, op: str, kind: str, read: Callable[[wire.Doc], R]) -> list[R]:
        def decode(raw: msgspec.Raw) -> R:
            return _understood(op, read, msgspec.json.decode(raw), Unreadable)

        found = await self._list(op, f"{self._ids.base}/{kind}", decode)
        return sorted(found, key=lambda resource: resource.name)

    async def _gateway_exists(self, op: str) -> bool:
        """Whether a 404 was about an entry and not about the gateway itself."""
        async with self._pipe.operation(op):
            response = await self._pipe.send(HttpRequest("GET", self._pipe.link(self._ids.gateway)))
            return response.status_code == 200

    def _options(self, request_id: str) -> dict[str, Any]:
        named: dict[str, Any] = {"request_id": request_id} if request_id else {}
        return named | {
            "api_version": self._settings.api_version,
            "polling_interval": self._settings.poll_interval,
        }


def _understood(
    op: str, read: Callable[[wire.Doc], T], doc: wire.Doc, otherwise: type[ProviderError]
) -> T:
    """A resource from its document; an error where the document is not like one."""
    try:
        return read(doc)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise otherwise(op, f"the provider's answer is not understood: {error!r}") from error


def _raw(response: Any, _deserialized: Any, _headers: Any) -> wire.Doc:
    """The body as it came, in place of the SDK's model."""
    doc: wire.Doc = msgspec.json.decode(response.http_response.content)
    return doc


def _gone(response: Any, _deserialized: Any, _headers: Any) -> None:
    """A DELETE's answer needs no body, but one that is no JSON is somebody else's."""
    if response.http_response.content.strip():
        msgspec.json.decode(response.http_response.content)


def _status(body: bytes) -> str:
    try:
        doc = msgspec.json.decode(body) if body.strip() else {}
    except msgspec.DecodeError:
        return "unreadable"
    return str(doc.get("status") or "") if isinstance(doc, dict) else ""
