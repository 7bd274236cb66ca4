"""One kind of object, followed for ever: list, watch, and list again when it must be.

A list is published between its two marks; only a list that came to its end says what is missing.
A watch goes on from the last version it was told, be it by an event or a bookmark, and is opened
again when it ends, breaks, or is silent for too long. It is given up for a new list when its
version has aged (410, as a status or as an event), when it fails again and again, or when the API
server's store turns out to have gone back in time. A kind that is not installed is waited for: its
list is complete and empty.

Nothing here decides what a fact is; see core. Nothing here waits without a bound, and no retry
comes without a growing, jittered wait.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Final

import msgspec
import structlog
from prometheus_client import Counter, Gauge

from schema import events, subjects
from services.kit.config import WatcherSettings
from services.kit.kube import (
    Gone,
    Idle,
    Kube,
    KubeError,
    NotFound,
    Resource,
    TooManyRequests,
    WatchEvent,
)
from services.kit.retry import Backoff
from services.watcher import core, reading
from services.watcher.publishing import Publishing

CHUNK: Final = 200  # objects taken before others get a turn
FAILURES: Final = 5  # watches that fail in a row before the list is made anew
SHORT_S: Final = 1.0  # a watch that ended sooner without an event is no reason to hurry
CONFIRM_S: Final = 1.0  # a kind is looked for twice before its objects are taken for gone

log = structlog.get_logger()
_lists = Counter("lbledger_watcher_lists_total", "Complete lists published", ["plural"])
_relists = Counter("lbledger_watcher_relists_total", "Lists begun anew", ["plural", "why"])
_watches = Counter("lbledger_watcher_watches_total", "Watches that ended", ["plural", "how"])
_idle = Gauge(
    "lbledger_watcher_idle_seconds", "Seconds since the API server last said anything", ["plural"]
)


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """A kind to follow. `optional`: it may be absent, as a CustomResourceDefinition may."""

    resource: Resource
    selector: str = ""
    namespace: str = ""  # with `name`: one object only
    name: str = ""
    optional: bool = False

    @property
    def plural(self) -> str:
        return self.resource.plural


class Relist(Exception):
    """The watch can't go on from where it is."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Follower:
    """Follows one kind during one term. `report(plural, why)`: "" when the API server answers."""

    def __init__(
        self,
        kind: Kind,
        kube: Kube,
        publishing: Publishing,
        settings: WatcherSettings,
        report: Callable[[str, str], None],
    ) -> None:
        self.kind = kind
        self.plural = kind.plural
        self._kube = kube
        self._publishing = publishing
        self._settings = settings
        self._report = report
        self._relist = asyncio.Event()
        self.finished: events.SyncFinished | None = None  # the newest mark of this term
        self._absent = False
        self._active = time.monotonic()
        _idle.labels(self.plural).set_function(lambda: time.monotonic() - self._active)
        self._params = self._selection()
        self._scopes = self._namespaces()

    def ask_relist(self) -> None:
        """Something else found that the stream may not tell the truth about this kind."""
        self._relist.set()

    async def run(self) -> None:
        """Until cancelled."""
        backoff = Backoff(0.2, 30.0)
        while True:
            try:
                if await self._installed():
                    versions = await self._list()
                    backoff.reset()
                    await self._watch(versions)
                else:
                    await self._await_installation()
            except Relist as relist:
                _relists.labels(self.plural, relist.why).inc()
                log.info("watcher.relist", plural=self.plural, why=relist.why)
                await asyncio.sleep(random.uniform(0, self._settings.relist_jitter_s))
            except Gone:
                # Not an error of anybody: the list took longer than the server keeps its versions.
                _relists.labels(self.plural, "list aged").inc()
                log.info("watcher.relist", plural=self.plural, why="list aged")
                await backoff.wait()
            except (KubeError, reading.Unreadable) as error:
                self._failed("watcher.list.failed", error)
                await self._pause(backoff, error)

    # --- is it there ---

    async def _installed(self) -> bool:
        if not self.kind.optional:
            return True
        found = await self._kube.resources(self.kind.resource.group_version, refresh=True)
        if self.plural in found:
            self._absent = False
            return True
        if not await self._kube.resources("v1", refresh=True):
            # A server without the core group is no Kubernetes: its word on kinds means nothing.
            raise KubeError("this server serves no core API: not a Kubernetes API server?")
        return False

    async def _await_installation(self) -> None:
        """The kind is not there: say so once, then look again now and then."""
        self._touch()
        self._report(self.plural, "")
        if not self._absent:
            known = self._publishing.known(self.plural)
            if any(not k.gone for k in known.values()):
                await asyncio.sleep(CONFIRM_S * random.uniform(1, 1.5))
                if await self._installed():
                    return
                log.warning("watcher.kind.removed", plural=self.plural)
            log.info("watcher.kind.absent", plural=self.plural)
            await self._mark_started()
            self._miss(set(), core.Listing(""), lambda _: True)
            await self._publishing.settled(self.plural)
            await self._mark_finished(core.Listing(""), 0, absent=True)
            self._absent = True
        await asyncio.sleep(self._settings.absent_poll_s * random.uniform(0.75, 1.25))

    # --- list ---

    async def _list(self) -> dict[str, str]:
        """Publish the complete list; returns the version to watch from for each namespace."""
        self._relist.clear()
        await self._mark_started()
        versions: dict[str, str] = {}
        count, listing = 0, core.Listing("")
        for scope in self._scopes:
            listing, seen = await self._list_scope(scope)
            versions[scope] = listing.version
            count += len(seen)
            self._miss(seen, listing, self._inside(scope))
        await self._publishing.settled(self.plural)
        await self._mark_finished(listing, count)
        self._warn_outside()
        self._report(self.plural, "")
        _lists.labels(self.plural).inc()
        return versions

    async def _list_scope(self, scope: str) -> tuple[core.Listing, set[str]]:
        known = self._publishing.known(self.plural)
        before = core.newest(k.version for k in known.values())
        listing: core.Listing | None = None
        seen: set[str] = set()
        path = self.kind.resource.path(scope)
        async with aclosing(
            self._kube.list_pages(path, self._settings.page_size, self._params)
        ) as pages:
            async for page in pages:
                self._touch()
                if listing is None:
                    listing = core.list_of(page.metadata.resource_version, before)
                    if listing.rewound:
                        log.warning(
                            "watcher.store.rewound",
                            plural=self.plural, version=listing.version, known=before,
                        )  # fmt: skip
                await self._take_page(page.items or [], listing, seen)
        assert listing is not None  # there is always a first page
        return listing, seen

    async def _take_page(
        self, items: list[msgspec.Raw], listing: core.Listing, seen: set[str]
    ) -> None:
        now = datetime.now(UTC)
        for start in range(0, len(items), CHUNK):
            for raw in items[start : start + CHUNK]:
                sight = reading.sight(self.plural, raw, now, listing)
                seen.add(sight.subject)
                self._publishing.observe(sight)
            await self._publishing.room()
            await asyncio.sleep(0)

    def _miss(self, seen: set[str], listing: core.Listing, inside: Callable[[str], bool]) -> None:
        now = datetime.now(UTC)
        for subject in self._publishing.subjects(self.plural):
            if subject not in seen and inside(subject):
                ref = subjects.subject_ref(subject)
                assert ref is not None
                self._publishing.observe(core.Absence(subject, ref, now, listing))

    async def _mark_started(self) -> None:
        event = events.SyncStarted(
            at=datetime.now(UTC), plural=self.plural, epoch=self._publishing.epoch
        )
        await self._publishing.mark(event, f"{self.plural}:{secrets.token_hex(6)}:started")

    async def _mark_finished(
        self, listing: core.Listing, count: int, *, absent: bool = False
    ) -> None:
        event = events.SyncFinished(
            at=datetime.now(UTC),
            plural=self.plural,
            epoch=self._publishing.epoch,
            resource_version=listing.version,
            count=count,
            absent=absent,
        )
        await self._publishing.mark(event, f"{self.plural}:{secrets.token_hex(6)}:finished")
        self.finished = event
        log.info("watcher.list.finished", plural=self.plural, count=count, absent=absent)

    # --- watch ---

    async def _watch(self, versions: dict[str, str]) -> None:
        """Until something asks for a new list, which is raised as Relist."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._wait_relist())
                for scope, version in versions.items():
                    group.create_task(self._follow(scope, version))
        except* (Relist, KubeError) as errors:
            raise _first(errors) from None

    async def _wait_relist(self) -> None:
        try:
            async with asyncio.timeout(self._settings.relist_s or None):
                await self._relist.wait()
        except TimeoutError:
            raise Relist("periodic") from None
        raise Relist("asked for")

    async def _follow(self, scope: str, version: str) -> None:
        """Watch one namespace, or all, from a version on."""
        backoff, failures = Backoff(0.1, 10.0), 0
        while True:
            began, before = time.monotonic(), version
            try:
                how = "closed"
                try:
                    async with aclosing(self._open(scope, version)) as batches:
                        async for batch in batches:
                            self._touch()
                            self._report(self.plural, "")
                            version = self._take(batch, version)
                            await self._publishing.room()
                except Idle as idle:
                    how = "idle"
                    log.info("watcher.watch.idle", plural=self.plural, why=idle.message)
                if version == before:
                    await self._check_version(scope, version)
                self._touch()
                self._report(self.plural, "")
                failures = 0
            except Gone:
                raise Relist("version aged") from None
            except (NotFound, Relist):
                raise
            except (KubeError, reading.Unreadable) as error:
                how, failures = "broken", 1 if version != before else failures + 1
                await self._broken(scope, version, failures, backoff, error)
            _watches.labels(self.plural, how).inc()
            if version != before:
                backoff.reset()
            elif how == "closed" and time.monotonic() - began < SHORT_S:
                await backoff.wait()

    def _open(self, scope: str, version: str) -> AsyncGenerator[list[WatchEvent], None]:
        return self._kube.watch(
            self.kind.resource.path(scope),
            version,
            self._params,
            # Spread, so that all watches do not end together for ever.
            timeout_s=self._settings.watch_timeout_s * random.uniform(0.8, 1.0),
            idle_s=self._settings.idle_s,
        )

    async def _broken(
        self, scope: str, version: str, failures: int, backoff: Backoff, error: Exception
    ) -> None:
        self._failed("watcher.watch.broken", error)
        if failures >= FAILURES:
            raise Relist("watch fails") from error
        await self._pause(backoff, error)
        try:
            await self._check_version(scope, version)
        except (Gone, NotFound, Relist):
            raise
        except KubeError as again:
            log.debug("watcher.version.unchecked", plural=self.plural, why=str(again))

    async def _check_version(self, scope: str, version: str) -> None:
        """A version from the future gets an empty stream, for ever: the store was put back."""
        path = self.kind.resource.path(scope)
        async with aclosing(self._kube.list_pages(path, 1, self._params)) as pages:
            async for page in pages:
                self._touch()
                now = page.metadata.resource_version
                if now.isdecimal() and version.isdecimal() and core.newer(version, now):
                    raise Relist("store rewound")
                return

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
                    seen = reading.sight(self.plural, event.object, now, None)
                case "DELETED":
                    seen = reading.deletion(self.plural, event.object, now)
                case "BOOKMARK":
                    version = reading.version_of(event.object)
                    continue
                case unknown:
                    log.warning("watcher.event.unknown", plural=self.plural, type=unknown)
                    continue
            if core.newer(seen.version, version):
                self._publishing.observe(seen)
                version = seen.version
        return version

    # --- the rest ---

    def _touch(self) -> None:
        self._active = time.monotonic()

    def _failed(self, what: str, error: Exception) -> None:
        self._report(self.plural, str(error))
        log.warning(what, plural=self.plural, why=str(error))

    async def _pause(self, backoff: Backoff, error: Exception) -> None:
        wait = backoff.delay()
        if isinstance(error, TooManyRequests) and error.retry_after:
            wait = max(wait, error.retry_after * random.uniform(1.0, 1.2))
        await asyncio.sleep(wait)

    def _selection(self) -> dict[str, str]:
        selectors = (self.kind.selector, self._settings.selectors.get(self.plural, ""))
        params = {"labelSelector": ",".join(s for s in selectors if s)}
        if self.kind.name:
            params["fieldSelector"] = f"metadata.name={self.kind.name}"
        return {key: value for key, value in params.items() if value}

    def _namespaces(self) -> tuple[str, ...]:
        """The namespaces to list and watch one by one; ("",) is all, or a kind without any."""
        if self.kind.namespace:
            return (self.kind.namespace,)
        if self.kind.resource.namespaced and self._settings.namespaces:
            return self._settings.namespaces
        return ("",)

    def _inside(self, scope: str) -> Callable[[str], bool]:
        if not scope:
            return lambda _: True
        prefix = f"{subjects.KUBE_BRANCH}.{subjects.token(self.plural)}.{subjects.token(scope)}."
        return lambda subject: subject.startswith(prefix)

    def _warn_outside(self) -> None:
        """Objects outside the namespaces of the configuration: unseen is not gone."""
        if self._scopes == ("",):
            return
        tests = [self._inside(scope) for scope in self._scopes]
        known = self._publishing.known(self.plural)
        outside = sum(not k.gone and not any(t(s) for t in tests) for s, k in known.items())
        if outside:
            log.warning("watcher.objects.out_of_scope", plural=self.plural, count=outside)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """One of the errors of a task group; a wish to list anew goes first."""
    found: list[BaseException] = []
    for error in errors.exceptions:
        found.append(_first(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((e for e in found if isinstance(e, Relist)), found[0])
