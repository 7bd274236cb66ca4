"""Which address an owner gets: the rules of one placement.

What an owner holds stays as long as it fits the request; only what is missing is looked for. An
address that was asked for by value is given or refused, never replaced by another. Otherwise the
owner gets the address that its name had last, if that is free; else one that nobody ever had; else
the one whose release is longest ago. A move is made before the old address is let go, and an owner
whose move fails keeps what it has.
"""

from __future__ import annotations

from typing import NamedTuple

from schema import addresses, events
from schema.addresses import NAMES
from services.allocator.core.model import (
    DELEGATED,
    DHCP,
    HELD,
    NOTHING,
    WAITING,
    Lease,
    Owner,
    Pool,
    Refusal,
    Request,
    Wait,
)
from services.allocator.core.state import Choice, Closed, Granted, State


class Pick(NamedTuple):
    pool: Pool
    address: int
    rule: str


class Miss(NamedTuple):
    """Why nothing was found, and what would change that."""

    refusal: Refusal
    waits: tuple[Wait, ...]


def place(state: State, owner: Owner) -> bool:
    """Decide about one owner; true when it now has all that it asks for."""
    request = owner.request
    if request.mode == NOTHING:
        release_all(state, owner, "owner-retyped")
        settle(state, owner, HELD)
        return True
    if request.mode == DHCP:
        return _delegate(state, owner)
    fitting = tuple(lease for lease in owner.leases if fits(request, lease))
    families = missing(state, request, fitting)
    if request.problem:
        _refuse(state, owner, Miss(Refusal("InvalidRequest", request.problem), ()))
        return False
    picks, miss = look_for(state, owner, families)
    if miss is not None and (request.strict or not (picks or fitting)):
        _refuse(state, owner, miss)
        return False
    for pick in picks:
        grant(state, owner, pick)
    for lease in [lease for lease in owner.leases if not _kept(lease, fitting, picks)]:
        release(state, lease, "request-changed")
    if miss is not None:
        _refuse(state, owner, miss)
        return False
    settle(state, owner, HELD)
    return True


def fits(request: Request, lease: Lease) -> bool:
    """Whether a lease is still what the request asks for. Pool edits do not make it unfit."""
    family = addresses.family(lease.address)
    if request.pool and lease.pool != request.pool:
        return False
    if request.families and family not in request.families:
        return False
    asked = [address for address in request.addresses if addresses.family(address) == family]
    return not asked or lease.address in asked


def missing(state: State, request: Request, leases: tuple[Lease, ...]) -> tuple[int, ...]:
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
        waits: tuple[Wait, ...] = (("name", request.pool),) if request.pool else ()
        waits = waits or (("need", choice.need),)
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
    tried: list[tuple[str, str, str]] = list(choice.considered)
    for pool in pools if state.rules.overflow else pools[:1]:
        space_family = family or min(pool.spaces)
        pick = choose(state, owner, pool, space_family)
        if pick is not None:
            return pick
        tried.append((pool.name, "PoolExhausted", _exhausted(pool, space_family)))
    last = pools[0]
    space_family = family or min(last.spaces)
    refusal = Refusal("PoolExhausted", _exhausted(last, space_family), last.name, tuple(tried))
    waits: list[Wait] = [("pool", last.name, space_family)]
    if state.rules.overflow:
        waits = [("pool", pool.name, family or min(pool.spaces)) for pool in pools]
    waits.append(("name", request.pool) if request.pool else ("need", choice.need))
    return Miss(refusal, tuple(waits))


def choose(state: State, owner: Owner, pool: Pool, family: int) -> Pick | None:
    """A free address of the pool by the rules of preference."""
    space = pool.spaces[family]
    for memo in reversed(state.memory.get((owner.plural, owner.key), ())):
        if memo.pool == pool.name and addresses.family(memo.address) == family:
            return Pick(pool, memo.address, "returning")
    for claim in owner.claims:
        if addresses.family(claim.address) == family and space.is_free(claim.address):
            return Pick(pool, claim.address, "shown")
    if space.available <= 0:
        return None
    address = space.fresh()
    if address is not None:
        return Pick(pool, address, "never-used")
    oldest = space.longest_released()
    return Pick(pool, oldest.address, "longest-released") if oldest is not None else None


def _look_for_asked(state: State, owner: Owner, choice: Choice, address: int) -> Pick | Miss:
    """An address that was asked for by value: that one or none."""
    request, name = owner.request, addresses.text(address)
    waits: list[Wait] = [("name", pool.name) for pool in choice.pools]
    if not request.pool:
        waits.append(("need", choice.need))
    considered = []
    for pool in choice.pools:
        why = pool.plan.why_not(address) if pool.plan is not None else pool.problem
        if not why:
            holders = state.holders(address, pool)
            if not holders:
                return Pick(pool, address, "requested")
            others = ", ".join(f"{lease.owner.plural}/{lease.owner.key}" for lease in holders)
            why = f"requested ip {name} is held by {others}"
            waits.append(("address", address))
        considered.append((pool.name, "RequestedAddressUnavailable", why))
    message = "; ".join(f"pool {pool}: {why}" for pool, _, why in considered)
    refusal = Refusal("RequestedAddressUnavailable", message, request.pool, tuple(considered))
    return Miss(refusal, tuple(waits))


