"""Output for people (80 columns, no colour when piped) and for machines (`--json`)."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

NARROW: Final = 24  # characters that a column of sentences needs to be readable
BELOW: Final = "    "


class Trouble(Exception):
    """What a command needs is not there, or does not answer; the text is for a person."""


def emit_json(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value, enc_hook=str)).decode())


def width() -> int:
    return shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else 80


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]], *, indent: str = "") -> None:
    """Left-aligned columns, as wide as they must be; the last one wraps, below its row where the
    others leave it no room."""
    if not rows:
        return
    cells = [[_text(cell) for cell in row] for row in rows]
    widths = [max(len(header), *(len(row[i]) for row in cells)) for i, header in enumerate(headers)]
    taken = len(indent) + sum(widths[:-1]) + 2 * (len(widths) - 1)
    beside = taken + min(widths[-1], NARROW) <= width()
    margin = " " * taken if beside else indent + BELOW
    for row in [list(headers), *cells]:
        head = "  ".join(text.ljust(w) for text, w in zip(row[:-1], widths[:-1], strict=True))
        lines = textwrap.wrap(row[-1], max(8, width() - len(margin)), break_on_hyphens=False)
        first = f"{head}  {lines.pop(0)}" if head and beside else head
        if first:
            print(f"{indent}{first}".rstrip())
        for line in lines:
            print(f"{margin}{line}".rstrip())


def _text(cell: Any) -> str:
    if cell is None or cell == "":
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, datetime):
        return moment(cell)
    return str(cell)


def moment(at: datetime) -> str:
    """A time in UTC down to the millisecond."""
    return at.astimezone(UTC).strftime("%H:%M:%S.%f")[:-3]


def fail(text: str, code: int = 1) -> int:
    print(f"lbledger: {text}", file=sys.stderr)
    return code
