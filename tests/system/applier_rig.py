"""A running applier for tests: a Kubernetes API on loopback, a real watcher, and decisions on the
LB stream as the allocator, the prober and nrp_sync would put them there.

`Stage` is everything at once. Decisions name owners by what the API server made of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from sandbox.kube import KubeServer
from schema import events, subjects
from services.applier.main import run
from services.kit.bus import Bus
from services.kit.config import (
    ApplierSettings,
    DatabaseSettings,
    HealthSettings,
    KubeSettings,
    NatsSettings,
    ProjectorSettings,
    Secret,
    Settings,
)
from services.kit.kube import Kube, KubeError, NotFound, Resource
from services.kit.runtime import Runtime
from tests.contracts import kube_crds
from tests.system.watcher_rig import CRD, LB, POOL, SERVICE, SLICE, watching
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
EVENT = Resource("events.k8s.io", "v1", "events")
GROUP = "loadbalancer.harvesterhci.io"
DUMMY = "192.0.0.8"
numbers = itertools.count(1)


def our_definitions(*, status: bool = True) -> list[dict[str, Any]]:
    """Our CRDs, with or without status as a subresource."""
    made = []
    for name in ("loadbalancers", "ippools"):
        definition = yaml.safe_load((ROOT / "schema" / "crds" / f"{name}.yaml").read_text())
        if not status:
            definition["spec"]["versions"][0]["subresources"] = {}
        made.append(definition)
    return made


FORMS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "ours": our_definitions,
    "ours-without-subresource": lambda: our_definitions(status=False),
    "harvester": lambda: kube_crds.definitions(GROUP, status=False),
}


def now() -> datetime:
    return datetime.now(UTC)


class Stage:
    def __init__(self, api: KubeServer, kube: Kube, bus: Bus, settings: Settings) -> None:
        self.api, self.kube, self.bus, self.settings = api, kube, bus, settings
        self._publisher = bus.publisher("LB")
        self._revisions: dict[str, int] = {}
        self.rt: Runtime | None = None
        self._task: asyncio.Task[None] | None = None

    # --- the applier ---

    def start(self) -> None:
        self.rt = Runtime.create("applier", self.settings)
        self._task = asyncio.create_task(run(self.rt))

    async def stop(self) -> None:
        if self.rt is None or self._task is None:
            return
        self.rt.stop.set()
        async with asyncio.timeout(12):
            await asyncio.gather(self._task, return_exceptions=True)
        await self.rt.close()
        task, self._task, self.rt = self._task, None, None
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()  # type: ignore[misc]

    def spawn(self) -> subprocess.Popen[bytes]:
        """The applier as a process of its own, to be killed."""
        kube = self.settings.kube
        env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("LBLEDGER_")},
            "LBLEDGER_NATS_URL": self.settings.nats.url,
            "LBLEDGER_DATABASE_URL": self.settings.database.url.reveal(),
            "LBLEDGER_KUBE_KUBECONFIG": kube.kubeconfig,
            "LBLEDGER_HEALTH_PORT": "-1",
            "LBLEDGER_PROJECTOR_TAKEOVER_POLL_S": "0.05",
            "PYTHONPATH": str(ROOT),
        }
        code = (
            "from services.kit import config, runtime; from services.applier.main import run; "
            "raise SystemExit(runtime.run_service('applier', run, config.load()))"
        )
        return subprocess.Popen([sys.executable, "-c", code], env=env, cwd=ROOT)

    # --- objects ---

    async def create(self, resource: Resource, body: dict[str, Any]) -> events.Owner:
        meta = body["metadata"]
        made = msgspec.json.decode(
            await self.kube.create(resource.path(meta.get("namespace", "")), body)
        )
        return events.Owner(
            plural=resource.plural,
            namespace=meta.get("namespace", ""),
            name=meta["name"],
            uid=made["metadata"]["uid"],
        )

    async def balancer(self, name: str, **spec: Any) -> events.Owner:
        return await self.create(LB, balancer(name, **spec))

    async def get(self, resource: Resource, name: str, namespace: str = "default") -> Any:
        """An object as plain data, None when there is none."""
        try:
            body = await self.kube.get(
                resource.path(namespace if resource.namespaced else "", name)
            )
        except NotFound:
            return None
        return msgspec.json.decode(body)

    async def status(self, owner: events.Owner) -> dict[str, Any]:
        resource = {"loadbalancers": LB, "services": SERVICE, "ippools": POOL}[owner.plural]
        found = await self.get(resource, owner.name, owner.namespace)
        status: dict[str, Any] = (found or {}).get("status") or {}
        return status

    async def condition(self, owner: events.Owner, type_: str = "Ready") -> dict[str, Any]:
        status = await self.status(owner)
        for condition in status.get("conditions") or []:
            if condition["type"] == type_:
                found: dict[str, Any] = condition
                return found
        return {}

    async def settles(self, owner: events.Owner, reason: str, type_: str = "Ready") -> Any:
        """Wait for a reason of a condition."""

        async def there() -> Any:
            found = await self.condition(owner, type_)
            assert found.get("reason") == reason, (found, await self.status(owner))
            return found

        return await eventually(there, 15, message=f"{owner.name}: {type_} {reason}")

    # --- decisions ---

    async def say(self, event: events.Event) -> int:
        headers = {subjects.HEADER_EPOCH: "lb", subjects.HEADER_TYPE: events.tag_of(event)}
        done = await self._publisher.publish(
            events.subject_of(event),
            events.encode(event),
            headers,
            msg_id=f"stage:{os.getpid()}:{next(numbers)}",
        )
        return done.seq

    async def granted(self, owner: events.Owner, address: str, pool: str = "p1") -> str:
        lease = f"lease-{next(numbers)}"
        await self.say(
            events.LeaseGranted(
                at=now(),
                owner=owner,
                lease=lease,
                address=address,
                pool=pool,
                mask="255.255.255.0",
                gateway="192.0.2.1",
            )
        )
        return lease

    async def released(self, owner: events.Owner, lease: str, address: str) -> None:
        await self.say(
            events.LeaseReleased(
                at=now(), owner=owner, lease=lease, address=address, pool="p1", reason="test"
            )
        )

    async def refused(self, owner: events.Owner, reason: str, message: str) -> None:
        await self.say(events.LeaseRefused(at=now(), owner=owner, reason=reason, message=message))

    async def resolved(self, owner: events.Owner, *backends: events.Backend, **more: Any) -> None:
        """An image of the backends; the dummy stands in while none is ready."""
        fields: dict[str, Any] = {
            "ports": [events.SlicePort(name="http", port=8080)],
            "matched": len(backends),
            "dummy": "" if any(b.ready for b in backends) else DUMMY,
        }
        await self.say(
            events.BackendsResolved(
                at=now(),
                owner=owner,
                revision=self._next(owner),
                generation=1,
                backends=list(backends),
                **(fields | more),
            )
        )

    async def verdict(
        self, owner: events.Owner, backend: events.Backend, ready: bool, dummy: str = ""
    ) -> None:
        change = events.HealthChange(
            uid=backend.uid,
            address=backend.address,
            state="healthy" if ready else "unhealthy",
            ready=ready,
            reason="" if ready else "connection refused",
        )
        await self.say(
            events.HealthChanged(
                at=now(),
                owner=owner,
                revision=self._next(owner),
                changes=[change],
                healthy=int(ready),
                total=1,
                dummy=dummy,
            )
        )

    async def accounted(self, pool: events.Owner, total: int, available: int, **more: Any) -> None:
        await self.say(
            events.PoolAccounted(
                at=now(), pool=pool.name, uid=pool.uid, total=total, available=available, **more
            )
        )

    async def vm(self, name: str, address: str, **spec: Any) -> events.Owner:
        """A load balancer with one ready backend, brought to Ready."""
        owner = await self.balancer(name, **spec)
        await self.granted(owner, address)
        await self.resolved(owner, backend("vm1", "10.52.1.7"))
        await self.settles(owner, "Ready")
        return owner

    def _next(self, owner: events.Owner) -> int:
        self._revisions[owner.uid] = self._revisions.get(owner.uid, 0) + 1
        return self._revisions[owner.uid]

    # --- what was written ---

    def writes(self) -> dict[str, int]:
        """Writes since the last forget(), by what was written; Kubernetes Events aside."""
        return {
            f"{verb} {place}": count
            for (verb, place), count in sorted(self.api.faults.counts.items())
            if verb not in ("get", "list", "watch") and place != "events" and count
        }

    def forget(self) -> None:
        self.api.faults.counts.clear()

    async def still(self, seconds: float = 0.6) -> None:
        """Let every write that could come of what was done come: none is new for some time."""
        before: dict[str, int] = {}
        quiet = 0.0
        async with asyncio.timeout(30):
            while quiet < seconds:
                await asyncio.sleep(0.1)
                writes = self.writes()
                quiet = quiet + 0.1 if writes == before else 0.0
                before = writes

    async def outcomes(self, owner: events.Owner) -> list[events.Applied]:
        subject = subjects.object_subject("lb.applied", owner.ref)
        return [e for e in await self._read(subject) if isinstance(e, events.Applied)]

    async def _read(self, subject: str) -> list[Any]:
        state = await self.bus.stream_state("LB")
        puller = self.bus.puller("LB", start_seq=1, filters=(subject,), name="stage")
        found: list[Any] = []
        try:
            while batch := await puller.fetch(500, 0.2):
                found += [events.decode(m.data) for m in batch if m.seq <= state.last_seq]
        finally:
            await puller.close()
        return found

    async def close(self) -> None:
        await self._publisher.close()


def balancer(name: str, **spec: Any) -> dict[str, Any]:
    listeners = [{"name": "http", "port": 80, "protocol": "TCP", "backendPort": 8080}]
    return {
        "apiVersion": f"{GROUP}/v1beta1",
        "kind": "LoadBalancer",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"workloadType": "vm", "ipam": "pool", "listeners": listeners, **spec},
    }


def ticket(name: str, class_: str = "lbledger.io/pool") -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "type": "LoadBalancer",
            "loadBalancerClass": class_,
            "ports": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080}],
        },
    }


def pool(name: str) -> dict[str, Any]:
    return {
        "apiVersion": f"{GROUP}/v1beta1",
        "kind": "IPPool",
        "metadata": {"name": name},
        "spec": {"ranges": [{"subnet": "192.0.2.0/24"}]},
    }


def backend(name: str, address: str, *, ready: bool = True, **more: Any) -> events.Backend:
    return events.Backend(
        namespace="default",
        name=name,
        uid=f"uid-{name}",
        address=address,
        ready=ready,
        **({"state": "unchecked" if ready else "unhealthy"} | more),
    )


@contextlib.asynccontextmanager
async def stage(
    nats_url: str,
    database_url: str,
    folder: Path,
    *,
    form: str = "ours",
    started: bool = True,
    **applier: Any,
) -> AsyncIterator[Stage]:
    """The API server with our kinds, a synced watcher, and (unless told otherwise) an applier."""
    async with KubeServer() as api:
        kubeconfig = api.write_kubeconfig(folder / "kubeconfig")
        settings = Settings(
            nats=NatsSettings(url=nats_url),
            database=DatabaseSettings(url=Secret(database_url)),
            kube=KubeSettings(kubeconfig=str(kubeconfig)),
            health=HealthSettings(port=-1),
            projector=ProjectorSettings(takeover_poll_s=0.05),
            # Echoes are waited for as long as a busy machine may need: counts are exact here.
            applier=ApplierSettings(**({"echo_s": 5.0} | applier)),
        )
        async with await Kube.connect(str(kubeconfig)) as kube:
            for definition in FORMS[form]():
                await kube.create(CRD.path(), definition)
            async with watching(nats_url, kubeconfig) as watcher:
                await watcher.synced()
                await watcher.bus.ensure_stream(subjects.LB)
                made = Stage(api, kube, watcher.bus, settings)
                if started:
                    made.start()
                try:
                    yield made
                finally:
                    await made.stop()
                    await made.close()


async def gone(stage: Stage, resource: Resource, name: str) -> None:
    await eventually(lambda: _absent(stage, resource, name), 10, message=f"{name} to be gone")


async def _absent(stage: Stage, resource: Resource, name: str) -> bool:
    return await stage.get(resource, name) is None


__all__ = ["LB", "POOL", "SERVICE", "SLICE", "KubeError", "Stage", "stage"]
