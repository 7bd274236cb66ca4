"""The check engine against real sockets on loopback: every way a backend can answer, or not."""

import asyncio
import collections
import contextlib
import datetime
import errno
import gc
import ipaddress
import itertools
import os
import random
import resource
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from services.prober.checks import Engine
from services.prober.dialogues import Dialogues
from services.prober.driving import Driver
from services.prober.plan import Check
from services.prober.targets import Target
from tests.backends import free_port
from tests.core.test_prober_dialogues import HEADERS, SETTINGS, status


class Server:
    """Threads, one for each connection, that do what `serve` says."""

    def __init__(self, serve, address="127.0.0.1", family=socket.AF_INET):
        self._serve = serve
        self.listener = socket.socket(family)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind((address, 0))
        self.listener.listen(4096)
        self.port = self.listener.getsockname()[1]
        self.asked = []
        self.open = 0
        self.most = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self):
        while True:
            try:
                conn, _ = self.listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._run, args=(conn,), daemon=True)
            thread.start()

    def _run(self, conn):
        self.open += 1
        self.most = max(self.most, self.open)
        with conn, contextlib.suppress(OSError):
            conn.settimeout(10)
            self._serve(self, conn)
        self.open -= 1

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.fixture
def serve():
    """Make servers that end with the test."""
    with contextlib.ExitStack() as stack:

        def make(behaviour, **how):
            server = Server(behaviour, **how)
            stack.callback(server.close)
            return server

        yield make


class Run:
    """An engine that is stepped until what is waited for has come."""

    def __init__(self, **how):
        self.outcomes = []
        self.engine = Engine(self.outcomes.extend, **how)

    def check(self, port, address="127.0.0.1", *, at_once=True, tag=None, **how):
        how = {"period": 60.0, "timeout": 2.0, **how}
        target = Target(tag, Check(port=port, **how), address, address, port)
        self.engine.add(target, at_once=at_once)
        return target

    def until(self, condition, timeout=15.0):
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"only {len(self.outcomes)} outcomes"
            self.engine.step(0.01)

    def one(self, port, address="127.0.0.1", **how):
        """The outcome of a single check."""
        target = self.check(port, address, **how)
        self.until(lambda: self.outcomes)
        self.engine.remove(target)
        return self.outcomes.pop()


@pytest.fixture
def run():
    run = Run()
    with contextlib.closing(run.engine):
        yield run


def say(*pieces, pause=0.0, linger=False):
    """A server that reads what it is asked and says these bytes."""

    def behaviour(server, conn):
        server.asked.append(conn.recv(4096))
        for piece in pieces:
            conn.sendall(piece)
            time.sleep(pause)
        if linger:
            conn.recv(1)

    return behaviour


def wait_for_end(_, conn):
    conn.recv(1)


def reset(_, conn):
    conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def stalled(address="127.0.0.1"):
    """A listener that answers no SYN: its queue is full."""
    listener = socket.socket()
    listener.bind((address, 0))
    listener.listen(0)
    held = [listener]
    for _ in range(3):
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(listener.getsockname())
        held.append(filler)
    return held, listener.getsockname()[1]


# --- TCP ---


def test_an_accepted_connection_is_a_success(run, serve):
    """A full connect is what is asked for, and nothing is sent."""
    outcome = run.one(serve(wait_for_end).port)
    assert (outcome.ok, outcome.reason, outcome.local) == (True, "", False)


def test_an_ipv6_backend_is_checked_like_any_other(run, serve):
    """An address with colons is an address, not a host and a port."""
    server = serve(wait_for_end, address="::1", family=socket.AF_INET6)
    assert run.one(server.port, "::1").ok


def test_a_refused_connection_is_a_failure_at_once(run):
    """The answer is there; nobody waits for the timeout."""
    outcome = run.one(free_port(), timeout=30.0)
    assert (outcome.ok, outcome.reason, outcome.local) == (False, "connection refused", False)


def test_a_backend_that_does_not_answer_costs_its_timeout_and_no_more(run):
    """And says so."""
    held, port = stalled()
    began = time.monotonic()
    outcome = run.one(port, timeout=0.2)
    assert (outcome.ok, outcome.reason) == (False, "no answer within 0.2 s")
    assert 0.2 <= time.monotonic() - began < 5
    for sock in held:
        sock.close()


def test_a_connection_that_is_reset_after_the_handshake_was_answered(run, serve):
    """A TCP check asks for the handshake; how soon the reset comes must not decide."""
    server = serve(reset)
    for _ in range(50):
        assert run.one(server.port).ok


# --- HTTP ---


