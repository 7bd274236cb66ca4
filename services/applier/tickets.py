"""What a Service needs that asked us for an address: ingress, conditions, finalizer, annotation;
and the finalizer of an egress Pod."""

from __future__ import annotations

from schema import names, objects
from services.applier import conditions, shapes, statuses
from services.applier.balancers import held
from services.applier.documents import OwnerDoc
from services.applier.plans import (
    Plan,
    digest_of,
    ingress_write,
    marks_of,
    merge_write,
    patch_body,
    status_write,
)
from services.applier.targets import Key


def service(made: Plan, doc: OwnerDoc) -> None:
    state = made.state
    known = state.known(doc.owner.ref)
    if known is None or known.metadata.uid != doc.uid:
        return
    if not doc.decided_on_address:
        return
    shown = state.shown.get(doc.owner.ref)
    asks = known.spec.type == "LoadBalancer" and known.spec.load_balancer_class in (
        "",
        names.POOL_CLASS,
        names.NRP_CLASS,
    )
    if doc.provider is not None:
        _finalizer(made, doc, known, doc.provider.finalizer)
    if known.metadata.deletion_timestamp is not None:
        return
    announcing = state.options.announcing
    ours = doc.provider is not None or announcing.ours
    addresses = doc.provider.addresses if doc.provider else shapes.wanted_addresses(doc)
    if not ours:
        _annotate(made, doc, known, announcing.annotations(addresses) if asks else {})
    if made.writes:
        return  # one at a time, as each moves the version that the next is thought out on
    if not asks:
        _withdraw(made, doc, known, ours=ours)
        return
    published = statuses.ingress_ips(shown) if isinstance(shown, objects.Service) else []
    made.contested(Key(*doc.owner.ref, "status"))
    told = addresses if ours else published
    parts = conditions.of_service(doc, told, made.problems)
    marks = marks_of(made, doc.marks, parts, known.status)
    patch = statuses.service_patch(addresses if ours else None, marks, known)
    if not patch.status:
        state.holds.pop(made.entity, None)
        return
    # While the provider catches up with a change there is nothing new to tell: it mostly has, soon.
    behind = (
        doc.provider is not None and not doc.provider.in_step and "loadBalancer" not in patch.status
    )
    if (patch.soft or behind) and held(made, doc, soft=True, new=False):
        return
    made.add(status_write(made, doc, known, patch.status, addresses, marks))


def pod(made: Plan, doc: OwnerDoc) -> None:
    """The finalizer that holds an egress Pod while the provider may still have its addresses."""
    known = made.state.known(doc.owner.ref)
    if known is not None and known.metadata.uid == doc.uid and doc.provider is not None:
        _finalizer(made, doc, known, doc.provider.finalizer)


def _withdraw(made: Plan, doc: OwnerDoc, known: objects.Service, *, ours: bool) -> None:
    """The Service does not ask any more: take back what we had written into its status."""
    patch = statuses.service_patch([] if ours and doc.noticed else None, {}, known)
    if patch.status:
        made.add(ingress_write(made, doc.owner, known, patch.status, digest_of(["withdrawn"])))


def _finalizer(
    made: Plan, doc: OwnerDoc, known: objects.Service | objects.Pod, stands: bool
) -> None:
    held = known.metadata.finalizers or []
    if stands == (names.NRP_FINALIZER in held):
        return
    if stands and known.metadata.deletion_timestamp is not None:
        return  # nothing can be added any more
    finalizers = [f for f in held if f != names.NRP_FINALIZER]
    if stands:
        finalizers.append(names.NRP_FINALIZER)
    body = patch_body(known, {"finalizers": finalizers or None})
    merge_write(made, doc, "finalizers", f"{type(known).__name__}/finalizers", body, [stands])


def _annotate(made: Plan, doc: OwnerDoc, known: objects.Service, wanted: dict[str, str]) -> None:
    """Tell the announcer, by annotation, which address a user's Service has."""
    notes = known.metadata.annotations or {}
    changes: dict[str, str | None] = {
        key: value for key, value in wanted.items() if notes.get(key) != value
    }
    if doc.noticed:
        keys = shapes.ANNOUNCER_KEYS[made.state.options.announcing.announcer]
        changes |= {key: None for key in keys if key in notes and key not in wanted}
    if changes:
        body = patch_body(known, {"annotations": changes})
        merge_write(made, doc, "", "Service", body, [wanted])
