"""Between rows and the state's own structs, without a database: what is written and read back."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from services.nrp_sync.batches import Key, LocationCall
from services.nrp_sync.operations import Operation
from services.nrp_sync.provider import LoadBalancer, NatGateway, PublicAddress, ServiceBatch
from services.nrp_sync.sources import Name, Source
from services.nrp_sync.state import Ended, Part, Quarantined, Release, Request, Trace, stamp
from services.nrp_sync.steps import Mark, Phase
from services.nrp_sync.wishes import InboundSpec, OutboundSpec


def operation_of(row: Any) -> Operation:
    return Operation(
        kind=row.kind,
        identity=row.identity,
        namespace=row.namespace,
        name=row.name,
        wanted=_spec(row.wanted),
        generation=row.generation,
        applied=_spec(row.applied),
        phase=Phase(row.phase),
        marks={name: Mark(mark) for name, mark in row.marks.items()},
        addresses=dict(row.addresses),
        recreate=_spec(row.recreate),
        orphan=row.orphan,
        retries=row.retries,
        retry_at=seconds(row.retry_at),
        parked=row.parked,
        error_code=row.error_code,
        error_message=row.error_message,
        cause=row.cause,
        created_at=seconds(row.created_at),
    )


def _spec(value: Any) -> InboundSpec | OutboundSpec | None:
    return None if value is None else msgspec.convert(value, InboundSpec | OutboundSpec)


def seconds(moment: datetime | None) -> float:
    return 0.0 if moment is None else moment.timestamp()


def moment(at: float) -> datetime | None:
    return stamp(at) if at else None


class _Stored(msgspec.Struct, kw_only=True):
    payload: msgspec.Raw
    number: int
    id: str
    lane: str
    verb: str
    target: str
    parts: tuple[Part, ...]
    sent_at: float
    attempt: int
    hash: str


_PAYLOADS: dict[str, Any] = {
    "inbound": ServiceBatch,
    "outbound": ServiceBatch,
    "locations": LocationCall,
    "resources": None,
    "read": None,
}


def decode_request(body: bytes) -> Request:
    """A request as it was written down before it was sent."""
    stored = msgspec.json.decode(body, type=_Stored)
    fields = {name: getattr(stored, name) for name in stored.__struct_fields__}
    kind = _PAYLOADS[stored.lane]
    if kind is None and stored.verb == "put_public_ip":
        kind = PublicAddress
    elif kind is None and stored.verb == "put_balancer":
        outbound = stored.parts[0].kind == "outbound"
        kind = NatGateway if outbound else LoadBalancer
    fields["payload"] = None if kind is None else msgspec.json.decode(stored.payload, type=kind)
    return Request(**fields)


def services_in(request: Request) -> list[str]:
    """Every service that a request concerns, for who asks about one."""
    names = {part.identity for part in request.parts}
    if isinstance(request.payload, LocationCall):
        for entry in request.payload.batch.locations:
            for item in entry.addresses:
                names.update(item.services)
    return sorted(names)


def size_of(request: Request) -> int:
    if isinstance(request.payload, LocationCall):
        return request.payload.size()
    return len(request.parts)


def operation_row(op: Operation) -> dict[str, Any]:
    return {
        "kind": op.kind,
        "identity": op.identity,
        "namespace": op.namespace,
        "name": op.name,
        "phase": str(op.phase),
        "generation": op.generation,
        "wanted": msgspec.to_builtins(op.wanted),
        "applied": msgspec.to_builtins(op.applied),
        "recreate": msgspec.to_builtins(op.recreate),
        "marks": {name: str(mark) for name, mark in op.marks.items()},
        "addresses": op.addresses,
        "orphan": op.orphan,
        "retries": op.retries,
        "retry_at": moment(op.retry_at),
        "parked": op.parked,
        "error_code": op.error_code,
        "error_message": op.error_message,
        "cause": op.cause,
        "created_at": stamp(op.created_at),
    }


def request_row(request: Request) -> dict[str, Any]:
    """As it is written before it is sent."""
    return {
        "number": request.number,
        "id": request.id,
        "lane": request.lane,
        "verb": request.verb,
        "target": request.target,
        "services": services_in(request),
        "size": size_of(request),
        "hash": request.hash,
        "body": msgspec.json.encode(request),
        "attempt": request.attempt,
        "state": "sent",
        "sent_at": stamp(request.sent_at),
    }


def ended_row(number: int, ended: Ended) -> dict[str, Any]:
    """Parameters of the update that ends a request's row."""
    return {
        "n": number,
        "s": ended.state,
        "f": stamp(ended.at),
        "d": ended.duration,
        "p": ended.provider_request,
        "c": ended.code,
        "m": ended.message[:2000],
    }


def slice_row(source: Source) -> dict[str, Any]:
    return {
        "namespace": source.name.namespace,
        "name": source.name.name,
        "uid": source.uid,
        "epoch": source.epoch,
        "seq": source.seq,
        "service": source.service.name if source.service else "",
        "service_uid": source.service_uid,
        "left_out": list(source.left_out),
    }


def quarantine_row(key: Key, kept: Quarantined) -> dict[str, Any]:
    return {
        **key._asdict(),
        "wish": list(kept.wish),
        "code": kept.code,
        "message": kept.message,
        "since": stamp(kept.since),
        "retry_at": stamp(kept.retry_at),
        "attempts": kept.attempts,
    }


def quarantined_of(row: Any) -> Quarantined:
    return Quarantined(
        wish=tuple(row.wish),
        code=row.code,
        message=row.message,
        since=row.since.timestamp(),
        retry_at=row.retry_at.timestamp(),
        attempts=row.attempts,
    )


def release_row(held: Release) -> dict[str, Any]:
    return {
        "uid": held.uid,
        "namespace": held.name.namespace,
        "name": held.name.name,
        "identity": held.identity,
        "traces": sorted(held.traces),
        "leaving": held.leaving,
        "last": held.last,
    }


def release_of(row: Any) -> Release:
    return Release(
        name=Name(row.namespace, row.name),
        uid=row.uid,
        traces={Trace(*pair) for pair in row.traces},
        leaving=row.leaving,
        identity=row.identity,
        last=row.last,
    )
