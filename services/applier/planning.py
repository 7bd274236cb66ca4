"""What to write next for one owner or pool: the difference between wanted and known.

Level-triggered and pure: the same state gives the same plan, whatever events led to it. A plan is
empty when the cluster shows everything. Order: the slice (with its dummy) stands before an
announcer hears of the address; the load balancer's own status comes last and waits, for a moment,
for the echoes of the other writes, so that one write tells the whole story.

Nothing is planned before every kind has been listed completely, for an owner that nobody has
decided about, or for an object of our name that is not ours.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from schema import events, objects
from schema.subjects import ObjectRef
from services.applier import balancers, conditions, statuses, tickets
from services.applier.core import State
from services.applier.documents import Bookings, PoolDoc
from services.applier.plans import Plan, marks_of, status_write
from services.applier.targets import Key


def plan(state: State, entity: str, now: datetime) -> Plan:
    """What to write now for an entity."""
    if entity.startswith("pool:"):
        name = entity.removeprefix("pool:")
        doc = state.pools.get(name)
        uid = doc.uid if doc else ""
        made = Plan(
            state, entity, events.Owner(plural="ippools", namespace="", name=name, uid=uid), now
        )
        if doc is not None and doc.accounted and state.ready():
            _pool(made, doc)
        return made
    owner_doc = state.owners.get(entity)
    if owner_doc is None:
        return Plan(state, entity, events.Owner(plural="", namespace="", name="", uid=""), now)
    made = Plan(state, entity, owner_doc.owner, now)
    if owner_doc.decided and state.ready():
        view = state.shown.get(owner_doc.owner.ref)
        if view is not None and view.metadata.uid == owner_doc.uid:
            if isinstance(view, objects.LoadBalancer):
                balancers.load_balancer(made, owner_doc, view)
            elif isinstance(view, objects.Service):
                tickets.service(made, owner_doc)
    return made


def _pool(made: Plan, doc: PoolDoc) -> None:
    state = made.state
    ref = ObjectRef("ippools", "", doc.name)
    known = state.known(ref)
    if not isinstance(known, objects.IPPool) or (doc.uid and known.metadata.uid != doc.uid):
        return
    if known.metadata.deletion_timestamp is not None:
        return
    last = state.target(Key(*ref, "status")).written_at
    due = last + timedelta(seconds=state.options.pool_status_s) if last else made.now
    if due > made.now:
        made.wake(due)
        return
    limit = state.options.pool_map_entries
    book = state.books.get(doc.name) or Bookings()
    parts = conditions.of_pool(doc, len(book.live), limit)
    marks = marks_of(made, doc.marks, parts, known.status)
    wanted = statuses.pool(doc, book, state.holder, limit)
    patch = statuses.pool_patch(wanted, marks, known, state.forms["ippools"])
    if patch.status:
        made.add(status_write(made, doc, known, patch.status, wanted, marks))
