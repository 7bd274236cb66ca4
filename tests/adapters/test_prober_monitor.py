"""The monitor between committed images and the engine: what is asked, what is submitted."""

import contextlib
from datetime import UTC, datetime, timedelta

import pytest

from schema.objects import ExplicitBackend, HealthCheck, Listener
from services.prober.checks import Engine
from services.prober.core import KINDS, State
from services.prober.dialling import DialMap
from services.prober.monitor import Monitor
from services.prober.plan import Check
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

    def add(self, target, *, at_once):
        super().add(target, at_once=at_once)
        key = (target.address, target.dialled[1], target.check.protocol)
        self.targets[key] = target
        self.at_once[key] = at_once

    def remove(self, target):
        super().remove(target)
        self.targets = {key: t for key, t in self.targets.items() if t is not target}


class World:
    """A state, its monitor, and commits that happen at once, or not (`lost`)."""

    def __init__(self):
        self.state = State(DEFAULTS, DUMMIES)
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
        )
        self.monitor.start()

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
            self.monitor.take([Outcome(target, sign == "+", reason, self.started, local)])

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
