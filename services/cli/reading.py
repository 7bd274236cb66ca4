"""Reading the event log for the commands that look: last facts, histories, the tail."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from schema import events, subjects
from schema.subjects import ObjectRef
from services.cli import session
from services.cli.printing import Trouble
from services.kit.bus import Bus, BusError, Message, StreamMissing, Unavailable
from services.kit.config import ConfigError, public_url

T = TypeVar("T")
CONNECT_S = 5.0
QUIET_S = 10.0  # a stream that says nothing for so long, not even that it is at its end
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
DECISION_BRANCHES = ("lb.lease", "lb.backends", "lb.health", "lb.provider", "lb.applied")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One event with its place in the log."""

    stream: str
    seq: int
    subject: str
    time_ns: int
    type: str
    cause: str
    event: events.AnyEvent


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[Bus]:
    """A connection for one command; Trouble says in one line why there is none."""
    nats = session.settings().nats
    try:
        async with asyncio.timeout(CONNECT_S):
            bus = await Bus.connect(
                nats.url,
                name="lbledger-cli",
                user=nats.user or None,
                password=nats.password.reveal() or None,
                token=nats.token.reveal() or None,
                creds=Path(nats.credentials) if nats.credentials else None,
            )
    except (TimeoutError, BusError) as error:
        raise Trouble(
            f"no NATS at {public_url(nats.url)} within {CONNECT_S:.0f} s: is `lbledger up` "
            f"running, or LBLEDGER_NATS_URL right?"
        ) from error
    try:
        yield bus
    finally:
        await bus.close()


def run(job: Callable[[Bus], Coroutine[Any, Any, T]]) -> T:
    async def main() -> T:
        async with connected() as bus:
            return await job(bus)

    return asyncio.run(main())


def entry(message: Message) -> Entry | None:
    """Decode, or None for what this version can't read."""
    headers = message.headers
    try:
        event = events.decode(message.data, headers.get(subjects.HEADER_TYPE))
    except (ValueError, msgspec.MsgspecError):
        return None
    return Entry(
        stream=message.stream,
        seq=message.seq,
        subject=message.subject,
        time_ns=message.time_ns,
        type=events.tag_of(event).partition(".")[0],
        cause=headers.get(subjects.HEADER_CAUSE, ""),
        event=event,
    )


async def last(bus: Bus, stream: str, pattern: str) -> list[Entry]:
    """The last event of every subject that fits."""
    found: list[Entry] = []
    try:
        async for message in bus.last_per_subject(stream, pattern):
            if (one := entry(message)) is not None:
                found.append(one)
    except StreamMissing:
        return []
    return found


async def history(bus: Bus, stream: str, patterns: Iterable[str]) -> list[Entry]:
    """Every stored event of some subjects, oldest first."""
    try:
        state = await bus.stream_state(stream)
    except StreamMissing:
        return []
    found: list[Entry] = []
    if not state.messages:
        return found
    puller = bus.puller(stream, start_seq=max(1, state.first_seq), filters=tuple(patterns))
    quiet_since = time.monotonic()
    try:
        while True:
            messages = await puller.fetch(1000, timeout=0.5)
            if messages:
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since > QUIET_S:
                raise Unavailable(f"stream {stream} does not answer")
            for message in messages:
                if (one := entry(message)) is not None:
                    found.append(one)
            if puller.lag == 0:
                return found
    finally:
        await puller.close()


def owner_ref(name: str) -> ObjectRef:
    """`NAME`, `NAMESPACE/NAME` or `PLURAL/NAMESPACE/NAME`; without plural a load balancer."""
    parts = name.split("/")
    if len(parts) == 1:
        parts = ["default", *parts]
    if len(parts) == 2:
        parts = ["loadbalancers", *parts]
    plural, *rest = parts
    plural = {"lb": "loadbalancers", "svc": "services", "service": "services"}.get(plural, plural)
    if (
        len(rest) != 2
        or not all(_NAME.fullmatch(part) for part in rest)
        or plural not in ("loadbalancers", "services")
    ):
        raise ConfigError(
            f"{name!r} is no load balancer: write NAMESPACE/NAME, or services/NAMESPACE/NAME"
        )
    return ObjectRef(plural, *rest)


def decision_subjects(ref: ObjectRef) -> tuple[str, ...]:
    return tuple(subjects.object_subject(branch, ref) for branch in DECISION_BRANCHES)
