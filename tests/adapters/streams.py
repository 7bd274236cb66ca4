"""What the tests of the bus share: a stream, a connection to it, and a look at what it holds."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from schema.subjects import StreamSpec
from services.kit.bus import Bus, Message, Publisher

SPEC = StreamSpec(name="TEST", subjects=("t.>",), max_age_s=3600.0, max_bytes=1 << 30)
STREAM = SPEC.name


@asynccontextmanager
async def connected(url: str, *, ensure: StreamSpec | None = SPEC) -> AsyncIterator[Bus]:
    bus = await Bus.connect(url, name="test")
    try:
        if ensure is not None:
            await bus.ensure_stream(ensure)
        yield bus
    finally:
        await bus.close()


@asynccontextmanager
async def publishing(bus: Bus, **options: float) -> AsyncIterator[Publisher]:
    # Patient: what a slow machine made it repeat would arrive in the stream of the next test.
    options = {"ack_timeout": 30.0, **options}
    publisher = bus.publisher(STREAM, **options)  # type: ignore[arg-type]
    try:
        yield publisher
    finally:
        await publisher.close()


async def fill(bus: Bus, count: int, *, subjects: int = 10, start: int = 0) -> None:
    """Messages `start`.. over some subjects, each with its number as body and id."""
    async with publishing(bus) as publisher:
        futures = []
        for number in range(start, start + count):
            await publisher.room()
            body = str(number).encode()
            subject = f"t.{number % subjects}"
            futures.append(publisher.submit(subject, body, {}, msg_id=f"m{number}"))
        await publisher.drain(30)
        for future in futures:
            future.result()


async def read_all(bus: Bus, start_seq: int = 1) -> list[Message]:
    """Everything that is stored now."""
    state = await bus.stream_state(STREAM)
    found: list[Message] = []
    puller = bus.puller(STREAM, start_seq=max(start_seq, state.first_seq))
    try:
        while state.messages and (not found or found[-1].seq < state.last_seq):
            found += await puller.fetch(1000, 5)
    finally:
        await puller.close()
    return found


def numbers(messages: list[Message]) -> list[int]:
    return [int(message.data) for message in messages]
