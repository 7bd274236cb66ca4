"""A leader and followers over a wire that loses what it likes, with engines that nobody runs."""

import contextlib
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.prober import shares
from services.prober.checks import Engine
from services.prober.dialogues import Dialogues
from services.prober.follower import Follower
from services.prober.leader import Leader
from services.prober.plan import Check
from services.prober.shares import ANYWHEN, Call, Hello, Result, Seen, Share, What
from services.prober.targets import Outcome, Target

CHECK = Check(port=8080)
DIALOGUES = Dialogues()  # loads certificates, which takes longer than everything here
DECODE = {kind: msgspec.json.Decoder(kind).decode for kind in (Call, Hello, Share, Seen)}
ADDRESSES = [f"10.0.0.{number}" for number in range(1, 40)]


class Asked(Engine):
    """Says what it was asked to check, by address, and how often nobody took it back."""

    def __init__(self, clock):
        super().__init__(lambda outcomes: None, clock=clock, dialogues=DIALOGUES)
        self.asked = {}

    def add(self, target, *, at_once, wait=None):
        super().add(target, at_once=at_once, wait=wait)
        self.asked.setdefault(target.address, []).append(target)

    def checks(self):
        return {a: [t for t in targets if t.alive] for a, targets in self.asked.items()}


class World:
    """`words` wait until they are delivered, or lost."""

    def __init__(self, followers="bc"):
        self.now = 0.0
        self.words = []
        self.engines = {name: Asked(lambda: self.now) for name in "a" + followers}
        self.found = []
        self.leader = Leader("a", 1.0, lambda s, d: self.words.append(("a", s, d)))
        self.leader.max_bytes = 1_200  # so that a share takes several messages
        self.leader.attach(self.engines["a"], self.found.extend, self.move)
        self.followers = {
            name: Follower(
                name,
                1.0,
                self.engines[name],
                lambda address: address,
                lambda s, d, name=name: self.words.append((name, s, d)) or True,
                lambda seconds, flush: self.later.append(flush),
            )
            for name in followers
        }
        self.later = []
        self.targets = {}  # address -> (replica, target)
        self.frozen = set()
        self.leader.start()
        for follower in self.followers.values():
            follower.start()

    def check(self, address, check=CHECK):
        replica = self.leader.place(address)
        target = Target(address, check, address, address, check.port)
        self.targets[address] = (replica, target)
        self.leader.give(replica, target, ANYWHEN)
        self.leader.flush()

    def drop(self, address):
        if address in self.targets:
            self.leader.take_back(*self.targets.pop(address))
            self.leader.flush()

    def move(self):
        for address, (replica, target) in self.targets.items():
            place = self.leader.place(address)
            if place != replica:
                self.leader.take_back(replica, target)
                moved = target.again()
                self.targets[address] = (place, moved)
                self.leader.give(place, moved, ANYWHEN)

    def deliver(self, lost=lambda: False):
        words, self.words = self.words, []
        for sender, subject, data in words:
            if sender in self.frozen or lost():
                continue
            if subject == shares.CALL:
                for name, follower in self.followers.items():
                    if name not in self.frozen:
                        follower.call(DECODE[Call](data), self.now)
            elif subject == shares.HELLO:
                self.leader.hello(DECODE[Hello](data), self.now)
            elif subject.startswith(shares.SHARE):
                name = subject.removeprefix(shares.SHARE)
                if name not in self.frozen:
                    share = DECODE[Share](data)
                    assert len(data) <= self.leader.max_bytes
                    self.followers[name].share(share, self.now)
            else:
                self.leader.seen(DECODE[Seen](data), self.now)

    def turn(self, lost=lambda: False):
        self.now += 0.1
        self.leader.tick(self.now)
        for name, follower in self.followers.items():
            if name not in self.frozen:
                follower.tick(self.now)
        self.deliver(lost)

    def turns(self, count):
        for _ in range(count):
            self.turn()

    def checking(self):
        """Who checks each address now, by what the engines were asked."""
        found = {}
        for name, engine in self.engines.items():
            if name not in self.frozen:
                for address, targets in engine.checks().items():
                    found.setdefault(address, []).extend([name] * len(targets))
        return {address: names for address, names in found.items() if names}

    def results(self, name, ok=True):
        """A result of everything that a follower checks."""
        engine = self.engines[name]
        live = [t for targets in engine.checks().values() for t in targets]
        self.followers[name].take([Outcome(t, ok, "", self.now, False) for t in live])
        flushes, self.later = self.later, []
        for flush in flushes:
            flush()

    def close(self):
        for engine in self.engines.values():
            engine.close()


