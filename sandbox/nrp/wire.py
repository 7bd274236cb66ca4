"""Requests and answers as bytes: decoding with clear errors, headers of waiting, broken answers."""

import asyncio
import contextlib

import msgspec
from aiohttp import web

from sandbox.nrp.arm import ArmError, Doc, bad

BODY_LIMIT = 4 * 1024 * 1024


async def read(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise ArmError(
            413, "RequestContentTooLarge", f"a request may have at most {BODY_LIMIT} bytes"
        ) from None


def decode(body: bytes) -> Doc:
    try:
        doc = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise bad("InvalidRequestContent", f"the body is not JSON: {error}") from None
    if not isinstance(doc, dict):
        raise bad("InvalidRequestContent", "the body must be an object")
    return doc


def keys_of(op: str, body: bytes) -> list[str]:
    """The services or locations that an action names, as far as the body can be read."""
    field = {"update_services": "serviceRequests", "update_address_locations": "addressLocations"}
    if op not in field:
        return []
    keys: list[str] = []
    with contextlib.suppress(msgspec.DecodeError, AttributeError, TypeError):
        for entry in msgspec.json.decode(body).get(field[op]) or []:
            if op == "update_services":
                keys.append(f"service/{entry['service']['name']}".lower())
            else:
                keys.append(f"location/{entry['addressLocation']}".lower())
    return keys


def json_answer(status: int, doc: Doc, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.json.encode(doc),
        content_type="application/json",
        headers=headers,
    )


def error_answer(error: ArmError) -> web.Response:
    headers = wait_headers(error.retry_after) if error.retry_after is not None else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = 'Bearer error="invalid_token"'
    return json_answer(error.status, error.body(), headers)


def wait_headers(seconds: float) -> dict[str, str]:
    """HTTP wants whole seconds there; fractions go into the header that the SDK also knows."""
    if seconds == int(seconds):
        return {"Retry-After": str(int(seconds))}
    return {"retry-after-ms": str(int(seconds * 1000))}


def abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


async def send_half(request: web.Request, whole: web.Response) -> None:
    body = whole.body if isinstance(whole.body, bytes) else b""
    half = web.StreamResponse(status=whole.status, headers={"Content-Length": str(len(body))})
    half.content_type = "application/json"
    await half.prepare(request)
    await half.write(body[: len(body) // 2])
    await asyncio.sleep(0.02)
    abort(request)
