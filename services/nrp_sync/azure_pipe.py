"""How requests reach Azure: one pipeline of the SDK, and the meaning of everything that fails.

The SDK's own retries and logs are left out: backoff and Retry-After are the engine's, and the log
lines would show subscription ids. Each exchange has a deadline, each operation another, and 429
closes a gate (see `gate.py`). Whatever is raised becomes one of the port's errors; a connection
that was never opened is told from one that broke, since only the former applied nothing.
"""

import asyncio
import contextlib
import gc
import logging
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from azure.core.credentials import AccessToken
from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    ServiceRequestError,
    ServiceRequestTimeoutError,
    ServiceResponseTimeoutError,
)
from azure.core.pipeline import PipelineRequest, PipelineResponse
from azure.core.pipeline.policies import (
    AsyncHTTPPolicy,
    HeadersPolicy,
    RequestIdPolicy,
    UserAgentPolicy,
)
from azure.core.pipeline.transport import AioHttpTransport
from azure.core.rest import AsyncHttpResponse, HttpRequest
from azure.identity.aio import DefaultAzureCredential
from azure.mgmt.core.policies import AsyncARMChallengeAuthenticationPolicy
from azure.mgmt.network.aio import NetworkManagementClient

from services.nrp_sync.azure_errors import body_error, classify, retry_after_of, scrub_ids
from services.nrp_sync.gate import GateClosed, Gates
from services.nrp_sync.provider import (
    AuthFailed,
    ProviderError,
    ProviderSettings,
    Throttled,
    Unknown,
    Unreachable,
)

# The SDK leaves some hundred thousand objects behind that live as long as the process. Taken out of
# the collector's sight, a full collection costs nothing; otherwise it stops the loop for 100 ms.
gc.collect()
gc.freeze()

PUBLIC_CLOUD = "https://management.azure.com"
_CONNECT_TIMEOUT_S = 10.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def problems(settings: ProviderSettings) -> list[str]:
    """What keeps these settings from working, beyond what the port itself checks."""
    found = settings.problems()
    url = urlsplit(settings.base_url or PUBLIC_CLOUD)
    if url.scheme == "https":
        return found
    if url.scheme != "http" or url.hostname not in _LOOPBACK:
        found.append(f"base_url is {settings.base_url!r}, it must be https (http only on loopback)")
    elif not settings.token:
        found.append("token is empty, it must be set where base_url is http")
    return found


class Pipe:
    """One client of the SDK with its credential and its pool of connections."""

    def __init__(self, settings: ProviderSettings, subscription: str) -> None:
        # The libraries tell URLs and tenants at level INFO.
        logging.getLogger("azure").setLevel(logging.WARNING)
        self._settings = settings
        self.url = (settings.base_url or PUBLIC_CLOUD).rstrip("/")
        token = str.__str__(settings.token)  # also of a kind of string that masks itself
        self._credential = _FixedToken() if token else DefaultAzureCredential()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=settings.max_connections),
            auto_decompress=False,  # the SDK's transport does that
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self.sdk = NetworkManagementClient(
            self._credential,
            subscription,
            base_url=self.url,
            transport=AioHttpTransport(
                session=self._session,
                session_owner=False,
                connection_timeout=_CONNECT_TIMEOUT_S,
                read_timeout=settings.request_timeout,
            ),
            policies=[
                RequestIdPolicy(),
                HeadersPolicy(),
                UserAgentPolicy("lbledger"),
                _SendToken(token, self.url)
                if token
                else AsyncARMChallengeAuthenticationPolicy(
                    self._credential, f"{self.url}/.default"
                ),
                _Exchange(Gates(settings.rate_limit), settings.request_timeout),
            ],
        )

    async def close(self) -> None:
        """Give back connections and credentials."""
        await self.sdk.close()
        await self._credential.close()
        await self._session.close()

    def link(self, path: str) -> str:
        """The URL of a path of the resource manager."""
        return f"{self.url}{path}?api-version={self._settings.api_version}"

    def leads_here(self, url: str) -> bool:
        """Whether a link that we were given leads to the provider: the token goes along."""
        return _origin(url) == _origin(self.url)

    async def send(self, request: HttpRequest, request_id: str = "") -> AsyncHttpResponse:
        """One exchange; every status is an answer."""
        named: dict[str, Any] = {"request_id": request_id} if request_id else {}
        return await self.sdk.send_request(request, **named)

    def check(self, op: str, response: AsyncHttpResponse) -> None:
        """Raise unless the answer is a success, by its status and by its body."""
        error = body_error(response.content)
        status = response.status_code
        if status in (200, 201, 204) and error is None:
            body = response.content.strip()
            if body and not body.startswith((b"{", b"[")):
                raise Unknown(op, "the answer is no JSON", request_id=request_id_of(response))
            return
        code, message = error or ("", f"HTTP {status}")
        raise classify(
            op,
            status,
            code,
            message,
            request_id=request_id_of(response),
            retry_after=retry_after_of(response.headers),
        )

    async def result(self, op: str, poller: Any) -> Any:
        """The end of a long-running operation of the SDK. Once it was accepted, only its own word
        that it failed is a failure; any trouble with asking leaves it open."""
        try:
            return await poller.result()
        except (AzureError, aiohttp.ClientError, GateClosed) as error:
            failure = self.failure(op, error)
            said_so = isinstance(error, HttpResponseError) and error.status_code == 200
            if said_so or isinstance(failure, Unknown):
                raise failure from None
            raise Unknown(
                op,
                f"accepted, then asking for its end failed: {failure.message}",
                code=failure.code,
                status=failure.status,
                request_id=failure.request_id,
                retry_after=failure.retry_after,
            ) from None

    @contextlib.asynccontextmanager
    async def operation(self, op: str) -> AsyncIterator[None]:
        """The deadline of an operation, and every failure in it as one of the port's classes.

        The causes are cut off: their texts hold ids that must not be logged.
        """
        limit = self._settings.operation_timeout
        try:
            async with asyncio.timeout(limit):
                yield
        except ProviderError:
            raise
        except TimeoutError:
            raise Unknown(op, f"not finished within {limit:g} s", timeout=True) from None
        except (AzureError, aiohttp.ClientError, GateClosed, ValueError) as error:
            raise self.failure(op, error) from None

    def failure(self, op: str, error: Exception) -> ProviderError:
        """The port's class for what the SDK raised."""
        match error:
            case GateClosed():
                return Throttled(op, f"not sent: {error}", retry_after=error.retry_after)
            case HttpResponseError() if error.response is not None:
                return _answered(op, error.response)
            case ClientAuthenticationError():
                return AuthFailed(op, scrub_ids(str(error.message)))
            case ServiceRequestTimeoutError():
                return Unreachable(op, "no connection within its time")
            case ServiceResponseTimeoutError():
                limit = self._settings.request_timeout
                return Unknown(op, f"no answer within {limit:g} s", timeout=True)
            case ServiceRequestError() if _never_sent(error):
                return Unreachable(op, scrub_ids(str(error)))
            case _:
                return Unknown(op, f"no whole answer: {scrub_ids(str(error))}")


