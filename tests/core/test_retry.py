"""The waits of endless loops."""

import pytest

from services.kit.retry import Backoff


def test_delays_grow_to_the_cap_with_jitter() -> None:
    """Each delay lies in the upper half of its interval, which doubles up to the cap."""
    backoff = Backoff(0.1, 1.0)
    for interval in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert interval / 2 <= backoff.delay() <= interval
    assert backoff.attempts == 6


def test_delays_differ_between_processes_that_failed_together() -> None:
    """Two waits of the same length do not end together."""
    assert Backoff().delay() != Backoff().delay()


def test_reset_begins_anew() -> None:
    """After a success the next failure waits shortly again."""
    backoff = Backoff(0.1, 10.0)
    for _ in range(5):
        backoff.delay()
    backoff.reset()
    assert backoff.attempts == 0
    assert backoff.delay() <= 0.1


@pytest.mark.parametrize(
    "options", [{"first": 0}, {"first": 5, "cap": 1}, {"factor": 0.5}], ids=str
)
def test_nonsense_is_refused(options: dict[str, float]) -> None:
    """A backoff that would spin or shrink is an error with its values."""
    with pytest.raises(ValueError, match="need 0 < first"):
        Backoff(**options)
