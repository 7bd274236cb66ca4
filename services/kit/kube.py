"""The Kubernetes API for the watcher and the applier: raw bytes in, raw bytes out.

Objects are not modelled here: a list yields pages of msgspec.Raw, a watch yields raw events, and
the caller decodes into the view it needs (57,000 events/s against 817 with generated models).

Guarantees: every request ends in a bounded time; a watch ends when nothing at all came for
`idle_s`; a line may be many megabytes; half a line at the end of a stream is dropped; an ERROR
event is raised as a KubeError and never handed on as an object; a 401 makes the credentials be read
anew and the request sent once more. Retries beyond that are the caller's, who knows how long.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import aiohttp
import msgspec
import structlog

from services.kit.kube_errors import (
    AlreadyExists,
    BadRequest,
    Conflict,
    CredentialsError,
    Forbidden,
    Gone,
    Idle,
    Invalid,
    KubeError,
    NotFound,
    TooManyRequests,
    Unauthorized,
    Unavailable,
    UnsupportedMediaType,
    error_of,
)
from services.kit.kube_lines import LineSplitter, read_events
from services.kit.kube_types import Page, Resource, ResourceInfo, WatchEvent

if TYPE_CHECKING:
    from services.kit.kube_auth import Credentials

__all__ = [
    "AlreadyExists",
    "BadRequest",
    "Conflict",
    "CredentialsError",
    "Forbidden",
    "Gone",
    "Idle",
    "Invalid",
    "Kube",
    "KubeError",
    "NotFound",
    "Page",
    "Resource",
    "ResourceInfo",
    "TooManyRequests",
    "Unauthorized",
    "Unavailable",
    "UnsupportedMediaType",
    "WatchEvent",
]

APPLY: Final = "application/apply-patch+yaml"  # JSON is YAML
MERGE: Final = "application/merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
JSON: Final = "application/json"
REQUEST_S: Final = 30.0
LIST_S: Final = 60.0
CONNECT_S: Final = 10.0
READ_BUFFER: Final = 1 << 20
MAX_CONNECTIONS: Final = 256

Params: TypeAlias = Mapping[str, str]
Body: TypeAlias = bytes | Mapping[str, Any] | msgspec.Struct

log = structlog.get_logger()


class _ResourceList(msgspec.Struct):
    resources: list[ResourceInfo] = []


_encode: Final = msgspec.json.Encoder().encode
_page_decoder: Final = msgspec.json.Decoder(Page)
_discovery_decoder: Final = msgspec.json.Decoder(_ResourceList)


class Kube:
    """A client of one API server. Make it with `connect`, end it with `close`."""

    def __init__(self, credentials: Credentials, session: aiohttp.ClientSession) -> None:
        self._credentials = credentials
        self._session = session
        self._discovered: dict[str, dict[str, ResourceInfo]] = {}

    @classmethod
    async def connect(
        cls, kubeconfig: str | None = None, context: str | None = None, *, user_agent: str = ""
    ) -> Kube:
        """Read the credentials (no request is made); CredentialsError says what is wrong.

        Without a path: KUBECONFIG, else the pod's service account, else ~/.kube/config.
        """
        from services.kit.kube_auth import Credentials  # late: costs 2 s and 112 MB

        return await cls.over(Credentials(kubeconfig, context), user_agent=user_agent)

    @classmethod
    async def over(cls, credentials: Credentials, *, user_agent: str = "") -> Kube:
        """A client with these credentials."""
        await credentials.access()
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
            headers={"User-Agent": user_agent or "lbledger", "Accept": JSON},
            read_bufsize=READ_BUFFER,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return cls(credentials, session)

    def __repr__(self) -> str:
        return f"Kube({self._credentials.source})"

    async def close(self) -> None:
        await self._session.close()

    async def __aenter__(self) -> Kube:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- reading ---

    async def get(self, path: str, *, timeout: float = REQUEST_S, **params: str) -> bytes:
        """The body of a GET; decode it with msgspec."""
        return await self._request("GET", path, params, timeout=timeout)

    async def list_pages(
        self,
        path: str,
        limit: int = 500,
        params: Params | None = None,
        *,
        timeout: float = LIST_S,
    ) -> AsyncGenerator[Page, None]:
        """Every page of a list, at one version of the store.

        Gone in the middle means that the list has to be begun anew: nothing that was seen says
        anything about what was not.
        """
        query = {**(params or {}), "limit": str(limit)}
        while True:
            body = await self._request("GET", path, query, timeout=timeout)
            page = _decoded(_page_decoder, body, path)
            yield page
            if not page.metadata.continue_:
                return
            query["continue"] = page.metadata.continue_

    async def watch(
        self,
        path: str,
        resource_version: str,
        params: Params | None = None,
        *,
        timeout_s: float = 300.0,
        idle_s: float = 120.0,
    ) -> AsyncGenerator[list[WatchEvent], None]:
        """What happened after `resource_version`, in batches as they arrive.

        The first batch is empty and says that the server took the request.
        Ends when the server closes the stream. Raises Gone when the version has aged (both as a
        status and as an ERROR event), Idle when the stream was silent for `idle_s`, Unavailable
        when the connection broke, and the KubeError of any other ERROR event; events before it were
        yielded.
        """
        query = {
            **(params or {}),
            "watch": "1",
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, int(timeout_s))),
        }
        limits = aiohttp.ClientTimeout(
            total=timeout_s + idle_s + CONNECT_S, sock_connect=CONNECT_S, sock_read=idle_s
        )
        headers = {"Accept-Encoding": "identity"}  # gzip would hold small events back
        lines = LineSplitter()
        async with self._response("GET", path, query, limits=limits, headers=headers) as response:
            yield []
            while chunk := await _chunk(response, path, idle_s):
                events, error = read_events(lines.feed(chunk), path)
                if events:
                    yield events
                if error is not None:
                    raise error
        if lines.pending:
            log.info("kube.watch.half_line", path=path, bytes=lines.pending)

    async def resources(
        self, group_version: str, *, refresh: bool = False
    ) -> dict[str, ResourceInfo]:
        """The kinds of a group version by plural; empty when the server does not serve it."""
        known = self._discovered.get(group_version)
        if known is not None and not refresh:
            return known
        root = "/apis/" if "/" in group_version else "/api/"
        path = root + group_version
        try:
            body = await self._request("GET", path, {}, timeout=REQUEST_S)
        except NotFound:
            listed: list[ResourceInfo] = []
        else:
            listed = _decoded(_discovery_decoder, body, path).resources
        with_status = {r.name.partition("/")[0] for r in listed if r.name.endswith("/status")}
        found = {
            r.name: msgspec.structs.replace(r, status=r.name in with_status)
            for r in listed
            if "/" not in r.name
        }
        self._discovered[group_version] = found
        return found

    # --- writing ---

    async def apply(
        self,
        path: str,
        body: Body,
        *,
        field_manager: str,
        force: bool = True,
        subresource: str = "",
    ) -> bytes:
        """Server-side apply: the fields of `body` are ours from now on, those left out are not.

        Without `force` a field of another manager is a Conflict whose details name it.
        """
        query = {"fieldManager": field_manager, "force": "true" if force else "false"}
        return await self._write("PATCH", _sub(path, subresource), body, query, APPLY)

    async def patch(
        self,
        path: str,
        body: Body | list[Mapping[str, Any]],
        content_type: str = MERGE,
        *,
        field_manager: str = "",
        subresource: str = "",
    ) -> bytes:
        query = {"fieldManager": field_manager} if field_manager else {}
        return await self._write("PATCH", _sub(path, subresource), body, query, content_type)

    async def create(self, path: str, body: Body, *, field_manager: str = "") -> bytes:
        """POST to a collection; AlreadyExists when the name is taken."""
        query = {"fieldManager": field_manager} if field_manager else {}
        return await self._write("POST", path, body, query, JSON)

    async def replace(
        self, path: str, body: Body, *, field_manager: str = "", subresource: str = ""
    ) -> bytes:
        """PUT; Conflict when the resourceVersion in the body is not the newest any more."""
        query = {"fieldManager": field_manager} if field_manager else {}
        return await self._write("PUT", _sub(path, subresource), body, query, JSON)

    async def delete(
        self,
        path: str,
        *,
        uid: str = "",
        resource_version: str = "",
        propagation: str = "",
    ) -> bytes:
        """Delete; with preconditions it is a Conflict when another object has the name by now."""
        wanted = {"uid": uid, "resourceVersion": resource_version}
        preconditions = {key: value for key, value in wanted.items() if value}
        options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if preconditions:
            options["preconditions"] = preconditions
        if propagation:
            options["propagationPolicy"] = propagation
        return await self._write("DELETE", path, options, {}, JSON)

    # --- transport ---

    async def _write(
        self, method: str, path: str, body: object, query: Params, content_type: str
    ) -> bytes:
        data = body if isinstance(body, bytes) else _encode(body)
        headers = {"Content-Type": content_type}
        return await self._request(method, path, query, data=data, headers=headers)

    async def _request(
        self,
        method: str,
        path: str,
        query: Params,
        *,
        timeout: float = REQUEST_S,
        data: bytes | None = None,
        headers: Params | None = None,
    ) -> bytes:
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_S)
        async with self._response(
            method, path, query, limits=limits, data=data, headers=headers
        ) as response:
            return await response.read()

    @asynccontextmanager
    async def _response(
        self,
        method: str,
        path: str,
        query: Params,
        *,
        limits: aiohttp.ClientTimeout,
        data: bytes | None = None,
        headers: Params | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A reply with a good status; everything else as a KubeError, network trouble included."""
        try:
            response = await self._send(method, path, query, limits, data, headers)
            async with response:
                if response.status >= 400:
                    retry_after = response.headers.get("Retry-After")
                    raise error_of(response.status, await response.read(), retry_after)
                yield response
        except TimeoutError as error:  # aiohttp's are subclasses, so this comes first
            raise Unavailable(f"{method} {path}: no answer in time", reason="Timeout") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{method} {path}: {_said(error)}", reason="Network") from error

    async def _send(
        self,
        method: str,
        path: str,
        query: Params,
        limits: aiohttp.ClientTimeout,
        data: bytes | None,
        headers: Params | None,
    ) -> aiohttp.ClientResponse:
        access = await self._credentials.access()
        for attempt in (1, 2):
            response = await self._session.request(
                method,
                access.host + path,
                params=query,
                data=data,
                headers={**(headers or {}), **access.headers},
                timeout=limits,
                ssl=access.tls if access.tls is not None else True,
                server_hostname=access.tls_server_name,
                proxy=access.proxy,
                allow_redirects=False,  # a redirect would carry the token to another host
            )
            if response.status != 401 or attempt == 2:
                break
            response.release()
            log.info("kube.credentials.refused", path=path, source=self._credentials.source)
            access = await self._credentials.renew(access)
        return response


async def _chunk(response: aiohttp.ClientResponse, path: str, idle_s: float) -> bytes:
    """What has come, b"" at the end of the stream; Idle when nothing comes."""
    try:
        return await response.content.readany()
    except TimeoutError as error:
        raise Idle(f"GET {path}: nothing came for {idle_s:g} s", reason="Idle") from error


T = TypeVar("T")


def _decoded(decoder: msgspec.json.Decoder[T], body: bytes, path: str) -> T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise Unavailable(f"GET {path}: unreadable answer: {error}") from error


def _sub(path: str, subresource: str) -> str:
    return f"{path}/{subresource}" if subresource else path


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
