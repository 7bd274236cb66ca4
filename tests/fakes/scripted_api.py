"""An API server that sends exactly the bytes a test wants, for what a well-behaved one never sends.

Each list and watch of a plural takes the next script of that plural; without one, a list shows
`items` and a watch stays open and silent. Optional kinds are not installed.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

Script = Callable[[web.Request, web.StreamResponse], Awaitable[None]]
BUILT_IN = {
    "/api/v1": ("namespaces", "nodes", "services", "pods", "configmaps"),
    "/apis/discovery.k8s.io/v1": ("endpointslices",),
}


class ScriptedApi:
    """One server on loopback; `seen` holds (plural, query) of every list and watch."""

    def __init__(self) -> None:
        self.items: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self.version = "1000"  # of lists
        self.now = "9999"  # said to who only looks at the version
        self.lists: defaultdict[str, deque[Callable[[web.Request], web.Response]]] = defaultdict(
            deque
        )
        self.watches: defaultdict[str, deque[Script]] = defaultdict(deque)
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.tokens: set[str] = set()  # empty: anything goes
        self.refused = 0
        self.arrived = asyncio.Event()  # set at each watch
        self._closing = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def __aenter__(self) -> ScriptedApi:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._get)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing.set()
        assert self._runner is not None
        await self._runner.cleanup()

    def kubeconfig(self, folder: Path, user: dict[str, str] | None = None) -> Path:
        path = folder / "kubeconfig"
        server = {"server": f"http://127.0.0.1:{self.port}"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": "test", "user": user or {"token": "t"}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
        path.write_bytes(msgspec.json.encode(config))  # JSON is YAML
        return path

    def watch_versions(self, plural: str) -> list[str]:
        """The resourceVersion of each watch of a plural, in order."""
        return [q["resourceVersion"] for p, q in self.seen if p == plural and "watch" in q]

    def list_count(self, plural: str) -> int:
        """Lists of a plural; a look at the version (limit 1) is none."""
        return sum(p == plural and "watch" not in q and q.get("limit") != "1"
                   for p, q in self.seen)  # fmt: skip

    async def hold(self) -> None:
        """Stay silent until the server is closed."""
        await self._closing.wait()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.tokens and token not in self.tokens:
            self.refused += 1
            return status(401, "Unauthorized", "Unauthorized")
        if request.path in BUILT_IN:
            names = BUILT_IN[request.path]
            return web.json_response({"resources": [{"name": n, "kind": n} for n in names]})
        plural = request.path.rpartition("/")[2]
        if not any(request.path.startswith(root) for root in BUILT_IN):
            return status(404, "NotFound", "the server could not find the requested resource")
        query = dict(request.query)
        self.seen.append((plural, query))
        if "watch" in query:
            return await self._watch(request, plural)
        if query.get("limit") == "1":
            return page([], self.now)
        if self.lists[plural]:
            return self.lists[plural].popleft()(request)
        return page(self.items[plural], self.version)

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        if not self.watches[plural]:
            await response.prepare(request)
            self.arrived.set()
            await self.hold()
            return response
        script = self.watches[plural].popleft()
        self.arrived.set()
        if isinstance(script, _Refusal):
            return script.response()
        await response.prepare(request)
        await script(request, response)
        return response


class _Refusal:
    def __init__(self, response: Callable[[], web.Response]) -> None:
        self.response = response

    async def __call__(self, _: web.Request, __: web.StreamResponse) -> None:
        raise AssertionError("a refusal is answered before a stream begins")


def refuse(code: int, reason: str, message: str = "", **headers: str) -> Script:
    """A watch that is answered with a status instead of a stream."""
    return _Refusal(lambda: status(code, reason, message, headers))


def send(*lines: bytes, then: Callable[[web.Request], Awaitable[None]] | None = None) -> Script:
    """A watch that sends these bytes as they are, and ends (or does what `then` does)."""

    async def script(request: web.Request, response: web.StreamResponse) -> None:
        for line in lines:
            await response.write(line)
        if then is not None:
            await then(request)

    return script


async def abort(request: web.Request) -> None:
    """Break the connection."""
    assert request.transport is not None
    await asyncio.sleep(0.05)  # so that what was written leaves before
    request.transport.abort()


def event(kind: str, body: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"type": kind, "object": body}) + b"\n"


def status(
    code: int, reason: str, message: str, headers: dict[str, str] | None = None
) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
    body |= {"reason": reason, "message": message or reason}
    names = {name.replace("_", "-"): value for name, value in (headers or {}).items()}
    return web.json_response(body, status=code, headers=names)


def page(items: list[dict[str, Any]], version: str, more: str = "") -> web.Response:
    metadata = {"resourceVersion": version, "continue": more}
    return web.Response(
        body=msgspec.json.encode({"kind": "List", "metadata": metadata, "items": items}),
        content_type="application/json",
    )


def service(name: str, version: int, color: str = "red", uid: str = "") -> dict[str, Any]:
    """A Service as a real API server sends it."""
    return {
        "kind": "Service",
        "apiVersion": "v1",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": uid or f"uid-of-{name}",
            "resourceVersion": str(version),
            "creationTimestamp": "2026-11-30T14:04:01Z",
            "labels": {"color": color},
            "managedFields": [{"manager": "kubectl", "operation": "Update"}],
        },
        "spec": {"type": "ClusterIP", "ports": [{"port": 80, "targetPort": 8080}]},
        "status": {"loadBalancer": {}},
    }
