"""Dead letters of the watcher: objects that exist and can't be said, on `lb.dead.watcher`.

Each goes out after the ObjectUnfit fact that it belongs to and names its sequence. Nobody waits for
one; while the stream is away a bounded number waits, and what is beyond that is a log line.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Final

import structlog

from schema import events, subjects
from services.kit.bus import Bus, Published
from services.watcher.reading import EXCERPT

ROOM: Final = 1000
SUBJECT: Final = subjects.dead_subject("watcher")
log = structlog.get_logger()


class DeadLetters:
    def __init__(self, bus: Bus, epoch: str) -> None:
        self._epoch = epoch
        self._publisher = bus.publisher("LB")

    def send(self, reason: str, subject: str, payload: str, seq: int, msg_id: str) -> None:
        """Hand over one dead letter about the message at `seq` of the KUBE stream."""
        if self._publisher.pending >= ROOM:
            log.warning("watcher.dead_letter.dropped", subject=subject, reason=reason)
            return
        event = events.DeadLettered(
            at=datetime.now(UTC),
            service="watcher",
            stream="KUBE",
            sequence=seq,
            subject=subject,
            reason=reason,
            payload=payload[:EXCERPT],
        )
        headers = {
            subjects.HEADER_EPOCH: self._epoch,
            subjects.HEADER_TYPE: events.tag_of(event),
            subjects.HEADER_CAUSE: f"{self._epoch}:{seq}",
        }
        self._publisher.submit(
            SUBJECT, events.encode(event), headers, msg_id=f"watcher:{msg_id}"
        ).add_done_callback(_note)

    async def drain(self, timeout: float) -> None:
        await self._publisher.drain(timeout)

    async def close(self) -> None:
        await self._publisher.close()


def _note(future: asyncio.Future[Published]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.warning("watcher.dead_letter.unsent", why=str(error))
