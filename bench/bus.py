"""The bus and the watcher: from bytes of a watch to an acknowledged fact."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.harness import Figure, Row, cpu_s
from sandbox.servers import NatsServer
from schema import subjects
from services.kit import config, garbage
from services.kit.bus import Bus, Outgoing
from services.kit.kube import Kube, Resource
from services.kit.runtime import Runtime
from services.watcher.listing import Kind
from services.watcher.main import Watcher


async def watch_to_fact(quick: bool) -> list[Figure]:
    """A watcher reads additions of Services at full speed and publishes them safely."""
    count = 10_000 if quick else 50_000
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        api = subprocess.Popen([sys.executable, "-m", "bench.api", str(count), str(ready)])
        try:
            async with NatsServer() as nats:
                while not ready.exists():
                    await asyncio.sleep(0.05)
                facts = json.loads(ready.read_text())
                kubeconfig = Path(folder) / "kubeconfig"
                kubeconfig.write_text(_kubeconfig(facts["port"]))
                took, cpu = await _watch(nats.url, str(kubeconfig), count)
        finally:
            api.kill()
            api.wait()
    return [
        Figure("watch_to_fact", count / took, "/s", 10_000, 40_000, note=f"{count:,} Services"),
        Figure("watch_to_fact.cpu", cpu / count * 1e6, "us", better="lower", note="watcher's CPU"),
    ]


async def _watch(nats_url: str, kubeconfig: str, count: int) -> tuple[float, float]:
    garbage.tune()  # as every process of a service does
    rt = Runtime.create("watcher", config.load({"LBLEDGER_NATS_URL": nats_url}))
    bus = await rt.bus()
    kube = await Kube.connect(kubeconfig)
    kinds = (Kind(resource=Resource("", "v1", "services")),)
    task = asyncio.create_task(Watcher(rt, bus, kube, kinds).run())
    try:
        while True:  # the empty list is published: the watch begins
            await asyncio.sleep(0.001)
            try:
                if await bus.last("KUBE", subjects.sync_subject("services")):
                    break
            except Exception:  # noqa: BLE001  (the stream is not there yet)
                continue
        began, cpu = time.perf_counter(), cpu_s()
        first = (await bus.stream_state("KUBE")).last_seq
        while (await bus.stream_state("KUBE")).last_seq < first + count - 50:
            await asyncio.sleep(0.02)
            if time.perf_counter() - began > 120:
                raise TimeoutError("the watcher did not publish everything within 120 s")
        return time.perf_counter() - began, cpu_s() - cpu
    finally:
        rt.stop.set()
        await asyncio.wait_for(task, 15)
        await kube.close()
        await rt.close()


def _kubeconfig(port: int) -> str:
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }
    )


async def bus_rates(quick: bool) -> list[Figure]:
    """The transport alone: safe publisher, atomic batches, pull loop; 1 KB messages."""
    count = 10_000 if quick else 50_000
    body = b"x" * 1024
    figures = []
    async with NatsServer() as nats:
        bus = await Bus.connect(nats.url, name="bench")
        await bus.ensure_stream(subjects.KUBE)
        publisher = bus.publisher("KUBE")
        began = time.perf_counter()
        futures = []
        for i in range(count):
            await publisher.room()
            futures.append(publisher.submit(f"kube.a.b.s{i}", body, {}, msg_id=f"s{i}"))
        await asyncio.gather(*futures)
        took = time.perf_counter() - began
        figures.append(Figure("bus.safe_publish", count / took, "/s"))
        began = time.perf_counter()
        for start in range(0, count, 500):
            batch = [
                Outgoing(f"kube.a.c.s{i}", body, {}, f"b{i}") for i in range(start, start + 500)
            ]
            await publisher.publish_batch(batch)
        took = time.perf_counter() - began
        figures.append(Figure("bus.batch_publish", count / took, "/s", note="500 in a batch"))
        puller = bus.puller("KUBE", start_seq=1)
        began, seen = time.perf_counter(), 0
        while seen < 2 * count:
            seen += len(await puller.fetch(500, timeout=2.0))
        figures.append(Figure("bus.pull", seen / (time.perf_counter() - began), "/s"))
        await puller.close()
        await publisher.close()
        await bus.close()
    return figures


async def cli_import(quick: bool) -> list[Figure]:
    """`lbledger --help`, a process from start to end."""
    took = []
    for _ in range(3 if quick else 7):
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.cli", "--help", stdout=asyncio.subprocess.DEVNULL
        )
        await process.wait()
        took.append((time.perf_counter() - began) * 1000)
    best = sorted(took)[len(took) // 2]
    return [Figure("cli_import", best, "ms", 150, 80, better="lower", note="lbledger --help")]


ROWS = [
    Row("cli_import", cli_import),
    Row("watch_to_fact", watch_to_fact),
    Row("bus", bus_rates),
]
