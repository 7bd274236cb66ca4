"""The whole system in the sandbox: latency from object to address, writes, memory at idle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import msgspec

from bench.harness import Figure, Row, cpu_s, percentile, rss_mb
from sandbox.stack import KUBE_TOKEN, SERVICES, Stack

GROUP = "/apis/loadbalancer.harvesterhci.io/v1beta1"
LBS = f"{GROUP}/namespaces/default/loadbalancers"
VMIS = "/apis/kubevirt.io/v1/namespaces/default/virtualmachineinstances"


class Api:
    """The sandbox's API server, by plain requests."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url, self._http = url, http
        self._headers = {"Authorization": f"Bearer {KUBE_TOKEN}"}

    async def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        data = None if body is None else msgspec.json.encode(body)
        headers = {**self._headers, "Content-Type": "application/json"}
        async with self._http.request(
            method, self._url + path, data=data, headers=headers
        ) as reply:
            content = await reply.read()
            if reply.status >= 400:
                raise RuntimeError(f"{method} {path}: {reply.status} {content[:300]!r}")
            return dict(msgspec.json.decode(content))

    async def watch(self, path: str) -> AsyncGenerator[dict[str, Any]]:
        """The objects of a list as they are and as they change."""
        url = f"{self._url}{path}?watch=true"
        async with self._http.get(url, headers=self._headers) as reply:
            async for line in reply.content:
                yield dict(msgspec.json.decode(line)["object"])

    async def writes(self) -> dict[str, int]:
        """Writes so far: those for load balancers, statuses of pools, and Events."""
        found = {"lb": 0, "pool": 0, "event": 0}
        for row in (await self.call("GET", "/sandbox/counts"))["counts"]:
            if row["verb"] not in ("get", "list", "watch"):
                kind = {"ippools/status": "pool", "events": "event"}.get(row["resource"], "lb")
                found[kind] += row["count"]
        return found


def balancer(name: str, kind: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "loadbalancer.harvesterhci.io/v1beta1",
        "kind": "LoadBalancer",
        "metadata": {"name": name},
        "spec": {"workloadType": kind, "ipam": "pool", "ipPool": "bench", **spec},
    }


def machine(name: str, address: str, app: str) -> dict[str, Any]:
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": name, "labels": {"app": app}},
        "spec": {},
        "status": {"phase": "Running", "interfaces": [{"ipAddress": address}]},
    }


POOL = {
    "apiVersion": "loadbalancer.harvesterhci.io/v1beta1",
    "kind": "IPPool",
    "metadata": {"name": "bench"},
    "spec": {"ranges": [{"subnet": "198.18.0.0/16"}]},
}


def is_ready(found: dict[str, Any]) -> bool:
    conditions = found.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


async def until(api: Api, path: str, test: Any, timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not test(found := await api.call("GET", path)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} never fitted: {found.get('status')}")
        await asyncio.sleep(0.005)


async def quiet(api: Api) -> dict[str, int]:
    """Wait until nothing is written any more; returns the numbers of writes so far."""
    last, since = await api.writes(), time.monotonic()
    while time.monotonic() - since < 1.5:
        await asyncio.sleep(0.05)
        if (now := await api.writes()) != last:
            last, since = now, time.monotonic()
    return last


async def e2e(api: Api, count: int) -> list[float]:
    """Milliseconds from creating a ticket to its address in a watch of the API."""
    took = []
    for i in range(-10, count):
        name = f"ticket-{i + 10}"
        began = time.perf_counter()
        await api.call("POST", LBS, balancer(name, "cluster"))
        while True:
            found = await api.call("GET", f"{LBS}/{name}")
            if found.get("status", {}).get("allocatedAddress", {}).get("ip"):
                break
            if time.perf_counter() - began > 10:
                raise TimeoutError(f"{name} got no address within 10 s: {found}")
        if i >= 0:
            took.append((time.perf_counter() - began) * 1000)
        await asyncio.sleep(0.02)
    return took


async def writes(api: Api) -> list[Figure]:
    """Writes to bring one VM load balancer to Ready, and for one more backend."""
    await api.call("POST", VMIS, machine("vm-1", "10.77.0.1", "counted"))
    before = await quiet(api)
    listeners = [{"name": "http", "port": 80, "protocol": "TCP", "backendPort": 8080}]
    spec = {"listeners": listeners, "backendServerSelector": {"app": ["counted"]}}
    await api.call("POST", LBS, balancer("counted", "vm", **spec))
    await until(api, f"{LBS}/counted", is_ready)
    created = await quiet(api)
    await api.call("POST", VMIS, machine("vm-2", "10.77.0.2", "counted"))
    changed = await quiet(api)
    figures = []
    for name, one, two, floor, goal in (
        ("ready", before, created, 4, 3),
        ("change", created, changed, 3, 2),
    ):
        more = {kind: two[kind] - one[kind] for kind in one}
        note = f"announcer none; besides {more['event']} Events and {more['pool']} pool statuses"
        mine = more["lb"] - 1  # without our own POST
        figures.append(
            Figure(f"writes_per_lb.{name}", mine, "", floor, goal, better="lower", note=note)
        )
    return figures


async def whole(quick: bool) -> list[Figure]:
    stack = Stack()
    try:
        await stack.start()
        async with aiohttp.ClientSession() as http:
            api = Api(stack.kube_url, http)
            await api.call("POST", f"{GROUP}/ippools", POOL)
            took = await e2e(api, 100 if quick else 400)
            written = await writes(api)
        await asyncio.sleep(3.0)
        pids = {name: stack.child(name).pid for name in SERVICES}
        before = {name: cpu_s(pid) for name, pid in pids.items()}
        seconds = 5.0 if quick else 20.0
        await asyncio.sleep(seconds)
        spent = sum(cpu_s(pid) - before[name] for name, pid in pids.items())
        memory = {name: rss_mb(pid) for name, pid in pids.items()}
    finally:
        await stack.stop()
    return [
        Figure("e2e_latency.p50", percentile(took, 0.5), "ms", better="lower"),
        Figure("e2e_latency.p99", percentile(took, 0.99), "ms", 30, 15, better="lower"),
        *written,
        *(
            Figure(f"idle.rss.{name}", value, "MB", better="lower")
            for name, value in memory.items()
        ),
        Figure("idle.cpu", spent / seconds * 100, "%", better="lower", note="all services"),
    ]


ROWS = [Row("whole", whole, repeats=3)]
