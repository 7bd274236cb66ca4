"""How long Postgres is asked to wait for a sign of the active replica before it frees its lock.

Briefly, so that a replica that is frozen is soon replaced. One that is only busy must not lose the
lock again and again, though, since the next one would have as much to do: while it reads its state
it has more time, and after each time that it was too late it has twice as much, for a while. Pure,
times as inputs.
"""

from __future__ import annotations

from typing import Final

MOST: Final = 8  # times the bound
CALM_S: Final = 600.0


class Patience:
    """`given` is what the server was told last, in seconds."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._times = 1
        self._late = float("-inf")
        self.given = silence_s * MOST

    def give(self, *, active: bool) -> float:
        """What to tell the server now; `active`: the state is read, the work has begun."""
        self.given = self._silence_s * (self._times if active else MOST)
        return self.given

    def silent(self, for_s: float, now: float) -> None:
        """Nothing was said for so long, until now."""
        if for_s > self.given:
            self._times, self._late = min(2 * self._times, MOST), now
        elif now - self._late > CALM_S:
            self._times = 1
