"""One call of grpc.health.v1.Health/Check, as bytes out and bytes in.

Just enough HTTP/2 and HPACK for it: the request is static, header blocks of the answer are not
read, and the verdict is in the first message. An answer without a message is a refusal.
"""

from __future__ import annotations

from typing import Final

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_ACK, _END_STREAM, _END_HEADERS, _PADDED = 1, 1, 4, 8
_MAX_FRAME: Final = 16_384
_MAX_MESSAGE: Final = 4_096
MAX_FRAMES: Final = 128  # before the answer: each may cost a reply that nobody reads
_STATUS: Final = {0: "UNKNOWN", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}
_SERVING: Final = 1


class GrpcHealth:
    """`feed` returns None while nothing is known, "" for SERVING, and else what is wrong."""

    def __init__(self, service: str, authority: str) -> None:
        self._out = _PREFACE + _frame(_SETTINGS, 0, 0, b"") + _request(service, authority)
        self._in = b""
        self._message = b""
        self._frames = 0

    def take(self) -> bytes:
        out, self._out = self._out, b""
        return out

    def feed(self, data: bytes) -> str | None:
        self._in += data
        while len(self._in) >= 9:
            length = int.from_bytes(self._in[:3], "big")
            kind, flags = self._in[3], self._in[4]
            stream = int.from_bytes(self._in[5:9], "big") & 0x7FFFFFFF
            if (not self._frames and kind != _SETTINGS) or length > _MAX_FRAME:
                return "the answer is not HTTP/2"
            if self._frames >= MAX_FRAMES:
                return f"more than {MAX_FRAMES} frames without a health status"
            if len(self._in) < 9 + length:
                return None
            payload, self._in = self._in[9 : 9 + length], self._in[9 + length :]
            self._frames += 1
            verdict = self._take_frame(kind, flags, stream, payload)
            if verdict is not None:
                return verdict
        return None

    def _take_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> str | None:
        if kind == _SETTINGS and not flags & _ACK:
            self._out += _frame(_SETTINGS, _ACK, 0, b"")
        elif kind == _PING and not flags & _ACK:
            self._out += _frame(_PING, _ACK, 0, payload)
        elif kind == _GOAWAY:
            return "the server closed the connection (GOAWAY)"
        elif stream == 1 and kind == _RST:
            return "the server reset the call"
        elif stream == 1 and kind == _DATA:
            if flags & _PADDED:
                payload = payload[1 : len(payload) - payload[0]] if payload else b""
            return self._take_data(payload, ended=bool(flags & _END_STREAM))
        elif stream == 1 and kind == _HEADERS and flags & _END_STREAM:
            return "the server has no health status (no such service, or no health service)"
        return None

    def _take_data(self, data: bytes, *, ended: bool) -> str | None:
        self._message += data
        message = self._message
        if len(message) >= 5:
            length = int.from_bytes(message[1:5], "big")
            if message[0] != 0 or length > _MAX_MESSAGE:
                return "the answer is not a health status"
            if len(message) >= 5 + length:
                status = _status_in(message[5 : 5 + length])
                return "" if status == _SERVING else f"health is {_STATUS.get(status, status)}"
        return "the answer is not a health status" if ended else None


def _status_in(message: bytes) -> int:
    """Field 1 of HealthCheckResponse; it is 0 (UNKNOWN) where it is left out."""
    if len(message) >= 2 and message[0] == 0x08:
        return message[1]
    return 0


def _request(service: str, authority: str) -> bytes:
    name = service.encode("ascii")
    asked = b"\x0a" + _varint(len(name)) + name if name else b""
    message = b"\x00" + len(asked).to_bytes(4, "big") + asked
    block = (
        b"\x83\x86"  # :method POST, :scheme http
        + b"\x04" + _text(b"/grpc.health.v1.Health/Check")  # :path
        + b"\x01" + _text(authority.encode("ascii"))  # :authority
        + b"\x0f\x10" + _text(b"application/grpc")  # content-type
        + b"\x00" + _text(b"te") + _text(b"trailers")
        + b"\x0f\x2b" + _text(b"lbledger-check")  # user-agent
    )  # fmt: skip
    return _frame(_HEADERS, _END_HEADERS, 1, block) + _frame(_DATA, _END_STREAM, 1, message)


def _varint(value: int) -> bytes:
    """Protobuf's, of a length below 16,384."""
    return bytes([value]) if value < 128 else bytes([value & 0x7F | 0x80, value >> 7])


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    )


def _text(value: bytes) -> bytes:
    return _integer(len(value), 7, 0x00) + value


def _integer(value: int, bits: int, first: int) -> bytes:
    """HPACK's integer with a prefix of so many bits."""
    limit = (1 << bits) - 1
    if value < limit:
        return bytes([first | value])
    out = [first | limit]
    value -= limit
    while value >= 128:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
