"""From decisions on the bus to documents: what each kind of decision changes in them.

Pure, and in stream order. Folding into a document tells whether the decision says anything new: one
that does not changes nothing.
"""

from __future__ import annotations

from typing import Final

import msgspec

from schema import events
from services.applier.documents import (
    Answer,
    Backends,
    Bookings,
    ImportDoc,
    Lease,
    OwnerDoc,
    PoolDoc,
    Provider,
    Refusal,
    Said,
)

TELL_LIMIT: Final = 20  # things to tell about one object, at most
EARLY_LIMIT: Final = 64  # verdicts kept for an image that they overtook


def fold(doc: OwnerDoc, event: events.Decision) -> bool:
    """Take one decision about the owner; returns whether it says anything new."""
    match event:
        case events.LeaseGranted() | events.LeaseAdopted():
            return _granted(doc, event)
        case events.LeaseReleased():
            kept = [lease for lease in doc.leases if lease.lease != event.lease]
            changed = len(kept) != len(doc.leases)
            doc.leases = kept
            return changed
        case events.LeaseRefused():
            refusal = Refusal(event.reason, event.message, event.pool, event.kept)
            changed = refusal != doc.refusal or bool(doc.delegated)
            doc.refusal, doc.delegated = refusal, ""
            return changed
        case events.AddressDelegated():
            changed = doc.delegated != event.address or doc.refusal is not None
            doc.delegated, doc.refusal = event.address, None
            return changed
        case events.AddressContested():
            return _told(doc, Said("AddressContested", event.message))
        case events.OwnerCondemned():
            doc.condemned = Said(event.reason, event.message, warning=False)
            return _told(doc, doc.condemned)
        case events.BackendsResolved():
            return _resolved(doc, event)
        case events.HealthChanged():
            return _verdicts(doc, event)
        case events.ProviderStateChanged():
            provider = Provider(
                event.finalizer,
                event.addresses,
                event.in_step,
                event.backends,
                event.reason,
                event.message,
            )
            return _provided(doc, provider)
    return False


def _granted(doc: OwnerDoc, event: events.LeaseGranted | events.LeaseAdopted) -> bool:
    lease = Lease(event.lease, event.address, event.pool, event.mask, event.gateway)
    changed = lease not in doc.leases or doc.refusal is not None or bool(doc.delegated)
    # A lease that is stated again keeps no older form of itself, nor of its address.
    doc.leases = [
        other
        for other in doc.leases
        if other.lease != lease.lease and other.address != lease.address
    ] + [lease]
    doc.refusal, doc.delegated = None, ""
    return changed


def _provided(doc: OwnerDoc, provider: Provider) -> bool:
    """What the provider holds, and what is wrong with the wish for it. A Service that keeps what it
    had stays Ready, so its condition would not tell."""
    before, doc.provider = doc.provider, provider
    told_by_condition = doc.plural == "services" and not provider.addresses
    if provider != before and provider.wrong and not told_by_condition:
        _told(doc, Said(event_reason(provider.reason), provider.message))
    return provider != before


def event_reason(reason: str) -> str:
    """How a Kubernetes Event calls what a condition calls `reason`."""
    return "ServiceGatewayConfigurationRejected" if reason == "Rejected" else reason


def _resolved(doc: OwnerDoc, event: events.BackendsResolved) -> bool:
    before = doc.backends
    doc.backends = Backends(
        event.revision,
        event.ports,
        event.backends,
        event.matched,
        event.families,
        event.dummy,
        event.dummy6,
        event.checked,
        event.held,
        event.reason,
        event.message,
    )
    for late in doc.early:
        if late.revision > doc.backends.revision:
            doc.backends = with_verdicts(doc.backends, late)
    doc.early = []
    if before is None:
        return True
    return msgspec.structs.replace(before, revision=0) != msgspec.structs.replace(
        doc.backends, revision=0
    )


