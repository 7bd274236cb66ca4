"""Which replicas are alive, and which of them checks what.

Pure, times as inputs. A replica is alive while it is heard; one that is silent for longer than the
bound is none any more and comes back with its next word. Addresses are given out by rendezvous
hashing: everybody who knows the replicas comes to the same result, and a replica that comes or
goes moves only what it gets or had. A suspect, which finds everything failing that others reach,
stays but is given nothing, unless there is nobody else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

MAX_REPLICAS: Final = 64  # beyond that somebody is talking nonsense


def place(address: str, replicas: Collection[str]) -> str:
    """The replica that checks an address: the one that draws the highest number for it."""
    return max(replicas, key=lambda replica: (_draw(address, replica), replica))


def _draw(address: str, replica: str) -> bytes:
    return hashlib.blake2b(f"{replica} {address}".encode(), digest_size=8).digest()


@dataclass(slots=True)
class Replicas:
    """The replicas as the active one knows them; `own` is the active one itself."""

    own: str
    silence: float  # seconds
    heard: dict[str, float] = field(default_factory=dict)  # when, of the others
    suspects: set[str] = field(default_factory=set)
    able: tuple[str, ...] = ()  # who may be given something, in order
    _looked: float = float("-inf")

    def __post_init__(self) -> None:
        self._settle()

    def hear(self, replica: str, now: float) -> bool:
        """A replica says that it is there; whether it is a new one."""
        new = replica not in self.heard
        if replica == self.own or (new and len(self.heard) >= MAX_REPLICAS):
            return False
        self.heard[replica] = now
        if new:
            self._settle()
        return new

    def leave(self, replica: str) -> bool:
        """It says goodbye, or is given up; whether it was there."""
        if self.heard.pop(replica, None) is None:
            return False
        self._settle()
        return True

    def silent(self, now: float) -> list[str]:
        """Those that were not heard for too long. Time in which nobody looked does not count: what
        they said meanwhile is still to be read."""
        stood = now - self._looked - self.silence / 3
        if stood > 0 and self._looked > float("-inf"):
            self.heard = {replica: heard + stood for replica, heard in self.heard.items()}
        self._looked = now
        return [replica for replica, heard in self.heard.items() if now - heard > self.silence]

    def suspect(self, replica: str) -> None:
        self.suspects.add(replica)
        self._settle()

    def trust(self, replica: str) -> None:
        self.suspects.discard(replica)
        self._settle()

    def clear(self) -> None:
        self.heard.clear()
        self._looked = float("-inf")
        self._settle()

    def place(self, address: str, without: Collection[str] = ()) -> str:
        """Who checks the address; those of `without` only if nobody else is able."""
        able = self.able
        if without:
            able = tuple(replica for replica in able if replica not in without) or able
        return able[0] if len(able) == 1 else place(address, able)

    def _settle(self) -> None:
        everybody = sorted({self.own, *self.heard})
        self.suspects &= set(everybody)
        able = [replica for replica in everybody if replica not in self.suspects]
        if not able:
            self.suspects.clear()
        self.able = tuple(able or everybody)