def test_report_23_http_checks_judge_this_backend_and_no_other(run, serve):
    """b1 redirects elsewhere, b2 on the same host, b3 for ever; b4 drips its body."""
    elsewhere = serve(say(b"HTTP/1.1 200 OK\r\n\r\n"), address="127.0.0.9")
    to_other = f"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.9:{elsewhere.port}/ok\r\n\r\n"
    b1 = serve(say(to_other.encode()))

    def same_host(server, conn):
        asked = conn.recv(4096)
        server.asked.append(asked)
        found = asked.startswith(b"GET /hz2 ")
        conn.sendall(
            b"HTTP/1.1 200 OK\r\n" if found else b"HTTP/1.1 302 F\r\nLocation: /hz2\r\n\r\n"
        )

    b2 = serve(same_host)
    b3 = serve(say(b"HTTP/1.1 302 F\r\nLocation: /hz\r\n\r\n"))
    b4 = serve(say(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n", *[b"x"] * 99, pause=1.0))
    how = {"protocol": "HTTP", "path": "/hz", "timeout": 5.0}

    one = run.one(b1.port, **how)
    assert (one.ok, one.reason) == (True, "redirects to another host, not followed")
    assert run.one(b2.port, **how).ok
    assert len(b2.asked) == 2
    three = run.one(b3.port, **how)
    assert (three.ok, three.reason) == (False, "redirected more than 5 times")
    began = time.monotonic()
    assert run.one(b4.port, **how).ok
    assert time.monotonic() - began < 3, "the body was waited for"
    assert elsewhere.asked == []


def test_6100_an_open_port_with_a_broken_application_is_seen(run, serve):
    """The TCP check passes, the HTTP check does not."""
    port = serve(say(b"HTTP/1.1 500 Oops\r\n\r\n")).port
    assert run.one(port).ok
    outcome = run.one(port, protocol="HTTP")
    assert (outcome.ok, outcome.reason) == (False, "HTTP status 500")


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        pytest.param(say(os.urandom(3000) + b"\n"), "the answer is not HTTP/1.1", id="garbage"),
        pytest.param(reset, "connection reset", id="reset"),
        pytest.param(lambda s, c: c.recv(4096), "connection closed before an answer", id="close"),
        pytest.param(
            lambda s, c: c.recv(4096) and c.recv(1), "no answer within 0.5 s", id="silence"
        ),
        pytest.param(
            say(*[b"HTTP/1.1 200 OK\r\n"[i : i + 1] for i in range(17)], pause=0.1),
            "no answer within 0.5 s",
            id="byte-by-byte-too-slow",
        ),
        pytest.param(
            say(*[b"HTTP/1.1 200 OK\r\n"[i : i + 1] for i in range(17)], pause=0.001),
            "",
            id="byte-by-byte",
        ),
    ],
)
def test_a_backend_that_talks_nonsense_costs_its_timeout_and_no_more(run, serve, behaviour, reason):
    """Garbage, a reset, silence, one byte at a time."""
    timeout = 5.0 if reason == "" else 0.5
    outcome = run.one(serve(behaviour).port, protocol="HTTP", timeout=timeout)
    assert outcome.reason in (reason, "connection reset" if reason.endswith("answer") else reason)
    assert outcome.ok == (reason == "")
    assert run.engine.in_flight == 0


# --- HTTPS ---


def certificate(folder: Path, name: str, *, issuer=None, days=(-1, 30)):
    """A certificate for 127.0.0.1, signed by `issuer` or by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    signer, signed_by = issuer or (key, subject)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signed_by)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(days=days[0]))
        .not_valid_after(now + datetime.timedelta(days=days[1]))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName(
                [
                    x509.DNSName("web.example"),
                    x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
                ]
            ),
            critical=False,
        )
        .sign(signer, hashes.SHA256())
    )
    path = folder / f"{name}.pem"
    path.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return path, (key, subject)


def secure(path):
    """A server that speaks TLS with this certificate and answers 200."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)

    def behaviour(server, conn):
        with contextlib.suppress(ssl.SSLError), context.wrap_socket(conn, server_side=True) as tls:
            server.asked.append(tls.recv(4096))
            tls.sendall(b"HTTP/1.1 200 OK\r\n\r\n")

    return behaviour


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    ca_file, ca = certificate(folder, "ca")
    good, _ = certificate(folder, "good", issuer=ca)
    expired, _ = certificate(folder, "expired", issuer=ca, days=(-30, -1))
    foreign, _ = certificate(folder, "foreign")
    return {"ca": ca_file, "good": good, "expired": expired, "foreign": foreign}


