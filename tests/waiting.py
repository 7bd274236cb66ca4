"""Waiting for a condition with a deadline: what tests do in place of sleeping and hoping."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

T = TypeVar("T")


@overload
async def eventually(
    condition: Callable[[], Awaitable[T]],
    timeout: float = ...,
    *,
    interval: float = ...,
    message: str = ...,
) -> T: ...


@overload
async def eventually(
    condition: Callable[[], T], timeout: float = ..., *, interval: float = ..., message: str = ...
) -> T: ...


async def eventually(
    condition: Callable[[], object],
    timeout: float = 10.0,
    *,
    interval: float = 0.02,
    message: str = "",
) -> object:
    """The first true value of the condition; AssertionError with its last value after the time.

    A condition that raises AssertionError counts as not yet true, so it may assert details.
    """
    deadline = time.monotonic() + timeout
    last: object = None
    while True:
        try:
            value = condition()
            found: object = await value if inspect.isawaitable(value) else value
            if found:
                return found
            last = found
        except AssertionError as error:
            last = error
        if time.monotonic() >= deadline:
            what = message or getattr(condition, "__name__", "condition")
            raise AssertionError(f"{what}: not true within {timeout:g} s; last value: {last!r}")
        await asyncio.sleep(interval)
