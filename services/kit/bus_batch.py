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
from services.kit.bus_types import BusError, Outgoing, Published, Unavailable, status

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
        items = [self._publisher.prepare(message) for message in messages]
        if len(items) < 2 or self._loop.time() < self._paused_until:
            self._publisher.enqueue(items)
        else:
            await self._together(items)
        try:
            outcomes = await asyncio.gather(*(i.future for i in items), return_exceptions=True)
        except asyncio.CancelledError:
            self._publisher.give_up(items)
            raise
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes  # type: ignore[return-value]  # no exception is left among them

    def on_ack(self, token: bytes, headers: bytes | None, data: bytes) -> None:
        future = self._commits.get(token)
        if future is not None and not future.done():
            future.set_result(None if status(headers)[0] else decode_ack(data))

    def on_disconnect(self) -> None:
        for future in self._commits.values():
            if not future.done():
                future.set_result(None)

    async def _together(self, items: list[Item]) -> None:
        """Settle the items, or hand them on to be sent one by one."""
        by_subject: dict[str, list[Item]] = {}
        for item in items:
            by_subject.setdefault(item.subject, []).append(item)
        left = False
        self._publisher.begin(items)
        # All at once, so that two batches never wait for each other, and in the order of the calls.
        turns = {subject: self._publisher.claim(subject) for subject in by_subject}
        try:
            for turn in turns.values():
                if turn is not None:
                    await turn
            async with self._slots:
                ack = await self._commit(items)
            left = ack is None
            if ack is not None:
                self._settle(items, ack.seq - len(items) + 1)
        except asyncio.CancelledError:
            self._publisher.give_up(items)
            raise
        except Unavailable:
            return  # closed while it waited: the items say so
        finally:
            for subject, turn in turns.items():
                if turn is None or (turn.done() and not turn.cancelled() and not turn.exception()):
                    self._publisher.release(subject, by_subject[subject] if left else ())
                else:
                    turn.cancel()

    async def _commit(self, items: list[Item]) -> Ack | None:
        """The acknowledgement of the whole; None when they must go one by one."""
        token = self._publisher.token()
        future: asyncio.Future[Ack | None] = self._loop.create_future()
        self._commits[token] = future
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                self._send(items, token)
                ack = await future
        except (Unavailable, TimeoutError):
            return None
        finally:
            del self._commits[token]
        if ack is not None and ack.error is None and ack.count == len(items):
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

    def _send(self, items: list[Item], token: bytes) -> None:
        name, seen = secrets.token_hex(8), set[str]()
        for number, item in enumerate(items, 1):
            reply, extra = "", f"Nats-Batch-Id: {name}\r\nNats-Batch-Sequence: {number}\r\n"
            if number == len(items):
                reply = self._publisher.reply_to(token)
                extra += "Nats-Batch-Commit: 1\r\n"
            # The server knows no sequences inside a batch: only a subject's first member expects.
            head = self._publisher.head(item, extra, expects=item.subject not in seen)
            seen.add(item.subject)
            self._link.send(item.subject, reply, head, item.data)

    def _settle(self, items: list[Item], first_seq: int) -> None:
        for seq, item in enumerate(items, first_seq):
            self._publisher.stored(item, seq)
