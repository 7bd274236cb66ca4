"""`/healthz`, `/readyz` and `/metrics` of a service.

Live means that the event loop turns: a service waiting for NATS or Postgres is live and not ready,
so that nothing is restarted for a fault that a restart does not cure.
"""

from __future__ import annotations

import msgspec
import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, Gauge, generate_latest

log = structlog.get_logger()
_ready = Gauge("lbledger_ready", "1 while this part of the service is ready", ["part"])


class Health:
    """What this service depends on, each part ready or not, with why."""

    def __init__(self, service: str) -> None:
        self.service = service
        self._parts: dict[str, tuple[bool, str]] = {}
        self._runner: web.AppRunner | None = None
        self.port = 0

    def set(self, part: str, ok: bool, why: str = "") -> None:
        before = self._parts.get(part)
        self._parts[part] = (ok, "" if ok else why)
        _ready.labels(part).set(ok)
        if before is not None and before[0] == ok:
            return
        if ok:
            log.info("health.ready", part=part)
        else:
            log.warning("health.not_ready", part=part, why=why)

    @property
    def ready(self) -> bool:
        return bool(self._parts) and all(ok for ok, _ in self._parts.values())

    def report(self) -> dict[str, object]:
        parts = {name: {"ready": ok, "why": why} for name, (ok, why) in self._parts.items()}
        return {"service": self.service, "ready": self.ready, "parts": parts}

    async def serve(self, host: str, port: int) -> None:
        """Listen; port 0 takes any free one (then in `self.port`), -1 does not listen."""
        if port < 0:
            return
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        log.info("health.listening", host=host, port=self.port)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.json_response({"service": self.service, "live": True})

    async def _readyz(self, _: web.Request) -> web.Response:
        body = msgspec.json.encode(self.report())
        status = 200 if self.ready else 503
        return web.Response(body=body, status=status, content_type="application/json")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})
