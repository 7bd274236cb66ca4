"""The NATS protocol, server to client: bytes to messages and control lines.

In place of the client library's parser, which takes most of the time that a message costs (regular
expressions, and every byte copied twice). A message goes to a function at once; any other line
(PING, PONG, INFO, -ERR, +OK) is handed back for the library to act on.
"""

from collections.abc import Callable
from typing import Final

# sid, subject, reply, headers (None: it has none), data
Deliver = Callable[[int, bytes, bytes, bytes | None, bytes], None]

_END: Final = b"\r\n"
_LONGEST_LINE: Final = 1 << 20  # INFO grows with the number of servers
_MSG, _HMSG = b"MH"


class ProtocolFault(Exception):
    """What came is not the protocol: the connection is of no more use."""


class Parser:
    """Keeps what is incomplete until the rest has come."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._parts: list[bytes] = []
        self._size = self._needed = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Deliver every complete message; return the control lines that came with them."""
        if self._parts:
            self._parts.append(data)
            self._size += len(data)
            if self._size < self._needed:  # in the middle of a large message
                return []
            data = b"".join(self._parts)
        deliver, size, at, needed = self._deliver, len(data), 0, 0
        lines: list[bytes] = []
        while at < size:
            end = data.find(_END, at)
            if end < 0:
                if size - at > _LONGEST_LINE:
                    raise ProtocolFault(f"a line of more than {_LONGEST_LINE} bytes")
                break
            kind = data[at]
            if kind != _HMSG and kind != _MSG:
                lines.append(data[at:end])
                at = end + 2
                continue
            # HMSG subject sid [reply] header-size size, or MSG subject sid [reply] size
            words = data[at:end].split()
            start = end + 2
            try:
                stop = start + int(words[-1])
                if stop + 2 > size:
                    needed = stop + 2 - at
                    break
                if kind == _HMSG:
                    body = start + int(words[-2])
                    reply = words[3] if len(words) == 6 else b""
                    deliver(int(words[2]), words[1], reply, data[start:body], data[body:stop])
                else:
                    reply = words[3] if len(words) == 5 else b""
                    deliver(int(words[2]), words[1], reply, None, data[start:stop])
            except (IndexError, ValueError) as error:
                raise ProtocolFault(f"not a message: {data[at:end][:100]!r}") from error
            at = stop + 2
        self._parts = [data[at:]] if at < size else []
        self._size, self._needed = size - at, needed
        return lines
