"""The state as decisions, and as a fingerprint.

`restated` says the standing decisions once more, for a log that lost them. `fingerprint` is equal
for equal states, however they came to be.
"""

from __future__ import annotations

import hashlib
from typing import Final

from schema import addresses, events
from services.allocator.core.ledger import adopted, event_owner
from services.allocator.core.model import DELEGATED
from services.allocator.core.place import refused
from services.allocator.core.state import State

RESTATED_CHUNK: Final = 5_000  # leases in one event: some 150 KB


def restated(state: State) -> list[events.Event]:
    """Every lease, delegation and refusal that holds now, in a fixed order."""
    out: list[events.Event] = []
    for owner in sorted(state.all_owners(), key=lambda owner: (owner.plural, owner.key)):
        for lease in owner.leases:
            out.append(adopted(state, lease, "ledger"))
        if owner.phase == DELEGATED:
            out.append(
                events.AddressDelegated(
                    at=state.now, owner=event_owner(owner), generation=owner.generation
                )
            )
        if owner.refusal is not None:
            out.append(refused(state, owner, owner.refusal))
    state.touched.update(dict.fromkeys(state.pools))
    return out + standing_leases(state)


def standing_leases(state: State) -> list[events.Event]:
    """Which leases stand on which stretch of addresses: what is not listed there is over."""
    owners = [*state.all_owners(), *state.departed.values()]  # those still hold what they held
    standing = sorted((lease.address, lease.id) for owner in owners for lease in owner.leases)
    out: list[events.Event] = []
    first, start = "", 0
    while True:
        end = start + RESTATED_CHUNK
        # Holders who share an address stand in one stretch.
        while start < end < len(standing) and standing[end][0] == standing[end - 1][0]:
            end += 1
        before = addresses.text(standing[end][0]) if end < len(standing) else ""
        leases = [lease for _, lease in standing[start:end]]
        out.append(events.LeasesRestated(at=state.now, first=first, before=before, leases=leases))
        if not before:
            return out
        first, start = before, end


def fingerprint(state: State) -> str:
    """A hash over everything that decides what happens next."""
    digest = hashlib.sha256()

    def add(*parts: object) -> None:
        digest.update(repr(parts).encode())

    add(state.epoch, sorted(state.synced.items()), sorted(state.projects.items()))
    for plural, owners in sorted(state.owners.items()):
        for key, owner in sorted(owners.items()):
            leases = sorted(
                (lease.id, lease.address, lease.pool, lease.share, lease.slots, str(lease.retiring))
                for lease in owner.leases
            )
            add(plural, key, owner.uid, owner.request, owner.phase, owner.epoch, leases)
            add(owner.refusal, owner.claims, owner.gone_at, owner.gone_how, owner.condemned)
    waiting = sorted((o.ticket, o.plural, o.uid) for o in state.all_owners() if o.ticket)
    add([(plural, uid) for _, plural, uid in waiting], sorted(state.departed))
    for name, pool in sorted(state.pools.items()):
        add(name, pool.uid, pool.view, pool.reason, pool.last_allocated, pool.overlapping)
        for family, space in sorted(pool.spaces.items()):
            memos = [(m.address, m.plural, m.key, m.released) for m in space.in_order()]
            add(family, space.shape, sorted(space.held), memos, space.fresh())
    usage = sorted((key, count) for key, count in state.usage.items() if count)
    add(state.legacy, state.imported, sorted(state.guests))
    add(sorted(state.strays), sorted(lease.id for lease in state.retiring), usage)
    add(sorted((key, sorted(held.items())) for key, held in state.shares.items()))
    return digest.hexdigest()
