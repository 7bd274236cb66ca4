"""The provider's diff: one changed pod among many, all of it at once, and the requests it takes.

No I/O: the core of nrp_sync with a provider in memory. Where requests take time, the clock is a
simulated one (50 ms for each request), so what is counted does not hang on this machine's speed.
Bytes are those of the bodies that Azure would be sent.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from bench.harness import Figure, Row, rss_mb
from schema import objects
from schema.names import NRP_CLASS, NRP_FINALIZER
from services.nrp_sync import core, effects, egress, images, nodes, outcomes, planning
from services.nrp_sync.azure_wire import (
    Ids,
    load_balancer_body,
    locations_body,
    public_ip_body,
    services_body,
)
from services.nrp_sync.diff import Limits, LocationCall, Provided
from services.nrp_sync.memory import MemoryProvider
from services.nrp_sync.provider import LoadBalancer, ProviderSettings, PublicAddress, ServiceBatch
from services.nrp_sync.sources import Location, Member, Name, Reading
from services.nrp_sync.state import SOURCES, Outcome, Policy, Request, State

IDS = Ids(
    ProviderSettings(
        subscription_id="00000000-0000-4000-8000-000000000000",
        resource_group="group",
        region="westeurope",
        service_gateway="gateway",
        vnet="network",
    )
)
TOOK = 0.05
"""Seconds that a request takes on the simulated clock."""
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


# --- with requests ------------------------------------------------------------------------------


class Cloud:
    """The core and a provider in memory, on a simulated clock."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.state = State(policy or Policy(), "bench")
        self.provider = MemoryProvider()
        self.now = 1_000.0
        self.calls: Counter[str] = Counter()
        self.bytes = 0
        self._ends: list[tuple[float, int, Outcome]] = []
        for plural in SOURCES:
            core.finished(self.state, plural)

    def forget_counts(self) -> None:
        self.calls.clear()
        self.bytes = 0

    @property
    def location_calls(self) -> int:
        return self.calls["update_address_locations"]

    def nodes(self, count: int) -> None:
        for number in range(count):
            address = objects.NodeAddress(type="InternalIP", address=node_ip(number))
            meta = objects.ObjectMeta(name=f"node-{number}", uid=f"node-{number}")
            view = objects.Node(metadata=meta, status=objects.NodeStatus(addresses=[address]))
            nodes.see_node(self.state, view, now=self.now)

    def service(self, number: int) -> None:
        name = service_name(number)
        meta = objects.ObjectMeta(
            name=name.name,
            namespace=name.namespace,
            uid=uid(number),
            generation=1,
            finalizers=[NRP_FINALIZER],
        )
        spec = objects.ServiceSpec(
            type="LoadBalancer",
            load_balancer_class=NRP_CLASS,
            ip_families=["IPv4"],
            ports=[objects.ServicePort(port=80, target_port=8080)],
        )
        view = objects.Service(metadata=meta, spec=spec)
        core.see_service(self.state, view, cause="", now=self.now)

    def slice(self, number: int, service: int, endpoints: dict[str, str]) -> None:
        name = Name("bench", f"slice-{number}")
        reading = Reading(name, "", endpoints, service_name(service))
        core.put_slice(self.state, reading, now=self.now)

    def commit(self) -> None:
        """The end of a transaction, without its rows; then the requests leave."""
        state = self.state
        egress.release(state)
        images.tell_all(state, self.now)
        state.said.clear()
        state.notes.clear()
        for dirty in (state.dirty_ops, state.dirty_told, state.ended, state.provided.dirty):
            dirty.clear()
        state.provided.desired.changed_rows.clear()
        state.provided.dirty_locations.clear()

    async def until(self, end: float) -> None:
        """Whatever is due before `end`."""
        while True:
            planning.plan(self.state, self.now)
            self.commit()
            outgoing, self.state.outgoing = self.state.outgoing, []
            for request in outgoing:
                await self._send(request)
            due = planning.next_due(self.state, self.now)
            moment = min(due, self._ends[0][0] if self._ends else due)
            if moment > end:
                self.now = max(self.now, end)
                return
            self.now = max(self.now, moment)
            while self._ends and self._ends[0][0] <= self.now:
                _, number, outcome = heapq.heappop(self._ends)
                outcomes.finish(self.state, number, outcome, self.now)

    async def _send(self, request: Request) -> None:
        self.calls[request.verb] += 1
        self.bytes += len(body_of(request))
        outcome = await effects.perform(self.provider, request)
        heapq.heappush(self._ends, (self.now + TOOK, request.number, outcome))

    async def settle(self) -> float:
        """Until all is in step; the simulated time at which it was."""
        while True:
            at = self.now
            busy = bool(self._ends or self.state.active or self.state.provided.differing())
            if not busy:
                return at
            await self.until(self.now + TOOK)

    @property
    def held(self) -> int:
        return sum(map(len, self.provider.locations.values()))


def body_of(request: Request) -> bytes:
    match request.payload:
        case LocationCall() as call:
            return locations_body(call.batch)
        case ServiceBatch() as batch:
            return services_body(batch, IDS)
        case PublicAddress() as address:
            return msgspec.json.encode(public_ip_body(address, IDS))
        case LoadBalancer() as balancer:
            return msgspec.json.encode(load_balancer_body(balancer, IDS))
    return b""


def spread_over(pods: range, node_count: int) -> dict[str, str]:
    return {pod_ip(pod): f"node-{pod % node_count}" for pod in pods}