@pytest.mark.parametrize(
    ("which", "how", "reason"),
    [
        ("good", {}, ""),
        ("good", {"host": "web.example"}, ""),
        ("good", {"host": "other.example"}, "certificate: hostname mismatch"),
        ("expired", {}, "certificate: certificate has expired"),
        ("foreign", {}, "certificate: self-signed certificate"),
        ("expired", {"verify": False}, ""),
        ("foreign", {"verify": False, "host": "other.example"}, ""),
    ],
)
def test_an_https_check_looks_at_the_certificate_unless_told_not_to(
    serve, certificates, which, how, reason
):
    """An expired or foreign certificate is a failure that says which."""
    run = Run(dialogues=Dialogues(str(certificates["ca"])))
    with contextlib.closing(run.engine):
        outcome = run.one(
            serve(secure(certificates[which])).port, protocol="HTTPS", timeout=10.0, **how
        )
    assert outcome.ok == (reason == "")
    assert outcome.reason.lower().startswith(reason)


def test_an_https_check_of_a_plain_http_port_is_a_failure(run, serve):
    """And no exception."""
    outcome = run.one(serve(say(b"HTTP/1.1 400 Bad\r\n\r\n")).port, protocol="HTTPS")
    assert not outcome.ok
    assert outcome.reason.startswith("TLS: ")


# --- gRPC, UDP ---


@pytest.mark.parametrize(
    ("value", "reason"), [(1, ""), (2, "health is NOT_SERVING")], ids=["serving", "not-serving"]
)
def test_a_grpc_check_asks_the_health_service(run, serve, value, reason):
    """Only SERVING is healthy."""
    server = serve(say(SETTINGS + HEADERS, status(value), linger=True))
    outcome = run.one(server.port, protocol="GRPC")
    assert (outcome.ok, outcome.reason) == (reason == "", reason)
    assert b"/grpc.health.v1.Health/Check" in server.asked[0]


