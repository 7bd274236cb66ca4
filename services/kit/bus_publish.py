"""The safe publisher: every message once, in order per subject, however the connection fares.

Each message carries an id and the sequence that must be the last of its subject, so a repetition
cannot be stored twice and a second writer is found out. One message per subject is under way;
different subjects are pipelined. An acknowledgement that does not come (lost connection, restarted
server, new leader, stream not there yet) means sending the same again until it does.

The server checks the sequence before it looks for a repeated id. So a refusal for a wrong sequence
may be about our own message, stored by an earlier try: the refusal is settled by reading what is
there. Only a message that is not ours is a conflict.
"""

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec
import structlog

from services.kit import bus_streams
from services.kit.bus_batch import Batches
from services.kit.bus_item import Item, decode_ack, size_of
from services.kit.bus_lanes import Lanes
from services.kit.bus_link import Link
from services.kit.bus_resolve import look
from services.kit.bus_streams import ApiError, JetStreamError
from services.kit.bus_types import (
    EXPECTED_LAST,
    EXPECTED_STREAM,
    MSG_ID,
    BusError,
    Outgoing,
    Published,
    StreamMissing,
    TooLarge,
    Unavailable,
    WrongLast,
    check_subject,
    format_headers,
    status,
)
from services.kit.bus_window import Window
from services.kit.retry import Backoff

WRONG_LAST: Final = (10071, 10164)
_SAY_EVERY_S: Final = 10.0
_log = structlog.get_logger()


