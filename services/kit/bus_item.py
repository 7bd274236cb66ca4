"""One message on its way to a stream, and the server's answer to it."""

import asyncio
from typing import Final

import msgspec

from services.kit.bus_streams import ApiError
from services.kit.bus_types import Outgoing, Published
from services.kit.retry import Backoff


class Ack(msgspec.Struct):
    """A single message's, or (`count` > 0) that of the last of a batch."""

    seq: int = 0
    duplicate: bool = False
    count: int = 0
    error: ApiError | None = None


decode_ack: Final = msgspec.json.Decoder(Ack).decode


def size_of(lines: str, data: bytes) -> int:
    return len(lines if lines.isascii() else lines.encode()) + len(data)


class Item:
    """`used` is the sequence that the last try expected, `expected` what the caller did."""

    __slots__ = (
        "backoff",
        "data",
        "expected",
        "future",
        "lines",
        "msg_id",
        "sent_at",
        "size",
        "subject",
        "timer",
        "tried",
        "used",
    )

    def __init__(self, message: Outgoing, lines: str, future: asyncio.Future[Published]) -> None:
        self.subject, self.data = message.subject, message.data
        self.msg_id, self.expected = message.msg_id, message.expected
        self.lines = lines
        self.size = size_of(lines, message.data)
        self.future = future
        self.used = 0
        self.sent_at = 0.0
        self.tried = 0
        self.backoff: Backoff | None = None
        self.timer: asyncio.TimerHandle | None = None
