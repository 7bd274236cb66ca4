"""The HTTP side: who may ask, which handler answers, and in what form.

`KubeServer` is a development server. It listens on loopback, knows one bearer token, keeps its
objects in memory (and in a folder, if it is given one), and behaves towards clients as a
kube-apiserver 1.36 does. It is not secure, not replicated, and runs no controllers but garbage
collection.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from aiohttp import web

from sandbox.kube import admin, bodies, discovery, documents, options, reads, requests
from sandbox.kube.bootstrap import bootstrap, kept_token, kubeconfig
from sandbox.kube.builtin import builtin
from sandbox.kube.collector import Collector
from sandbox.kube.crds import definition
from sandbox.kube.deletes import Deleter, delete_options
from sandbox.kube.errors import ApiError, PlainError
from sandbox.kube.faults import Cut, Fault, Faults
from sandbox.kube.journal import Journal
from sandbox.kube.requests import Target
from sandbox.kube.resources import Registry
from sandbox.kube.store import Store
from sandbox.kube.tls import Certificate
from sandbox.kube.watches import Watch, error_line
from sandbox.kube.writes import Writer

_JSON = "application/json"
_MAX_BODY = 3 * 1024 * 1024
_PUBLIC = ("/healthz", "/livez", "/readyz", "/version")
_encode = msgspec.json.encode


class KubeServer:
    """A small Kubernetes API on loopback, behind two doors.

    `url` is plain HTTP, for tests; `secure_url` is TLS, for kubeconfigs: `kubectl` and others
    send a token over TLS only.

    `faults` orders trouble and counts requests; `cut_watches`, `compact` and `rotate_token` do
    what their names say. All of it can be reached under `/sandbox/` as well.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        http_port: int = 0,
        token: str | None = None,
        state: Path | str | None = None,
        history: int = 10_000,
        bookmark_every: float = 60.0,
        longest_watch: float = 3600.0,
        max_object: int = 1536 * 1024,
    ) -> None:
        self._state = Path(state) if state is not None else None
        self.token = token or kept_token(self._state)
        self.faults = Faults()
        self.store = Store(history=history, max_object=max_object)
        self.registry = Registry(builtin())
        self.registry.add(definition(self.registry))
        self.writer = Writer(self.registry, self.store)
        self._deleter = Deleter(self.store, self.writer)
        self._collector = Collector(self.registry, self.store, self.writer, self._deleter)
        self._journal = Journal(self._state) if self._state is not None else None
        self._bookmark_every = bookmark_every
        self._longest_watch = longest_watch
        self._ports = {"http": http_port, "https": port}
        self._certificate: Certificate | None = None
        self._old_tokens: set[str] = set()
        self._watches: dict[Watch, tuple[Target, asyncio.Event]] = {}
        self._cuts: dict[Watch, Cut] = {}
        self._runner: web.ServerRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # -- life --------------------------------------------------------------------------------

    async def start(self) -> KubeServer:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def _start(self) -> None:
        if self._journal is not None:
            self._journal.load(self.store, self.registry)
        bootstrap(self.writer, self.registry, self.store)
        server = web.Server(self._handle, access_log=None, handler_cancellation=True)
        self._runner = web.ServerRunner(server, shutdown_timeout=1)
        await self._runner.setup()
        self._certificate = Certificate.kept_in(self._state)
        contexts = {"http": None, "https": self._certificate.server_context()}
        for scheme, context in contexts.items():
            port = self._ports[scheme]
            site = web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=context)
            await site.start()
            self._ports[scheme] = self._runner.addresses[-1][1]
        self._tasks.append(asyncio.create_task(self._collector.run()))

    async def stop(self) -> None:
        for watch in list(self._watches):
            watch.close()
            self._watches[watch][1].set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._journal is not None:
            self._journal.close()

    async def __aenter__(self) -> KubeServer:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._ports['http']}"

    @property
    def secure_url(self) -> str:
        return f"https://127.0.0.1:{self._ports['https']}"

    def write_kubeconfig(self, path: Path | str) -> Path:
        """Write a kubeconfig that reaches this server; only its owner may read it."""
        if self._certificate is None:
            raise RuntimeError("the server must be started before its kubeconfig is written")
        authority = self._certificate.certificate
        return kubeconfig(Path(path), self.secure_url, self.token, authority)

    # -- trouble to order --------------------------------------------------------------------

    def cut_watches(self, how: Cut = "clean", plural: str = "") -> int:
        """Cut the open watches (of one plural): returns how many.

        `clean` ends the stream as a time-out does, `midline` breaks the connection within a
        line, `hang` sends nothing more but keeps the connection, `error` sends a 410 and ends.
        """
        cut = 0
        for watch, (target, _) in list(self._watches.items()):
            if plural in ("", target.resource.plural):
                self._cuts[watch] = how
                if how != "hang":
                    watch.close()
                cut += 1
        return cut

    def compact(self, version: int | None = None) -> int:
        """Forget history, so that older resource versions are refused with 410."""
        return self.store.compact(version)

    def rotate_token(self, token: str | None = None, *, keep_old: bool = False) -> str:
        """Accept another token; the old one is refused from now on unless it is kept."""
        if keep_old:
            self._old_tokens.add(self.token)
        else:
            self._old_tokens.clear()
        self.token = token or secrets.token_urlsafe(24)
        return self.token

    # -- requests ----------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._answer(request)
        except ApiError as error:
            return _json(error.body(), error.code, error.headers)
        except PlainError as error:
            return web.Response(text=error.text, status=error.code)
        except ConnectionError:
            # The client has left, or was cut off on order: there is nobody to answer.
            return web.Response(status=499)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        known = self._authenticated(request)
        if path in _PUBLIC:
            return web.Response(text="ok") if path != "/version" else _json(discovery.VERSION)
        if path.startswith("/sandbox/"):
            if not known:
                raise ApiError(401, "Unauthorized")
            return await admin.answer(self, request)
        document = documents.answer(
            self.registry,
            path,
            request.headers.get("Accept", ""),
            address=self.secure_url.removeprefix("https://"),
            known=known,
        )
        if document is not None:
            return document
        if not path.startswith(("/api/", "/apis/")):
            raise PlainError(404, "404 page not found\n")
        target = requests.target(self.registry, path)
        query = dict(request.query)
        verb = target.verb(request.method, query)
        if not known:
            raise requests.anonymous(target, verb)
        self.faults.count(verb, target.noun)
        fault = self.faults.take(verb, request.path_qs)
        if fault is not None:
            await self._strike(request, fault)
        response = await self._dispatch(request, target, verb, query)
        if fault is not None and fault.drop == "after":
            _abort(request)
        return response

    def _authenticated(self, request: web.BaseRequest) -> bool:
        """Whether the caller showed the token; a wrong one is refused, none is anonymous."""
        header = request.headers.get("Authorization", "")
        if not header:
            return False
        kind, _, token = header.partition(" ")
        accepted = {self.token, *self._old_tokens}
        if kind.lower() != "bearer" or not any(
            secrets.compare_digest(token.strip(), known) for known in accepted
        ):
            raise ApiError(401, "Unauthorized")
        return True

    async def _strike(self, request: web.BaseRequest, fault: Fault) -> None:
        if fault.latency:
            await asyncio.sleep(fault.latency)
        if fault.drop == "before":
            _abort(request)
        if fault.status:
            raise fault.error()

    async def _dispatch(
        self, request: web.BaseRequest, target: Target, verb: str, query: Mapping[str, str]
    ) -> web.StreamResponse:
        form = requests.form(request.headers.get("Accept", ""))
        if verb == "watch":
            return await self._watch(request, target, query, form)
        if verb == "list":
            return _raw(reads.listing(self.store, target, query, form))
        if verb == "get":
            include = query.get("includeObject", "")
            return _raw(reads.one(self.store, target, form, include))
        body = await _body(request)
        return self._write(request, target, verb, query, body)

    def _write(
        self,
        request: web.BaseRequest,
        target: Target,
        verb: str,
        query: Mapping[str, str],
        body: bytes,
    ) -> web.StreamResponse:
        if verb in ("delete", "deletecollection"):
            kind = request.headers.get("Content-Type")
            return self._delete(target, verb, query, body, kind)
        how = options.read(query, request.headers, target.subresource)
        resource, namespace = target.resource, target.namespace or ""
        if verb == "patch":
            obj, made = self.writer.patch(resource, namespace, target.name, body, how)
        else:
            parsed = bodies.parse(body, resource, how.content_type)
            sent = bodies.expect_kind(parsed, resource)
            if verb == "create":
                obj, made = self.writer.create(resource, namespace, "", sent, how), True
            else:
                obj, made = self.writer.update(resource, namespace, target.name, sent, how)
        form = requests.form(request.headers.get("Accept", ""))
        shaped = reads.shaped(resource, obj, form)
        response = _json(shaped, 201 if made else 200)
        for warning in how.warnings:
            response.headers.add("Warning", f'299 - "{_escaped(warning)}"')
        return response

    def _delete(
        self,
        target: Target,
        verb: str,
        query: Mapping[str, str],
        body: bytes,
        content_type: str | None,
    ) -> web.StreamResponse:
        resource, namespace = target.resource, target.namespace or ""
        parsed = bodies.parse(body, resource, content_type) if body else None
        options = delete_options(parsed, dict(query))
        dry_run = query.get("dryRun") == "All" or options.get("dryRun") == ["All"]
        if verb == "delete":
            return _json(
                self._deleter.delete(resource, namespace, target.name, options, dry_run=dry_run)
            )
        selected = requests.selection(query, resource)
        form = requests.form("")
        before = reads.listing(self.store, target, query, form)
        for space, name in reads.matching(self.store, target, selected):
            self._deleter.delete(resource, space, name, options, dry_run=dry_run)
        return _raw(before)

    # -- watches -----------------------------------------------------------------------------

    async def _watch(
        self,
        request: web.BaseRequest,
        target: Target,
        query: Mapping[str, str],
        form: requests.Form,
    ) -> web.StreamResponse:
        watch = Watch(
            self.store,
            target,
            query,
            form,
            bookmark_every=self._bookmark_every,
            longest=self._longest_watch,
        )
        response = web.StreamResponse(headers={"Content-Type": _JSON})
        hung = asyncio.Event()
        self._watches[watch] = (target, hung)
        try:
            await response.prepare(request)
            await self._stream(request, response, watch, hung)
            await response.write_eof()
        finally:
            self._watches.pop(watch, None)
            self._cuts.pop(watch, None)
        return response

    async def _stream(
        self,
        request: web.BaseRequest,
        response: web.StreamResponse,
        watch: Watch,
        hung: asyncio.Event,
    ) -> None:
        async for lines in watch.lines():
            if self._cuts.get(watch) == "hang":
                await hung.wait()
                return
            await response.write(lines)
        match self._cuts.get(watch):
            case "hang":
                await hung.wait()
            case "midline":
                await response.write(b'{"type":"MODIFIED","object":{"apiVersion":"v1","ki')
                _abort(request, flush=True)
            case "error":
                await response.write(
                    error_line(ApiError(410, "too old resource version: cut by order of a test"))
                )


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return _raw(_encode(value), status, headers)


def _raw(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=body, status=status, headers={"Content-Type": _JSON} | dict(headers or {})
    )


def _abort(request: web.BaseRequest, *, flush: bool = False) -> NoReturn:
    """Break the connection without a word; with `flush`, after what was written has gone out."""
    transport = request.transport
    if transport is not None and flush:
        transport.close()
    elif isinstance(transport, asyncio.WriteTransport):
        transport.abort()
    raise ConnectionResetError("cut by order of a test")


async def _body(request: web.BaseRequest) -> bytes:
    if (request.content_length or 0) > _MAX_BODY:
        raise ApiError(413, f"Request entity too large: limit is {_MAX_BODY}")
    chunks = []
    size = 0
    async for chunk in request.content.iter_any():
        size += len(chunk)
        if size > _MAX_BODY:
            raise ApiError(413, f"Request entity too large: limit is {_MAX_BODY}")
        chunks.append(chunk)
    return b"".join(chunks)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
