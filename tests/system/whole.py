"""The whole system for tests: every service as a process, the sandbox's API server and provider,
NATS and Postgres of its own, started once per run.

`Whole` is the machine: what may be killed, restarted and put right again. `Space` is one test's
corner of it: a namespace, a network 10.N/16 of backends (dialled as 127.N/16), and the addresses
198.18.N/24 for its pools. A second of a health check lasts a tenth of one. Whatever a test does to
the machine is undone before the next test begins, and a space that is left must leave no lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import asyncpg

from sandbox.child import Child
from sandbox.stack import KUBE_TOKEN, SERVICES, Stack
from tests import infra
from tests.backends import Backends, free_port
from tests.waiting import eventually

GROUP: Final = "loadbalancer.harvesterhci.io"
DUMMY: Final = "192.0.0.8"
SETTLE_S: Final = 30.0
SECOND_S: Final = 0.1
SETTINGS: Final = {
    "LBLEDGER_PROBER_SECOND_S": str(SECOND_S),
    "LBLEDGER_PROJECTOR_TAKEOVER_POLL_S": "0.05",
    "LBLEDGER_PROJECTOR_BEAT_S": "0.3",
    "LBLEDGER_WATCHER_RELIST_JITTER_S": "0.05",
    "LBLEDGER_WATCHER_ABSENT_POLL_S": "0.5",
    "LBLEDGER_WATCHER_CHECK_S": "0.3",
    "LBLEDGER_WATCHER_IDLE_S": "5",
    "LBLEDGER_ALLOCATOR_GRACE_S": "2",
    "LBLEDGER_APPLIER_POOL_STATUS_S": "0.1",
    "LBLEDGER_NRP_QUIET_S": "0.05",
    "LBLEDGER_NRP_LATENCY_S": "0.3",
    "LBLEDGER_NRP_INTERVAL_S": "0.02",
    "LBLEDGER_NRP_RETRY_FIRST_S": "0.1",
    "LBLEDGER_NRP_RETRY_CAP_S": "1",
    "LBLEDGER_NRP_PARK_S": "2",
    "LBLEDGER_NRP_ORPHAN_GRACE_S": "0.5",
    "LBLEDGER_NRP_READ_INTERVAL_S": "5",
    "LBLEDGER_NRP_REQUEST_TIMEOUT_S": "3",
    "LBLEDGER_LOG_FORMAT": "json",
}
# kind: prefix of the path, plural, namespaced
KINDS: Final = {
    "LoadBalancer": (f"/apis/{GROUP}/v1beta1", "loadbalancers", True),
    "IPPool": (f"/apis/{GROUP}/v1beta1", "ippools", False),
    "VirtualMachineInstance": ("/apis/kubevirt.io/v1", "virtualmachineinstances", True),
    "VirtualMachine": ("/apis/kubevirt.io/v1", "virtualmachines", True),
    "Service": ("/api/v1", "services", True),
    "ConfigMap": ("/api/v1", "configmaps", True),
    "Pod": ("/api/v1", "pods", True),
    "Node": ("/api/v1", "nodes", False),
    "Namespace": ("/api/v1", "namespaces", False),
    "EndpointSlice": ("/apis/discovery.k8s.io/v1", "endpointslices", True),
    "Event": ("/apis/events.k8s.io/v1", "events", True),
}
API_VERSION: Final = {
    kind: "/".join(prefix.split("/")[2:]) for kind, (prefix, _, _) in KINDS.items()
}
MERGE: Final = "application/merge-patch+json"
_numbers = itertools.count(20)


class Refused(Exception):
    """The API server's answer to a request that it does not take."""

    def __init__(self, code: int, body: Mapping[str, Any]) -> None:
        super().__init__(f"{code} {body.get('message', body)}")
        self.code = code
        self.message = str(body.get("message", ""))


