"""Where a consumer stands in a stream, and what is done when the stream does not continue there.

A stream that was created anew is read from its start, a lost tail is given up (the watcher begins a
new epoch), and when retention overtook us, or a fact of one object is missing, the last message of
every subject is read: it is the compacted form of the log.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

import msgspec
import structlog

from schema import events, subjects
from schema.subjects import STREAMS, ObjectRef
from services.kit.batches import FENCE_ROW, Committer, Offset, decode
from services.kit.bus import Bus, Message
from services.kit.mirror import next_epoch
from services.kit.records import Poison, Record, Source, Work

log = structlog.get_logger()
CHUNK: Final = 500


async def restate(committer: Committer, created: str) -> None:
    """The LB stream is another one than the last time: state the standing decisions in it."""
    offsets = dict(committer.offsets)
    known = offsets[FENCE_ROW].created
    offsets[FENCE_ROW] = replace(offsets[FENCE_ROW], created=created)
    work = Work(committer.projection.name)
    if known:
        log.warning("projector.restating", why="the LB stream was re-created")
        committer.projection.restate(work)
    await committer.write(work, [], offsets)


async def position(committer: Committer, bus: Bus, source: Source, *, reread: bool) -> int:
    """Compare the stored offset with the stream, heal what does not fit; returns where to start."""
    state = await bus.stream_state(source.stream)
    stream, offset = source.stream, committer.offsets[source.stream]
    if offset.created and offset.created != state.created:
        log.warning("projector.stream_recreated", stream=stream, was=offset.seq)
        offset = replace(offset, seq=0, created=state.created)
        await _move(committer, stream, offset)
    elif state.last_seq < offset.seq:
        log.warning("projector.tail_lost", stream=stream, was=offset.seq, now=state.last_seq)
        await _move(committer, stream, replace(offset, seq=state.last_seq))
    elif offset.seq and (reread or state.first_seq > offset.seq + 1):
        log.warning("projector.rereading", stream=stream, was=offset.seq, first=state.first_seq)
        await _reread(committer, bus, source)
    elif not offset.created:
        await _move(committer, stream, replace(offset, created=state.created))
    # A service that is born late starts where the log starts now.
    seq = committer.offsets[stream].seq
    return seq + 1 if seq else max(1, state.first_seq)


async def _move(committer: Committer, stream: str, offset: Offset) -> None:
    await committer.write(
        Work(committer.projection.name), [], {**committer.offsets, stream: offset}
    )


async def _reread(committer: Committer, bus: Bus, source: Source) -> None:
    """Take the last message of every subject, then drop what the log does not show any more."""
    state = await bus.stream_state(source.stream)
    seen: set[ObjectRef] = set()
    complete: set[str] = set()
    chunk: list[Message] = []
    start = committer.offsets[source.stream]
    for pattern in source.filters or STREAMS[source.stream].subjects:
        async for message in bus.last_per_subject(source.stream, pattern):
            ref = subjects.subject_ref(message.subject)
            if ref is not None:
                seen.add(ref)
            elif message.headers.get(subjects.HEADER_TYPE, "").startswith("SyncFinished"):
                complete.add(subjects.untoken(message.subject.rpartition(".")[2]))
            chunk.append(message)
            if len(chunk) >= CHUNK:
                await _take_snapshot(committer, chunk)
                chunk = []
    await _take_snapshot(committer, chunk)
    if source.stream == "KUBE":
        await _drop_unseen(committer, seen, complete, state.last_seq)
    await _move(
        committer,
        source.stream,
        replace(committer.offsets[source.stream], seq=max(state.last_seq, start.seq)),
    )


async def _take_snapshot(committer: Committer, chunk: list[Message]) -> None:
    work = Work(committer.projection.name)
    dead: list[tuple[Message, str]] = []
    offsets = dict(committer.offsets)
    for message in chunk:
        try:
            record = msgspec.structs.replace(decode(message), snapshot=True)
        except (msgspec.MsgspecError, ValueError):
            continue  # it was, or will be, a dead letter in its turn
        work.begin(record)
        try:
            committer.projection.apply(record, work)
        except Poison as poison:
            dead.append((message, str(poison)))
        before = offsets[message.stream]
        offsets[message.stream] = replace(before, epoch=next_epoch(before.epoch, record))
    committer.settle(work)
    await committer.write(work, dead, offsets)


async def _drop_unseen(
    committer: Committer,
    seen: set[ObjectRef],
    complete: set[str],
    seq: int,
) -> None:
    work = Work(committer.projection.name)
    now = datetime.now(UTC)
    epoch = committer.offsets["KUBE"].epoch
    for ref, uid in list(committer.projection.known()):
        if ref in seen or ref.plural not in complete:
            continue
        gone = events.ObjectGone(at=now, **ref._asdict(), uid=uid, reason="vanished")
        record = Record(
            stream="KUBE",
            seq=seq,
            subject=subjects.fact_subject(ref),
            epoch=epoch,
            event=gone,
            snapshot=True,
        )
        work.begin(record)
        committer.projection.apply(record, work)
    committer.settle(work)
    await committer.write(work, [], dict(committer.offsets))
