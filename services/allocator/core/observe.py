"""Taking facts in: what the cluster shows, without deciding anything yet.

Facts that change nothing for the allocator (a repetition, a status that we wrote ourselves, a
Service that asks nothing of us) leave no trace. Owners that need a decision are noted in
`State.undecided`, pools in `State.altered`.
"""

from __future__ import annotations

import msgspec

from schema import events, objects
from schema.pools import DISABLED_ANNOTATION, PoolError, flag, read_plan, read_quotas
from services.allocator.core import adopt, guests, legacy, manual
from services.allocator.core import request as requests
from services.allocator.core.model import (
    HELD,
    LOADBALANCERS,
    NOTHING,
    PENDING,
    SERVICES,
    Claim,
    Owner,
    Pool,
    Request,
)
from services.allocator.core.state import State

HISTORY_ANNOTATION = "lbledger.io/history"
PROJECT_ANNOTATION = "field.cattle.io/projectId"


# --- owners ---


def load_balancer(state: State, obj: objects.LoadBalancer, epoch: str) -> None:
    meta = obj.metadata
    request = state.reader.load_balancer(obj)
    claims = requests.claims_of_load_balancer(obj)
    owner = _owner_seen(state, LOADBALANCERS, meta, request, claims, epoch)
    if owner is not None and owner.leases and (state.retiring or owner.ticket):
        state.showing.append((owner, requests.shown_by_load_balancer(obj)))


def service(state: State, obj: objects.Service, epoch: str) -> None:
    meta = obj.metadata
    if not requests.is_ours(obj, classless=state.rules.classless):
        known = state.owners[SERVICES].get(f"{meta.namespace}/{meta.name}")
        if known is not None:
            _owner_seen(state, SERVICES, meta, requests.NO_REQUEST, (), epoch)
        return
    request = state.reader.service(obj)
    claims = requests.claims_of_service(obj)
    owner = _owner_seen(state, SERVICES, meta, request, claims, epoch)
    if owner is not None and owner.leases and (state.retiring or owner.ticket):
        state.showing.append((owner, tuple(claim.address for claim in claims)))


def _owner_seen(
    state: State,
    plural: str,
    meta: objects.ObjectMeta,
    request: Request,
    claims: tuple[Claim, ...],
    epoch: str,
) -> Owner | None:
    key = f"{meta.namespace}/{meta.name}"
    owner = state.owners[plural].get(key)
    if owner is not None and not owner.has_uid(meta.uid):
        state.depart(owner, "replaced")
        owner = None
    request = state.intern(request)
    if owner is None:
        if request.mode == NOTHING:
            return None
        owner = Owner(plural, key, meta.uid, request, epoch, meta.generation)
        if claims or not state.ready or request.guest:
            created = meta.creation_timestamp.isoformat() if meta.creation_timestamp else ""
            owner.note(claims=claims, created=created)
        state.add_owner(owner)
        state.undecide(owner)
        if request.guest_cluster:
            state.enlist_guest(owner)
        return owner
    if owner.epoch != epoch or owner.gone_at is not None:
        owner.epoch = epoch
        owner.note(gone_at=None, gone_how="")
        if state.departed.pop((plural, owner.uid), None) is not None:
            state.enlist_guest(owner)
        state.changed(owner)
    if owner.request is request:
        if owner.phase != HELD and owner.generation != meta.generation:
            owner.generation = meta.generation
            state.changed(owner)
        return owner
    _ask(state, owner, request)
    owner.generation = meta.generation
    if owner.phase == PENDING:
        owner.note(claims=claims)
    state.undecide(owner)
    return owner


def _ask(state: State, owner: Owner, request: Request) -> None:
    recount = owner.leases if state.need(owner.request) != state.need(request) else ()
    for lease in recount:
        state.count_quotas(lease, -1)
    owner.request = request
    for lease in recount:
        state.count_quotas(lease, 1)


# --- pools ---


def pool(state: State, obj: objects.IPPool, epoch: str) -> None:
    meta = obj.metadata
    known = state.pools.get(meta.name)
    if known is not None and known.uid != meta.uid:
        state.remove_pool(known)
        known = None
    view = _without_status(obj)
    if known is None:
        known = Pool(meta.name, meta.uid, view, epoch, meta.generation)
        state.pools[meta.name] = known
        state.changes.pools.add(meta.name)
        _read(state, known)
        _published(state, known, obj)
        if manual.asked(known):
            state.release_asked[meta.name] = None
        return
    known.generation = meta.generation
    if known.epoch != epoch:
        known.epoch = epoch
        state.changes.pools.add(meta.name)
    if not state.ready:
        _published(state, known, obj)
    if known.view != view:
        asked, before, known.view = manual.asked(known), known.view, view
        if manual.asked(known) not in ("", asked):
            state.release_asked[meta.name] = None
        state.changes.pools.add(meta.name)
        _read(state, known, before)


def _without_status(obj: objects.IPPool) -> objects.IPPool:
    """What decisions depend on. A generation that our own status write raised is no change."""
    meta = obj.metadata
    metadata = objects.ObjectMeta(
        name=meta.name,
        uid=meta.uid,
        deletion_timestamp=meta.deletion_timestamp,
        annotations=meta.annotations,
        labels=meta.labels,
    )
    return msgspec.structs.replace(obj, metadata=metadata, status=None)


