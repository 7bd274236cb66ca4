"""Beginning and ending leases, in memory and as events.

The only place where one is made, but for the short way of express.py.
"""

from __future__ import annotations

from typing import Any

from schema import addresses, events
from services.allocator.core.model import Lease, Owner, Pool
from services.allocator.core.state import Closed, Granted, State


def event_owner(owner: Owner) -> events.Owner:
    namespace, _, name = owner.key.partition("/")
    return events.Owner(plural=owner.plural, namespace=namespace, name=name, uid=owner.uid)


def next_id(state: State) -> str:
    return f"{state.cause.text}:{state.next_serial()}"


def begin(state: State, owner: Owner, said: events.LeaseGranted | events.LeaseAdopted) -> None:
    """Begin the lease that a recorded decision names."""
    address = addresses.parse_canonical(said.address)
    _note(state, state.hold(owner, said.pool, address, said.lease), said)


def _note(state: State, lease: Lease, said: events.LeaseGranted | events.LeaseAdopted) -> None:
    state.changes.granted[lease] = Granted(said, state.now, state.cause.text)


def end(state: State, lease: Lease, reason: str) -> None:
    changes = state.changes
    closed = Closed(lease.id, state.now, reason, state.cause.text)
    if lease in changes.granted:
        changes.ended[lease] = closed
    else:
        changes.closed.append(closed)
        changes.altered.pop(lease, None)
    state.drop(lease)


def grant(state: State, owner: Owner, pool: Pool, address: int, rule: str) -> None:
    lease = state.hold(owner, pool.name, address, next_id(state))
    said = events.LeaseGranted(**_image(state, lease), rule=rule)
    _note(state, lease, said)
    state.out.append(said)


def adopt(state: State, owner: Owner, pool: Pool, address: int, source: str) -> None:
    lease = state.hold(owner, pool.name, address, next_id(state))
    said = adopted(state, lease, source)
    _note(state, lease, said)
    state.out.append(said)


def adopted(state: State, lease: Lease, source: str) -> events.LeaseAdopted:
    return events.LeaseAdopted(**_image(state, lease), source=source)


def _image(state: State, lease: Lease) -> dict[str, Any]:
    """What is said of a lease, however it came to be."""
    pool, owner = state.pools.get(lease.pool), lease.owner
    mask, gateway = pool.mask_and_gateway(lease.address) if pool is not None else ("", "")
    return {
        "at": state.now,
        "owner": event_owner(owner),
        "lease": lease.id,
        "address": addresses.text(lease.address),
        "pool": lease.pool,
        "mask": mask,
        "gateway": gateway,
        "sharing_key": owner.request.share,
        "generation": owner.generation,
    }


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
