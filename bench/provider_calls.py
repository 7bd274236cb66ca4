"""The requests that changes of pods take: all at once, sustained, in a storm.

No I/O: the core of nrp_sync with a provider in memory. The clock is a simulated one (50 ms for each
request), so what is counted does not hang on this machine's speed. Bytes are those of the bodies
that Azure would be sent.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections import Counter

import msgspec

from bench.harness import Figure, Row
from bench.provider import node_ip, pod_ip, service_name, uid
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
from services.nrp_sync.batches import LocationCall
from services.nrp_sync.memory import MemoryProvider
from services.nrp_sync.provider import LoadBalancer, ProviderSettings, PublicAddress, ServiceBatch
from services.nrp_sync.sources import Name, Reading
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
    Row("resync", resync, repeats=1),
    Row("pod_churn", sustained, repeats=1),
    Row("pod_storm", storm, repeats=1),
]
