"""`lb explain` and `events`: the log itself, told to a person."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from schema import events, subjects
from schema.subjects import ObjectRef
from services.allocator import queries
from services.cli import ledgers, printing, reading
from services.cli.reading import Entry
from services.kit.bus import Bus
from services.kit.config import ConfigError

_PATTERN: Final = re.compile(r"(([^\s.*>]+|\*)\.)*([^\s.*>]+|\*|>)")


def lb_explain(name: str, at: str, as_json: bool) -> int:
    """Fact -> decision -> write, in the order in which they were stored; up to a moment, if one is
    named."""
    ref = reading.owner_ref(name)
    moment = ledgers.parse_time(at) if at else None

    async def collect(bus: Bus) -> list[Entry]:
        facts = [subjects.fact_subject(ref)]
        if ref.plural == "loadbalancers":  # the Service and the slice of the same name
            for plural in ("services", "endpointslices"):
                facts.append(subjects.fact_subject(ref._replace(plural=plural)))
        found = await reading.history(bus, "KUBE", facts)
        found += await reading.history(bus, "LB", reading.decision_subjects(ref))
        return sorted(found, key=lambda entry: (entry.time_ns, entry.stream, entry.seq))

    chain = reading.run(collect)
    if moment is not None:
        chain = [entry for entry in chain if _at(entry) <= moment]
    if not any(entry.stream == "LB" or _about(entry, ref.plural) for entry in chain):
        return printing.fail(f"nothing is known of {'/'.join(ref[1:])}: no fact, no decision")
    held = _held(ref, moment) if moment is not None else []
    standing = _standing(ref) if moment is None else None
    if as_json:
        stood = {"standing": standing} if moment is None else {"at": moment, "held": held}
        printing.emit_json({**stood, "chain": [_plain(entry) for entry in chain]})
        return 0
    print(f"{ref.plural} {ref.namespace}/{ref.name}")
    if held:
        printing.table(["", "THEN"], [_holds(row) for row in held])
    _tell_standing(standing)
    printing.table(
        ["TIME (UTC)", "EVENT", "CAUSE", "WHAT"],
        [[_time(e), f"{e.stream}:{e.seq}", _cause(e), f"{e.type}: {tell(e)}"] for e in chain],
    )
    return 0


def _standing(ref: ObjectRef) -> queries.Explanation | None:
    """What the ledger says now; None where it can't be asked, the log has the history anyway."""
    try:
        return ledgers.query(lambda conn: queries.explain_owner(conn, *ref))
    except (printing.Trouble, ConfigError):
        return None


def _held(ref: ObjectRef, moment: datetime) -> list[queries.LeaseRow]:
    """What the ledger says of then; nothing where it can't be asked."""
    try:
        history = ledgers.query(lambda conn: queries.leases_of_owner(conn, *ref))
    except (printing.Trouble, ConfigError):
        return []
    return [row for row in history if row.since <= moment and not ledgers.over(row, moment)]


def _holds(row: queries.LeaseRow) -> list[str]:
    return ["holds", f"{row.address} of pool {row.pool}: {row.rule}"]


def _tell_standing(now: queries.Explanation | None) -> None:
    """Why it has the address that it has, or none: rule, pools considered, place in the line."""
    if now is None:
        print()
        return
    asked = ", ".join(f"{key}={_short(value)}" for key, value in now.request.items())
    rows = [["asks for", asked]]
    rows += [_holds(row) for row in now.leases]
    if now.reason:
        rows.append(["waits", f"{now.reason}: {now.message}"])
        rows += [[f"  {one.pool}", f"{one.reason} {one.message}"] for one in now.considered]
        rows.append(["ahead of it", str(now.ahead)])
    printing.table(["", "NOW"], rows)
    print()


def _short(value: object) -> str:
    return ", ".join(str(one) for one in value) if isinstance(value, list | tuple) else str(value)


def tail(follow: bool, pattern: str, count: int, as_json: bool) -> int:
    """The newest events of the log, and those to come."""
    streams = [pattern.split(".")[0].upper()] if pattern else ["KUBE", "LB"]
    if any(stream not in subjects.STREAMS for stream in streams):
        return printing.fail(f"subject {pattern!r}: must begin with kube. or lb.", 2)
    if pattern and not _PATTERN.fullmatch(pattern):
        return printing.fail(
            f"subject {pattern!r}: write names, * for any one and a final > for the rest, "
            "joined by dots",
            2,
        )
    if count < 0:
        return printing.fail(f"--last {count}: must be 0 (everything) or more", 2)

    async def show(bus: Bus) -> int:
        entries: list[Entry] = []
        ends: dict[str, int] = {}
        for stream in streams:
            end = (await bus.stream_state(stream)).last_seq
            found = await reading.history(bus, stream, [pattern] if pattern else [])
            ends[stream] = max(end, found[-1].seq if found else 0)
            entries += found
        entries.sort(key=lambda entry: (entry.time_ns, entry.stream, entry.seq))
        for entry in entries[-count:] if count else entries:
            _print(entry, as_json)
        if follow:
            await asyncio.gather(*(_follow(bus, s, pattern, ends[s], as_json) for s in streams))
        return 0

    try:
        return reading.run(show)
    except KeyboardInterrupt:
        return 0


