"""The Kubernetes client over real sockets: errors, lines, time limits, credentials.

What a Kubernetes API answers is replayed elsewhere (tests/contracts); here the bytes are scripted.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import ssl
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from sandbox.kube.tls import Certificate
from services.kit import kube as api
from services.kit.kube import Kube, KubeError, Resource
from services.kit.kube_auth import Credentials
from services.kit.kube_lines import LineSplitter
from tests.waiting import eventually

LB = Resource("loadbalancer.harvesterhci.io", "v1beta1", "loadbalancers")
NODE = Resource("", "v1", "nodes", namespaced=False)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Answers with `handler`; keeps what came."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[web.Request] = []
        self.bodies: list[bytes] = []
        self.handler: Handler = ok

    @property
    def tokens(self) -> list[str]:
        return [r.headers.get("Authorization", "") for r in self.requests]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        self.bodies.append(await request.read())
        return await self.handler(request)


async def ok(_: web.Request) -> web.Response:
    return web.json_response({"metadata": {"name": "x"}})


def answering(status: int, body: object, **headers: str) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        names = {key.replace("_", "-"): value for key, value in headers.items()}
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return web.Response(status=status, body=data, headers=names)

    return handler


def streaming(*chunks: bytes, hold: bool = False) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(0)
        if hold:
            await asyncio.sleep(30)
        return response

    return handler


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server()
    app = web.Application(client_max_size=8 << 20)
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    scheme = "https" if tls else "http"
    server.url = f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as running:
        yield running


def write_config(folder: Path, url: str, user: dict[str, Any], **cluster: Any) -> Path:
    path = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "a",
        "clusters": [{"name": "c", "cluster": {"server": url, **cluster}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "a", "context": {"cluster": "c", "user": "u"}}],
    }
    path.write_bytes(msgspec.json.encode(config))
    return path


@pytest.fixture
async def kube(server: Server, tmp_path: Path) -> AsyncIterator[Kube]:
    async with await Kube.connect(str(write_config(tmp_path, server.url, {"token": "t0"}))) as made:
        yield made


def refusal(code: int, reason: str = "", **details: Any) -> dict[str, Any]:
    return {"kind": "Status", "code": code, "reason": reason, "message": "no", "details": details}


# --- paths, bodies, answers ---


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (LB.path(), "/apis/loadbalancer.harvesterhci.io/v1beta1/loadbalancers"),
        (LB.path("ns", "a"),
         "/apis/loadbalancer.harvesterhci.io/v1beta1/namespaces/ns/loadbalancers/a"),
        (LB.path("ns", "a", "status"),
         "/apis/loadbalancer.harvesterhci.io/v1beta1/namespaces/ns/loadbalancers/a/status"),
        (NODE.path("ignored", "n.x"), "/api/v1/nodes/n.x"),
        (LB.group_version, "loadbalancer.harvesterhci.io/v1beta1"),
        (NODE.group_version, "v1"),
    ],
)  # fmt: skip
def test_paths_are_built_from_the_resource(path: str, expected: str) -> None:
    """Core and named groups, with and without namespace, object and subresource."""
    assert path == expected


async def test_writes_say_what_they_are(kube: Kube, server: Server) -> None:
    """Method, path, query, content type and body of every kind of write."""
    path = LB.path("ns", "a")
    await kube.apply(path, {"a": 1}, field_manager="m", subresource="status")
    await kube.apply(path, b"{}", field_manager="m", force=False)
    await kube.patch(path, {"a": None}, field_manager="m")
    await kube.patch(path, [{"op": "remove", "path": "/a"}], api.JSON_PATCH)
    await kube.create(LB.path("ns"), {"a": 1}, field_manager="m")
    await kube.replace(path, {"a": 1}, subresource="status")
    await kube.delete(path, uid="u", resource_version="5", propagation="Background")

    sent = [
        (r.method, r.path_qs.removeprefix(LB.path("ns")), r.headers["Content-Type"], body)
        for r, body in zip(server.requests, server.bodies, strict=True)
    ]
    assert sent == [
        ("PATCH", "/a/status?fieldManager=m&force=true", api.APPLY, b'{"a":1}'),
        ("PATCH", "/a?fieldManager=m&force=false", api.APPLY, b"{}"),
        ("PATCH", "/a?fieldManager=m", api.MERGE, b'{"a":null}'),
        ("PATCH", "/a", api.JSON_PATCH, b'[{"op":"remove","path":"/a"}]'),
        ("POST", "?fieldManager=m", api.JSON, b'{"a":1}'),
        ("PUT", "/a/status", api.JSON, b'{"a":1}'),
        ("DELETE", "/a", api.JSON,
         b'{"apiVersion":"v1","kind":"DeleteOptions",'
         b'"preconditions":{"uid":"u","resourceVersion":"5"},"propagationPolicy":"Background"}'),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (400, "BadRequest", api.BadRequest),
        (403, "Forbidden", api.Forbidden),
        (404, "NotFound", api.NotFound),
        (409, "Conflict", api.Conflict),
        (409, "AlreadyExists", api.AlreadyExists),
        (410, "Expired", api.Gone),
        (415, "UnsupportedMediaType", api.UnsupportedMediaType),
        (422, "Invalid", api.Invalid),
        (429, "TooManyRequests", api.TooManyRequests),
        (500, "InternalError", api.Unavailable),
        (503, "ServiceUnavailable", api.Unavailable),
        (418, "Teapot", KubeError),
    ],
)
async def test_a_refusal_is_an_error_of_its_kind(
    code: int, reason: str, expected: type[KubeError], kube: Kube, server: Server
) -> None:
    """Status, reason, message and details of the server's answer are in the error."""
    server.handler = answering(code, refusal(code, reason, name="a"))
    with pytest.raises(KubeError) as caught:
        await kube.get("/api/v1/nodes/a")
    error = caught.value
    assert type(error) is expected
    assert (error.status, error.reason, error.message) == (code, reason, "no")
    assert error.details == {"name": "a"}


