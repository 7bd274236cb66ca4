"""A backend under watch: what its checks came to, and who makes them."""

from __future__ import annotations

from typing import Final

from services.prober.targets import Target
from services.prober.verdicts import Opinion

NOBODY: Final[frozenset[str]] = frozenset()


class Watched:
    """A backend of one load balancer. Compared by identity; the fault guard samples it."""

    __slots__ = (
        *("address", "asked", "at", "doubted", "live", "ok", "opinion", "owner"),
        *("replica", "targets", "uid", "unmade"),
    )

    def __init__(self, owner: str, uid: str, address: str, replica: str) -> None:
        self.owner, self.uid, self.address = owner, uid, address
        self.live = False  # ready on record
        self.opinion = Opinion()
        self.targets: tuple[Target, ...] = ()  # in the order of the opinion's checks
        self.ok, self.at = False, 0.0  # the last result, and when that check was started
        self.unmade = 0  # checks in a row that could not be made, for a reason of ours
        self.replica = replica  # who checks it
        self.asked = NOBODY  # replicas that found it failing and were not believed yet
        self.doubted = 0.0  # since when they did
