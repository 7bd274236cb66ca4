"""A person asks for a leaked address: the pool's manuallyReleaseIP annotation.

`<address>: <namespace>/<name>` releases that booking if the load balancer does not exist any more.
Whatever comes of it is answered, so that the annotation goes away and somebody learns why.
"""

from __future__ import annotations

import re
from typing import Final

from schema import addresses, events
from schema.addresses import AddressError
from services.allocator.core.ledger import release
from services.allocator.core.model import LOADBALANCERS, Pool
from services.allocator.core.state import State

ANNOTATION: Final = "loadbalancer.harvesterhci.io/manuallyReleaseIP"
# The last colon parts address and owner: an IPv6 address has colons of its own.
_FORM: Final = re.compile(r"\s*(\S+?)\s*:\s*([^\s/:]+/[^\s/:]+)\s*").fullmatch


def asked(pool: Pool) -> str:
    return (pool.view.metadata.annotations or {}).get(ANNOTATION, "")


def answer(state: State) -> None:
    """Answer the requests that came since the last call."""
    names, state.release_asked = state.release_asked, {}
    for name in names:
        pool = state.pools.get(name)
        request = asked(pool) if pool is not None else ""
        if pool is None or not request:
            continue
        refusal = _release(state, pool, request)
        state.out.append(
            events.ReleaseAnswered(
                at=state.now,
                pool=name,
                uid=pool.uid,
                request=request,
                released=not refusal,
                message=refusal or f"the booking {request} is released",
            )
        )


def _release(state: State, pool: Pool, request: str) -> str:
    """Release the booking; returns what stands against it."""
    parts = _FORM(request)
    if parts is None:
        return f"{request!r}: write it as <address>: <namespace>/<name>"
    try:
        address = addresses.parse(parts[1])
    except AddressError as error:
        return str(error)
    key = parts[2]
    found = [
        lease
        for lease in state.holders(address, pool)
        if lease.owner.plural == LOADBALANCERS
        and lease.owner.key == key
        and lease.pool == pool.name
    ]
    if not found:
        return f"pool {pool.name} has no booking of {parts[1]} for load balancer {key}"
    if found[0].owner.gone_at is None:
        return f"load balancer {key} still exists: delete it, and its address is released"
    release(state, found[0], "manual")
    return ""
