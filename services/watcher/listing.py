"""One kind of object, followed for ever: list, watch, and list again when it must be.

A list is published between its two marks; only a list that came to its end says what is missing.
A kind that is not installed is waited for: its list is complete and empty.

Nothing here decides what a fact is; see core. Nothing here waits without a bound, and no retry
comes without a growing, jittered wait.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Final

import msgspec
import structlog
from prometheus_client import Counter

from schema import events, subjects
from services.kit.config import WatcherSettings
from services.kit.kube import Gone, Kube, KubeError
from services.kit.retry import Backoff
from services.watcher import core, reading
from services.watcher.kinds import Kind
from services.watcher.publishing import Publishing
from services.watcher.watching import Contact, Relist, Watch, pause

CHUNK: Final = 500  # objects taken before others get a turn
CONFIRM_S: Final = 1.0  # a kind is looked for twice before its objects are taken for gone
STEADY_S: Final = 10.0  # a watch that lived this long was a good one

log = structlog.get_logger()
_lists = Counter("lbledger_watcher_lists_total", "Complete lists published", ["plural"])
_relists = Counter("lbledger_watcher_relists_total", "Lists begun anew", ["plural", "why"])


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
        self._contact = Contact(kind.plural, report)
        self._relist = asyncio.Event()
        self.finished: events.SyncFinished | None = None  # the newest mark of this term
        self._absent = False
        self._params = kind.params(settings)
        self._scopes = kind.scopes(settings)

    def ask_relist(self) -> None:
        """Something else found that the stream may not tell the truth about this kind."""
        self._relist.set()

    async def run(self) -> None:
        """Until cancelled."""
        backoff = Backoff(0.2, 30.0)
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            try:
                if await self._installed():
                    versions = await self._list()
                    began = clock()
                    await self._watch(versions)
                else:
                    await self._await_installation()
            except (Relist, Gone) as trouble:
                # Gone: the list took longer than the server keeps its versions.
                why = trouble.why if isinstance(trouble, Relist) else "list aged"
                _relists.labels(self.plural, why).inc()
                log.info("watcher.relist", plural=self.plural, why=why)
                if clock() - began > STEADY_S:
                    backoff.reset()
                await asyncio.sleep(
                    backoff.delay() + random.uniform(0, self._settings.relist_jitter_s)
                )
            except (KubeError, reading.Unreadable) as error:
                self._contact.bad("watcher.list.failed", error)
                await pause(backoff, error)
            else:
                backoff.reset()

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
        self._contact.good()
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
            self._miss(seen, listing, self.kind.inside(scope))
        await self._publishing.settled(self.plural)
        await self._mark_finished(listing, count)
        self._warn_outside()
        self._contact.good()
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
                self._contact.good()
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
                    group.create_task(self._watch_of(scope).run(version))
        except* (Relist, KubeError) as errors:
            raise _first(errors) from None

    def _watch_of(self, scope: str) -> Watch:
        return Watch(
            self.kind, scope, self._kube, self._publishing, self._settings, self._contact
        )  # fmt: skip

    async def _wait_relist(self) -> None:
        try:
            async with asyncio.timeout(self._settings.relist_s or None):
                await self._relist.wait()
        except TimeoutError:
            raise Relist("periodic") from None
        raise Relist("asked for")

    def _warn_outside(self) -> None:
        """Objects outside the namespaces of the configuration: unseen is not gone."""
        if self._scopes == ("",):
            return
        tests = [self.kind.inside(scope) for scope in self._scopes]
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
