"""HTTP, UDP and gRPC dialogues as bytes in and bytes out: whole, byte by byte, and hostile."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.prober.dialogues import MAX_HOPS, Answer, Dialogues
from services.prober.grpc_health import GrpcHealth
from services.prober.plan import Check

DIALOGUES = Dialogues()


def http(path="/hz", host="", codes=((200, 399),), protocol="HTTP"):
    check = Check(port=8080, protocol=protocol, path=path, host=host, codes=codes)
    dialogue = DIALOGUES.open(check, "10.0.0.4")
    dialogue.begin()
    return dialogue


def ask(reply, by=None, **how):
    """The answer to a reply that comes in pieces of so many bytes."""
    dialogue = http(**how)
    by = by or len(reply)
    for start in range(0, len(reply), by):
        answer = dialogue.feed(reply[start : start + by])
        if answer is not None:
            return answer
    return None


def test_the_request_names_path_and_host():
    """The backend's own address is its host, unless the check names one."""
    asked = http().take()
    assert asked.startswith(b"GET /hz HTTP/1.1\r\nHost: 10.0.0.4:8080\r\n")
    assert asked.endswith(b"Connection: close\r\n\r\n")
    assert b"\r\nHost: web.example:8080\r\n" in http(host="web.example").take()


@pytest.mark.parametrize("by", [None, 1, 7])
@pytest.mark.parametrize(
    ("reply", "ok", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\n", True, ""),
        (b"HTTP/1.0 204 No Content\r\n", True, ""),
        (b"HTTP/1.1 304\r\n", True, ""),
        (b"HTTP/1.1 500 Internal Server Error\r\n", False, "HTTP status 500"),
        (b"HTTP/1.1 103 Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\n", True, ""),
        (b"HTTP/1.1 302 Found\r\nX: y\r\n\r\n", True, ""),
        (b"SSH-2.0-OpenSSH_9.6\r\n", False, "the answer is not HTTP/1.1"),
        (b"\x15\x03\x01\x00\x02\x02\x46", False, "the answer is not HTTP/1.1"),
        (b"HTTP/1.1 abc\r\n", False, "the answer is not HTTP/1.1"),
    ],
)
def test_the_status_line_decides(reply, ok, reason, by):
    """However the bytes come, the verdict is the same, and nothing after it is waited for."""
    answer = ask(reply, by)
    assert (answer.ok, answer.reason) == (ok, reason)


def test_expected_codes_may_be_any():
    """Only what is listed counts as healthy."""
    codes = ((200, 200), (404, 404))
    assert ask(b"HTTP/1.1 404 Not Found\r\n", codes=codes).ok
    assert not ask(b"HTTP/1.1 201 Created\r\n", codes=codes).ok


@pytest.mark.parametrize(
    ("location", "port", "asked"),
    [
        (b"/hz2", 8080, b"GET /hz2 HTTP/1.1\r\nHost: 10.0.0.4:8080\r\n"),
        (b"hz3?a=b c", 8080, b"GET /hz3?a=b%20c HTTP/1.1\r\nHost: 10.0.0.4:8080\r\n"),
        (b"http://10.0.0.4/up", 80, b"GET /up HTTP/1.1\r\nHost: 10.0.0.4\r\n"),
        (b"http://10.0.0.4:81", 81, b"GET / HTTP/1.1\r\nHost: 10.0.0.4:81\r\n"),
    ],
)
def test_report_23_a_redirect_on_the_same_host_is_followed(location, port, asked):
    """To another path or port of this backend."""
    answer = ask(b"HTTP/1.1 302 Found\r\nLocation: " + location + b"\r\n\r\n", by=3)
    assert answer.next.port == port
    answer.next.dialogue.begin()
    assert answer.next.dialogue.take().startswith(asked)


@pytest.mark.parametrize(
    ("codes", "ok"), [(((200, 399),), True), (((200, 299),), False)], ids=["default", "200-299"]
)
@pytest.mark.parametrize(
    "location",
    [b"http://127.0.0.9:9999/ok", b"//other/ok", b"ftp://10.0.0.4/", b"javascript:alert(1)"],
)
def test_report_23_a_redirect_to_another_host_is_not_followed(location, codes, ok):
    """Its own code is judged, with a warning: somebody else's server says nothing about ours."""
    answer = ask(b"HTTP/1.1 302 Found\r\nLocation: " + location + b"\r\n\r\n", codes=codes)
    assert (answer.ok, answer.next) == (ok, None)
    assert answer.reason.endswith("redirects to another host, not followed")


def test_report_23_a_redirect_loop_is_a_failure():
    """After so many hops it ends."""
    answer, hops, dialogue = None, 0, http()
    while answer is None or answer.next is not None:
        dialogue.begin()
        answer = dialogue.feed(b"HTTP/1.1 302 Found\r\nLocation: /hz\r\n\r\n")
        hops += 1
        dialogue = answer.next.dialogue if answer.next else None
    assert hops == MAX_HOPS + 1
    assert answer == Answer(False, "redirected more than 5 times")


def test_a_head_without_end_is_cut_off():
    """What a backend may make us keep is bounded."""
    dialogue = http()
    assert dialogue.feed(b"HTTP/1.1 302 Found\r\n") is None
    answer = None
    for _ in range(20):
        answer = answer or dialogue.feed(b"X-Pad: " + b"x" * 8_000 + b"\r\n")
    assert "longer than" in answer.reason


@pytest.mark.timeout(10)  # to go through all again with every byte takes far longer
@pytest.mark.parametrize("start", [b"HTTP/1.1 302 Found\r\nX-Pad: ", b"HTTP/1.1 200 "])
def test_a_line_without_end_costs_no_more_byte_by_byte(start):
    """Whoever answers byte by byte must not keep us from the others."""
    assert "longer than" in ask(start + b"x" * 70_000, by=1).reason


