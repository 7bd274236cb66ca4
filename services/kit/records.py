"""What the projector hands to a service, and the words in which a service may refuse."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from schema.events import AnyEvent, Event
from schema.subjects import ObjectRef

# Writes into the caller's transaction what was taken out of a projection's memory.
Saver: TypeAlias = Callable[[AsyncConnection], Awaitable[None]]


class Source(NamedTuple):
    """A stream to follow, narrowed to some subjects (none: all of it)."""

    stream: str
    filters: tuple[str, ...] = ()


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One event from the bus, decoded.

    `expected` is the sequence of the message before it on the same subject, as the publisher
    stated it (-1 where it did not). `snapshot` marks a re-read of the compacted log.
    """

    stream: str
    seq: int
    subject: str
    epoch: str
    event: AnyEvent
    expected: int = -1
    snapshot: bool = False
    trace: str = ""
    origin: str = ""

    @property
    def cause(self) -> str:
        """The fact behind this event: itself, or what its own decision was caused by."""
        return self.origin or f"{self.epoch}:{self.seq}"


class Poison(Exception):
    """This one event can't be taken, for the reason in the text; it becomes a dead letter."""


class Hole(Exception):
    """A fact about one object is missing from the chain: the compacted log is to be read again."""

    def __init__(self, ref: ObjectRef, *, expected: int, known: int) -> None:
        super().__init__(
            f"{ref}: the fact says {expected} came before it, the last seen is {known}"
        )
        self.ref = ref


class Emitted(NamedTuple):
    """A decision on its way into the outbox."""

    event: Event
    cause: str
    msg_id: str
    trace: str


class Work:
    """What one batch will commit, besides the service's own rows."""

    def __init__(self, service: str) -> None:
        self.service = service
        self.emitted: list[Emitted] = []
        self._record: Record | None = None
        self._index = 0

    def begin(self, record: Record | None) -> None:
        """Set the record (None: an input of our own) that the next decisions come from."""
        self._record = record
        self._index = 0

    def emit(self, event: Event, cause: str = "") -> None:
        """Add a decision; its message id derives from the record that caused it."""
        record = self._record
        msg_id = ""
        if record is not None:
            cause = cause or record.cause
            msg_id = f"{self.service}:{record.stream}:{record.epoch}:{record.seq}:{self._index}"
            self._index += 1
        self.emitted.append(Emitted(event, cause, msg_id, record.trace if record else ""))


class Projection(Protocol):
    """What a service gives to the projector; see services.kit.projector for when each is called."""

    @property
    def name(self) -> str: ...

    @property
    def sources(self) -> tuple[Source, ...]: ...

    async def load(self, conn: AsyncConnection) -> None: ...

    def apply(self, record: Record, work: Work) -> None: ...

    def local(self, item: object, work: Work) -> None: ...

    async def save(self, conn: AsyncConnection) -> None: ...

    def restate(self, work: Work) -> None: ...

    def known(self) -> Iterable[tuple[ObjectRef, str]]: ...

    def committed(self) -> None: ...


@runtime_checkable
class Settling(Protocol):
    """A projection that decides once for a whole batch: called after its last record and item."""

    def settle(self, work: Work) -> None: ...


@runtime_checkable
class Detaching(Protocol):
    """A projection that can take what is to be stored out of its memory at once: it goes on with
    the next batch while that is being written."""

    def take_changes(self) -> Saver: ...
