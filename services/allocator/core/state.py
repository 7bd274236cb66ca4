"""The allocator's memory, and the few ways in which it changes.

Every change goes through a method here, whether it comes from a decision taken now or from one
that is read back from the log; that is why the same log gives the same state. The state keeps
account of what changed (`changes`) for whoever stores it, and collects decisions (`out`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from schema import events, selection
from schema.subjects import ObjectRef
from services.allocator.core.changes import Changes, Closed, Granted
from services.allocator.core.holdings import BEGINNING, Holdings, Rules
from services.allocator.core.model import LOADBALANCERS, SERVICES, Owner, Pool, Request
from services.allocator.core.queue import Queues
from services.allocator.core.request import Parts, Reader
from services.allocator.core.space import Space

__all__ = ["BEGINNING", "Cause", "Changes", "Choice", "Closed", "Granted", "Rules", "State"]

REQUIRED: Final = ("ippools", "namespaces", LOADBALANCERS, SERVICES)
"""Kinds that must be listed completely before anything is decided."""
_TICK: Final = timedelta(microseconds=1)


class Cause(NamedTuple):
    """The fact that is being decided on."""

    epoch: str
    seq: int
    text: str


class Choice(NamedTuple):
    """The pools that may serve a request, first choice first, and why others may not."""

    pools: tuple[Pool, ...]
    need: selection.Need
    reason: str = ""
    message: str = ""
    considered: tuple[tuple[str, str, str], ...] = ()


class Lane(NamedTuple):
    """A pool that gives its next address to all who ask for the same, until a pool changes."""

    request: Request
    pool: Pool
    space: Space
    texts: tuple[str, str] | None  # mask and gateway, where all its addresses have the same


class State(Holdings):
    def __init__(self, rules: Rules = Rules()) -> None:  # noqa: B008
        super().__init__(rules)
        self.epoch = ""
        self.ready = False
        self.cause = Cause("", 0, "")  # of what is being decided
        self.synced: dict[str, tuple[str, int, bool]] = {}  # plural -> epoch, sequence, absent
        self.owners: dict[str, dict[str, Owner]] = {LOADBALANCERS: {}, SERVICES: {}}
        self.queues = Queues()
        self.departed: dict[tuple[str, str], Owner] = {}  # by kind and uid: to be released
        self.vanished: deque[Owner] = deque()  # of those, who has a grace period, in its order
        self.leaving: list[Owner] = []  # and who has none
        self.undecided: dict[Owner, None] = {}  # to be placed
        self.moved: dict[Owner, None] = {}  # in a replay: who was granted an address
        self.showing: list[tuple[Owner, tuple[int, ...]]] = []  # statuses of those who move
        self.altered: dict[str, bool] = {}  # pools that changed; whether in whom they serve
        self.release_asked: dict[str, None] = {}  # pools with a manual release to answer
        self.guests: dict[tuple[str, str], dict[Owner, None]] = {}  # by namespace and cluster
        self.guests_changed: dict[Owner, None] = {}
        self.clusters_removed: dict[tuple[str, str], None] = {}
        self.legacy: tuple[str, dict[str, str]] | None = None  # a ConfigMap to import
        self.imported = ""  # digest of the one that was
        self.out: list[events.Event] = []
        self.reader = Reader(classless=rules.classless)
        self._requests: dict[Request, Request] = {}
        self._choices: dict[tuple[str, str, str, str], Choice] = {}
        self.lanes: dict[Parts, Lane | None] = {}

    # --- time and order ---

    def begin(self, at: datetime, epoch: str, seq: int) -> None:
        """Time never stands still between two facts: a lease never ends when it begins."""
        now = self.now + _TICK
        self.now = at if at > now else now
        self.cause = Cause(epoch, seq, f"{epoch}:{seq}")

    def refresh_ready(self) -> None:
        """Whether every kind that decisions depend on is known completely in this epoch."""
        epoch, synced = self.epoch, self.synced
        self.ready = all(
            (mark := synced.get(kind)) is not None and mark[0] == epoch for kind in REQUIRED
        )

    def forget_changes(self) -> None:
        """What changed is stored now."""
        self.changes = Changes()

    # --- owners ---

    def intern(self, request: Request) -> Request:
        return self._requests.setdefault(request, request)

    def add_owner(self, owner: Owner) -> None:
        self.owners[owner.plural][owner.key] = owner
        self.changes.owners[owner] = None

    def enlist_guest(self, owner: Owner) -> None:
        cluster = owner.request.guest_cluster
        if cluster:
            self.guests.setdefault((owner.namespace, cluster), {})[owner] = None
            self.guests_changed[owner] = None

    def _delist_guest(self, owner: Owner) -> None:
        key = (owner.namespace, owner.request.guest_cluster)
        group = self.guests.get(key)
        if group is not None and owner in group:
            del group[owner]
        if group is not None and not group:
            del self.guests[key]

    def depart(self, owner: Owner, how: str) -> None:
        """The object is gone. What it holds is released when that may be decided."""
        self.queues.leave(owner)
        owner.note(gone_at=self.now, gone_how=how)
        self.await_release(owner)
        self.undecided.pop(owner, None)
        if how != "vanished":
            self._unname(owner)
        if self.guests:
            self._delist_guest(owner)
        self.changed(owner)

    def await_release(self, owner: Owner) -> None:
        self.departed[owner.plural, owner.uid] = owner
        if owner.gone_how == "vanished":
            self.vanished.append(owner)
        else:
            self.leaving.append(owner)

    def due(self) -> list[Owner]:
        """Owners that are gone and whose time is over; each is told once."""
        due = [one for one in self.leaving if self.departed.get((one.plural, one.uid)) is one]
        self.leaving.clear()
        before = self.now - self.rules.grace
        while self.vanished:
            owner = self.vanished[0]
            if self.departed.get((owner.plural, owner.uid)) is owner:
                if owner.gone_at is not None and owner.gone_at > before:
                    break
                due.append(owner)
            self.vanished.popleft()
        return due

    def forget_owner(self, owner: Owner) -> None:
        self.queues.leave(owner)
        self.undecided.pop(owner, None)
        self.departed.pop((owner.plural, owner.uid), None)
        self._unname(owner)
        if self.guests:
            self._delist_guest(owner)
        self.changed(owner)

    def _unname(self, owner: Owner) -> None:
        if self.owners[owner.plural].get(owner.key) is owner:
            del self.owners[owner.plural][owner.key]

    def knows(self, owner: Owner) -> bool:
        """Whether the owner is (still) part of the state."""
        return (
            self.owners[owner.plural].get(owner.key) is owner
            or self.departed.get((owner.plural, owner.uid)) is owner
        )

    @property
    def settled(self) -> bool:
        """Whether nothing is left to be decided but what the next fact asks for."""
        return self.ready and not (
            self.undecided or self.vanished or self.leaving or self.showing or self.legacy
        )

    def undecide(self, owner: Owner) -> None:
        """Note that the owner asks for something; from here on it has its place in the order."""
        if owner.waits:
            self.queues.leave(owner)
        self.serial = owner.ticket = self.serial + 1
        self.changes.clock = True
        self.undecided[owner] = self.changes.owners[owner] = None

    def all_owners(self) -> Iterable[Owner]:
        for owners in self.owners.values():
            yield from owners.values()

    def known(self) -> Iterable[tuple[ObjectRef, str]]:
        """The objects that are remembered, with their uids."""
        for owner in self.all_owners():
            namespace, _, name = owner.key.partition("/")
            yield ObjectRef(owner.plural, namespace, name), owner.uid
        for pool in self.pools.values():
            yield ObjectRef("ippools", "", pool.name), pool.uid
        for namespace, (_, uid, _) in self.projects.items():
            yield ObjectRef("namespaces", "", namespace), uid

    def alter(self, pool: str, *, serves: bool) -> None:
        self.altered[pool] = serves or self.altered.get(pool, False)

    # --- choosing pools ---

    def choice(self, request: Request) -> Choice:
        wish = (request.pool, request.network, request.namespace, request.cluster)
        found = self._choices.get(wish)
        if found is None:
            found = self._choices[wish] = self._choose(request)
        return found

    def forget_choices(self) -> None:
        self._choices.clear()
        self.lanes.clear()

    def tries(self, need: selection.Need, pool: Pool) -> bool:
        """Whether somebody with this need would be given an address of this pool."""
        ranked = selection.rank(self.pools.values(), need, self.rules.selection)
        pools = [found for _, one in ranked if (found := self.pools[one.name]).usable]
        if self.rules.overflow:
            return pool in pools
        wishes = [{family} for family in pool.spaces] + [set(pool.spaces)]
        return any(
            next((one for one in pools if wish <= one.spaces.keys()), None) is pool
            for wish in wishes
        )

    def _choose(self, request: Request) -> Choice:
        need, rules = self.need(request), self.rules.selection
        if request.pool:
            pool = self.pools.get(request.pool)
            if pool is None:
                message = f"fail to get allocator {request.pool}: there is no such IPPool"
                return Choice((), need, "PoolNotFound", message)
            if not selection.permits(pool.view, need, rules):
                message = f"pool {pool.name} does not serve this owner: " + selection.why_not(
                    pool.view, need, rules
                )
                return Choice((), need, "PoolNotPermitted", message)
            if not pool.usable:
                message = f"fail to get allocator {pool.name}: {pool.problem}"
                return Choice((), need, pool.reason, message)
            return Choice((pool,), need)
        usable, considered = [], []
        for _, found in selection.rank(self.pools.values(), need, rules):
            pool = self.pools[found.name]
            if pool.usable:
                usable.append(pool)
            else:
                considered.append((pool.name, pool.reason, pool.problem))
        if usable:
            return Choice(tuple(usable), need, considered=tuple(considered))
        message = f"no matched IPPool with requirement {need}"
        if not considered:
            considered = [
                (pool.name, "NotSelected", selection.why_not(pool.view, need, rules))
                for pool in sorted(self.pools.values(), key=lambda pool: pool.name)[:20]
            ]
        return Choice((), need, "NoMatchingPool", message, tuple(considered))
