"""Discovery and OpenAPI: the documents that say what the server serves."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from sandbox.kube import discovery, openapi
from sandbox.kube.errors import ApiError
from sandbox.kube.resources import Registry


def answer(
    registry: Registry, path: str, accept: str, *, address: str, known: bool
) -> web.Response | None:
    """The document at a path; None where the path is about objects."""
    path = path.rstrip("/") or "/"
    parts = path.strip("/").split("/")
    kind = "application/json"
    made: Any = None
    if path in ("/api", "/apis"):
        if discovery.wants_aggregated(accept):
            kind = discovery.AGGREGATED
            made = discovery.aggregated(registry, core=path == "/api")
        else:
            made = discovery.versions(address) if path == "/api" else discovery.groups(registry)
    elif parts[0] == "api" and len(parts) == 2 and registry.serves("", parts[1]):
        made = discovery.resources(registry, "", parts[1])
    elif parts[0] == "apis" and len(parts) == 2 and registry.versions(parts[1]):
        made = discovery.group(registry, parts[1])
    elif parts[0] == "apis" and len(parts) == 3 and registry.serves(*parts[1:]):
        made = discovery.resources(registry, *parts[1:])
    elif parts[0] != "openapi":
        return None
    if not known:
        raise ApiError(403, f'forbidden: User "system:anonymous" cannot get path "{path}"')
    if parts[0] == "openapi":
        return openapi.answer(registry, path, accept)
    if made is None:
        return None
    return web.Response(body=msgspec.json.encode(made), headers={"Content-Type": kind})
