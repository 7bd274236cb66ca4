"""What differs from what was stored last: the account that a state keeps for whoever stores it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from schema import events
from services.allocator.core.model import Lease, Owner
from services.allocator.core.space import Memo


class Granted(NamedTuple):
    """A lease that began, as the ledger keeps it."""

    said: events.LeaseGranted | events.LeaseAdopted
    at: datetime  # in a replay it may be later than when it was said
    cause: str


class Closed(NamedTuple):
    id: str
    at: datetime
    reason: str
    cause: str


@dataclass(slots=True)
class Changes:
    """What differs from what was stored last."""

    owners: dict[Owner, None] = field(default_factory=dict)
    granted: dict[Lease, Granted] = field(default_factory=dict)
    ended: dict[Lease, Closed] = field(default_factory=dict)  # of those
    closed: list[Closed] = field(default_factory=list)
    altered: dict[Lease, None] = field(default_factory=dict)  # other ports, or retiring
    pools: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)  # pools with another last address
    projects: set[str] = field(default_factory=set)
    memos: dict[tuple[str, int], Memo | None] = field(default_factory=dict)
    marks: set[str] = field(default_factory=set)
    clock: bool = False

    def __bool__(self) -> bool:
        return bool(
            self.owners
            or self.granted
            or self.closed
            or self.altered
            or self.pools
            or self.used
            or self.projects
            or self.memos
            or self.marks
            or self.clock
        )
