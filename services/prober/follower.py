"""A stand-by replica's side of shared checking: it checks its share and says what it finds.

It decides nothing and keeps nothing: while the active replica is silent for longer than the bound,
or no longer counts us in, nothing is checked. Results that can't be sent are dropped and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import structlog
from prometheus_client import Counter

from services.prober import shares
from services.prober.checks import Engine
from services.prober.plan import Check
from services.prober.shares import Call, Hello, Result, Seen, Share, What
from services.prober.targets import Outcome, Target

log = structlog.get_logger()
_unsent = Counter("lbledger_prober_results_unsent_total", "Results that could not be sent")

FLUSH_S: Final = 0.02
MAX_WAITING: Final = 20_000  # results not sent yet
BEATS: Final = 3


class Follower:
    """Not thread-safe. `send` says whether there was a connection to send on; `later` calls back
    after so many seconds."""

    def __init__(
        self,
        own: str,
        silence: float,
        engine: Engine,
        dial: Callable[[str], str],
        send: Callable[[str, bytes], bool],
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._own, self._silence = own, silence
        self._engine, self._dial, self._send, self._later = engine, dial, send, later
        self._waiting: deque[Outcome] = deque(maxlen=MAX_WAITING)
        self._planned = False  # a flush is
        self._left: set[str] = set()  # sessions that ended for us
        self._session, self._leader = "", ""
        self._heard = self._said = float("-inf")
        self._run = self._seq = 0
        self._targets: dict[int, Target] = {}
        self._before: dict[int, Target] = {}  # of the share that is being told anew
        self.running = False

    # --- life ---

    def start(self) -> None:
        self.running = True

    def stop(self) -> None:
        """Let go of everything, and say so."""
        if self.running:
            if self._session:
                self._greet(self._heard, leaving=True)
            self._forget()
            self._session = ""
            self.running = False

    def now(self) -> float:
        return self._engine.now()

    def tick(self, now: float) -> None:
        """To be called more often than once per beat."""
        if not self._session:
            return
        if now - self._heard > self._silence and now - self._said < self._silence:
            log.warning("prober.leader_silent", leader=self._leader)
            self._forget()
            self._session, self._left = "", set()
        elif now - self._said >= self._silence / BEATS:
            self._greet(now)

    def _greet(self, now: float, *, leaving: bool = False) -> None:
        self._said = now
        hello = Hello(
            session=self._session,
            replica=self._own,
            run=self._run,
            have=self._seq,
            leaving=leaving,
        )
        self._send(shares.HELLO, shares.encode(hello))

    def _forget(self) -> None:
        for target in (*self._targets.values(), *self._before.values()):
            self._engine.remove(target)
        self._targets, self._before = {}, {}
        self._run = self._seq = 0
        self._waiting.clear()

    # --- what to check ---

    def call(self, call: Call, now: float) -> None:
        """The active replica is there."""
        if not self.running or call.replica == self._own or call.session in self._left:
            return
        self._heard = now
        if call.session != self._session:
            self._forget()
            if self._session:
                self._left.add(self._session)
            self._session, self._leader = call.session, call.replica
            self._greet(now)
        elif self._run and self._own not in call.shares:
            self._forget()

    def share(self, share: Share, now: float) -> None:
        """A part of our share, or what changed; what does not follow the one before is not taken,
        and our next hello tells."""
        if not self.running or share.session != self._session:
            return
        if share.fresh and share.seq == 1 and share.run > self._run:
            self._before |= self._targets
            self._targets, self._run, self._seq = {}, share.run, 0
        if share.run != self._run or share.seq != self._seq + 1:
            if now - self._said >= self._silence / BEATS / 2:
                self._greet(now)
            return
        self._seq = share.seq
        for number in share.drop:
            self._remove(self._targets.pop(number, None))
        for number, index, address, port, wait in share.add:
            self._take(number, share.checks[index], address, port, wait)
        if share.fresh and share.last:
            for target in self._before.values():
                self._remove(target)
            self._before = {}

    def _take(self, number: int, check: Check, address: str, port: int, wait: float) -> None:
        known = self._targets.get(number) or self._before.pop(number, None)
        if known is not None:
            known.check = check
            self._targets[number] = known
            return
        target = Target(None, check, address, self._dial(address), port)
        target.number = number
        self._targets[number] = target
        self._engine.add(target, at_once=wait == 0, wait=wait if wait > 0 else None)

    def _remove(self, target: Target | None) -> None:
        if target is not None:
            self._engine.remove(target)

    # --- what came of it ---

    def take(self, outcomes: list[Outcome]) -> None:
        """The results of one step, to be sent with those of the next few milliseconds."""
        over = len(self._waiting) + len(outcomes) - MAX_WAITING
        if over > 0:
            _unsent.inc(over)
        self._waiting.extend(outcomes)
        if not self._planned:
            self._planned = True
            self._later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._planned = False
        now = self._engine.now()
        while self._waiting:
            what: dict[What, int] = {}
            results = []
            for _ in range(min(len(self._waiting), shares.SEEN_AT_ONCE)):
                target, ok, reason, started, local = self._waiting.popleft()
                said = What(ok, reason[: shares.MAX_REASON], local)
                index = what.setdefault(said, len(what))
                results.append(Result(target.number, round(now - started, 4), index))
            seen = Seen(session=self._session, replica=self._own, results=results, what=list(what))
            if not self._send(shares.SEEN + self._leader, shares.encode(seen)):
                _unsent.inc(len(results))
