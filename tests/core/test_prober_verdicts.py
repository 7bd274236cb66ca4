"""From results to verdicts: thresholds, several checks of one backend, a fault of our own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.prober.plan import Check, digest
from services.prober.verdicts import (
    HEALTHY,
    OURS,
    THEIRS,
    UNHEALTHY,
    UNKNOWN,
    WAIT,
    Opinion,
    OwnFault,
    Streak,
)

CHECK = Check(port=80, success=2, failure=3)


def run(streak, results, check=CHECK):
    """Feed + and -; the state after each result."""
    states = []
    for number, sign in enumerate(results):
        streak.feed(sign == "+", "" if sign == "+" else "refused", float(number), check)
        states.append(streak.state)
    return states


@pytest.mark.parametrize(
    ("start", "results", "end"),
    [
        (UNKNOWN, "+", UNKNOWN),
        (UNKNOWN, "++", HEALTHY),
        (UNKNOWN, "--", UNKNOWN),
        (UNKNOWN, "---", UNHEALTHY),
        (HEALTHY, "--+--+--", HEALTHY),
        (HEALTHY, "---", UNHEALTHY),
        (HEALTHY, "--+---", UNHEALTHY),
        (UNHEALTHY, "+-+-+-", UNHEALTHY),
        (UNHEALTHY, "-----++", HEALTHY),
        (UNHEALTHY, "+", UNHEALTHY),
    ],
)
def test_a_verdict_needs_a_run_as_long_as_its_threshold(start, results, end):
    """Spec 4.4: one other result breaks the run; nothing turns over without a full one."""
    assert run(Streak(state=start), results)[-1] == end


@given(
    st.text("+-", max_size=40),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([UNKNOWN, HEALTHY, UNHEALTHY]),
)
def test_a_verdict_is_what_the_last_full_run_said(results, success, failure, start):
    """For any results: the last run that reached its threshold decides, else the start stands."""
    expected = start
    for end in range(1, len(results) + 1):
        if results[:end].endswith("+" * success):
            expected = HEALTHY
        elif results[:end].endswith("-" * failure):
            expected = UNHEALTHY
    streak = Streak(state=start)
    run(streak, results, Check(port=80, success=success, failure=failure))
    assert streak.state == expected


def opinion(*checks, said=UNKNOWN):
    made = Opinion()
    made.configure(checks, digest(checks), said)
    return made


def feed(made, check, results):
    run(made.streaks[made.checks.index(check)], results, check)
    return made.state


OTHER = Check(port=81, success=1, failure=1)


def test_a_backend_with_several_checks_is_healthy_when_all_are():
    """One failing check is enough for unhealthy; one unknown is too little for healthy."""
    made = opinion(CHECK, OTHER)
    assert feed(made, CHECK, "++") == UNKNOWN
    assert feed(made, OTHER, "+") == HEALTHY
    assert feed(made, OTHER, "-") == UNHEALTHY
    assert made.reason == "refused"
    assert feed(made, OTHER, "+") == HEALTHY


def test_counters_survive_a_change_of_thresholds():
    """What is asked is the same, so what was counted still counts."""
    made = opinion(CHECK, said=HEALTHY)
    feed(made, CHECK, "--")
    slower = Check(port=80, success=2, failure=4)
    made.configure((slower,), digest((slower,)), HEALTHY)
    assert feed(made, slower, "-") == HEALTHY
    assert feed(made, slower, "-") == UNHEALTHY


def test_another_question_starts_from_the_verdict_on_record():
    """A changed port carries the verdict over and counts anew."""
    made = opinion(CHECK, said=HEALTHY)
    feed(made, CHECK, "--")
    other = Check(port=81, success=2, failure=3)
    made.configure((other,), digest((other,)), HEALTHY)
    assert made.state == HEALTHY
    assert feed(made, other, "--") == HEALTHY
    assert feed(made, other, "-") == UNHEALTHY


def test_an_added_check_does_not_take_a_live_backend_down():
    """It has no opinion of its own yet, so the verdict on record stands."""
    made = opinion(CHECK, said=HEALTHY)
    made.configure((CHECK, OTHER), digest((CHECK, OTHER)), HEALTHY)
    assert made.state == HEALTHY
    assert not made.differs


def test_a_verdict_differs_until_it_is_on_record():
    """So that it is submitted again when a transaction is lost."""
    made = opinion(CHECK)
    feed(made, CHECK, "++")
    assert made.differs
    made.configure((CHECK,), digest((CHECK,)), HEALTHY)
    assert not made.differs


class Sampled:
    def __init__(self, owner, address):
        self.owner, self.address, self.ok, self.at = owner, address, True, 0.0


def noted(fault, results):
    """Note results of (load balancer, address), each a backend of its own."""
    known = {(backend.owner, backend.address): backend for backend in fault.samples}
    for key, ok, at in results:
        backend = known.setdefault(key, Sampled(*key))
        backend.ok, backend.at = ok, at
        fault.note(backend)
    return fault


BACKENDS = [(f"lb{i}", f"10.0.0.{i}") for i in range(10)]


def test_everything_failing_within_a_period_is_our_own_fault():
    """All backends of all load balancers, since the run of failures began."""
    fault = noted(OwnFault(), [(b, False, 5.0 + i / 10) for i, b in enumerate(BACKENDS)])
    assert fault.blame(5.0, 13.0, 6.0) == OURS


@pytest.mark.parametrize(
    ("why", "results"),
    [
        ("too few backends", [(b, False, 5.0) for b in BACKENDS[:5]]),
        ("one load balancer", [(("lb0", b), False, 5.0) for _, b in BACKENDS]),
        ("one backend of many", [((o, "10.0.0.1"), False, 5.0) for o, _ in BACKENDS]),
        ("a third answers", [(b, i % 3 != 0, 5.0) for i, b in enumerate(BACKENDS)]),
        ("failures from before", [(b, False, 1.0) for b in BACKENDS]),
    ],
)
def test_fewer_failures_are_the_backends_own(why, results):
    """A small installation, one application, or a slow decline must be acted on."""
    assert noted(OwnFault(), results).blame(4.0, 12.0, 12.0) == THEIRS


def test_without_evidence_a_failure_waits_a_little():
    """The first of many to fail can't know; one success, or a period, tells that it is alone."""
    fault = noted(OwnFault(), [(b, True, 1.0) for b in BACKENDS])
    noted(fault, [(BACKENDS[0], False, 5.0)])
    assert fault.blame(5.0, 13.0, 8.0) == WAIT
    assert fault.blame(5.0, 13.0, 13.0) == THEIRS
    noted(fault, [(BACKENDS[1], True, 5.5)])
    assert fault.blame(5.0, 13.0, 8.0) == THEIRS


def test_a_small_installation_does_not_wait():
    """Fewer backends than could ever be evidence are acted on at once."""
    fault = noted(OwnFault(), [(b, True, 1.0) for b in BACKENDS[:5]])
    noted(fault, [(BACKENDS[0], False, 5.0)])
    assert fault.blame(5.0, 13.0, 5.1) == THEIRS


def test_a_fault_is_over_when_some_answer_again():
    """And what was running meanwhile is forgotten, so that nobody falls with the last run."""
    fault = noted(OwnFault(), [(b, False, 5.0) for b in BACKENDS])
    assert not fault.over()
    noted(fault, [(b, True, 6.0) for b in BACKENDS[:2]])
    assert fault.over()
    fault.reset()
    assert fault.over(), "nothing is left to tell"
    made = opinion(CHECK, said=HEALTHY)
    feed(made, CHECK, "-----")
    made.restart()
    assert made.state == HEALTHY
    assert feed(made, CHECK, "--") == HEALTHY
    assert feed(made, CHECK, "-") == UNHEALTHY
