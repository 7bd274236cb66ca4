"""`pool simulate`: what an edited pool would do, by the decisions that would be taken. Nothing is
changed."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import yaml
from sqlalchemy.ext.asyncio import AsyncConnection

from schema import objects
from services.allocator import queries
from services.allocator.main import rules_of
from services.cli import ledgers, printing, session
from services.kit.config import ConfigError


def simulate(file: str, as_json: bool) -> int:
    """Exit 1 when somebody would be stranded or the pool could not be used."""
    settings = session.settings()
    pools = read_pools(file)

    async def run(conn: AsyncConnection) -> list[queries.Simulation]:
        return [await queries.simulate(conn, pool, rules_of(settings)) for pool in pools]

    found = ledgers.query(run)
    if as_json:
        printing.emit_json(found)
    else:
        for one in found:
            _show(one)
    return 1 if any(one.problem or one.stranded for one in found) else 0


def read_pools(file: str) -> list[objects.IPPool]:
    """The IPPools of a YAML or JSON file, `-` for standard input; raises ConfigError."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
        documents = [document for document in yaml.safe_load_all(text) if document]
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not YAML: {error}") from error
    pools = []
    for document in documents:
        if not isinstance(document, dict) or document.get("kind") != "IPPool":
            kind = document.get("kind") if isinstance(document, dict) else type(document).__name__
            raise ConfigError(f"{file} holds a {kind}: only IPPool objects can be simulated")
        try:
            pools.append(msgspec.convert(document, objects.IPPool))
        except msgspec.ValidationError as error:
            raise ConfigError(f"{file}: not an IPPool: {error}") from error
    if not pools:
        raise ConfigError(f"{file} holds no IPPool")
    return pools


def _show(one: queries.Simulation) -> None:
    if one.problem:
        print(f"pool {one.pool}: can't be used: {one.problem}")
        return
    print(f"pool {one.pool}: {one.available} of {one.total} would be free; nobody moves")
    for title, owners in (
        ("would be outside and keep the address", one.stranded),
        ("would get an address", one.woken),
        ("would still wait", one.waiting),
    ):
        if owners:
            print(f"\n{title} ({len(owners)})")
            printing.table(
                ["OWNER", "ADDRESS" if title != "would still wait" else "REASON"],
                [[owner, what] for owner, what in owners.items()],
                indent="  ",
            )
