"""The bus: bytes with headers on ordered subjects, kept in streams, over NATS JetStream.

This is transport only: it knows no event. A publish is stored exactly once or says why not; a
reader gets every message after its position in order, or is told that the stream no longer
continues there. Outages are waited out; only what a caller must decide is raised. The position of
a reader is its own to keep: nothing is acknowledged to the server.

`tell` and `listen` are for words between replicas that nobody needs tomorrow: no stream keeps them,
and each may be lost.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Self
from weakref import WeakSet

from schema.subjects import StreamSpec
from services.kit import bus_streams
from services.kit.bus_link import Link
from services.kit.bus_publish import Publisher
from services.kit.bus_pull import Puller
from services.kit.bus_snapshot import last_per_subject
from services.kit.bus_types import (
    BusError,
    Gap,
    GapKind,
    Message,
    Outgoing,
    Published,
    StreamMissing,
    StreamState,
    TooLarge,
    Unavailable,
    WrongLast,
    check_subject,
    format_headers,
    header_mark,
)
from services.kit.bus_wire import Credentials

__all__ = [
    "Bus",
    "BusError",
    "Gap",
    "GapKind",
    "Message",
    "Outgoing",
    "Published",
    "Publisher",
    "Puller",
    "StreamMissing",
    "StreamState",
    "TooLarge",
    "Unavailable",
    "WrongLast",
    "format_headers",
    "header_mark",
]


class Bus:
    """One connection for as many publishers and pullers as needed."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._users: WeakSet[Publisher | Puller] = WeakSet()

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        user: str | None = None,
        password: str | None = None,
        token: str | None = None,
        creds: Path | None = None,
        on_state: Callable[[bool], None] | None = None,
    ) -> Self:
        """Wait for the server for as long as it takes; cancel to give up.

        `on_state` is called, and must not block, when a connection begins (True) and ends (False).
        A server may come back with an empty store: ensure the streams again when it does.
        """
        credentials = Credentials(user=user, password=password, token=token, creds=creds)
        link = Link(url, name, credentials, on_state)
        await link.start()
        return cls(link)

    async def close(self) -> None:
        """Close what was made here too: nobody is left waiting for a connection."""
        await asyncio.gather(*(user.close() for user in list(self._users)))
        await self._link.close()

    @property
    def connected(self) -> bool:
        return self._link.connected

    @property
    def connections(self) -> int:
        """How many there were: another number is another connection, perhaps another server."""
        return self._link.connections

    @property
    def address(self) -> str:
        """Of the server, fit to be shown."""
        return self._link.address

    async def wait_connected(self, timeout: float) -> None:
        await self._link.wait_connected(timeout)

    async def ensure_stream(self, spec: StreamSpec) -> StreamState:
        """Create the stream, or bring it to what the specification says."""
        return await bus_streams.ensure_stream(self._link, spec)

    async def stream_state(self, stream: str) -> StreamState:
        return await bus_streams.stream_state(self._link, stream)

    async def last(self, stream: str, subject: str) -> Message | None:
        """The newest message of one subject."""
        check_subject(subject)
        return await bus_streams.last(self._link, stream, subject)

    async def get(self, stream: str, seq: int) -> Message | None:
        return await bus_streams.get(self._link, stream, seq)

    @property
    def max_payload(self) -> int:
        """Bytes of one message, as the server has it."""
        return self._link.max_payload

    def tell(self, subject: str, data: bytes) -> bool:
        """Send to whoever listens now, for as long as there is a connection; never blocks."""
        if not self._link.connected:
            return False
        self._link.send(subject, "", b"", data)
        return True

    def listen(self, subject: str, listener: Callable[[bytes], None]) -> None:
        """Hear what is told on a subject, for as long as the bus is open. Must not block."""
        self._link.listen(subject, lambda _subject, _reply, _headers, data: listener(data))

    def last_per_subject(
        self, stream: str, filter_subject: str, *, headers_only: bool = False
    ) -> AsyncIterator[Message]:
        """The newest message of each subject as of now, in order of sequence; ends by itself.

        An interruption raises Unavailable: begin again.
        """
        return last_per_subject(self._link, stream, filter_subject, headers_only=headers_only)

    def publisher(
        self,
        stream: str,
        *,
        window: int = 512,
        ack_timeout: float = 2.0,
        deadline: float | None = None,
    ) -> Publisher:
        publisher = Publisher(
            self._link, stream, window=window, ack_timeout=ack_timeout, deadline=deadline
        )
        self._users.add(publisher)
        return publisher

    def puller(
        self,
        stream: str,
        *,
        start_seq: int,
        filters: Sequence[str] = (),
        name: str | None = None,
        created: str | None = None,
    ) -> Puller:
        """Read from `start_seq` on. `created`: of the stream that this position belongs to."""
        puller = Puller(
            self._link,
            stream,
            start_seq=start_seq,
            filters=filters,
            name=name or self._link.name,
            created=created,
        )
        self._users.add(puller)
        return puller
