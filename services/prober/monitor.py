"""Keeps the engine's targets in step with the committed images, and turns results into verdicts.

The record (what is committed) leads: a verdict is submitted while the checks' opinion differs from
it, again with every further result until it is on record, so none is lost to a failed transaction
or a full queue. Probing goes on only while this replica may have effects; after a restart or a
take-over every backend starts from its verdict on record, and nothing flaps.

Other replicas may make some of the checks; their results come in here and are taken like our own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Final

import structlog
from prometheus_client import Counter, Gauge

from schema.events import Backend
from services.prober.checks import Engine
from services.prober.core import State
from services.prober.dialling import DialMap
from services.prober.images import Hold, Verdict
from services.prober.leader import Leader
from services.prober.placing import Places
from services.prober.plan import Check, Plan
from services.prober.projection import Judgement
from services.prober.shares import ANYWHEN
from services.prober.targets import Outcome, Target
from services.prober.verdicts import (
    HEALTHY,
    OURS,
    THEIRS,
    UNHEALTHY,
    UNKNOWN,
    WAIT,
    OwnFault,
)
from services.prober.watched import NOBODY, Watched

log = structlog.get_logger()
_checks = Counter("lbledger_prober_checks_total", "Finished checks", ["result"])
_targets = Gauge("lbledger_prober_targets", "Checks that are repeated now")
_held_gauge = Gauge("lbledger_prober_held", "1 while failures are taken for a fault of our own")
_dropped = Counter("lbledger_prober_verdicts_postponed_total", "Verdicts that found no room")

EVERYTHING_FAILED: Final = (
    "nearly every check of every load balancer failed within one period: taken for a fault of the"
    " prober's own network, the last verdicts stand"
)
LOOK: Final = timedelta(seconds=0.1)  # between two looks at what is held
PORTION: Final = 10_000  # backends that change hands at once: nothing else goes on meanwhile
ASKED: Final = "asked"  # another replica has the next word

Key = tuple[str, str, int]  # uid, address and own port of a backend


class Monitor:
    """Not thread-safe: everything happens on the event loop."""

    def __init__(
        self,
        state: Callable[[], State],
        submit: Callable[[Judgement], bool],
        make_engine: Callable[[Callable[[list[Outcome]], None]], Engine],
        dial: DialMap,
        fault: OwnFault[Watched],
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        leader: Leader | None = None,
    ) -> None:
        self._state = state
        self._submit = submit
        self._dial = dial
        self._fault = fault
        self._clock = clock
        self._watched: dict[str, dict[Key, Watched]] = {}  # by owner
        self._suspects: set[str] = set()  # owners with failures that are held
        self._pending: dict[Watched, None] = {}  # failures that wait for evidence whose fault
        self._unmade: dict[str, dict[Watched, str]] = {}  # owner -> what was not checked, why
        self._held: set[str] = set()  # owners that are held on record
        self._looked = datetime.min.replace(tzinfo=UTC)
        self._total = 0
        self._unsettled: deque[Watched] = deque()  # after a change of replicas
        self.engine = make_engine(self.feed)
        self._leader = leader or Leader()
        self._leader.attach(self.engine, self.feed, self._settle_all)
        self._places = Places(self._leader, fault)
        self.running = False

    # --- what to check ---

    def start(self) -> None:
        """Begin to check everything, from the verdicts on record."""
        self.running = True
        self._leader.start()
        for uid in [*self._state().balancers, *(self._watched.keys() - self._state().balancers)]:
            self._sync(uid, restored=True)
        self._leader.flush()
        _targets.set(self._total)

    def stop(self) -> None:
        """Let go of every target; what is under way is forgotten."""
        self.running = False
        self._leader.stop()
        for uid in list(self._watched):
            self._forget(uid)
        self._places.reset()
        self._unsettled.clear()
        self._fault.reset()
        _held_gauge.set(0)
        _targets.set(self._total)

    def update(self, owners: Iterable[str]) -> None:
        """These images were committed."""
        if not self.running:
            return
        for uid in owners:
            self._sync(uid, restored=False)
        self._leader.flush()
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
        before = self._watched.get(uid, {})
        self._watched[uid] = now = {}
        for backend in image.backends:
            key = (backend.uid, backend.address, backend.port)
            watched = before.pop(key, None) or self._watch(uid, backend)
            now[key] = watched
            self._sync_backend(watched, backend, balancer.plan, restored=restored)
        for watched in before.values():
            self._drop(watched)
        (self._held.add if image.held else self._held.discard)(uid)

    def _watch(self, owner: str, backend: Backend) -> Watched:
        place = self._places.of(backend.address)
        return Watched(owner, backend.uid, backend.address, place)

    def _sync_backend(
        self, watched: Watched, backend: Backend, plan: Plan, *, restored: bool
    ) -> None:
        said = backend.state if backend.state in (HEALTHY, UNHEALTHY) else UNKNOWN
        watched.live = backend.ready
        if not backend.ready:
            self._fault.drop(watched)
            if watched.asked:
                watched.asked = NOBODY
                self._places.settle(watched, self.engine.now())
        opinion, asked = watched.opinion, watched.opinion.checks
        opinion.configure(plan.checks, plan.config, said)
        if opinion.checks is asked:
            return
        kept = {target.check.meaning: target for target in watched.targets}
        targets = []
        for check, streak in zip(opinion.checks, opinion.streaks, strict=True):
            target = kept.pop(check.meaning, None)
            if target is not None:
                target.check = check
                self._leader.renew(watched.replica, target)
            else:
                target = self._target(backend, check)
                wait = ANYWHEN if restored and said != UNKNOWN else 0.0
                self._leader.give(watched.replica, target, wait)
            target.tag = (watched, streak)
            targets.append(target)
        self._total += len(targets) - len(watched.targets)
        watched.targets = tuple(targets)
        for target in kept.values():
            self._leader.take_back(watched.replica, target)

    def _target(self, backend: Backend, check: Check) -> Target:
        port = backend.port or check.port
        return Target(None, check, backend.address, self._dial(backend.address), port)

    def _forget(self, uid: str) -> None:
        for watched in self._watched.pop(uid, {}).values():
            self._drop(watched)
        self._suspects.discard(uid)
        self._held.discard(uid)

    def _drop(self, watched: Watched) -> None:
        for target in watched.targets:
            self._leader.take_back(watched.replica, target)
        self._total -= len(watched.targets)
        watched.targets = ()
        self._fault.drop(watched)
        self._pending.pop(watched, None)
        self._made(watched)

    def _settle_all(self) -> None:
        """Replicas came or went: have each backend checked where it belongs now."""
        self._unsettled = deque(self._backends())
        self._settle_some()
        self._places.show_signs(self._backends(), self.engine.now())

    @property
    def unsettled(self) -> int:
        """Backends that may have to change hands yet."""
        return len(self._unsettled)

    def _settle_some(self) -> None:
        now = self.engine.now()
        for _ in range(min(PORTION, len(self._unsettled))):
            self._places.settle(self._unsettled.popleft(), now)

    def tick(self) -> None:
        """To be called some times a second."""
        now = self.engine.now()
        self._leader.tick(now)
        self._settle_some()
        self._leader.flush()
        self._places.tick(self._backends(), now)

    def _backends(self) -> Iterator[Watched]:
        return chain.from_iterable(map(dict.values, self._watched.values()))

    # --- what came of it ---

    def feed(self, outcomes: list[Outcome]) -> None:
        """Results, whoever made the checks."""
        shared = self._places.shared
        differing, self._pending = self._pending, {}
        passed = unmade = 0
        for target, ok, reason, started, local in outcomes:
            if not target.alive:  # what came before it in this list has moved it
                continue
            watched, streak = target.tag
            if watched is None:  # of a suspect, whose name this is
                if ok:
                    self._places.sign(streak)
                continue
            if local:
                unmade += 1
                self._not_made(watched, target.check, reason, started)
                continue
            passed += ok
            if watched.unmade:
                self._made(watched)
            opinion = watched.opinion
            streak.feed(ok, reason, started, target.check)
            opinion.started = max(opinion.started, started)
            if watched.live:
                watched.ok, watched.at = ok, started
                self._fault.note(watched)
            if shared and ok:
                self._passed(watched, started)
            if opinion.differs:
                differing[watched] = None
        failed = len(outcomes) - passed - unmade
        for result, number in (("passed", passed), ("failed", failed), ("not_made", unmade)):
            if number:
                _checks.labels(result).inc(number)
        if differing or self._fault.held or self._unmade or self._held or self._suspects:
            self._judge(list(differing), self._clock())
        self._leader.flush()

    def _passed(self, watched: Watched, started: float) -> None:
        self._places.passed(watched.replica, started)
        if watched.asked and watched.opinion.passing:
            self._places.answered(watched, self.engine.now())

    def _judge(self, differing: list[Watched], now: datetime) -> None:
        if self._fault.held and self._fault.over():
            self._release()
        ours: dict[tuple[float, float], str] = {}
        verdicts = []
        for watched in differing:
            opinion = watched.opinion
            state = opinion.state
            if not opinion.differs:  # the release took it back
                continue
            if state == UNHEALTHY and watched.live:
                whose = self._blame(watched, ours)
                if whose == WAIT:
                    self._pending[watched] = None
                elif whose == OURS:
                    self._suspects.add(watched.owner)
                if whose != THEIRS:
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
        self._places.judged()
        holds = self._holds() if now - self._looked >= LOOK else ()
        if (verdicts or holds) and not self._submit(Judgement(tuple(verdicts), holds, now)):
            _dropped.inc(len(verdicts))

    def _blame(self, watched: Watched, known: dict[tuple[float, float], str]) -> str:
        if self._fault.held:
            return OURS
        since, patience = watched.opinion.failing
        if self._places.ask(watched, since, self.engine.now()):
            return ASKED
        # Many failed together: what is asked about is the same to a hundredth of a second.
        moment = (int(since * 100) / 100, int(patience * 100) / 100)
        if moment not in known:
            known[moment] = self._fault.blame(*moment, self.engine.now())
        if known[moment] == OURS:
            self._fault.held = True
            self._looked = datetime.min.replace(tzinfo=UTC)
            _held_gauge.set(1)
            log.warning("prober.held", why=EVERYTHING_FAILED)
        return known[moment]

    def _release(self) -> None:
        self._fault.held = False
        self._suspects.clear()
        _held_gauge.set(0)
        log.warning("prober.released", why="backends answer again; runs of failures start anew")
        for backends in self._watched.values():
            for watched in backends.values():
                watched.opinion.restart()

    # --- what is held, on record and by right ---

    def _not_made(self, watched: Watched, check: Check, reason: str, started: float) -> None:
        watched.unmade += 1
        if watched.unmade >= check.failure:
            if self._places.pass_on(watched, started, self.engine.now()):
                return
            self._unmade.setdefault(watched.owner, {})[watched] = reason

    def _made(self, watched: Watched) -> None:
        watched.unmade = 0
        left = self._unmade.get(watched.owner)
        if left is not None:
            left.pop(watched, None)
            if not left:
                del self._unmade[watched.owner]

    def _holds(self) -> tuple[Hold, ...]:
        """Where the record does not say what is held, or says it though it is over."""
        self._looked = self._clock()
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
            for watched in self._watched.get(uid, {}).values()
            for streak in watched.opinion.streaks
        )
