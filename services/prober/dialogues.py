"""What a check says to a backend once it is connected, and what it makes of the answer.

No I/O: bytes in, bytes out, so that each dialogue can be tested byte by byte. A dialogue ends as
soon as it knows; nobody waits for a body, and what a backend may make us keep is bounded.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import quote, urljoin, urlsplit

from services.prober.grpc_health import GrpcHealth
from services.prober.plan import Check

MAX_HEAD: Final = 65_536
MAX_LINE: Final = 4_096
MAX_HOPS: Final = 5
_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([1-9]\d\d)(?: [^\r\n]*)?\r?\n")
_HEAD_END: Final = re.compile(rb"\r?\n\r?\n")
_LOCATION: Final = re.compile(rb"\n[Ll][Oo][Cc][Aa][Tt][Ii][Oo][Nn]:[ \t]*([^\r\n]*?)[ \t]*\r?\n")
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found out; `reason` of a good answer is a warning."""

    ok: bool
    reason: str = ""
    next: Redirect | None = None  # ask here, before judging


@dataclass(frozen=True, slots=True)
class Redirect:
    """Another connection to the same backend."""

    port: int
    dialogue: Dialogue


class Dialogue(Protocol):
    silence: Answer | None  # what it means that nothing came in time; None: a failure

    def begin(self) -> None:
        """Connected."""

    def take(self) -> bytes:
        """What is to be sent now."""

    def feed(self, data: bytes) -> Answer | None: ...

    def eof(self) -> Answer: ...


class Dialogues:
    """Opens the dialogue that a check asks for. `ca_file` adds authorities for HTTPS."""

    def __init__(self, ca_file: str = "") -> None:
        """Raises OSError (ssl.SSLError is one) for a file that holds no certificates."""
        self._contexts = {verify: ssl.create_default_context() for verify in (True, False)}
        if ca_file:
            self._contexts[True].load_verify_locations(ca_file)
        self._contexts[False].check_hostname = False
        self._contexts[False].verify_mode = ssl.CERT_NONE

    def open(self, check: Check, address: str) -> Dialogue:
        match check.protocol:
            case "UDP":
                return Udp()
            case "GRPC":
                return GrpcDialogue(check.service, check.host or _authority(address, check.port))
            case "HTTP" | "HTTPS":
                url = Url(check.protocol.lower(), check.host or address, check.port, check.path)
                return self.http(check, url, hops=0)
        raise ValueError(f"no dialogue for {check.protocol}")

    def http(self, check: Check, url: Url, hops: int) -> Dialogue:
        plain = Http(check, url, hops, self.http)
        if url.scheme == "http":
            return plain
        return Tls(plain, self._contexts[check.verify], url.host)


class Udp:
    """One empty datagram. Only an ICMP error says no; silence and any answer count as yes."""

    silence: Answer | None = Answer(True)

    def begin(self) -> None: ...

    def take(self) -> bytes:
        return b""

    def feed(self, data: bytes) -> Answer | None:
        return Answer(True)

    def eof(self) -> Answer:
        return Answer(True)


@dataclass(frozen=True, slots=True)
class Url:
    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        if self.port == _PORTS[self.scheme]:
            return f"[{self.host}]" if ":" in self.host else self.host
        return _authority(self.host, self.port)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


