"""Where a consumer stands in a stream, and what is done when the stream does not continue there.

A stream that was created anew is read from its start, a lost tail is given up (the watcher begins a
new epoch), and when retention overtook us, or a fact of one object is missing, the last message of
every subject is read: it is the compacted form of the log. The same is done when an epoch began
below our position that we never heard of: the tail was lost and has grown again. Reading it takes
more than one transaction; until the last of them, the fence row says that it is to be begun again.
A service without a past begins the same way: history is not decided again.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

import msgspec
import structlog

from schema import events, subjects
from schema.subjects import STREAMS, ObjectRef
from services.kit.batches import FENCE_ROW, Arrival, Batch, Committer, Offset, decode, read
from services.kit.bus import Bus, Message
from services.kit.records import Source, Work

log = structlog.get_logger()
CHUNK: Final = 500


async def state_again(committer: Committer, bus: Bus) -> None:
    """State the standing decisions again if LB is another stream now, or lost its tail."""
    state = await bus.stream_state("LB")
    offsets = dict(committer.offsets)
    known, outbox = offsets[FENCE_ROW].created, committer.outbox
    recreated = known != state.created
    if not recreated and not await outbox.acknowledged.lost(bus, state):
        return
    offsets[FENCE_ROW] = replace(offsets[FENCE_ROW], created=state.created)
    work = Work(committer.projection.name)
    if known:
        lost = "was re-created" if recreated else "lost its tail"
        log.warning("projector.restating", why=f"the LB stream {lost}")
        committer.projection.restate(work)
    outbox.acknowledged.forget(state.created)
    await committer.write(work, [], offsets)


def unfinished(committer: Committer) -> bool:
    """Whether reading the compacted log was begun and not ended."""
    return committer.offsets[FENCE_ROW].seq > 0


async def position(committer: Committer, bus: Bus, source: Source, *, reread: bool) -> int:
    """Compare the stored offset with the stream, heal what does not fit; returns where to start."""
    state = await bus.stream_state(source.stream)
    stream, offset = source.stream, committer.offsets[source.stream]
    # History is not decided again: a service without a past begins with what the log shows now.
    newborn = stream == "KUBE" and not offset.created and state.messages > 0
    if newborn:
        await _mark(committer, 1)
    if offset.created and offset.created != state.created:
        log.warning("projector.stream_recreated", stream=stream, was=offset.seq)
        offset = replace(offset, seq=0, created=state.created)
        await _move(committer, stream, offset)
    elif state.last_seq < offset.seq:
        log.warning("projector.tail_lost", stream=stream, was=offset.seq, now=state.last_seq)
        offset = replace(offset, seq=state.last_seq)
        await _move(committer, stream, offset)
    elif not offset.created:
        await _move(committer, stream, replace(offset, created=state.created))
    if (
        newborn
        or (reread and stream == "KUBE")  # decisions that were taken are never taken again
        or (0 < offset.seq < state.first_seq - 1)
        or await _missed_epoch(bus, source, offset)
    ):
        log.info("projector.rereading", stream=stream, was=offset.seq, first=state.first_seq)
        await _reread(committer, bus, source)
    seq = committer.offsets[stream].seq
    return seq + 1 if seq else max(1, state.first_seq)


async def _missed_epoch(bus: Bus, source: Source, offset: Offset) -> bool:
    if source.stream != "KUBE" or not offset.epoch or not offset.seq:
        return False
    mark = await bus.last(source.stream, subjects.EPOCH_SUBJECT)
    if mark is None or mark.seq > offset.seq:
        return False
    return mark.headers.get(subjects.HEADER_EPOCH, "") not in ("", offset.epoch)


async def _move(committer: Committer, stream: str, offset: Offset) -> None:
    await committer.write(
        Work(committer.projection.name), [], {**committer.offsets, stream: offset}
    )


async def _mark(committer: Committer, seq: int) -> None:
    await _move(committer, FENCE_ROW, replace(committer.offsets[FENCE_ROW], seq=seq))


async def _reread(committer: Committer, bus: Bus, source: Source) -> None:
    """Take the last message of every subject, then drop what the log does not show any more."""
    await _mark(committer, 1)
    state = await bus.stream_state(source.stream)
    seen: set[ObjectRef] = set()
    complete: set[str] = set()
    chunk: list[Arrival] = []
    start = committer.offsets[source.stream]
    for pattern in source.filters or STREAMS[source.stream].subjects:
        async for message in bus.last_per_subject(source.stream, pattern):
            ref = subjects.subject_ref(message.subject)
            if ref is not None:
                seen.add(ref)
            elif message.headers.get(subjects.HEADER_TYPE, "").startswith("SyncFinished"):
                complete.add(subjects.untoken(message.subject.rpartition(".")[2]))
            chunk.append(_snapshot(read(message)))
            if len(chunk) >= CHUNK:
                await committer.process(Batch(chunk, snapshot=True))
                chunk = []
    await committer.process(Batch(chunk, snapshot=True))
    if source.stream == "KUBE":
        await _drop_unseen(committer, seen, complete, state.last_seq)
    await _move(
        committer,
        source.stream,
        replace(committer.offsets[source.stream], seq=max(state.last_seq, start.seq)),
    )
    await _mark(committer, 0)


def _snapshot(arrival: Arrival) -> Arrival:
    if arrival.record is None:
        return arrival
    return arrival._replace(record=msgspec.structs.replace(arrival.record, snapshot=True))


async def _drop_unseen(
    committer: Committer,
    seen: set[ObjectRef],
    complete: set[str],
    seq: int,
) -> None:
    now = datetime.now(UTC)
    epoch = committer.offsets["KUBE"].epoch
    headers = f"NATS/1.0\r\n{subjects.HEADER_EPOCH}: {epoch}\r\n".encode()
    gone = []
    for ref, uid in committer.projection.known():
        if ref in seen or ref.plural not in complete:
            continue
        event = events.ObjectGone(at=now, **ref._asdict(), uid=uid, reason="vanished")
        subject = subjects.fact_subject(ref)
        message = Message("KUBE", subject, events.encode(event), headers, seq, 0)
        gone.append(_snapshot(Arrival(message, decode(message))))
    for start in range(0, len(gone), CHUNK):
        await committer.process(Batch(gone[start : start + CHUNK], snapshot=True))
