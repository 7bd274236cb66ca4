"""Taking over what the cluster shows already, before anything new is granted.

An owner whose object shows an address gets exactly that as a lease, if the address lies in a pool
(reserved addresses aside) and no lease of ours speaks against it. Of two owners that show the same
address, the one that the pool's `status.allocated` names keeps it, else the older object, else the
one with the smaller uid; the other is placed like a new owner. What a pool's history tells becomes
the memory by which a name gets its old address back.
"""

from __future__ import annotations

from collections.abc import Iterable

from schema import addresses, events
from schema.addresses import AddressError
from services.allocator.core import ledger, sharing
from services.allocator.core.model import LOADBALANCERS, POOL, Claim, Owner, Pool
from services.allocator.core.space import Memo
from services.allocator.core.state import BEGINNING, State


def adopt(state: State) -> None:
    """Take over the claims of all owners that are not decided yet."""
    claims = [
        (_rank(state, owner, claim), owner, claim)
        for owner in state.undecided
        if owner.request.mode == POOL and not owner.leases
        for claim in _claims(state, owner)
    ]
    for _, owner, claim in sorted(claims, key=lambda item: item[0]):
        family = addresses.family(claim.address)
        if any(addresses.family(lease.address) == family for lease in owner.leases):
            continue
        pool = _pool_of(state, claim)
        if pool is None:
            continue
        holders = state.holders(claim.address, pool)
        if not holders or sharing.joinable(state, owner, claim.address, holders):
            ledger.adopt(state, owner, pool, claim.address, claim.source)
        else:
            _contest(state, owner, pool, claim.address, holders[0].owner)
    recall_histories(state, state.pools.values())


def _contest(state: State, owner: Owner, pool: Pool, address: int, holder: Owner) -> None:
    """Tell both that they show one address, and who keeps it."""
    text = addresses.text(address)
    for one, other, kept in ((owner, holder, False), (holder, owner, True)):
        keeps = "keeps it" if kept else "gets another one"
        message = (
            f"{text} is also shown by {other.plural}/{other.key}; this one {keeps} (the one that "
            "the ledger or the pool's status names goes first, then the older object)"
        )
        state.out.append(
            events.AddressContested(
                at=state.now,
                owner=ledger.event_owner(one),
                address=text,
                pool=pool.name,
                other=ledger.event_owner(other),
                kept=kept,
                message=message,
            )
        )


def _claims(state: State, owner: Owner) -> list[Claim]:
    """What its own status shows, and what pools say about it."""
    claims = list(owner.claims)
    if owner.plural == LOADBALANCERS and not claims:
        for pool in state.pools.values():
            claims += [
                Claim(address, pool.name, "pool.status.allocated")
                for address in _addresses_of(pool, owner.key)
            ]
    return claims


def _addresses_of(pool: Pool, key: str) -> list[int]:
    found = []
    for text, holder in pool.claims.items():
        if holder == key:
            try:
                found.append(addresses.parse(text))
            except AddressError:
                continue  # a hand-edited entry; the pool's status is no authority
    return sorted(found)


def _rank(state: State, owner: Owner, claim: Claim) -> tuple[bool, str, str, str, str, int]:
    pool = _pool_of(state, claim)
    named = pool is not None and pool.claims.get(addresses.text(claim.address)) == owner.key
    return (
        not (named and owner.plural == LOADBALANCERS),
        owner.created or "9999",
        owner.uid,
        claim.source,
        claim.pool,
        claim.address,
    )


def _pool_of(state: State, claim: Claim) -> Pool | None:
    """The pool that the claim names, if the address lies in it; else the one around it."""
    named = state.pools.get(claim.pool)
    for pool in (named, *state.pools_around(claim.address)):
        if pool is None or pool.plan is None or claim.address in pool.plan.reserved:
            continue
        if any(item.start <= claim.address <= item.end for item in pool.plan.ranges):
            return pool
    return None


def recall_histories(state: State, pools: Iterable[Pool]) -> None:
    """What pools tell about former holders becomes memory; then they have told all."""
    for pool in sorted(pools, key=lambda pool: pool.name):
        for text, key in sorted(pool.history.items()):
            try:
                address = addresses.parse(text)
            except AddressError:
                continue
            order = -state.next_serial()  # older than every release that we saw
            state.recall(Memo(address, pool.name, LOADBALANCERS, key, BEGINNING, order))
        if pool.claims or pool.history:
            pool.claims, pool.history = {}, {}
            state.changes.pools.add(pool.name)
