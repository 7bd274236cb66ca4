"""One watch after the other, of one kind in one namespace or in all, from a version on.

A watch goes on from the last version that it was told, be it by an event or a bookmark, and is
opened again when it ends, breaks, or is silent for too long. It is given up for a new list, which
is raised as `Relist`, when its version has aged (410, as a status or as an event), when it fails
again and again, or when the API server's store turns out to have gone back in time.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Final

import structlog
from prometheus_client import Counter, Gauge

from services.kit.config import WatcherSettings
from services.kit.kube import (
    Gone,
    Idle,
    Kube,
    KubeError,
    NotFound,
    TooManyRequests,
    WatchEvent,
)
from services.kit.retry import Backoff
from services.watcher import core, reading
from services.watcher.kinds import Kind
from services.watcher.publishing import Publishing

FAILURES: Final = 5  # watches that fail in a row before the list is made anew
SHORT_S: Final = 1.0  # a watch that ended sooner without an event is no reason to hurry

log = structlog.get_logger()
_watches = Counter("lbledger_watcher_watches_total", "Watches that ended", ["plural", "how"])
_idle = Gauge(
    "lbledger_watcher_idle_seconds", "Seconds since the API server last said anything", ["plural"]
)


class Relist(Exception):
    """The watch can't go on from where it is."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Contact:
    """Whether the API server answers for one kind. `report(plural, why)`: "" when it does."""

    def __init__(self, plural: str, report: Callable[[str, str], None]) -> None:
        self.plural = plural
        self._report = report
        self._at = time.monotonic()
        _idle.labels(plural).set_function(lambda: time.monotonic() - self._at)

    def good(self) -> None:
        self._at = time.monotonic()
        self._report(self.plural, "")

    def bad(self, what: str, error: Exception) -> None:
        self._report(self.plural, str(error))
        log.warning(what, plural=self.plural, why=str(error))


async def pause(backoff: Backoff, error: Exception) -> None:
    """Wait before another attempt, at least for as long as the server asked for."""
    wait = backoff.delay()
    if isinstance(error, TooManyRequests) and error.retry_after:
        wait = max(wait, error.retry_after * random.uniform(1.0, 1.2))
    await asyncio.sleep(wait)


class Watch:
    """Follows one scope of a kind until it has to be listed anew."""

    def __init__(
        self,
        kind: Kind,
        scope: str,
        kube: Kube,
        publishing: Publishing,
        settings: WatcherSettings,
        contact: Contact,
    ) -> None:
        self._plural = kind.plural
        self._path = kind.resource.path(scope)
        self._params = kind.params(settings)
        self._kube = kube
        self._publishing = publishing
        self._settings = settings
        self._contact = contact
        self._backoff = Backoff(0.1, 10.0)
        self._failures = 0  # in a row

    async def run(self, version: str) -> None:
        """Raises Relist, or NotFound when the kind seems to be gone."""
        while True:
            began, before = time.monotonic(), version
            try:
                how = "closed"
                try:
                    async with aclosing(self._open(version)) as batches:
                        async for batch in batches:
                            self._contact.good()
                            version = self._take(batch, version)
                            await self._publishing.room()
                except Idle as idle:
                    how = "idle"
                    log.info("watcher.watch.idle", plural=self._plural, why=idle.message)
                if version == before:
                    await self._check_version(version)
                self._failures = 0
            except Gone:
                raise Relist("version aged") from None
            except NotFound:
                raise
            except (KubeError, reading.Unreadable) as error:
                how = "broken"
                self._failures = 1 if version != before else self._failures + 1
                await self._broken(version, error)
            _watches.labels(self._plural, how).inc()
            if version != before:
                self._backoff.reset()
            elif how == "closed" and time.monotonic() - began < SHORT_S:
                await self._backoff.wait()

    def _open(self, version: str) -> AsyncGenerator[list[WatchEvent], None]:
        return self._kube.watch(
            self._path,
            version,
            self._params,
            # Spread, so that all watches do not end together for ever.
            timeout_s=self._settings.watch_timeout_s * random.uniform(0.8, 1.0),
            idle_s=self._settings.idle_s,
        )

    def _take(self, batch: list[WatchEvent], version: str) -> str:
        """Observe some events; returns the version to go on from.

        A server sends nothing from before the version it was asked to go on from. Should one do so,
        it is left out: an object that the list did not hold must not come to life again.
        """
        now = datetime.now(UTC)
        for event in batch:
            seen: core.Sight | core.Deletion
            match event.type:
                case "ADDED" | "MODIFIED":
                    seen = reading.sight(self._plural, event.object, now, None)
                case "DELETED":
                    seen = reading.deletion(self._plural, event.object, now)
                case "BOOKMARK":
                    version = reading.version_of(event.object)
                    continue
                case unknown:
                    log.warning("watcher.event.unknown", plural=self._plural, type=unknown)
                    continue
            if core.newer(seen.version, version):
                self._publishing.observe(seen)
                version = seen.version
        return version

    async def _broken(self, version: str, error: Exception) -> None:
        self._contact.bad("watcher.watch.broken", error)
        if self._failures >= FAILURES:
            raise Relist("watch fails") from error
        await pause(self._backoff, error)
        try:
            await self._check_version(version)
        except (Gone, NotFound):
            raise
        except KubeError as again:
            log.debug("watcher.version.unchecked", plural=self._plural, why=str(again))

    async def _check_version(self, version: str) -> None:
        """A version from the future gets an empty stream, for ever: the store was put back."""
        async with aclosing(self._kube.list_pages(self._path, 1, self._params)) as pages:
            page = await anext(pages)
        now = page.metadata.resource_version
        if now.isdecimal() and version.isdecimal() and core.newer(version, now):
            raise Relist("store rewound")
        self._contact.good()
