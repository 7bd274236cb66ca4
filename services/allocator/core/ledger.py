"""Beginning and ending leases, in memory and as events: the only places where one is made."""

from __future__ import annotations

from schema import addresses, events
from services.allocator.core.model import Lease, Owner, Pool
from services.allocator.core.state import Closed, Granted, State


def event_owner(owner: Owner) -> events.Owner:
    namespace, _, name = owner.key.partition("/")
    return events.Owner(plural=owner.plural, namespace=namespace, name=name, uid=owner.uid)


def next_id(state: State) -> str:
    return f"{state.cause.text}:{state.next_serial()}"


def begin(state: State, owner: Owner, said: events.LeaseGranted | events.LeaseAdopted) -> Lease:
    """Begin the lease that a decision names."""
    lease = state.hold(owner, said.pool, addresses.parse_canonical(said.address), said.lease)
    state.changes.granted[lease] = Granted(said, state.now, state.cause.text)
    return lease


def end(state: State, lease: Lease, reason: str) -> None:
    changes = state.changes
    closed = Closed(lease.id, state.now, reason, state.cause.text)
    if lease in changes.granted:
        changes.ended[lease] = closed
    else:
        changes.closed.append(closed)
        changes.altered.pop(lease, None)
    state.drop(lease)


def grant(state: State, owner: Owner, pool: Pool, address: int, rule: str) -> Lease:
    mask, gateway = pool.mask_and_gateway(address)
    said = events.LeaseGranted(
        at=state.now,
        owner=event_owner(owner),
        lease=next_id(state),
        address=addresses.text(address),
        pool=pool.name,
        mask=mask,
        gateway=gateway,
        rule=rule,
        sharing_key=owner.request.share,
        generation=owner.generation,
    )
    state.out.append(said)
    return begin(state, owner, said)


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
    mask, gateway = pool.mask_and_gateway(address)
    said = events.LeaseAdopted(
        at=state.now,
        owner=event_owner(owner),
        lease=next_id(state),
        address=addresses.text(address),
        pool=pool.name,
        mask=mask,
        gateway=gateway,
        source=source,
        sharing_key=owner.request.share,
        generation=owner.generation,
    )
    state.out.append(said)
    return begin(state, owner, said)


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
