"""What to write next for one owner or pool: the difference between wanted and known.

Level-triggered and pure: the same state gives the same plan, whatever events led to it. A plan is
empty when the cluster shows everything. Order: the slice (with its dummy) stands before an
announcer hears of the address; the load balancer's own status comes last and waits, for a moment,
for the echoes of the other writes, so that one write tells the whole story.

Nothing is planned before every kind has been listed completely, for an owner that nobody has
decided about, or for an object of our name that is not ours.
"""

from __future__ import annotations

from datetime import datetime

from schema import events, objects
from services.applier import balancers, pools, tickets
from services.applier.core import State
from services.applier.plans import Plan, notice_of


def plan(state: State, entity: str, now: datetime) -> Plan:
    """What to write now for an entity."""
    kind, _, name = entity.partition(":")
    if kind == "pool":
        return _pool(state, entity, name, now)
    if kind == "import":
        return _import(state, entity, name, now)
    doc = state.owners.get(entity)
    if doc is None:
        return Plan(state, entity, _owner("", ""), now)
    made = Plan(state, entity, doc.owner, now)
    view = state.shown.get(doc.owner.ref)
    if (
        not doc.decided
        or not state.ready(doc.plural)
        or view is None
        or view.metadata.uid != doc.uid
    ):
        return made
    made.notices += [notice_of(view, said) for said in doc.tell]
    if isinstance(view, objects.LoadBalancer):
        balancers.load_balancer(made, doc, view)
    elif isinstance(view, objects.Service):
        tickets.service(made, doc)
    elif isinstance(view, objects.Pod):
        tickets.pod(made, doc)
    return made


def _pool(state: State, entity: str, name: str, now: datetime) -> Plan:
    doc = state.pools.get(name)
    made = Plan(state, entity, _owner("ippools", name, uid=doc.uid if doc else ""), now)
    if doc is not None and state.ready():
        pools.pool(made, doc)
    return made


def _import(state: State, entity: str, uid: str, now: datetime) -> Plan:
    doc = state.imports.get(uid)
    if doc is None:
        return Plan(state, entity, _owner("", ""), now)
    made = Plan(state, entity, _owner("configmaps", doc.name, doc.namespace, uid), now)
    if state.ready():
        pools.imported(made, doc)
    return made


def _owner(plural: str, name: str, namespace: str = "", uid: str = "") -> events.Owner:
    return events.Owner(plural=plural, namespace=namespace, name=name, uid=uid)
