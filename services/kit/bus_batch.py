"""Atomic batches: many messages stored together, or none.

One acknowledgement, and one fsync where the server syncs, for up to a thousand messages. A batch
is refused as a whole when one member repeats an id or expects a wrong sequence, and a server may
not know batches at all; then its messages go one by one, each in its place of its subject.
"""

import asyncio
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import structlog

from services.kit.bus_item import Ack, Item, decode_ack
from services.kit.bus_link import Link
from services.kit.bus_types import (
    EXPECTED_LAST,
    BusError,
    Outgoing,
    Published,
    Unavailable,
    status,
)
from services.kit.bus_wire import Ready

if TYPE_CHECKING:
    from services.kit.bus_publish import Publisher

MAX_BATCH: Final = 1000
_AT_ONCE: Final = 4
_TIMEOUT_S: Final = 10.0
_PAUSE_S: Final = 60.0
_DISABLED: Final = 10174
_log = structlog.get_logger()


class Batches:
    """The batches of one publisher."""

    def __init__(self, publisher: "Publisher", link: Link, stream: str) -> None:
        self._publisher, self._link, self._stream = publisher, link, stream
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._commits: dict[bytes, asyncio.Future[Ack | None]] = {}
        self._paused_until = 0.0
        self.refused = 0

    async def publish(self, messages: Sequence[Outgoing]) -> list[Published]:
        if len(messages) > MAX_BATCH:
            raise BusError(f"{len(messages)} messages in a batch (must be at most {MAX_BATCH})")
        lines = [self._publisher.lines(message) for message in messages]
        deadline = self._publisher.deadline
        try:
            async with asyncio.timeout(deadline):
                if len(messages) > 1 and self._loop.time() >= self._paused_until:
                    first = await self._together(messages, lines)
                    if isinstance(first, int):
                        return [Published(seq) for seq in range(first, first + len(messages))]
                    items = first
                else:
                    items = self._items(messages, lines)
                    self._publisher.enqueue(items)
                return await self._each(items)
        except TimeoutError:
            raise Unavailable(
                f"{len(messages)} messages for {self._stream}: not acknowledged in "
                f"{deadline:g} s, outcome unknown"
            ) from None

    def on_ack(self, token: bytes, headers: bytes | None, data: bytes) -> None:
        future = self._commits.get(token)
        if future is not None and not future.done():
            future.set_result(None if status(headers)[0] else decode_ack(data))

    def on_disconnect(self) -> None:
        for future in self._commits.values():
            if not future.done():
                future.set_result(None)

    def _items(self, messages: Sequence[Outgoing], lines: list[str]) -> list[Item]:
        item = self._publisher.item
        return [item(message, head) for message, head in zip(messages, lines, strict=True)]

    async def _each(self, items: list[Item]) -> list[Published]:
        try:
            outcomes = await asyncio.gather(*(i.future for i in items), return_exceptions=True)
        except asyncio.CancelledError:
            self._publisher.give_up(items)
            raise
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes  # type: ignore[return-value]  # no exception is left among them

    async def _together(self, messages: Sequence[Outgoing], lines: list[str]) -> int | list[Item]:
        """The first sequence of all; where that is refused, the items on their way one by one."""
        publisher, count = self._publisher, len(messages)
        subjects = dict.fromkeys([message.subject for message in messages])
        left: dict[str, list[Item]] = {}
        publisher.count(count)
        # All at once, so that two batches never wait for each other, and in the order of the calls.
        turns = publisher.claim(subjects)
        try:
            for turn in turns.values():
                await turn
            async with self._slots:
                ack = await self._commit(messages, lines)
            if ack is not None:
                first = ack.seq - count + 1
                publisher.stored(messages, first)
                return first
            items = self._items(messages, lines)
            publisher.begin(items)
            for item in items:
                left.setdefault(item.subject, []).append(item)
            return items
        finally:
            publisher.count(-count)
            for subject, turn in turns.items():
                if not turn.done() or turn.cancelled() or turn.exception():
                    turn.cancel()
                    del subjects[subject]  # it was never ours
            publisher.release(subjects, left)

    async def _commit(self, messages: Sequence[Outgoing], lines: list[str]) -> Ack | None:
        """The acknowledgement of the whole; None when they must go one by one."""
        token = self._publisher.token()
        future: asyncio.Future[Ack | None] = self._loop.create_future()
        self._commits[token] = future
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                self._send(messages, lines, token)
                ack = await future
        except (Unavailable, TimeoutError):
            return None
        finally:
            del self._commits[token]
        if ack is not None and ack.error is None and ack.count == len(messages):
            return ack
        self.refused += 1
        error = ack.error if ack is not None else None
        if ack is not None and (error is None or error.err_code == _DISABLED):
            # Switched off, or a server that took them for single messages and stored each.
            self._paused_until = self._loop.time() + _PAUSE_S
            _log.warning("bus.batch.not_supported", stream=self._stream, paused_s=_PAUSE_S)
        else:
            _log.debug("bus.batch.refused", stream=self._stream, error=str(error))
        return None

    def _send(self, messages: Sequence[Outgoing], lines: list[str], token: bytes) -> None:
        publisher, last = self._publisher, len(messages)
        head, known = publisher.head, publisher.known
        batch = f"Nats-Batch-Id: {secrets.token_hex(8)}\r\nNats-Batch-Sequence: "
        seen: set[str] = set()
        ready: list[Ready] = []
        for number, (message, line) in enumerate(zip(messages, lines, strict=True), 1):
            subject, reply, extra = message.subject, "", f"{batch}{number}\r\n"
            if number == last:
                reply = publisher.reply_to(token)
                extra += "Nats-Batch-Commit: 1\r\n"
            if subject not in seen:
                # The server knows no sequences inside a batch: only a subject's first member
                # expects, and only what is known. A wrong guess would cost the whole batch.
                seen.add(subject)
                expected = message.expected
                if expected is None:
                    expected = known(subject)
                if expected is not None:
                    extra += f"{EXPECTED_LAST}: {expected}\r\n"
            ready.append((subject, reply, head(line, extra, first=number == 1), message.data))
        self._link.send_all(ready)
