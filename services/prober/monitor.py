"""Keeps the engine's targets in step with the committed images, and turns results into verdicts.

The record (what is committed) leads: a verdict is submitted while the checks' opinion differs from
it, again with every further result until it is on record, so none is lost to a failed transaction
or a full queue. Probing goes on only while this replica may have effects; after a restart or a
take-over every backend starts from its verdict on record, and nothing flaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import structlog
from prometheus_client import Counter, Gauge, Histogram

from schema.events import Backend
from services.prober.checks import Engine, Outcome, Target
from services.prober.core import Balancer, Hold, State, Verdict
from services.prober.dialling import DialMap
from services.prober.plan import Check
from services.prober.projection import Judgement
from services.prober.verdicts import HEALTHY, UNHEALTHY, UNKNOWN, Opinion, OwnFault

log = structlog.get_logger()
_checks = Counter("lbledger_prober_checks_total", "Finished checks", ["result"])
_targets = Gauge("lbledger_prober_targets", "Checks that are repeated now")
_in_flight = Gauge("lbledger_prober_in_flight", "Checks under way")
_late = Histogram(
    "lbledger_prober_start_lag_seconds",
    "Latest start of a step after its due time",
    buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5),
)
_held_gauge = Gauge("lbledger_prober_held", "1 while failures are taken for a fault of our own")
_dropped = Counter("lbledger_prober_verdicts_postponed_total", "Verdicts that found no room")

EVERYTHING_FAILED: Final = (
    "nearly every check of every load balancer failed within one period: taken for a fault of the"
    " prober's own network, the last verdicts stand"
)

Key = tuple[str, str, str]  # owner, uid, address


@dataclass(slots=True)
class _Watched:
    owner: str
    uid: str
    address: str
    live: bool = False  # ready on record
    opinion: Opinion = field(default_factory=Opinion)
    targets: dict[tuple[Any, ...], Target] = field(default_factory=dict)
    unmade: int = 0  # checks in a row that could not be made, for a reason of ours
    unmade_why: str = ""


class Monitor:
    """Not thread-safe: everything happens on the event loop."""

    def __init__(
        self,
        state: Callable[[], State],
        submit: Callable[[Judgement], bool],
        make_engine: Callable[[Callable[[list[Outcome]], None]], Engine],
        dial: DialMap,
        fault: OwnFault[Key],
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._state = state
        self._submit = submit
        self._dial = dial
        self._fault = fault
        self._clock = clock
        self._watched: dict[Key, _Watched] = {}
        self._of_owner: dict[str, set[Key]] = {}
        self._suspects: set[str] = set()  # owners with failures that are held
        self._unmade: dict[str, dict[Key, str]] = {}  # owner -> what could not be checked, why
        self._held: set[str] = set()  # owners that are held on record
        self._total = 0
        self.engine = make_engine(self.take)
        self.running = False

    # --- what to check ---

    def start(self) -> None:
        """Begin to check everything, from the verdicts on record."""
        self.running = True
        for uid in [*self._state().balancers, *(self._of_owner.keys() - self._state().balancers)]:
            self._sync(uid, restored=True)
        _targets.set(self._total)

    def stop(self) -> None:
        """Let go of every target; what is under way is forgotten."""
        self.running = False
        for uid in list(self._of_owner):
            self._forget(uid)
        self._suspects.clear()
        self._unmade.clear()
        self._held.clear()
        self._fault.reset()
        _held_gauge.set(0)
        _targets.set(self._total)

    def update(self, owners: Iterable[str]) -> None:
        """These images were committed."""
        if not self.running:
            return
        for uid in owners:
            self._sync(uid, restored=False)
        _targets.set(self._total)

    @property
    def holding(self) -> bool:
        return self._fault.held

    def _sync(self, uid: str, *, restored: bool) -> None:
        balancer = self._state().balancers.get(uid)
        image = balancer.image if balancer is not None else None
        if balancer is None or image is None or balancer.plan.checking != "on":
            self._forget(uid)
            return
        wanted: set[Key] = set()
        for backend in image.backends:
            key = (uid, backend.uid, backend.address)
            wanted.add(key)
            self._sync_backend(key, backend, balancer, restored=restored)
        for key in self._of_owner.get(uid, set()) - wanted:
            self._drop(key)
        self._of_owner[uid] = wanted
        (self._held.add if image.held else self._held.discard)(uid)

    def _sync_backend(
        self, key: Key, backend: Backend, balancer: Balancer, *, restored: bool
    ) -> None:
        plan = balancer.plan
        said = backend.state if backend.state in (HEALTHY, UNHEALTHY) else UNKNOWN
        watched = self._watched.get(key)
        if watched is None:
            watched = self._watched[key] = _Watched(*key)
        watched.live = backend.ready
        watched.opinion.configure(plan.checks, plan.config, said)
        if not backend.ready:
            self._fault.drop(key)
        wanted: dict[tuple[Any, ...], Check] = {check.meaning: check for check in plan.checks}
        for meaning, target in list(watched.targets.items()):
            check = wanted.get(meaning)
            if check is None or target.dialled[1] != (backend.port or check.port):
                self.engine.remove(target)
                self._total -= 1
                del watched.targets[meaning]
            else:
                target.check = check
        at_once = not (restored and said != UNKNOWN)
        for meaning, check in wanted.items():
            if meaning not in watched.targets:
                port = backend.port or check.port
                dialled = self._dial(backend.address)
                target = Target((key, meaning), check, backend.address, dialled, port)
                watched.targets[meaning] = target
                self.engine.add(target, at_once=at_once)
                self._total += 1

    def _forget(self, uid: str) -> None:
        for key in self._of_owner.pop(uid, set()):
            self._drop(key)
        self._suspects.discard(uid)
        self._unmade.pop(uid, None)
        self._held.discard(uid)

    def _drop(self, key: Key) -> None:
        watched = self._watched.pop(key)
        for target in watched.targets.values():
            self.engine.remove(target)
        self._total -= len(watched.targets)
        self._fault.drop(key)
        self._made(watched)

    # --- what came of it ---

    def take(self, outcomes: list[Outcome]) -> None:
        """The results of one step."""
        now = self._clock()
        differing: dict[Key, _Watched] = {}
        passed = failed = unmade = 0
        for outcome in outcomes:
            key, meaning = outcome.target.tag
            watched = self._watched.get(key)
            streak = watched.opinion.streaks.get(meaning) if watched is not None else None
            if watched is None or streak is None:
                continue
            if outcome.local:
                unmade += 1
                self._not_made(watched, outcome)
                continue
            if outcome.ok:
                passed += 1
            else:
                failed += 1
            if watched.unmade:
                self._made(watched)
            opinion = watched.opinion
            streak.feed(outcome.ok, outcome.reason, outcome.started, outcome.target.check)
            opinion.started = max(opinion.started, outcome.started)
            if watched.live:
                self._fault.note(key, watched.owner, watched.address, outcome.ok, outcome.started)
            if opinion.differs:
                differing[key] = watched
        for result, number in (("passed", passed), ("failed", failed), ("not_made", unmade)):
            if number:
                _checks.labels(result).inc(number)
        _in_flight.set(self.engine.in_flight)
        _late.observe(self.engine.late)
        self._judge(differing, now)

    def _judge(self, differing: dict[Key, _Watched], now: datetime) -> None:
        if self._fault.held and self._fault.over():
            self._release()
        verdicts = []
        for watched in differing.values():
            opinion = watched.opinion
            state = opinion.state
            if not opinion.differs:  # the release took it back
                continue
            if state == UNHEALTHY and watched.live and self._is_ours(opinion):
                self._suspects.add(watched.owner)
                continue
            verdicts.append(
                Verdict(
                    owner=watched.owner,
                    uid=watched.uid,
                    address=watched.address,
                    config=opinion.config,
                    started=opinion.started,
                    healthy=state == HEALTHY,
                    reason=opinion.reason,
                    ended=now,
                )
            )
        holds = self._holds()
        if (verdicts or holds) and not self._submit(Judgement(tuple(verdicts), holds, now)):
            _dropped.inc(len(verdicts))

    def _is_ours(self, opinion: Opinion) -> bool:
        if self._fault.held:
            return True
        if not self._fault.suspect(opinion.failing_since):
            return False
        self._fault.held = True
        _held_gauge.set(1)
        log.warning("prober.held", why=EVERYTHING_FAILED)
        return True

    def _release(self) -> None:
        self._fault.held = False
        self._suspects.clear()
        _held_gauge.set(0)
        log.warning("prober.released", why="backends answer again; runs of failures start anew")
        for watched in self._watched.values():
            watched.opinion.restart()

    # --- what is held, on record and by right ---

    def _not_made(self, watched: _Watched, outcome: Outcome) -> None:
        watched.unmade += 1
        if watched.unmade >= outcome.target.check.failure:
            key = (watched.owner, watched.uid, watched.address)
            self._unmade.setdefault(watched.owner, {})[key] = outcome.reason

    def _made(self, watched: _Watched) -> None:
        watched.unmade = 0
        left = self._unmade.get(watched.owner)
        if left is not None:
            left.pop((watched.owner, watched.uid, watched.address), None)
            if not left:
                del self._unmade[watched.owner]

    def _holds(self) -> tuple[Hold, ...]:
        """Where the record does not say what is held, or says it though it is over."""
        rightly = self._suspects | self._unmade.keys()
        holds = []
        for uid in sorted(rightly ^ self._held):
            if uid in rightly:
                holds.append(Hold(uid, self._why(uid)))
            elif self._heard(uid):
                holds.append(Hold(uid, ""))
        return tuple(holds)

    def _why(self, uid: str) -> str:
        if uid in self._suspects:
            return EVERYTHING_FAILED
        return f"checks can't be made: {next(iter(self._unmade[uid].values()))}"

    def _heard(self, uid: str) -> bool:
        """Whether every backend was checked since we began, so that a hold may be lifted."""
        return all(
            streak.count
            for key in self._of_owner.get(uid, ())
            for streak in self._watched[key].opinion.streaks.values()
        )
