"""From single results to verdicts: thresholds, several checks of one backend, a fault of our own.

Pure, times as inputs. A verdict changes only after a run of equal results as long as its threshold.
A backend with several checks is healthy when all are, unhealthy when one is, and until then
unknown. When nearly everything fails within one period, the fault is taken for our own network's:
nothing turns unhealthy on its account, and after it every run of failures starts anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from services.prober.plan import Check

UNKNOWN, HEALTHY, UNHEALTHY = "unknown", "healthy", "unhealthy"
OURS, THEIRS, WAIT = "ours", "theirs", "wait"


@dataclass(slots=True)
class Streak:
    """One check of one backend."""

    state: str = UNKNOWN
    ok: bool = False
    count: int = 0  # results in a row that were `ok`
    since: float = 0.0  # when the first of them was started
    reason: str = ""

    def feed(self, ok: bool, reason: str, started: float, check: Check) -> None:
        """Take one result."""
        if ok != self.ok or not self.count:
            self.ok, self.count, self.since = ok, 0, started
        self.count += 1
        self.reason = reason
        if self.count >= (check.success if ok else check.failure):
            self.state = HEALTHY if ok else UNHEALTHY

    def restart(self) -> None:
        """Forget a run of failures."""
        if not self.ok:
            self.count = 0

    def doubt(self, said: str, check: Check) -> None:
        """Take one failure less for given: the next one decides."""
        if self.state == UNHEALTHY != said:
            self.state = said
            self.count = min(self.count, check.failure - 1)


class Opinion:
    """What the checks of one backend come to; `streaks` are in the order of `checks`."""

    __slots__ = ("checks", "config", "said", "started", "streaks")

    def __init__(self) -> None:
        self.streaks: tuple[Streak, ...] = ()
        self.checks: tuple[Check, ...] = ()
        self.config = ""
        self.said = UNKNOWN  # the verdict that is on record
        self.started = 0.0  # of the last result

    def configure(self, checks: tuple[Check, ...], config: str, said: str) -> None:
        """Set what is asked, and what is on record.

        A check that asks the same keeps its run; a new one starts from the verdict on record, which
        therefore stands until the check has an opinion of its own.
        """
        self.said = said
        if config == self.config and self.streaks:
            return
        kept = {c.meaning: s for c, s in zip(self.checks, self.streaks, strict=False)}
        self.checks, self.config = checks, config
        self.streaks = tuple(kept.get(check.meaning) or Streak(state=said) for check in checks)

    @property
    def state(self) -> str:
        if len(self.streaks) == 1:
            return self.streaks[0].state
        states = {streak.state for streak in self.streaks}
        if UNHEALTHY in states:
            return UNHEALTHY
        return HEALTHY if states == {HEALTHY} else UNKNOWN

    @property
    def reason(self) -> str:
        """The error of a failing check; for a healthy backend its warning, if it has one."""
        bad = [s.reason for s in self.streaks if s.state == UNHEALTHY and s.reason]
        return (bad or [s.reason for s in self.streaks if s.reason] or [""])[0]

    @property
    def failing(self) -> tuple[float, float]:
        """When the oldest run of failures that made it unhealthy began, and by when every backend
        must have been checked once since."""
        bad = [
            (streak.since, streak.since + check.period + check.timeout)
            for streak, check in zip(self.streaks, self.checks, strict=True)
            if streak.state == UNHEALTHY
        ]
        return min(bad, default=(float("inf"), float("inf")))

    @property
    def passing(self) -> bool:
        """Whether the last result of each check is a good one."""
        return all(streak.ok for streak in self.streaks)

    def doubt(self) -> None:
        """The last failures need another witness."""
        for streak, check in zip(self.streaks, self.checks, strict=True):
            streak.doubt(self.said, check)

    @property
    def differs(self) -> bool:
        return self.state not in (UNKNOWN, self.said)

    def restart(self) -> None:
        """Our own fault is over: what it made unhealthy goes back to what is on record."""
        for streak in self.streaks:
            streak.restart()
            if streak.state == UNHEALTHY != self.said:
                streak.state = self.said


T = TypeVar("T", bound="Backend")


class Backend(Protocol):
    """What is sampled: a backend of one load balancer, and how its last check went."""

    owner: str
    address: str
    replica: str
    ok: bool
    at: float


@dataclass(slots=True)
class OwnFault(Generic[T]):
    """Whose fault it is when many checks fail at once.

    Looked at are backends that are on record as healthy (or live and unknown). One that turns
    unhealthy alone leaves that group, so a slow decline is never taken for a fault of our own: it
    takes `share` of the group failing since the moment that the run of failures in question began,
    among at least `targets` addresses of at least `owners` load balancers.
    """

    share: float = 0.9
    targets: int = 6
    owners: int = 3
    look: int = 2_000  # samples looked at, the newest first
    held: bool = False
    samples: dict[T, None] = field(default_factory=dict)  # in the order of their time

    def note(self, backend: T) -> None:
        """Its last result is the newest of all."""
        self.samples.pop(backend, None)
        self.samples[backend] = None

    def drop(self, backend: T) -> None:
        self.samples.pop(backend, None)

    def reset(self) -> None:
        self.samples.clear()
        self.held = False

    def blame(self, since: float, patience: float, now: float) -> str:
        """Whose fault a run of failures is that began at `since`.

        While there is no evidence yet, neither a success since then nor enough failures, the answer
        is to wait, up to the time `patience`.
        """
        failing, passing = self._since(since)
        if self._everything(failing, passing):
            return OURS
        if passing or now >= patience or len(self.samples) < self.targets:
            return THEIRS
        return WAIT if len(failing) < self.targets else THEIRS

    def over(self) -> bool:
        """Whether enough answer again, or too few are left to tell."""
        return not self._everything(*self._since(float("-inf")))

    def blind(self, replica: str, since: float) -> bool:
        """Whether (nearly) all failed that one replica has checked since then."""
        failing, passing = self._since(since, replica)
        return len(failing) >= self.share * (len(failing) + passing)

    def _everything(self, failing: list[T], passing: int) -> bool:
        return (
            len(failing) >= self.share * (len(failing) + passing)
            and len({s.address for s in failing}) >= self.targets
            and len({s.owner for s in failing}) >= self.owners
        )

    def _since(self, since: float, replica: str | None = None) -> tuple[list[T], int]:
        failing: list[T] = []
        passing = 0
        for looked, sample in enumerate(reversed(self.samples)):
            if sample.at < since or looked >= self.look:
                break
            if replica is not None and sample.replica != replica:
                continue
            if sample.ok:
                passing += 1
            else:
                failing.append(sample)
        return failing, passing
