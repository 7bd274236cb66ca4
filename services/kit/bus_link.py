"""A connection that is always being had: opened, watched, replaced, and waited for.

One task opens a connection and, when it ends for whatever reason, opens the next, for ever, with
a jittered wait between tries. Subscriptions are registered here and made anew on each connection;
what was sent and not answered is not: its owner (a publish, a pull, a request) learns of the loss
and decides. Nothing is buffered while there is no connection.
"""

import asyncio
import secrets
from collections.abc import Callable
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import structlog

from services.kit.bus_types import BusError, Unavailable, status
from services.kit.bus_wire import Credentials, Listener, Ready, Wire, address, addresses
from services.kit.retry import Backoff

_DEFAULT_MAX_PAYLOAD: Final = 1024 * 1024
_log = structlog.get_logger()


class NoResponders(Unavailable):
    """Nobody serves that subject: no such stream, or JetStream is not up (yet)."""


class Reply(NamedTuple):
    headers: bytes | None
    data: bytes


class Link:
    def __init__(
        self,
        url: str,
        name: str,
        credentials: Credentials,
        on_state: Callable[[bool], None] | None = None,
    ) -> None:
        self._servers = addresses(url)
        self.address = address(url)
        self.name = name
        self._credentials = credentials
        self._on_state = on_state
        self._wire: Wire | None = None
        self._up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._numbers = iter(range(1, 1 << 62))
        self._listeners: dict[int, tuple[str, Listener]] = {}
        self._sids: dict[int, int] = {}
        self._watchers: dict[int, Callable[[bool], None]] = {}
        self.connections = 0
        self._requests: dict[str, asyncio.Future[Reply]] = {}
        self._prefix = f"_INBOX.{secrets.token_hex(8)}."
        self.max_payload = _DEFAULT_MAX_PAYLOAD
        self.listen(f"{self._prefix}r.*", self._on_reply)

    async def start(self) -> None:
        """Returns with the first connection; cancelling gives up."""
        self._task = asyncio.create_task(self._keep(), name=f"bus.link.{self.name}")
        try:
            await self._up.wait()
        except asyncio.CancelledError:
            await self.close()
            raise

    async def close(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    @property
    def connected(self) -> bool:
        return self._wire is not None and self._wire.is_connected

    async def wait_connected(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._up.wait()
        except TimeoutError:
            raise Unavailable(f"no NATS server at {self.address} for {timeout:g} s") from None

    def inbox(self) -> str:
        """A new subject that answers to us can be sent to."""
        return f"{self._prefix}{next(self._numbers)}"

    def listen(self, subject: str, listener: Listener) -> int:
        """Subscribe on this connection and all later ones. The listener must not block."""
        number = next(self._numbers)
        self._listeners[number] = (subject, listener)
        if self.connected and self._wire is not None:
            self._sids[number] = self._wire.listen(subject, listener)
        return number

    def unlisten(self, number: int) -> None:
        self._listeners.pop(number, None)
        sid = self._sids.pop(number, None)
        if sid is not None and self._wire is not None:
            self._wire.unlisten(sid)

    def watch(self, watcher: Callable[[bool], None]) -> int:
        """Be told of each beginning (True) and end (False) of a connection."""
        number = next(self._numbers)
        self._watchers[number] = watcher
        return number

    def unwatch(self, number: int) -> None:
        self._watchers.pop(number, None)

    def send(self, subject: str, reply: str, headers: bytes, data: bytes) -> None:
        if self._wire is None:
            raise Unavailable(f"not connected to {self.address}")
        self._wire.send(subject, reply, headers, data)

    def send_all(self, messages: list[Ready]) -> None:
        if self._wire is None:
            raise Unavailable(f"not connected to {self.address}")
        self._wire.send_all(messages)

    async def request(self, subject: str, data: bytes = b"", timeout: float = 5.0) -> Reply:
        token = str(next(self._numbers))
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._requests[token] = future
        try:
            async with asyncio.timeout(timeout):
                self.send(subject, f"{self._prefix}r.{token}", b"", data)
                reply = await future
        except TimeoutError:
            raise Unavailable(f"no answer on {subject} within {timeout:g} s") from None
        finally:
            self._requests.pop(token, None)
        if status(reply.headers)[0] == 503:
            raise NoResponders(f"nobody answers on {subject}")
        return reply

    def _on_reply(self, subject: bytes, _: bytes, headers: bytes | None, data: bytes) -> None:
        future = self._requests.get(subject.rpartition(b".")[2].decode())
        if future is not None and not future.done():
            future.set_result(Reply(headers, data))

    async def _keep(self) -> None:
        backoff, number = Backoff(0.05, 5.0), 0
        try:
            # The library may swallow a cancellation while it connects: look at the mark as well.
            while not self._closed:
                wire = Wire()
                server = self._servers[number % len(self._servers)]
                number += 1
                try:
                    await wire.open(server, self.name, self._credentials)
                    backoff.reset()
                    if self._closed:
                        await wire.shut()
                        return
                    await self._serve(wire)
                except (BusError, OSError) as error:
                    self._say_waiting(backoff, str(error))
                except Exception as error:  # noqa: BLE001  # must outlive a defect of the library
                    self._say_waiting(backoff, type(error).__name__)
                if not self._closed:
                    await backoff.wait()
        finally:
            self._down()

    async def _serve(self, wire: Wire) -> None:
        """From a fresh connection to its end."""
        self._wire = wire
        self.connections += 1
        self.max_payload = wire.max_payload
        known = set(map(address, self._servers))
        who, at, _ = urlsplit(self._servers[0]).netloc.rpartition("@")
        for found in wire.discovered_servers:  # other members of the cluster
            if f"{found.scheme}://{found.netloc}" not in known:
                self._servers.append(f"{found.scheme}://{who}{at}{found.netloc}")
        self._sids = {
            number: wire.listen(subject, listener)
            for number, (subject, listener) in self._listeners.items()
        }
        _log.info("bus.connected", address=self.address, name=self.name)
        try:
            self._up.set()
            self._tell(True)
            await wire.ended.wait()
            _log.warning("bus.disconnected", address=self.address, name=self.name)
        finally:
            self._down()
            await wire.shut()

    def _down(self) -> None:
        if self._wire is None:
            return
        self._wire, self._sids = None, {}
        self._up.clear()
        for future in self._requests.values():
            if not future.done():
                future.set_exception(Unavailable(f"connection to {self.address} lost"))
        self._tell(False)

    def _tell(self, up: bool) -> None:
        for watcher in [*self._watchers.values(), *filter(None, [self._on_state])]:
            try:
                watcher(up)
            except Exception:  # noqa: BLE001  # one that fails must not keep the others from it
                _log.exception("bus.state_callback.failed", connected=up)

    def _say_waiting(self, backoff: Backoff, reason: str) -> None:
        # The first failures and then every tenth: minutes of outage are not hundreds of lines.
        if backoff.attempts < 3 or backoff.attempts % 10 == 0:
            _log.warning(
                "bus.waiting", address=self.address, reason=reason, attempts=backoff.attempts + 1
            )
