"""Checks per second on one core, beside the plain way of doing it; lag and memory of 100,000.

Backends are loopback addresses that one process answers for. Figures of the engine alone and with
the monitor (thresholds, verdicts) are told apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from bench import whole
from bench.harness import Figure, Row, percentile, rss_mb
from sandbox.stack import Stack
from schema import events, objects
from services.kit.bus import Bus, Puller
from services.prober import shares
from services.prober.checks import Engine
from services.prober.core import KINDS, State
from services.prober.dialling import DialMap
from services.prober.driving import Driver
from services.prober.follower import Follower
from services.prober.images import Dummies
from services.prober.leader import Leader
from services.prober.monitor import Monitor
from services.prober.plan import Check, Defaults
from services.prober.projection import Judgement
from services.prober.targets import Outcome, Target
from services.prober.verdicts import OwnFault

ANSWER = """
import select, socket, sys
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("0.0.0.0", 0))
listener.listen(4096)
print(listener.getsockname()[1], flush=True)
http = sys.argv[1] == "http"
while True:
    connection, _ = listener.accept()
    try:
        if http:
            connection.recv(4096)
            connection.send(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
    except OSError:
        pass
    connection.close()
"""


@contextlib.contextmanager
def answering(how: str) -> Iterator[int]:
    """A process that answers on every loopback address; yields its port."""
    process = subprocess.Popen([sys.executable, "-c", ANSWER, how], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def address(number: int) -> str:
    return f"127.{1 + number // 60_000}.{number // 250 % 240}.{1 + number % 250}"


def saturate(port: int, seconds: float, protocol: str) -> tuple[float, float, int]:
    """As many checks as go: per second, CPU per check in us, failures."""
    failed = finished = 0

    def report(outcomes: list[Outcome]) -> None:
        nonlocal failed, finished
        finished += len(outcomes)
        failed += sum(not outcome.ok for outcome in outcomes)

    engine = Engine(report, max_in_flight=512)
    check = Check(port=port, period=0.05, timeout=5.0, protocol=protocol)
    for number in range(5_000):
        host = address(number)
        engine.add(Target(number, check, host, host, port), at_once=False)
    with contextlib.closing(engine):
        began, cpu = time.monotonic(), time.process_time()
        while time.monotonic() - began < seconds:
            wake = engine.step(0.0)
            pause = min(wake - time.monotonic(), 0.002)
            if pause > 0:
                engine.step(pause)
        wall, cpu = time.monotonic() - began, time.process_time() - cpu
    return finished / wall, cpu / finished * 1e6, failed


async def plainly(port: int, seconds: float) -> float:
    """The same by asyncio.open_connection, 128 at a time."""
    finished = 0
    began = time.monotonic()

    async def worker(number: int) -> None:
        nonlocal finished
        while time.monotonic() - began < seconds:
            _, writer = await asyncio.open_connection(address(number), port)
            writer.transport.abort()
            finished += 1

    await asyncio.gather(*(worker(number) for number in range(128)))
    return finished / (time.monotonic() - began)


async def rates(quick: bool) -> list[Figure]:
    seconds = 1.5 if quick else 4.0
    with answering("tcp") as port:
        rate, cpu, failed = await asyncio.to_thread(saturate, port, seconds, "TCP")
        plain = await plainly(port, seconds / 2)
    with answering("http") as port:
        http, _, http_failed = await asyncio.to_thread(saturate, port, seconds, "HTTP")
    return [
        Figure("tcp_checks", rate, "1/s", 15_000, 28_000, note=f"one core, {failed} failed"),
        Figure("tcp_checks.cpu", cpu, "us", better="lower", note="CPU per check, kernel included"),
        Figure("tcp_checks.plain", plain, "1/s", note="asyncio.open_connection, same run"),
        Figure("tcp_checks.ratio", rate / plain, "x", note="to asyncio.open_connection"),
        Figure("http_checks", http, "1/s", note=f"{http_failed} failed"),
        Figure("http_checks.ratio", http / rate, "x", floor=1 / 3, note="to TCP's rate"),
    ]


def load_balancers(count: int, each: int, port: int, period: int) -> State:
    """A state with so many load balancers, every backend of which is checked."""
    state = State(Defaults(), Dummies("192.0.0.8", "100::1"))
    check = objects.HealthCheck(port=port, period_seconds=period)
    listeners = [objects.Listener(name="http", port=80, backend_port=port)]
    for number in range(count):
        spec = objects.LoadBalancerSpec(
            listeners=listeners, backend_server_selector={"lb": [str(number)]}, health_check=check
        )
        meta = objects.ObjectMeta(name=f"lb{number}", namespace="bench", uid=f"lb-{number}")
        state.see_balancer(meta.uid, objects.LoadBalancer(metadata=meta, spec=spec))
        for part in range(number * each, number * each + each):
            host = "10." + address(part).partition(".")[2]
            vm = objects.VirtualMachineInstance(
                metadata=objects.ObjectMeta(
                    name=f"vm{part}",
                    namespace="bench",
                    uid=f"vm-{part}",
                    labels={"lb": str(number)},
                ),
                status=objects.VMIStatus(
                    interfaces=[objects.VMInterface(name="n", ip_address=host)]
                ),
            )
            state.see_member(objects.object_ref(vm), vm)
    return state


async def sockets(seconds: float, port: int) -> list[tuple[int, int]]:
    """Open descriptors of this process and TIME_WAITs with the port, looked at now and then."""
    at = f":{port:04X} "
    found = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        lines = Path("/proc/net/tcp").read_text().splitlines()
        waiting = sum(at in line and line.split()[3] == "06" for line in lines)
        found.append((len(os.listdir("/proc/self/fd")), waiting))
        await asyncio.sleep(0.5)
    return found


async def standing(backends: int, period: int, periods: int = 3) -> dict[str, float]:
    """All backends checked every `period` seconds: lag of the starts, CPU, memory, sockets."""
    lags: list[float] = []

    class Timed(Engine):
        def step(self, timeout: float = 0.0) -> float:
            wake = super().step(timeout)
            lags.append(self.late)
            return wake

    with answering("tcp") as port:
        state = load_balancers(backends // 10, 10, port, period)

        state.resolve(KINDS, datetime.now(UTC), backends)
        loop = asyncio.get_running_loop()

        def submit(judgement: Judgement) -> bool:
            state.judge(judgement.verdicts, judgement.holds, judgement.at)
            changed, state.changed = state.changed, set()
            loop.call_soon(monitor.update, changed)
            return True

        monitor = Monitor(
            lambda: state, submit, Timed, DialMap(["10.0.0.0/8=127.0.0.0/8"]), OwnFault()
        )
        stop = asyncio.Event()
        driver = Driver(monitor.engine)
        monitor.start()
        task = asyncio.create_task(driver.run(stop))
        await asyncio.sleep(2.0 * period + 1.0)
        lags.clear()
        began, cpu, started = time.monotonic(), time.process_time(), monitor.engine.started
        seen = await sockets(period * periods, port)
        wall, cpu = time.monotonic() - began, time.process_time() - cpu
        rate = (monitor.engine.started - started) / wall
        stop.set()
        await task
    return {
        "rate": rate,
        "lag_ms": percentile(lags, 99) * 1_000,
        "cpu": cpu / wall * 100,
        "rss_mb": rss_mb(os.getpid()),
        "fds_early": max(fds for fds, _ in seen[: len(seen) // 2]),
        "fds_late": max(fds for fds, _ in seen[len(seen) // 2 :]),
        "time_wait": max(waiting for _, waiting in seen),
    }


async def spread(quick: bool) -> list[Figure]:
    """In a process of its own, for its memory."""
    backends, period = (10_000, 2) if quick else (100_000, 10)
    program = "import asyncio, msgspec; from bench.prober import standing; " + (
        f"print(msgspec.json.encode(asyncio.run(standing({backends}, {period}))).decode())"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    found: dict[str, Any] = msgspec.json.decode(out)
    note = f"{backends:,} backends every {period} s, {found['rate']:,.0f} checks/s"
    full = not quick
    return [
        Figure("checks_spread.lag_p99", found["lag_ms"], "ms", 100.0, better="lower", note=note),
        Figure("checks_spread.cpu", found["cpu"], "%", better="lower", note="of one core"),
        Figure(
            "checks_spread.descriptors",
            found["fds_late"],
            "",
            better="lower",
            note=f"most at once in the second half; {found['fds_early']:,.0f} in the first",
        ),
        Figure("checks_spread.time_wait", found["time_wait"], "", better="lower"),
        Figure("checks_spread.rss", found["rss_mb"], "MB", 400.0 if full else None, better="lower"),
    ]


async def shared(quick: bool) -> list[Figure]:
    """What a check costs the replica that judges when another one makes it, and what saying so
    costs the other: without sockets, and every message as it is on the wire."""
    backends = 10_000 if quick else 100_000
    state = load_balancers(backends // 10, 10, 8080, 10)
    state.resolve(KINDS, datetime.now(UTC), backends)
    words: list[bytes] = []
    leader = Leader("a", 3_600.0, lambda _, data: words.append(data))
    monitor = Monitor(lambda: state, lambda _: True, Engine, DialMap(), OwnFault(), leader=leader)
    monitor.start()
    leader.hello(shares.Hello(session=leader.session, replica="b"), monitor.engine.now())
    while monitor.unsettled:
        monitor.tick()
    flushes: list[Callable[[], None]] = []
    idle = Engine(lambda _: None)
    follower = Follower(
        "b",
        1.0,
        idle,
        lambda address: address,
        lambda _, data: words.append(data) is None,
        lambda _, flush: flushes.append(flush),
    )
    follower.start()
    follower.call(shares.Call(session=leader.session, replica="a", shares=["b"]), 0.0)
    targets = list(leader.share("b").values())
    words.clear()
    spent = time.process_time()
    for start in range(0, len(targets), 100):
        now = idle.now()
        follower.take([Outcome(t, True, "", now) for t in targets[start : start + 100]])
        flushes.pop()()
    said = time.process_time() - spent
    decode = msgspec.json.Decoder(shares.Seen).decode
    spent = time.process_time()
    for word in words:
        leader.seen(decode(word), idle.now())
    heard = time.process_time() - spent
    monitor.engine.close()
    idle.close()
    note = f"{len(targets):,} of {backends:,} at another replica, 100 in a message"
    return [
        Figure("shared_checks.said", said / len(targets) * 1e6, "us", better="lower", note=note),
        Figure("shared_checks.heard", heard / len(targets) * 1e6, "us", better="lower"),
    ]


async def verdict_to_slice(quick: bool) -> list[Figure]:
    """From a verdict of the prober to the slice in a watch of the API, in the whole system: one
    backend that is taken away and put back."""
    stack = Stack(settings={"LBLEDGER_PROBER_SECOND_S": "0.05"})
    took: list[float] = []
    try:
        await stack.start()
        bus = await Bus.connect(stack.env["LBLEDGER_NATS_URL"], name="bench")
        async with (
            aiohttp.ClientSession() as http,
            contextlib.aclosing(
                _toggled(whole.Api(stack.kube_url, http), 20 if quick else 150)
            ) as shown,
        ):
            first = (await bus.stream_state("LB")).last_seq + 1
            puller = bus.puller("LB", start_seq=first, filters=("lb.health.>",))
            async for at in shown:
                verdict = await _verdict(puller, ready=len(took) % 2 == 0)
                took.append((at - verdict.timestamp()) * 1_000)
        await bus.close()
    finally:
        await stack.stop()
    return [
        Figure("verdict_to_slice.p50", percentile(took, 0.5), "ms", better="lower"),
        Figure("verdict_to_slice.p99", percentile(took, 0.99), "ms", 50, better="lower"),
    ]


async def _verdict(puller: Puller, *, ready: bool) -> datetime:
    """When the next change to this was found out."""
    while True:
        for message in await puller.fetch(1, 10.0):
            event = events.decode(message.data)
            if isinstance(event, events.HealthChanged) and event.changes[-1].ready == ready:
                return event.at


async def _toggled(api: whole.Api, times: int) -> AsyncIterator[float]:
    """Makes the only backend of a load balancer fail and pass; yields when its slice shows it."""
    host, there = "10.77.0.1", None
    with socket.socket() as probe:
        probe.bind(("127.77.0.1", 0))
        port = probe.getsockname()[1]
    listeners = [{"name": "http", "port": 80, "protocol": "TCP", "backendPort": port}]
    check = {"port": port, "periodSeconds": 1, "timeoutSeconds": 1, "failureThreshold": 1}
    spec = {"backendServerSelector": {"app": ["one"]}, "healthCheck": check}
    await api.call("POST", f"{whole.GROUP}/ippools", whole.POOL)
    await api.call("POST", whole.VMIS, whole.machine("one", host, "one"))
    await api.call("POST", whole.LBS, whole.balancer("one", "vm", listeners=listeners, **spec))
    slices = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
    await whole.until(api, slices, lambda found: found["items"])
    watch = api.watch(slices)
    for number in range(times):
        up = number % 2 == 0
        if up:
            there = socket.create_server(("127.77.0.1", port), backlog=128)
        elif there is not None:
            there.close()
        async for found in watch:
            ready = [e for e in found["endpoints"] if e.get("conditions", {}).get("ready")]
            if any(host in endpoint["addresses"] for endpoint in ready) == up:
                break
        yield time.time()
    await watch.aclose()


ROWS = [
    Row("tcp_checks", rates),
    Row("checks_spread", spread, repeats=2),
    Row("shared_checks", shared),
    Row("verdict_to_slice", verdict_to_slice, repeats=3),
]
