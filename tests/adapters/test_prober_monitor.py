"""The monitor between committed images and the engine: what is asked, what is submitted."""

import contextlib
from datetime import UTC, datetime, timedelta

import pytest

from schema.objects import ExplicitBackend, HealthCheck, Listener
from services.prober.checks import Engine
from services.prober.core import KINDS, State
from services.prober.dialling import DialMap
from services.prober.leader import Leader
from services.prober.monitor import Monitor
from services.prober.plan import Check
from services.prober.shares import Hello
from services.prober.targets import Outcome
from services.prober.verdicts import OwnFault
from tests.core.prober_objects import DEFAULTS, DUMMIES, balancer, machine, ref

NOW = datetime(2026, 11, 30, tzinfo=UTC)
CHECK = HealthCheck(port=8080, success_threshold=2, failure_threshold=3)


class Asked(Engine):
    """An engine that is never stepped: it says what it was asked to check."""

    def __init__(self, report):
        super().__init__(report)
        self.targets = {}
        self.at_once = {}

    def add(self, target, *, at_once, wait=None):
        super().add(target, at_once=at_once, wait=wait)
        key = (target.address, target.dialled[1], target.check.protocol)
        self.targets[key] = target
        self.at_once[key] = at_once

    def remove(self, target):
        super().remove(target)
        self.targets = {key: t for key, t in self.targets.items() if t is not target}


class World:
    """A state, its monitor, and commits that happen at once, or not (`lost`)."""

    def __init__(self, others=()):
        self.state = State(DEFAULTS, DUMMIES)
        self.words = []
        self.leader = Leader("a", 1.0, lambda subject, data: self.words.append((subject, data)))
        self.submitted = []
        self.lost = False
        self.started = 0.0
        self.monitor = Monitor(
            state=lambda: self.state,
            submit=self.submit,
            make_engine=Asked,
            dial=DialMap(["10.0.0.0/8=127.0.0.0/8"]),
            fault=OwnFault(),
            clock=lambda: NOW + timedelta(seconds=self.started),
            leader=self.leader,
        )
        self.monitor.start()
        for name in others:
            self.leader.hello(Hello(session=self.leader.session, replica=name), 0.0)

    @property
    def engine(self) -> Asked:
        return self.monitor.engine

    def submit(self, judgement):
        self.submitted.append(judgement)
        if self.lost:
            return False
        self.state.judge(judgement.verdicts, judgement.holds, judgement.at)
        self.commit()
        return True

    def see(self, *objs):
        for obj in objs:
            if obj.metadata.name.startswith("vm"):
                self.state.see_member(ref(obj), obj)
            else:
                self.state.see_balancer(obj.metadata.uid, obj)
        self.state.resolve(KINDS, NOW, 100)
        self.commit()

    def commit(self):
        changed, self.state.changed = self.state.changed, set()
        self.monitor.update(changed)

    def outcome(self, results, address="10.0.0.4", *, port=8080, protocol="TCP", local=False):
        """Results of one target, each in a step of its own."""
        for sign in results:
            self.started += 1.0
            target = self.engine.targets[address, port, protocol]
            reason = "" if sign == "+" else "connection refused"
            self.monitor.feed([Outcome(target, sign == "+", reason, self.started, local)])

    def found(self, name, sign, *addresses, local=False):
        """A result of what a replica checks at these addresses; which of them it does check."""
        self.started += 1.0
        outcomes = [
            Outcome(t, sign == "+", "" if sign == "+" else "refused", self.started, local)
            for t in self.checked_by(name)
            if t.address in addresses
        ]
        self.monitor.feed(outcomes)
        return [outcome.target.address for outcome in outcomes]

    def checked_by(self, name):
        if name == "a":
            return [t for t in self.engine.targets.values() if t.alive]
        return list(self.leader.share(name).values())

    def states(self, lb="uid-web"):
        return {b.address: b.state for b in self.state.balancers[lb].image.backends}


@pytest.fixture
def world():
    world = World()
    with contextlib.closing(world.engine):
        yield world


def test_targets_follow_the_image(world):
    """Backends come and go, checks change; the mapped address is dialled."""
    world.see(balancer(health_check=CHECK), machine("vm1", "10.0.0.4"))
    (target,) = world.engine.targets.values()
    assert target.dialled == ("127.0.0.4", 8080)
    world.see(machine("vm2", "10.0.0.5"))
    assert len(world.engine.targets) == 2
    world.state.see_member(ref(machine("vm1")), None)
    world.see()
    assert [t.address for t in world.engine.targets.values()] == ["10.0.0.5"]
    world.see(balancer())
    assert world.engine.targets == {}


