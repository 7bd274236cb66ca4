"""Between the allocator's memory and text: requests, refusals and claims as JSON, COPY lines."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from schema import addresses, events
from services.allocator.core.model import (
    NO_TERMS,
    Claim,
    Lease,
    Owner,
    Refusal,
    Request,
    Slots,
)
from services.allocator.core.state import Closed, Granted

_refusal_decoder = msgspec.json.Decoder(Refusal)
_encoded: dict[Request, str] = {}
_ENCODED_LIMIT = 65_536


def request_text(request: Request) -> str:
    """Requests are shared by many owners: each is written as JSON once."""
    text = _encoded.get(request)
    if text is None:
        if len(_encoded) >= _ENCODED_LIMIT:
            _encoded.clear()
        plain = request._replace(addresses=tuple(map(addresses.text, request.addresses)))  # type: ignore[arg-type]
        text = _encoded[request] = msgspec.json.encode(tuple(plain)).decode()
    return text


def read_request(text: str) -> Request:
    fields = msgspec.json.decode(text)
    fields[_ADDRESSES] = [addresses.parse(address) for address in fields[_ADDRESSES]]
    return msgspec.convert(fields, Request)


_ADDRESSES = Request._fields.index("addresses")


def refusal_text(refusal: Refusal | None) -> str:
    return "" if refusal is None else msgspec.json.encode(tuple(refusal)).decode()


def read_refusal(text: str) -> Refusal | None:
    return _refusal_decoder.decode(text) if text else None


def claims_text(claims: Iterable[Claim]) -> str:
    plain = [[addresses.text(claim.address), claim.pool, claim.source] for claim in claims]
    return msgspec.json.encode(plain).decode() if plain else ""


def read_claims(text: str) -> tuple[Claim, ...]:
    if not text:
        return ()
    return tuple(
        Claim(addresses.parse(address), pool, source)
        for address, pool, source in msgspec.json.decode(text)
    )


def escape(text: str) -> str:
    """One field of a COPY line."""
    if "\\" in text or "\t" in text or "\n" in text or "\r" in text:
        text = text.replace("\\", "\\\\").replace("\t", "\\t")
        text = text.replace("\n", "\\n").replace("\r", "\\r")
    return text


LEASE_COLUMNS = (
    "id", "plural", "namespace", "name", "uid", "address", "pool", "during", "rule", "adopted",
    "sharing_key", "slots", "retiring", "cause", "release_cause", "release_reason",
)  # fmt: skip


def lease_line(lease: Lease, granted: Granted, ended: Closed | None) -> str:
    said, at, cause = granted
    owner = said.owner
    if isinstance(said, events.LeaseGranted):
        rule, adopted = said.rule, "f"
    else:
        rule, adopted = said.source, "t"
    begun = (
        f"{said.lease}\t{owner.plural}\t{owner.namespace}\t{owner.name}\t{owner.uid}\t"
        f'{said.address}\t{said.pool}\t["{at.isoformat()}",'
    )
    if ended is None and lease.terms is NO_TERMS:
        return f"{begun})\t{rule}\t{adopted}\t\t{ALL_SLOTS}\t\\N\t{cause}\t\t\n"
    until, end_cause, end_reason = "", "", ""
    if ended is not None:
        until, end_cause, end_reason = f'"{ended.at.isoformat()}"', ended.cause, ended.reason
    slots = slots_text(lease.slots) if lease.slots else ALL_SLOTS
    retiring = lease.retiring.isoformat() if lease.retiring else "\\N"
    return (
        f"{begun}{until})\t{rule}\t{adopted}\t{escape(lease.share)}\t{slots}\t{retiring}\t"
        f"{cause}\t{end_cause}\t{end_reason}\n"
    )


ALL_SLOTS = "{(,)}"


def slots_text(slots: Slots) -> str:
    """Ports as a multirange; none are all of them."""
    if not slots:
        return ALL_SLOTS
    return "{" + ",".join(f"[{first},{last + 1})" for first, last in slots) + "}"


def read_slots(text: str) -> Slots:
    return tuple((int(first), int(after) - 1) for first, after in _RANGES(text))


_RANGES = re.compile(r"\[(\d+),(\d+)\)").findall


OWNER_COLUMNS = (
    "plural", "uid", "namespace", "name", "epoch", "generation", "phase", "ticket", "request",
    "refusal", "claims", "created", "gone_at", "gone_how", "condemned",
)  # fmt: skip


def owner_line(owner: Owner) -> str:
    namespace, _, name = owner.key.partition("/")
    gone_at = owner.gone_at.isoformat() if owner.gone_at else "\\N"
    refusal = escape(refusal_text(owner.refusal)) if owner.refusal else ""
    claims = escape(claims_text(owner.claims)) if owner.claims else ""
    return (
        f"{owner.plural}\t{owner.uid}\t{namespace}\t{name}\t{owner.epoch}\t{owner.generation}\t"
        f"{owner.phase}\t{owner.ticket}\t{escape(request_text(owner.request))}\t{refusal}\t"
        f"{claims}\t{owner.created}\t{gone_at}\t{owner.gone_how}\t"
        f"{owner.condemned}\n"
    )
