"""The collector of cycles, told what will live for long.

A service holds up to millions of objects that all stay, and makes a few dozen for each event. By
default Python would look through the young ones every 700 allocations and through all of them again
and again; both would cost more than the events do.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def tune() -> None:
    """For a process that runs a service. A look at the middle generation stays below 10 ms."""
    gc.set_threshold(10_000, 10, 50)


@contextmanager
def importing() -> Iterator[None]:
    """While modules come in, all of which stay: looking for cycles takes a fifth of that time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def loading() -> Iterator[None]:
    """While state is read: do not collect, and afterwards look at none of it again.

    Loading again drops what was loaded before, which may hang together in cycles.
    """
    again = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    if again:
        gc.collect()
    gc.freeze()
