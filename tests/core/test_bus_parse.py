"""The bytes of the bus: protocol, headers, times. Pure functions."""

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kit.bus_parse import Parser, ProtocolFault
from services.kit.bus_types import (
    BusError,
    check_subject,
    format_headers,
    parse_headers,
    status,
    time_ns,
)

Delivered = tuple[int, bytes, bytes, bytes | None, bytes]

tokens = st.text("abc$_.-1", min_size=1, max_size=12).map(str.encode)
bodies = st.binary(max_size=200) | st.sampled_from([b"\r\n", b"MSG a 1 3\r\nabc\r\n", b"+OK\r\n"])
messages = st.tuples(
    st.integers(1, 10**6), tokens, tokens | st.just(b""), st.none() | bodies, bodies
)
controls = st.sampled_from([b"PING", b"PONG", b"+OK", b'INFO {"a":1}', b"-ERR 'Some Thing'"])


def _on_the_wire(entry: Delivered | bytes) -> bytes:
    if isinstance(entry, bytes):
        return entry + b"\r\n"
    sid, subject, reply, headers, data = entry
    middle = b" " + reply if reply else b""
    if headers is None:
        return b"MSG %b %d%b %d\r\n%b\r\n" % (subject, sid, middle, len(data), data)
    sizes = b"%d %d" % (len(headers), len(headers) + len(data))
    return b"HMSG %b %d%b %b\r\n%b%b\r\n" % (subject, sid, middle, sizes, headers, data)


@settings(max_examples=80, deadline=None)
@given(st.lists(messages | controls, max_size=12), st.lists(st.integers(1, 60), min_size=1))
def test_messages_come_out_whole_however_the_bytes_are_cut(
    entries: list[Delivered | bytes], cuts: list[int]
) -> None:
    """Every message and line, in order, for every way in which the network cuts them."""
    stream = b"".join(map(_on_the_wire, entries))
    found: list[Delivered] = []
    lines: list[bytes] = []
    parser = Parser(lambda *message: found.append(message))
    at = 0
    for turn in range(len(stream) + 1):
        size = cuts[turn % len(cuts)]
        lines += parser.feed(stream[at : at + size])
        at += size
    assert found == [entry for entry in entries if not isinstance(entry, bytes)]
    assert lines == [entry for entry in entries if isinstance(entry, bytes)]


@pytest.mark.parametrize("line", [b"MSG a\r\n", b"MSG a b c\r\n", b"HMSG a 1 x 9\r\n" + b"0" * 11])
def test_broken_message_line_is_a_fault(line: bytes) -> None:
    """Nonsense ends the connection with the line in the error, and delivers nothing."""
    parser = Parser(lambda *_: pytest.fail("delivered"))
    with pytest.raises(ProtocolFault, match="not a message"):
        parser.feed(line)


def test_endless_line_is_a_fault() -> None:
    """Bytes without a line end are not collected for ever."""
    parser = Parser(lambda *_: None)
    assert parser.feed(b"x" * (1 << 20)) == []
    with pytest.raises(ProtocolFault, match="a line of more than"):
        parser.feed(b"x")


names = st.from_regex(r"[A-Za-z][A-Za-z0-9-]{0,20}", fullmatch=True)
values = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=30).map(str.strip)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(names, values, max_size=6))
def test_headers_round_trip(headers: dict[str, str]) -> None:
    """What was formatted is read back, whatever a value holds short of a line break."""
    raw = b"NATS/1.0\r\n" + format_headers(headers).encode() + b"\r\n"
    assert parse_headers(raw) == headers


def test_odd_headers_are_read_without_failing() -> None:
    """No header block is able to raise: half lines are skipped, bad UTF-8 is replaced."""
    assert parse_headers(None) == {}
    assert parse_headers(b"NATS/1.0\r\nno colon\r\nA:b\r\nB:  c: d \r\n\r\n") == {
        "A": "b",
        "B": "c: d",
    }
    assert parse_headers(b"NATS/1.0\r\nA: \xff\r\n\r\n") == {"A": "\ufffd"}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (None, (0, "")),
        (b"NATS/1.0\r\nA: b\r\n\r\n", (0, "")),
        (b"NATS/1.0 503\r\n\r\n", (503, "")),
        (b"NATS/1.0 503\r\nNats-Subject: zz.8\r\n\r\n", (503, "")),
        (b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 1\r\n\r\n", (100, "Idle Heartbeat")),
        (b"NATS/1.0 odd\r\n\r\n", (0, "")),
    ],
)
def test_status_is_told_from_headers(raw: bytes | None, expected: tuple[int, str]) -> None:
    """Control messages carry a code in the first line, ordinary ones do not."""
    assert status(raw) == expected


@pytest.mark.parametrize("subject", ["a", "kube.pods.default.my_pod", "lb.lease._.x-1", "ü"])
def test_subjects_that_can_be_published_to(subject: str) -> None:
    """Tokens of anything but space, dot and wildcards."""
    check_subject(subject)


@pytest.mark.parametrize("subject", ["", ".", "a.", ".a", "a..b", "a b", "*", "a.>", "a\tb", "a\n"])
def test_subjects_that_cannot(subject: str) -> None:
    """Refused with the subject in the error and what would be right."""
    with pytest.raises(BusError, match="must be tokens"):
        check_subject(subject)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4 * 10**18))
def test_times_keep_their_nanoseconds(moment: int) -> None:
    """The server's text form is read exactly, with any number of digits."""
    seconds, nanos = divmod(moment, 10**9)
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    digits = f"{nanos:09d}".rstrip("0")
    assert time_ns(f"{text}.{digits}Z" if digits else f"{text}Z") == moment