async def test_how_long_to_wait_is_told(kube: Kube, server: Server) -> None:
    """Retry-After counts; without it, the Status's own word does."""
    server.handler = answering(429, refusal(429), Retry_After="7")
    with pytest.raises(api.TooManyRequests) as caught:
        await kube.get("/x")
    assert caught.value.retry_after == 7.0
    server.handler = answering(504, refusal(504, retryAfterSeconds=3), Retry_After="Mon, 30 Nov")
    with pytest.raises(api.Unavailable) as late:
        await kube.get("/x")
    assert late.value.retry_after == 3.0


@pytest.mark.parametrize("body", [b"", b"<html>Bad gateway</html>", b"\xff\xfe", b"null"])
async def test_a_refusal_without_a_status_object(body: bytes, kube: Kube, server: Server) -> None:
    """Whatever a proxy in between answers is an error with what it said, not a crash."""
    server.handler = answering(502, body)
    with pytest.raises(api.Unavailable) as caught:
        await kube.get("/x")
    assert caught.value.status == 502


async def test_a_good_answer_that_is_no_list(kube: Kube, server: Server) -> None:
    """A login page with status 200 is not an empty list."""
    server.handler = answering(200, b"<html>please log in</html>")
    with pytest.raises(api.Unavailable, match="unreadable"):
        async for _ in kube.list_pages(LB.path()):
            pass


async def test_no_server_and_a_slow_one_are_unavailable(
    kube: Kube, server: Server, tmp_path: Path
) -> None:
    """A refused connection and an answer that does not come: Unavailable, within the limit."""

    async def slow(_: web.Request) -> web.Response:
        await asyncio.sleep(30)
        raise AssertionError

    server.handler = slow
    with pytest.raises(api.Unavailable, match="no answer in time"):
        await kube.get("/x", timeout=0.2)
    path = write_config(tmp_path, "http://127.0.0.1:1", {"token": "t"})
    async with await Kube.connect(str(path)) as nowhere:
        with pytest.raises(api.Unavailable, match="GET /x"):
            await nowhere.get("/x")


async def test_a_redirect_is_not_followed(kube: Kube, server: Server) -> None:
    """The token goes to the API server's address and nowhere else."""
    server.handler = answering(302, b"", Location="http://127.0.0.1:1/steal")
    body = await kube.get("/x")
    assert body == b""
    assert len(server.requests) == 1


# --- lists and discovery ---


