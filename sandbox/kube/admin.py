"""The sandbox's own door, `/sandbox/`: faults, cuts, compaction, tokens and counts over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from sandbox.kube.errors import ApiError
from sandbox.kube.faults import CUTS

if TYPE_CHECKING:
    from sandbox.kube.server import KubeServer


async def answer(server: KubeServer, request: web.BaseRequest) -> web.Response:
    """One administrative request; every answer is a JSON object."""
    raw = await request.read()
    try:
        sent: Any = msgspec.json.decode(raw) if raw else {}
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(sent, dict):
        raise ApiError(400, "the body must be an object")
    return web.Response(
        body=msgspec.json.encode(_act(server, request.method, request.path, sent)),
        content_type="application/json",
    )


def _act(server: KubeServer, method: str, path: str, sent: dict[str, Any]) -> dict[str, Any]:
    match method, path.removeprefix("/sandbox/").strip("/"):
        case "POST", "faults":
            try:
                server.faults.fail(**sent)
            except (TypeError, ValueError) as error:
                raise ApiError(400, f"not a fault: {error}") from error
            return {"pending": len(server.faults.pending)}
        case "DELETE", "faults":
            server.faults.clear()
            return {"pending": 0}
        case "POST", "watches/cut":
            how = sent.get("how", "clean")
            if how not in CUTS:
                raise ApiError(400, f"how is {how!r}; it must be one of {', '.join(CUTS)}")
            return {"cut": server.cut_watches(how, sent.get("plural", ""))}
        case "POST", "compact":
            return {"resourceVersion": server.compact(sent.get("resourceVersion"))}
        case "POST", "token":
            server.rotate_token(sent.get("token"), keep_old=bool(sent.get("keepOld")))
            return {"token": server.token}
        case "GET", "counts":
            return {"counts": _counts(server), "writes": server.faults.writes()}
        case "DELETE", "counts":
            server.faults.counts.clear()
            return {"counts": [], "writes": 0}
    raise ApiError(
        404,
        "there is POST and DELETE faults, POST watches/cut, POST compact, POST token, "
        "GET and DELETE counts",
    )


def _counts(server: KubeServer) -> list[dict[str, Any]]:
    return [
        {"verb": verb, "resource": noun, "count": count}
        for (verb, noun), count in sorted(server.faults.counts.items())
    ]