def test_a_udp_check_fails_only_by_an_icmp_error(run):
    """A silent open port is healthy after the timeout, a closed one unhealthy at once."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        assert run.one(listener.getsockname()[1], protocol="UDP", timeout=0.2).ok
        assert listener.recv(100) == b""
        port = listener.getsockname()[1]
    outcome = run.one(port, protocol="UDP", timeout=30.0)
    assert (outcome.ok, outcome.reason) == (False, "connection refused")


# --- when, how many, and what is left behind ---


class Clock:
    def __init__(self):
        self.now = 1_000.0

    def __call__(self):
        return self.now


def test_116779_checks_of_one_target_never_overlap(serve):
    """A timeout longer than the period: the next one starts when the one before has ended."""
    server = serve(say(b"", linger=True))
    run = Run()
    with contextlib.closing(run.engine):
        run.check(server.port, protocol="HTTP", period=0.05, timeout=0.22)
        run.until(lambda: len(run.outcomes) >= 4)
    assert server.most == 1
    starts = [outcome.started for outcome in run.outcomes]
    assert min(b - a for a, b in itertools.pairwise(starts)) >= 0.22


def test_the_first_check_is_at_once_and_the_next_are_spread(serve):
    """500 targets that come together are not checked together ever after."""
    clock = Clock()
    run = Run(clock=clock, rng=random.Random(1))
    port = free_port()
    with contextlib.closing(run.engine):
        for number in range(500):
            run.check(port, tag=number, period=10.0)
        clock.now += 0.02
        run.until(lambda: len(run.outcomes) == 500)
        assert {o.started for o in run.outcomes} == {clock.now}
        run.outcomes.clear()
        for _ in range(200):
            clock.now += 0.1
            for _ in range(3):
                run.engine.step(0)
    second = collections.Counter(int(o.started - 1_000.0) for o in run.outcomes)
    third = [o for o in run.outcomes if o.target.tag is not None]
    assert max(second.values()) < 100
    assert len(third) > 500


def test_restored_targets_start_spread_over_the_period():
    """After a restart there is no burst."""
    clock = Clock()
    run = Run(clock=clock, rng=random.Random(1))
    port = free_port()
    with contextlib.closing(run.engine):
        for number in range(500):
            run.check(port, tag=number, period=10.0, at_once=False)
        for _ in range(102):
            clock.now += 0.1
            for _ in range(3):
                run.engine.step(0)
    by_second = collections.Counter(int(o.started - 1_000.0) for o in run.outcomes)
    assert len(run.outcomes) >= 500
    assert max(by_second.values()) < 90


def test_no_more_sockets_than_allowed_are_open():
    """Stalled backends queue, they do not eat every descriptor."""
    held, port = stalled()
    run = Run(max_in_flight=5)
    with contextlib.closing(run.engine):
        for number in range(12):
            run.check(port, tag=number, timeout=0.1)
        most = 0

        def done():
            nonlocal most
            most = max(most, run.engine.in_flight)
            return len(run.outcomes) == 12

        run.until(done)
    assert most == 5
    for sock in held:
        sock.close()


def test_a_removed_target_is_not_reported(serve):
    """Also when its check was under way."""
    held, port = stalled()
    run = Run()
    with contextlib.closing(run.engine):
        target = run.check(port, timeout=0.05)
        run.until(lambda: run.engine.in_flight == 1)
        run.engine.remove(target)
        run.until(lambda: run.engine.in_flight == 0)
        for _ in range(20):
            run.engine.step(0.01)
    assert run.outcomes == []
    for sock in held:
        sock.close()


def test_a_check_is_not_failed_because_we_were_late_to_look(serve):
    """A process that stood still for longer than the timeout still finds the answer."""
    server = serve(say(b"HTTP/1.1 200 OK\r\n"))
    clock = Clock()
    run = Run(clock=clock)
    with contextlib.closing(run.engine):
        run.check(server.port, protocol="HTTP", timeout=1.0)
        clock.now += 0.02
        run.engine.step(0)
        clock.now += 5.0
        run.until(lambda: run.outcomes)
    assert run.outcomes[0].ok


def test_what_we_lack_ourselves_says_nothing_about_the_backend(run, serve):
    """Without a descriptor no check can be made: reported as ours."""
    port = serve(wait_for_end).port
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # what is closed later would leave a descriptor for a check
    run.check(port, period=0.05)
    free = os.open(os.devnull, os.O_RDONLY)  # the next descriptor that anybody would get
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        run.until(lambda: any(outcome.local for outcome in run.outcomes))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    ours = next(outcome for outcome in run.outcomes if outcome.local)
    assert ours.reason == os.strerror(errno.EMFILE).lower()
    assert not [outcome for outcome in run.outcomes if not outcome.ok and not outcome.local]
    run.until(lambda: run.outcomes[-1].ok)


def time_wait(port):
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[3] == "06" and f":{port:04X}" in line for line in lines)


@pytest.mark.parametrize("protocol", ["TCP", "HTTP"])
def test_report_22_nothing_is_left_behind(serve, protocol):
    """Thousands of checks: no TIME_WAIT, no descriptor, no false failure."""

    def answer(server, conn):
        conn.recv(4096)
        conn.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")
        conn.recv(1)

    server = serve(wait_for_end if protocol == "TCP" else answer)
    total = 3_000 if protocol == "TCP" else 600
    run = Run(max_in_flight=64)
    with contextlib.closing(run.engine):
        for number in range(60):
            run.check(server.port, tag=number, period=0.02, timeout=10.0, protocol=protocol)
        run.until(lambda: len(run.outcomes) > 60)
        descriptors = len(os.listdir("/proc/self/fd")) - server.open - run.engine.in_flight
        run.until(lambda: len(run.outcomes) >= total, timeout=60)
        after = len(os.listdir("/proc/self/fd")) - server.open - run.engine.in_flight
    assert all(outcome.ok for outcome in run.outcomes)
    assert after <= descriptors + 64
    # Some may be left of whoever had the port before.
    assert time_wait(server.port) < total / 100


async def test_the_event_loop_drives_the_engine(serve):
    """Few targets by readiness, many by turns; a stop ends it, an error is raised."""
    server = serve(wait_for_end)
    outcomes = []
    engine = Engine(outcomes.extend)
    stop = asyncio.Event()
    driver = Driver(engine)
    task = asyncio.create_task(driver.run(stop))
    for number in range(200):
        check = Check(port=server.port, period=0.05, timeout=5.0)
        engine.add(Target(number, check, "127.0.0.1", "127.0.0.1", server.port), at_once=True)
    driver.nudge()
    async with asyncio.timeout(20):
        while len(outcomes) < 600:
            await asyncio.sleep(0.02)
    stop.set()
    await asyncio.wait_for(task, 5)
    assert all(outcome.ok for outcome in outcomes)

    def broken(_):
        raise RuntimeError("broken report")

    engine = Engine(broken)
    driver = Driver(engine)
    engine.add(Target(0, check, "127.0.0.1", "127.0.0.1", server.port), at_once=True)
    with pytest.raises(RuntimeError, match="broken report"):
        await asyncio.wait_for(driver.run(asyncio.Event()), 5)