class Publisher:
    """One stream's writer. `window` and `window_bytes` bound what is under way at once.

    `deadline`: seconds after which a publish fails with Unavailable, its outcome unknown; without
    one it is tried until it is cancelled.
    """

    def __init__(
        self,
        link: Link,
        stream: str,
        *,
        window: int = 512,
        window_bytes: int = 8 << 20,
        ack_timeout: float = 2.0,
        deadline: float | None = None,
    ) -> None:
        self._link, self._stream = link, stream
        self._ack_timeout = ack_timeout
        self.deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._known: dict[str, int] = {}
        self._lanes = Lanes()
        self._window = Window(window, window_bytes, deadline)
        self._inflight: dict[bytes, Item] = {}
        self._parked: list[Item] = []
        self._resolving: set[asyncio.Task[None]] = set()
        self._tokens = 0
        self._sweeping: asyncio.TimerHandle | None = None
        self._said_at = 0.0
        self._closed = False
        self._inbox = link.inbox() + "."
        self._tail = f"{EXPECTED_STREAM}: {stream}\r\n"
        # To what a caller gives: version, sequence (20 digits at most), batch, stream.
        self._added = 182 + len(self._tail)
        self._listener = link.listen(self._inbox + "*", self._on_ack)
        self._watcher = link.watch(self._on_state)
        self.batches = Batches(self, link, stream)

    # What callers use.

    async def publish(
        self,
        subject: str,
        data: bytes,
        headers: dict[str, str],
        *,
        msg_id: str,
        expected: int | None = None,
    ) -> Published:
        """Returns when it is stored, and is stored once.

        With `expected`, a message of somebody else above that sequence raises WrongLast. Without,
        the last sequence known here is used, and a newer one is adopted. Cancelling gives up
        waiting; the message may still be stored.
        """
        return await self.submit(subject, data, headers, msg_id=msg_id, expected=expected)

    def submit(
        self,
        subject: str,
        data: bytes,
        headers: dict[str, str],
        *,
        msg_id: str,
        expected: int | None = None,
    ) -> asyncio.Future[Published]:
        """As publish, without waiting. Bounds nothing: call `room` before, or hold a window."""
        return self.give(Outgoing(subject, data, headers, msg_id, expected))

    def give(self, message: Outgoing) -> asyncio.Future[Published]:
        """As submit; `lines` included."""
        item = self.item(message, self.lines(message))
        self.enqueue((item,))
        return item.future

    async def room(self) -> None:
        """Wait until less than a window is under way or waiting."""
        await self._window.room()

    async def publish_batch(self, messages: Sequence[Outgoing]) -> list[Published]:
        """Store up to 1,000 messages all at once; one by one, in order, where that is refused.

        A refusal of single messages is raised when all others are settled; repeating the call is
        safe.
        """
        return await self.batches.publish(messages)

    async def drain(self, timeout: float) -> None:
        """Wait until nothing is under way."""
        try:
            async with asyncio.timeout(timeout):
                await self._window.empty()
        except TimeoutError:
            raise Unavailable(
                f"{self.pending} messages for {self._stream} not acknowledged in {timeout:g} s"
            ) from None

    async def close(self) -> None:
        """Whatever is under way fails with Unavailable; its outcome is unknown."""
        self._closed = True
        self._link.unlisten(self._listener)
        self._link.unwatch(self._watcher)
        if self._sweeping is not None:
            self._sweeping.cancel()
        for task in self._resolving:
            task.cancel()
        await asyncio.gather(*self._resolving, return_exceptions=True)
        reason = f"the publisher of {self._stream} was closed; outcome unknown"
        self._window.close(reason)
        for turn in self._lanes.turns():
            if not turn.done():
                turn.set_exception(Unavailable(reason))
        self.batches.on_disconnect()

    @property
    def pending(self) -> int:
        """Messages under way or waiting for their turn."""
        return len(self._window)

    @property
    def oldest_age(self) -> float:
        """Seconds since the oldest message on the wire was sent."""
        for item in self._inflight.values():
            return self._loop.time() - item.sent_at
        return 0.0

    # From here on: the life of an item.

    def lines(self, message: Outgoing) -> str:
        """The headers as they are sent, once everything about the message is known to be good."""
        if self._closed:
            raise Unavailable(f"the publisher of {self._stream} is closed")
        check_subject(message.subject)
        headers = {MSG_ID: message.msg_id}
        if message.headers:
            headers |= message.headers
        lines = format_headers(headers) + message.lines
        size = size_of(lines, message.data) + self._added
        if size > self._link.max_payload:
            raise TooLarge(message.subject, size, self._link.max_payload)
        return lines

    def item(self, message: Outgoing, lines: str) -> Item:
        if self._closed:
            raise Unavailable(f"the publisher of {self._stream} is closed")
        return Item(message, lines, self._loop.create_future())

    def head(self, lines: str, extra: str = "", *, first: bool = True) -> str:
        """Of a message. The first of a batch names the stream; the server refuses all or none."""
        return f"NATS/1.0\r\n{lines}{extra}{self._tail if first else ''}\r\n"

    def enqueue(self, items: Iterable[Item]) -> None:
        window = self._window
        for item in items:
            window.begin(item)
            if window.backlog or window.full:
                window.backlog.append(item)
                if len(window.backlog) % 1000 == 0:
                    self._tidy()
            else:
                self._admit(item)

    def token(self) -> bytes:
        self._tokens += 1
        return b"%d" % self._tokens

    def reply_to(self, token: bytes) -> str:
        return self._inbox + token.decode()

    def _admit(self, item: Item) -> None:
        self._window.enter(item)
        if self._lanes.hold(item.subject):
            self._try(item)
        else:
            self._lanes.queue(item.subject, item)

    def _try(self, item: Item) -> None:
        if item.future.done():  # cancelled, past its deadline, or closed
            self._finish(item)
            return
        if (size := item.size + self._added) > (limit := self._link.max_payload):
            # It has changed since. Not at once: there may be a whole lane of such.
            self._loop.call_soon(self._finish, item, TooLarge(item.subject, size, limit))
            return
        item.tried += 1
        item.used = self._known.get(item.subject, 0) if item.expected is None else item.expected
        head = self.head(item.lines, f"{EXPECTED_LAST}: {item.used}\r\n")
        token = self.token()
        try:
            self._link.send(item.subject, self.reply_to(token), head.encode(), item.data)
        except Unavailable:
            self._parked.append(item)
            return
        item.sent_at = self._loop.time()
        self._inflight[token] = item
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(self._ack_timeout / 4, self._sweep)

    def _on_ack(self, subject: bytes, _: bytes, headers: bytes | None, data: bytes) -> None:
        token = subject[len(self._inbox) :]
        item = self._inflight.pop(token, None)
        if item is None:
            self.batches.on_ack(token, headers, data)
            return
        if headers is not None and status(headers)[0]:
            self._retry(item, f"no stream takes {item.subject}")
            return
        try:
            ack = decode_ack(data)
        except msgspec.DecodeError:
            self._retry(item, "unreadable acknowledgement")
            return
        if ack.error is not None:
            self._refused(item, ack.error)
            return
        if not ack.duplicate:
            self._known[item.subject] = ack.seq
        self._finish(item, Published(ack.seq, ack.duplicate))

    def _refused(self, item: Item, error: ApiError) -> None:
        if error.err_code in WRONG_LAST:
            task = self._loop.create_task(self._resolve(item))
            self._resolving.add(task)
            task.add_done_callback(self._resolving.discard)
        elif error.code in bus_streams.RETRIABLE_CODES:
            self._retry(item, str(error))
        else:
            self._finish(item, JetStreamError(f"publish to {item.subject}", error))

    async def _resolve(self, item: Item) -> None:
        """Settle a refusal for a wrong last sequence."""
        backoff = Backoff(0.05, 2.0)
        while not item.future.done():
            try:
                ours, newest = await look(self._link, self._stream, item)
            except (Unavailable, StreamMissing) as error:
                self._say(str(error))
                await backoff.wait()
                continue
            except BusError as error:
                self._finish(item, error)
                return
            self._known[item.subject] = newest
            if ours is not None:
                self._finish(item, Published(ours.seq, True))
            elif newest == item.used:  # a batch of somebody's is under way there
                self._retry(item, f"{item.subject} is being written")
            elif item.expected is not None:
                self._finish(item, WrongLast(item.subject, item.expected, newest))
            elif item.tried < 3:
                self._try(item)
            else:  # another writer is as busy as we are
                self._retry(item, f"another writer on {item.subject}")
            return
        self._finish(item)

    def _retry(self, item: Item, reason: str) -> None:
        if item.future.done():
            self._finish(item)
            return
        self._say(reason)
        item.backoff = item.backoff or Backoff(0.05, 2.0)
        self._loop.call_later(item.backoff.delay(), self._try, item)

    def _finish(self, item: Item, outcome: Published | BusError | None = None) -> None:
        """The end of an item on the wire; the next of its subject and of the backlog go on."""
        window = self._window
        window.leave(item, outcome)
        self._advance(item.subject)
        while window.backlog and not window.full:
            waiting = window.backlog.popleft()
            if waiting.future.done():
                window.settle(waiting)
            else:
                self._admit(waiting)

    # Lanes: one message, or one batch, per subject.

    def claim(self, subjects: Collection[str]) -> dict[str, asyncio.Future[None]]:
        """Take subjects for a batch; returns what to wait for where one is not free."""
        if self._lanes.hold_all(subjects):
            return {}
        turns: dict[str, asyncio.Future[None]] = {}
        for subject in subjects:
            if not self._lanes.hold(subject):
                turns[subject] = self._loop.create_future()
                self._lanes.queue(subject, turns[subject])
        return turns

    def release(self, subjects: Iterable[str], items: Mapping[str, list[Item]]) -> None:
        """Give claimed subjects back; these items go before what came later."""
        for subject, first in items.items():
            for item in first:
                self._window.enter(item)
            self._lanes.put_first(subject, first)
        for subject in self._lanes.leave_free(subjects):
            self._advance(subject)

    def _advance(self, subject: str) -> None:
        entry = self._lanes.leave(subject, self._window.leave)
        if isinstance(entry, Item):
            self._try(entry)
        elif entry is not None:
            entry.set_result(None)

    # The members of a batch: counted like others, but stored together.

    def known(self, subject: str) -> int | None:
        """The last sequence of a subject, as far as we wrote it."""
        return self._known.get(subject)

    def count(self, messages: int) -> None:
        """So many more (less) are under way."""
        self._window.count(messages)

    def begin(self, items: Iterable[Item]) -> None:
        for item in items:
            self._window.begin(item)

    def give_up(self, items: Iterable[Item]) -> None:
        for item in items:
            self._window.settle(item)

    def stored(self, messages: Iterable[Outgoing], first_seq: int) -> None:
        self._known.update({m.subject: seq for seq, m in enumerate(messages, first_seq)})

    # Time and connection.

    def _sweep(self) -> None:
        """Acknowledgements that did not come. The dictionary is in the order of sending."""
        self._sweeping = None
        oldest = self._loop.time() - self._ack_timeout
        late = []
        for token, item in self._inflight.items():
            if item.sent_at > oldest:
                break
            late.append(token)
        for token in late:
            self._retry(self._inflight.pop(token), "no acknowledgement in time")
        if self._inflight and not self._closed:
            self._sweeping = self._loop.call_later(self._ack_timeout / 4, self._sweep)

    def _on_state(self, up: bool) -> None:
        if up:
            items, self._parked = self._parked, []
            for item in items:
                self._try(item)
        else:
            self._parked.extend(self._inflight.values())
            self._inflight.clear()
            self.batches.on_disconnect()

    def _tidy(self) -> None:
        """During an outage callers give up and come again; what they gave up must not pile up."""
        given_up = [item for item in self._parked if item.future.done()]
        self._parked = [item for item in self._parked if not item.future.done()]
        self._window.drop_given_up()
        for item in given_up:
            self._finish(item)

    def _say(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._said_at > _SAY_EVERY_S:
            self._said_at = now
            _log.warning(
                "bus.publish.retrying", stream=self._stream, reason=reason, pending=self.pending
            )
