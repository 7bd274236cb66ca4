"""Which facts the stream still lacks, given what it last said about an object and what was seen.

`decide(known, seen)` compares one observation with the last message of the object's subject and
returns the facts to publish, in order; `Fact.after` is what is known once a fact is acknowledged.
Both are pure: the same two inputs give the same facts in every watcher and after every restart,
which is what lets two watchers run at once and a new one go on where an old one died.

Guarantees, for any interleaving of lists, events, replays and restarts:
- a change of the trimmed view is a fact, anything else (heartbeats, managedFields) is none;
- what is older than the last fact of the same subject is never published after it;
- another uid under a known name is a tombstone for the old one, then the new one;
- an object is only missing when a complete list says so that is not older than the last fact.

It refuses to guess: an object that does not fit its view is an ObjectUnfit, never half a fact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from hashlib import blake2b
from typing import Final, TypeAlias

import msgspec

from schema import subjects
from schema.events import SEEN, EpochStarted, Event, ObjectGone, ObjectUnfit, tag_of
from schema.objects import AnyObject
from schema.subjects import ObjectRef

GONE_TAG: Final = str(ObjectGone.__struct_config__.tag)
DIGEST_BYTES: Final = 16


class Known(msgspec.Struct, gc=False):
    """What the last message of one subject says; kept for every object, so it is small."""

    uid: str
    version: str  # the resourceVersion, moved on also by changes that were no facts
    digest: bytes  # of the trimmed view; empty when the fact has to be published again
    seq: int  # of the message; 0 when the stream holds none (any more)
    gone: bool = False


# --- observations -------------------------------------------------------------------------------


class Sight(msgspec.Struct, frozen=True):
    """An object as a list or an event showed it. Without a view it does not fit, see `problem`."""

    subject: str
    ref: ObjectRef
    uid: str
    version: str
    digest: bytes
    at: datetime
    view: AnyObject | None
    problem: str = ""
    excerpt: str = ""  # the beginning of an object that does not fit
    listing: Listing | None = None  # the list it came from; None: an event


class Deletion(msgspec.Struct, frozen=True):
    """A DELETED event."""

    subject: str
    ref: ObjectRef
    uid: str
    version: str
    at: datetime


class Absence(msgspec.Struct, frozen=True):
    """An object that a complete list did not hold."""

    subject: str
    ref: ObjectRef
    at: datetime
    listing: Listing


class Listing(msgspec.Struct, frozen=True):
    """The complete list that an observation belongs to.

    A list is at least as new as every fact that was known when it was asked for. If its version is
    lower nevertheless, the API server's store went back in time (`rewound`: restored from a
    backup), and what it shows holds although it looks old.
    """

    version: str
    rewound: bool = False


Observation: TypeAlias = Sight | Deletion | Absence


class Fact(msgspec.Struct):
    """One message to publish, and what is known when it is stored (its seq is then set)."""

    subject: str
    event: Event
    msg_id: str
    after: Known


# --- decisions ----------------------------------------------------------------------------------


def decide(known: Known | None, seen: Observation) -> tuple[Fact, ...]:
    """The facts that bring the subject in step with the observation; none when it is."""
    match seen:
        case Sight():
            return _decide_sight(known, seen)
        case Deletion():
            live = known is not None and not known.gone and known.uid == seen.uid
            if known is None or not live or newer(known.version, seen.version):
                return ()
            return (_tombstone(known, seen, "deleted", seen.version),)
        case Absence():
            # A uid of "" is a message that no watcher wrote: nothing of ours is gone with it.
            if known is None or not known.uid or _ahead(known, seen.listing):
                return ()
            if known.gone and not _from_the_future(known, seen.listing):
                return ()
            version = seen.listing.version or known.version
            return (_tombstone(known, seen, "vanished", version),)


def too_large(seen: Sight, size: int, limit: int, excerpt: str) -> Sight:
    """The observation in place of one that does not fit the bus in its smallest form either."""
    # In KiB: a few bytes more or less are no new reason.
    problem = (
        f"the trimmed object takes about {size // 1024 + 1} KiB in a message, the bus carries "
        f"{limit} bytes: make the object smaller or raise max_payload"
    )
    return msgspec.structs.replace(
        seen, view=None, problem=problem, digest=misfit_digest(problem), excerpt=excerpt
    )


def decide_unfit(known: Known | None, unfit: Sight) -> tuple[Fact, ...]:
    """What to say of an object that turned out too large when its fact was to be sent."""
    same = known is not None and not known.gone and known.uid == unfit.uid
    if same and known is not None and known.digest == unfit.digest:
        return ()
    return (_appearance(known, unfit),)


def misfit_digest(problem: str) -> bytes:
    """An object that stays unfit for the same reason is one fact, however often it changes."""
    return blake2b(problem.encode(), digest_size=DIGEST_BYTES, person=b"unfit").digest()


def _decide_sight(known: Known | None, seen: Sight) -> tuple[Fact, ...]:
    if known is None or not known.uid:
        return (_appearance(known, seen),)
    if seen.listing is not None:
        stale = _ahead(known, seen.listing)
    else:
        stale = not newer(seen.version, known.version)
    if stale:
        return ()
    if known.gone:
        return (_appearance(known, seen),)
    if known.uid == seen.uid:
        same = known.digest == seen.digest and not _from_the_future(known, seen.listing)
        return () if same else (_appearance(known, seen),)
    gone = _tombstone(known, seen, "replaced", known.version)
    return (gone, _appearance(gone.after, seen))


def quiet(known: Known | None, seen: Observation) -> None:
    """Take note of a change that was no fact: replays of what lies before it are then stale."""
    if (
        isinstance(seen, Sight)
        and known is not None
        and not known.gone
        and known.uid == seen.uid
        and known.digest == seen.digest
        and newer(seen.version, known.version)
    ):
        known.version = seen.version


def newer(a: str, b: str) -> bool:
    """Whether version `a` came after `b`; what is no number can only be told apart."""
    if a.isdecimal() and b.isdecimal():
        return int(a) > int(b)
    return a != b


def overtaken(ours: Known | None, theirs: Known) -> bool:
    """Whether the truth is to be listed: somebody else's last message is older than what we saw,
    of another epoch, or no fact at all."""
    if not theirs.gone and not theirs.digest:
        return True
    if ours is None or not ours.uid:
        return False
    same = (ours.uid, ours.gone, ours.digest) == (theirs.uid, theirs.gone, theirs.digest)
    return not same and not newer(theirs.version, ours.version)


def list_of(version: str, known_before: str) -> Listing:
    """A list of that version, asked for when `known_before` was the newest version known."""
    rewound = version.isdecimal() and known_before.isdecimal() and newer(known_before, version)
    return Listing(version, rewound)


def newest(versions: Iterable[str]) -> str:
    """The newest of some versions, as far as they are numbers."""
    return str(max((int(v) for v in versions if v.isdecimal()), default=""))


def _ahead(known: Known, listing: Listing) -> bool:
    """Whether the fact is from after the list: another watcher was faster."""
    if listing.rewound or not known.version.isdecimal() or not listing.version.isdecimal():
        return False
    return newer(known.version, listing.version)


def _from_the_future(known: Known, listing: Listing | None) -> bool:
    """Whether the fact has a version that a store, put back, will reach again: it has to be said
    with a lower one, or what comes would look old to every watcher."""
    return listing is not None and listing.rewound and newer(known.version, listing.version)


def _appearance(known: Known | None, seen: Sight) -> Fact:
    ref = seen.ref
    if seen.view is not None:
        event: Event = SEEN[ref.plural](at=seen.at, object=seen.view)
    else:
        event = ObjectUnfit(
            at=seen.at,
            plural=ref.plural,
            namespace=ref.namespace,
            name=ref.name,
            uid=seen.uid,
            resource_version=seen.version,
            problem=seen.problem,
        )
    return Fact(
        seen.subject,
        event,
        message_id(known, seen.uid, seen.version, tag_of(event)),
        Known(seen.uid, seen.version, seen.digest, 0),
    )


def _tombstone(known: Known, seen: Observation, reason: str, version: str) -> Fact:
    ref = seen.ref
    event = ObjectGone(
        at=seen.at,
        plural=ref.plural,
        namespace=ref.namespace,
        name=ref.name,
        uid=known.uid,
        resource_version=version,
        reason=reason,
    )
    return Fact(
        seen.subject,
        event,
        message_id(known, known.uid, version, GONE_TAG),
        Known(known.uid, version, b"", 0, gone=True),
    )


# --- what a message says, and says again --------------------------------------------------------


def message_id(known: Known | None, uid: str, version: str, tag: str) -> str:
    """`<uid>:<resourceVersion>:<type>`.

    A version that is not above the last one may have been said before, within the window in which
    the server drops a repeated id: then the place in the chain is added.
    """
    plain = f"{uid}:{version}:{tag}"
    if known is None or newer(version, known.version):
        return plain
    return f"{plain}:{known.seq}"


def repeated_id(msg_id: str, seq: int) -> str:
    """The id under which the message at `seq` is published once more, unchanged."""
    return f"{':'.join(msg_id.split(':')[:3])}:again:{seq}"


def headers_of(fact: Fact, epoch: str) -> dict[str, str]:
    """Enough for a later watcher to go on from headers alone."""
    headers = {
        subjects.HEADER_EPOCH: epoch,
        subjects.HEADER_TYPE: tag_of(fact.event),
        subjects.HEADER_UID: fact.after.uid,
    }
    if not fact.after.gone:
        headers[subjects.HEADER_DIGEST] = fact.after.digest.hex()
    return headers


def known_of(headers: Mapping[str, str], seq: int, epoch: str) -> Known:
    """What the last message of a subject says. A fact of another epoch is to be said again."""
    parts = headers.get(subjects.HEADER_MSG_ID, "").split(":")
    digest = b""
    if headers.get(subjects.HEADER_EPOCH) == epoch:
        try:
            digest = bytes.fromhex(headers.get(subjects.HEADER_DIGEST, ""))
        except ValueError:
            digest = b""
    return Known(
        uid=headers.get(subjects.HEADER_UID, ""),
        version=parts[1] if len(parts) > 2 else "",
        digest=digest,
        seq=seq,
        gone=headers.get(subjects.HEADER_TYPE) == GONE_TAG,
    )


# --- epochs -------------------------------------------------------------------------------------


class Stream(msgspec.Struct, frozen=True):
    """What the server says of the stream."""

    created: str
    last_seq: int


class Memory(msgspec.Struct):
    """What this process knows of the stream from before."""

    created: str = ""
    top: int = 0  # the highest sequence that was acknowledged or read
    epoch: str = ""
    past: frozenset[str] = frozenset()  # epochs that ended, as far as known


def loss(memory: Memory, stream: Stream) -> str:
    """Why the stream can't be the one that we wrote to; "" when it can."""
    if memory.created and memory.created != stream.created:
        return "the stream was created anew"
    if stream.last_seq < memory.top:
        return f"messages were lost: the last sequence is {stream.last_seq}, was {memory.top}"
    return ""


def judge(memory: Memory, stream: Stream, last: EpochStarted | None, reason: str = "") -> str:
    """Why a new epoch has to begin; "" when the one that the stream states goes on.

    `reason`: a loss that was noticed otherwise. An epoch that another watcher began after the loss
    is taken over.
    """
    if last is None:
        return reason or loss(memory, stream) or "the stream says of no epoch"
    if last.created and last.created != stream.created:
        return "the stream was restored from another one"
    lost = reason or loss(memory, stream)
    return lost if last.epoch == memory.epoch or last.epoch in memory.past else ""
