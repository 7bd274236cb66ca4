"""How long the server waits for the active replica: longer for a busy one than for a frozen one."""

from services.kit.patience import CALM_S, MOST, Patience


def test_an_active_replica_has_the_bound_and_one_that_reads_its_state_has_more():
    """Before it is active there may be millions of rows to read."""
    patience = Patience(4.0)
    assert [patience.give(active=active) for active in (False, True)] == [4.0 * MOST, 4.0]


def test_a_busy_replica_does_not_lose_the_lock_for_ever():
    """It has twice as long after each time, up to a bound, until it was in time for a while."""
    patience = Patience(4.0)
    given = []
    for turn in range(5):
        given.append(patience.give(active=True))
        patience.silent(given[-1] + 1, now=100.0 * turn)
    assert given == [4.0, 8.0, 16.0, 32.0, 32.0]
    patience.silent(1.0, now=400.0 + CALM_S - 1)
    assert patience.give(active=True) == 32.0
    patience.silent(1.0, now=400.0 + CALM_S + 1)
    assert patience.give(active=True) == 4.0