async def _follow(bus: Bus, stream: str, pattern: str, end: int, as_json: bool) -> None:
    filters = (pattern,) if pattern else ()
    puller = bus.puller(stream, start_seq=end + 1, filters=filters)
    try:
        while True:
            for message in await puller.fetch(100, timeout=1.0):
                if message.seq > end and (entry := reading.entry(message)) is not None:
                    _print(entry, as_json)
    finally:
        await puller.close()


def _print(entry: Entry, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(_plain(entry)).decode(), flush=True)
        return
    print(f"{_time(entry)}  {entry.stream}:{entry.seq}  {entry.subject}", flush=True)
    print(f"              {entry.type}: {tell(entry)}", flush=True)


def _plain(entry: Entry) -> dict[str, Any]:
    return {
        "time": _at(entry),
        "stream": entry.stream,
        "sequence": entry.seq,
        "subject": entry.subject,
        "cause": entry.cause,
        "event": msgspec.to_builtins(entry.event),
    }


def _about(entry: Entry, plural: str) -> bool:
    ref = subjects.subject_ref(entry.subject)
    return ref is not None and ref.plural == plural


def _at(entry: Entry) -> datetime:
    return datetime.fromtimestamp(entry.time_ns / 1e9, UTC)


def _time(entry: Entry) -> str:
    return printing.moment(_at(entry))


def _cause(entry: Entry) -> str:
    sequence = entry.cause.rpartition(":")[2]
    return f"KUBE:{sequence}" if sequence else ""


def tell(entry: Entry) -> str:
    """One event in a sentence."""
    event = entry.event
    match event:
        case events.LeaseGranted():
            why = f" ({event.rule})" if event.rule else ""
            return f"{event.address} from pool {event.pool}{why}"
        case events.LeaseAdopted():
            return f"{event.address} of pool {event.pool}, found in {event.source}"
        case events.LeaseReleased():
            return f"{event.address} back to pool {event.pool}: {event.reason}"
        case events.LeaseRefused():
            others = [v for v in event.considered if v.message != event.message]
            considered = "".join(f"; {v.pool}: {v.message or v.reason}" for v in others)
            return f"{event.reason}: {event.message}{considered}"
        case events.LeasesRestated():
            between = f"{event.first or 'the first address'} to {event.before or 'the last'}"
            return f"{len(event.leases)} leases stand from {between}"
        case events.AddressDelegated():
            return f"{event.address}: the announcer obtains an address by DHCP"
        case events.PoolAccounted():
            return f"{event.available} of {event.total} free, {event.waiting} waiting"
        case events.BackendsResolved():
            names = ", ".join(f"{b.name}={b.address} {b.state}" for b in event.backends[:8])
            dummy = f"; dummy {event.dummy} stands in" if event.dummy else ""
            note = f"; {event.reason}: {event.message}" if event.reason else ""
            return f"{event.matched} match: {names or 'none'}{dummy}{note}"
        case events.HealthChanged():
            changes = ", ".join(f"{c.address} {c.state} {c.reason}".rstrip() for c in event.changes)
            dummy = f"; dummy {event.dummy} stands in" if event.dummy else ""
            return f"{changes}; {event.healthy} of {event.total} healthy{dummy}"
        case events.ProviderStateChanged():
            addresses = ", ".join(event.addresses) or "no address"
            return f"{event.reason or 'state'}: {addresses}, {event.backends} backends"
        case events.ProviderOperationStarted():
            return f"{event.operation}, attempt {event.attempt}"
        case events.ProviderOperationSucceeded():
            return f"{event.operation} in {event.duration_ms:.0f} ms"
        case events.ProviderOperationFailed():
            return f"{event.operation}: {event.code}: {event.message}"
        case events.Applied():
            ready = "" if event.ready is None else f", Ready={event.ready}"
            note = f": {event.message}" if event.message else ""
            return f"{event.target} {event.outcome}{ready}{note}"
        case events.DeadLettered():
            return f"{event.service} could not take {event.stream}:{event.sequence}: {event.reason}"
        case events.ObjectGone():
            return f"{event.plural} {event.name} is {event.reason}"
        case events.ObjectUnfit():
            return f"{event.plural} {event.name}: {event.problem}"
        case events.SyncStarted():
            return f"list of {event.plural} begins"
        case events.SyncFinished():
            state = "not installed" if event.absent else f"{event.count} listed"
            return f"{event.plural}: {state}"
        case events.EpochStarted():
            return f"{event.epoch}: {event.reason}"
        case _:
            return _tell_seen(event)


def _tell_seen(event: Any) -> str:
    meta = event.object.metadata
    parts = [f"resourceVersion {meta.resource_version}"]
    if meta.deletion_timestamp:
        parts.append("being deleted")
    status = getattr(event.object, "status", None)
    address = getattr(status, "address", "")
    if address:
        parts.append(f"address {address}")
    balancer = getattr(status, "load_balancer", None)
    if balancer and balancer.ingress:
        parts.append("ingress " + ", ".join(i.ip or i.hostname for i in balancer.ingress))
    endpoints = getattr(event.object, "endpoints", None)
    if endpoints is not None:
        ready = sum(e.conditions.ready is not False for e in endpoints)
        parts.append(f"{ready} of {len(endpoints)} endpoints ready")
    for condition in getattr(status, "conditions", None) or []:
        if condition.type == "Ready":
            reason = condition.reason or condition.message
            parts.append(f"Ready={condition.status} {reason}".rstrip())
    return ", ".join(parts)
