"""The ordered reader: every message after a position, in order, across whatever happens between.

Consumers are cheap and disposable: after a reconnect, a hole, a deletion or a silence another one
is made that begins after the last message handed out, so the caller sees one unbroken sequence.
Before that, the stream is looked at: when it can no longer continue there (another stream of the
same name, a lost tail, pruned beyond the position), `fetch` raises Gap, for good. A server numbers
anew after it lost a tail, so the last message handed out is compared too, not only its number.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog

from services.kit import bus_streams
from services.kit.bus_consumer import Consumer
from services.kit.bus_link import Link
from services.kit.bus_streams import JetStreamError
from services.kit.bus_types import (
    BusError,
    Gap,
    GapKind,
    Message,
    StreamMissing,
    StreamState,
    Unavailable,
)
from services.kit.retry import Backoff

_TOO_MANY_CONSUMERS: Final = 10026
_log = structlog.get_logger()


class Puller:
    """One position in one stream. `lag`: messages left on the server, as seen (-1: not yet)."""

    def __init__(
        self,
        link: Link,
        stream: str,
        *,
        start_seq: int,
        filters: Sequence[str] = (),
        name: str,
        created: str | None = None,
    ) -> None:
        if start_seq < 1:
            raise BusError(f"start_seq is {start_seq} (must be at least 1)")
        self._link, self._stream, self._filters, self._name = link, stream, filters, name
        self.position = start_seq - 1
        self.lag = -1
        self._created = created
        self._last: Message | None = None
        self._consumer: Consumer | None = None
        self._building: asyncio.Task[Consumer] | None = None
        self._missing: StreamMissing | None = None
        self._failed: BusError | None = None

    async def fetch(self, max_messages: int = 500, timeout: float = 1.0) -> list[Message]:
        """What is there, waiting only for the first; nothing after the time is no error.

        Raises Gap when the stream does not continue at the position, StreamMissing when there was
        no stream for the whole time.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            consumer = self._consumer
            if consumer is None or consumer.broken:
                if not await self._rebuilt(deadline - loop.time()):
                    return []
                continue
            await consumer.wait(max(deadline - loop.time(), 0))
            found = consumer.take(max_messages)
            self.lag = consumer.lag
            if found:
                self._last = found[-1]
                self.position = self._last.seq
                return found
            if not consumer.broken and loop.time() >= deadline:
                return []

    async def close(self) -> None:
        """Delete the consumer."""
        self._failed = self._failed or Unavailable(f"the puller of {self._stream} is closed")
        building, self._building = self._building, None
        if building is not None:
            building.cancel()
            await asyncio.gather(building, return_exceptions=True)
            if not building.cancelled() and building.exception() is None:
                await building.result().close()
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await consumer.close()

    async def _rebuilt(self, timeout: float) -> bool:
        """Have a working consumer within the time. The work goes on between calls."""
        if self._failed is not None:
            raise self._failed
        if self._consumer is not None:
            _log.info(
                "bus.consumer.replaced",
                stream=self._stream,
                consumer=self._consumer.name,
                reason=self._consumer.broken,
                position=self.position,
            )
        building = self._building
        if building is None:
            building = asyncio.create_task(self._build(), name=f"bus.pull.{self._name}")
            self._building = building
        old, self._consumer = self._consumer, None
        if old is not None:
            await old.close()
        done, _ = await asyncio.wait({building}, timeout=max(timeout, 0))
        if not done:
            if self._missing is not None:
                raise self._missing
            return False
        if self._building is None:  # close was quicker
            raise self._failed or Unavailable(f"the puller of {self._stream} is closed")
        self._building = None
        try:
            self._consumer = building.result()
        except BusError as error:
            self._failed = error
            raise
        return True

    async def _build(self) -> Consumer:
        backoff = Backoff(0.05, 2.0)
        while True:
            try:
                await self._link.wait_connected(60)
                await self._check(await bus_streams.stream_state(self._link, self._stream))
                self._missing = None
                start = {"deliver_policy": "by_start_sequence", "opt_start_seq": self.position + 1}
                return await Consumer.create(
                    self._link, self._stream, self._name, start, filters=self._filters
                )
            except StreamMissing as error:
                self._missing = error
            except Unavailable as error:
                _log.debug("bus.consumer.waiting", stream=self._stream, reason=str(error))
            except JetStreamError as error:
                if error.error.err_code != _TOO_MANY_CONSUMERS:
                    raise
                _log.warning("bus.consumer.refused", stream=self._stream, reason=str(error))
            await backoff.wait()

    async def _check(self, state: StreamState) -> None:
        """Raise Gap unless what follows the position is still there."""
        if self._created is not None and state.created != self._created:
            raise self._gap("stream_recreated", f"created {state.created}, was {self._created}")
        self._created = state.created
        if self.position == 0:
            return
        if state.last_seq < self.position:
            raise self._gap("tail_lost", f"ends at {state.last_seq}")
        if state.first_seq > self.position + 1:
            raise self._gap("retention", f"begins at {state.first_seq}")
        if self._last is not None and state.first_seq <= self.position:
            there = await bus_streams.get(self._link, self._stream, self.position)
            if there is None or there.time_ns != self._last.time_ns:
                raise self._gap("tail_lost", "another message has that sequence now")

    def _gap(self, kind: GapKind, detail: str) -> Gap:
        return Gap(kind, self._stream, f"read up to {self.position}, but the stream {detail}")
