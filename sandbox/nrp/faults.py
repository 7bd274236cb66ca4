"""Misbehaviour on command: which requests, how often, with what effect.

A plan is a list of faults. The first fault that matches a request and still has turns left is
used. Random faults draw from a generator with the plan's seed, so that a run can be repeated.
"""

import fnmatch
import random
import time
from typing import Any, Literal

import msgspec

from sandbox.nrp.arm import ArmError

Kind = Literal[
    "error",  # answer `status` and `code`; nothing is applied
    "applied_error",  # apply, then answer `status` and `code` (5xx: the client cannot know)
    "hang",  # never answer (until `seconds` are over); nothing is applied
    "applied_hang",  # apply, then never answer
    "drop",  # close the connection; nothing is applied
    "applied_drop",  # apply, then close the connection
    "truncate",  # apply, then send half of the answer and close
    "slow",  # only wait `seconds` before working on it
    "headers",  # 200 at once, with the headers of a long-running operation left on
    "bare",  # 200 without any body
    "async",  # 202 (or 201), done after `seconds`, to be polled
    "async_failed",  # 202, and the poll ends with 200 and an operation that failed
    "error_in_200",  # 200 whose body is an error; nothing is applied
    "no_address",  # a public IP is made without an address
]

_DEFAULTS = {
    429: ("TooManyRequests", "the request is throttled"),
    401: ("ExpiredAuthenticationToken", "the access token has expired"),
    403: ("AuthorizationFailed", "the client is not allowed to do this"),
    404: ("ResourceNotFound", "the resource was not found"),
    409: ("AnotherOperationInProgress", "another operation is in progress"),
    412: ("PreconditionFailed", "the etag does not match"),
    422: ("UnprocessableEntity", "the request cannot be processed"),
    500: ("InternalServerError", "an error occurred"),
    503: ("ServiceUnavailable", "the service is unavailable"),
}


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One entry of a plan. Every matcher that is set must fit."""

    kind: Kind
    op: str = "*"
    """Pattern of operation names: `update_services`, `put_*`, `list_*`, ..."""
    target: str = "*"
    """Pattern of the resource's name."""
    contains: str = ""
    """Text that the body must hold: a poisoned entry, wherever it is sent."""
    count: int | None = None
    """How many requests it takes; None: all."""
    skip: int = 0
    """How many matching requests pass before it begins."""
    probability: float = 1.0
    for_seconds: float | None = None
    """It ends so long after its first turn: "429 for 30 s"."""
    seconds: float = 0.0
    """How long it waits, hangs or works."""
    status: int = 500
    code: str = ""
    message: str = ""
    retry_after: float | None = None

    def error(self) -> ArmError:
        """The error that it stands for."""
        code, message = _DEFAULTS.get(self.status, ("BadRequest", "the request is refused"))
        return ArmError(
            self.status,
            self.code or code,
            self.message or message,
            retry_after=self.retry_after,
        )


class Plan(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the admin endpoint takes: the faults in order of precedence, a seed, a latency."""

    faults: list[Fault] = []
    seed: int = 0
    latency: float = 0.0
    """Seconds that every request takes at least."""
    jitter: float = 0.0
    """Seconds on top, at most, drawn evenly."""


class _Turns:
    __slots__ = ("first", "matched", "used")

    def __init__(self) -> None:
        self.matched = 0
        self.used = 0
        self.first: float | None = None


class Faults:
    """The plan in force and how far it has got."""

    def __init__(self, plan: Plan | None = None) -> None:
        self.set(plan or Plan())

    def set(self, plan: Plan) -> None:
        """Replace the plan; counting and the random generator begin again."""
        self.plan = plan
        self._turns = [_Turns() for _ in plan.faults]
        self._random = random.Random(plan.seed)

    def add(self, *faults: Fault) -> None:
        """Append faults; those that are there go on counting."""
        self.plan.faults.extend(faults)
        self._turns.extend(_Turns() for _ in faults)

    def latency(self) -> float:
        """Seconds that this request takes before anything else."""
        return self.plan.latency + self._random.random() * self.plan.jitter

    def match(self, op: str, target: str, body: bytes) -> Fault | None:
        """The fault of this request, if it meets one."""
        for fault, turns in zip(self.plan.faults, self._turns, strict=True):
            if not fnmatch.fnmatchcase(op, fault.op) or not fnmatch.fnmatchcase(
                target.lower(), fault.target.lower()
            ):
                continue
            if fault.contains and fault.contains.encode() not in body:
                continue
            if self._takes_turn(fault, turns):
                return fault
        return None

    def _takes_turn(self, fault: Fault, turns: _Turns) -> bool:
        turns.matched += 1
        if turns.matched <= fault.skip or (fault.count is not None and turns.used >= fault.count):
            return False
        now = time.monotonic()
        first = now if turns.first is None else turns.first
        if fault.for_seconds is not None and now > first + fault.for_seconds:
            return False
        if fault.probability < 1.0 and self._random.random() >= fault.probability:
            return False
        turns.used += 1
        turns.first = first
        return True

    def shown(self) -> dict[str, Any]:
        """The plan and how often each fault was used, for the admin page."""
        doc: dict[str, Any] = msgspec.to_builtins(self.plan)
        for entry, turns in zip(doc["faults"], self._turns, strict=True):
            entry["used"] = turns.used
        return doc
