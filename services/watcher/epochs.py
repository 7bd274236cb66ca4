"""Whether the stream goes on from where it was, and the beginning of a new epoch when it does not.

The watcher owns the epoch: all facts of one epoch form one history, in which every object's chain
of sequences is unbroken. A term is the time during which one process may count on that. It begins
by reading what the stream last said of each object (from headers alone) and ends when the stream
turns out to be another one: created anew, restored, or with its tail lost.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Final

import msgspec
import structlog

from schema import events, subjects
from schema.subjects import StreamSpec
from services.kit import garbage
from services.kit.bus import Bus, BusError, StreamState, WrongLast
from services.watcher import core
from services.watcher.foreign import STREAM

ATTEMPTS: Final = 5
log = structlog.get_logger()


class Term(msgspec.Struct, frozen=True):
    """What a term begins with."""

    epoch: str
    state: StreamState
    known: dict[str, dict[str, core.Known]]


async def begin(
    bus: Bus, specs: list[StreamSpec], plurals: list[str], memory: core.Memory, reason: str
) -> Term:
    """Make sure of the streams and of the epoch; `memory` is brought up to date.

    `reason`: why the term before ended, when it ended by a loss. Raises BusError while the bus is
    not in order.
    """
    for spec in specs:
        await bus.ensure_stream(spec)
    epoch = await _epoch(bus, memory, reason)
    state = await bus.stream_state(STREAM)
    known: dict[str, dict[str, core.Known]] = {plural: {} for plural in plurals}
    with garbage.loading():
        async for message in bus.last_per_subject(
            STREAM, f"{subjects.KUBE_BRANCH}.>", headers_only=True
        ):
            ref = subjects.subject_ref(message.subject)
            if ref is not None and ref.plural in known:
                known[ref.plural][message.subject] = core.known_of(
                    message.headers, message.seq, epoch
                )
    memory.past |= {memory.epoch} - {"", epoch}
    memory.created, memory.epoch = state.created, epoch
    memory.top = state.last_seq
    log.info(
        "watcher.term.began", epoch=epoch, last_seq=state.last_seq,
        objects=sum(map(len, known.values())),
    )  # fmt: skip
    return Term(epoch, state, known)


async def _epoch(bus: Bus, memory: core.Memory, reason: str) -> str:
    """The epoch that holds now; a new one is published when it has to be."""
    for _ in range(ATTEMPTS):
        state = await bus.stream_state(STREAM)
        stream = core.Stream(state.created, state.last_seq)
        message = await bus.last(STREAM, subjects.EPOCH_SUBJECT)
        last = _decoded(message.data) if message is not None else None
        why = core.judge(memory, stream, last, reason)
        if not why:
            assert last is not None  # or there would be a reason
            return last.epoch
        began = events.EpochStarted(
            at=datetime.now(UTC),
            epoch=secrets.token_hex(5),
            previous=last.epoch if last is not None else memory.epoch,
            reason=why,
            created=state.created,
        )
        try:
            await _publish(bus, began, message.seq if message is not None else 0)
        except WrongLast:
            continue  # another watcher was quicker; look at what it said
        log.warning("watcher.epoch.began", epoch=began.epoch, previous=began.previous, why=why)
        memory.past |= {began.previous} - {""}
        return began.epoch
    raise BusError(f"{subjects.EPOCH_SUBJECT} changes faster than it can be read")


async def _publish(bus: Bus, event: events.EpochStarted, expected: int) -> None:
    publisher = bus.publisher(STREAM, deadline=5.0)
    headers = {
        subjects.HEADER_EPOCH: event.epoch,
        subjects.HEADER_TYPE: events.tag_of(event),
    }
    try:
        await publisher.publish(
            subjects.EPOCH_SUBJECT, events.encode(event), headers,
            msg_id=f"epoch:{event.epoch}", expected=expected,
        )  # fmt: skip
    finally:
        await publisher.close()


def _decoded(data: bytes) -> events.EpochStarted | None:
    """The last epoch mark, or None for what is none."""
    try:
        event = events.decode(data)
    except ValueError:
        return None
    return event if isinstance(event, events.EpochStarted) else None
