"""What travels over the bus and what can go wrong, free of any client library.

Headers are kept as they came and taken apart only when somebody asks: most readers of a stream
look at none, and parsing them would cost as much as everything else about a message.
"""

import re
from datetime import UTC, datetime
from typing import Final, Literal, NamedTuple

import msgspec

MSG_ID: Final = "Nats-Msg-Id"
EXPECTED_LAST: Final = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_STREAM: Final = "Nats-Expected-Stream"

_HEADER_LINE: Final = b"NATS/1.0"
_KEY: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_SUBJECT: Final = re.compile(r"[^\s.*>]+(?:\.[^\s.*>]+)*")
_good_keys: set[str] = set()


class BusError(Exception):
    """Something about the bus that a retry of the same call does not mend."""


class Unavailable(BusError):
    """No server, or no answer in time. The same call may work later."""


class StreamMissing(BusError):
    """The stream does not exist (any more)."""


class WrongLast(BusError):
    """Somebody else wrote to this subject after the sequence that the caller knew."""

    def __init__(self, subject: str, expected: int, last: int) -> None:
        super().__init__(f"{subject}: last sequence is {last}, expected {expected}")
        self.subject, self.expected, self.last = subject, expected, last


class TooLarge(BusError):
    """The server would close the connection over this message."""

    def __init__(self, subject: str, size: int, limit: int) -> None:
        super().__init__(
            f"{subject}: message of {size} bytes (headers included) is over the server's "
            f"max_payload of {limit}; send less or raise max_payload"
        )
        self.subject, self.size, self.limit = subject, size, limit


GapKind = Literal["stream_recreated", "tail_lost", "retention"]


class Gap(BusError):
    """The stream no longer continues where the reader stands: it has to start afresh."""

    def __init__(self, kind: GapKind, stream: str, detail: str) -> None:
        super().__init__(f"{stream}: {kind}: {detail}")
        self.kind: GapKind = kind
        self.stream = stream


class Message:
    """One stored message. `headers` is parsed at first use."""

    __slots__ = ("_headers", "_raw", "data", "seq", "stream", "subject", "time_ns")

    def __init__(
        self, stream: str, subject: str, data: bytes, raw: bytes | None, seq: int, time_ns: int
    ) -> None:
        self.stream = stream
        self.subject = subject
        self.data = data
        self.seq = seq
        self.time_ns = time_ns
        self._raw = raw
        self._headers: dict[str, str] | None = None

    def header(self, mark: bytes) -> str:
        """The value of one header (its mark: see header_mark), "" without it; the others stay as
        they came."""
        raw = self._raw
        if raw is None or (at := raw.rfind(mark)) < 0:
            return ""
        at += len(mark)
        return raw[at : raw.find(b"\r\n", at)].decode("utf-8", "replace").strip()

    @property
    def headers(self) -> dict[str, str]:
        if self._headers is None:
            self._headers = parse_headers(self._raw)
        return self._headers

    def __repr__(self) -> str:
        return f"Message({self.stream}:{self.seq} {self.subject}, {len(self.data)} bytes)"


class Outgoing(NamedTuple):
    """One message to be published. `expected`: see Publisher.publish. `lines`: further headers, as
    format_headers gives them."""

    subject: str
    data: bytes
    headers: dict[str, str]
    msg_id: str
    expected: int | None = None
    lines: str = ""


class Published(msgspec.Struct, frozen=True):
    """Where a message is stored. `duplicate`: it was stored before this call (or this try)."""

    seq: int
    duplicate: bool = False


class StreamState(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream holds. `created` tells a stream from its successor of the same name."""

    name: str
    created: str
    first_seq: int
    last_seq: int
    messages: int
    bytes: int


def parse_headers(raw: bytes | None) -> dict[str, str]:
    """Header block to a mapping; a later value of one name wins, and bad UTF-8 is replaced."""
    found: dict[str, str] = {}
    if raw:
        for line in raw.decode("utf-8", "replace").split("\r\n")[1:]:
            name, colon, value = line.partition(":")
            if colon:
                found[name] = value.strip()
    return found


def header_mark(name: str) -> bytes:
    """What Message.header looks for."""
    return f"\r\n{name}:".encode()


def status(raw: bytes | None) -> tuple[int, str]:
    """Code and text of a control message; (0, "") for an ordinary one."""
    if not raw or not raw.startswith(_HEADER_LINE + b" "):
        return 0, ""
    code, _, text = raw[len(_HEADER_LINE) + 1 : raw.find(b"\r\n")].partition(b" ")
    return (int(code), text.decode("utf-8", "replace")) if code.isdigit() else (0, "")


def format_headers(headers: dict[str, str]) -> str:
    """Lines of a header block; BusError for what would be read as something else."""
    if not _good_keys.issuperset(headers):
        for name in headers:
            if not _KEY.fullmatch(name):
                raise BusError(f"not a header name: {name!r} (must be a token of ASCII letters)")
        if len(_good_keys) < 1000:
            _good_keys.update(headers)
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        for name, value in headers.items():
            if "\n" in value or "\r" in value:
                raise BusError(f"header {name} holds a line break: {value!r}")
    return lines


def check_subject(subject: str) -> None:
    if not _SUBJECT.fullmatch(subject):
        raise BusError(
            f"not a subject to publish to: {subject!r} "
            "(must be tokens without space, '*' or '>', separated by single dots)"
        )


def time_ns(text: str) -> int:
    """`2026-11-30T16:47:00.123456789Z` in nanoseconds since 1970."""
    whole, _, fraction = text.rstrip("Z").partition(".")
    seconds = int(datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp())
    return seconds * 1_000_000_000 + int(fraction.ljust(9, "0")[:9] or 0)
