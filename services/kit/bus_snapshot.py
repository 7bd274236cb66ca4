"""The newest message of each subject, as of one moment: the compacted form of a full log."""

from collections.abc import AsyncIterator

from services.kit.bus_consumer import Consumer
from services.kit.bus_link import Link
from services.kit.bus_types import Message, Unavailable

_BATCH = 1000
_WAIT_S = 30.0


async def last_per_subject(
    link: Link, stream: str, filter_subject: str, *, headers_only: bool
) -> AsyncIterator[Message]:
    """In order of sequence; ends by itself. Raises Unavailable when it is interrupted."""
    config = {"deliver_policy": "last_per_subject", "headers_only": headers_only}
    consumer = await Consumer.create(
        link, stream, f"{link.name}-last", config, filters=(filter_subject,), batch=_BATCH
    )
    try:
        # The server fixes the set when the consumer is made; newer messages follow after it.
        left = consumer.lag
        while left > 0:
            await consumer.wait(_WAIT_S)
            found = consumer.take(min(left, _BATCH))
            for message in found:
                yield message
            left -= len(found)
            if found and not consumer.lag:  # some were pruned meanwhile
                return
            if consumer.broken:
                raise Unavailable(f"reading {filter_subject} of {stream}: {consumer.broken}")
    finally:
        await consumer.close()
