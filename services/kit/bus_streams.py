"""JetStream's management and direct-read interface, as far as we use it.

Plain requests with JSON that we can see: the client library has no call for half of it.
"""

import base64
from datetime import timedelta
from typing import Any, Final

import msgspec
import structlog

from schema.subjects import StreamSpec
from services.kit.bus_link import Link, NoResponders, Reply
from services.kit.bus_types import (
    BusError,
    Message,
    StreamMissing,
    StreamState,
    Unavailable,
    parse_headers,
    status,
    time_ns,
)

_log = structlog.get_logger()
_NO_STREAM: Final = 10059
_NO_MESSAGE: Final = 10037
_NAME_IN_USE: Final = 10058
_BAD_CONFIG: Final = 10052  # comes with 500
# What a server answers while a leader is elected or it is short of something: same call later.
RETRIABLE_CODES: Final = frozenset({408, 409, 429, 500, 503})


class ApiError(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""

    def __str__(self) -> str:
        return f"{self.description} ({self.code}/{self.err_code})"


class _Failed(msgspec.Struct):
    error: ApiError | None = None


_failed = msgspec.json.Decoder(_Failed)


class JetStreamError(BusError):
    """A refusal by the server, with its code."""

    def __init__(self, what: str, error: ApiError) -> None:
        super().__init__(f"{what}: {error}")
        self.error = error


async def api(link: Link, call: str, body: object = None, timeout: float = 5.0) -> bytes:
    """One management call; its answer, or StreamMissing, Unavailable, JetStreamError."""
    data = b"" if body is None else msgspec.json.encode(body)
    reply = await link.request(f"$JS.API.{call}", data, timeout)
    try:
        error = _failed.decode(reply.data).error
    except msgspec.DecodeError as unreadable:
        raise Unavailable(f"{call}: unreadable answer") from unreadable
    if error is None:
        return reply.data
    if error.err_code == _NO_STREAM:
        raise StreamMissing(f"{call}: {error.description}")
    if error.code in RETRIABLE_CODES and error.err_code != _BAD_CONFIG:
        raise Unavailable(f"{call}: {error}")
    raise JetStreamError(call, error)


async def stream_state(link: Link, stream: str) -> StreamState:
    return _state(msgspec.json.decode(await api(link, f"STREAM.INFO.{stream}")))


async def ensure_stream(link: Link, spec: StreamSpec) -> StreamState:
    """Create the stream, or bring it to the specification. Safe for several callers at once."""
    wanted = _wanted(spec)
    for _ in range(3):
        try:
            info = msgspec.json.decode(await api(link, f"STREAM.INFO.{spec.name}"))
        except StreamMissing:
            try:
                created = await api(link, f"STREAM.CREATE.{spec.name}", wanted, 10)
            except JetStreamError as error:
                if error.error.err_code != _NAME_IN_USE:
                    raise
                continue  # another process was quicker
            _log.info("bus.stream.created", stream=spec.name, subjects=list(spec.subjects))
            return _state(msgspec.json.decode(created))
        changed = _differences(info["config"], wanted)
        if not changed:
            return _state(info)
        _say_changes(spec.name, info["config"], changed)
        updated = await api(link, f"STREAM.UPDATE.{spec.name}", info["config"] | changed, 10)
        return _state(msgspec.json.decode(updated))
    raise Unavailable(f"stream {spec.name} appears and vanishes")


async def last(link: Link, stream: str, subject: str) -> Message | None:
    return await _direct(link, stream, f".{subject}", None)


async def get(link: Link, stream: str, seq: int) -> Message | None:
    return await _direct(link, stream, "", {"seq": seq})


async def next_after(link: Link, stream: str, subject: str, seq: int) -> Message | None:
    """The first message of that subject above a sequence."""
    return await _direct(link, stream, "", {"seq": seq + 1, "next_by_subj": subject})


async def from_leader(link: Link, stream: str, query: dict[str, Any]) -> Message | None:
    """As the direct reads, but never behind: any replica may answer those."""
    try:
        answer = await api(link, f"STREAM.MSG.GET.{stream}", query)
    except JetStreamError as error:
        if error.error.err_code == _NO_MESSAGE:
            return None
        raise
    found = msgspec.json.decode(answer)["message"]
    raw = base64.b64decode(found["hdrs"]) if found.get("hdrs") else None
    data = base64.b64decode(found.get("data") or "")
    return Message(stream, found["subject"], data, raw, found["seq"], time_ns(found["time"]))


async def _direct(link: Link, stream: str, suffix: str, query: object) -> Message | None:
    data = b"" if query is None else msgspec.json.encode(query)
    try:
        reply = await link.request(f"$JS.API.DIRECT.GET.{stream}{suffix}", data)
    except NoResponders:
        # No such stream, or one without direct reads, or not up yet: the management call knows.
        await stream_state(link, stream)
        return await from_leader(link, stream, query or {"last_by_subj": suffix[1:]})  # type: ignore[arg-type]
    return _message(stream, reply)


def _message(stream: str, reply: Reply) -> Message | None:
    code, text = status(reply.headers)
    if code == 404:
        return None
    if code:
        raise Unavailable(f"direct read from {stream}: {code} {text}")
    headers = parse_headers(reply.headers)
    return Message(
        stream,
        headers["Nats-Subject"],
        reply.data,
        reply.headers,
        int(headers["Nats-Sequence"]),
        time_ns(headers["Nats-Time-Stamp"]),
    )


def _wanted(spec: StreamSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "subjects": list(spec.subjects),
        "retention": "limits",
        "storage": "file",
        "discard": "old",
        "max_age": _ns(spec.max_age_s),
        "max_bytes": spec.max_bytes,
        "num_replicas": spec.replicas,
        # The server refuses a window longer than the age.
        "duplicate_window": _ns(min(spec.duplicate_window_s, spec.max_age_s)),
        "compression": spec.compression,
        "allow_direct": True,
        "allow_atomic": True,
        "deny_delete": True,
        "deny_purge": True,
    }


def _ns(seconds: float) -> int:
    return timedelta(seconds=seconds) // timedelta(microseconds=1) * 1000


def _differences(present: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in wanted.items() if present.get(key) != value}


def _say_changes(stream: str, present: dict[str, Any], changed: dict[str, Any]) -> None:
    _log.info("bus.stream.updated", stream=stream, changed=sorted(changed))
    for limit in ("max_age", "max_bytes"):
        before = present.get(limit) or 0
        if limit in changed and (before <= 0 or 0 < changed[limit] < before):
            _log.warning(
                "bus.stream.retention_lowered",
                stream=stream,
                limit=limit,
                before=before if before > 0 else "unlimited",
                after=changed[limit],
            )


def _state(info: dict[str, Any]) -> StreamState:
    state = info["state"]
    return StreamState(
        name=info["config"]["name"],
        created=info["created"],
        first_seq=state["first_seq"],
        last_seq=state["last_seq"],
        messages=state["messages"],
        bytes=state["bytes"],
    )
