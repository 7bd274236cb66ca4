"""A real allocator that kills itself at a named point: what a crash at the worst moment leaves.

Points are statements of the transaction, its commit, and steps of the relay behind it.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg

from services.allocator import main
from services.kit import config, direct
from services.kit.batches import Committer
from services.kit.bus import Publisher
from services.kit.outbox import Outbox
from services.kit.runtime import run_service
from tests import forking


class Point(NamedTuple):
    """Before or after which step, a statement (pattern) or one of the words of `_Trap`, and at
    which passage."""

    when: str
    step: str
    passage: int = 1


POINTS: Final = {
    # reading what is stored
    "load-locked": Point("after", "setval"),
    "load-read": Point("after", "load"),
    # the transaction
    "transaction": Point("before", "write", 3),
    "offsets": Point("after", "update allocator.stream_offset", 3),
    "clock": Point("after", "insert into allocator.clock", 3),
    "marks": Point("after", "insert into allocator.sync_mark"),
    "owners-deleted": Point("after", "^delete from allocator.owner"),
    "owners-updated": Point("after", "^update allocator.owner"),
    "owners-copied": Point("after", "^copy allocator.owner"),
    "leases-closed": Point("after", "^update allocator.lease l set during"),
    "leases-altered": Point("after", "^update allocator.lease l set sharing_key"),
    "leases-copied": Point("after", "^copy allocator.lease"),
    "memos-deleted": Point("after", "^delete from allocator.memo"),
    "memos-written": Point("after", "^insert into allocator.memo"),
    "pools": Point("after", "^insert into allocator.pool"),
    "pools-used": Point("after", "^update allocator.pool"),
    "projects": Point("after", "^insert into allocator.project"),
    "outbox-written": Point("after", "^insert into allocator.outbox"),
    "before-commit": Point("before", "commit", 3),
    "after-commit": Point("after", "commit", 3),
    # the relay
    "before-publish": Point("before", "publish", 3),
    "between-publishes": Point("after", "publish", 3),
    "before-batch": Point("before", "batch"),
    "acked": Point("after", "acked", 3),
    "batch-acked": Point("after", "batch"),
    "before-deletion": Point("before", "deletion"),
    "after-deletion": Point("after", "deletion"),
}


def start(environment: dict[str, str], point: str) -> Any:
    """The process of an allocator that ends by SIGKILL when it passes the point."""
    return forking.start(_run, environment, point)


def _run(environment: dict[str, str], point: str) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)
    _Trap(POINTS[point]).set()
    sys.exit(run_service("allocator", main.run, config.load(environment)))


class _Trap:
    def __init__(self, point: Point) -> None:
        self._point, self._left = point, point.passage
        self._moved = False  # the transaction of a batch is open

    def passing(self, when: str, step: str) -> None:
        step = " ".join(step.lower().split())
        self._moved |= "update allocator.stream_offset" in step
        if when == self._point.when and re.search(self._point.step, step):
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)

    def set(self) -> None:
        engine: Any = sa.engine.Engine
        sa.event.listen(
            engine, "after_cursor_execute", lambda *args: self.passing("after", args[2])
        )
        self._around_commit()
        self._after(direct, "copy_text", lambda args: f"copy {args[1].fullname}")
        self._after(direct, "fetch", lambda args: args[1])
        self._after(main.AllocatorProjection, "load", lambda _: "load")
        self._before(Committer, "_transact", "write")
        self._around_publishing()
        self._around_deletion()

    def _around_commit(self) -> None:
        commit = PGDialect_asyncpg.do_commit

        def do_commit(dialect: Any, connection: Any) -> None:
            moved, self._moved = self._moved, False
            if moved:
                self.passing("before", "commit")
            commit(dialect, connection)
            if moved:
                self.passing("after", "commit")

        PGDialect_asyncpg.do_commit = do_commit  # type: ignore[method-assign]

    def _around_publishing(self) -> None:
        give, batch = Publisher.give, Publisher.publish_batch

        def giving(*args: Any) -> Any:
            self.passing("before", "publish")
            future = give(*args)
            self.passing("after", "publish")
            future.add_done_callback(lambda _: self.passing("after", "acked"))
            return future

        async def batching(*args: Any) -> Any:
            self.passing("before", "batch")
            found = await batch(*args)
            self.passing("after", "batch")
            return found

        Publisher.give = giving  # type: ignore[method-assign]
        Publisher.publish_batch = batching  # type: ignore[method-assign]

    def _around_deletion(self) -> None:
        take, forget = Outbox.take_acked, Outbox.forget

        def taking(outbox: Outbox) -> Any:
            done = take(outbox)
            if done:
                self.passing("before", "deletion")
            return done

        def forgetting(outbox: Outbox, done: Any) -> None:
            if done:
                self.passing("after", "deletion")
            forget(outbox, done)

        Outbox.take_acked = taking  # type: ignore[method-assign]
        Outbox.forget = forgetting  # type: ignore[method-assign]

    def _before(self, place: Any, name: str, step: str) -> None:
        original = getattr(place, name)

        async def wrapped(*args: Any) -> Any:
            self.passing("before", step)
            return await original(*args)

        setattr(place, name, wrapped)

    def _after(self, place: Any, name: str, step: Callable[[Any], str]) -> None:
        original = getattr(place, name)

        async def wrapped(*args: Any) -> Any:
            found = await original(*args)
            self.passing("after", step(args))
            return found

        setattr(place, name, wrapped)
