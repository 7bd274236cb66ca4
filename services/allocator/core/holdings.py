"""Who holds what: leases, the pools that they lie in, and who had what is free.

An address may lie in several pools (they overlap, or one was made after another was deleted): it is
marked as held in each that could give it out, so that none does. A lease that its own pool does not
give out any more is a stray; it stays with its owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from schema import addresses, selection
from schema.pools import Plan
from services.allocator.core.changes import Changes
from services.allocator.core.index import Index
from services.allocator.core.model import Lease, Owner, Pool, Request
from services.allocator.core.quota import QuotaKey
from services.allocator.core.quota import keys as quota_keys
from services.allocator.core.space import Memo, Space, in_order

BEGINNING: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Rules(NamedTuple):
    """The settings that decisions depend on."""

    classless: bool = False
    selection: selection.Rules = selection.Rules()
    overflow: bool = False  # an exhausted pool hands over to the next one that fits
    grace: timedelta = timedelta(0)  # before a vanished owner's lease is reclaimed
    cooldown: timedelta = timedelta(0)  # before a freed address goes to somebody else
    retire: timedelta = timedelta(seconds=60)  # how long a move may take to show; 0: not awaited


class Holdings:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.now = BEGINNING
        self.serial = 0  # of leases and tickets; only grows
        self.pools: dict[str, Pool] = {}
        self.projects: dict[str, tuple[str, str, str]] = {}  # namespace -> project, uid, epoch
        self.memory: dict[tuple[str, str], list[Memo]] = {}
        self.strays: dict[int, tuple[Lease, ...]] = {}  # leases outside their own pool
        self.strayed: dict[Owner, None] = {}  # to be told so
        self.shares: dict[str, dict[int, int]] = {}  # sharing key -> address -> holders
        self.usage: dict[QuotaKey, int] = {}
        self.retiring: dict[Lease, None] = {}
        self.freed: list[tuple[str, int]] = []  # pool, address
        self.freed_quotas: dict[QuotaKey, None] = {}
        self.rejoinable: dict[str, None] = {}  # sharing keys with another or a changed holder
        self.touched: dict[str, None] = {}  # pools to account for
        self.changes = Changes()
        self._index = Index()

    def next_serial(self) -> int:
        self.serial += 1
        self.changes.clock = True
        return self.serial

    def forget_choices(self) -> None:
        """Pools have changed: which of them fit a request is to be worked out anew."""

    def changed(self, owner: Owner) -> None:
        self.changes.owners[owner] = None

    def need(self, request: Request) -> selection.Need:
        project = self.projects.get(request.namespace, ("", "", ""))[0]
        return selection.Need(request.network, project, request.namespace, request.cluster)

    # --- leases ---

    def hold(self, owner: Owner, pool: str, address: int, lease_id: str) -> Lease:
        request = owner.request
        lease = Lease.of(lease_id, owner, address, pool)
        if request.share:
            lease.cover(request.sharing_key, request.slots, request.policy)
        known = self.pools.get(pool)
        if known is not None:
            known.last_allocated = address
            self.changes.used.add(pool)
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
        self.count_quotas(lease, step)

    def count_quotas(self, lease: Lease, step: int) -> None:
        """By what its owner asks for now: on a change it is taken out before and put in after."""
        pool = self.pools.get(lease.pool)
        if pool is not None and pool.quotas:
            for key in quota_keys(pool.name, pool.quotas, self.need(lease.owner.request)):
                self.usage[key] = self.usage.get(key, 0) + step
                if step < 0:
                    self.freed_quotas[key] = None

    def _share_count(self, lease: Lease, step: int) -> None:
        self.rejoinable[lease.share] = None
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
        held = {lease: None for space in pool.spaces.values() for lease in _leases(space)}
        held.update((lease, None) for leases in self.strays.values() for lease in leases)
        for lease in held:
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
        memos = self.memory.setdefault((memo.plural, memo.key), [])
        memos.insert(0 if memo.order < 0 else len(memos), memo)
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
        old_spaces, pool.plan = pool.spaces, plan
        pool.texts = plan.common_texts() if plan is not None else {}
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
        self.forget_choices()
        self.touched[pool.name] = None

    def remove_pool(self, pool: Pool) -> None:
        """Its leases stay with their owners; nothing is granted from it any more."""
        self.reshape(pool, None)
        pool.quotas = ()
        self.recount_quotas(pool)
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
                self.strays[lease.address] = in_order((*self.strays.get(lease.address, ()), lease))

    def pools_around(self, address: int) -> list[Pool]:
        """Pools with a range around the address, by name."""
        return [self.pools[name] for name in sorted(self._index.around(address, address))]


def _leases(space: Space) -> Iterable[Lease]:
    for held in space.held.values():
        if isinstance(held, tuple):
            yield from held
        else:
            yield held