def _no_family(choice: Choice, request: Request, family: int) -> Miss:
    names = ", ".join(pool.name for pool in choice.pools)
    message = f"no {NAMES[family]} range in pool {names}"
    waits: list[Wait] = [("name", pool.name) for pool in choice.pools]
    if not request.pool:
        waits.append(("need", choice.need))
    return Miss(Refusal("FamilyUnavailable", message, request.pool), tuple(waits))


def _exhausted(pool: Pool, family: int) -> str:
    space = pool.spaces[family]
    assert pool.plan is not None
    return (
        f"fail to get ip from pool {pool.name}, error: no IP addresses available in range set: "
        f"{pool.plan.text(family)} (total={space.shape.total} available={space.available})"
    )


# --- taking and letting go ---


def event_owner(owner: Owner) -> events.Owner:
    namespace, _, name = owner.key.partition("/")
    return events.Owner(plural=owner.plural, namespace=namespace, name=name, uid=owner.uid)


def grant(state: State, owner: Owner, pick: Pick) -> None:
    pool, address, rule = pick
    lease_id = f"{state.cause}:{state.next_serial()}"
    begin_lease(state, owner, pool.name, address, lease_id, rule)
    item = pool.plan.range_of(address) if pool.plan is not None else None
    state.out.append(
        events.LeaseGranted(
            at=state.now,
            owner=event_owner(owner),
            lease=lease_id,
            address=addresses.text(address),
            pool=pool.name,
            mask=item.mask if item else "",
            gateway=item.gateway_text if item else "",
            rule=rule,
            sharing_key=owner.request.share,
            generation=owner.generation,
        )
    )


def begin_lease(
    state: State,
    owner: Owner,
    pool: str,
    address: int,
    lease_id: str,
    rule: str,
    *,
    adopted: bool = False,
) -> None:
    lease = state.hold(owner, pool, address, lease_id)
    state.changes.granted[lease_id] = Granted(lease, state.now, rule, state.cause, adopted)


def end_lease(state: State, lease: Lease, reason: str) -> None:
    begun = state.changes.granted.get(lease.id)
    if begun is not None:
        begun.ended, begun.end_reason, begun.end_cause = state.now, reason, state.cause
    else:
        state.changes.closed.append(Closed(lease.id, state.now, reason, state.cause))
    state.drop(lease)


def release(state: State, lease: Lease, reason: str) -> None:
    end_lease(state, lease, reason)
    state.out.append(
        events.LeaseReleased(
            at=state.now,
            owner=event_owner(lease.owner),
            lease=lease.id,
            address=addresses.text(lease.address),
            pool=lease.pool,
            reason=reason,
        )
    )


def release_all(state: State, owner: Owner, reason: str) -> None:
    for lease in owner.leases:
        release(state, lease, reason)


def _delegate(state: State, owner: Owner) -> bool:
    release_all(state, owner, "request-changed")
    if owner.phase != DELEGATED:
        state.out.append(
            events.AddressDelegated(
                at=state.now, owner=event_owner(owner), generation=owner.generation
            )
        )
    settle(state, owner, DELEGATED)
    return True


def _refuse(state: State, owner: Owner, miss: Miss) -> None:
    """The owner waits. It is told why once, not each time that it is tried again in vain."""
    kept = ",".join(addresses.text(lease.address) for lease in owner.leases)
    refusal = miss.refusal._replace(kept=kept)
    if not owner.ticket:
        owner.ticket = state.next_serial()
        state.changed(owner)
    if owner.phase != WAITING:
        owner.phase = WAITING
        state.changed(owner)
    state.queues.join(owner, miss.waits)
    _touch_pools(state, miss.waits)
    if owner.refusal is None or owner.refusal[:3] != refusal[:3] or owner.refusal.kept != kept:
        owner.refusal = refusal
        state.out.append(refused(state, owner, refusal))
        state.changed(owner)


def refused(state: State, owner: Owner, refusal: Refusal) -> events.LeaseRefused:
    return events.LeaseRefused(
        at=state.now,
        owner=event_owner(owner),
        reason=refusal.reason,
        message=refusal.message,
        pool=refusal.pool,
        considered=[
            events.PoolVerdict(pool=pool, reason=reason, message=message)
            for pool, reason, message in refusal.considered
        ],
        kept=refusal.kept,
        generation=owner.generation,
    )


def rejoin(state: State, owner: Owner) -> None:
    """Put an owner that was refused back among those who wait, at its old place in the order."""
    fitting = tuple(lease for lease in owner.leases if fits(owner.request, lease))
    waits: tuple[Wait, ...] = ()
    if not owner.request.problem:
        _, miss = look_for(state, owner, missing(state, owner.request, fitting))
        if miss is None:
            state.undecided[owner.plural, owner.uid] = owner
            return
        waits = miss.waits
    state.queues.join(owner, waits)


def settle(state: State, owner: Owner, phase: str) -> None:
    """Nothing is missing: the owner leaves the order of those who wait."""
    _touch_pools(state, owner.waits)
    state.queues.leave(owner)
    if owner.phase != phase or owner.refusal is not None or owner.ticket:
        state.changed(owner)
    owner.phase, owner.refusal, owner.ticket, owner.claims = phase, None, 0, ()


def _touch_pools(state: State, waits: tuple[Wait, ...]) -> None:
    """The number of those who wait for a pool is part of its account."""
    for wait in waits:
        if wait[0] == "pool":
            state.touched[str(wait[1])] = None


def _kept(lease: Lease, fitting: tuple[Lease, ...], picks: list[Pick]) -> bool:
    return lease in fitting or any(pick.address == lease.address for pick in picks)
