"""Where each backend is checked, and who is asked for a second opinion.

With several replicas a failure may be the fault of the one that found it. When all that a replica
sees has failed since a run of failures began, the backend is not taken down on its word: another
replica checks it at once, and one more failure there makes it unhealthy. If it passes there, the
first one is suspect: the others do its work, and it goes on checking a few backends that are known
to be well, until one of them answers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice
from typing import Final

from prometheus_client import Counter

from services.prober.leader import Leader
from services.prober.shares import ANYWHEN
from services.prober.targets import Target
from services.prober.verdicts import OwnFault
from services.prober.watched import NOBODY, Watched

_seconds = Counter("lbledger_prober_second_opinions_total", "Failures that another replica judges")

SHOW_S: Final = 10.0
SIGNS: Final = 8  # backends by which a suspect shows that it is well again


class Places:
    def __init__(self, leader: Leader, fault: OwnFault[Watched]) -> None:
        self._leader, self._fault = leader, fault
        self._passed: dict[str, float] = {}  # by replica: start of its last check that passed
        self._signs: dict[str, list[Target]] = {}  # by suspect
        self._blind: dict[tuple[str, float], bool] = {}  # of one judging
        self._shown = 0.0

    @property
    def shared(self) -> bool:
        return not self._leader.alone

    def reset(self) -> None:
        self._passed.clear()
        self._signs.clear()
        self._blind.clear()

    def of(self, address: str) -> str:
        return self._leader.place(address)

    # --- moving ---

    def settle(self, watched: Watched, now: float) -> None:
        """Have a backend checked where it belongs."""
        place = self._leader.place(watched.address, watched.asked)
        if place != watched.replica:
            self._move(watched, place, now, at_once=False)

    def _move(self, watched: Watched, place: str, now: float, *, at_once: bool) -> None:
        moved = []
        for target in watched.targets:
            wait = 0.0 if at_once else self._wait(watched, target, now)
            self._leader.take_back(watched.replica, target)
            moved.append(target.again())
            self._leader.give(place, moved[-1], wait)
        watched.targets, watched.replica = tuple(moved), place

    def _wait(self, watched: Watched, target: Target, now: float) -> float:
        """Until a moved target's next turn: its place in the period stays, a turn that was missed
        is made up for."""
        period = target.check.period
        if watched.replica == self._leader.own:
            return (target.due - now) % period
        if watched.opinion.started:
            return max(0.0, min(watched.opinion.started + period - now, period))
        return ANYWHEN

    # --- second opinions ---

    def passed(self, replica: str, started: float) -> None:
        self._passed[replica] = started

    def ask(self, watched: Watched, since: float, now: float) -> bool:
        """Have another replica check a failing backend, if all has failed that its own one has
        seen since then. False when there is no need to, or nobody left to ask."""
        return self.shared and self._doubtful(watched, since) and self.pass_on(watched, since, now)

    def _doubtful(self, watched: Watched, since: float) -> bool:
        key = (watched.replica, int(since * 100) / 100)
        if key not in self._blind:
            self._blind[key] = self._fault.blind(*key)
        return self._blind[key]

    def judged(self) -> None:
        """What was found out holds for one judging only."""
        self._blind.clear()

    def pass_on(self, watched: Watched, since: float, now: float) -> bool:
        """Have another replica check a backend; False when everybody able has."""
        asked = watched.asked | {watched.replica}
        place = self._leader.place(watched.address, asked)
        if place in asked:
            return False
        _seconds.inc()
        watched.doubted = min(watched.doubted, since) if watched.asked else since
        watched.asked = asked
        watched.opinion.doubt()
        self._move(watched, place, now, at_once=True)
        return True

    def answered(self, watched: Watched, now: float) -> None:
        """It passes elsewhere: who could not reach it, and nothing else since, is suspect."""
        wrong = [
            replica
            for replica in watched.asked - self._leader.replicas.suspects
            if self._passed.get(replica, float("-inf")) < watched.doubted
        ]
        watched.asked = NOBODY
        for replica in wrong:
            self._leader.suspect(replica)
        self.settle(watched, now)

    # --- suspects ---

    def tick(self, backends: Iterable[Watched], now: float) -> None:
        """Backends come and go: now and then suspects are shown others."""
        if self._leader.replicas.suspects and now - self._shown >= SHOW_S:
            self.show_signs(backends, now)

    def show_signs(self, backends: Iterable[Watched], now: float) -> None:
        """Let each suspect check some backends that are well, and nothing else."""
        suspects, self._shown = self._leader.replicas.suspects, now
        for replica in self._signs.keys() - suspects:
            self._withdraw(replica)
        if not suspects:
            return
        well = list(islice(_well(backends, suspects), SIGNS))
        for replica in suspects:
            self._withdraw(replica)
            self._signs[replica] = signs = []
            for watched in well:
                sign = watched.targets[0].again()
                sign.tag = (None, replica)
                self._leader.give(replica, sign, 0.0)
                signs.append(sign)
        self._leader.flush()

    def sign(self, replica: str) -> None:
        """A suspect reaches something again."""
        if replica in self._signs:
            self._withdraw(replica)
            self._leader.trust(replica)

    def _withdraw(self, replica: str) -> None:
        for sign in self._signs.pop(replica, ()):
            self._leader.take_back(replica, sign)


def _well(backends: Iterable[Watched], suspects: Collection[str]) -> Iterable[Watched]:
    return (w for w in backends if w.live and w.ok and w.targets and w.replica not in suspects)
