"""Looking for an address: which one an owner would get, or why it gets none.

Nothing here changes the state. An address that was asked for by value is found or missed, never
replaced by another. Otherwise: one shared with others under the owner's key; the one that the
owner's name had last; the one that its status shows; one that nobody ever had; the one whose
release is longest ago, once its cool-down is over.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from schema import addresses
from schema.addresses import NAMES
from services.allocator.core import quota, sharing
from services.allocator.core.model import Lease, Owner, Pool, Refusal, Request, Wait
from services.allocator.core.space import Space
from services.allocator.core.state import Choice, State

REMEMBERED: Final = 65_536
"""Free addresses of a pool whose last holder is remembered before they are used again: without a
bound, owners that come and go would fill the memory with the addresses of a /64."""

Considered = tuple[str, str, str]  # pool, reason, message


class Pick(NamedTuple):
    pool: Pool
    address: int
    rule: str


class Miss(NamedTuple):
    """Why nothing was found, and what would change that."""

    refusal: Refusal
    waits: tuple[Wait, ...]


def fits(state: State, lease: Lease) -> bool:
    """Whether a lease is still what its owner asks for. Pool edits do not make it unfit."""
    request, family = lease.owner.request, addresses.family(lease.address)
    if request.pool and lease.pool != request.pool:
        return False
    if request.families and family not in request.families:
        return False
    if request.addresses:
        asked = [address for address in request.addresses if addresses.family(address) == family]
        if asked and lease.address not in asked:
            return False
    return not lease.share or sharing.still_shares(state, lease)


def missing(request: Request, leases: tuple[Lease, ...]) -> tuple[int, ...]:
    """The families for which an address has to be found; 0 stands for any one."""
    held = {addresses.family(lease.address) for lease in leases}
    wanted = [addresses.family(address) for address in request.addresses]
    wanted += [family for family in request.families if family not in wanted]
    if not wanted:
        return () if held else (0,)
    return tuple(family for family in wanted if family not in held)


def look_for(
    state: State, owner: Owner, families: tuple[int, ...]
) -> tuple[list[Pick], Miss | None]:
    """An address for each of the families; the miss speaks of the first that has none."""
    if not families:
        return [], None
    request = owner.request
    choice = state.choice(request)
    if not choice.pools:
        waits: tuple[Wait, ...] = (_change(request, choice),)
        refusal = Refusal(choice.reason, choice.message, request.pool, choice.considered)
        return [], Miss(refusal, waits)
    both = _first_with_all(choice, families)
    picks: list[Pick] = []
    first_miss: Miss | None = None
    for family in families:
        found = _look_in(state, owner, choice, both, family)
        if isinstance(found, Pick):
            picks.append(found)
        else:
            first_miss = first_miss or found
    return picks, first_miss


def _change(request: Request, choice: Choice) -> Wait:
    """What would change the choice of pools itself."""
    return ("name", request.pool) if request.pool else ("need", choice.need)


def _first_with_all(choice: Choice, families: tuple[int, ...]) -> Pool | None:
    """For two families one pool that has both goes before two pools."""
    if len(families) < 2:
        return None
    for pool in choice.pools:
        if all(family in pool.spaces for family in families):
            return pool
    return None


def _look_in(
    state: State, owner: Owner, choice: Choice, both: Pool | None, family: int
) -> Pick | Miss:
    request = owner.request
    asked = next((a for a in request.addresses if addresses.family(a) == family), None)
    if asked is not None:
        return _look_for_asked(state, owner, choice, asked)
    pools = [pool for pool in choice.pools if not family or family in pool.spaces]
    if both is not None:
        pools = [both, *(pool for pool in pools if pool is not both)]
    if not pools:
        return _no_family(choice, request, family)
    misses: list[Miss] = []
    for pool in pools if state.rules.overflow else pools[:1]:
        found = choose(state, owner, pool, family or min(pool.spaces))
        if isinstance(found, Pick):
            return found
        misses.append(found)
    considered = [*choice.considered]
    considered += [(m.refusal.pool, m.refusal.reason, m.refusal.message) for m in misses]
    waits = dict.fromkeys(wait for miss in misses for wait in miss.waits)
    refusal = misses[0].refusal._replace(considered=tuple(considered))
    if not request.pool:
        waits[_change(request, choice)] = None
    return Miss(refusal, tuple(waits))


def choose(state: State, owner: Owner, pool: Pool, family: int) -> Pick | Miss:
    """A free address of the pool by the rules of preference."""
    space, request = pool.spaces[family], owner.request
    over = _over_quota(state, owner, pool) if pool.quotas else None
    if over is not None:
        return over
    if request.share:
        shared = sharing.shared_address(state, owner, pool, family)
        if shared is not None:
            return Pick(pool, shared, "shared")
    for memo in reversed(state.memory.get((owner.plural, owner.key), ())):
        if memo.pool == pool.name and addresses.family(memo.address) == family:
            return Pick(pool, memo.address, "returning")
    for claim in owner.claims:
        if (
            addresses.family(claim.address) == family
            and space.is_free(claim.address)
            and not state.cooling(space, claim.address)
        ):
            return Pick(pool, claim.address, "shown")
    if space.available > 0:
        address, oldest = space.fresh(), space.longest_released()
        reusable = oldest is not None and not state.cooling(space, oldest.address)
        if address is not None and not (reusable and len(space.free) >= REMEMBERED):
            return Pick(pool, address, "never-used")
        if oldest is not None and reusable:
            return Pick(pool, oldest.address, "longest-released")
    refusal = Refusal("PoolExhausted", exhausted(pool, space, family), pool.name)
    waits: tuple[Wait, ...] = (("pool", pool.name, family),)
    if request.share:
        waits += (("share", request.sharing_key),)
    return Miss(refusal, waits)


def exhausted(pool: Pool, space: Space, family: int) -> str:
    assert pool.plan is not None
    free = space.available
    cooling = f", {free} cooling down" if free else ""
    return (
        f"fail to get ip from pool {pool.name}, error: no IP addresses available in range set: "
        f"{pool.plan.text(family)} (total={space.shape.total} available=0{cooling})"
    )


def _over_quota(state: State, owner: Owner, pool: Pool) -> Miss | None:
    for key in quota.keys(pool.name, pool.quotas, state.need(owner.request)):
        limit = pool.quotas[int(str(key[1]))]
        if state.usage.get(key, 0) >= limit.limit:
            message = f"pool {pool.name} gives out {quota.text(limit, key)}"
            return Miss(Refusal("QuotaExceeded", message, pool.name), (("quota", *key),))
    return None


def _look_for_asked(state: State, owner: Owner, choice: Choice, address: int) -> Pick | Miss:
    """An address that was asked for by value: that one or none."""
    request = owner.request
    waits: list[Wait] = [("name", pool.name) for pool in choice.pools]
    waits.append(("name", request.pool) if request.pool else ("fit", choice.need))
    considered: list[Considered] = list(choice.considered)
    reason = "RequestedAddressUnavailable"
    for pool in choice.pools:
        why = pool.plan.why_not(address) if pool.plan is not None else pool.problem
        if not why:
            over = _over_quota(state, owner, pool) if pool.quotas else None
            if over is not None:
                reason, why = "QuotaExceeded", over.refusal.message
                waits.extend(over.waits)
        if not why:
            found = _taken(state, owner, pool, address)
            if isinstance(found, Pick):
                return found
            why = found
            waits.append(("address", address))
        considered.append((pool.name, reason, why))
    message = "; ".join(f"pool {pool}: {why}" for pool, _, why in considered)
    refusal = Refusal(reason, message, request.pool, tuple(considered))
    return Miss(refusal, tuple(dict.fromkeys(waits)))


def _taken(state: State, owner: Owner, pool: Pool, address: int) -> Pick | str:
    """The address itself, if it is free or may be shared, else what stands against it."""
    holders, name = state.holders(address, pool), addresses.text(address)
    if holders:
        if owner.request.share and sharing.joinable(state, owner, address, holders):
            return Pick(pool, address, "shared")
        others = ", ".join(f"{lease.owner.plural}/{lease.owner.key}" for lease in holders)
        return f"requested ip {name} is held by {others}"
    space = pool.spaces[addresses.family(address)]
    memo = space.free.get(address)
    mine = memo is not None and (memo.plural, memo.key) == (owner.plural, owner.key)
    if state.cooling(space, address) and not mine:
        return f"requested ip {name} was released a moment ago and is cooling down"
    return Pick(pool, address, "requested")


def _no_family(choice: Choice, request: Request, family: int) -> Miss:
    names = ", ".join(pool.name for pool in choice.pools)
    message = f"no {NAMES[family]} range in pool {names}"
    waits: list[Wait] = [("name", pool.name) for pool in choice.pools]
    waits.append(_change(request, choice))
    refusal = Refusal("FamilyUnavailable", message, request.pool, choice.considered)
    return Miss(refusal, tuple(dict.fromkeys(waits)))
