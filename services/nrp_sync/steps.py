"""The words of an operation: its phases, its sub-steps, what they leave, how they fail.

Closed sets, the same in memory, in the rows and in the events.
"""

from __future__ import annotations

import zlib
from enum import StrEnum
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from services.nrp_sync.wishes import Spec

BALANCER: Final = "balancer"
REGISTRATION: Final = "registration"
POOL: Final = "pool"
"""The reference from the registration to what it feeds; parted from before either is deleted."""


class Phase(StrEnum):
    NOT_STARTED = "not_started"
    CREATING = "creation_in_progress"
    CREATED = "created"
    UPDATING = "update_in_progress"
    DRAINING = "deletion_pending"
    DELETING = "deletion_in_progress"


class Mark(StrEnum):
    """Whether the provider has a resource of ours. A resource without mark is not there."""

    MAYBE = "maybe"
    YES = "yes"


class Verb(StrEnum):
    PUT_PUBLIC_IP = "put_public_ip"
    PUT_BALANCER = "put_balancer"
    REGISTER = "register"
    CLEAR = "clear"
    DETACH = "detach"
    UNREGISTER = "unregister"
    DELETE_BALANCER = "delete_balancer"
    DELETE_PUBLIC_IP = "delete_public_ip"


BATCHED: Final = (Verb.REGISTER, Verb.CLEAR, Verb.UNREGISTER)
REMOVING: Final = (
    Verb.CLEAR,
    Verb.DETACH,
    Verb.UNREGISTER,
    Verb.DELETE_BALANCER,
    Verb.DELETE_PUBLIC_IP,
)

PARTING_TRIES: Final = 2
Park: TypeAlias = Literal["", "rejected", "quota_exceeded", "retries_exceeded"]


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sub-step, with what it carries. `resource` is the key of the mark it settles."""

    verb: Verb
    resource: str
    generation: int
    spec: Spec | None = None


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a request ended that did not succeed.

    `kind`: throttled, conflict, precondition_failed, in_use, not_found, invalid, quota_exceeded,
    overlay_mappings, auth_failed, unreachable, unreadable, unknown (it may have been applied).
    """

    kind: str
    code: str
    message: str
    retry_after: float | None = None
    provider_request: str = ""
    metric: str = "unknown"


class Before(NamedTuple):
    """What the provider had before a sub-step was sent."""

    marks: dict[str, Mark]
    applied: Spec | None


class Retrying(NamedTuple):
    """Backoff(n) = first * 2^(n-1) up to `cap`, plus up to a fifth; then a park of `cooldown`."""

    first: float = 1.0
    cap: float = 30.0
    tries: int = 12
    cooldown: float = 300.0

    def backoff(self, attempt: int, seed: str) -> float:
        delay = min(self.first * 2.0 ** min(attempt - 1, 30), self.cap)
        spread = zlib.crc32(f"{seed}:{attempt}".encode()) / 0xFFFF_FFFF
        return delay * (1.0 + spread / 5.0)
