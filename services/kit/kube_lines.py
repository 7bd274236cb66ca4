"""The lines of a watch: bytes as they come, events, and what is no event."""

from __future__ import annotations

from typing import Final

import msgspec

from services.kit.kube_errors import KubeError, Unavailable, error_of
from services.kit.kube_types import WatchEvent

MAX_LINE: Final = 64 << 20  # far above what etcd can hold: such a line is no event
_event_decoder: Final = msgspec.json.Decoder(WatchEvent)


class LineSplitter:
    """Bytes as they come, cut at newlines; parts of a long line are joined once, at its end."""

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._parts: list[bytes] = []
        self._limit = limit
        self.pending = 0  # bytes of the line that has not ended

    def feed(self, chunk: bytes) -> list[bytes]:
        lines = chunk.split(b"\n")
        if len(lines) > 1 and self._parts:
            self._parts.append(lines[0])
            lines[0] = b"".join(self._parts)
            self._parts.clear()
            self.pending = 0
        rest = lines.pop()
        if rest:
            self._parts.append(rest)
            self.pending += len(rest)
            if self.pending > self._limit:
                raise Unavailable(f"a watch line of more than {self._limit} bytes is no event")
        return lines


def read_events(lines: list[bytes], path: str) -> tuple[list[WatchEvent], KubeError | None]:
    """The events of some lines, up to an ERROR event or a line that is none."""
    events: list[WatchEvent] = []
    decode = _event_decoder.decode
    for line in lines:
        if not line:
            continue
        try:
            event = decode(line)
        except msgspec.DecodeError as error:
            return events, Unavailable(f"GET {path}: unreadable watch line: {error}")
        if event.type == "ERROR":
            return events, error_of(0, bytes(event.object))
        events.append(event)
    return events, None