class Whole:
    """The machine. Nothing here is bound to an event loop, so tests may come and go."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.folder = folder
        self.nats = infra.nats_server(mode)
        self.postgres = infra.postgres_server(mode)
        self.port = free_port()  # of every backend
        self.announcer = "none"
        self._per_service: dict[str, dict[str, str]] = {"applier": {}}
        self.stack: Stack

    async def start(self) -> None:
        await asyncio.gather(self.nats.start(), self.postgres.start())
        servers = {
            "LBLEDGER_NATS_URL": self.nats.url,
            "LBLEDGER_DATABASE_URL": self.postgres.url,
        }
        self.stack = Stack(
            state=self.folder / "state",
            settings={**SETTINGS, **servers},
            per_service=self._per_service,
        )
        await self.stack.start()

    async def stop(self) -> None:
        await self.stack.stop()
        await self.nats.stop()
        await self.postgres.stop()

    # --- trouble ---

    async def kill(self, name: str) -> None:
        """SIGKILL to a service or a development server."""
        child: Child = self.stack.child(name)
        child.send(signal.SIGKILL)
        await child.wait(10)

    async def end(self, name: str) -> int | None:
        """SIGTERM; returns the exit code."""
        child = self.stack.child(name)
        await child.stop((signal.SIGTERM, 11.0))
        return child.exit_code

    async def respawn(self, name: str) -> None:
        self.stack.spawn(name)

    async def announce_by(self, announcer: str) -> None:
        """Restart the applier for another announcer."""
        if self.announcer == announcer:
            return
        self.announcer = announcer
        self._per_service["applier"]["LBLEDGER_APPLIER_ANNOUNCER"] = announcer
        await self.end("applier")
        self.stack.spawn("applier")
        await self.stack.service_ready("applier")

    async def heal(self, announcer: str = "none") -> None:
        """Put right what the test before did: no faults, everything runs, everything is ready."""
        for server in (self.nats, self.postgres):
            if not server.running:
                await server.start()
        for name, restart in (
            ("kube", self.stack.restart_kube),
            ("nrp", self.stack.restart_provider),
        ):
            if self.stack.child(name).exit_code is not None:
                await restart()
        async with aiohttp.ClientSession() as http:
            headers = {"Authorization": f"Bearer {KUBE_TOKEN}"}
            await http.delete(f"{self.stack.kube_url}/sandbox/faults", headers=headers)
            await http.delete(f"{self.stack.provider['url']}/sandbox/faults")
        for name in SERVICES:
            if self.stack.child(name).exit_code is not None:
                self.stack.spawn(name)
        await self.announce_by(announcer)
        await self.ready()

    async def ready(self, timeout: float = 60.0) -> None:
        await asyncio.gather(*(self.stack.service_ready(name, timeout) for name in SERVICES))

    # --- looking ---

    async def rows(self, query: str, *args: object) -> list[asyncpg.Record]:
        connection = await asyncpg.connect(self.postgres.url)
        try:
            return await connection.fetch(query, *args)
        finally:
            await connection.close()

    def environment(self) -> dict[str, str]:
        """What a looking command needs to find this system, and nothing of the caller's."""
        ours = {k: v for k, v in os.environ.items() if not k.startswith("LBLEDGER_")}
        return {**ours, **self.stack.env}


