"""The only module that knows the NATS client library: one connection, bytes in and out.

The library does TLS, authentication, keep-alive and the life of the socket. Parsing, dispatch and
sending are ours, because a message costs several times more with the library's (regular
expressions, eager header parsing, a queue and a task between). So is reconnecting: a connection
that ends is not repaired but replaced by a new object, so nothing half-sent can survive it, and
every way to end is handled alike.

For this it relies on these internals of nats-py 2.16: `_ps`, `_sid`, `_pending`,
`_pending_data_size`, `_flush_queue`, `_process_ping`, `_process_pong`, `_process_info`,
`_process_err`. tests/adapters/test_bus_link.py fails when they change.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import structlog
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import ProtocolError

from services.kit.bus_parse import Parser, ProtocolFault
from services.kit.bus_types import BusError, Unavailable

# subject, reply, headers, data: as they are on the wire.
Listener = Callable[[bytes, bytes, bytes | None, bytes], None]
# One to be sent: subject, reply, headers, data.
Ready = tuple[str, str, str, bytes]

_CONNECT_TIMEOUT_S: Final = 5
# A connection on which nothing comes back is given up after about three of these.
_PING_INTERVAL_S: Final = 5
_log = structlog.get_logger()


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """How to authenticate, when it is not in the address. `creds` is a file."""

    user: str | None = None
    password: str | None = None
    token: str | None = None
    creds: Path | None = None

    def redact(self, text: str, url: str) -> str:
        in_url = urlsplit(url)
        for secret in (self.password, self.token, in_url.password, in_url.username):
            if secret:
                text = text.replace(secret, "***")
        return text


class _Reader:
    """What the library calls its parser."""

    def __init__(self, wire: "Wire") -> None:
        self._wire = wire
        self.reset()

    def reset(self) -> None:
        self._parser = Parser(self._wire.deliver)

    async def parse(self, data: bytes) -> None:
        try:
            lines = self._parser.feed(data)
        except ProtocolFault as fault:
            raise ProtocolError(str(fault)) from fault
        for line in lines:
            if line == b"PING":
                await self._wire._process_ping()
            elif line == b"PONG":
                await self._wire._process_pong()
            elif line.startswith(b"INFO "):
                await self._wire._process_info(msgspec.json.decode(line[5:]))
            elif line.startswith(b"-ERR"):
                await self._wire._process_err(line[5:].decode(errors="replace").lower())
            elif line != b"+OK":
                raise ProtocolError(f"unknown line {line[:100]!r}")


class Wire(Client):
    """One connection, from its opening to its end."""

    def __init__(self) -> None:
        super().__init__()
        self._ps = _Reader(self)  # type: ignore[assignment]  # the library names its own class
        self._listeners: dict[int, Listener] = {}
        self.ended = asyncio.Event()

    async def open(self, url: str, name: str, credentials: Credentials) -> None:
        """Raises Unavailable with the reason, free of credentials."""
        reasons: list[BaseException] = []

        async def on_error(error: Exception) -> None:
            reasons.append(error)
            if self.is_connected:
                text = credentials.redact(str(error) or type(error).__name__, url)
                _log.warning("bus.connection.error", error=text)

        async def on_closed() -> None:
            self.ended.set()

        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self.connect(
                    url,
                    name=name,
                    error_cb=on_error,
                    closed_cb=on_closed,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=_CONNECT_TIMEOUT_S,
                    ping_interval=_PING_INTERVAL_S,
                    pending_size=0,
                    **_options(credentials),
                )
        except BaseException as error:
            await self.shut()
            if isinstance(error, OSError | TimeoutError | NatsError | ValueError):
                cause = reasons[-1] if reasons else error
                text = credentials.redact(str(cause) or type(cause).__name__, url)
                raise Unavailable(f"no NATS server at {address(url)}: {text}") from None
            raise

    async def shut(self) -> None:
        try:
            async with asyncio.timeout(2):
                await self.close()
        except (OSError, TimeoutError, NatsError) as error:
            _log.debug("bus.connection.close_failed", error=type(error).__name__)
        self.ended.set()

    def listen(self, subject: str, listener: Listener) -> int:
        self._sid += 1
        self._listeners[self._sid] = listener
        self._write(f"SUB {subject}  {self._sid}\r\n".encode())
        return self._sid

    def unlisten(self, sid: int) -> None:
        if self._listeners.pop(sid, None) is not None and self.is_connected:
            self._write(f"UNSUB {sid}\r\n".encode())

    def send(self, subject: str, reply: str, headers: bytes, data: bytes) -> None:
        """Queue a message for the socket. Nothing is kept for a later connection."""
        if not self.is_connected:
            raise Unavailable("not connected")
        if headers:
            size = len(headers)
            line = f"HPUB {subject} {reply} {size} {size + len(data)}\r\n"
            self._write(b"".join((line.encode(), headers, data, b"\r\n")))
        else:
            line = f"PUB {subject} {reply} {len(data)}\r\n"
            self._write(b"".join((line.encode(), data, b"\r\n")))

    def send_all(self, messages: list[Ready]) -> None:
        """The same for many, which all have headers, in one piece."""
        if not self.is_connected:
            raise Unavailable("not connected")
        parts: list[bytes] = []
        for subject, reply, headers, data in messages:
            size = len(headers) if headers.isascii() else len(headers.encode())
            line = f"HPUB {subject} {reply} {size} {size + len(data)}\r\n{headers}"
            parts += (line.encode(), data, b"\r\n")
        self._write(b"".join(parts))

    def _write(self, command: bytes) -> None:
        self._pending.append(command)
        self._pending_data_size += len(command)
        queue = self._flush_queue
        if queue is not None and queue.empty():
            queue.put_nowait(asyncio.get_running_loop().create_future())

    def deliver(
        self, sid: int, subject: bytes, reply: bytes, headers: bytes | None, data: bytes
    ) -> None:
        listener = self._listeners.get(sid)
        if listener is not None:
            try:
                listener(subject, reply, headers, data)
            except Exception:  # noqa: BLE001
                # It would end the library's read loop and leave the connection deaf.
                _log.exception("bus.listener.failed", subject=subject.decode(errors="replace"))


def address(url: str) -> str:
    """The part of the address that may be shown: without user, password or token."""
    return ",".join(_bare(part) for part in url.split(","))


def addresses(url: str) -> list[str]:
    """The servers of one setting; BusError names the part that is no address."""
    parts = [part.strip() for part in url.split(",") if part.strip()]
    for part in parts or [""]:
        try:
            split = urlsplit(part)
            good = split.scheme in ("nats", "tls") and split.hostname and split.port != 0
        except ValueError:
            good = False
        if not good:
            raise BusError(
                f"not a NATS address: {_bare(part)!r} (must be nats://host:port or tls://..., "
                "several separated by commas)"
            )
    return parts


def _bare(url: str) -> str:
    scheme, _, rest = url.strip().rpartition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if scheme else rest.rpartition("@")[2]


def _options(credentials: Credentials) -> dict[str, Any]:
    options: dict[str, Any] = {
        "user": credentials.user,
        "password": credentials.password,
        "token": credentials.token,
    }
    if credentials.creds is not None:
        options["user_credentials"] = str(credentials.creds)
    return options
