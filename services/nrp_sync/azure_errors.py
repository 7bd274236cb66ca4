"""Which of our errors an answer of Azure's resource manager is.

Pure: status, code and text in, one of the port's classes out. The rules:
- a code that carries behaviour decides before the status does, since the provider sends it with
  different ones, and sometimes only in the text;
- 5xx and timeouts may have been applied, everything else was not;
- an operation that failed in the end (status 200) was not applied only if its code says that the
  content was refused; any other end leaves it open.

Texts lose subscription ids and what looks like a token before anyone can log them.
"""

import datetime
import email.utils
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from services.nrp_sync.errors import LONGEST_WAIT
from services.nrp_sync.provider import (
    AuthFailed,
    Conflict,
    InUse,
    Invalid,
    NotFound,
    OverlayMappings,
    PreconditionFailed,
    ProviderError,
    QuotaExceeded,
    Throttled,
    Unknown,
)

_OVERLAY = "servicewithoverlaymappingscannotbedeleted"
_QUOTA = {"quotaexceeded", "publicipcountlimitreached", "maxpublicipcountlimitreached"}
_IN_USE = re.compile(r"(inuse\w*|publicipaddress)cannotbedeleted|publicipaddressinuse")
_REFUSED = re.compile(
    r"duplicate\w+|ipv[46]locationcannotcontain\w+|rulesuse\w+|multipledefaultservices\w+"
    r"|invalid\w+|badrequest|servicenotfound|unprocessable\w*|.*notallowed"
)
_BY_STATUS: dict[int, type[ProviderError]] = {
    401: AuthFailed,
    403: AuthFailed,
    404: NotFound,
    409: Conflict,
    412: PreconditionFailed,
    429: Throttled,
}
_SUBSCRIPTION = re.compile(r"(/subscriptions/)[^/\s'\"]+", re.IGNORECASE)
_GUID = re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE)
_TOKEN = re.compile(r"(bearer\s+)\S+|\beyJ[\w-]{8,}(\.[\w-]+)*", re.IGNORECASE)
_LENGTH = 600


def body_error(body: bytes) -> tuple[str, str] | None:
    """Code and text of the error in a body; None when it speaks of none.

    The usual shape, and the two that some front doors use. An error whose parts are not what they
    should be is an error all the same.
    """
    try:
        doc = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
    if not isinstance(doc, dict):
        return None
    error = doc.get("error")
    if isinstance(error, dict):
        return _said(error, "code") or "Unspecified", _said(error, "message")
    if error is not None:
        return "Unspecified", str(error)
    status = _said(doc, "status")
    code = _said(doc, "code") or (status if status.lower() in ("failed", "canceled") else "")
    return (code, _said(doc, "message")) if code else None


def _said(doc: dict[str, Any], field: str) -> str:
    value = doc.get(field)
    return "" if value is None else str(value)


def classify(
    op: str,
    status: int,
    code: str,
    message: str,
    *,
    request_id: str = "",
    retry_after: float | None = None,
) -> ProviderError:
    """The error that an answer means. Status 200: an operation that failed in the end."""
    key = code.lower()
    text = scrub(message) or "the provider gave no reason"

    def made(kind: type[ProviderError]) -> ProviderError:
        return kind(
            op, text, code=code, status=status, request_id=request_id, retry_after=retry_after
        )

    if key == _OVERLAY or _OVERLAY in message.lower():
        return made(OverlayMappings)
    if key in _QUOTA:
        return made(QuotaExceeded)
    if _IN_USE.fullmatch(key):
        return made(InUse)
    if status in _BY_STATUS:
        return made(_BY_STATUS[status])
    if status == 408:
        return Unknown(op, text, timeout=True, code=code, status=status, request_id=request_id)
    if 400 <= status < 500 or (status < 300 and _REFUSED.fullmatch(key)):
        return made(Invalid)
    return made(Unknown)


def scrub(text: str) -> str:
    """The text without subscription ids and tokens, of bounded length, on one line."""
    text = _SUBSCRIPTION.sub(r"\1***", text)
    text = _TOKEN.sub(lambda match: (match.group(1) or "") + "***", text)
    text = " ".join(text.split())
    return text if len(text) <= _LENGTH else text[: _LENGTH - 3] + "..."


def scrub_ids(text: str) -> str:
    """The same, and no id of any tenant, client or subscription either."""
    return _GUID.sub("***", scrub(text))


def retry_after_of(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait, from the headers that Azure uses for it; None when there is none."""
    for name in ("retry-after-ms", "x-ms-retry-after-ms"):
        if name in headers:
            return _seconds(headers[name], 1000.0)
    return _seconds(headers["retry-after"], 1.0) if "retry-after" in headers else None


def _seconds(text: str, divisor: float) -> float | None:
    try:
        seconds = float(text) / divisor
    except ValueError:
        pass
    else:
        return min(max(0.0, seconds), LONGEST_WAIT) if math.isfinite(seconds) else None
    try:
        until = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=datetime.UTC)
    seconds = (until - datetime.datetime.now(datetime.UTC)).total_seconds()
    return min(max(0.0, seconds), LONGEST_WAIT)
