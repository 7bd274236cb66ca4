"""What was asked of this server: counts for ever, the last requests one by one.

It also watches for what a well-behaved client never does: two requests in flight that touch one
service or one location.
"""

import collections
import hashlib
import time
from collections.abc import Iterable
from typing import Any

import msgspec

_KEPT = 10_000


class Entry(msgspec.Struct, kw_only=True):
    """One request. `status` 0: it was never answered."""

    seq: int
    op: str
    method: str
    target: str
    hash: str
    size: int
    client_request_id: str
    request_id: str
    started: float
    status: int = 0
    code: str = ""
    fault: str = ""
    applied: bool = False
    milliseconds: float = 0.0
    keys: tuple[str, ...] = ()
    """Services (`service/x`) and locations (`location/x`) that it names."""


class Journal:
    """The log of requests and what can be counted over it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything; numbering begins again."""
        self.entries: collections.deque[Entry] = collections.deque(maxlen=_KEPT)
        self.counts: collections.Counter[str] = collections.Counter()
        self.statuses: collections.Counter[str] = collections.Counter()
        self.bytes: collections.Counter[str] = collections.Counter()
        self.overlaps: list[dict[str, Any]] = []
        self._in_flight: dict[str, int] = {}
        self._seq = 0

    def begin(
        self,
        op: str,
        method: str,
        target: str,
        body: bytes,
        *,
        client_request_id: str,
        request_id: str,
        keys: Iterable[str] = (),
    ) -> Entry:
        """A request came in."""
        self._seq += 1
        entry = Entry(
            seq=self._seq,
            op=op,
            method=method,
            target=target,
            hash=hashlib.sha256(body).hexdigest()[:16] if body else "",
            size=len(body),
            client_request_id=client_request_id,
            request_id=request_id,
            started=time.time(),
            keys=tuple(keys),
        )
        self.entries.append(entry)
        self.counts[op] += 1
        self.bytes[op] += len(body)
        for key in entry.keys:
            other = self._in_flight.setdefault(key, entry.seq)
            if other != entry.seq and len(self.overlaps) < _KEPT:
                self.overlaps.append({"key": key, "first": other, "second": entry.seq})
        return entry

    def end(self, entry: Entry, status: int, code: str = "") -> None:
        """It was answered, or will never be (status 0)."""
        entry.status, entry.code = status, code
        entry.milliseconds = round((time.time() - entry.started) * 1e3, 2)
        self.statuses[str(status)] += 1
        for key in entry.keys:
            if self._in_flight.get(key) == entry.seq:
                del self._in_flight[key]

    def shown(self, limit: int) -> dict[str, Any]:
        """The admin page: totals, and the last requests, oldest first."""
        last = list(self.entries)[-limit:] if limit else []
        return {
            "total": self._seq,
            "counts": dict(sorted(self.counts.items())),
            "statuses": dict(sorted(self.statuses.items())),
            "bytes": dict(sorted(self.bytes.items())),
            "overlaps": self.overlaps,
            "requests": [msgspec.to_builtins(entry) for entry in last],
        }
