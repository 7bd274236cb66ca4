"""One consumer on the server and the pulls that feed from it, for as long as nothing goes wrong.

The consumer is ephemeral, in memory and without acknowledgements: the server only remembers how
far it has sent, and forgets the consumer when nobody has asked for a while. Two overlapping pulls
keep messages coming; they are asked for only as room is made, so what waits here is bounded by
count and by bytes. Whatever looks wrong (a status we did not expect, silence where a heartbeat was
due, a message the server says it sent and we never got) marks it broken; its owner makes another.
"""

import asyncio
import re
import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import structlog

from services.kit import bus_streams
from services.kit.bus_link import Link
from services.kit.bus_types import BusError, Message, Unavailable, parse_headers, status

_NS: Final = 1_000_000_000
INACTIVE_NS: Final = 30 * _NS
EXPIRES_NS: Final = 20 * _NS
HEARTBEAT_NS: Final = 2 * _NS
# Two heartbeats missed, and a little for a busy event loop.
SILENCE_S: Final = 5.0
_MIN_BYTES: Final = 8 << 20
_END_OF_PULL: Final = ("Message Size Exceeds MaxBytes", "Batch Completed")
_log = structlog.get_logger()

Raw = tuple[bytes, bytes, bytes | None, bytes]


class Consumer:
    """Made by `create`. `lag`: messages that the server had left at the last one taken."""

    def __init__(self, link: Link, stream: str, name: str, batch: int) -> None:
        self._link, self._stream, self.name, self._batch = link, stream, name, batch
        self._loop = asyncio.get_running_loop()
        self._buffer: deque[Raw] = deque()
        self._received = self._taken = self._outstanding = 0
        self._heard_at = self._loop.time()
        self._news = asyncio.Event()
        self._inbox = link.inbox()
        self._listener = link.listen(self._inbox, self._on_message)
        # The server keeps no such consumer over a restart, and another server has none.
        self._watcher = link.watch(lambda up: self.breaks("reconnected" if up else "disconnected"))
        self._request = b""
        self.broken: str | None = None
        self.lag = 0

    @classmethod
    async def create(
        cls,
        link: Link,
        stream: str,
        prefix: str,
        config: dict[str, Any],
        *,
        filters: Sequence[str] = (),
        batch: int = 500,
    ) -> "Consumer":
        """Raises StreamMissing, Unavailable, JetStreamError."""
        name = f"{re.sub(r'[^A-Za-z0-9_-]', '_', prefix)[:40]}-{secrets.token_hex(6)}"
        consumer = cls(link, stream, name, batch)
        try:
            consumer.lag = await consumer._make(config, filters)
            consumer._ask()
        except BaseException:
            await consumer.close()
            raise
        return consumer

    async def wait(self, timeout: float) -> None:
        """Until a message is there, it is broken, or the time is over."""
        silent_in = self._heard_at + SILENCE_S - self._loop.time()
        if self._outstanding and silent_in <= 0:
            self.breaks(f"nothing heard for {SILENCE_S:g} s")
        if self._buffer or self.broken:
            # The socket is read between turns of the loop: a caller that always finds messages
            # must give it one.
            await asyncio.sleep(0)
            return
        self._news.clear()
        try:
            async with asyncio.timeout(min(timeout, silent_in) if self._outstanding else timeout):
                await self._news.wait()
        except TimeoutError:
            return

    def take(self, limit: int) -> list[Message]:
        """What is there, in order. Stops, and breaks, at a hole."""
        found: list[Message] = []
        buffer, stream, expected = self._buffer, self._stream, self._taken
        pending: bytes | int = self.lag
        for _ in range(min(limit, len(buffer))):
            subject, reply, headers, data = buffer.popleft()
            # $JS.ACK.<stream>.<consumer>.<delivered>.<seq>.<consumer seq>.<time>.<pending>, or the
            # same with two tokens of a domain after ACK and more at the end.
            parts = reply.split(b".")
            at = 5 if len(parts) == 9 else 7
            expected += 1
            if int(parts[at + 1]) != expected:
                self.breaks(f"message {int(parts[at + 1])} came where {expected} was due")
                break
            found.append(
                Message(stream, subject.decode(), data, headers, int(parts[at]), int(parts[at + 2]))
            )
            pending = parts[at + 3]
        self._taken = expected
        self.lag = int(pending)
        if not self.broken:
            self._ask()
        return found

    def breaks(self, reason: str) -> None:
        self.broken = self.broken or reason
        self._news.set()

    async def close(self) -> None:
        """Delete it, as far as that is possible; else the server will, after its threshold."""
        self.breaks("closed")
        self._link.unlisten(self._listener)
        self._link.unwatch(self._watcher)
        if self._link.connected:
            call = f"CONSUMER.DELETE.{self._stream}.{self.name}"
            try:
                await bus_streams.api(self._link, call, timeout=1.0)
            except BusError as error:
                _log.debug("bus.consumer.not_deleted", consumer=self.name, error=str(error))

    async def _make(self, config: dict[str, Any], filters: Sequence[str]) -> int:
        full = {
            "name": self.name,
            "ack_policy": "none",
            "replay_policy": "instant",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": INACTIVE_NS,
            **({"filter_subject": filters[0]} if len(filters) == 1 else {}),
            **({"filter_subjects": list(filters)} if len(filters) > 1 else {}),
            **config,
        }
        body = {"stream_name": self._stream, "config": full, "action": "create"}
        call = f"CONSUMER.CREATE.{self._stream}.{self.name}"
        info = msgspec.json.decode(await bus_streams.api(self._link, call, body))
        return int(info["num_pending"])

    def _ask(self) -> None:
        """Keep two pulls open as long as there is room for what they bring."""
        while self._outstanding <= self._batch and len(self._buffer) <= 2 * self._batch:
            if not self._request:
                self._request = msgspec.json.encode(
                    {
                        "batch": self._batch,
                        "max_bytes": max(_MIN_BYTES, 2 * self._link.max_payload),
                        "expires": EXPIRES_NS,
                        "idle_heartbeat": HEARTBEAT_NS,
                    }
                )
            if not self._outstanding:
                self._heard_at = self._loop.time()
            call = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self.name}"
            try:
                self._link.send(call, self._inbox, b"", self._request)
            except Unavailable as error:
                self.breaks(str(error))
                return
            self._outstanding += self._batch

    def _on_message(self, subject: bytes, reply: bytes, headers: bytes | None, data: bytes) -> None:
        self._heard_at = self._loop.time()
        if not reply:
            self._on_status(headers)
            return
        self._buffer.append((subject, reply, headers, data))
        self._received += 1
        self._outstanding -= 1
        if self._outstanding == self._batch and not self.broken:
            self._ask()
        self._news.set()

    def _on_status(self, headers: bytes | None) -> None:
        code, text = status(headers)
        if code == 100:
            sent = parse_headers(headers).get("Nats-Last-Consumer")
            if sent is not None and int(sent) != self._received:
                self.breaks(f"{self._received} messages came of {sent} that were sent")
        elif code in (404, 408) or (code == 409 and text.startswith(_END_OF_PULL)):
            left = parse_headers(headers).get("Nats-Pending-Messages", str(self._batch))
            self._outstanding = max(self._outstanding - int(left), 0)
            if not self.broken:
                self._ask()
        else:
            self.breaks(f"{code} {text}".strip())
