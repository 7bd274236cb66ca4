"""What a load balancer needs: its slices, its Service, the ingress, and the status that tells of
them, in this order.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from schema import names, objects
from schema.subjects import ObjectRef
from services.applier import conditions, shapes, statuses
from services.applier.conditions import Problem
from services.applier.documents import OwnerDoc, Said
from services.applier.plans import (
    Plan,
    Write,
    digest_of,
    ingress_write,
    marks_of,
    service_write,
    slice_write,
    status_write,
)
from services.applier.targets import Key


def load_balancer(made: Plan, doc: OwnerDoc, lb: objects.LoadBalancer) -> None:
    state = made.state
    if lb.metadata.deletion_timestamp is not None:
        return
    known = state.known(doc.owner.ref)
    if known is None or known.metadata.uid != doc.uid:
        return  # the API server says that it is gone, or another one; the watcher will
    if doc.condemned is not None:
        _delete(made, doc, doc.condemned)
        return
    if not doc.decided_on_address:
        return
    cluster = lb.spec.workload_type == "cluster"
    shown = None
    if not cluster and doc.backends is not None:
        _data_path(made, doc, lb)
        shown = state.shown.get(ObjectRef("services", doc.namespace, doc.name))
    published: list[str] = []
    if isinstance(shown, objects.Service) and shapes.standing(doc, shown) == "ours":
        published = statuses.ingress_ips(shown)
    parts = conditions.of_load_balancer(doc, published, made.problems, cluster=cluster)
    marks = marks_of(made, doc.marks, parts, known.status)
    wanted = statuses.load_balancer(
        doc,
        published[0] if published else "",
        cluster=cluster,
        entries=state.options.backend_entries,
    )
    form = state.forms["loadbalancers"]
    patch = statuses.load_balancer_patch(wanted, marks, known, form)
    if not patch.status:
        state.holds.pop(made.entity, None)
        return
    new = not (known.status and known.status.conditions)
    if held(made, doc, soft=patch.soft, new=new):
        return
    made.add(status_write(made, doc, known, patch.status, wanted, marks))


def _delete(made: Plan, doc: OwnerDoc, condemned: Said) -> None:
    """Nothing stands behind it any more."""
    made.add(
        Write(
            key=Key(*doc.owner.ref),
            entity=made.entity,
            owner=doc.owner,
            target="LoadBalancer",
            verb="delete",
            body=None,
            digest=f"delete {doc.uid}",
            uid=doc.uid,
            reason=condemned.reason,
            message=condemned.message,
        )
    )


def _data_path(made: Plan, doc: OwnerDoc, lb: objects.LoadBalancer) -> None:
    """Slices, Service and, where nobody else announces, the ingress."""
    state = made.state
    ref = ObjectRef("services", doc.namespace, doc.name)
    service = _known(made, ref)
    addresses = shapes.wanted_addresses(doc)
    if service is None and not addresses:
        return
    if service is not None and not _ours(made, doc, service, conditions.PUBLISHED):
        return
    made.contested(Key(*ref))
    made.contested(Key(*ref, "status"))
    sliced = _slices(made, doc, lb)
    announcing = state.options.announcing
    wanted = shapes.service(lb, doc, announcing)
    digest = digest_of(wanted)
    if service is None:
        if sliced or announcing.ours:
            made.add(service_write(made, doc, wanted, digest, creates=True))
        return
    # One of them at a time, as both move the version of the Service. The ingress goes first: an
    # address that is not ours any more may be somebody else's already.
    if announcing.ours and _announced(made, doc, service, addresses, sliced):
        return
    if shapes.service_differs(wanted, service) or _withdrawn(made, ref, digest):
        made.add(service_write(made, doc, wanted, digest, uid=service.metadata.uid))
    else:
        foreign = shapes.foreign_parts(wanted, service)
        if foreign:
            made.add(service_write(made, doc, foreign, digest, verb="json"))


def _withdrawn(made: Plan, ref: ObjectRef, digest: str) -> bool:
    """Whether our last write may have said something that is not wanted any more: what is left out
    shows no difference, and an apply takes it back."""
    target = made.state.targets.get(Key(*ref))
    return target is not None and target.applied not in ("", digest)


def _announced(
    made: Plan, doc: OwnerDoc, service: objects.Service, addresses: list[str], sliced: bool
) -> bool:
    """Publish the addresses in the Service's status, new ones only over a slice that stands;
    returns whether that is a write for now."""
    wanted = [address for address in addresses if address != shapes.BY_DHCP]
    if not sliced:
        shown = statuses.ingress_ips(service)
        wanted = [address for address in wanted if address in shown]
    status = statuses.ingress_patch(wanted, service)
    return bool(status) and made.add(
        ingress_write(made, doc.owner, service, status, digest_of(wanted))
    )


def _slices(made: Plan, doc: OwnerDoc, lb: objects.LoadBalancer) -> bool:
    """Returns whether every slice stands as wanted.

    Where a family has several slices (backends with a port of their own, more than a thousand), one
    that loses its ready endpoints waits until those that get some show them: between two writes
    nothing would be ready, and the node behind the address exposed.
    """
    state = made.state
    standing = True
    wanted_slices = shapes.slices(lb, doc)
    names_wanted = {wanted["metadata"]["name"] for wanted in wanted_slices}
    shown = {name: _known(made, _slice_ref(doc, name)) for name in names_wanted}
    opening = shapes.opening(wanted_slices, shown)
    for wanted in wanted_slices:
        name = wanted["metadata"]["name"]
        known = shown[name]
        key = Key("endpointslices", doc.namespace, name)
        made.contested(key)
        if known is not None and not _ours(made, doc, known, conditions.RESOLVED):
            standing = False
        elif known is None or shapes.slice_differs(wanted, known):
            standing = False
            if wanted["addressType"] in opening and shapes.closes(wanted, known):
                made.pending = True
                continue
            uid = known.metadata.uid if known is not None else ""
            made.add(slice_write(made, key, doc.owner, "EndpointSlice", wanted, uid))
    for ref in state.slices_of(doc.uid):
        if ref.name not in names_wanted:
            known = state.known(ref)
            if known is not None and known.address_type in opening:
                made.pending = True
            else:
                _drop(made, doc, ref)
    return standing


def _slice_ref(doc: OwnerDoc, name: str) -> ObjectRef:
    return ObjectRef("endpointslices", doc.namespace, name)


def _drop(made: Plan, doc: OwnerDoc, ref: ObjectRef) -> None:
    """Delete a slice of ours that is not wanted any more."""
    known = made.state.known(ref)
    if known is None or known.metadata.deletion_timestamp is not None:
        return
    if names.SERVICELB_LABEL not in (known.metadata.labels or {}):
        return  # somebody's own slice that hangs on the load balancer
    uid = known.metadata.uid
    made.add(
        Write(
            key=Key(*ref),
            entity=made.entity,
            owner=doc.owner,
            target="EndpointSlice",
            verb="delete",
            body=None,
            digest=f"delete {uid}",
            uid=uid,
        )
    )


def _ours(made: Plan, doc: OwnerDoc, known: Any, about: str) -> bool:
    """Whether an object of our name may be written; says so where it may not."""
    standing = shapes.standing(doc, known)
    kind = type(known).__name__
    if standing == "foreign":
        text = (
            f"{kind} {doc.namespace}/{known.metadata.name} exists and does not belong to this "
            "load balancer; rename one of them"
        )
        made.problems.append(Problem(about, "NameConflict", text))
        return False
    if standing == "former" or known.metadata.deletion_timestamp is not None:
        text = f"the former {kind} {doc.namespace}/{known.metadata.name} is being removed"
        made.problems.append(Problem(about, "WaitingForRemoval", text))
        return False
    return True


def _known(made: Plan, ref: ObjectRef) -> Any:
    """The newest form of an object that we make; looks again when the watcher doesn't show it."""
    until = made.state.confirm(ref, made.now)
    if until is not None:
        made.wake(until)
    return made.state.known(ref)


def held(made: Plan, doc: OwnerDoc, *, soft: bool, new: bool) -> bool:
    """Whether to wait with the status: for echoes a moment, for a first word on backends longer.

    A load balancer that already tells something is never told to be unknown because the prober's
    word has not been read yet.
    """
    state = made.state
    since = state.holds.setdefault(made.entity, made.now)
    options = state.options
    unresolved = doc.plural == "loadbalancers" and doc.backends is None
    lb = state.shown.get(doc.owner.ref)
    cluster = isinstance(lb, objects.LoadBalancer) and lb.spec.workload_type == "cluster"
    if unresolved and not cluster:
        if not new:
            return True
        limit = options.undecided_s
    elif soft or (made.pending and not made.problems) or _echoes(made, doc):
        limit = options.echo_s
    else:
        return False
    until = since + timedelta(seconds=limit)
    if made.now >= until:
        return False
    made.wake(until)
    return True


def _echoes(made: Plan, doc: OwnerDoc) -> bool:
    """Whether the watcher has yet to show a write of ours to the Service."""
    if doc.plural != "loadbalancers":
        return False
    return made.state.awaited(ObjectRef("services", doc.namespace, doc.name))
