"""A running nrp_sync for tests: real NATS, real Postgres, the sandbox's provider, facts by hand."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import sys
from collections.abc import AsyncIterator

import asyncpg
import msgspec

from sandbox.nrp import NrpServer
from schema import events, objects
from schema.names import EGRESS_LABEL, NRP_CLASS, NRP_FINALIZER, SERVICE_NAME_LABEL
from services.kit import config
from services.kit.bus import Bus
from services.kit.runtime import Runtime
from services.nrp_sync import main
from tests.feeding import Feeder
from tests.waiting import eventually

PLURALS = ("services", "endpointslices", "nodes", "pods")
FAST = {
    "LBLEDGER_NRP_QUIET_S": "0.05",
    "LBLEDGER_NRP_LATENCY_S": "0.3",
    "LBLEDGER_NRP_INTERVAL_S": "0.02",
    "LBLEDGER_NRP_RETRY_FIRST_S": "0.1",
    "LBLEDGER_NRP_ORPHAN_GRACE_S": "0.2",
    "LBLEDGER_PROJECTOR_TAKEOVER_POLL_S": "0.05",
    "LBLEDGER_LOG_LEVEL": "warning",
}


def uid(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


def service(name="web", number=1, *, ports=((80, 8080),), finalizer=True, **over):
    """A Service of our class, as the API server shows it."""
    spec = {
        "type": "LoadBalancer",
        "load_balancer_class": NRP_CLASS,
        "ip_families": ["IPv4"],
        "ports": [objects.ServicePort(port=p, target_port=t) for p, t in ports],
    } | {key: over.pop(key) for key in list(over) if key in objects.ServiceSpec.__struct_fields__}
    return objects.Service(
        metadata=objects.ObjectMeta(
            **{
                "name": name,
                "namespace": "default",
                "uid": uid(number),
                "generation": 1,
                "finalizers": [NRP_FINALIZER] if finalizer else None,
            }
            | over
        ),
        spec=objects.ServiceSpec(**spec),
    )


def endpoint(address, node="n1", **conditions):
    return objects.Endpoint(
        addresses=[address],
        node_name=node,
        conditions=objects.EndpointConditions(**conditions),
    )


def slice_of(name, service_name, endpoints, number=100, **meta):
    """An EndpointSlice; endpoints are addresses on n1, (address, node), or Endpoint structs."""
    made = [
        e if isinstance(e, objects.Endpoint) else endpoint(*([e] if isinstance(e, str) else e))
        for e in endpoints
    ]
    return objects.EndpointSlice(
        metadata=objects.ObjectMeta(
            **{
                "name": name,
                "namespace": "default",
                "uid": uid(number),
                "labels": {SERVICE_NAME_LABEL: service_name},
            }
            | meta
        ),
        address_type="IPv4",
        endpoints=made,
    )


def node(name, *addresses, number=900):
    return objects.Node(
        metadata=objects.ObjectMeta(name=name, uid=uid(number)),
        status=objects.NodeStatus(
            addresses=[objects.NodeAddress(type="InternalIP", address=a) for a in addresses]
        ),
    )


def pod(name, number, label, *addresses, node_name="n1", finalizer=True, phase="Running", **meta):
    return objects.Pod(
        metadata=objects.ObjectMeta(
            **{
                "name": name,
                "namespace": "default",
                "uid": uid(number),
                "labels": {EGRESS_LABEL: label},
                "finalizers": [NRP_FINALIZER] if finalizer else None,
            }
            | meta
        ),
        spec=objects.PodSpec(node_name=node_name),
        status=objects.PodStatus(
            phase=phase, pod_ips=[objects.PodIP(ip=address) for address in addresses] or None
        ),
    )


class Rig:
    """The parts, with shorthands to feed facts and look at the provider."""

    def __init__(self, feeder: Feeder, server: NrpServer, env: dict[str, str]) -> None:
        self.feeder, self.server, self.env = feeder, server, env
        self.applied: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._rt: Runtime | None = None

    async def seen(self, *views: objects.AnyObject) -> None:
        for view in views:
            await self.feeder.seen(view)

    async def synced(self) -> None:
        await self.feeder.synced(*PLURALS)

    # --- the service in this process ---

    async def start(self) -> None:
        importlib.import_module("services.nrp_sync.client")  # seconds, the first time
        self._rt = Runtime.create("nrp_sync", config.load(self.env))
        self._task = asyncio.create_task(main.run(self._rt))

    async def stop(self) -> None:
        if self._task is not None and self._rt is not None:
            self._rt.stop.set()
            await asyncio.wait_for(self._task, 15)
            await self._rt.close()
            self._task = None

    # --- or as a process, to be killed ---

    async def spawn(self) -> asyncio.subprocess.Process:
        code = (
            "import sys; from services.kit import config; from services.kit.runtime import "
            "run_service; from services.nrp_sync.main import run; "
            "sys.exit(run_service('nrp_sync', run, config.load()))"
        )
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, env={"PATH": "/usr/bin:/bin", **self.env}
        )

    # --- the provider ---

    def locations(self) -> dict[str, dict[str, set[str]]]:
        """Location to address to services, as the provider holds them."""
        gateway = self.server.resources.gateway(self.server.gateway_id)
        return {
            location: {address: set(names) for address, names in addresses.items()}
            for location, addresses in gateway.locations.items()
        }

    def addresses(self, number: int) -> set[str]:
        """The addresses of a service at the provider, wherever they are."""
        return {
            address
            for addresses in self.locations().values()
            for address, names in addresses.items()
            if uid(number) in names
        }

    def registered(self) -> set[str]:
        gateway = self.server.resources.gateway(self.server.gateway_id)
        return {name for name, entry in gateway.services.items() if not entry.default}

    def resources(self) -> set[str]:
        """Names of public IPs, load balancers and NAT gateways, the default's left out."""
        kinds = ("publicIPAddresses", "loadBalancers", "natGateways")
        names = {doc["name"] for kind in kinds for doc in self.server.resources.docs[kind].values()}
        return {name for name in names if not name.startswith("default-natgw")}

    def requests(self, *ops: str) -> list[object]:
        return [e for e in self.server.journal.entries if not ops or e.op in ops]

    def changes(self) -> list[object]:
        """Requests that change something."""
        return [e for e in self.server.journal.entries if e.method != "GET"]

    async def settled(self, number: int, *addresses: str, timeout: float = 15.0) -> None:
        await eventually(
            lambda: self.addresses(number) == set(addresses),
            timeout,
            message=f"service {number} at the provider has {sorted(addresses)}",
        )

    # --- rows and events ---

    async def rows(self, query: str, *args: object) -> list[asyncpg.Record]:
        conn = await asyncpg.connect(self.env["LBLEDGER_DATABASE_URL"])
        try:
            return await conn.fetch(query, *args)
        finally:
            await conn.close()

    async def batches(self) -> list[dict[str, dict[str, list[str]]]]:
        """What was sent about addresses, in order: location to address to services."""
        rows = await self.rows(
            "select body from nrp_sync.request where lane = 'locations' order by number"
        )
        return [
            {
                entry["location"]: {
                    item["address"]: list(item["services"]) for item in entry["addresses"]
                }
                for entry in json.loads(row["body"])["payload"]["batch"]["locations"]
            }
            for row in rows
        ]

    async def image(self, name: str) -> events.ProviderStateChanged | None:
        """The last image of a Service, or of a Pod."""
        rows = await self.rows("select image from nrp_sync.told where name = $1", name)
        if not rows:
            return None
        return msgspec.json.decode(rows[0]["image"], type=events.ProviderStateChanged)

    async def reason(
        self, name: str, reason: str, timeout: float = 15.0
    ) -> events.ProviderStateChanged:
        async def told() -> events.ProviderStateChanged | None:
            image = await self.image(name)
            assert image is not None
            assert image.reason == reason, image
            return image

        found = await eventually(told, timeout, message=f"{name} is told {reason}")
        assert found is not None
        return found

    async def events(self, *kinds: type) -> list[events.AnyEvent]:
        """Everything that nrp_sync said so far."""
        found: list[events.AnyEvent] = []
        bus = await Bus.connect(self.env["LBLEDGER_NATS_URL"], name="reader")
        try:
            state = await bus.stream_state("LB")
            puller = bus.puller("LB", start_seq=1, filters=("lb.provider.>",), name="reader")
            while len(found) < state.messages:
                messages = await puller.fetch(500, timeout=0.5)
                if not messages:
                    break
                found += [events.decode(m.data) for m in messages]
            await puller.close()
        finally:
            await bus.close()
        return [e for e in found if not kinds or isinstance(e, kinds)]


@contextlib.asynccontextmanager
async def rig(nats_url: str, database_url: str, **over: str) -> AsyncIterator[Rig]:
    """Everything up but nrp_sync itself."""
    feeder = await Feeder.start(nats_url)
    async with NrpServer() as server:
        env = {
            "LBLEDGER_NATS_URL": nats_url,
            "LBLEDGER_DATABASE_URL": database_url,
            "LBLEDGER_NRP_ENDPOINT": server.url,
            "LBLEDGER_NRP_TOKEN": "sandbox",
            **FAST,
            **over,
        }
        made = Rig(feeder, server, env)
        try:
            yield made
        finally:
            await made.stop()
            await feeder.close()
        assert server.journal.overlaps == [], "two requests at once for one service or location"
