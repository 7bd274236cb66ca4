"""One address for several owners: who may share, and who may not any more.

Owners of one namespace share when they name the same key (`lbledger.io/allow-shared-ip`), use
different ports or protocols, and have the same policy: with `externalTrafficPolicy: Local` one node
answers for all of them, so they must have the same backends. Who asks for something else by now
only has his ports respected.
"""

from __future__ import annotations

from collections.abc import Iterable

from schema import addresses
from services.allocator.core.model import Lease, Owner, Pool, Request
from services.allocator.core.state import State


def compatible(lease: Lease, request: Request) -> bool:
    """Whether a request may join the holder of a lease on its address."""
    return (
        bool(request.share)
        and lease.share == request.sharing_key
        and not _meet(lease.slots, request.slots)
        and (not _as_asked(lease) or lease.owner.request.policy == request.policy)
    )


def _as_asked(lease: Lease) -> bool:
    """Whether the lease is what its owner wants, and is to stay."""
    request = lease.owner.request
    return not lease.retiring and (lease.share, lease.slots) == (request.sharing_key, request.slots)


def joinable(state: State, owner: Owner, address: int, holders: Iterable[Lease]) -> bool:
    others = [lease for lease in holders if lease.owner is not owner]
    return bool(others) and all(compatible(lease, owner.request) for lease in others)


def shared_address(state: State, owner: Owner, pool: Pool, family: int) -> int | None:
    """The lowest address of the pool on which others wait with the same key."""
    found = state.shares.get(owner.request.sharing_key)
    for address in sorted(found) if found else ():
        if addresses.family(address) == family and address in pool:
            holders = state.holders(address, pool)
            if joinable(state, owner, address, holders):
                return address
    return None


def still_shares(state: State, lease: Lease) -> bool:
    """Whether the owner, as it is now, may stay beside the other holders of its address."""
    others = [one for one in state.all_holders(lease) if one is not lease]
    return all(compatible(other, lease.owner.request) for other in others)


def restate_slots(state: State, lease: Lease) -> None:
    """Bring what a lease covers in step with the owner's request."""
    request = lease.owner.request
    wanted = (request.sharing_key, request.slots, request.policy)
    if (lease.share, lease.slots, lease.policy) != wanted:
        state.reshare(lease)


def _meet(one: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]) -> bool:
    if not one or not other:
        return True  # without ports it would cover them all
    return any(a <= d and c <= b for a, b in one for c, d in other)