async def test_a_list_is_read_page_by_page(kube: Kube, server: Server) -> None:
    """Limit, selector and continue token go along; every item comes once, raw."""
    pages = itertools.count(1)

    async def handler(_: web.Request) -> web.Response:
        number = next(pages)
        metadata = {"resourceVersion": "5", "continue": f"c{number}" if number < 3 else ""}
        return web.json_response({"items": [{"n": number}], "metadata": metadata})

    server.handler = handler
    found = [
        bytes(item)
        async for page in kube.list_pages("/x", 1, {"labelSelector": "a=b"})
        for item in page.items or []
    ]
    assert found == [b'{"n": 1}', b'{"n": 2}', b'{"n": 3}']
    assert [dict(r.query) for r in server.requests] == [
        {"labelSelector": "a=b", "limit": "1"},
        {"labelSelector": "a=b", "limit": "1", "continue": "c1"},
        {"labelSelector": "a=b", "limit": "1", "continue": "c2"},
    ]


async def test_discovery_tells_status_subresources(kube: Kube, server: Server) -> None:
    """A kind has a status subresource when discovery lists one; the answer is kept until asked."""
    resources: list[dict[str, Any]] = [
        {"name": "loadbalancers", "kind": "LoadBalancer", "namespaced": True, "verbs": ["get"]},
        {"name": "loadbalancers/status", "kind": "LoadBalancer"},
        {"name": "ippools", "kind": "IPPool"},
    ]
    server.handler = answering(200, {"resources": resources})
    found = await kube.resources(LB.group_version)
    assert set(found) == {"loadbalancers", "ippools"}
    assert (found["loadbalancers"].status, found["ippools"].status) == (True, False)
    assert found["loadbalancers"].namespaced

    server.handler = answering(404, b"404 page not found")
    assert await kube.resources(LB.group_version) == found
    assert await kube.resources(LB.group_version, refresh=True) == {}


# --- watches ---


def line(number: int, size: int = 0) -> bytes:
    return msgspec.json.encode({"type": "ADDED", "object": {"n": number, "x": "x" * size}}) + b"\n"


async def watched(kube: Kube, **limits: float) -> tuple[list[int], KubeError | None]:
    """The numbers of the events of one watch, and how it ended."""
    found: list[int] = []
    try:
        async for batch in kube.watch("/x", "5", **limits):
            found += [msgspec.json.decode(event.object)["n"] for event in batch]
    except KubeError as error:
        return found, error
    return found, None


async def test_a_watch_asks_for_what_it_needs(kube: Kube, server: Server) -> None:
    """Version, bookmarks and time limit; no compression, which would hold events back."""
    server.handler = streaming()
    assert await watched(kube, timeout_s=7) == ([], None)
    (request,) = server.requests
    assert dict(request.query) == {
        "watch": "1", "resourceVersion": "5", "allowWatchBookmarks": "true", "timeoutSeconds": "7",
    }  # fmt: skip
    assert request.headers["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("size", [1, 7, 1000, 65_536])
async def test_lines_are_put_together_however_they_are_cut(
    size: int, kube: Kube, server: Server
) -> None:
    """Short and empty lines, lines of megabytes, half a line at the end."""
    length = 40 if size < 1000 else 2_500_000
    whole = line(1) + b"\n" + line(2, length) + line(3) + line(4)[:-5]
    server.handler = streaming(*(whole[i : i + size] for i in range(0, len(whole), size)))
    assert await watched(kube) == ([1, 2, 3], None)


async def test_a_line_without_end_is_given_up() -> None:
    """A stream that never ends its line does not fill the memory."""
    lines = LineSplitter(limit=100)
    assert lines.feed(b"x" * 90) == []
    with pytest.raises(api.Unavailable, match="100 bytes"):
        lines.feed(b"x" * 20)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (b'{"type":"ERROR","object":{"code":410,"reason":"Expired"}}\n', api.Gone),
        (b'{"type":"ERROR","object":{"code":429}}\n', api.TooManyRequests),
        (b'{"type":"ERROR","object":{"code":500,"message":"etcd"}}\n', api.Unavailable),
        (b'{"type":"ERROR","object":null}\n', KubeError),
        (b"\xff\xfe\n", api.Unavailable),
        (b'{"object":{}}\n', api.Unavailable),
    ],
)
async def test_what_ends_a_watch_comes_after_its_events(
    last: bytes, expected: type[KubeError], kube: Kube, server: Server
) -> None:
    """Events before an ERROR event or an unreadable line are handed on first."""
    server.handler = streaming(line(1) + line(2) + last + line(3))
    found, error = await watched(kube)
    assert found == [1, 2]
    assert type(error) is expected