def _verdicts(doc: OwnerDoc, event: events.HealthChanged) -> bool:
    before = doc.backends
    if before is None:
        doc.early = [*doc.early, event][-EARLY_LIMIT:]
        return False
    if event.revision <= before.revision:
        return False
    if event.revision > before.revision + 1:
        # An image is on its way on the other subject.
        doc.early = [*doc.early, event][-EARLY_LIMIT:]
    doc.backends = with_verdicts(before, event)
    return msgspec.structs.replace(doc.backends, revision=0) != msgspec.structs.replace(
        before, revision=0
    )


def with_verdicts(image: Backends, event: events.HealthChanged) -> Backends:
    """The image after some verdicts; those about backends that it does not hold say nothing."""
    changes = {(change.uid, change.address): change for change in event.changes}
    backends = []
    for backend in image.backends:
        change = changes.get((backend.uid, backend.address))
        backends.append(backend if change is None else backend.after(change))
    # The event's word on the dummy holds for the backends it knew. A slice must never be left
    # without a ready endpoint by a word that is ahead of its image, so the dummy then stays.
    ready = {":" in backend.address for backend in backends if backend.ready}
    dummy = event.dummy or ("" if False in ready else image.dummy)
    dummy6 = event.dummy6 or ("" if True in ready else image.dummy6)
    return msgspec.structs.replace(
        image,
        revision=event.revision,
        backends=backends,
        dummy=dummy,
        dummy6=dummy6,
        held=event.held,
    )


def _told(doc: OwnerDoc | PoolDoc, said: Said) -> bool:
    if said in doc.tell:
        return False
    doc.tell = [*doc.tell, said][-TELL_LIMIT:]
    return True


def fold_answer(doc: PoolDoc, event: events.ReleaseAnswered) -> bool:
    """Take the answer to a request for release."""
    reason = "AddressReleased" if event.released else "ReleaseRefused"
    said = Said(reason, event.message, warning=not event.released)
    doc.answer = Answer(event.request, said)
    _told(doc, said)
    return True


def import_of(event: events.PoolsImported) -> ImportDoc:
    return ImportDoc(
        event.namespace,
        event.name,
        event.uid,
        event.pools,
        [Said("InvalidPool", problem) for problem in event.problems[:TELL_LIMIT]],
    )


def fold_pool(doc: PoolDoc, event: events.PoolAccounted) -> bool:
    """Take an account of the pool; returns whether it says anything new."""
    fresh = PoolDoc(
        name=event.pool,
        uid=event.uid,
        total=event.total,
        available=event.available,
        waiting=event.waiting,
        last_allocated=event.last_allocated,
        ready=event.ready,
        reason=event.reason,
        message=event.message,
        accounted=True,
    )
    if fresh.uid != doc.uid:
        doc.marks, doc.noticed, doc.tell, doc.answer = {}, "", [], None
    fresh.marks, fresh.noticed = doc.marks, doc.noticed
    fresh.tell, fresh.answer = doc.tell, doc.answer
    if fresh == doc:
        return False
    for field in msgspec.structs.fields(PoolDoc):
        setattr(doc, field.name, getattr(fresh, field.name))
    return True


def fold_booking(books: dict[str, Bookings], event: events.Decision, limit: int) -> str:
    """Keep the pool's map in step with a lease event; returns an address that left the history."""
    if isinstance(event, events.LeaseGranted | events.LeaseAdopted):
        book = books.setdefault(event.pool, Bookings())
        holders = book.live.get(event.address, ())
        if event.owner.uid not in holders:
            book.live[event.address] = (*holders, event.owner.uid)
        book.history.pop(event.address, None)
    elif isinstance(event, events.LeaseReleased):
        book = books.setdefault(event.pool, Bookings())
        left = tuple(u for u in book.live.get(event.address, ()) if u != event.owner.uid)
        if left:
            book.live[event.address] = left
            return ""
        book.live.pop(event.address, None)
        book.history.pop(event.address, None)
        book.history[event.address] = f"{event.owner.namespace}/{event.owner.name}"
        if len(book.history) > limit:
            oldest = next(iter(book.history))
            del book.history[oldest]
            return oldest
    return ""
