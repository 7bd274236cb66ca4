"""A running prober for tests: facts go in by the KUBE stream, decisions come out of the LB stream.

Every decision that the rig reads is checked against the promises that hold for all of them: a slice
always has a ready endpoint, the dummy stands in exactly when nothing else is ready, and revisions
grow by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec

from schema import events, objects
from services.kit import config
from services.kit.bus import Bus, Message
from services.kit.runtime import Runtime
from services.prober import main
from services.prober.images import fold
from tests.backends import Backends, free_port
from tests.feeding import Feeder
from tests.waiting import eventually

KINDS = ("loadbalancers", "virtualmachineinstances", "pods")
SECOND_S = 0.02
DIAL_MAP = "10.0.0.0/16=127.10.0.0/16"


def balancer(name="web", uid="", selector=None, check=None, listeners=None, **rest):
    """A LoadBalancer with one TCP listener on port 80, backend port 8080."""
    rest.setdefault("generation", 1)
    meta = objects.ObjectMeta(
        name=name,
        namespace=rest.pop("namespace", "default"),
        uid=uid or f"uid-{name}",
        generation=rest.pop("generation"),
        deletion_timestamp=rest.pop("deletion_timestamp", None),
        annotations=rest.pop("annotations", None),
    )
    listeners = listeners or [objects.Listener(name="http", port=80, backend_port=8080)]
    spec = objects.LoadBalancerSpec(
        listeners=listeners,
        backend_server_selector={"app": ["web"]} if selector is None else selector,
        health_check=check,
        **rest,
    )
    return objects.LoadBalancer(metadata=meta, spec=spec)


def machine(name, *addresses, labels=None, uid="", **rest):
    """A VirtualMachineInstance with these addresses, labelled app=web."""
    meta = objects.ObjectMeta(
        name=name,
        namespace=rest.pop("namespace", "default"),
        uid=uid or f"uid-{name}",
        labels={"app": "web"} if labels is None else labels,
        deletion_timestamp=rest.pop("deletion_timestamp", None),
    )
    interfaces = [
        objects.VMInterface(name=f"nic{i}", ip_address=a) for i, a in enumerate(addresses)
    ]
    status = objects.VMIStatus(phase=rest.pop("phase", "Running"), interfaces=interfaces, **rest)
    return objects.VirtualMachineInstance(metadata=meta, status=status)


class Rig:
    def __init__(self, nats_url: str, database_url: str) -> None:
        self.nats_url = nats_url
        self.database_url = database_url
        self.backends = Backends()
        self.port = free_port()
        self.images: dict[str, events.BackendsResolved] = {}
        self.log: list[events.Event] = []
        self.causes: list[str] = []
        self._bus: Bus
        self.feed: Feeder
        self._replicas: list[Replica | Process] = []
        self._reader: asyncio.Task[None] | None = None

    # --- life ---

    async def open(self) -> None:
        self.feed = await Feeder.start(self.nats_url)
        self._bus = await Bus.connect(self.nats_url, name="rig")
        self._reader = asyncio.create_task(self._read())

    async def close(self) -> None:
        for replica in self._replicas:
            await replica.close()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self.backends.close()
        await self.feed.close()
        await self._bus.close()
        self.check_reader()

    def check_reader(self) -> None:
        if self._reader is not None and self._reader.done() and not self._reader.cancelled():
            self._reader.result()

    def env(self, extra: Mapping[str, str]) -> dict[str, str]:
        return {
            "LBLEDGER_NATS_URL": self.nats_url,
            "LBLEDGER_DATABASE_URL": self.database_url,
            "LBLEDGER_PROJECTOR_TAKEOVER_POLL_S": "0.02",
            "LBLEDGER_PROBER_DIAL_MAP": DIAL_MAP,
            "LBLEDGER_PROBER_SECOND_S": str(SECOND_S),
            "LBLEDGER_HEALTH_PORT": "-1",
            **extra,
        }

    async def start(self, **extra: str) -> Replica:
        """A prober within this process."""
        replica = Replica(self.env(extra))
        self._replicas.append(replica)
        return replica

    async def spawn(self, **extra: str) -> Process:
        """A prober as a process of its own, to be killed."""
        process = Process(self.env(extra))
        self._replicas.append(process)
        return process

    async def synced(self) -> None:
        await self.feed.synced(*KINDS)

    # --- what came out ---

    async def _read(self) -> None:
        puller = self._bus.puller("LB", start_seq=1, filters=("lb.backends.>", "lb.health.>"))
        while True:
            for message in await puller.fetch(500, 0.5):
                self._take(message)

    def _take(self, message: Message) -> None:
        event = events.decode(message.data)
        uid = event.owner.uid
        before = self.images.get(uid)
        if isinstance(event, events.BackendsResolved):
            image = event
        else:
            assert isinstance(event, events.HealthChanged)
            assert before is not None, "a change of health before the first image"
            image = fold(before, event)
        expected = before.revision + 1 if before is not None else 1
        assert image.revision == expected, f"revision {image.revision}, not {expected}"
        check_image(image)
        self.images[uid] = image
        self.log.append(event)
        self.causes.append(message.headers.get("Lb-Cause", ""))

    def image(self, name: str = "web") -> events.BackendsResolved | None:
        self.check_reader()
        return self.images.get(f"uid-{name}")

    async def until(self, name: str = "web", timeout: float = 60.0, **wanted: object):
        """Wait for an image: ready=, unready=, states=, dummy=, reason=, ... compared by value."""

        def there() -> bool:
            image = self.image(name)
            assert image is not None, f"no image of {name}"
            for key, value in wanted.items():
                found = seen_as(image, key)
                assert found == value, f"{key} is {found!r}, not {value!r}"
            return True

        await eventually(there, timeout=timeout)
        return self.image(name)

    def states(self, name: str) -> list[str]:
        """Every state that was published of this backend, in order, without repetition."""
        states: list[str] = []
        for event in self.log:
            if isinstance(event, events.BackendsResolved):
                found = [b.state for b in event.backends if b.name == name]
            else:
                found = [c.state for c in event.changes if c.uid == f"uid-{name}"]
            states += [state for state in found if not states or states[-1] != state]
        return states


def seen_as(image: events.BackendsResolved, key: str) -> object:
    if key == "ready":
        return [b.name for b in image.backends if b.ready]
    if key == "unready":
        return [b.name for b in image.backends if not b.ready]
    if key == "names":
        return [b.name for b in image.backends]
    if key == "states":
        return {b.name: b.state for b in image.backends}
    return getattr(image, key)


def check_image(image: events.BackendsResolved) -> None:
    """What must hold for every slice at every instant."""
    for family in image.families or ["IPv4"]:
        ready = any(b.ready and (":" in b.address) == (family == "IPv6") for b in image.backends)
        dummy = image.dummy6 if family == "IPv6" else image.dummy
        assert bool(dummy) != ready, f"{family}: dummy {dummy!r} beside ready={ready}"
    order = [(b.namespace, b.name, b.address) for b in image.backends]
    assert order == sorted(order)


class Replica:
    def __init__(self, env: Mapping[str, str]) -> None:
        self.rt = Runtime.create("prober", config.load(env))
        self.task = asyncio.create_task(main.run(self.rt))

    async def close(self) -> None:
        self.rt.stop.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(self.task, 10)
        await self.rt.close()


_PROGRAM = """
import sys
from services.kit import config
from services.kit.runtime import run_service
from services.prober.main import run
sys.exit(run_service("prober", run, config.load()))
"""


class Process:
    def __init__(self, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            env={**os.environ, **env},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    async def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            await asyncio.to_thread(self._process.wait, 15)


@contextlib.asynccontextmanager
async def rig_of(nats_url: str, database_url: str) -> AsyncIterator[Rig]:
    rig = Rig(nats_url, database_url)
    await rig.open()
    try:
        yield rig
    finally:
        await rig.close()


def changed(obj: objects.AnyObject, **spec: object):
    """The same load balancer with another spec, one generation on."""
    meta = msgspec.structs.replace(obj.metadata, generation=obj.metadata.generation + 1)
    return msgspec.structs.replace(
        obj, metadata=meta, spec=msgspec.structs.replace(obj.spec, **spec)
    )
