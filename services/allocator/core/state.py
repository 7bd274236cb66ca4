"""The allocator's memory, and the few ways in which it changes.

Every change goes through a method here, whether it comes from a decision taken now or from one
that is read back from the log; that is why the same log gives the same state. The state keeps
account of what changed (`changes`) for whoever stores it, and collects decisions (`out`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from schema import addresses, events, selection
from schema.pools import Plan
from schema.subjects import ObjectRef
from services.allocator.core.index import Index
from services.allocator.core.model import LOADBALANCERS, SERVICES, Lease, Owner, Pool, Request
from services.allocator.core.queue import Queues
from services.allocator.core.quota import QuotaKey
from services.allocator.core.quota import keys as quota_keys
from services.allocator.core.request import Reader
from services.allocator.core.space import Memo, Space

REQUIRED: Final = ("ippools", "namespaces", LOADBALANCERS, SERVICES)
"""Kinds that must be listed completely before anything is decided."""
_TICK: Final = timedelta(microseconds=1)
BEGINNING: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Rules(NamedTuple):
    """The settings that decisions depend on."""

    classless: bool = False
    selection: selection.Rules = selection.Rules()
    overflow: bool = False  # an exhausted pool hands over to the next one that fits
    grace: timedelta = timedelta(0)  # before a vanished owner's lease is reclaimed
    cooldown: timedelta = timedelta(0)  # before a freed address goes to somebody else
    retire: timedelta = timedelta(seconds=60)  # how long a move may take to show; 0: not awaited


@dataclass(slots=True)
class Granted:
    """A lease that began, as the ledger keeps it."""

    lease: Lease
    text: str  # the address
    at: datetime
    rule: str
    cause: str
    adopted: bool = False
    ended: datetime | None = None
    end_reason: str = ""
    end_cause: str = ""


class Closed(NamedTuple):
    id: str
    at: datetime
    reason: str
    cause: str


@dataclass(slots=True)
class Changes:
    """What differs from what was stored last."""

    owners: dict[Owner, None] = field(default_factory=dict)
    granted: dict[Lease, Granted] = field(default_factory=dict)
    closed: list[Closed] = field(default_factory=list)
    altered: dict[Lease, None] = field(default_factory=dict)  # other ports, or retiring
    pools: set[str] = field(default_factory=set)
    projects: set[str] = field(default_factory=set)
    memos: dict[tuple[str, int], Memo | None] = field(default_factory=dict)
    marks: set[str] = field(default_factory=set)
    clock: bool = False

    def __bool__(self) -> bool:
        return bool(
            self.owners
            or self.granted
            or self.closed
            or self.altered
            or self.pools
            or self.projects
            or self.memos
            or self.marks
            or self.clock
        )


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


class State:
    def __init__(self, rules: Rules = Rules()) -> None:  # noqa: B008
        self.rules = rules
        self.epoch = ""
        self.ready = False
        self.now = BEGINNING
        self.serial = 0  # of leases and tickets; only grows
        self.cause = Cause("", 0, "")  # of what is being decided
        self.synced: dict[str, tuple[str, int, bool]] = {}  # plural -> epoch, sequence, absent
        self.owners: dict[str, dict[str, Owner]] = {LOADBALANCERS: {}, SERVICES: {}}
        self.pools: dict[str, Pool] = {}
        self.projects: dict[str, tuple[str, str, str]] = {}  # namespace -> project, uid, epoch
        self.memory: dict[tuple[str, str], list[Memo]] = {}
        self.strays: dict[int, tuple[Lease, ...]] = {}  # leases outside their own pool
        self.shares: dict[str, dict[int, int]] = {}  # sharing key -> address -> holders
        self.usage: dict[QuotaKey, int] = {}
        self.retiring: dict[Lease, None] = {}
        self.moved: dict[Owner, None] = {}  # in a replay: who was granted an address
        self.release_asked: dict[str, None] = {}  # pools with a manual release to answer
        self.guests: dict[tuple[str, str], dict[Owner, None]] = {}  # by namespace and cluster
        self.guests_changed: dict[Owner, None] = {}
        self.clusters_removed: dict[tuple[str, str], None] = {}
        self.legacy: tuple[str, dict[str, str]] | None = None  # a ConfigMap to import
        self.imported = ""  # digest of the one that was
        self.strayed: dict[Owner, None] = {}  # to be told so
        self.showing: list[tuple[Owner, tuple[int, ...]]] = []  # statuses of those who move
        self.queues = Queues()
        self.departed: dict[tuple[str, str], Owner] = {}  # by kind and uid: to be released
        self.vanished: deque[Owner] = deque()  # of those, who has a grace period, in its order
        self.leaving: list[Owner] = []  # and who has none
        self.undecided: dict[Owner, None] = {}  # to be placed
        self.freed: list[tuple[str, int]] = []  # pool, address
        self.freed_quotas: dict[QuotaKey, None] = {}
        self.altered: list[str] = []  # pools whose spec changed
        self.touched: dict[str, None] = {}  # pools to account for
        self.out: list[events.Event] = []
        self.changes = Changes()
        self.reader = Reader(classless=rules.classless)
        self._index = Index()
        self._requests: dict[Request, Request] = {}
        self._choices: dict[Request, Choice] = {}

    # --- time and order ---

    def begin(self, at: datetime, epoch: str, seq: int) -> None:
        """Time never stands still between two facts: a lease never ends when it begins."""
        now = self.now + _TICK
        self.now = at if at > now else now
        self.cause = Cause(epoch, seq, f"{epoch}:{seq}")

    def next_serial(self) -> int:
        self.serial += 1
        self.changes.clock = True
        return self.serial

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

    def undecide(self, owner: Owner) -> None:
        """Note that the owner asks for something; from here on it has its place in the order."""
        if owner.waits:
            self.queues.leave(owner)
        self.serial = owner.ticket = self.serial + 1
        self.changes.clock = True
        self.undecided[owner] = self.changes.owners[owner] = None

    def changed(self, owner: Owner) -> None:
        self.changes.owners[owner] = None

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

    # --- leases ---

    def hold(self, owner: Owner, pool: str, address: int, lease_id: str) -> Lease:
        request = owner.request
        lease = Lease.of(lease_id, owner, address, pool)
        if request.share:
            lease.cover(request.sharing_key, request.slots, request.policy)
        known = self.pools.get(pool)
        if known is not None:
            known.last_allocated = address
            self.changes.pools.add(pool)
        owner.leases = (*owner.leases, lease)
        self.attach(lease)
        self.changes.owners[owner] = None
        return lease

    def attach(self, lease: Lease) -> None:
        """Mark the address as held in every pool that could give it out."""
        address = lease.address
        pool = self.pools.get(lease.pool)
        if lease.share or (pool is not None and pool.quotas):
            self.count(lease, 1)
        if pool is not None and not pool.overlapping:  # the usual case, without detours
            space = pool.spaces.get(6 if address >= addresses.V6 else 4)
            if space is not None and address in space.shape:
                memo = space.hold(address, lease, inside=True)
                if memo is not None:
                    self._forget(memo)
                self.touched[pool.name] = None
                return
        for pool, space in self.places(lease):
            memo = space.hold(address, lease, inside=address in space.shape)
            if memo is not None:
                self._forget(memo)
            self.touched[pool.name] = None
        if self.is_stray(lease):
            self.strays[address] = (*self.strays.get(address, ()), lease)

    def drop(self, lease: Lease) -> None:
        """End a lease in memory: the address becomes free wherever it lies."""
        owner, address = lease.owner, lease.address
        owner.leases = tuple(one for one in owner.leases if one is not lease)
        self.changed(owner)
        known = self.pools.get(lease.pool)
        if lease.share or (known is not None and known.quotas):
            self.count(lease, -1)
        self.retiring.pop(lease, None)
        for pool, space in self.places(lease):
            memo = Memo(address, pool.name, owner.plural, owner.key, self.now, self.next_serial())
            if space.release(address, lease, memo):
                self._remember(memo)
            self.touched[pool.name] = None
            self.freed.append((pool.name, address))
        self._unstray(lease)

    def count(self, lease: Lease, step: int) -> None:
        """Keep account of sharers and quotas."""
        if lease.share:
            self._share_count(lease, step)
        pool = self.pools.get(lease.pool)
        if pool is not None and pool.quotas:
            for key in quota_keys(pool.name, pool.quotas, self.need(lease.owner.request)):
                self.usage[key] = self.usage.get(key, 0) + step
                if step < 0:
                    self.freed_quotas[key] = None

    def _share_count(self, lease: Lease, step: int) -> None:
        holders = self.shares.setdefault(lease.share, {})
        holders[lease.address] = holders.get(lease.address, 0) + step
        if not holders[lease.address]:
            del holders[lease.address]
        if not holders:
            del self.shares[lease.share]

    def recount_quotas(self, pool: Pool) -> None:
        """Quotas, or who counts towards them, have changed."""
        for key in [key for key in self.usage if key[0] == pool.name]:
            del self.usage[key]
        if not pool.quotas:
            return
        for space in pool.spaces.values():
            for lease in _leases(space):
                if lease.pool == pool.name:
                    need = self.need(lease.owner.request)
                    for key in quota_keys(pool.name, pool.quotas, need):
                        self.usage[key] = self.usage.get(key, 0) + 1

    def reshare(self, lease: Lease) -> None:
        """Let a lease cover what its owner asks for now: other ports, another key or policy."""
        request = lease.owner.request
        if lease.share:
            self._share_count(lease, -1)
        lease.cover(request.sharing_key, request.slots, request.policy)
        if lease.share:
            self._share_count(lease, 1)
        self.freed.append((lease.pool, lease.address))
        if lease not in self.changes.granted:
            self.changes.altered[lease] = None

    def retire(self, lease: Lease) -> None:
        if lease.retiring is None:
            lease.retire(self.now)
            self.retiring[lease] = None
            if lease not in self.changes.granted:
                self.changes.altered[lease] = None

    def unretire(self, lease: Lease) -> None:
        if lease.retiring is not None:
            lease.retire(None)
            del self.retiring[lease]
            if lease not in self.changes.granted:
                self.changes.altered[lease] = None

    def cooling(self, space: Space, address: int) -> bool:
        """Whether a free address was released so recently that strangers must not have it."""
        if not self.rules.cooldown:
            return False
        memo = space.free.get(address)
        return memo is not None and memo.released + self.rules.cooldown > self.now

    def grantable(self, pool: Pool, family: int) -> bool:
        """Whether a stranger could get an address of the family now."""
        space = pool.spaces.get(family)
        if space is None or space.available <= 0:
            return False
        if not self.rules.cooldown or space.fresh() is not None:
            return True
        oldest = space.longest_released()
        return oldest is not None and not self.cooling(space, oldest.address)

    def available(self, pool: Pool) -> int:
        """How many addresses strangers could get now."""
        free = pool.available()
        if self.rules.cooldown:
            since = self.now - self.rules.cooldown
            free -= sum(space.released_after(since) for space in pool.spaces.values())
        return free

    def is_stray(self, lease: Lease) -> bool:
        """Whether its own pool does not (any more) give out the address."""
        pool = self.pools.get(lease.pool)
        return pool is None or lease.address not in pool

    def places(self, lease: Lease) -> list[tuple[Pool, Space]]:
        """Its own pool, and every other one that could give the address out."""
        address, family = lease.address, addresses.family(lease.address)
        pool = self.pools.get(lease.pool)
        own = pool.spaces.get(family) if pool is not None else None
        if pool is not None and own is not None and address in own.shape:
            if not pool.overlapping:
                return [(pool, own)]
            others: Iterable[str] = pool.overlapping
        else:
            others = sorted(self._index.around(address, address) - {lease.pool})
        places = [(pool, own)] if pool is not None and own is not None else []
        for name in others:
            other = self.pools[name]
            space = other.spaces.get(family)
            if space is not None and address in space.shape:
                places.append((other, space))
        return places

    def _unstray(self, lease: Lease) -> None:
        left = tuple(one for one in self.strays.get(lease.address, ()) if one is not lease)
        if left:
            self.strays[lease.address] = left
        else:
            self.strays.pop(lease.address, None)

    def holders(self, address: int, pool: Pool) -> tuple[Lease, ...]:
        space = pool.spaces.get(addresses.family(address))
        held = space.holders(address) if space is not None else ()
        return held or self.strays.get(address, ())

    def all_holders(self, lease: Lease) -> list[Lease]:
        """Everybody on the lease's address, whichever pool it came from, itself included."""
        found = {id(one): one for one in self.strays.get(lease.address, ())}
        for _, space in self.places(lease):
            found.update((id(one), one) for one in space.holders(lease.address))
        return list(found.values())

    # --- memory of who had what ---

    def _remember(self, memo: Memo) -> None:
        self.memory.setdefault((memo.plural, memo.key), []).append(memo)
        self.changes.memos[memo.pool, memo.address] = memo

    def _forget(self, memo: Memo) -> None:
        memos = self.memory.get((memo.plural, memo.key), [])
        left = [one for one in memos if one is not memo]
        if left:
            self.memory[memo.plural, memo.key] = left
        else:
            self.memory.pop((memo.plural, memo.key), None)
        self.changes.memos[memo.pool, memo.address] = None

    def recall(self, memo: Memo) -> None:
        """Put a memory in place: read from storage, or from what the cluster shows."""
        pool = self.pools.get(memo.pool)
        space = pool.spaces.get(addresses.family(memo.address)) if pool else None
        if space is None or not space.is_free(memo.address):
            return
        before = space.free.get(memo.address)
        if before is not None:
            self._forget(before)
        space.remember(memo)
        self._remember(memo)

    # --- pools ---

    def reshape(self, pool: Pool, plan: Plan | None) -> None:
        """Give a pool other ranges; leases stay with it, memories outside are dropped."""
        old_spaces, pool.plan, pool.texts = pool.spaces, plan, None
        if plan is not None and len(plan.ranges) == 1:
            pool.texts = (plan.ranges[0].mask, plan.ranges[0].gateway_text)
        pool.spaces = {}
        around = {id(lease): lease for space in old_spaces.values() for lease in _leases(space)}
        before, pool.overlapping = pool.overlapping, self._overlapping(pool)
        for name in pool.overlapping:
            for space in self.pools[name].spaces.values():
                around.update((id(lease), lease) for lease in _leases(space))
        around.update((id(one), one) for leases in self.strays.values() for one in leases)
        for family, shape in plan.shapes.items() if plan else ():
            space = old_spaces.pop(family) if family in old_spaces else Space(shape)
            belonging = [
                lease
                for lease in around.values()
                if addresses.family(lease.address) == family
                and (lease.pool == pool.name or lease.address in shape)
            ]
            for memo in space.reshape(shape, belonging):
                self._forget(memo)
            pool.spaces[family] = space
        for space in old_spaces.values():
            for memo in list(space.free.values()):
                self._forget(memo)
        self._relate(pool, before)
        self._sort_strays(around.values())
        self._choices.clear()
        self.touched[pool.name] = None

    def remove_pool(self, pool: Pool) -> None:
        """Its leases stay with their owners; nothing is granted from it any more."""
        self.reshape(pool, None)
        del self.pools[pool.name]
        self.changes.pools.add(pool.name)
        self.touched.pop(pool.name, None)

    def _overlapping(self, pool: Pool) -> tuple[str, ...]:
        self._index.put(pool.name, pool.plan)
        ranges = pool.plan.ranges if pool.plan is not None else ()
        found = {name for item in ranges for name in self._index.around(item.start, item.end)}
        return tuple(sorted(found - {pool.name}))

    def _relate(self, pool: Pool, before: tuple[str, ...]) -> None:
        """Make the others know that they overlap this pool, or do not any more."""
        for name in {*before, *pool.overlapping}:
            other = self.pools[name]
            names = set(other.overlapping) - {pool.name}
            if name in pool.overlapping:
                names.add(pool.name)
            other.overlapping = tuple(sorted(names))

    def _sort_strays(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            before = lease in self.strays.get(lease.address, ())
            self._unstray(lease)
            stray = self.is_stray(lease)
            if stray != before:
                self.strayed[lease.owner] = None
            if stray:
                self.strays[lease.address] = (*self.strays.get(lease.address, ()), lease)

    def pools_around(self, address: int) -> list[Pool]:
        """Pools with a range around the address, by name."""
        return [self.pools[name] for name in sorted(self._index.around(address, address))]

    # --- choosing pools ---

    def need(self, request: Request) -> selection.Need:
        project = self.projects.get(request.namespace, ("", "", ""))[0]
        return selection.Need(request.network, project, request.namespace, request.cluster)

    def choice(self, request: Request) -> Choice:
        found = self._choices.get(request)
        if found is None:
            found = self._choices[request] = self._choose(request)
        return found

    def forget_choices(self) -> None:
        self._choices.clear()

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


def _leases(space: Space) -> Iterable[Lease]:
    for held in space.held.values():
        if isinstance(held, tuple):
            yield from held
        else:
            yield held
