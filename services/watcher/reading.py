"""From the bytes of a Kubernetes object to an observation: view, digest, or why it does not fit.

Pure. The digest is of the trimmed view without its resourceVersion, so what no service decides by
never becomes a fact. Views are lenient: a null stands for an absent field. An object whose identity
can't be read is refused with `Unreadable`: whoever sent it is not an API server we can follow.

`smaller` gives the forms in which a fact that is over the bus's limit is published instead. Only
what can be had elsewhere, or what nobody decides by, is ever left out, and the fact names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from hashlib import blake2b
from typing import Any, Final

import msgspec

from schema.events import SEEN, Event, encode
from schema.objects import (
    VIEWS,
    AnyObject,
    EndpointSlice,
    IPPool,
    LoadBalancer,
    Service,
    View,
    trim,
)
from schema.subjects import ObjectRef, fact_subject
from services.watcher.core import DIGEST_BYTES, Deletion, Listing, Sight, misfit_digest

EXCERPT: Final = 2000
_encode: Final = msgspec.json.Encoder().encode
_replace: Final = msgspec.structs.replace
_decoders: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    plural: msgspec.json.Decoder(view) for plural, view in VIEWS.items()
}


class _Metadata(msgspec.Struct, rename="camel"):
    name: str
    uid: str
    resource_version: str
    namespace: str = ""


class _Identified(msgspec.Struct):
    metadata: _Metadata


_identify: Final = msgspec.json.Decoder(_Identified).decode


class Unreadable(ValueError):
    """What came is no Kubernetes object."""


def sight(plural: str, raw: bytes | msgspec.Raw, at: datetime, listing: Listing | None) -> Sight:
    """What an ADDED or MODIFIED event, or an item of a list, shows."""
    try:
        view = trim(_decode(plural, raw))
    except msgspec.ValidationError as error:
        return _misfit(plural, raw, at, listing, str(error))
    except msgspec.DecodeError as error:
        raise Unreadable(f"{plural}: not JSON: {error}") from error
    metadata = view.metadata
    if not metadata.uid or not metadata.resource_version:
        raise Unreadable(f"{plural} {metadata.name!r}: no uid or no resourceVersion")
    ref = ObjectRef(plural, metadata.namespace, metadata.name)
    return Sight(
        _subject(ref), ref, metadata.uid, metadata.resource_version, digest(view), at, view,
        listing=listing,
    )  # fmt: skip


def deletion(plural: str, raw: bytes | msgspec.Raw, at: datetime) -> Deletion:
    """What a DELETED event says; the rest of the object does not matter any more."""
    metadata = _identity(plural, raw)
    ref = ObjectRef(plural, metadata.namespace, metadata.name)
    return Deletion(_subject(ref), ref, metadata.uid, metadata.resource_version, at)


def digest(view: AnyObject) -> bytes:
    metadata = _replace(view.metadata, resource_version="")
    return blake2b(
        _encode(_replace(view, metadata=metadata)), digest_size=DIGEST_BYTES
    ).digest()  # fmt: skip


def version_of(raw: bytes | msgspec.Raw) -> str:
    """The resourceVersion of a bookmark, whose object is an empty shell."""
    try:
        return str(msgspec.json.decode(raw, type=_Shell).metadata.resource_version)
    except msgspec.DecodeError as error:
        raise Unreadable(f"a bookmark without a resourceVersion: {error}") from error


class _ShellMetadata(msgspec.Struct, rename="camel"):
    resource_version: str


class _Shell(msgspec.Struct):
    metadata: _ShellMetadata


def _decode(plural: str, raw: bytes | msgspec.Raw) -> Any:
    try:
        return _decoders[plural].decode(raw)
    except msgspec.ValidationError:
        # Slow, and rare: a null where the view has no optional field.
        return msgspec.convert(_without_nulls(msgspec.json.decode(raw)), VIEWS[plural])


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value if item is not None]
    return value


def _misfit(
    plural: str,
    raw: bytes | msgspec.Raw,
    at: datetime,
    listing: Listing | None,
    problem: str,
) -> Sight:
    metadata = _identity(plural, raw)
    ref = ObjectRef(plural, metadata.namespace, metadata.name)
    return Sight(
        _subject(ref), ref, metadata.uid, metadata.resource_version, misfit_digest(problem), at,
        None, problem, bytes(raw)[:EXCERPT].decode("utf-8", "backslashreplace"), listing,
    )  # fmt: skip


def _identity(plural: str, raw: bytes | msgspec.Raw) -> _Metadata:
    try:
        return _identify(raw).metadata
    except msgspec.DecodeError as error:
        raise Unreadable(f"{plural}: an object without identity: {error}") from error


def _subject(ref: ObjectRef) -> str:
    try:
        return fact_subject(ref)
    except ValueError as error:
        raise Unreadable(f"{ref.plural}: {error}") from error


# --- facts over the limit of the bus ------------------------------------------------------------

# A step drops one thing and returns None when it is not there.
Step = tuple[str, Callable[[Any], View | None]]


def _drop(part: str, field: str) -> Callable[[Any], View | None]:
    def step(view: Any) -> View | None:
        inner = getattr(view, part)
        if inner is None or not getattr(inner, field):
            return None
        dropped: View = _replace(view, **{part: _replace(inner, **{field: None})})
        return dropped

    return step


def _first_addresses(view: EndpointSlice) -> View | None:
    """An endpoint's further addresses: the API says that only the first is to be used."""
    endpoints = view.endpoints or []
    if all(len(e.addresses or ()) <= 1 for e in endpoints):
        return None
    return _replace(
        view, endpoints=[_replace(e, addresses=(e.addresses or [])[:1] or None) for e in endpoints]
    )


# In the order in which things are given up. Nothing that decides is on these lists: the pool's maps
# repeat what each load balancer's own status says.
_STEPS: Final[dict[type, tuple[Step, ...]]] = {
    IPPool: (
        ("status.allocatedHistory", _drop("status", "allocated_history")),
        ("status.conditions", _drop("status", "conditions")),
        ("status.allocated", _drop("status", "allocated")),
    ),
    LoadBalancer: (
        ("status.conditions", _drop("status", "conditions")),
        ("status.backendServers", _drop("status", "backend_servers")),
    ),
    Service: (("status.conditions", _drop("status", "conditions")),),
    EndpointSlice: (("endpoints[].addresses[1:]", _first_addresses),),
}


def smaller(event: Event) -> Iterator[Event]:
    """The event with one thing less at a time; nothing when there is no smaller form."""
    view = getattr(event, "object", None)
    omitted: list[str] = []
    for name, step in _STEPS.get(type(view), ()):
        reduced = step(view)
        if reduced is not None:
            view = reduced
            omitted.append(name)
            yield _replace(event, object=view, omitted=list(omitted))


def fitting(seen: Sight, limit: int) -> tuple[bytes, list[str]] | None:
    """The largest form of a fact that fits, encoded, and what it left out; None without one."""
    for form in smaller(SEEN[seen.ref.plural](at=seen.at, object=seen.view)):
        data = encode(form)
        if len(data) <= limit:
            return data, form.omitted  # type: ignore[attr-defined]
    return None
