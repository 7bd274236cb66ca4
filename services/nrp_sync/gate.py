"""What keeps us from asking a provider that has told us to wait.

One gate for each family of operations and each direction (reading, writing). A throttled answer
closes its gate until the time that the provider named; meanwhile requests fail here, at once and
unsent. An optional rate keeps us below a limit of our own.
"""

import time
from collections.abc import Callable


class GateClosed(Exception):
    """Nothing was sent; worth trying again after so many seconds."""

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"closed for another {retry_after:.1f} s")
        self.retry_after = retry_after


class Gates:
    """All gates of one client."""

    def __init__(self, rate: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._closed_until: dict[str, float] = {}
        self._tokens: dict[str, tuple[float, float]] = {}

    def enter(self, name: str) -> None:
        """Pass, or raise GateClosed."""
        now = self._clock()
        wait = self._closed_until.get(name, now) - now
        if wait > 0:
            raise GateClosed(wait)
        if self._rate > 0:
            self._take_token(name, now)

    def close(self, name: str, seconds: float) -> None:
        """Nobody passes for so long. An earlier, longer closing stays."""
        until = self._clock() + seconds
        self._closed_until[name] = max(until, self._closed_until.get(name, until))

    def _take_token(self, name: str, now: float) -> None:
        burst = max(1.0, self._rate)
        tokens, since = self._tokens.get(name, (burst, now))
        tokens = min(burst, tokens + (now - since) * self._rate)
        if tokens < 1.0:
            self._tokens[name] = (tokens, now)
            raise GateClosed((1.0 - tokens) / self._rate)
        self._tokens[name] = (tokens - 1.0, now)
