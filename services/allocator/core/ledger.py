"""Beginning and ending leases, in memory and as events: the only places where one is made."""

from __future__ import annotations

from schema import addresses, events
from services.allocator.core.model import Lease, Owner, Pool
from services.allocator.core.space import Space
from services.allocator.core.state import Closed, Granted, State


def event_owner(owner: Owner) -> events.Owner:
    namespace, _, name = owner.key.partition("/")
    return events.Owner(plural=owner.plural, namespace=namespace, name=name, uid=owner.uid)


def next_id(state: State) -> str:
    return f"{state.cause.text}:{state.next_serial()}"


def begin(
    state: State,
    owner: Owner,
    pool: str,
    address: int,
    lease_id: str,
    rule: str,
    *,
    adopted: bool = False,
) -> Lease:
    lease = state.hold(owner, pool, address, lease_id)
    text = addresses.text(address)
    state.changes.granted[lease] = Granted(lease, text, state.now, rule, state.cause.text, adopted)
    return lease


def end(state: State, lease: Lease, reason: str) -> None:
    begun = state.changes.granted.get(lease)
    if begun is not None:
        begun.ended, begun.end_reason, begun.end_cause = state.now, reason, state.cause.text
    else:
        state.changes.closed.append(Closed(lease.id, state.now, reason, state.cause.text))
        state.changes.altered.pop(lease, None)
    state.drop(lease)


def grant(state: State, owner: Owner, pool: Pool, address: int, rule: str) -> Lease:
    lease = begin(state, owner, pool.name, address, next_id(state), rule)
    _granted(state, lease, pool, state.changes.granted[lease].text, lease.id, rule)
    return lease


def grant_simply(state: State, owner: Owner, pool: Pool, space: Space, address: int) -> None:
    """What grant() does, in one piece, for an address that choose_simply() found."""
    state.serial += 1
    cause, serial = state.cause, state.serial
    lease = Lease(owner, address, pool.name, cause.epoch, cause.seq, serial)
    owner.leases = (lease,)
    space.hold_fresh(address, lease)
    pool.last_allocated = address
    state.touched[pool.name] = None
    changes = state.changes
    changes.used.add(pool.name)
    changes.owners[owner] = None
    text = addresses.text(address)
    lease_id = f"{cause.text}:{serial}"
    changes.granted[lease] = Granted(lease, text, state.now, "never-used", cause.text)
    _granted(state, lease, pool, text, lease_id, "never-used")


def _granted(state: State, lease: Lease, pool: Pool, text: str, lease_id: str, rule: str) -> None:
    owner = lease.owner
    mask, gateway = pool.mask_and_gateway(lease.address)
    state.out.append(
        events.LeaseGranted(
            at=state.now,
            owner=event_owner(owner),
            lease=lease_id,
            address=text,
            pool=pool.name,
            mask=mask,
            gateway=gateway,
            rule=rule,
            sharing_key=owner.request.share,
            generation=owner.generation,
        )
    )


def adopted(state: State, lease: Lease, source: str) -> events.LeaseAdopted:
    pool, owner = state.pools.get(lease.pool), lease.owner
    mask, gateway = pool.mask_and_gateway(lease.address) if pool is not None else ("", "")
    return events.LeaseAdopted(
        at=state.now,
        owner=event_owner(owner),
        lease=lease.id,
        address=addresses.text(lease.address),
        pool=lease.pool,
        mask=mask,
        gateway=gateway,
        source=source,
        sharing_key=owner.request.share,
        generation=owner.generation,
    )


def adopt(state: State, owner: Owner, pool: Pool, address: int, source: str) -> Lease:
    lease = begin(state, owner, pool.name, address, next_id(state), source, adopted=True)
    state.out.append(adopted(state, lease, source))
    return lease


def release(state: State, lease: Lease, reason: str) -> None:
    end(state, lease, reason)
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
