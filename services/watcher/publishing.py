"""From observations to acknowledged facts: one lane per subject, many subjects at once.

What is known of a subject is what was acknowledged, never what is on its way. An observation of a
subject whose lane is busy waits in the lane and is decided on when its turn comes, so each decision
rests on the truth of the stream. When somebody else wrote to the subject (a second watcher), their
message is read, taken over, and the observation is decided on again, with a growing jittered wait.

Nothing is given up: while the bus is away facts wait in their lanes, and what waits is bounded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from random import getrandbits
from typing import NamedTuple

import msgspec
import structlog
from prometheus_client import Counter

from schema import events, subjects
from services.kit.bus import (
    Bus,
    BusError,
    Message,
    Published,
    TooLarge,
    Unavailable,
    WrongLast,
)
from services.kit.bus import Outgoing as Envelope
from services.kit.retry import Backoff
from services.watcher import core, reading
from services.watcher.deadletters import DeadLetters
from services.watcher.foreign import STREAM, Foreign
from services.watcher.sending import Sender
from services.watcher.unsettled import Unsettled

log = structlog.get_logger()
_facts = Counter("lbledger_watcher_facts_total", "Facts acknowledged", ["plural", "type"])
_quiet = Counter("lbledger_watcher_quiet_total", "Changes that were no facts", ["plural"])
_conflicts = Counter("lbledger_watcher_conflicts_total", "Facts that another watcher forestalled")


class Outgoing(NamedTuple):
    """One message of a lane; `after` is what is known when it is stored."""

    type: str
    data: bytes
    headers: dict[str, str]
    msg_id: str
    after: core.Known
    unfit: core.Sight | None = None  # with it a dead letter is due


class Lane:
    """What is to be said on one subject."""

    __slots__ = ("backoff", "conflicts", "messages", "plural", "queue", "seen", "subject")

    def __init__(self, subject: str, plural: str) -> None:
        self.subject = subject
        self.plural = plural
        self.seen: core.Observation | None = None  # None: a repetition of the last fact
        self.messages: deque[Outgoing] = deque()
        self.queue: deque[core.Observation] = deque()
        self.backoff: Backoff | None = None
        self.conflicts = 0


class Publishing:
    """The facts of one term, from the moment its epoch stands until it ends.

    `lost` is called with the reason when the stream can't be the one that the term began on;
    `diverged` with a plural when somebody else's last fact is older than the truth; `defect` with
    an error that nothing here expects, after which no lane is to be trusted.
    """

    def __init__(
        self,
        bus: Bus,
        epoch: str,
        known: dict[str, dict[str, core.Known]],
        *,
        base: int,
        lost: Callable[[str], None],
        diverged: Callable[[str], None],
        defect: Callable[[BaseException], None],
    ) -> None:
        self.epoch = epoch
        self._known = known
        self._on_lost = lost
        self.diverged = diverged
        self._base = base  # sequences of this term are above it
        self.top = base
        self.own: set[int] = set()  # sequences of ours since the last look for foreign ones
        self._sender = Sender(bus, STREAM, defect)
        self._dead = DeadLetters(bus, epoch)
        self._foreign = Foreign(bus, epoch, self._lost)
        self._lanes: dict[str, Lane] = {}
        self._unsettled = Unsettled()
        self._counters: dict[tuple[str, str], Counter] = {}
        self._quiet_counters: dict[str, Counter] = {}
        self._ended = False

    # --- taking observations ---

    def observe(self, seen: core.Observation) -> None:
        """Take one observation; bounds nothing, so wait for `room` now and then."""
        lane = self._lanes.get(seen.subject)
        if lane is not None:
            lane.queue.append(seen)
            self._unsettled.took(lane.plural)
            return
        plural = seen.ref.plural
        known = self._known[plural].get(seen.subject)
        facts = core.decide(known, seen)
        if not facts:
            self._note_quiet(plural, known, seen)
            return
        lane = self._lanes[seen.subject] = Lane(seen.subject, plural)
        self._unsettled.took(plural)
        self._begin(lane, seen, facts)

    def repeat(self, plural: str, subject: str, message: Message) -> None:
        """Publish the last fact of a subject once more, unless it is being changed anyway."""
        known = self._known[plural].get(subject)
        if known is None or subject in self._lanes or known.seq != message.seq:
            return
        kept = ("Lb-", subjects.HEADER_TRACE)
        headers = {k: v for k, v in message.headers.items() if k.startswith(kept)}
        msg_id = core.repeated_id(message.headers.get(subjects.HEADER_MSG_ID, ""), message.seq)
        after = msgspec.structs.replace(known)
        lane = self._lanes[subject] = Lane(subject, plural)
        self._unsettled.took(plural)
        tag = headers.get(subjects.HEADER_TYPE, "")
        lane.messages.append(Outgoing(tag, message.data, headers, msg_id, after))
        self._send(lane)

    async def room(self) -> None:
        """Wait while too many observations are unsettled."""
        await self._unsettled.room()

    async def settled(self, plural: str) -> None:
        """Wait until everything that was taken of a kind is acknowledged, or was no fact."""
        await self._unsettled.none_of(plural)

    async def drained(self, timeout: float) -> bool:
        """Wait until everything is settled, dead letters included; False when time is up."""
        try:
            async with asyncio.timeout(timeout):
                await self._unsettled.none()
                await self._dead.drain(timeout)
        except (TimeoutError, Unavailable):
            return False
        return True

    async def close(self) -> None:
        """Stop at once. What is under way may be stored; the next term reads what was."""
        self._ended = True
        await self._sender.close()
        await self._dead.close()

    # --- asking ---

    @property
    def pending(self) -> int:
        return self._unsettled.total

    def known(self, plural: str) -> dict[str, core.Known]:
        return self._known[plural]

    def forget(self, plural: str, subject: str) -> None:
        """Drop what is known of a subject that the stream holds nothing of."""
        if subject not in self._lanes:
            self._known[plural].pop(subject, None)

    def subjects(self, plural: str) -> Iterator[str]:
        """Every subject of a kind that holds, or is about to hold, something."""
        known = self._known[plural]
        yield from list(known)
        yield from [
            s for s, lane in self._lanes.items() if lane.plural == plural and s not in known
        ]

    def adopt(self, message: Message) -> None:
        """Take over what somebody else published last on a subject."""
        ref = subjects.subject_ref(message.subject)
        if ref is None or ref.plural not in self._known:
            return
        mine = self._known[ref.plural].get(message.subject)
        if message.subject in self._lanes or (mine is not None and mine.seq >= message.seq):
            return
        theirs = core.known_of(message.headers, message.seq, self.epoch)
        self._known[ref.plural][message.subject] = theirs
        if core.overtaken(mine, theirs):
            self.diverged(ref.plural)

    # --- marks ---

    async def mark(self, event: events.Event, msg_id: str) -> None:
        """Publish a mark on its own subject and wait for it."""
        headers = {
            subjects.HEADER_EPOCH: self.epoch,
            subjects.HEADER_TYPE: events.tag_of(event),
        }
        published = await self._sender.publisher.publish(
            events.subject_of(event), events.encode(event), headers, msg_id=msg_id
        )
        self._acknowledged(published)

    # --- a lane ---

    def _begin(self, lane: Lane, seen: core.Observation, facts: Iterable[core.Fact]) -> None:
        lane.seen = seen
        lane.messages.clear()
        unfit = seen if isinstance(seen, core.Sight) and seen.view is None else None
        for fact in facts:
            lane.messages.append(self._outgoing(fact, None if fact.after.gone else unfit))
        self._send(lane)

    def _outgoing(self, fact: core.Fact, unfit: core.Sight | None) -> Outgoing:
        headers = core.headers_of(fact, self.epoch)
        headers[subjects.HEADER_TRACE] = f"00-{getrandbits(128):032x}-{getrandbits(64):016x}-00"
        return Outgoing(
            events.tag_of(fact.event),
            events.encode(fact.event),
            headers,
            fact.msg_id,
            fact.after,
            unfit,
        )

    def _send(self, lane: Lane) -> None:
        if self._ended:
            return
        message = lane.messages[0]
        known = self._known[lane.plural].get(lane.subject)
        expected = 0 if known is None else known.seq
        self._sender.send(
            Envelope(lane.subject, message.data, message.headers, message.msg_id, expected),
            partial(self._answered, lane, message, expected),
        )

    def _answered(
        self, lane: Lane, message: Outgoing, expected: int, outcome: Published | BusError
    ) -> None:
        if self._ended:
            return
        match outcome:
            case Published():
                self._take(lane, message, expected, outcome)
            case WrongLast():
                self._sender.later(self._resolve(lane, outcome))
            case TooLarge():
                self._shrink(lane, message, outcome)
            case _ if type(outcome) is BusError:  # not a message that any bus takes
                self._give_up(lane, message, outcome)
            case _:
                self._sender.later(self._resend(lane, outcome))

    def _shrink(self, lane: Lane, message: Outgoing, error: TooLarge) -> None:
        """Put the largest form that fits in place of a message that does not."""
        if message.unfit is not None:  # what was said instead of an object; nothing is smaller
            self._give_up(lane, message, error)
            return
        seen, known = lane.seen, self._known[lane.plural].get(lane.subject)
        lane.messages.popleft()
        if isinstance(seen, core.Sight) and seen.view is not None and not message.after.gone:
            spare = error.limit - (error.size - len(message.data))
            form = reading.fitting(seen, spare)
            if form is not None:
                data, omitted = form
                log.info("watcher.fact.reduced", subject=lane.subject, omitted=omitted)
                lane.messages.appendleft(message._replace(data=data))
                self._send(lane)
                return
            excerpt = message.data[: reading.EXCERPT].decode("utf-8", "replace")
            unfit = core.too_large(seen, len(message.data), error.limit, excerpt)
            facts = core.decide_unfit(known, unfit)
            lane.messages.extend(self._outgoing(fact, unfit) for fact in facts)
        else:
            # A repetition, after max_payload was lowered: the list will find a form for it.
            log.warning("watcher.fact.too_large", subject=lane.subject, size=error.size)
            if known is not None:
                known.digest = b""
            self.diverged(lane.plural)
        if lane.messages:
            self._send(lane)
        else:
            self._next(lane)

    def _give_up(self, lane: Lane, message: Outgoing, error: BusError) -> None:
        """A message that no bus takes: its observation is dropped with a dead letter."""
        log.error("watcher.fact.impossible", subject=lane.subject, why=str(error))
        excerpt = message.data[: reading.EXCERPT].decode("utf-8", "replace")
        self._dead.send(str(error), lane.subject, excerpt, 0, message.msg_id)
        lane.messages.clear()
        self._next(lane)

    def _take(self, lane: Lane, message: Outgoing, expected: int, published: Published) -> None:
        if published.seq > expected:
            self._stored(lane, message, published)
        elif not published.duplicate:
            self._lost(f"{lane.subject}: stored at {published.seq}, the one before is {expected}")
        else:
            # The server remembers the id from an earlier message, and stored nothing.
            lane.messages[0] = message._replace(msg_id=f"{message.msg_id}:{expected}")
            self._send(lane)

    def _stored(self, lane: Lane, message: Outgoing, published: Published) -> None:
        self._acknowledged(published)
        after = message.after
        after.seq = published.seq
        self._known[lane.plural][lane.subject] = after
        self._count(lane.plural, message.type)
        if message.unfit is not None:
            seen = message.unfit
            log.warning("watcher.object.unfit", object=str(seen.ref), problem=seen.problem)
            self._dead.send(seen.problem, lane.subject, seen.excerpt, published.seq, message.msg_id)
        lane.messages.popleft()
        lane.backoff, lane.conflicts = None, 0
        if lane.messages:
            self._send(lane)
        else:
            self._next(lane)

    def _next(self, lane: Lane) -> None:
        """The observation is settled; go on with what waited behind it."""
        known = self._known[lane.plural]
        while True:
            self._unsettled.settled(lane.plural)
            if not lane.queue:
                del self._lanes[lane.subject]
                return
            seen = lane.queue.popleft()
            facts = core.decide(known.get(lane.subject), seen)
            if facts:
                self._begin(lane, seen, facts)
                return
            self._note_quiet(lane.plural, known.get(lane.subject), seen)

    async def _resolve(self, lane: Lane, error: WrongLast) -> None:
        """Somebody else wrote to the subject: take it over and decide again."""
        _conflicts.inc()
        lane.backoff = lane.backoff or Backoff(0.01, 5.0)
        if lane.conflicts:  # the first is resolved at once
            await lane.backoff.wait()
        lane.conflicts += 1
        mine = self._known[lane.plural].get(lane.subject)
        theirs = await self._foreign.read(error, self.top)
        if theirs is not None:
            self._known[lane.plural][lane.subject] = theirs
            if core.overtaken(mine, theirs):
                self.diverged(lane.plural)
        elif mine is not None:
            mine.seq = 0  # retention took it
        lane.messages.clear()
        known = self._known[lane.plural].get(lane.subject)
        facts = core.decide(known, lane.seen) if lane.seen is not None else ()
        if facts and lane.seen is not None:
            self._begin(lane, lane.seen, facts)
            return
        if lane.seen is not None:
            self._note_quiet(lane.plural, known, lane.seen)
        self._next(lane)

    def _lost(self, reason: str) -> None:
        """Nothing more is published in this term."""
        if not self._ended:
            self._ended = True
            self._on_lost(reason)

    async def _resend(self, lane: Lane, error: BaseException) -> None:
        """A refusal that says nothing about the fact: a full disk, a limit, a lost leader."""
        log.warning("watcher.fact.refused", subject=lane.subject, why=str(error))
        lane.backoff = lane.backoff or Backoff(0.2, 10.0)
        await lane.backoff.wait()
        self._send(lane)

    # --- bookkeeping ---

    def _acknowledged(self, published: Published) -> None:
        seq = published.seq
        if seq <= self._base and not published.duplicate:
            self._lost(f"stored at sequence {seq}, the stream had {self._base} already")
        self.own.add(seq)
        self.top = max(self.top, seq)

    def _note_quiet(self, plural: str, known: core.Known | None, seen: core.Observation) -> None:
        core.quiet(known, seen)
        counter = self._quiet_counters.get(plural)
        if counter is None:
            counter = self._quiet_counters[plural] = _quiet.labels(plural)
        counter.inc()

    def _count(self, plural: str, tag: str) -> None:
        counter = self._counters.get((plural, tag))
        if counter is None:
            counter = self._counters[plural, tag] = _facts.labels(plural, tag.partition(".")[0])
        counter.inc()