def test_a_new_backend_is_asked_at_once_a_known_one_within_its_period(world):
    """After a start there is no burst, and nobody new waits."""
    world.see(balancer(health_check=CHECK), machine("vm1", "10.0.0.4"))
    assert set(world.engine.at_once.values()) == {True}
    world.outcome("++")
    world.monitor.stop()
    assert world.engine.targets == {}
    world.see(machine("vm2", "10.0.0.5"))
    world.monitor.start()
    assert {key[0]: at_once for key, at_once in world.engine.at_once.items()} == {
        "10.0.0.4": False,
        "10.0.0.5": True,
    }


def test_a_verdict_that_was_lost_is_submitted_again(world):
    """A full queue or a failed transaction costs a delay of one result."""
    world.see(balancer(health_check=CHECK), machine("vm1", "10.0.0.4"))
    world.lost = True
    world.outcome("++")
    assert world.states() == {"10.0.0.4": "unknown"}
    world.lost = False
    world.outcome("+")
    assert world.states() == {"10.0.0.4": "healthy"}
    assert len(world.submitted) == 2


def test_results_without_a_change_submit_nothing(world):
    """Only transitions leave the monitor."""
    world.see(balancer(health_check=CHECK), machine("vm1", "10.0.0.4"))
    world.outcome("++")
    world.outcome("+" * 50 + "--+--+")
    assert len(world.submitted) == 1


def test_counters_survive_a_change_of_period_and_threshold(world):
    """The same target goes on, at its place in the period."""
    world.see(balancer(health_check=CHECK), machine("vm1", "10.0.0.4"))
    world.outcome("++--")
    (before,) = world.engine.targets.values()
    slower = HealthCheck(port=8080, failure_threshold=4, period_seconds=9)
    world.see(balancer(health_check=slower, generation=2))
    (after,) = world.engine.targets.values()
    assert after is before
    assert after.check.period == 9
    world.outcome("-")
    assert world.states() == {"10.0.0.4": "healthy"}
    world.outcome("-")
    assert world.states() == {"10.0.0.4": "unhealthy"}


def test_another_port_is_another_question(world):
    """The old target goes, the verdict stays, the count starts anew."""
    listeners = [
        Listener(name="a", port=80, backend_port=8080),
        Listener(name="b", port=81, backend_port=8081),
    ]
    world.see(balancer(health_check=CHECK, listeners=listeners), machine("vm1", "10.0.0.4"))
    world.outcome("++--")
    other = HealthCheck(port=8081, failure_threshold=3)
    world.see(balancer(health_check=other, listeners=listeners))
    assert [key[1] for key in world.engine.targets] == [8081]
    world.outcome("--", port=8081)
    assert world.states() == {"10.0.0.4": "healthy"}
    world.outcome("-", port=8081)
    assert world.states() == {"10.0.0.4": "unhealthy"}


def test_every_listener_may_ask_its_own_question(world):
    """A backend is ready when all of its checks pass."""
    listeners = [
        Listener(name="a", port=80, backend_port=8080),
        Listener(name="b", port=81, backend_port=8081, health_check=HealthCheck(protocol="HTTP")),
    ]
    world.see(balancer(health_check=CHECK, listeners=listeners), machine("vm1", "10.0.0.4"))
    world.outcome("++")
    assert world.states() == {"10.0.0.4": "unknown"}
    world.outcome("+", port=8081, protocol="HTTP")
    assert world.states() == {"10.0.0.4": "healthy"}
    world.outcome("---", port=8081, protocol="HTTP")
    assert world.states() == {"10.0.0.4": "unhealthy"}


def test_an_explicit_backend_is_asked_at_its_own_port(world):
    """And at the new one when it changes."""
    lb = balancer(
        backend_server_selector={},
        health_check=CHECK,
        backends=[ExplicitBackend(name="db", address="10.0.0.9", port=5432)],
    )
    world.see(lb)
    assert [key[1] for key in world.engine.targets] == [5432]
    moved = [ExplicitBackend(name="db", address="10.0.0.9", port=5433)]
    world.see(balancer(backend_server_selector={}, health_check=CHECK, backends=moved))
    assert [key[1] for key in world.engine.targets] == [5433]


def test_checks_that_cannot_be_made_hold_the_verdict_and_say_so(world):
    """No route, no descriptor: nothing goes down, the load balancer tells why, and it ends."""
    world.see(balancer(health_check=CHECK), machine("vm1", "10.0.0.4"))
    world.outcome("++")
    world.outcome("-" * 10, local=True)
    image = world.state.balancers["uid-web"].image
    assert world.states() == {"10.0.0.4": "healthy"}
    assert image.held == "checks can't be made: connection refused"
    world.outcome("+")
    assert world.state.balancers["uid-web"].image.held == ""


