"""What replicas of the prober say to each other, over plain NATS subjects (nothing is stored).

| subject | from, to | content |
|---|---|---|
| `prober.v1.call` | the active one to all | it is there, and who has a share |
| `prober.v1.hello` | another to the active one | it is there, and how far it knows its share |
| `prober.v1.share.<replica>` | the active one to another | what to check: a part, or what changed |
| `prober.v1.seen.<replica>` | another to the active one | results |

Every message can be lost: a share is numbered, and sent whole when a hello tells a gap; results are
numbered by assignment, so that those of what somebody else checks by now, or nobody, find nothing.
Clocks of two machines never meet: results tell how long ago a check was started.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, TypeVar

import msgspec

from services.prober.plan import Check

CALL: Final = "prober.v1.call"
HELLO: Final = "prober.v1.hello"
SHARE: Final = "prober.v1.share."
SEEN: Final = "prober.v1.seen."
MAX_BYTES: Final = 256 * 1024
MAX_REASON: Final = 256
SEEN_AT_ONCE: Final = 4_000  # about 100 KB
_ITEM_BYTES: Final = 96  # at most, of one assignment without its check
_FRAME_BYTES: Final = 512
ANYWHEN: Final = -1.0


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """`session` is one time of being active: it names everything that is said in it."""

    session: str
    replica: str
    shares: list[str]  # replicas that have one


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    session: str
    replica: str
    run: int = 0  # of the share that it has; 0: it has none
    have: int = 0  # the last message of that run
    leaving: bool = False


class Assignment(NamedTuple):
    """Check number `check` of the message, at this address and port. `wait` is in seconds, until
    the first time; below 0: somewhere within the period, or as before if it is known."""

    number: int
    check: int
    address: str
    port: int
    wait: float


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Message number `seq` of a run; the first of a run begin with nothing, up to `last`."""

    session: str
    run: int
    seq: int
    fresh: bool = False
    last: bool = True
    checks: list[Check] = []
    add: list[Assignment] = []
    drop: list[int] = []


class Result(NamedTuple):
    """Of an assignment, `age` seconds after the start of the check; `what` is an index."""

    number: int
    age: float
    what: int


class What(NamedTuple):
    ok: bool
    reason: str
    local: bool


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    session: str
    replica: str
    results: list[Result]
    what: list[What]


Word = Call | Hello | Share | Seen
W = TypeVar("W", Call, Hello, Share, Seen)
encode = msgspec.json.Encoder().encode


class Task(NamedTuple):
    """An assignment with its check."""

    number: int
    check: Check
    address: str
    port: int
    wait: float


def parts(tasks: Iterable[Task], limit: int) -> Iterator[tuple[list[Check], list[Assignment]]]:
    """Checks and assignments for one message each, none of them over `limit` bytes."""
    checks: dict[Check, int] = {}
    listed: list[Assignment] = []
    room = limit - _FRAME_BYTES
    size = 0
    for task in tasks:
        new = 0 if task.check in checks else len(encode(task.check)) + 1
        if listed and size + new + _ITEM_BYTES > room:
            yield list(checks), listed
            checks, listed, size = {}, [], 0
            new = len(encode(task.check)) + 1
        index = checks.setdefault(task.check, len(checks))
        size += new + _ITEM_BYTES
        listed.append(Assignment(task.number, index, task.address, task.port, task.wait))
    if listed:
        yield list(checks), listed
