"""What the engine checks, and what it says about it."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any, Final, NamedTuple

from services.prober.plan import Check

# What our side lacks. The backend was not asked.
LOCAL: Final = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.EADDRNOTAVAIL,
        errno.EPERM,
        errno.EACCES,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.EAFNOSUPPORT,
    }
)
# The handshake was answered, however soon the connection ended after it.
CONNECTED: Final = (0, errno.EISCONN, errno.ECONNRESET, errno.EPIPE)
_WORDS: Final = {
    errno.ECONNREFUSED: "connection refused",
    errno.ECONNRESET: "connection reset",
    errno.EHOSTUNREACH: "no route to host",
    errno.ETIMEDOUT: "connection timed out",
    errno.EPIPE: "connection closed",
}


class Target:
    """One check of one backend. `tag` is the owner's, for finding its own again."""

    __slots__ = (
        *("address", "alive", "check", "dialled", "due"),
        *("family", "fresh", "number", "tag"),
    )

    def __init__(self, tag: Any, check: Check, address: str, dialled: str, port: int) -> None:
        self.tag = tag
        self.check = check
        self.address = address  # as the object has it: what a server may see as our host name
        self.dialled = (dialled, port)
        self.family = socket.AF_INET6 if ":" in dialled else socket.AF_INET
        self.due = 0.0
        self.alive = False
        self.fresh = False  # its place within the period is not drawn yet
        self.number = 0  # of its assignment to another replica

    def again(self) -> Target:
        """The same for another engine: one that has had it may not have forgotten it yet."""
        return Target(self.tag, self.check, self.address, *self.dialled)


class Outcome(NamedTuple):
    """One finished check. `local`: it could not be made, for a reason of ours."""

    target: Target
    ok: bool
    reason: str
    started: float
    local: bool = False


def describe(code: int, target: Target) -> str:
    if code == errno.ETIMEDOUT:
        return f"no answer within {target.check.timeout:g} s"
    return _WORDS.get(code) or os.strerror(code).lower()