async def test_a_silent_watch_is_idle(kube: Kube, server: Server) -> None:
    """Nothing for the idle limit ends the watch (report-35)."""
    server.handler = streaming(line(1), hold=True)
    found, error = await watched(kube, idle_s=0.3)
    assert found == [1]
    assert isinstance(error, api.Idle)


async def test_a_broken_connection_is_unavailable(kube: Kube, server: Server) -> None:
    """A connection that is cut within a chunk: whole lines count, the rest is dropped."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(line(1) + line(2)[:10])
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    server.handler = handler
    found, error = await watched(kube)
    assert found == [1]
    assert isinstance(error, api.Unavailable)


# --- credentials ---


def accepting(*tokens: str) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") not in {f"Bearer {t}" for t in tokens}:
            return web.json_response(refusal(401, "Unauthorized"), status=401)
        return web.json_response({})

    return handler


async def test_a_rotated_token_file_is_read_at_once_report_37(
    server: Server, tmp_path: Path
) -> None:
    """After the file changed, the next request carries the new token; nothing is restarted."""
    token = tmp_path / "token"
    token.write_text("first\n")
    config = write_config(tmp_path, server.url, {"tokenFile": str(token)})
    async with await Kube.connect(str(config)) as kube:
        await kube.get("/x")
        token.write_text("second")
        await kube.get("/x")
    assert server.tokens == ["Bearer first", "Bearer second"]


async def test_a_401_reads_the_credentials_and_tries_once_more_report_37(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change that could not be seen costs one 401; a token that stays bad is Unauthorized."""
    token = tmp_path / "token"
    token.write_text("first")
    config = write_config(tmp_path, server.url, {"tokenFile": str(token)})
    async with await Kube.connect(str(config)) as kube:
        credentials = kube._credentials
        monkeypatch.setattr(credentials, "_outdated", lambda: False)
        server.handler = accepting("second")
        token.write_text("second")
        await kube.get("/x")
        assert server.tokens == ["Bearer first", "Bearer second"]

        server.handler = accepting("third")
        with pytest.raises(api.Unauthorized):
            await kube.get("/x")
        assert len(server.requests) == 4


async def test_many_requests_share_one_renewal_report_37(server: Server, tmp_path: Path) -> None:
    """Requests that are refused together read the credentials once."""
    reads: list[int] = []

    class Counting(Credentials):
        async def _read(self) -> None:
            reads.append(1)
            await super()._read()

        def _outdated(self) -> bool:
            return False

    token = tmp_path / "token"
    token.write_text("first")
    config = write_config(tmp_path, server.url, {"tokenFile": str(token)})
    async with await Kube.over(Counting(str(config))) as kube:
        server.handler = accepting("second")
        token.write_text("second")
        await asyncio.gather(*(kube.get("/x") for _ in range(8)))
    assert len(reads) == 2


