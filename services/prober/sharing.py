"""Wiring of shared checking: words of other replicas to the leader's and the follower's side."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Final

import msgspec
import structlog
from prometheus_client import Counter, Gauge, Histogram

from services.kit.bus import Bus
from services.prober import shares
from services.prober.checks import Engine
from services.prober.follower import Follower
from services.prober.leader import Leader
from services.prober.shares import Call, Hello, Seen, Share
from services.prober.targets import Outcome

log = structlog.get_logger()
_unread = Counter(
    "lbledger_prober_words_unread_total", "Words of other replicas that make no sense"
)
_in_flight = Gauge("lbledger_prober_in_flight", "Checks under way")
_late = Histogram(
    "lbledger_prober_start_lag_seconds",
    "Latest start of a step after its due time",
    buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5),
)
HEADROOM: Final = 1024

Report = Callable[[list[Outcome]], None]


class Sharing:
    """Both sides of one replica; a setting of 0 seconds leaves the others out."""

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self._bus: Bus | None = None
        self._engine: Engine | None = None
        self.own = secrets.token_hex(8)
        self.leader = Leader(self.own, silence or 1.0, self._tell)
        self.follower: Follower | None = None

    def taking(self, take: Report) -> Report:
        """Where results of the engine go: to the monitor's `take`, or to who has asked us."""

        def taken(outcomes: list[Outcome]) -> None:
            if self._engine is not None:
                _in_flight.set(self._engine.in_flight)
                _late.observe(self._engine.late)
            follower = self.follower
            if follower is not None and follower.running:
                follower.take(outcomes)
            else:
                take(outcomes)

        return taken

    def follow(self, on: bool) -> None:
        """Work for the active replica, or no longer. To be called some times a second."""
        follower = self.follower
        if follower is None:
            return
        if not on:
            follower.stop()
            return
        follower.start()
        follower.tick(follower.now())

    def serve(
        self, bus: Bus, engine: Engine, dial: Callable[[str], str], nudge: Callable[[], None]
    ) -> None:
        """Begin to speak and to listen; the engine is nudged when it may have more to do."""
        self._engine = engine
        if not self._silence:
            return
        self._bus = bus
        self.leader.max_bytes = min(shares.MAX_BYTES, bus.max_payload - HEADROOM)
        loop = asyncio.get_running_loop()
        self.follower = follower = Follower(
            self.own, self._silence, engine, dial, self._tell, loop.call_later
        )

        def hear(
            subject: str, kind: type[shares.W], take: Callable[[shares.W, float], None]
        ) -> None:
            decoder = msgspec.json.Decoder(kind)

            def heard(data: bytes) -> None:
                try:
                    word = decoder.decode(data)
                except (msgspec.MsgspecError, UnicodeError) as error:
                    _unread.inc()
                    log.warning("prober.word_unread", subject=subject, why=str(error)[:200])
                    return
                take(word, engine.now())
                nudge()

            bus.listen(subject, heard)

        hear(shares.HELLO, Hello, self.leader.hello)
        hear(shares.SEEN + self.own, Seen, self.leader.seen)
        hear(shares.CALL, Call, follower.call)
        hear(shares.SHARE + self.own, Share, follower.share)

    def _tell(self, subject: str, data: bytes) -> bool:
        return self._bus is not None and self._bus.tell(subject, data)