@pytest.fixture
def world():
    with contextlib.closing(World()) as world:
        yield world


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("check"), st.sampled_from(ADDRESSES)),
        st.tuples(st.just("drop"), st.sampled_from(ADDRESSES)),
        st.tuples(st.just("turn"), st.integers(1, 15)),
        st.tuples(st.just("freeze"), st.sampled_from("bc")),
        st.tuples(st.just("thaw"), st.sampled_from("bc")),
        st.tuples(st.just("results"), st.sampled_from("bc")),
        st.tuples(st.just("leave"), st.sampled_from("bc")),
        st.tuples(st.just("lead"), st.just("")),
    ),
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(STEPS, st.integers(0, 1_000), st.sampled_from([0.0, 0.3, 0.9]))
def test_whatever_is_lost_each_target_ends_with_exactly_one(steps, seed, loss):
    """Words get lost, replicas freeze, leave and come back, the session changes: once the wire is
    good again every target is checked by exactly one replica, and by the one it belongs to."""
    rng = random.Random(seed)
    with contextlib.closing(World()) as world:
        for step, what in steps:
            if step == "check" and what not in world.targets:
                world.check(what)
            elif step == "drop":
                world.drop(what)
            elif step == "turn":
                for _ in range(what):
                    world.turn(lambda: rng.random() < loss)
            elif step == "freeze":
                world.frozen.add(what)
            elif step == "thaw":
                world.frozen.discard(what)
            elif step == "results" and what not in world.frozen:
                world.results(what)
            elif step == "leave" and what not in world.frozen:
                world.followers[what].stop()
                world.followers[what].start()
            elif step == "lead":
                for address in list(world.targets):
                    world.drop(address)
                world.leader.stop()
                world.leader.start()
        world.frozen.clear()
        world.turns(30)
        assert set(world.leader.replicas.able) == {"a", "b", "c"}
        expected = {address: [world.leader.place(address)] for address in world.targets}
        assert world.checking() == expected


def share_out(world):
    for address in ADDRESSES:
        world.check(address)
    world.turns(10)
    return {a: names[0] for a, names in world.checking().items()}


def test_results_of_others_are_told_in_our_own_time(world):
    """Of the very same targets; `age` is what crosses the wire."""
    owners = share_out(world)
    world.results("b")
    world.now += 0.25
    began = world.now
    world.deliver()
    assert {o.target.tag for o in world.found} == {a for a, name in owners.items() if name == "b"}
    assert {o.started for o in world.found} == {began}


def test_a_result_of_what_was_moved_or_removed_finds_nothing(world):
    """Also of a session that is over, or with numbers that nobody gave out."""
    owners = share_out(world)
    world.results("b")
    for address, name in owners.items():
        if name == "b":
            world.drop(address)
    world.deliver()
    assert world.found == []
    junk = [Result(number, 0.0, what) for number in (-1, 10**9) for what in (0, 7, -3)]
    session = world.followers["c"]._session
    world.leader.seen(
        Seen(session=session, replica="c", results=junk, what=[What(True, "", False)]), 0
    )
    world.leader.seen(Seen(session="other", replica="c", results=[Result(1, 0, 0)], what=[]), 0)
    assert world.found == []


def test_a_silent_replica_loses_its_share_and_knows_it(world):
    """Within the bound and a beat; the frozen one lets go of it as soon as it hears again."""
    share_out(world)
    world.frozen.add("b")
    world.turns(15)
    assert {name for names in world.checking().values() for name in names} == {"a", "c"}
    world.frozen.discard("b")
    held = world.engines["b"].checks()
    assert any(held.values())
    world.turns(10)
    assert all(len(names) == 1 for names in world.checking().values())
    assert {name for names in world.checking().values() for name in names} == {"a", "b", "c"}


def test_a_stand_by_that_hears_nobody_checks_nothing(world):
    """The active one is gone or out of reach: its share is somebody else's by now."""
    share_out(world)
    world.frozen.add("a")
    for _ in range(15):
        world.turn()
    assert not any(world.engines["b"].checks().values())


def test_a_share_told_again_lets_checks_go_on_as_they_are(world):
    """One message was lost: nothing starts anew because of it."""
    share_out(world)
    before = {a: list(t) for a, t in world.engines["b"].checks().items() if t}
    lost = next(
        a for a in ("10.0.1.1", "10.0.1.2", "10.0.1.3", "10.0.1.4") if world.leader.place(a) == "b"
    )
    world.check(lost)
    world.words.clear()
    world.turns(15)
    after = {a: t for a, t in world.engines["b"].checks().items() if t}
    assert set(after) == {*before, lost}
    assert all(after[address] == before[address] for address in before)


def test_another_period_changes_the_check_that_is_under_way(world):
    """The same target goes on with it."""
    owners = share_out(world)
    address = next(a for a, name in owners.items() if name == "b")
    (known,) = world.engines["b"].checks()[address]
    replica, target = world.targets[address]
    target.check = msgspec.structs.replace(CHECK, period=9.0)
    world.leader.renew(replica, target)
    world.leader.flush()
    world.deliver()
    assert world.engines["b"].checks()[address] == [known]
    assert known.check.period == 9.0


def test_without_others_nothing_is_numbered_or_sent_but_the_call(world):
    """One replica: three words in the time of silence, however many targets."""
    with contextlib.closing(World("")) as alone:
        for address in ADDRESSES:
            alone.check(address)
        alone.turns(10)
        assert len(alone.engines["a"].asked) == len(ADDRESSES)
        calls = []
        for _ in range(10):
            alone.now += 0.1
            alone.leader.tick(alone.now)
            calls += alone.words
            alone.words = []
        assert {subject for _, subject, _ in calls} == {shares.CALL}
        assert len(calls) <= 4
