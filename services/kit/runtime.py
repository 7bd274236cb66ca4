"""Running one service: settings, signals, connections that are waited for, health, shutdown.

Start order does not matter: a service waits for NATS, Postgres and the migrated schema, says what
it waits for, and is live but not ready meanwhile. SIGTERM and SIGINT set `stop`; a service has 10 s
to end what it began, after which the process leaves (everything half done is in a transaction).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from schema.subjects import STREAMS, StreamSpec
from services.kit import db, garbage, log
from services.kit.bus import Bus
from services.kit.config import ConfigError, Settings, public_url
from services.kit.health import Health

logger = structlog.get_logger()
SHUTDOWN_S: Final = 10.0
T = TypeVar("T")


@dataclass
class Runtime:
    """What a service's `run` gets."""

    name: str
    settings: Settings
    health: Health
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    _bus: Bus | None = None
    _engine: AsyncEngine | None = None
    _opening: tuple[asyncio.Lock, asyncio.Lock] = field(
        default_factory=lambda: (asyncio.Lock(), asyncio.Lock())
    )

    @classmethod
    def create(cls, name: str, settings: Settings) -> Runtime:
        return cls(name=name, settings=settings, health=Health(name))

    def stream(self, name: str) -> StreamSpec:
        """The definition of a stream with this installation's replicas and retention."""
        nats, spec = self.settings.nats, STREAMS[name]
        age = {"KUBE": nats.kube_max_age_s, "LB": nats.lb_max_age_s}[name]
        size = {"KUBE": nats.kube_max_bytes, "LB": nats.lb_max_bytes}[name]
        return msgspec.structs.replace(
            spec,
            replicas=nats.replicas,
            max_age_s=age or spec.max_age_s,
            max_bytes=size or spec.max_bytes,
        )

    async def bus(self) -> Bus:
        """The connection to NATS, waited for, shared by the whole process."""
        async with self._opening[0]:
            return await self._open_bus()

    async def _open_bus(self) -> Bus:
        if self._bus is None:
            nats = self.settings.nats
            self.health.set("bus", False, f"waiting for {public_url(nats.url)}")
            self._bus = await self._or_stop(
                Bus.connect(
                    nats.url,
                    name=f"lbledger-{self.name}",
                    user=nats.user or None,
                    password=nats.password.reveal() or None,
                    token=nats.token.reveal() or None,
                    creds=Path(nats.credentials) if nats.credentials else None,
                    on_state=self._on_bus,
                )
            )
            self._on_bus(True, "")
        return self._bus

    def _on_bus(self, connected: bool, why: str = "") -> None:
        self.health.set("bus", connected, why or "not connected to NATS")

    async def engine(self) -> AsyncEngine:
        """The database, waited for and known to be migrated."""
        async with self._opening[1]:
            return await self._open_engine()

    async def _open_engine(self) -> AsyncEngine:
        if self._engine is None:
            settings = self.settings.database
            address = public_url(settings.url.reveal())
            self.health.set("database", False, f"waiting for {address}")
            engine = db.create_engine(settings, application=self.name)
            try:
                await self._or_stop(db.wait_ready(engine, address, self.stop))
            except BaseException:
                await engine.dispose()
                raise
            self._engine = engine
            self.health.set("database", not self.stop.is_set(), "stopping")
        return self._engine

    async def close(self) -> None:
        if self._bus is not None:
            with contextlib.suppress(Exception):
                await self._bus.close()
        if self._engine is not None:
            await self._engine.dispose()
        await self.health.close()

    async def _or_stop(self, connecting: Coroutine[Any, Any, T]) -> T:
        """A connection attempt goes on for ever, but not past a stop."""
        attempt = asyncio.create_task(connecting)
        stop = asyncio.create_task(self.stop.wait())
        try:
            both: set[asyncio.Task[Any]] = {attempt, stop}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not attempt.done():
                raise Stopped
            return attempt.result()
        finally:
            attempt.cancel()
            stop.cancel()


class Stopped(Exception):
    """The stop came before the service was up."""


Run = Callable[[Runtime], Awaitable[None]]


def run_service(name: str, run: Run, settings: Settings) -> int:
    """Run until a signal; returns the exit code."""
    log.setup(settings.log, name)
    garbage.tune()
    try:
        return asyncio.run(_run(name, run, settings))
    except KeyboardInterrupt:
        return 130


async def _run(name: str, run: Run, settings: Settings) -> int:
    rt = Runtime.create(name, settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, rt.stop.set)
    try:
        await rt.health.serve(settings.health.host, settings.health.port)
    except OSError as error:
        logger.error(
            "health.cannot_listen",
            host=settings.health.host,
            port=settings.health.port,
            why=error.strerror,
        )
        return 2
    task: asyncio.Future[None] = asyncio.ensure_future(run(rt))
    stopping = asyncio.ensure_future(rt.stop.wait())
    logger.info("service.started", pid=os.getpid())
    both: set[asyncio.Future[Any]] = {task, stopping}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        logger.info("service.stopping")
        await asyncio.wait({task}, timeout=SHUTDOWN_S - 1.0)
    code = _outcome(task)
    task.cancel()
    stopping.cancel()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await asyncio.gather(task, return_exceptions=True)
            await rt.close()
    logger.info("service.stopped", code=code)
    sys.stderr.flush()
    return code


def _outcome(task: asyncio.Future[None]) -> int:
    if not task.done():
        logger.error("service.stop_timed_out", after_s=SHUTDOWN_S)
        return 1
    error = task.exception()
    if isinstance(error, BaseExceptionGroup):
        error = error.split(Stopped)[1]
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if error is None or isinstance(error, Stopped):
        return 0
    if isinstance(error, ConfigError):
        logger.error("config.bad", why=str(error))
        return 2
    logger.error("service.failed", exc_info=error)
    return 1
