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
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import structlog

from services.kit import bus_streams
from services.kit.bus_batch import Batches
from services.kit.bus_item import Item, decode_ack
from services.kit.bus_link import Link
from services.kit.bus_streams import ApiError, JetStreamError
from services.kit.bus_types import (
    EXPECTED_LAST,
    EXPECTED_STREAM,
    MSG_ID,
    BusError,
    Message,
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
        self._window, self._window_bytes = window, window_bytes
        self._ack_timeout, self._deadline = ack_timeout, deadline
        self._loop = asyncio.get_running_loop()
        self._known: dict[str, int] = {}
        # A key per subject with a message under way; behind it what waits for that subject. A bare
        # future there is a batch that waits for its turn.
        self._lanes: dict[str, deque[Item | asyncio.Future[None]] | None] = {}
        self._backlog: deque[Item] = deque()
        self._items: set[Item] = set()
        self._inflight: dict[bytes, Item] = {}
        self._parked: list[Item] = []
        self._resolving: set[asyncio.Task[None]] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._open = self._open_bytes = self._tokens = 0
        self._sweeping: asyncio.TimerHandle | None = None
        self._said_at = 0.0
        self._closed = False
        self._inbox = link.inbox() + "."
        self._tail = f"{EXPECTED_STREAM}: {stream}\r\n\r\n"
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
        item = self.prepare(Outgoing(subject, data, headers, msg_id, expected))
        self.enqueue((item,))
        return item.future

    async def room(self) -> None:
        """Wait until less than a window is under way or waiting."""
        while self.pending >= self._window or self._open_bytes >= self._window_bytes:
            await self._one_finished()

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
                while self.pending:
                    await self._one_finished()
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
        for item in list(self._items):
            self._settle(item, Unavailable(reason))
        turns = [turn for lane in self._lanes.values() for turn in lane or () if turn is not None]
        for turn in [*self._waiting, *(t for t in turns if isinstance(t, asyncio.Future))]:
            if not turn.done():
                turn.set_exception(Unavailable(reason))
        self.batches.on_disconnect()

    @property
    def pending(self) -> int:
        """Messages under way or waiting for their turn."""
        return len(self._items)

    @property
    def oldest_age(self) -> float:
        """Seconds since the oldest message on the wire was sent."""
        for item in self._inflight.values():
            return self._loop.time() - item.sent_at
        return 0.0

    # From here on: the life of an item.

    def prepare(self, message: Outgoing) -> Item:
        if self._closed:
            raise Unavailable(f"the publisher of {self._stream} is closed")
        subject = message.subject
        check_subject(subject)
        lines = format_headers({MSG_ID: message.msg_id, **message.headers})
        item = Item(message, lines, self._loop.create_future())
        # What is added when it is sent: version, sequence (20 digits at most), batch, stream.
        size = item.size + 180 + len(self._tail)
        if size > self._link.max_payload:
            raise TooLarge(subject, size, self._link.max_payload)
        return item

    def head(self, item: Item, extra: str = "", *, expects: bool = True) -> bytes:
        """The header block of the next try, which decides what it expects."""
        if not expects:
            return f"NATS/1.0\r\n{item.lines}{extra}{self._tail}".encode()
        if item.expected is None:
            item.used = self._known.get(item.subject, 0)
        else:
            item.used = item.expected
        expected = f"{EXPECTED_LAST}: {item.used}\r\n"
        return f"NATS/1.0\r\n{item.lines}{extra}{expected}{self._tail}".encode()

    def enqueue(self, items: Iterable[Item]) -> None:
        for item in items:
            self._begin(item)
            if self._backlog or self._full():
                self._backlog.append(item)
                if len(self._backlog) % 1000 == 0:
                    self._tidy()
            else:
                self._admit(item)

    def _begin(self, item: Item) -> None:
        self._items.add(item)
        if self._deadline is not None:
            item.timer = self._loop.call_later(self._deadline, self._expire, item)

    def token(self) -> bytes:
        self._tokens += 1
        return b"%d" % self._tokens

    def reply_to(self, token: bytes) -> str:
        return self._inbox + token.decode()

    async def _one_finished(self) -> None:
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _full(self) -> bool:
        return self._open >= self._window or self._open_bytes >= self._window_bytes

    def _admit(self, item: Item) -> None:
        self._open += 1
        self._open_bytes += item.size
        if item.subject in self._lanes:
            lane = self._lanes[item.subject]
            if lane is None:
                self._lanes[item.subject] = deque((item,))
            else:
                lane.append(item)
        else:
            self._lanes[item.subject] = None
            self._try(item)

    def _try(self, item: Item) -> None:
        if item.future.done():  # cancelled, past its deadline, or closed
            self._finish(item)
            return
        item.tried += 1
        token = self.token()
        try:
            self._link.send(item.subject, self.reply_to(token), self.head(item), item.data)
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
                ours, newest = await self._look(item)
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

    async def _look(self, item: Item) -> tuple[Message | None, int]:
        """The message with our id, if it is there, and the last sequence of the subject."""
        link, stream, subject = self._link, self._stream, item.subject
        newest = await bus_streams.last(link, stream, subject)
        if newest is None or newest.seq <= item.used:
            # A replica that is behind, or a stream that began anew: ask the one that decides.
            newest = await bus_streams.from_leader(link, stream, {"last_by_subj": subject})
        if newest is None:
            return None, 0
        if newest.headers.get(MSG_ID) == item.msg_id:
            return newest, newest.seq
        if newest.seq > item.used:
            # Ours could only have been stored right after what it expected.
            query = {"seq": item.used + 1, "next_by_subj": subject}
            first = await bus_streams.next_after(link, stream, subject, item.used)
            first = first or await bus_streams.from_leader(link, stream, query)
            if first is not None and first.headers.get(MSG_ID) == item.msg_id:
                return first, newest.seq
        return None, newest.seq

    def _retry(self, item: Item, reason: str) -> None:
        if item.future.done():
            self._finish(item)
            return
        self._say(reason)
        item.backoff = item.backoff or Backoff(0.05, 2.0)
        self._loop.call_later(item.backoff.delay(), self._try, item)

    def _finish(self, item: Item, outcome: Published | BusError | None = None) -> None:
        """The end of an item on the wire; the next of its subject and of the backlog go on."""
        self._settle(item, outcome)
        self._open -= 1
        self._open_bytes -= item.size
        self.advance(item.subject)
        while self._backlog and not self._full():
            waiting = self._backlog.popleft()
            if waiting.future.done():
                self._settle(waiting)
            else:
                self._admit(waiting)
        if self._waiting and (not self._items or self.pending <= self._window // 2):
            waiters, self._waiting = self._waiting, deque()
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _settle(self, item: Item, outcome: Published | BusError | None = None) -> None:
        self._items.discard(item)
        if item.timer is not None:
            item.timer.cancel()
        if not item.future.done():
            if isinstance(outcome, BusError):
                item.future.set_exception(outcome)
            elif outcome is not None:
                item.future.set_result(outcome)

    # Lanes: one message, or one batch, per subject.

    def claim(self, subject: str) -> asyncio.Future[None] | None:
        """Take a subject for a batch; a future to wait for when it is not free."""
        if subject not in self._lanes:
            self._lanes[subject] = None
            return None
        turn: asyncio.Future[None] = self._loop.create_future()
        lane = self._lanes[subject]
        if lane is None:
            self._lanes[subject] = deque((turn,))
        else:
            lane.append(turn)
        return turn

    def release(self, subject: str, items: Iterable[Item] = ()) -> None:
        """Give a claimed subject back; these items go before what came later."""
        first = list(items)
        for item in first:
            self._open += 1
            self._open_bytes += item.size
        if first:
            self._lanes[subject] = deque((*first, *(self._lanes[subject] or ())))
        self.advance(subject)

    def advance(self, subject: str) -> None:
        lane = self._lanes[subject]
        while lane:
            entry = lane.popleft()
            if entry.future.done() if isinstance(entry, Item) else entry.done():
                if isinstance(entry, Item):  # cancelled while it waited
                    self._settle(entry)
                    self._open -= 1
                    self._open_bytes -= entry.size
                continue
            if isinstance(entry, Item):
                self._try(entry)
            else:
                entry.set_result(None)
            return
        del self._lanes[subject]

    # The members of a batch: counted like others, but stored or given up together.

    def begin(self, items: Iterable[Item]) -> None:
        for item in items:
            self._begin(item)

    def give_up(self, items: Iterable[Item]) -> None:
        for item in items:
            item.future.cancel()
            self._settle(item)

    def stored(self, item: Item, seq: int) -> None:
        self._known[item.subject] = seq
        self._settle(item, Published(seq))

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
        for item in [item for item in self._backlog if item.future.done()]:
            self._settle(item)
        self._backlog = deque(item for item in self._backlog if not item.future.done())
        for item in given_up:
            self._finish(item)

    def _expire(self, item: Item) -> None:
        seconds = self._deadline or 0
        self._settle(
            item, Unavailable(f"{item.subject}: not acknowledged in {seconds:g} s, outcome unknown")
        )

    def _say(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._said_at > _SAY_EVERY_S:
            self._said_at = now
            _log.warning(
                "bus.publish.retrying", stream=self._stream, reason=reason, pending=self.pending
            )
