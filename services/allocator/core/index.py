"""Which pools have a range around an address; for the few questions that cut across pools."""

from __future__ import annotations

from bisect import bisect_left, insort

from schema import addresses
from schema.pools import Plan


class Index:
    """Ranges of all pools in ascending order. Pools rarely overlap, so a look stays short."""

    def __init__(self) -> None:
        self._ranges: dict[int, list[tuple[int, int, str]]] = {4: [], 6: []}
        self._longest = {4: 0, 6: 0}
        self._of: dict[str, list[tuple[int, int, str]]] = {}

    def put(self, name: str, plan: Plan | None) -> None:
        """Set the ranges of a pool (None: it has none any more)."""
        for entry in self._of.pop(name, ()):
            ranges = self._ranges[addresses.family(entry[0])]
            del ranges[bisect_left(ranges, entry)]
        entries = [(item.start, item.end, name) for item in plan.ranges] if plan else []
        for entry in entries:
            family = addresses.family(entry[0])
            insort(self._ranges[family], entry)
            self._longest[family] = max(self._longest[family], entry[1] - entry[0])
        if entries:
            self._of[name] = entries

    def around(self, first: int, last: int) -> set[str]:
        """Names of the pools with a range that meets these addresses."""
        family = addresses.family(first)
        ranges = self._ranges[family]
        at = bisect_left(ranges, (first - self._longest[family],))
        found = set()
        while at < len(ranges) and ranges[at][0] <= last:
            if ranges[at][1] >= first:
                found.add(ranges[at][2])
            at += 1
        return found
