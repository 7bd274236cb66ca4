"""Who is alive, and who checks what: pure, for any order of words and silences."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.prober.plan import Check
from services.prober.replicas import MAX_REPLICAS, Replicas, place
from services.prober.shares import Share, Task, encode, parts

ADDRESSES = [f"10.0.{number // 250}.{1 + number % 250}" for number in range(2_000)]
names = st.sets(st.text("abcdef0123456789", min_size=16, max_size=16), min_size=2, max_size=6)


@given(names)
def test_every_replica_gets_its_part(replicas):
    """Of many addresses nobody gets less than half or more than twice of an equal part."""
    counts = Counter(place(address, replicas) for address in ADDRESSES)
    equal = len(ADDRESSES) / len(replicas)
    assert all(equal / 2 < counts[replica] < equal * 2 for replica in replicas)


@given(names)
def test_whoever_comes_or_goes_moves_only_its_own_part(replicas):
    """What the others check stays where it is."""
    gone = min(replicas)
    left = replicas - {gone}
    for address in ADDRESSES[:200]:
        before = place(address, replicas)
        assert before == gone or place(address, left) == before


WORDS = st.lists(
    st.tuples(
        st.sampled_from(["hear", "leave", "suspect", "trust", "pass"]), st.sampled_from("abcd")
    ),
    max_size=40,
)


@given(WORDS)
def test_there_is_always_somebody_able(words):
    """Suspects and the silent get nothing, unless nobody else is left; we ourselves are there."""
    replicas = Replicas("a", silence=1.0)
    now = 0.0
    for word, name in words:
        if word == "hear":
            replicas.hear(name, now)
        elif word == "leave":
            replicas.leave(name)
        elif word == "pass":
            now += 0.3
            for silent in replicas.silent(now):
                assert now - replicas.heard[silent] > 1.0
                replicas.leave(silent)
        else:
            getattr(replicas, word)(name)
        alive = {"a", *replicas.heard}
        assert replicas.able
        assert set(replicas.able) <= alive
        assert set(replicas.able) == alive - replicas.suspects
        assert replicas.place("10.0.0.4") in replicas.able
        assert replicas.place("10.0.0.4", without=alive) in replicas.able


def test_nobody_is_given_up_for_what_we_were_too_late_to_read():
    """We stood still for ten seconds: what the others said meanwhile waits in a buffer."""
    replicas = Replicas("a", silence=1.0)
    replicas.hear("b", 0.0)
    assert replicas.silent(0.1) == []
    assert replicas.silent(10.0) == []
    assert replicas.silent(10.9) == []
    assert [replicas.silent(11.0 + step / 10) for step in range(1, 3)][-1] == ["b"]


def test_nonsense_makes_no_replicas_without_bound():
    """However many names are heard."""
    replicas = Replicas("a", silence=1.0)
    for number in range(1_000):
        replicas.hear(str(number), 0.0)
    assert len(replicas.able) == MAX_REPLICAS + 1


@pytest.mark.parametrize("limit", [2_000, 256 * 1024])
@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from(ADDRESSES)), max_size=200))
def test_no_message_of_a_share_is_over_the_limit(limit, wanted):
    """However many targets and checks; and nothing gets lost or mixed up by it."""
    tasks = [
        Task(number, Check(port=80, path="/" + "x" * 40 * path), address, 65_535, 1234.567)
        for number, (path, address) in enumerate(wanted)
    ]
    found = []
    for checks, add in parts(tasks, limit):
        message = Share(session="s" * 16, run=1, seq=1, checks=checks, add=add)
        assert len(encode(message)) <= limit
        found += [Task(a.number, checks[a.check], *a[2:]) for a in add]
    assert found == tasks
