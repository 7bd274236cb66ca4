"""A watcher in this process, between a Kubernetes API on loopback and a real NATS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import yaml

from schema import events, subjects
from services.kit.bus import Bus, Message, StreamMissing, Unavailable
from services.kit.config import (
    HealthSettings,
    KubeSettings,
    NatsSettings,
    Settings,
    WatcherSettings,
)
from services.kit.kube import Kube, Resource
from services.kit.runtime import Runtime
from services.watcher.main import KINDS, run
from tests.waiting import eventually

LB = Resource("loadbalancer.harvesterhci.io", "v1beta1", "loadbalancers")
POOL = Resource("loadbalancer.harvesterhci.io", "v1beta1", "ippools", namespaced=False)
SERVICE = Resource("", "v1", "services")
NODE = Resource("", "v1", "nodes", namespaced=False)
POD = Resource("", "v1", "pods")
SLICE = Resource("discovery.k8s.io", "v1", "endpointslices")
SERVICE_CIDR = Resource("networking.k8s.io", "v1", "servicecidrs", namespaced=False)
CONFIGMAP = Resource("", "v1", "configmaps")
CRD = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False)
ROOT = Path(__file__).resolve().parents[2]
PLURALS = {kind.plural for kind in KINDS}

QUICK = WatcherSettings(
    watch_timeout_s=30.0, idle_s=20.0, absent_poll_s=0.2, relist_jitter_s=0.05, check_s=0.3
)


class Fact:
    """One message of the KUBE stream, decoded."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.seq, self.subject, self.headers = message.seq, message.subject, message.headers
        self.event: Any = events.decode(message.data)
        self.type = str(self.headers[subjects.HEADER_TYPE]).partition(".")[0]
        self.expected = int(self.headers.get(subjects.HEADER_EXPECTED_LAST, "-1"))

    def __repr__(self) -> str:
        return f"{self.seq}:{self.subject}:{self.type}"


class Watching:
    """A running watcher, and what it publishes."""

    def __init__(self, rt: Runtime, bus: Bus) -> None:
        self.rt, self.bus = rt, bus
        self.task: asyncio.Task[None] = asyncio.create_task(run(rt))

    async def stop(self) -> None:
        self.rt.stop.set()
        async with asyncio.timeout(10):
            await self.task

    async def crash(self) -> None:
        """End it in the middle of whatever it does, as a kill would, as far as one process can."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def synced(self, count: int = 1, *plurals: str, timeout: float = 20.0) -> None:
        """Wait until every kind, or each of these, was listed completely so many times."""

        async def done() -> bool:
            assert not self.task.done(), self.task
            found = await log(self.bus, "kube.sync.>")
            finished = [f.event.plural for f in found if f.type == "SyncFinished"]
            return all(finished.count(plural) >= count for plural in plurals or PLURALS)

        await eventually(done, timeout, message=f"{count} complete lists of each kind")


async def log(bus: Bus, pattern: str = "kube.>") -> list[Fact]:
    """Every message of the stream so far, in order: of one subject, or of a branch."""
    try:
        state = await bus.stream_state("KUBE")
    except (StreamMissing, Unavailable):
        return []
    if not state.messages:
        return []
    puller = bus.puller("KUBE", start_seq=state.first_seq, name="test")
    found: list[Message] = []
    try:
        async with asyncio.timeout(20):
            while not found or found[-1].seq < state.last_seq:
                found += await puller.fetch(500, 5.0)
    finally:
        await puller.close()
    branch = pattern.removesuffix(">")
    return [
        Fact(message)
        for message in found
        if message.subject == pattern or (branch != pattern and message.subject.startswith(branch))
    ]


async def facts_of(bus: Bus, resource: Resource, namespace: str, name: str) -> list[Fact]:
    ref = subjects.ObjectRef(resource.plural, namespace, name)
    return await log(bus, subjects.fact_subject(ref))


async def published(bus: Bus, resource: Resource, namespace: str, name: str, *types: str) -> None:
    """Wait until exactly these facts stand on the object's subject, in this order."""

    async def equal() -> bool:
        found = [fact.type for fact in await facts_of(bus, resource, namespace, name)]
        assert found == list(types), found
        return True

    await eventually(equal, 15.0)


def chain_is_whole(found: list[Fact]) -> None:
    """Each message names the one before it on its subject."""
    last: dict[str, int] = {}
    for fact in found:
        assert fact.expected == last.get(fact.subject, 0), fact
        last[fact.subject] = fact.seq


def settings(nats_url: str, kubeconfig: Path, **watcher: Any) -> Settings:
    return Settings(
        nats=NatsSettings(url=nats_url),
        kube=KubeSettings(kubeconfig=str(kubeconfig)),
        health=HealthSettings(port=-1),
        watcher=msgspec.structs.replace(QUICK, **watcher),
    )


@asynccontextmanager
async def watching(nats_url: str, kubeconfig: Path, **watcher: Any) -> AsyncIterator[Watching]:
    rt = Runtime.create("watcher", settings(nats_url, kubeconfig, **watcher))
    bus = await Bus.connect(nats_url, name="test")
    running = Watching(rt, bus)
    try:
        yield running
    finally:
        rt.stop.set()
        if not running.task.done():
            async with asyncio.timeout(10):
                await asyncio.gather(running.task, return_exceptions=True)
        await rt.close()
        await bus.close()


async def install(kube: Kube, *plurals: str) -> None:
    """Our CustomResourceDefinitions."""
    for plural in plurals or ("loadbalancers", "ippools"):
        path = ROOT / "schema" / "crds" / f"{plural}.yaml"
        await kube.create(CRD.path(), yaml.safe_load(path.read_text()))


async def wipe(kube: Kube, resource: Resource, namespace: str, *names: str) -> None:
    for name in names:
        await kube.delete(resource.path(namespace, name))


def load_balancer(name: str, namespace: str = "default", **spec: Any) -> dict[str, Any]:
    listeners = [{"name": "http", "port": 80, "protocol": "TCP", "backendPort": 8080}]
    return {
        "apiVersion": "loadbalancer.harvesterhci.io/v1beta1",
        "kind": "LoadBalancer",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"ipam": "pool", "listeners": listeners, **spec},
    }


def service(name: str, namespace: str = "default", **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, **metadata},
        "spec": {"type": "ClusterIP", "ports": [{"port": 80, "protocol": "TCP"}]},
    }


async def create(kube: Kube, resource: Resource, body: Mapping[str, Any]) -> dict[str, Any]:
    namespace = body["metadata"].get("namespace", "")
    made: dict[str, Any] = msgspec.json.decode(await kube.create(resource.path(namespace), body))
    return made


async def merge(
    kube: Kube, resource: Resource, namespace: str, name: str, patch: Mapping[str, Any]
) -> dict[str, Any]:
    path = resource.path(namespace, name)
    changed: dict[str, Any] = msgspec.json.decode(await kube.patch(path, patch))
    return changed
