"""What goes on beside lists and watches: is the stream still ours, and is nothing too old in it?

`check` looks at the stream now and then, and as soon as the connection returns: a stream that is
missing, created anew or shorter than what was acknowledged ends the term; messages of another
watcher are taken over. `republish` says every unchanged object, the epoch and the marks once more
in each period, so that retention never takes the last fact of a living object. It reads the fact
from the stream and repeats it as it is: consumers see a duplicate.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Final

import structlog
from prometheus_client import Counter

from schema import events, subjects
from services.kit.bus import Bus, BusError, StreamMissing, StreamState
from services.watcher import core
from services.watcher.foreign import STREAM
from services.watcher.listing import Follower
from services.watcher.publishing import Publishing

FOREIGN_READ: Final = 2000  # more messages of others than this are read as one snapshot
POLL_S: Final = 0.25  # how soon a returned connection is noticed
RATE: Final = 500.0  # repetitions per second at most
TICK_S: Final = 5.0

log = structlog.get_logger()
_repeated = Counter("lbledger_watcher_repeated_total", "Facts said again, unchanged")
_adopted = Counter("lbledger_watcher_adopted_total", "Messages of other watchers taken over")


async def check(
    bus: Bus,
    publishing: Publishing,
    memory: core.Memory,
    every_s: float,
    lost: Callable[[str], None],
) -> None:
    """Until cancelled."""
    checked = memory.top
    loop = asyncio.get_running_loop()
    due = loop.time() + every_s
    was_connected = True
    while True:
        await asyncio.sleep(min(POLL_S, every_s))
        connected = bus.connected
        returned, was_connected = connected and not was_connected, connected
        if not connected or (loop.time() < due and not returned):
            continue
        due = loop.time() + every_s
        try:
            checked = await _look(bus, publishing, memory, checked, lost)
        except StreamMissing:
            lost("the stream is missing")
        except BusError as error:
            log.warning("watcher.check.failed", why=str(error))


async def _look(
    bus: Bus,
    publishing: Publishing,
    memory: core.Memory,
    checked: int,
    lost: Callable[[str], None],
) -> int:
    """One look; returns the sequence up to which every message is known."""
    memory.top = publishing.top  # before the stream is asked: it may only be ahead of us
    state = await bus.stream_state(STREAM)
    why = core.loss(memory, core.Stream(state.created, state.last_seq))
    if why:
        lost(why)
        return checked
    epoch = await bus.last(STREAM, subjects.EPOCH_SUBJECT)
    if epoch is not None and epoch.headers.get(subjects.HEADER_EPOCH) != publishing.epoch:
        lost("another watcher began an epoch")
        return checked
    own, publishing.own = publishing.own, {s for s in publishing.own if s > state.last_seq}
    foreign = [s for s in range(max(checked, state.first_seq - 1) + 1, state.last_seq + 1)
               if s not in own]  # fmt: skip
    if foreign:
        await _adopt(bus, publishing, foreign)
    return state.last_seq


async def _adopt(bus: Bus, publishing: Publishing, foreign: list[int]) -> None:
    _adopted.inc(len(foreign))
    if len(foreign) > FOREIGN_READ:
        async for message in bus.last_per_subject(STREAM, "kube.>", headers_only=True):
            publishing.adopt(message)
        return
    for seq in foreign:
        found = await bus.get(STREAM, seq)
        if found is not None:
            publishing.adopt(found)


class Republisher:
    """Says everything once more in each period, spread evenly, at a bounded rate.

    The oldest fact goes first, so a watcher that is restarted more often than the period starves
    none.
    """

    def __init__(
        self, bus: Bus, publishing: Publishing, followers: list[Follower], period_s: float
    ) -> None:
        self._bus = bus
        self._publishing = publishing
        self._followers = followers
        self._period = period_s
        self._tick = min(TICK_S, period_s / 20)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._round()
            except BusError as error:
                log.warning("watcher.republish.failed", why=str(error))
                await asyncio.sleep(self._tick)

    async def _round(self) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        state = await self._bus.stream_state(STREAM)
        aging = self._oldest_first()
        for done, subject in enumerate(aging):
            while done >= int(
                min(len(aging) * (clock() - began) / self._period, RATE * (clock() - began))
            ):
                await asyncio.sleep(self._tick)
            await self._repeat(subject, state)
        await asyncio.sleep(max(self._tick, began + self._period - clock()))
        await self._repeat_marks()

    def _oldest_first(self) -> list[str]:
        found = [
            (known.seq, subject)
            for follower in self._followers
            for subject, known in self._publishing.known(follower.plural).items()
        ]
        found.sort()
        return [subject for _, subject in found]

    async def _repeat(self, subject: str, before: StreamState) -> None:
        """Repeat one fact, unless it is from after the round began."""
        ref = subjects.subject_ref(subject)
        assert ref is not None  # marks are not among what is known
        plural = ref.plural
        known = self._publishing.known(plural).get(subject)
        if known is None or known.seq > before.last_seq:
            return
        if known.gone:
            if known.seq < before.first_seq:  # nobody can read the tombstone any more
                self._publishing.forget(plural, subject)
            return
        if not known.uid or not known.digest:  # no fact of ours, or one that is to come anew
            return
        await self._publishing.room()
        seq = known.seq
        message = await self._bus.get(STREAM, seq) if seq >= before.first_seq else None
        if message is not None:
            self._publishing.repeat(plural, subject, message)
            _repeated.inc()
        elif known.seq == seq:  # retention was quicker: the list brings the fact back
            log.warning("watcher.republish.pruned", subject=subject, seq=seq)
            known.digest = b""
            self._publishing.diverged(plural)

    async def _repeat_marks(self) -> None:
        """A consumer that is born later has to learn the epoch and which kinds are complete."""
        message = await self._bus.last(STREAM, subjects.EPOCH_SUBJECT)
        if message is None or message.headers.get(subjects.HEADER_EPOCH) != self._publishing.epoch:
            return  # the check ends the term
        await self._publishing.mark(
            events.decode(message.data), f"epoch:{self._publishing.epoch}:again:{message.seq}"
        )
        for follower in self._followers:
            if follower.finished is not None:
                await self._publishing.mark(
                    follower.finished, f"{follower.plural}:{secrets.token_hex(6)}:again"
                )