async def test_a_service_account_works_as_in_a_pod_report_37(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host from the environment, token and authority from files that the kubelet replaces."""
    tls, authority = make_tls(tmp_path)
    account = tmp_path / "account"
    account.mkdir()
    (account / "ca.crt").write_bytes(authority.read_bytes())
    (account / "one").write_text("first")
    (account / "two").write_text("second")
    (account / "token").symlink_to("one")
    async with serving(tls) as secure:
        host, _, port = secure.url.removeprefix("https://").partition(":")
        monkeypatch.delenv("KUBECONFIG", raising=False)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
        async with await Kube.over(Credentials(service_account=account)) as kube:
            await kube.get("/x")
            (account / "next").symlink_to("two")
            (account / "next").rename(account / "token")  # as the kubelet does: atomically
            await kube.get("/x")
        assert secure.tokens == ["Bearer first", "Bearer second"]


async def test_an_unknown_authority_is_refused(tmp_path: Path) -> None:
    """TLS is verified: without the right authority nothing is sent, not even the token."""
    tls, authority = make_tls(tmp_path)
    async with serving(tls) as secure:
        async with await Kube.connect(
            str(write_config(tmp_path, secure.url, {"token": "t"}))
        ) as kube:
            with pytest.raises(api.Unavailable, match=r"(?i)certificate"):
                await kube.get("/x")
        assert secure.requests == []
        data = base64.b64encode(authority.read_bytes()).decode()
        good = write_config(
            tmp_path, secure.url, {"token": "t"}, **{"certificate-authority-data": data}
        )
        async with await Kube.connect(str(good)) as kube:
            await kube.get("/x")


async def test_an_exec_plugin_gives_the_token(server: Server, tmp_path: Path) -> None:
    """Its token is used, and asked for again when the server refuses it."""
    plugin = tmp_path / "plugin.sh"
    count = tmp_path / "count"
    plugin.write_text(
        f"#!/bin/sh\necho x >> {count}\nn=$(wc -l < {count} | tr -d ' ')\n"
        'echo "{\\"apiVersion\\":\\"client.authentication.k8s.io/v1\\",\\"kind\\":'
        '\\"ExecCredential\\",\\"status\\":{\\"token\\":\\"run-$n\\"}}"\n'
    )
    plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    user = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": str(plugin),
            "args": [],
            "interactiveMode": "Never",
        }
    }
    async with await Kube.connect(str(write_config(tmp_path, server.url, user))) as kube:
        await kube.get("/x")
        await kube.get("/x")
        server.handler = accepting("run-2")
        await kube.get("/x")
    assert server.tokens == ["Bearer run-1", "Bearer run-1", "Bearer run-1", "Bearer run-2"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        (b"{", ""),
        (b"{}", ""),
        (b"[]", ""),
        (b'{"current-context": "nope", "contexts": [], "clusters": []}', "nope"),
    ],
    ids=["absent", "not-yaml", "empty", "list", "no-context"],
)
async def test_an_unusable_kubeconfig_is_named(
    content: bytes | None, said: str, tmp_path: Path
) -> None:
    """The error names the file and what is wrong; it is a KubeError, so it can be waited out."""
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(api.CredentialsError) as caught:
        await Kube.connect(str(path))
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


async def test_an_unreadable_change_keeps_what_there_was(server: Server, tmp_path: Path) -> None:
    """A kubeconfig that is being rewritten does not stop requests; the new one is then used."""
    path = write_config(tmp_path, server.url, {"token": "first"})
    async with await Kube.connect(str(path)) as kube:
        path.write_text("{")
        await kube.get("/x")
        write_config(tmp_path, server.url, {"token": "second"})

        async def renewed() -> bool:
            await kube.get("/x")
            return server.tokens[-1] == "Bearer second"

        await eventually(renewed, 10)
    assert set(server.tokens[:-1]) == {"Bearer first"}


async def test_the_token_is_nowhere_to_be_seen(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not in a repr, an error or a log line, whatever goes wrong."""
    secret = "s3cr3t-t0ken"
    path = write_config(tmp_path, server.url, {"token": secret})
    async with await Kube.connect(str(path)) as kube:
        said = [repr(kube), repr(kube._credentials), repr(await kube._credentials.access())]
        for handler in (accepting("other"), answering(500, b"x"), streaming(b"x\n")):
            server.handler = handler
            for call in (kube.get("/x"), watched(kube)):
                try:
                    said.append(repr(await call))
                except KubeError as error:
                    said += [str(error), repr(error), repr(error.__cause__), repr(error.details)]
    said += capfd.readouterr()
    assert secret not in "".join(said)


def test_only_connecting_costs_the_big_import() -> None:
    """Importing the client does not import kubernetes_asyncio (2 s and 112 MB)."""
    code = "import sys, services.kit.kube; print('kubernetes_asyncio' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.strip() == b"False"


def make_tls(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """A self-signed certificate for 127.0.0.1."""
    made = Certificate.kept_in(None)
    authority = folder / "authority.pem"
    authority.write_bytes(made.certificate)
    return made.server_context(), authority
