"""Output for people (80 columns, no colour when piped) and for machines (`--json`)."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec


def emit_json(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value, enc_hook=str)).decode())


def width() -> int:
    return shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else 80


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]], *, indent: str = "") -> None:
    """Left-aligned columns; the last one wraps, the others are as wide as they must be."""
    if not rows:
        return
    cells = [[_text(cell) for cell in row] for row in rows]
    widths = [max(len(header), *(len(row[i]) for row in cells)) for i, header in enumerate(headers)]
    room = max(24, width() - len(indent) - sum(widths[:-1]) - 2 * (len(widths) - 1))
    for row in [list(headers), *cells]:
        head = "  ".join(text.ljust(w) for text, w in zip(row[:-1], widths[:-1], strict=True))
        lines = textwrap.wrap(row[-1], room, break_on_hyphens=False) or [""]
        first = f"{indent}{head}  {lines[0]}" if head else f"{indent}{lines[0]}"
        print(first.rstrip())
        for line in lines[1:]:
            print(f"{indent}{' ' * len(head)}  {line}")


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
