"""Faults on order: what makes this server a good place to test clients of a bad one.

Rules are taken in the order they were added; a rule that is used up is gone. Requests are
counted by verb and resource whether they fail or not.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from sandbox.kube.errors import ApiError

Cut = Literal["clean", "midline", "hang", "error"]
CUTS: tuple[Cut, ...] = ("clean", "midline", "hang", "error")


@dataclass(slots=True)
class Fault:
    """What happens to the next `times` requests that match.

    With `status` they are refused; with `drop` the connection is cut, before the request takes
    effect or (`drop="after"`) once it has, so that the answer is lost; with only `latency` they
    are answered late.
    """

    verb: str = ""
    path: str = ""
    times: int = 1
    status: int = 0
    reason: str = ""
    message: str = "refused by order of a test"
    retry_after: float | None = None
    latency: float = 0.0
    drop: str = ""

    def __post_init__(self) -> None:
        if self.drop not in ("", "before", "after"):
            raise ValueError(f"drop is {self.drop!r}; it must be 'before' or 'after'")
        if self.status and not 400 <= self.status < 600:
            raise ValueError(f"status is {self.status}; it must be between 400 and 599")
        re.compile(self.path)

    def matches(self, verb: str, path: str) -> bool:
        return (not self.verb or self.verb == verb) and bool(re.search(self.path, path))

    def error(self) -> ApiError:
        headers = {}
        details: dict[str, Any] = {}
        if self.retry_after is not None:
            headers["Retry-After"] = f"{self.retry_after:g}"
            details["retryAfterSeconds"] = int(self.retry_after)
        return ApiError(
            self.status, self.message, reason=self.reason, details=details, headers=headers
        )


@dataclass(slots=True)
class Faults:
    """The faults on order, and the counts of requests."""

    pending: list[Fault] = field(default_factory=list)
    #: Requests by (verb, plural or plural/subresource), since the start or the last reset.
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def fail(self, **settings: Any) -> Fault:
        """Order a fault, as `fail(verb="patch", path="/status$", status=409, times=2)`."""
        fault = Fault(**settings)
        self.pending.append(fault)
        return fault

    def clear(self) -> None:
        self.pending.clear()

    def take(self, verb: str, path: str) -> Fault | None:
        """The fault that hits this request, if any; used up once more by that."""
        for fault in self.pending:
            if fault.matches(verb, path):
                fault.times -= 1
                if fault.times <= 0:
                    self.pending.remove(fault)
                return fault
        return None

    def count(self, verb: str, noun: str) -> None:
        self.counts[verb, noun] += 1

    def writes(self) -> int:
        """How many writing requests there were."""
        reading = ("get", "list", "watch")
        return sum(n for (verb, _), n in self.counts.items() if verb not in reading)