@pytest.mark.parametrize("by", range(1, 6))
@pytest.mark.parametrize("end", [b"\r\n\r\n", b"\n\n", b"\r\n\n", b"\n\r\n"])
def test_the_end_of_a_head_is_found_wherever_it_is_split(end, by):
    """It may come in any pieces."""
    answer = ask(b"HTTP/1.1 302 Found\r\nX: y\r\nLocation: /there" + end, by)
    assert answer.next.port == 8080


def test_a_closed_connection_is_a_failure():
    """Also when it closes in the middle of the status line."""
    dialogue = http()
    assert dialogue.feed(b"HTTP/1.1 20") is None
    assert not dialogue.eof().ok


def test_silence_is_good_news_for_udp_only():
    """An open UDP port need not answer an empty datagram."""
    assert DIALOGUES.open(Check(port=53, protocol="UDP"), "10.0.0.4").silence == Answer(True)
    assert http().silence is None


# --- gRPC: the frames of a server made with grpcio ---

SETTINGS = bytes.fromhex(
    "000018040000000000000400400000000500400000000600004000fe0300000001000004080000000000003f0001"
)
ACK = bytes.fromhex("000000040100000000")


def frame(kind, flags, payload, stream=1):
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    )


def status(value):
    message = b"" if value == 0 else bytes([0x08, value])
    return frame(0, 0, b"\x00" + len(message).to_bytes(4, "big") + message)


HEADERS = frame(
    1,
    4,
    bytes.fromhex(
        "88400c636f6e74656e742d74797065106170706c69636174696f6e2f67727063"
        "4014677270632d6163636570742d656e636f64696e67176964656e746974792c206465666c6174652c20677a6970"
    ),
)
TRAILERS = frame(
    1, 5, bytes.fromhex("400b677270632d7374617475730130000c677270632d6d65737361676500")
)


def call(*frames, by=None):
    made = GrpcHealth("", "10.0.0.4:8080")
    made.take()
    stream = b"".join(frames)
    by = by or len(stream)
    for start in range(0, len(stream), by):
        verdict = made.feed(stream[start : start + by])
        if verdict is not None:
            return verdict
    return None


@pytest.mark.parametrize("by", [None, 1])
@pytest.mark.parametrize(
    ("frames", "verdict"),
    [
        ((SETTINGS, ACK, HEADERS, status(1)), ""),
        ((SETTINGS, HEADERS, status(2), TRAILERS), "health is NOT_SERVING"),
        ((SETTINGS, HEADERS, status(0)), "health is UNKNOWN"),
        ((SETTINGS, HEADERS, status(3)), "health is SERVICE_UNKNOWN"),
        (
            (SETTINGS, TRAILERS),
            "the server has no health status (no such service, or no health service)",
        ),
        ((SETTINGS, frame(3, 0, b"\0\0\0\7")), "the server reset the call"),
        ((SETTINGS, frame(7, 0, bytes(8), 0)), "the server closed the connection (GOAWAY)"),
        ((b"HTTP/1.1 400 Bad Request\r\n",), "the answer is not HTTP/2"),
        ((SETTINGS, HEADERS, frame(0, 1, b"abc")), "the answer is not a health status"),
        ((SETTINGS, HEADERS, frame(0, 8, b"\3" + status(1)[9:] + b"\0\0\0")), ""),
    ],
)
def test_only_a_serving_status_is_healthy(frames, verdict, by):
    """Whole or byte by byte, padded or not; everything else says what it was."""
    assert call(*frames, by=by) == verdict


def test_settings_and_pings_are_acknowledged():
    """A server that waits for either would otherwise never answer."""
    made = GrpcHealth("db", "10.0.0.4:8080")
    asked = made.take()
    assert asked.startswith(b"PRI * HTTP/2.0")
    assert asked.endswith(b"\x00\x00\x00\x00\x04\x0a\x02db")
    assert made.feed(SETTINGS) is None
    assert made.take() == frame(4, 1, b"", 0)
    assert made.feed(frame(6, 0, b"12345678", 0)) is None
    assert made.take() == frame(6, 1, b"12345678", 0)


@pytest.mark.timeout(10)
def test_a_server_that_only_pings_is_given_up():
    """What a backend may make us keep, and answer, is bounded."""
    assert "frames without" in call(SETTINGS, *[frame(6, 0, b"12345678", 0)] * 20_000)


@given(st.lists(st.binary(max_size=60), max_size=12), st.sampled_from(["HTTP", "HTTPS", "GRPC"]))
def test_no_answer_can_break_a_dialogue(pieces, protocol):
    """Any bytes end in an answer or in waiting for more, never in an exception."""
    dialogue = DIALOGUES.open(Check(port=80, protocol=protocol), "10.0.0.4")
    dialogue.begin()
    dialogue.take()
    for piece in pieces:
        if dialogue.feed(piece or b"\0") is not None:
            return
        dialogue.take()
    dialogue.eof()


@given(
    st.lists(
        st.sampled_from(
            [
                b"HTTP/1.1 ",
                b"302",
                b"200",
                b" Found",
                b"\r\n",
                b"\n",
                b"Location: ",
                b"/x",
                b"http://",
                b"10.0.0.4",
                b":99999",
                b"[",
                b"\xff",
                b"\r\n\r\n",
                b"//",
                b"?",
                b"HTTP/1.1 100 C\r\n\r\n",
            ]
        ),
        max_size=14,
    )
)
def test_no_head_can_break_http(pieces):
    """As above, of pieces that come near to an answer."""
    dialogue = http()
    for piece in pieces:
        if dialogue.feed(piece) is not None:
            return
    dialogue.eof()
