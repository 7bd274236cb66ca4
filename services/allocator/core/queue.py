"""Who waits for what, in the order of their tickets.

One heap for each thing that can be waited for. An owner may stand in several; entries that do not
hold any more (it left, it was served) are dropped when they come up, and a heap that is mostly
such entries is built again, so memory follows those who really wait.
"""

from __future__ import annotations

import heapq

from services.allocator.core.model import Owner, Wait

_Entry = tuple[int, int, Owner]  # ticket, number of the entry, who


class _Queue:
    __slots__ = ("entries", "live")

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.live = 0


class Queues:
    def __init__(self) -> None:
        self._queues: dict[Wait, _Queue] = {}
        self._entered = 0
        self._by_namespace: dict[str, dict[Owner, None]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def waiting(self, wait: Wait) -> int:
        queue = self._queues.get(wait)
        return queue.live if queue else 0

    def kind(self, kind: str) -> list[Wait]:
        """What of this kind somebody waits for."""
        return [wait for wait in self._queues if wait[0] == kind]

    def join(self, owner: Owner, waits: tuple[Wait, ...]) -> None:
        """Wait for these instead of what the owner waited for before."""
        before = owner.waits
        owner.note(waits=waits)
        if bool(before) != bool(waits):
            self._list(owner, waiting=bool(waits))
        for wait in before:
            if wait not in waits:
                self._left(wait)
        for wait in waits:
            if wait not in before:
                queue = self._queues.setdefault(wait, _Queue())
                queue.live += 1
                self.put_back(wait, owner)

    def of_namespace(self, namespace: str) -> list[Owner]:
        return list(self._by_namespace.get(namespace, ()))

    def _list(self, owner: Owner, *, waiting: bool) -> None:
        namespace = owner.namespace
        owners = self._by_namespace.setdefault(namespace, {})
        if waiting:
            owners[owner] = None
        else:
            owners.pop(owner, None)
            if not owners:
                del self._by_namespace[namespace]

    def leave(self, owner: Owner) -> None:
        self.join(owner, ())

    def put_back(self, wait: Wait, owner: Owner) -> None:
        """Enter an owner that pop() took and that goes on waiting for the same."""
        queue = self._queues.setdefault(wait, _Queue())
        self._entered += 1
        heapq.heappush(queue.entries, (owner.ticket, self._entered, owner))

    def _left(self, wait: Wait) -> None:
        queue = self._queues.get(wait)
        if queue is None:
            return
        queue.live -= 1
        if queue.live <= 0:
            del self._queues[wait]
        elif len(queue.entries) > 2 * queue.live + 64:
            queue.entries = [entry for entry in queue.entries if _holds(entry, wait)]
            heapq.heapify(queue.entries)

    def first(self, wait: Wait) -> int | None:
        """The ticket of the first in order who waits for this."""
        queue = self._queues.get(wait)
        if queue is None:
            return None
        while queue.entries and not _holds(queue.entries[0], wait):
            heapq.heappop(queue.entries)
        return queue.entries[0][0] if queue.entries else None

    def peek(self, wait: Wait) -> Owner | None:
        return self._queues[wait].entries[0][2] if self.first(wait) is not None else None

    def pop(self, wait: Wait) -> Owner:
        """Whom first() has found; it stays counted."""
        return heapq.heappop(self._queues[wait].entries)[2]


def _holds(entry: _Entry, wait: Wait) -> bool:
    ticket, _, owner = entry
    return owner.ticket == ticket and wait in owner.waits
