"""What is written, how each write goes, and what an answer of the API server brings."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final, NamedTuple, TypeAlias

import msgspec

from schema import objects
from schema.subjects import ObjectRef
from services.applier.documents import Mark
from services.applier.shapes import Announcing

EAGER_REPAIRS: Final = 3  # foreign changes that are undone at once
CONTESTED_REPAIRS: Final = 5  # from here on a person is told
CALM_S: Final = 30.0  # without a foreign change for this and twice the delay, it starts anew
REPAIR_CAP_S: Final = 300.0

View: TypeAlias = (
    objects.LoadBalancer | objects.IPPool | objects.Service | objects.EndpointSlice | objects.Pod
)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    announcing: Announcing = Announcing()
    echo_s: float = 0.2
    undecided_s: float = 2.0
    pool_status_s: float = 1.0
    pool_map_entries: int = 1000
    backend_entries: int = 100


class Key(NamedTuple):
    """One thing that is written on its own: an object, its status, or its finalizers."""

    plural: str
    namespace: str
    name: str
    part: str = ""  # "" | status | finalizers

    @property
    def ref(self) -> ObjectRef:
        return ObjectRef(self.plural, self.namespace, self.name)


class Target(msgspec.Struct, omit_defaults=True):
    """How writing one thing goes. `digest` is what was tried last, `applied` what succeeded."""

    digest: str = ""
    applied: str = ""
    attempts: int = 0
    next_at: datetime | None = None
    reason: str = ""  # of the last failure
    message: str = ""
    repairs: int = 0
    repaired_at: datetime | None = None
    written_at: datetime | None = None

    def contested(self, now: datetime) -> bool:
        """Whether somebody else keeps undoing what we write."""
        return self.repairs >= CONTESTED_REPAIRS and now < self.calm_at(now)

    def calm_at(self, now: datetime) -> datetime:
        """When the count of foreign changes starts anew."""
        if self.repaired_at is None:
            return now
        return self.repaired_at + timedelta(seconds=CALM_S + 2 * repair_delay(self.repairs))


class Absent(msgspec.Struct, frozen=True):
    """The API server said that there is no such object."""


ABSENT: Final = Absent()


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one write. `seen` is the object as the server answered it, ABSENT if gone."""

    key: Key
    entity: str
    digest: str
    at: datetime
    outcome: str  # written | deleted | conflict | gone | failed
    seen: View | Absent | None = None
    reason: str = ""
    message: str = ""
    retry_in: float = 0.0
    repair: bool = False
    marks: dict[str, Mark] | None = None
    noticed: str = ""
    pruned: tuple[str, ...] = ()


def newer(one: View, other: View) -> bool:
    """Whether `one` is a later version than `other` (of one name; another uid is later too)."""
    a, b = one.metadata.resource_version, other.metadata.resource_version
    if a.isdecimal() and b.isdecimal():
        return int(a) > int(b)
    return bool(a) and a != b


def same_content(one: View, other: View) -> bool:
    def bare(view: View) -> View:
        return msgspec.structs.replace(
            view, metadata=msgspec.structs.replace(view.metadata, resource_version="")
        )

    return bare(one) == bare(other)


def repair_delay(repairs: int) -> float:
    """Seconds to wait before undoing the next foreign change."""
    if repairs < EAGER_REPAIRS:
        return 0.0
    return min(REPAIR_CAP_S, 2.0 ** (repairs - EAGER_REPAIRS))
