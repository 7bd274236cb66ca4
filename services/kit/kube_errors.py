"""What can go wrong with a request to the Kubernetes API, as one family.

`KubeError` carries what the server's Status said. A subclass exists only where some caller treats
it differently. `Unavailable` stands for everything that may pass by waiting: no connection, a
time-out, a 5xx, an answer that is no JSON. No error holds a header or a credential.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec


class KubeError(Exception):
    """The API server refused a request."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        reason: str = "",
        details: Mapping[str, Any] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.reason = reason
        self.details: Mapping[str, Any] = details or {}
        self.retry_after = retry_after

    def __str__(self) -> str:
        head = " ".join(part for part in (str(self.status or ""), self.reason) if part)
        return f"{head}: {self.message}" if head else self.message


class BadRequest(KubeError):
    """400: the request can't be understood."""


class Unauthorized(KubeError):
    """401, also after the credentials were read anew."""


class Forbidden(KubeError):
    """403: the service account lacks a right (the message names it)."""


class NotFound(KubeError):
    """404: no such object, or no such kind."""


class Conflict(KubeError):
    """409: the object changed meanwhile, or another field manager owns a field."""


class AlreadyExists(KubeError):
    """409 on a create: the name is taken."""


class Gone(KubeError):
    """410: the resourceVersion or continue token has aged; list anew."""


class UnsupportedMediaType(KubeError):
    """415: for instance a strategic merge patch of a custom resource."""


class Invalid(KubeError):
    """422: the object is not valid (details name the fields)."""


class TooManyRequests(KubeError):
    """429: wait for `retry_after`."""


class Unavailable(KubeError):
    """No answer, or one that says nothing about the request: try again later."""


class Idle(Unavailable):
    """A watch on which nothing at all came for its idle limit: it may be dead."""


class CredentialsError(KubeError):
    """The kubeconfig, the service account or the exec plugin can't be used as it is."""


_BY_STATUS: Final[dict[int, type[KubeError]]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    415: UnsupportedMediaType,
    422: Invalid,
    429: TooManyRequests,
}


class Status(msgspec.Struct):
    """metav1.Status, as far as it says what went wrong."""

    message: str = ""
    reason: str = ""
    code: int = 0
    details: dict[str, Any] | None = None


_status_decoder: Final = msgspec.json.Decoder(Status)


def error_of(status: int, body: bytes, retry_after: str | None = None) -> KubeError:
    """The error for a reply with an HTTP status of 400 or more, or for a watch's ERROR event."""
    try:
        said = _status_decoder.decode(body)
    except msgspec.DecodeError:
        text = body[:300].decode("utf-8", "replace").strip()
        said = Status(message=text or "no explanation given")
    status = status or said.code
    details = said.details or {}
    if status == 409 and said.reason == "AlreadyExists":
        kind: type[KubeError] = AlreadyExists
    elif status >= 500:
        kind = Unavailable
    else:
        kind = _BY_STATUS.get(status, KubeError)
    return kind(
        said.message or said.reason or f"HTTP {status}",
        status=status,
        reason=said.reason,
        details=details,
        retry_after=_seconds(retry_after, details),
    )


def _seconds(header: str | None, details: Mapping[str, Any]) -> float | None:
    for value in (header, details.get("retryAfterSeconds")):
        try:
            if value:
                return max(0.0, float(value))
        except (TypeError, ValueError):
            continue  # a date is legal in the header; the API server sends seconds
    return None
