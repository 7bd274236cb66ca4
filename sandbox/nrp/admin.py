"""Pages of the sandbox under `/sandbox/`: what a cloud would not show, and would not let you do.

`GET /sandbox/state` everything it holds; `GET /sandbox/requests?limit=N` counts and the last
requests; `GET, PUT, POST, DELETE /sandbox/faults` the plan of faults (PUT replaces, POST adds one
or a list, DELETE ends all); `POST /sandbox/edit` changes behind the client's back, unchecked;
`POST /sandbox/reset` back to the first day.
"""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from sandbox.nrp import arm
from sandbox.nrp.faults import Fault, Plan
from sandbox.nrp.gateway import Service

if TYPE_CHECKING:
    from sandbox.nrp.server import NrpServer

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Edit(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Somebody else's hand. None (null) in a mapping removes the entry."""

    gateway: str = ""
    """Id of the service gateway; empty: the one that exists from the start."""
    services: dict[str, dict[str, Any] | None] = {}
    """By name: `kind`, and if wanted `pools` (as on the wire) and `nat_gateway` (an id)."""
    locations: dict[str, dict[str, list[str]] | None] = {}
    """By location: all its addresses with their services."""
    resources: dict[str, dict[str, Any] | None] = {}
    """By id: the new body of an ARM resource that is there."""


def apply(server: "NrpServer", edit: Edit) -> None:
    """Make the changes of an edit, without asking whether they make sense."""
    resources = server.resources
    for target, doc in edit.resources.items():
        kind = arm.type_of(target.rsplit("/", 2)[1])
        if doc is None:
            resources.forget(kind, target)
        elif target.lower() in resources.docs[kind]:
            old = resources.docs[kind][target.lower()]
            resources.docs[kind][target.lower()] = old | doc | {"etag": arm.new_etag()}
        else:
            raise ValueError(f"resource {target} does not exist, so it cannot be edited")
    gateway = resources.gateway(edit.gateway or server.gateway_id)
    for name, given in edit.services.items():
        if given is None:
            gateway.services.pop(name.lower(), None)
        else:
            gateway.services[name.lower()] = msgspec.convert({"name": name} | given, Service)
    for location, addresses in edit.locations.items():
        key = str(arm.ip(location, "location"))
        gateway.set_location(
            key,
            {
                str(arm.ip(address, "address")): tuple(sorted(name.lower() for name in names))
                for address, names in (addresses or {}).items()
            },
        )
    server.changed()


def install(app: web.Application, server: "NrpServer") -> None:
    """Add the pages to the application."""

    async def state(_: web.Request) -> web.StreamResponse:
        return _json(shown_state(server))

    async def requests(request: web.Request) -> web.StreamResponse:
        text = request.query.get("limit", "100")
        if not text.isdecimal():
            return _wrong(f"limit is {text!r}, it must be a number")
        return _json(server.journal.shown(int(text)))

    async def faults(request: web.Request) -> web.StreamResponse:
        if request.method == "PUT":
            server.faults.set(msgspec.json.decode(await request.read(), type=Plan))
        elif request.method == "POST":
            added = msgspec.json.decode(await request.read(), type=Fault | list[Fault])
            server.faults.add(*(added if isinstance(added, list) else [added]))
        elif request.method == "DELETE":
            server.faults.set(Plan())
        return _json(server.faults.shown())

    async def edit(request: web.Request) -> web.StreamResponse:
        apply(server, msgspec.json.decode(await request.read(), type=Edit))
        return _json({"edited": True})

    async def reset(_: web.Request) -> web.StreamResponse:
        server.reset()
        server.journal.reset()
        server.faults.set(Plan())
        return _json({"reset": True})

    app.router.add_get("/sandbox/state", state)
    app.router.add_get("/sandbox/requests", requests)
    for method in ("GET", "PUT", "POST", "DELETE"):
        app.router.add_route(method, "/sandbox/faults", _checked(faults))
    app.router.add_post("/sandbox/edit", _checked(edit))
    app.router.add_post("/sandbox/reset", reset)
    app.router.add_route("*", "/sandbox/{rest:.*}", _nothing)


def shown_state(server: "NrpServer") -> dict[str, Any]:
    """Everything that the provider holds, as a person would look for it."""
    resources = server.resources
    shown: dict[str, Any] = {
        kind: [resources.get(kind, target) for target in sorted(docs)]
        for kind, docs in resources.docs.items()
    }
    shown["gateways"] = {
        target: {
            "services": [service.doc() for _, service in sorted(gateway.services.items())],
            "addressLocations": [gateway.location_doc(key) for key in sorted(gateway.locations)],
        }
        for target, gateway in resources.gateways.items()
    }
    shown["operations"] = server.operations.shown()
    return shown


def _checked(handler: _Handler) -> _Handler:
    async def wrapped(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except (msgspec.DecodeError, msgspec.ValidationError, ValueError, arm.ArmError) as error:
            return _wrong(str(error))

    return wrapped


async def _nothing(request: web.Request) -> web.StreamResponse:
    return _wrong(f"no page {request.path}; there are state, requests, faults, edit, reset", 404)


def _wrong(message: str, status: int = 400) -> web.Response:
    return _json({"error": message}, status)


def _json(doc: Any, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(doc), content_type="application/json"
    )