def test_what_is_asked_is_part_of_the_digest_on_every_verdict(world):
    """So that the core can tell a verdict on an old configuration."""
    world.see(balancer(health_check=CHECK), machine("vm1", "10.0.0.4"))
    world.outcome("++")
    (verdict,) = world.submitted[0].verdicts
    assert verdict.config == world.state.balancers["uid-web"].plan.config
    assert isinstance(world.state.balancers["uid-web"].plan.checks[0], Check)


# --- with other replicas ---

HOSTS = [f"10.0.0.{number}" for number in range(1, 21)]


@pytest.fixture
def shared():
    """20 healthy backends of four load balancers, shared by a (the active one) and b."""
    world = World(others=["b"])
    with contextlib.closing(world.engine):
        for number in range(4):
            world.see(
                balancer(
                    f"lb{number}",
                    backend_server_selector={"lb": [str(number)]},
                    health_check=HealthCheck(port=8080, success_threshold=1, failure_threshold=2),
                )
            )
        for number, host in enumerate(HOSTS):
            world.see(machine(f"vm{number}", host, labels={"lb": str(number % 4)}))
        for name in "ab":
            assert world.found(name, "+", *HOSTS)
        yield world


def unhealthy(world):
    return {
        b.address
        for known in world.state.balancers.values()
        for b in known.image.backends
        if not b.ready
    }


def test_a_failure_beside_successes_is_believed_at_once(shared):
    """The replica reaches others: it is the backend."""
    mine = [t.address for t in shared.checked_by("b")]
    for _ in range(2):
        shared.found("b", "+", *mine[1:])
        shared.found("b", "-", mine[0])
    assert unhealthy(shared) == {mine[0]}


@pytest.mark.parametrize("blind", ["a", "b"])
def test_a_replica_for_which_everything_fails_needs_a_witness(shared, blind):
    """The other one is asked at once; where it succeeds nothing goes down, where it fails too one
    failure is enough. The blind one does nothing but show signs of life, and comes back by one."""
    well = "b" if blind == "a" else "a"
    mine = [t.address for t in shared.checked_by(blind)]
    shared.found(well, "+", *HOSTS)
    for _ in range(2):
        shared.found(blind, "-", *mine)
    assert unhealthy(shared) == set()
    assert {t.address for t in shared.checked_by(well)} == set(HOSTS)
    shared.found(well, "+", *[h for h in HOSTS if h != mine[0]])
    assert shared.leader.replicas.suspects == {blind}
    shared.found(well, "-", mine[0])
    assert unhealthy(shared) == {mine[0]}

    signs = shared.found(blind, "-", *HOSTS)
    assert 0 < len(signs) <= 8
    shared.found(blind, "+", signs[0])
    assert shared.leader.replicas.suspects == set()
    assert {t.address for t in shared.checked_by(blind)} == set(mine)
    assert unhealthy(shared) == {mine[0]}


def test_checks_that_one_replica_cannot_make_are_made_by_another(shared):
    """Nothing is held for the want of a route that somebody else has."""
    mine = [t.address for t in shared.checked_by("b")]
    for _ in range(2):
        shared.found("b", "-", *mine, local=True)
    assert set(mine) <= {t.address for t in shared.checked_by("a")}
    shared.found("a", "+", *HOSTS)
    assert {known.image.held for known in shared.state.balancers.values()} == {""}


def test_everything_failing_for_everybody_is_held(shared):
    """As with one replica: whoever is asked finds the same."""
    for _ in range(6):
        for name in "ab":
            shared.found(name, "-", *HOSTS)
    assert unhealthy(shared) == set()
    assert shared.monitor.holding
    for name in "ab":
        shared.found(name, "+", *HOSTS)
    assert not shared.monitor.holding


def test_a_replica_that_goes_takes_no_count_with_it(shared):
    """Failures that it has found go on counting where it is checked next."""
    mine = [t.address for t in shared.checked_by("b")]
    shared.found("b", "-", mine[0])
    shared.leader.hello(Hello(session=shared.leader.session, replica="b", leaving=True), 0.0)
    assert {t.address for t in shared.checked_by("a")} == set(HOSTS)
    shared.found("a", "+", *[h for h in HOSTS if h != mine[0]])
    shared.found("a", "-", mine[0])
    assert unhealthy(shared) == {mine[0]}