class Http:
    """A GET. The status line is enough, but for a redirect, of which the target is needed.

    A redirect is followed on the same host only (up to 5 times, within the check's timeout); one to
    another host is not, and its own code is judged, with a warning.
    """

    silence: Answer | None = None

    def __init__(
        self,
        check: Check,
        url: Url,
        hops: int,
        open_next: Callable[[Check, Url, int], Dialogue],
    ) -> None:
        self._check, self._url, self._hops, self._open = check, url, hops, open_next
        self._out = b""
        self._head = b""
        self._searched = 0  # so far there is no end of the head; bytes may come one by one

    def begin(self) -> None:
        self._out = (
            f"GET {self._url.path} HTTP/1.1\r\nHost: {self._url.authority}\r\n"
            "User-Agent: lbledger-check\r\nAccept: */*\r\nConnection: close\r\n\r\n"
        ).encode("ascii")

    def take(self) -> bytes:
        out, self._out = self._out, b""
        return out

    def feed(self, data: bytes) -> Answer | None:
        self._head += data
        while True:
            status = _STATUS.match(self._head)
            if status is None:
                return self._unfinished()
            code = int(status[1])
            if code not in _REDIRECTS and code >= 200:
                return self._judge(code)
            end = _HEAD_END.search(self._head, max(status.end() - 2, self._searched))
            if end is None:
                self._searched = max(0, len(self._head) - 3)  # it may have begun
                return self._too_long()
            if code >= 200:
                return self._redirected(code, self._head[: end.end()])
            # An interim answer; the real one follows.
            self._head, self._searched = self._head[end.end() :], 0

    def eof(self) -> Answer:
        return Answer(False, "connection closed before an answer")

    def _unfinished(self) -> Answer | None:
        start = self._head[:7]
        if b"\n" in self._head or b"HTTP/1."[: len(start)] != start:
            return Answer(False, "the answer is not HTTP/1.1")
        if len(self._head) > MAX_LINE:
            return Answer(False, f"the status line is longer than {MAX_LINE} bytes")
        return None

    def _too_long(self) -> Answer | None:
        if len(self._head) > MAX_HEAD:
            return Answer(False, f"the head of the answer is longer than {MAX_HEAD} bytes")
        return None

    def _judge(self, code: int, warning: str = "") -> Answer:
        if any(low <= code <= high for low, high in self._check.codes):
            return Answer(True, warning)
        return Answer(False, f"HTTP status {code}" + (f", {warning}" if warning else ""))

    def _redirected(self, code: int, head: bytes) -> Answer:
        location = _LOCATION.search(head)
        if location is None:
            return self._judge(code)
        there = location[1].decode("ascii", "replace")
        try:
            target = urlsplit(urljoin(str(self._url), there))
            host = target.hostname or ""
            port = target.port or _PORTS.get(target.scheme, 0)
        except ValueError:
            return Answer(False, f"HTTP status {code} with an unreadable Location")
        if not port or host.lower() != self._url.host.lower():
            return self._judge(code, "redirects to another host, not followed")
        if self._hops >= MAX_HOPS:
            return Answer(False, f"redirected more than {MAX_HOPS} times")
        path = quote(target.path or "/", safe="/%:@!$&'()*+,;=~-._")
        if target.query:
            path += "?" + quote(target.query, safe="/%:@!$&'()*+,;=~-._?")
        url = Url(target.scheme, self._url.host, port, path)
        dialogue = self._open(self._check, url, self._hops + 1)
        return Answer(True, next=Redirect(port, dialogue))


class Tls:
    """Another dialogue, inside TLS."""

    silence: Answer | None = None

    def __init__(self, inner: Http, context: ssl.SSLContext, host: str) -> None:
        self._inner = inner
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname=host)
        self._open = False

    def begin(self) -> None:
        self._shake()

    def take(self) -> bytes:
        return self._out.read()

    def feed(self, data: bytes) -> Answer | None:
        self._in.write(data)
        try:
            if not self._open and not self._shake():
                return None
            while True:
                answer = self._inner.feed(self._tls.read(16_384))
                if answer is not None:
                    return answer
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLCertVerificationError as error:
            return Answer(False, f"certificate: {error.verify_message}")
        except ssl.SSLZeroReturnError:
            return self._inner.eof()
        except ssl.SSLError as error:
            return Answer(False, f"TLS: {(error.reason or 'failed').lower().replace('_', ' ')}")

    def eof(self) -> Answer:
        if self._open:
            return self._inner.eof()
        return Answer(False, "connection closed during the TLS handshake")

    def _shake(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        self._open = True
        self._inner.begin()
        self._tls.write(self._inner.take())
        return True


class GrpcDialogue:
    """The health service of a gRPC server, over HTTP/2 without TLS."""

    silence: Answer | None = None

    def __init__(self, service: str, authority: str) -> None:
        self._call = GrpcHealth(service, authority)

    def begin(self) -> None: ...

    def take(self) -> bytes:
        return self._call.take()

    def feed(self, data: bytes) -> Answer | None:
        verdict = self._call.feed(data)
        return None if verdict is None else Answer(not verdict, verdict)

    def eof(self) -> Answer:
        return Answer(False, "connection closed before an answer")


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
