"""Processes forked from a server that has imported what they run: a start costs no imports.

What they run is real in all else. That it also starts from nothing is for other tests to show.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any, Final

_IMPORTED: Final = [
    "tests.crashing",
    "tests.system.commands",
    *(f"services.cli.{name}" for name in ("doctor", "explain", "looking", "provider")),
    *(f"services.cli.{name}" for name in ("ledgers", "running", "simulating")),
    "services.kit.migrate",
]


def start(target: Callable[..., None], *args: Any) -> Any:
    """A process that runs a function of a module of tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    process = context.Process(target=target, args=args, daemon=True)
    process.start()
    return process
