"""The active replica's side of shared checking: who is there, and what each of them has to check.

Decides nothing about backends. The monitor asks where a backend belongs and gives its targets
there; here they go to our own engine or, in numbered messages, to another replica, whose results
come back as outcomes of the very same targets. An assignment has a number of its own, never used
again: what is moved or removed is not heard of any more.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from itertools import count
from typing import Final

import msgspec
import structlog
from prometheus_client import Counter, Gauge

from services.prober import shares
from services.prober.checks import Engine
from services.prober.replicas import Replicas
from services.prober.shares import ANYWHEN, Call, Hello, Seen, Share, Task
from services.prober.targets import Outcome, Target

log = structlog.get_logger()
_replicas = Gauge("lbledger_prober_replicas", "Replicas that check (on the active one)")
_suspects = Gauge("lbledger_prober_suspects", "Replicas that reach nothing of what others reach")
_void = Counter("lbledger_prober_results_void_total", "Results of what was moved or removed")

DROPS_AT_ONCE: Final = 8_000
BEATS: Final = 3  # within the time of silence

Send = Callable[[str, bytes], object]


class _Share:
    """What another replica checks, and how much of it it was told."""

    __slots__ = ("add", "drop", "marked", "run", "seq", "targets")

    def __init__(self, run: int) -> None:
        self.run, self.seq = run, 0
        self.marked = (0, 0)  # what it should know by its next hello
        self.targets: dict[int, Target] = {}
        self.add: dict[int, Task] = {}  # not told yet
        self.drop: list[int] = []


class Leader:
    """Not thread-safe. `send` must not block and may lose what it is given."""

    def __init__(
        self,
        own: str = "",
        silence: float = 1.0,
        send: Send = lambda subject, data: False,
    ) -> None:
        self.own = own
        self.replicas = Replicas(own, silence)
        self._beat = silence / BEATS
        self._send = send
        self.max_bytes = shares.MAX_BYTES  # of one message
        self.session = ""
        self._shares: dict[str, _Share] = {}
        self._numbers = count(1)
        self._runs = count(1)
        self._called = float("-inf")
        self._engine: Engine
        self._report: Callable[[list[Outcome]], None]
        self._moved: Callable[[], None]

    def attach(
        self,
        engine: Engine,
        report: Callable[[list[Outcome]], None],
        moved: Callable[[], None],
    ) -> None:
        """`report` takes results of others, `moved` is told that places have changed."""
        self._engine, self._report, self._moved = engine, report, moved

    # --- who is there ---

    def start(self) -> None:
        if not self.session:
            self.session = secrets.token_hex(8)
            self._called = float("-inf")
            _replicas.set(1)

    def stop(self) -> None:
        """Let everybody go: nobody has a share any more."""
        if self.session:
            self._shares.clear()
            self._call()
            self.session = ""
            self.replicas.clear()
            _replicas.set(0)
            _suspects.set(0)

    @property
    def alone(self) -> bool:
        return not self._shares

    def tick(self, now: float) -> None:
        """To be called more often than once per beat."""
        if not self.session:
            return
        for replica in self.replicas.silent(now):
            self._lose(replica, "not heard any more")
        if now - self._called >= self._beat:
            self._called = now
            self._call()

    def _call(self) -> None:
        call = Call(session=self.session, replica=self.own, shares=sorted(self._shares))
        self._send(shares.CALL, shares.encode(call))

    def hello(self, hello: Hello, now: float) -> None:
        if not self.session or hello.session != self.session:
            return
        if hello.leaving:
            self._lose(hello.replica, "it has ended")
        elif self.replicas.hear(hello.replica, now):
            log.info("prober.replica_joined", replica=hello.replica)
            self._shares[hello.replica] = _Share(next(self._runs))
            self._resend(self._shares[hello.replica])
            self._change()
        elif (share := self._shares.get(hello.replica)) is not None:
            if (hello.run, hello.have) < share.marked:
                self._resend(share)
                self.flush()
                share.marked = (0, 0)  # its next hello may have been on the way already
            else:
                share.marked = (share.run, share.seq)

    def _resend(self, share: _Share) -> None:
        """Tell a share as a whole; what it checks already goes on as it is."""
        share.run, share.seq, share.drop = next(self._runs), 0, []
        share.add = {number: _task(target, ANYWHEN) for number, target in share.targets.items()}

    def _lose(self, replica: str, why: str) -> None:
        if self.replicas.leave(replica):
            log.warning("prober.replica_lost", replica=replica, why=why)
            self._shares.pop(replica, None)
            self._change()

    def suspect(self, replica: str) -> None:
        """It finds everything failing that others reach: others do its work."""
        log.warning("prober.replica_suspected", replica=replica)
        self.replicas.suspect(replica)
        self._change()

    def trust(self, replica: str) -> None:
        log.warning("prober.replica_trusted", replica=replica)
        self.replicas.trust(replica)
        self._change()

    def _change(self) -> None:
        _replicas.set(1 + len(self._shares))
        _suspects.set(len(self.replicas.suspects))
        self._moved()
        self.flush()

    # --- who checks what ---

    def place(self, address: str, without: Collection[str] = ()) -> str:
        return self.replicas.place(address, without)

    def give(self, replica: str, target: Target, wait: float) -> None:
        """Have a target checked, first after `wait` seconds (ANYWHEN: within its period)."""
        if replica == self.own:
            self._engine.add(target, at_once=wait == 0, wait=wait if wait > 0 else None)
            return
        share = self._shares.get(replica)
        if share is not None:
            target.alive, target.number = True, next(self._numbers)
            share.targets[target.number] = target
            share.add[target.number] = _task(target, wait)

    def share(self, replica: str) -> Mapping[int, Target]:
        """What another replica checks, by assignment."""
        return self._shares[replica].targets

    def renew(self, replica: str, target: Target) -> None:
        """Its check has another period, timeout or threshold."""
        share = self._shares.get(replica)
        if share is not None and target.number in share.targets:
            waiting = share.add.get(target.number)
            share.add[target.number] = _task(target, waiting.wait if waiting else ANYWHEN)

    def take_back(self, replica: str, target: Target) -> None:
        if replica == self.own:
            self._engine.remove(target)
            return
        target.alive = False
        share = self._shares.get(replica)
        if share is not None and share.targets.pop(target.number, None) is not None:
            share.add.pop(target.number, None)
            share.drop.append(target.number)

    def flush(self) -> None:
        """Tell everybody what has changed for them."""
        for replica, share in self._shares.items():
            if share.add or share.drop or not share.seq:
                self._tell(shares.SHARE + replica, share)

    def _tell(self, subject: str, share: _Share) -> None:
        fresh = not share.seq
        messages = [
            Share(
                session=self.session,
                run=share.run,
                seq=0,
                drop=share.drop[start : start + DROPS_AT_ONCE],
            )
            for start in range(0, len(share.drop), DROPS_AT_ONCE)
        ]
        messages += [
            Share(session=self.session, run=share.run, seq=0, checks=checks, add=add)
            for checks, add in shares.parts(share.add.values(), self.max_bytes)
        ]
        if not messages:
            messages = [Share(session=self.session, run=share.run, seq=0)]
        share.add, share.drop = {}, []
        for message in messages:
            share.seq += 1
            last = not fresh or message is messages[-1]
            numbered = msgspec.structs.replace(message, seq=share.seq, fresh=fresh, last=last)
            self._send(subject, shares.encode(numbered))

    # --- what they found ---

    def seen(self, seen: Seen, now: float) -> None:
        """Results of another replica, told in our own time."""
        share = self._shares.get(seen.replica)
        if not self.session or seen.session != self.session or share is None:
            return
        outcomes = []
        for number, age, index in seen.results:
            target = share.targets.get(number)
            if target is not None and 0 <= index < len(seen.what):
                ok, reason, local = seen.what[index]
                outcomes.append(Outcome(target, ok, reason, now - max(age, 0.0), local))
        if len(outcomes) < len(seen.results):
            _void.inc(len(seen.results) - len(outcomes))
        if outcomes:
            self._report(outcomes)


def _task(target: Target, wait: float) -> Task:
    return Task(target.number, target.check, target.address, target.dialled[1], round(wait, 3))
