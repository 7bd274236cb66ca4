"""The short way for the usual case: a new owner that asks for one address, whichever, gets the
lowest that nobody ever had.

In one piece what observe.py, pick.py, place.py and ledger.py say step by step. Whatever is not the
usual case is left to them: nothing is changed then. Both ways lead to the same state and the same
decisions: a state machine in the tests goes both and compares.
"""

from __future__ import annotations

from typing import Final

from schema import addresses, events, objects
from services.allocator.core import request as requests
from services.allocator.core.changes import Granted
from services.allocator.core.model import (
    HELD,
    LOADBALANCERS,
    POOL,
    SERVICES,
    Lease,
    Owner,
    Request,
)
from services.allocator.core.pick import REMEMBERED
from services.allocator.core.state import Lane, State

_LANES_LIMIT: Final = 65_536


def grant(state: State, fact: events.AnyEvent, epoch: str) -> events.LeaseGranted | None:
    """Decide on a fact, if it is the usual case and nothing else is to be decided."""
    if isinstance(fact, events.ServiceSeen):
        service = fact.object
        if not requests.is_ours(
            service, classless=state.rules.classless
        ) or requests.claims_of_service(service):
            return None
        plural, meta, parts = SERVICES, service.metadata, state.reader.service_parts(service)
        if requests.shares(parts):
            return None
        obj: objects.Service | objects.LoadBalancer = service
    elif isinstance(fact, events.LoadBalancerSeen):
        balancer = fact.object
        if requests.claims_of_load_balancer(balancer):
            return None
        plural, meta, parts = (
            LOADBALANCERS,
            balancer.metadata,
            state.reader.balancer_parts(balancer),
        )
        obj = balancer
    else:
        return None
    try:
        lane = state.lanes[parts]
    except KeyError:
        lane = _open(state, parts, obj)
    if lane is None:
        return None
    key = f"{meta.namespace}/{meta.name}"
    owners = state.owners[plural]
    if key in owners or (state.memory and (plural, key) in state.memory):
        return None
    request, pool, space, texts = lane
    if len(space.free) >= REMEMBERED or (address := space.fresh()) is None:
        return None
    mask, gateway = texts or pool.mask_and_gateway(address)
    cause, changes, now = state.cause, state.changes, state.now
    state.serial = serial = state.serial + 2  # a ticket would have been the first
    owner = Owner(plural, key, meta.uid, request, epoch, meta.generation)
    owner.phase = HELD
    lease = Lease(owner, address, pool.name, cause.epoch, cause.seq, serial)
    owner.leases = (lease,)
    owners[key] = owner
    space.hold_fresh(address, lease)
    pool.last_allocated = address
    said = events.LeaseGranted(
        at=now,
        owner=events.Owner(plural=plural, namespace=meta.namespace, name=meta.name, uid=meta.uid),
        lease=f"{cause.text}:{serial}",
        address=addresses.text(address),
        pool=pool.name,
        mask=mask,
        gateway=gateway,
        rule="never-used",
        generation=meta.generation,
    )
    state.touched[pool.name] = changes.owners[owner] = None
    changes.granted[lease] = Granted(said, now, cause.text)
    changes.used.add(pool.name)
    changes.clock = True
    return said


def _open(
    state: State, parts: requests.Parts, obj: objects.Service | objects.LoadBalancer
) -> Lane | None:
    """The lane of those who ask for this, none if theirs is not the usual case."""
    if len(state.lanes) >= _LANES_LIMIT:
        state.lanes.clear()
    if isinstance(obj, objects.Service):
        request = state.reader.service(obj)
    else:
        request = state.reader.load_balancer(obj)
    lane = state.lanes[parts] = _lane(state, state.intern(request))
    return lane


def _lane(state: State, request: Request) -> Lane | None:
    if (
        request.mode != POOL
        or request.problem
        or request.addresses
        or request.share
        or request.guest_cluster
        or len(request.families) > 1
    ):
        return None
    pools = state.choice(request).pools
    pool = pools[0] if pools else None
    if pool is None or pool.quotas or pool.overlapping:
        return None
    family = request.families[0] if request.families else min(pool.spaces)
    if family not in pool.spaces:
        return None
    return Lane(request, pool, pool.spaces[family], pool.texts.get(family))
