"""Who may write to a subject now, and who is next: one at a time, first come first served."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from services.kit.bus_item import Item

# A message, or the turn of a batch that waits for the subject.
Entry = Item | asyncio.Future[None]


class Lanes:
    """A key per subject that somebody holds; a queue only where somebody waits."""

    def __init__(self) -> None:
        self._lanes: dict[str, deque[Entry] | None] = {}

    def hold(self, subject: str) -> bool:
        """Take a free subject."""
        if subject in self._lanes:
            return False
        self._lanes[subject] = None
        return True

    def hold_all(self, subjects: Iterable[str]) -> bool:
        """Take these, if all of them are free."""
        if not self._lanes.keys().isdisjoint(subjects):
            return False
        self._lanes.update(dict.fromkeys(subjects))
        return True

    def leave_free(self, subjects: Iterable[str]) -> list[str]:
        """Give up those for which nobody waits; returns the others, which are still held."""
        lanes, others = self._lanes, []
        for subject in subjects:
            if lanes[subject] is None:
                del lanes[subject]
            else:
                others.append(subject)
        return others

    def queue(self, subject: str, entry: Entry) -> None:
        """Wait for a subject that is held."""
        lane = self._lanes[subject]
        if lane is None:
            self._lanes[subject] = deque((entry,))
        else:
            lane.append(entry)

    def put_first(self, subject: str, entries: Iterable[Entry]) -> None:
        """Before all who wait for a held subject."""
        self._lanes[subject] = deque((*entries, *(self._lanes[subject] or ())))

    def leave(self, subject: str, given_up: Callable[[Item], None]) -> Entry | None:
        """Who holds the subject next; nobody: it is free. Those that gave up are passed over."""
        lane = self._lanes[subject]
        while lane:
            entry = lane.popleft()
            if isinstance(entry, Item):
                if not entry.future.done():
                    return entry
                given_up(entry)
            elif not entry.done():
                return entry
        del self._lanes[subject]
        return None

    def turns(self) -> Iterator[asyncio.Future[None]]:
        """Of the batches that wait."""
        for lane in self._lanes.values():
            yield from (entry for entry in lane or () if isinstance(entry, asyncio.Future))