async def filled(size: int, node_count: int, services: int) -> Cloud:
    """An empty provider that came to hold everything; its counts are those of that."""
    cloud = Cloud()
    await cloud.settle()
    each = size // services
    cloud.nodes(node_count)
    for number in range(services):
        cloud.service(number)
        pods = range(number * each, number * each + each)
        cloud.slice(number, number, spread_over(pods, node_count))
    await cloud.settle()
    assert cloud.held == size
    return cloud


async def resync(quick: bool) -> list[Figure]:
    """Everything into an empty provider, in as few requests as the caps allow."""
    size, node_count, services = (10_000, 100, 200) if quick else (100_000, 1_000, 2_000)
    began = time.process_time()
    cloud = await filled(size, node_count, services)
    took = time.process_time() - began
    policy = cloud.state.policy
    least = {
        "update_address_locations": math.ceil(size / policy.limits.addresses),
        "update_services": math.ceil(services / policy.services_per_batch),
    }
    calls, made = cloud.calls, sum(cloud.calls.values())
    wanted = sum(least.values()) + 2 * services + 1
    note = f"{made:,} requests, {wanted:,} are the least: " + ", ".join(
        f"{verb} {count:,}" for verb, count in sorted(calls.items())
    )
    locations = cloud.location_calls / least["update_address_locations"]
    return [
        Figure("resync.requests", made / wanted, "x", None, 1.1, "lower", note),
        Figure("resync.locations", locations, "x", None, 1.1, "lower", "of address batches alone"),
        Figure("resync.bytes", cloud.bytes / 1e6, "MB", better="lower"),
        Figure("resync.cpu", took, "s", better="lower", note="the provider in memory included"),
    ]


async def sustained(quick: bool) -> list[Figure]:
    """500 pod changes/s: pods go and come, each change is one fact."""
    size, node_count, services = (10_000, 100, 200) if quick else (50_000, 500, 1_000)
    seconds, rate = (5, 500) if quick else (20, 500)
    cloud = await filled(size, node_count, services)
    cloud.forget_counts()
    each = size // services
    randoms, fresh = random.Random(1), itertools.count(size)
    began, cpu, made = cloud.now, time.process_time(), 0
    holding = {
        number: spread_over(range(number * each, number * each + each), node_count)
        for number in range(services)
    }
    for tick in range(seconds * rate // 2):
        number = randoms.randrange(services)
        endpoints = holding[number]
        endpoints.pop(next(iter(endpoints)))
        new = next(fresh)
        endpoints[pod_ip(new)] = f"node-{randoms.randrange(node_count)}"
        cloud.slice(number, number, dict(endpoints))
        made += 2
        await cloud.until(began + (tick + 1) * 2 / rate)
    cpu = time.process_time() - cpu
    await cloud.settle()
    assert cloud.held == size
    policy, calls = cloud.state.policy, sum(cloud.calls.values())
    bound = 1 / policy.latency + rate / policy.limits.addresses
    note = "goal: one for each nrp.latency_s and one for each full batch"
    return [
        Figure("pod_churn.requests", calls / seconds, "1/s", None, bound, "lower", note),
        Figure("pod_churn.per_1000", calls / made * 1e3, "calls", better="lower"),
        Figure("pod_churn.kb_per_1000", cloud.bytes / made, "KB", better="lower"),
        Figure("pod_churn.cpu", cpu / seconds * 100, "%", better="lower", note="of one core"),
    ]


async def storm(quick: bool) -> list[Figure]:
    """100,000 pods more within 2 s, and 100,000 changes of which most undo each other."""
    size, node_count, services = (10_000, 100, 200) if quick else (100_000, 1_000, 2_000)
    cloud = await filled(size, node_count, services)
    cloud.forget_counts()
    each = size // services
    began, cpu = cloud.now, time.process_time()
    for number in range(services):
        pods = range(size + number * each, size + number * each + each)
        cloud.slice(services + number, number, spread_over(pods, node_count))
        await cloud.until(began + 2.0 * (number + 1) / services)
    await cloud.settle()
    cpu = time.process_time() - cpu
    assert cloud.held == 2 * size
    calls, least = cloud.location_calls, math.ceil(size / cloud.state.policy.limits.addresses)
    note = f"{size:,} changes, {calls} calls, {least} are the least; {cloud.now - began:.1f} s"
    figures = [
        Figure("pod_storm.calls", calls / least, "x", 1.1, 1.0, "lower", note),
        Figure("pod_storm.per_1000", calls / size * 1e3, "calls", better="lower"),
        Figure("pod_storm.kb_per_1000", cloud.bytes / size, "KB", better="lower"),
        Figure("pod_storm.cpu", cpu, "s", better="lower", note="the provider in memory included"),
    ]
    return [*figures, await undoing(cloud, size, services, node_count)]


async def undoing(cloud: Cloud, size: int, services: int, node_count: int) -> Figure:
    """As many changes by a tenth of the pods, each of which goes and comes five times in 0.5 s."""
    cloud.forget_counts()
    each, began = size // services, cloud.now
    for turn in range(10):
        for number in range(services // 10):
            pods = range(size + number * each, size + number * each + each)
            endpoints = {} if turn % 2 == 0 else spread_over(pods, node_count)
            cloud.slice(services + number, number, endpoints)
            await cloud.until(began + (turn * (services // 10) + number) * 0.5 / services)
    await cloud.settle()
    assert cloud.held == 2 * size
    note = f"{size:,} changes that come to nothing"
    return Figure("pod_storm.undone", cloud.location_calls, "calls", better="lower", note=note)


ROWS = [
    Row("pod_change", pod_changes, repeats=3),
    Row("cold_diff", cold_diff),
    Row("resync", resync, repeats=1),
    Row("pod_churn", sustained, repeats=1),
    Row("pod_storm", storm, repeats=1),
]
