"""The provider's diff: one changed pod among many, and all of it at once. No I/O, no requests."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from bench.harness import Figure, Row, rss_mb
from services.nrp_sync import core
from services.nrp_sync.batches import Limits
from services.nrp_sync.diff import Provided
from services.nrp_sync.sources import Location, Member, Name, Reading
from services.nrp_sync.state import State

PER_SLICE = 100
SIZES = (10_000, 100_000, 1_000_000)


def pod_ip(number: int) -> str:
    return f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"


def node_ip(number: int) -> str:
    return f"172.16.{number >> 8}.{number & 255}"


def uid(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


def service_name(number: int) -> Name:
    return Name("bench", f"service-{number}")


# --- the diff alone -----------------------------------------------------------------------------


def loaded(pods: int, node_count: int, services: int, per_slice: int = PER_SLICE) -> Provided:
    """The wish for so many addresses, as it is read from the rows; nothing is compared yet."""
    provided = Provided()
    desired = provided.desired
    desired.loading = True
    for number in range(node_count):
        desired.put_node(f"node-{number}", Location(node_ip(number), None))
    for number in range(services):
        member = Member("inbound", uid(number), family=4, ready=True)
        desired.bind(service_name(number), uid(number), member)
    for number in range(pods // per_slice):
        name = Name("bench", f"slice-{number}")
        owner = number % services
        desired.put_slice(Reading(name, uid(number), {}, service_name(owner), uid(owner)))
        for pod in range(number * per_slice, number * per_slice + per_slice):
            desired.restore(name, pod_ip(pod), f"node-{pod % node_count}")
    desired.changed_rows.clear()
    return provided


def in_step(provided: Provided) -> None:
    """The rows say that the provider holds all of it."""
    places = list(provided.desired.at)
    rows = (
        (place, address, provided.desired.refs(place, address))
        for place in places
        for address in provided.desired.at[place]
    )
    provided.fill(rows, dict.fromkeys(places, True))


def changed_once(state: State, changes: list[Reading]) -> float:
    """Take the slices one after the other; seconds of the processor for all."""
    began = time.process_time()
    for reading in changes:
        core.put_slice(state, reading, now=1.0)
    return time.process_time() - began


def flips(state: State, count: int) -> Iterator[list[Reading]]:
    """Slices in which one pod leaves, then the same pods come back; some hundreds at a time."""
    slices = list(state.provided.desired.slices.values())
    randoms = random.Random(1)
    for _ in range(count // 1_000):
        chosen = [randoms.choice(slices) for _ in range(500)]
        whole = {s.name: dict(s.endpoints) for s in chosen}
        leave = []
        for name, endpoints in whole.items():
            rest = dict(endpoints)
            rest.pop(randoms.choice(list(rest)))
            held = state.provided.desired.slices[name]
            leave.append(Reading(name, held.uid, rest, held.service, held.service_uid))
        yield leave
        yield [r._replace(endpoints=whole[r.name]) for r in leave]


def pod_change(pods: int, count: int, per_slice: int) -> dict[str, float]:
    """Microseconds for one changed pod, and the memory of the process."""
    state = State()
    provided = state.provided = loaded(pods, max(10, pods // 250), max(10, pods // 500), per_slice)
    in_step(provided)
    gc.collect()
    gc.freeze()
    memory = rss_mb(os.getpid())
    took, made = [], 0
    for readings in flips(state, count):
        took.append(changed_once(state, readings) / len(readings) * 1e6)
        made += len(readings)
        provided.desired.changed_rows.clear()
        provided.dirty.clear()
    assert not provided.deviant
    assert len(provided.mapped) == max(10, pods // 500)
    took.sort()
    return {"us": took[len(took) // 2], "rss_mb": memory, "changes": made}


async def apart(call: str) -> Any:
    """A function of this module in a process of its own, for its memory."""
    program = "import msgspec; from bench import provider; " + (
        f"print(msgspec.json.encode(provider.{call}).decode())"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return msgspec.json.decode(out)


async def pod_changes(quick: bool) -> list[Figure]:
    sizes = SIZES[:-1] if quick else SIZES
    count = 10_000 if quick else 40_000
    found = [await apart(f"pod_change({size}, {count}, 1)") for size in sizes]
    figures = [
        Figure(
            f"pod_change.{size}",
            entry["us"],
            "us",
            100.0,
            3.0,
            "lower",
            "a slice with one pod, which goes and comes; processor time",
        )
        for size, entry in zip(sizes, found, strict=True)
    ]
    full = await apart(f"pod_change({sizes[-1]}, {count}, {PER_SLICE})")
    note = f"{sizes[-1]:,} pods, {PER_SLICE} to a slice: all of it is compared"
    ratio = found[-1]["us"] / found[0]["us"]
    limits = () if quick else (738.0, 250.0)
    return [
        *figures,
        Figure("pod_change.in_slice", full["us"], "us", 100.0, better="lower", note=note),
        Figure(
            "pod_change.flat", ratio, "x", better="lower", note=f"{sizes[-1]:,} to {sizes[0]:,}"
        ),
        Figure("pod_change.rss", full["rss_mb"], "MB", *limits, better="lower", note=note),
        Figure("pod_change.rss_single", found[-1]["rss_mb"], "MB", better="lower", note="one each"),
    ]


async def cold_diff(quick: bool) -> list[Figure]:
    """100,000 addresses on 1,000 nodes, 2,000 services, of which the provider holds nothing."""
    size, node_count, services = (10_000, 100, 200) if quick else (100_000, 1_000, 2_000)
    began = time.process_time()
    provided = loaded(size, node_count, services, 50)
    wish = time.process_time() - began
    gc.collect()
    began = time.process_time()
    provided.fill([], {})
    took = time.process_time() - began
    assert provided.differing() == size
    calls, began = 0, time.process_time()
    limits = Limits()
    while call := provided.next_batch(limits, removals=True, skip=lambda _: False, suspects={}):
        provided.begin(call)
        provided.acknowledge(call)
        calls += 1
    sent = time.process_time() - began
    note = f"{size:,} addresses, {node_count:,} nodes, {services:,} services"
    least = math.ceil(size / limits.addresses)
    return [
        Figure("cold_diff", took * 1e3, "ms", None, 300.0, "lower", note),
        Figure("cold_diff.wish", wish * 1e3, "ms", better="lower", note="the wish, from rows"),
        Figure("cold_diff.batches", sent * 1e3, "ms", better="lower", note="batched, acknowledged"),
        Figure("cold_diff.calls", calls / least, "x", None, 1.0, "lower", f"{calls} calls"),
    ]


ROWS = [
    Row("pod_change", pod_changes, repeats=3),
    Row("cold_diff", cold_diff),
]
