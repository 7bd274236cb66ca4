"""Messages on our subjects that this process did not write: read, and told from a loss.

Another watcher that was quicker leaves a message above the one we knew. If instead the message that
we knew is gone, retention took it, which is fine, or the stream lost it, which ends the term.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from schema import subjects
from services.kit.bus import Bus, BusError, WrongLast
from services.kit.retry import Backoff
from services.watcher import core

STREAM: Final = "KUBE"
log = structlog.get_logger()


class Foreign:
    def __init__(self, bus: Bus, epoch: str, lost: Callable[[str], None]) -> None:
        self._bus = bus
        self._epoch = epoch
        self._lost = lost

    async def read(self, error: WrongLast, top: int) -> core.Known | None:
        """What the last message of a subject says; None when retention took ours.

        Waits for as long as the bus is away. `top`: the highest sequence known to be stored.
        """
        backoff = Backoff(0.05, 5.0)
        while True:
            try:
                if error.last <= error.expected:
                    await self._check_pruned(error, top)
                    return None
                message = await self._bus.last(STREAM, error.subject)
                if message is not None and message.seq >= error.last:
                    if message.headers.get(subjects.HEADER_EPOCH) != self._epoch:
                        await self._check_epoch()
                    return core.known_of(message.headers, message.seq, self._epoch)
            except BusError as trouble:
                log.warning("watcher.conflict.unread", subject=error.subject, why=str(trouble))
            await backoff.wait()  # the bus is away, or a replica is behind

    async def _check_epoch(self) -> None:
        """A message of another epoch: did somebody begin one, or is it a straggler?"""
        last = await self._bus.last(STREAM, subjects.EPOCH_SUBJECT)
        if last is not None and last.headers.get(subjects.HEADER_EPOCH) != self._epoch:
            self._lost("another watcher began an epoch")

    async def _check_pruned(self, error: WrongLast, top: int) -> None:
        state = await self._bus.stream_state(STREAM)
        if error.last or state.first_seq <= error.expected or state.last_seq < top:
            self._lost(f"{error.subject}: last is {error.last}, was {error.expected}")