def _published(state: State, known: Pool, obj: objects.IPPool) -> None:
    """What the status says about holders, for adoption before the first decision, and what status
    and annotation say about former holders."""
    status = obj.status
    claims = dict((status.allocated if status else None) or {}) if not state.ready else {}
    history = dict((status.allocated_history if status else None) or {})
    text = (obj.metadata.annotations or {}).get(HISTORY_ANNOTATION, "")
    try:
        history |= msgspec.json.decode(text, type=dict[str, str]) if text else {}
    except msgspec.MsgspecError:
        history |= {}  # a hint and no more: without it nobody gets his old address back
    if (claims, history) != (known.claims, known.history):
        known.claims, known.history = claims, history
        state.changes.pools.add(known.name)
    if state.ready:
        adopt.recall_histories(state, (known,))


def _read(state: State, known: Pool, before: objects.IPPool | None = None) -> None:
    """Read the ranges; with bad ones the pool keeps those it had, and grants nothing."""
    served = (before and before.spec.selector, known.reason, set(known.spaces))
    try:
        plan, quotas = read_plan(known.view), read_quotas(known.view)
    except PoolError as error:
        known.reason, known.problem = "InvalidRange", str(error)
        state.forget_choices()
        state.touched[known.name] = None
    else:
        known.reason, known.problem, known.good = *standing(known.view), known.view
        if known.plan != plan:
            state.reshape(known, plan)
        if known.quotas != quotas:
            known.quotas = quotas
            state.recount_quotas(known)
        state.forget_choices()
        state.touched[known.name] = None
    serves = (known.view.spec.selector, known.reason, set(known.spaces))
    state.alter(known.name, serves=before is None or served != serves)


def standing(view: objects.IPPool) -> tuple[str, str]:
    if view.metadata.deletion_timestamp is not None:
        return "PoolDeleting", "the pool is being deleted"
    if view.spec.disabled or flag(view, DISABLED_ANNOTATION):
        return "PoolDisabled", "the pool is disabled"
    return "", ""


# --- beside owners and pools ---


def virtual_machine(state: State, obj: objects.VirtualMachine) -> None:
    removed = guests.torn_down(obj)
    if removed is not None:
        state.clusters_removed[removed] = None


def config_map(state: State, obj: objects.ConfigMap) -> None:
    if legacy.wanted(obj):
        state.legacy = (obj.metadata.uid, dict(obj.data or {}))
        state.changes.clock = True


# --- namespaces and absences ---


def namespace(state: State, obj: objects.Namespace, epoch: str) -> None:
    meta = obj.metadata
    project = (meta.annotations or {}).get(PROJECT_ANNOTATION, "").replace(":", "/", 1)
    before = state.projects.get(meta.name)
    if before == (project, meta.uid, epoch):
        return
    state.projects[meta.name] = (project, meta.uid, epoch)
    state.changes.projects.add(meta.name)
    if project != (before[0] if before is not None else ""):
        _project_changed(state, meta.name)


def _project_changed(state: State, namespace: str) -> None:
    """Those who wait may belong to another pool now; those who hold an address keep it."""
    state.forget_choices()
    for known in state.pools.values():
        if known.quotas:
            state.recount_quotas(known)
    for owner in state.queues.of_namespace(namespace):
        state.undecided[owner] = None


def gone(state: State, fact: events.ObjectGone) -> None:
    if fact.plural in state.owners:
        owner = state.owners[fact.plural].get(f"{fact.namespace}/{fact.name}")
        if owner is not None and owner.uid == fact.uid and owner.gone_at is None:
            state.depart(owner, fact.reason)
    elif fact.plural == "ippools":
        known = state.pools.get(fact.name)
        if known is not None and known.uid == fact.uid:
            state.remove_pool(known)
            state.alter(fact.name, serves=True)
    elif fact.plural == "namespaces":
        project = state.projects.get(fact.name)
        if project is not None and project[1] == fact.uid:
            _forget_namespace(state, fact.name)


def sync_finished(state: State, plural: str, epoch: str, seq: int, *, absent: bool) -> None:
    """The list of a kind is complete: what this epoch did not show is not there any more."""
    if epoch != state.epoch:
        return
    state.synced[plural] = (epoch, seq, absent)
    state.changes.marks.add(plural)
    state.refresh_ready()
    if plural in state.owners:
        missing = [
            owner
            for owner in state.owners[plural].values()
            if owner.epoch != epoch and owner.gone_at is None
        ]
        for owner in sorted(missing, key=lambda owner: owner.key):
            state.depart(owner, "vanished")
    elif plural == "ippools":
        for known in list(state.pools.values()):
            if known.epoch != epoch:
                state.remove_pool(known)
                state.alter(known.name, serves=True)
    elif plural == "namespaces":
        for name, (_, _, seen) in list(state.projects.items()):
            if seen != epoch:
                _forget_namespace(state, name)


def _forget_namespace(state: State, name: str) -> None:
    project = state.projects.pop(name)[0]
    state.changes.projects.add(name)
    if project:
        _project_changed(state, name)