class Api:
    """Objects over HTTP, with a bearer token, as any client of the cluster would."""

    def __init__(self, whole: Whole, http: aiohttp.ClientSession) -> None:
        self._whole, self._http = whole, http

    async def send(
        self, verb: str, path: str, body: Any = None, content_type: str = "application/json"
    ) -> dict[str, Any]:
        """One request; Refused says what the server said against it."""
        headers = {"Authorization": f"Bearer {KUBE_TOKEN}", "Content-Type": content_type}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        async with self._http.request(
            verb, self._whole.stack.kube_url + path, data=data, headers=headers
        ) as reply:
            raw = await reply.read()
            try:
                answer = json.loads(raw)
            except ValueError:
                answer = {"message": raw.decode(errors="replace")}
            if reply.status >= 400:
                raise Refused(reply.status, answer)
            return dict(answer)

    async def get(self, kind: str, name: str, namespace: str = "") -> dict[str, Any] | None:
        try:
            return await self.send("GET", path_of(kind, namespace, name))
        except Refused as error:
            if error.code == 404:
                return None
            raise

    async def list(self, kind: str, namespace: str = "", query: str = "") -> list[dict[str, Any]]:
        found = await self.send("GET", path_of(kind, namespace) + query)
        return list(found["items"])

    async def create(self, body: dict[str, Any]) -> dict[str, Any]:
        kind = body["kind"]
        body = {"apiVersion": API_VERSION[kind], **body}
        return await self.send("POST", path_of(kind, body["metadata"].get("namespace", "")), body)

    async def merge(
        self, kind: str, name: str, namespace: str, patch: Any, subresource: str = ""
    ) -> dict[str, Any]:
        path = path_of(kind, namespace, name) + (f"/{subresource}" if subresource else "")
        return await self.send("PATCH", path, patch, MERGE)

    async def delete(self, kind: str, name: str, namespace: str = "") -> None:
        """Gone already is as good."""
        try:
            await self.send("DELETE", path_of(kind, namespace, name))
        except Refused as error:
            if error.code != 404:
                raise

    async def sandbox(self, verb: str, page: str, body: Any = None) -> dict[str, Any]:
        """The API server's own door: faults, cuts, counts."""
        return await self.send(verb, f"/sandbox/{page}", body)

    async def provider(self, verb: str, page: str, body: Any = None) -> dict[str, Any]:
        url = f"{self._whole.stack.provider['url']}/sandbox/{page}"
        async with self._http.request(verb, url, json=body) as reply:
            return dict(await reply.json())

    async def readiness(self, service: str) -> tuple[bool, str]:
        """Whether a service says that it is ready, and what it says of the parts that are not."""
        url = f"{self._whole.stack.health_url(service)}/readyz"
        async with self._http.get(url) as reply:
            parts = (await reply.json())["parts"]
            why = "; ".join(f"{k}: {v['why']}" for k, v in parts.items() if not v["ready"])
            return reply.status == 200, why

    async def watch(
        self, kind: str, namespace: str = "", version: str = ""
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """(type, object), until the server ends it or says nothing for a while."""
        headers = {"Authorization": f"Bearer {KUBE_TOKEN}"}
        url = f"{self._whole.stack.kube_url}{path_of(kind, namespace)}"
        query = {"watch": "1", **({"resourceVersion": version} if version else {})}
        # A watch may be hung on order: after a silence the caller resumes where it stood.
        timeout = aiohttp.ClientTimeout(total=None, sock_read=3)
        async with self._http.get(url, params=query, headers=headers, timeout=timeout) as reply:
            if reply.status >= 400:
                raise Refused(reply.status, {"message": await reply.text()})
            async for line in reply.content:
                event = json.loads(line)
                yield event["type"], event["object"]


def path_of(kind: str, namespace: str = "", name: str = "") -> str:
    prefix, plural, namespaced = KINDS[kind]
    middle = f"/namespaces/{namespace}" if namespaced and namespace else ""
    return f"{prefix}{middle}/{plural}" + (f"/{name}" if name else "")


class Space:
    """A namespace of one test, with shorthands for what tests do most."""

    def __init__(self, whole: Whole, http: aiohttp.ClientSession) -> None:
        self.whole = whole
        self.number = next(_numbers)
        assert self.number < 255, "out of networks: share a space between more cases"
        self.name = f"t{self.number}"
        self.api = Api(whole, http)
        self.backends = Backends()
        self.port = whole.port
        self.pools: list[str] = []
        self.nodes: list[str] = []
        self.vip: Any = None  # the announcer's stand-in, where a test has one
        self._vms = itertools.count(1)

    async def open(self) -> None:
        await self.api.create({"kind": "Namespace", "metadata": {"name": self.name}})

    async def close(self) -> None:
        """Leave nothing: no object, no listener, and the ledger knows it too."""
        await self.backends.close()
        for kind in ("LoadBalancer", "Service", "VirtualMachineInstance"):
            for found in await self.api.list(kind, self.name):
                await self.api.delete(kind, found["metadata"]["name"], self.name)
        await self.api.delete("Namespace", self.name)
        await eventually(self._left, SETTLE_S, message=f"nothing is left of {self.name}")
        for pool in self.pools:
            await self.api.delete("IPPool", pool)
        for node in self.nodes:
            await self.api.delete("Node", node)

    async def _left(self) -> bool:
        held = await self.whole.rows(
            "select name, host(address) from allocator.lease"
            " where namespace = $1 and upper_inf(during)",
            self.name,
        )
        assert not held, f"leases of {self.name} without an owner: {held}"
        left = await self.api.get("Namespace", self.name)
        assert left is None, left
        return True

    # --- objects ---

    def address(self, number: int) -> str:
        """Of a backend, as objects have it."""
        return f"10.{self.number}.0.{number}"

    def dialled(self, address: str) -> str:
        return "127." + address.removeprefix("10.")

    def pooled(self, number: int) -> str:
        """An address for pools."""
        return f"198.18.{self.number}.{number}"

    async def pool(
        self, first: int = 10, last: int = 29, *, name: str = "p", scope: Any = None, **spec: Any
    ) -> str:
        """A pool of some addresses for this namespace; returns its name."""
        name = f"{self.name}-{name}"
        ours = [{"project": "*", "namespace": self.name, "guestCluster": "*"}]
        spec.setdefault(
            "ranges",
            [
                {
                    "subnet": self.pooled(0) + "/24",
                    "rangeStart": self.pooled(first),
                    "rangeEnd": self.pooled(last),
                    "gateway": self.pooled(1),
                }
            ],
        )
        selector = {**spec.pop("selector", {}), "scope": ours if scope is None else scope}
        self.pools.append(name)
        await self.api.create(
            {"kind": "IPPool", "metadata": {"name": name}, "spec": {**spec, "selector": selector}}
        )
        return name

    async def balancer(
        self,
        name: str = "web",
        *,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        **spec: Any,
    ) -> dict[str, Any]:
        """A load balancer with one TCP listener, of the virtual machines with app=<its name>."""
        whole = {
            "listeners": [self.listener()],
            "backendServerSelector": {"app": [name]},
            **spec,
        }
        metadata = {"name": name, "namespace": self.name}
        metadata |= {"labels": dict(labels)} if labels else {}
        metadata |= {"annotations": dict(annotations)} if annotations else {}
        shown = {key: value for key, value in whole.items() if value is not None}
        return await self.api.create({"kind": "LoadBalancer", "metadata": metadata, "spec": shown})

    def listener(self, name: str = "http", port: int = 80, **more: Any) -> dict[str, Any]:
        return {"name": name, "port": port, "protocol": "TCP", "backendPort": self.port, **more}

    def check(self, *, failure: int = 2, **more: Any) -> dict[str, Any]:
        """A health check of the backends' port, quick and not nervous."""
        return {
            "port": self.port,
            "successThreshold": 1,
            "failureThreshold": failure,
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            **more,
        }

    async def vm(
        self, app: str = "web", *, name: str = "", address: str | None = None, answers: bool = False
    ) -> str:
        """A running virtual machine; returns its address ("" for one without)."""
        number = next(self._vms)
        found = self.address(number) if address is None else address
        await self.api.create(
            {
                "kind": "VirtualMachineInstance",
                "metadata": {
                    "name": name or f"vm{number}",
                    "namespace": self.name,
                    "labels": {"app": app},
                },
                "spec": {},
                "status": {
                    "phase": "Running",
                    "nodeName": "node-1",
                    "interfaces": [{"name": "default", **({"ipAddress": found} if found else {})}],
                },
            }
        )
        if answers:
            await self.answer(found)
        return found

    async def stop_vm(self, name: str) -> None:
        await self.api.delete("VirtualMachineInstance", name, self.name)

    async def service(self, name: str, class_: str = "lbledger.io/pool", **spec: Any) -> None:
        await self.api.create(
            {
                "kind": "Service",
                "metadata": {"name": name, "namespace": self.name},
                "spec": {
                    "type": "LoadBalancer",
                    "loadBalancerClass": class_,
                    "ports": [{"name": "http", "port": 80, "targetPort": self.port}],
                    **spec,
                },
            }
        )

    async def pods(self, service: str, *numbers: int, node: str = "n1") -> None:
        """The slice of a Service of the provider: pods 10.N.9.<number> on one node."""
        node = await self.node(node)
        name = f"{service}-{node}"
        endpoints = [
            {
                "addresses": [self.pod(number)],
                "conditions": {"ready": True},
                "nodeName": node,
                "targetRef": {"kind": "Pod", "namespace": self.name, "name": f"p{number}"},
            }
            for number in numbers
        ]
        if await self.api.get("EndpointSlice", name, self.name) is not None:
            patch = {"endpoints": endpoints}
            await self.api.merge("EndpointSlice", name, self.name, patch)
            return
        await self.api.create(
            {
                "kind": "EndpointSlice",
                "metadata": {
                    "name": name,
                    "namespace": self.name,
                    "labels": {"kubernetes.io/service-name": service},
                },
                "addressType": "IPv4",
                "ports": [{"name": "http", "port": self.port, "protocol": "TCP"}],
                "endpoints": endpoints,
            }
        )

    async def node(self, name: str) -> str:
        """A node of this space, made the first time; returns its name in the cluster."""
        name = f"{self.name}-{name}"
        if name not in self.nodes:
            internal = f"10.{self.number}.8.{len(self.nodes) + 1}"
            addresses = [{"type": "InternalIP", "address": internal}]
            status = {"addresses": addresses}
            await self.api.create({"kind": "Node", "metadata": {"name": name}, "status": status})
            self.nodes.append(name)
        return name

    def pod(self, number: int) -> str:
        return f"10.{self.number}.9.{number}"

    async def provided(self, service: str) -> set[str]:
        """The addresses of a Service that the provider holds, wherever they are."""
        found = await self.api.get("Service", service, self.name)
        assert found is not None, f"no service {service}"
        return provided(await self.api.provider("GET", "state"), found["metadata"]["uid"])

    async def provider_has(self, service: str, *numbers: int, timeout: float = SETTLE_S) -> None:
        wanted = {self.pod(number) for number in numbers}

        async def equal() -> bool:
            found = await self.provided(service)
            assert found == wanted, found
            return True

        await eventually(equal, timeout, message=f"the provider holds {sorted(wanted)}")

    async def edit(self, name: str, **spec: Any) -> dict[str, Any]:
        return await self.api.merge("LoadBalancer", name, self.name, {"spec": spec})

    async def delete(self, name: str, kind: str = "LoadBalancer") -> None:
        await self.api.delete(kind, name, self.name)

    # --- listeners behind the addresses ---

    async def answer(self, address: str) -> None:
        await self.backends.answer(self.dialled(address), self.port)

    async def refuse(self, address: str) -> None:
        await self.backends.refuse(self.dialled(address), self.port)

    # --- what became of it ---

    async def status(self, name: str) -> dict[str, Any]:
        found = await self.api.get("LoadBalancer", name, self.name)
        assert found is not None, f"no load balancer {name}"
        return dict(found.get("status") or {})

    async def becomes(
        self,
        name: str,
        ready: str,
        message: str | None = None,
        *,
        also: Callable[[dict[str, Any]], object] | None = None,
        timeout: float = SETTLE_S,
    ) -> dict[str, Any]:
        """Wait for the Ready condition (with a message that holds this text) and whatever `also`
        asks of the status; returns the status."""

        async def settled() -> dict[str, Any]:
            status = await self.status(name)
            found = condition(status)
            assert found.get("status") == ready, status
            assert message is None or message in found["message"], status
            assert also is None or also(status), status
            return status

        return await eventually(settled, timeout, message=f"{name}: Ready={ready} {message or ''}")

    async def endpoints(self, name: str) -> dict[str, bool]:
        """Address to readiness, as the load balancer's slice shows them."""
        found = await self.api.get("EndpointSlice", name, self.name)
        assert found is not None, f"no slice {name}"
        return {
            # Somebody's edit may have left the conditions out, which means ready.
            endpoint["addresses"][0]: endpoint.get("conditions", {}).get("ready", True)
            for endpoint in found.get("endpoints") or []
        }

    async def slice_is(self, name: str, wanted: Mapping[str, bool]) -> None:
        async def equal() -> bool:
            found = await self.endpoints(name)
            assert found == wanted, found
            return True

        await eventually(equal, SETTLE_S, message=f"slice {name} holds {dict(wanted)}")

    async def ingress(self, name: str) -> list[str]:
        found = await self.api.get("Service", name, self.name)
        assert found is not None, f"no service {name}"
        entries = ((found.get("status") or {}).get("loadBalancer") or {}).get("ingress") or []
        return [entry["ip"] for entry in entries]

    async def has_ingress(self, name: str) -> list[str]:
        return await eventually(lambda: self.ingress(name), SETTLE_S, message=f"{name} is served")

    async def leases(self, *names: str) -> dict[str, str]:
        """Who holds what by the ledger, of this namespace: name to address."""
        rows = await self.whole.rows(
            "select name, host(address) as address from allocator.lease"
            " where namespace = $1 and upper_inf(during)",
            self.name,
        )
        found = {row["name"]: row["address"] for row in rows}
        return {name: found.get(name, "") for name in names} if names else found

    async def pool_status(self, name: str) -> dict[str, Any]:
        found = await self.api.get("IPPool", name)
        assert found is not None, f"no pool {name}"
        return dict(found.get("status") or {})

    async def pool_is(self, name: str, **wanted: Any) -> dict[str, Any]:
        """Wait until the pool's status has these values; an absent map is an empty one."""

        async def equal() -> dict[str, Any]:
            status = await self.pool_status(name)
            found = {key: status.get(key, {} if wanted[key] == {} else None) for key in wanted}
            assert found == wanted, status
            return status

        return await eventually(equal, SETTLE_S, message=f"pool {name} shows {wanted}")

    async def goes(self, kind: str, name: str) -> None:
        async def absent() -> bool:
            return await self.api.get(kind, name, self.name) is None

        await eventually(absent, SETTLE_S, message=f"{kind} {name} goes")

    async def quiet(self, seconds: float = 0.5) -> None:
        """Nothing is written for a while: what had to come of what was done has come."""
        last, since = -1, time.monotonic()

        async def still() -> bool:
            nonlocal last, since
            writes = (await self.api.sandbox("GET", "counts"))["writes"]
            if writes != last:
                last, since = writes, time.monotonic()
            return time.monotonic() - since >= seconds

        await eventually(still, SETTLE_S, interval=0.05, message="writes come to an end")


def condition(status: Mapping[str, Any], type_: str = "Ready") -> dict[str, Any]:
    for found in status.get("conditions") or []:
        if found["type"] == type_:
            return dict(found)
    return {}


def provided(state: Mapping[str, Any], uid: str) -> set[str]:
    """The addresses that the provider holds for one service."""
    return {
        address["address"]
        for gateway in state["gateways"].values()
        for location in gateway["addressLocations"]
        for address in location["addresses"]
        if uid in address["services"]
    }


class Change(NamedTuple):
    """What a watch showed. `at` orders changes of several kinds: the version of the object, or of
    the list that it was found in. GAP: from here on nothing is known of the kind, until a list."""

    kind: str
    type: str
    object: dict[str, Any]
    at: int


class Recorder:
    """Every version of some kinds that the API server shows, in order, seen by a watch of our own.

    It resumes where it broke off; where the server's history has gone it lists anew and goes on.
    """

    def __init__(self, api: Api, namespace: str, *kinds: str) -> None:
        self._api, self._namespace, self._kinds = api, namespace, kinds
        self.changes: list[Change] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Recorder:
        for kind in self._kinds:
            version = await self._list(kind)
            self._tasks.append(asyncio.create_task(self._follow(kind, version)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _list(self, kind: str) -> str:
        listed = await self._api.send("GET", path_of(kind, self._namespace))
        version = listed["metadata"]["resourceVersion"]
        last = max((change.at for change in self.changes if change.kind == kind), default=0)
        self.changes.append(Change(kind, "GAP", {}, last))
        for found in listed["items"]:
            self.changes.append(Change(kind, "ADDED", found, int(version)))
        return str(version)

    async def _follow(self, kind: str, version: str) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, ValueError, TimeoutError):
                try:
                    if not version:
                        version = await self._list(kind)
                    async for type_, found in self._api.watch(kind, self._namespace, version):
                        if type_ == "ERROR":
                            version = ""
                            break
                        version = found["metadata"]["resourceVersion"]
                        if type_ != "BOOKMARK":
                            self.changes.append(Change(kind, type_, found, int(version)))
                except Refused as error:
                    version = "" if error.code == 410 else version
            await asyncio.sleep(0.05)

    def of(self, kind: str, name: str = "") -> list[dict[str, Any]]:
        return [
            change.object
            for change in self.changes
            if change.kind == kind
            and change.type != "GAP"
            and name in ("", change.object["metadata"]["name"])
        ]


@contextlib.asynccontextmanager
async def space_of(whole: Whole) -> AsyncIterator[Space]:
    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        space = Space(whole, http)
        await space.open()
        try:
            yield space
        finally:
            await space.close()


async def gather(*waits: Awaitable[Any]) -> list[Any]:
    """All of them, and the first error only after the others ended."""
    found = await asyncio.gather(*waits, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found