class _Exchange(AsyncHTTPPolicy[HttpRequest, AsyncHttpResponse]):
    """The last step before the wire: gates, and the deadline of one exchange."""

    def __init__(self, gates: Gates, timeout: float) -> None:
        super().__init__()
        self._gates = gates
        self._timeout = timeout

    async def send(
        self, request: PipelineRequest[HttpRequest]
    ) -> PipelineResponse[HttpRequest, AsyncHttpResponse]:
        gate = _gate_of(request.http_request)
        self._gates.enter(gate)
        try:
            async with asyncio.timeout(self._timeout):
                response = await self.next.send(request)
        except TimeoutError as error:
            raise ServiceResponseTimeoutError("no answer in time", error=error) from error
        if response.http_response.status_code == 429:
            delay = retry_after_of(response.http_response.headers)
            if delay:
                self._gates.close(gate, delay)
        return response


class _SendToken(AsyncHTTPPolicy[HttpRequest, AsyncHttpResponse]):
    """A fixed token, for one host only."""

    def __init__(self, token: str, url: str) -> None:
        super().__init__()
        self._token = token
        self._origin = _origin(url)

    async def send(
        self, request: PipelineRequest[HttpRequest]
    ) -> PipelineResponse[HttpRequest, AsyncHttpResponse]:
        if _origin(request.http_request.url) != self._origin:
            raise ServiceRequestError("the token is not for this host")
        request.http_request.headers["Authorization"] = f"Bearer {self._token}"
        return await self.next.send(request)


class _FixedToken:
    """Stands where the SDK wants a credential; the policy above does the work."""

    async def get_token(
        self,
        *scopes: str,
        claims: str | None = None,
        tenant_id: str | None = None,
        enable_cae: bool = False,
        **_: Any,
    ) -> AccessToken:
        raise ClientAuthenticationError("a fixed token cannot be renewed")

    async def close(self) -> None:
        return

    async def __aenter__(self) -> "_FixedToken":
        return self

    async def __aexit__(self, *_: object) -> None:
        return


def _answered(op: str, response: Any) -> ProviderError:
    """The class of an error that has an answer behind it, as far as its body was read."""
    try:
        told = body_error(response.content)
    except (AzureError, aiohttp.ClientError):
        told = None
    code, message = told or ("", f"HTTP {response.status_code}")
    return classify(
        op,
        response.status_code,
        code,
        message,
        request_id=request_id_of(response),
        retry_after=retry_after_of(response.headers),
    )


def _never_sent(error: ServiceRequestError) -> bool:
    """The SDK gives this class also for a connection that broke after sending."""
    return error.inner_exception is None or isinstance(
        error.inner_exception, aiohttp.ClientConnectorError
    )


def request_id_of(response: Any) -> str:
    """The provider's own id of an exchange."""
    return str(response.headers.get("x-ms-request-id", ""))


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def _gate_of(request: HttpRequest) -> str:
    """Resource type and direction, as the provider counts them."""
    parts = urlsplit(request.url).path.lower().split("/providers/microsoft.network/")
    kind = parts[1].split("/")[0] if len(parts) == 2 else ""
    return f"{kind}:{'read' if request.method in ('GET', 'HEAD') else 'write'}"
