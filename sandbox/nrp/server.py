"""The HTTP side of the sandbox's provider: conventions of Azure's resource manager.

Every request needs a bearer token (any), an api-version and a subscription id of the right form.
A change is checked, then applied at once (200) or later (202, polled); faults of the plan step in
between. Listens on loopback only.
"""

import asyncio
import contextlib
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Self
from urllib.parse import urlencode

from aiohttp import web

from sandbox.nrp import admin, arm, routes, storage, wire
from sandbox.nrp.arm import SERVICE_GATEWAYS, ArmError, Doc, bad
from sandbox.nrp.faults import Fault, Faults, Plan
from sandbox.nrp.journal import Entry, Journal
from sandbox.nrp.operations import Operation, Operations
from sandbox.nrp.resources import Quota, Resources
from sandbox.nrp.routes import Route

SUBSCRIPTION = "00000000-0000-0000-0000-000000000000"
GROUP = "lbledger"
REGION = "local"
GATEWAY = "gateway"
VNET = "vnet"

_SAVE_EVERY_S = 1.0
_PUTS = ("put_", "delete_", "tag_", "update_")
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class NrpServer:
    """A provider in this process. `resources`, `faults` and `journal` are open to tests."""

    def __init__(
        self,
        *,
        port: int = 0,
        state: Path | None = None,
        page_size: int = 100,
        quota: Quota | None = None,
        plan: Plan | None = None,
    ) -> None:
        self.page_size = page_size
        self.quota = quota or Quota()
        self.faults = Faults(plan)
        self.journal = Journal()
        self.operations = Operations()
        self.resources = Resources(REGION, self.quota)
        self._port = port
        self._state = state
        self._runner: web.AppRunner | None = None
        self._saver: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._dirty = False
        self.reset()

    # -- life -------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where it listens, without a slash at the end."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def port(self) -> int:
        """The port, once started; it is kept over a stop and a start."""
        return self._port

    @property
    def gateway_id(self) -> str:
        """Id of the service gateway that exists from the start."""
        return arm.resource_id(SUBSCRIPTION, GROUP, SERVICE_GATEWAYS, GATEWAY)

    def reset(self) -> None:
        """As on the first day: the gateway with its default service, nothing else."""
        self.resources = Resources(REGION, self.quota)
        network = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/{arm.PROVIDER}"
        body = {
            "location": REGION,
            "sku": {"name": "Standard"},
            "properties": {"virtualNetwork": {"id": f"{network}/virtualNetworks/{VNET}"}},
        }
        self.resources.put(SERVICE_GATEWAYS, self.gateway_id, GATEWAY, body, "")()
        self._dirty = True

    async def start(self) -> Self:
        """Listen; what a state folder holds is taken up."""
        if self._runner is not None:
            raise RuntimeError(f"already listening on {self.url}")
        self._stopping = asyncio.Event()
        self.operations = Operations()
        if self._state is not None:
            storage.load(self._state, self.resources)
        app = web.Application(client_max_size=wire.BODY_LIMIT)
        admin.install(app, self)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._port)
        try:
            await site.start()
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner
        self._port = runner.addresses[0][1]
        if self._state is not None:
            self._saver = asyncio.create_task(self._save_for_ever(), name="nrp saver")
        return self

    async def stop(self) -> None:
        """Close every connection, give up operations under way, write the state."""
        self._stopping.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        await self.operations.stop()
        if self._saver is not None:
            self._saver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._saver
            self._saver = None
        self._save()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def changed(self) -> None:
        """The state differs from what was last written."""
        self._dirty = True

    async def _save_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_SAVE_EVERY_S)
            self._save()

    def _save(self) -> None:
        if self._state is not None and self._dirty:
            self._dirty = False
            storage.save(self._state, self.resources)

    # -- one request ------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        request_id = str(uuid.uuid4())
        entry: Entry | None = None
        try:
            route = routes.parse(request.method, request.rel_url.raw_path)
            body = await wire.read(request)
            entry = self.journal.begin(
                route.op,
                request.method,
                route.name or route.target,
                body,
                client_request_id=request.headers.get("x-ms-client-request-id", ""),
                request_id=request_id,
                keys=wire.keys_of(route.op, body),
            )
            response = await self._answer(request, route, body, entry)
        except ArmError as error:
            response = wire.error_answer(error)
            if entry is not None:
                entry.code = error.code
        except asyncio.CancelledError:
            if entry is not None:
                self.journal.end(entry, 0)
            raise
        response.headers["x-ms-request-id"] = request_id
        response.headers["x-ms-correlation-request-id"] = request_id
        client_id = request.headers.get("x-ms-client-request-id")
        if client_id:
            response.headers["x-ms-client-request-id"] = client_id
        if entry is not None:
            gone = request.transport is None or request.transport.is_closing()
            self.journal.end(entry, 0 if gone else response.status, entry.code)
        return response

    async def _answer(
        self, request: web.Request, route: Route, body: bytes, entry: Entry
    ) -> web.Response:
        _check_conventions(request, route)
        await asyncio.sleep(self.faults.latency())
        fault = self.faults.match(route.op, route.name, body)
        kind = fault.kind if fault else ""
        if fault is not None:
            entry.fault = (
                kind if kind not in ("error", "applied_error") else f"{kind} {fault.status}"
            )
            await self._before(request, fault)
        response = self._act(request, route, body, entry, fault)
        if fault is not None:
            await self._after(request, fault, response)
        return response

    async def _before(self, request: web.Request, fault: Fault) -> None:
        """What a fault does instead of the work."""
        if fault.kind == "error":
            await asyncio.sleep(fault.seconds)
            raise fault.error()
        if fault.kind == "slow":
            await asyncio.sleep(fault.seconds)
        elif fault.kind == "hang":
            await self._hang(request, fault)
            raise ArmError(503, "ServiceUnavailable", "the sandbox hung, as it was asked to")
        elif fault.kind == "drop":
            wire.abort(request)
            raise ArmError(503, "ServiceUnavailable", "the sandbox hung up, as it was asked to")

    async def _after(self, request: web.Request, fault: Fault, response: web.Response) -> None:
        """What a fault does to the answer, after the work is done."""
        if fault.kind == "applied_error":
            raise fault.error()
        if fault.kind == "applied_hang":
            await self._hang(request, fault)
            wire.abort(request)
        elif fault.kind == "applied_drop":
            wire.abort(request)
        elif fault.kind == "truncate":
            await wire.send_half(request, response)

    async def _hang(self, request: web.Request, fault: Fault) -> None:
        """Until the time is over, the client gives up, or we stop."""
        loop = asyncio.get_running_loop()
        until = loop.time() + (fault.seconds or 3600.0)
        while loop.time() < until and not self._stopping.is_set():
            if request.transport is None or request.transport.is_closing():
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 0.05)

    def _act(
        self, request: web.Request, route: Route, body: bytes, entry: Entry, fault: Fault | None
    ) -> web.Response:
        if not route.op.startswith(_PUTS):
            return self._look(request, route)
        return self._change(request, route, body, entry, fault)

    # -- reading ----------------------------------------------------------------------------

    def _look(self, request: web.Request, route: Route) -> web.Response:
        if route.op == "get_operation":
            return self._operation(self.operations.get(route.name), result=False)
        if route.op == "get_operation_result":
            return self._operation(self.operations.get(route.name), result=True)
        if route.op.startswith("get_"):
            doc = self.resources.get(route.kind, route.target)
            return wire.json_answer(200, doc, {"ETag": doc["etag"]})
        after = request.query.get("$skipToken", "")
        if route.op == "list_services":
            gateway = self.resources.gateway(route.target)
            return self._page(request, *gateway.service_page(after, self.page_size))
        if route.op == "list_address_locations":
            gateway = self.resources.gateway(route.target)
            return self._page(request, *gateway.location_page(after, self.page_size))
        page = self.resources.page(route.kind, route.target, after, self.page_size)
        return self._page(request, *page)

    def _page(self, request: web.Request, docs: list[Doc], last: str | None) -> web.Response:
        body: Doc = {"value": docs}
        if last is not None:
            query = dict(request.query) | {"$skipToken": last}
            body["nextLink"] = f"{self.url}{request.rel_url.raw_path}?{urlencode(query)}"
        return wire.json_answer(200, body)

    def _operation(self, operation: Operation, *, result: bool) -> web.Response:
        if operation.status == "InProgress":
            headers = wire.wait_headers(operation.retry_after)
            return wire.json_answer(202 if result else 200, operation.status_doc(), headers)
        if result and operation.status == "Succeeded":
            return wire.json_answer(200, operation.result)
        return wire.json_answer(200, operation.status_doc())

    # -- changing ---------------------------------------------------------------------------

    def _change(
        self, request: web.Request, route: Route, body: bytes, entry: Entry, fault: Fault | None
    ) -> web.Response:
        kind = fault.kind if fault else ""
        prepare = self._preparer(route, body, request.headers.get("If-Match", ""))
        created = route.op.startswith("put_") and not self.resources.exists(route.target)
        self.operations.check_free(route.target)
        apply = prepare()
        if apply is None:
            return web.Response(status=204)
        if fault is not None and kind == "error_in_200":
            return wire.json_answer(200, fault.error().body())
        if fault is not None and kind in ("async", "async_failed"):
            return self._later(request, route, prepare, fault, created=created)
        self.resources.hide_addresses = kind == "no_address"
        try:
            doc = apply()
        finally:
            self.resources.hide_addresses = False
        self._dirty = entry.applied = True
        headers = {"ETag": doc["etag"]} if "etag" in doc else {}
        if kind == "bare":
            return web.Response(status=200)
        if kind == "headers":
            headers |= self._poll_headers(request, route, str(uuid.uuid4()))
        if route.op == "delete_service_gateway":
            return web.Response(status=204, headers=headers)
        return wire.json_answer(201 if created else 200, doc, headers)

    def _preparer(
        self, route: Route, body: bytes, if_match: str
    ) -> Callable[[], Callable[[], Doc] | None]:
        """Checks the change against the state of the moment it is called."""
        resources = self.resources
        if route.op.startswith("delete_"):
            return lambda: resources.delete(route.kind, route.target, if_match)
        doc = wire.decode(body)
        if route.op == "update_services":
            gateway = resources.gateway(route.target)
            return lambda: _answering(gateway.update_services(doc))
        if route.op == "update_address_locations":
            gateway = resources.gateway(route.target)
            return lambda: _answering(gateway.update_locations(doc))
        if route.op.startswith("tag_"):
            return lambda: resources.tag(route.kind, route.target, doc, if_match)
        return lambda: resources.put(route.kind, route.target, route.name, doc, if_match)

    def _later(
        self,
        request: web.Request,
        route: Route,
        prepare: Callable[[], Callable[[], Doc] | None],
        fault: Fault,
        *,
        created: bool,
    ) -> web.Response:
        def finish() -> Doc:
            apply = prepare()
            self._dirty = True
            return apply() if apply is not None else {}

        failure = fault.error() if fault.kind == "async_failed" else None
        operation = self.operations.begin(route.target, fault.seconds, finish, fail=failure)
        headers = self._poll_headers(request, route, operation.name)
        headers |= wire.wait_headers(operation.retry_after)
        if not route.op.startswith("put_"):
            return web.Response(status=202, headers=headers)
        # A PUT shows the resource with its state; the body is what the client sent.
        shown: Doc = {"id": route.target, "name": route.name}
        shown["properties"] = {"provisioningState": "Updating"}
        return wire.json_answer(201 if created else 200, shown, headers)

    def _poll_headers(self, request: web.Request, route: Route, name: str) -> dict[str, str]:
        version = request.query.get("api-version", "")
        base = (
            f"{self.url}/subscriptions/{route.subscription}/providers/{arm.PROVIDER}"
            f"/locations/{REGION}"
        )
        return {
            "Azure-AsyncOperation": f"{base}/operations/{name}?api-version={version}",
            "Location": f"{base}/operationResults/{name}?api-version={version}",
        }


def _answering(apply: Callable[[], None]) -> Callable[[], Doc]:
    def applied() -> Doc:
        apply()
        return {"status": "Succeeded"}

    return applied


def _check_conventions(request: web.Request, route: Route) -> None:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise ArmError(401, "AuthenticationFailed", "the Authorization header has no bearer token")
    if not request.query.get("api-version"):
        raise bad("MissingApiVersionParameter", "the api-version query parameter is required")
    if not _UUID.fullmatch(route.subscription):
        raise ArmError(
            404, "InvalidSubscriptionId", "the subscription id in the path is not a GUID"
        )
