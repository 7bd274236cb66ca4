"""`nrp ...`: what the provider holds and should hold, from the rows of nrp_sync and a reading."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from services.cli import ledgers, printing, session
from services.nrp_sync import effects, looking
from services.nrp_sync.connecting import connect
from services.nrp_sync.main import policy_of
from services.nrp_sync.provider import ProviderError
from services.nrp_sync.state import Snapshot

READ_S = 120.0
SHOWN = 50


def status(as_json: bool) -> int:
    """Whether the provider is in step, what is pending, parked, quarantined or unknown."""
    found = ledgers.query(looking.status)
    if as_json:
        printing.emit_json(found)
        return 0 if found.in_step else 1
    services = ", ".join(f"{count} {phase}" for phase, count in sorted(found.services.items()))
    requests = ", ".join(f"{n} {state}" for state, n in sorted(found.requests_last_hour.items()))
    rows: list[list[Any]] = [
        ["in step", "yes" if found.in_step else "NO"],
        ["services", services or "none"],
        ["backends", f"{found.addresses} addresses at {found.locations} locations"],
        ["unknown", f"{found.unknown} addresses of an unanswered request"],
        ["requests", f"{found.requests_open} open; in the last hour: {requests or 'none'}"],
        ["pods held", found.pods_held],
        ["read back", found.read_at or "not yet"],
        ["drift found", found.drift_found],
    ]
    if found.gate_until:
        rows.append(["asked to wait", f"until {printing.moment(found.gate_until)}"])
    printing.table(["", "PROVIDER"], rows)
    _list("not in step", found.not_in_step)
    _list("parked", [_trouble(one) for one in found.parked])
    _list("quarantined", [_trouble(one) for one in found.quarantined])
    return 0 if found.in_step else 1


def diff(as_json: bool) -> int:
    """Read the provider completely and say what differs; exit 1 when something does."""
    settings = session.settings().nrp
    try:
        snapshot = asyncio.run(_read(settings))
    except (ProviderError, TimeoutError) as error:
        return printing.fail(f"can't read the provider: {error or 'no answer in time'}")

    async def compare(conn: AsyncConnection) -> looking.Comparison:
        return await looking.compare(conn, policy_of(settings), snapshot)

    found = ledgers.query(compare)
    differs = bool(found.pending or found.drift or found.requests)
    if as_json:
        printing.emit_json(found)
        return 1 if differs else 0
    if not differs:
        print("no difference: the provider holds exactly what it should")
        return 0
    if found.pending:
        print("not yet as wanted")
        printing.table(
            ["ADDRESS", "AT", "HELD", "WANTED"],
            [
                [d.address, d.location, ", ".join(d.held), ", ".join(d.wanted)]
                for d in found.pending[:SHOWN]
            ],
            indent="  ",
        )
    _list("otherwise than believed (drift)", found.drift)
    _list("requests that would be sent", found.requests)
    return 1


async def _read(settings: Any) -> Snapshot:
    provider = await connect(settings)
    try:
        async with asyncio.timeout(READ_S):
            return await effects.read(provider)
    finally:
        await provider.close()


def explain(name: str, as_json: bool) -> int:
    """One service or egress gateway: what is wanted, what is there, and the requests about it."""
    found = ledgers.query(lambda conn: looking.explain(conn, name))
    if found is None:
        return printing.fail(
            f"{name!r} is not known: write NAMESPACE/NAME, a uid or an egress name"
        )
    if as_json:
        printing.emit_json(found)
        return 0
    image = found.image if isinstance(found.image, dict) else {}
    printing.table(
        ["FIELD", "VALUE"],
        [
            ["service", f"{found.namespace}/{found.name}" if found.name else found.identity],
            ["kind", found.kind],
            ["identity", found.identity],
            ["phase", found.phase],
            ["public", ", ".join(found.public_addresses.values())],
            ["at the provider", ", ".join(f"{k} {v}" for k, v in sorted(found.has.items()))],
            ["told", f"{image.get('reason', '')} {image.get('message', '')}".strip()],
            ["cause", found.cause],
            ["wanted", msgspec.json.encode(found.wanted).decode() if found.wanted else ""],
        ],
    )
    _list("backends", found.backends)
    _list("trouble", [_trouble(one) for one in found.trouble])
    if found.history:
        print("\nrequests, newest first")
        printing.table(
            ["SENT (UTC)", "REQUEST", "STATE", "MS", "RESULT"],
            [
                [
                    printing.moment(made.sent_at),
                    f"{made.verb} #{made.number}",
                    made.state,
                    "" if made.duration is None else f"{made.duration * 1000:.0f}",
                    f"{made.code} {made.message}".strip() or made.provider_request,
                ]
                for made in found.history
            ],
            indent="  ",
        )
    return 0


def repair(dry_run: bool, as_json: bool) -> int:
    """Ask nrp_sync to read the provider back now and repair what differs."""
    if dry_run:
        return diff(as_json)
    ledgers.command(looking.ask_for_repair)
    print("asked: nrp_sync reads the provider and repairs what differs; see `lbledger nrp status`")
    return 0


def _list(title: str, lines: list[str]) -> None:
    if not lines:
        return
    print(f"\n{title} ({len(lines)})")
    for line in lines[:SHOWN]:
        print(f"  {line}")
    if len(lines) > SHOWN:
        print(f"  and {len(lines) - SHOWN} more (--json shows all)")


def _trouble(one: looking.Trouble) -> str:
    until = f", again at {printing.moment(one.until)}" if one.until else ""
    return f"{one.what}: {one.why}{until}"
