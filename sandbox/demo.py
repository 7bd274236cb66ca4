"""`make demo`: the main job from end to end, on `examples/`, in well under a minute.

Real kubectl applies the examples, real listeners answer the health checks, and then four things
happen: a backend stops, a load balancer is deleted, the one that waited gets the freed address, and
the provider throttles for some seconds while a pod is added.
Exit 0 when every object has settled as expected, 1 with the reason otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from sandbox.child import ServerError
from sandbox.stack import KUBE_TOKEN, Stack
from services.kit import log
from services.kit.bus import Bus
from services.kit.config import LogSettings

EXAMPLES: Final = Path(__file__).parent.parent / "examples"
GROUP: Final = "/apis/loadbalancer.harvesterhci.io/v1beta1"
SETTLE_S: Final = 30.0
# 10.1.0.11 and .12 of examples/cluster, dialled as the sandbox's dial_map says.
BACKENDS: Final = {"web-1": "127.1.0.11", "web-2": "127.1.0.12"}
PORT: Final = 8080
# A pod of the service checkout that is added while the provider throttles.
NEW_POD: Final = "10.244.2.10"
CHECKOUT: Final = "default/checkout"
CHECKOUT_SLICE: Final = "checkout-x7k2p"
THROTTLED_S: Final = 3.0
RETRY_AFTER_S: Final = 2.0


class Unsettled(Exception):
    """Something did not become what the demonstration expects."""


class Cluster:
    """Reading the API server, and waiting for what it shows."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url
        self._http = http

    async def get(self, path: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {KUBE_TOKEN}"}
        async with self._http.get(self._url + path, headers=headers) as reply:
            return dict(msgspec.json.decode(await reply.read()))

    async def until(self, what: str, path: str, test: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until an object fits; Unsettled shows how it was instead."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            found = await self.get(path)
            with contextlib.suppress(KeyError, IndexError, TypeError, StopIteration):
                if test(found):
                    return
            if time.monotonic() > deadline:
                seen = msgspec.json.encode(found.get("status") or found).decode()
                raise Unsettled(f"{what}: not within {SETTLE_S:.0f} s; it is {seen[:600]}")
            await asyncio.sleep(0.05)

    async def lb(self, name: str, what: str, test: Callable[[dict[str, Any]], bool]) -> None:
        await self.until(
            f"load balancer {name}: {what}",
            f"{GROUP}/namespaces/default/loadbalancers/{name}",
            lambda found: test(found["status"]),
        )


def ready(status: dict[str, Any]) -> dict[str, Any]:
    return next(c for c in status["conditions"] if c["type"] == "Ready")


def say(text: str) -> None:
    print(text, flush=True)


async def listen(address: str) -> asyncio.Server:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    return await asyncio.start_server(answer, address, PORT)


@contextlib.asynccontextmanager
async def backends() -> AsyncIterator[dict[str, asyncio.Server]]:
    """The listeners that the virtual machines of the examples stand for."""
    listeners = {name: await listen(address) for name, address in BACKENDS.items()}
    try:
        yield listeners
    finally:
        for server in listeners.values():
            server.close()


async def play(stack: Stack, cluster: Cluster, listeners: dict[str, asyncio.Server]) -> None:
    """The story, step by step."""
    began = time.monotonic()
    say("\n$ kubectl apply -f examples/cluster -f examples/")
    for folder in (EXAMPLES / "cluster", EXAMPLES):
        say((await stack.kubectl("apply", "-f", str(folder))).rstrip())
    await settle(cluster)
    say(f"settled {time.monotonic() - began:.1f} s after the first apply\n")
    say((await stack.cli("lb", "list")).rstrip())

    say("\na backend stops answering: web-2")
    listeners["web-2"].close()
    await cluster.lb(
        "web",
        "keeps one of two backends",
        lambda s: ready(s)["status"] == "True" and _ready_backends(s) == 1,
    )
    say("web stays Ready with one of two backends")

    say("\n$ kubectl delete loadbalancer placeholder      (waiting wants its address)")
    await stack.kubectl("delete", "loadbalancer", "placeholder", "-n", "default")
    await cluster.lb("waiting", "gets the freed address", lambda s: s["address"] == "198.51.100.7")
    say("waiting has 198.51.100.7 now; how it came to that:\n")
    say((await stack.cli("lb", "explain", "default/waiting")).rstrip())


async def throttle(stack: Stack, http: aiohttp.ClientSession) -> None:
    """The provider refuses updates for some seconds: we wait as it says, then it has them."""
    url = stack.provider["url"]
    fault = {
        "kind": "error",
        "op": "update_*",
        "status": 429,
        "retry_after": RETRY_AFTER_S,
        "for_seconds": THROTTLED_S,
    }
    say("\nthe provider throttles (429), and a pod of the service checkout is added:")
    await _ask(http.put(f"{url}/sandbox/faults", json={"faults": [fault]}))
    pod = {
        "addresses": [NEW_POD],
        "conditions": {"ready": True},
        "nodeName": "node-2",
        "targetRef": {"kind": "Pod", "namespace": "default", "name": "checkout-4"},
    }
    patch = msgspec.json.encode([{"op": "add", "path": "/endpoints/-", "value": pod}]).decode()
    say(f"$ kubectl patch endpointslice {CHECKOUT_SLICE} --type=json -p '{patch}'")
    await stack.kubectl("patch", "endpointslice", CHECKOUT_SLICE, "--type=json", "-p", patch)
    began = time.monotonic()
    behind = await _status(
        stack,
        "is seen to be behind with the new pod",
        lambda s: any(f"{CHECKOUT}: Throttled" == entry for entry in s["not_in_step"]),
    )
    say("\n$ lbledger nrp status")
    until = behind["gate_until"]
    say(f"not in step: {', '.join(behind['not_in_step'])}; asked to wait until {until or 'now'}")
    await _status(stack, "is in step again", lambda s: bool(s["in_step"]))
    state = await _ask(http.get(f"{url}/sandbox/state"))
    if NEW_POD not in msgspec.json.encode(state["gateways"]).decode():
        raise Unsettled(f"the provider lacks {NEW_POD}, although it is said to be in step")
    faults = await _ask(http.get(f"{url}/sandbox/faults"))
    refused = faults["faults"][0]["used"]
    await _ask(http.delete(f"{url}/sandbox/faults"))
    if not refused:
        raise Unsettled("the provider throttled no request, though it was to")
    took = time.monotonic() - began
    say(f"in step again {took:.1f} s after, with {NEW_POD} there; {refused} requests were refused")


async def _ask(request: Any) -> dict[str, Any]:
    async with request as reply:
        body = await reply.read()
        if reply.status != 200:
            raise Unsettled(f"the provider's sandbox said {reply.status}: {body[:300]!r}")
        return dict(msgspec.json.decode(body))


async def _status(
    stack: Stack, what: str, test: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Ask `lbledger nrp status` until it fits."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        text = await stack.cli("nrp", "status", "--json", check=False)
        found: dict[str, Any] = msgspec.json.decode(text or "{}")
        if found and test(found):
            return found
        if time.monotonic() > deadline:
            raise Unsettled(f"the provider {what}: was not within {SETTLE_S:.0f} s; {text[:600]}")


def _has_ingress(network: str, found: dict[str, Any]) -> bool:
    return bool(found["status"]["loadBalancer"]["ingress"][0]["ip"].startswith(network))


def _ready_backends(status: dict[str, Any]) -> int:
    return sum(bool(backend["ready"]) for backend in status["backends"])


async def settle(cluster: Cluster) -> None:
    """Every object of the examples, as it must become."""
    service = "/api/v1/namespaces/default/services"
    await cluster.lb(
        "web",
        "two healthy backends",
        lambda s: ready(s)["status"] == "True" and _ready_backends(s) == 2,
    )
    await cluster.lb(
        "api",
        "no healthy backend",
        lambda s: "healthy:0" in ready(s)["message"] and s["address"].startswith("192.0.2."),
    )
    await cluster.lb(
        "placeholder",
        "an address without backends",
        lambda s: s["address"] == "198.51.100.7" and "no running" in ready(s)["message"],
    )
    await cluster.lb(
        "waiting",
        "waits for an address",
        lambda s: any(c["reason"] == "PoolExhausted" for c in s["conditions"]),
    )
    await cluster.lb(
        "dhcp",
        "asks for DHCP",
        lambda s: s["allocatedAddress"]["ip"] == "0.0.0.0",  # noqa: S104
    )
    for name, network in (("shop", "192.0.2."), ("checkout", "203.0.113.")):
        await cluster.until(
            f"service {name}: has an address",
            f"{service}/{name}",
            partial(_has_ingress, network),
        )
    for name in ("public", "tiny"):
        await cluster.until(
            f"pool {name}: is accounted",
            f"{GROUP}/ippools/{name}",
            lambda found: found["status"]["total"] > 0,
        )


async def report(stack: Stack, http: aiohttp.ClientSession) -> None:
    """The end: objects, pools, what the provider holds, and what all of it cost."""
    say("\nload balancers\n" + (await stack.cli("lb", "list")).rstrip())
    say("\npools\n" + (await stack.cli("pool", "list")).rstrip())
    provider = stack.provider["url"]
    async with http.get(f"{provider}/sandbox/state") as reply:
        state = msgspec.json.decode(await reply.read())
    say("\nwhat the provider holds")
    for gateway in state["gateways"].values():
        for location in gateway["addressLocations"]:
            addresses = ", ".join(address["address"] for address in location["addresses"])
            say(f"  location {location['addressLocation']}: {addresses}")
    async with http.get(f"{provider}/sandbox/requests") as reply:
        requests = msgspec.json.decode(await reply.read())
    headers = {"Authorization": f"Bearer {KUBE_TOKEN}"}
    async with http.get(f"{stack.kube_url}/sandbox/counts", headers=headers) as reply:
        counts = msgspec.json.decode(await reply.read())
    say("\nwhat it cost")
    say(f"  writes to the API server, kubectl's included: {counts['writes']}")
    say(f"  requests to the provider: {sum(requests['counts'].values())}")
    async with connected(stack.env["LBLEDGER_NATS_URL"]) as bus:
        for stream in ("KUBE", "LB"):
            state = await bus.stream_state(stream)
            say(f"  events in stream {stream}: {state.messages}")


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(url, name="demo")
    try:
        yield bus
    finally:
        await bus.close()


async def main() -> int:
    began = time.monotonic()
    log.setup(LogSettings(level="warning"), "demo")
    stack = Stack(say=say)
    try:
        await stack.start()
        timeout = aiohttp.ClientTimeout(total=10)
        async with aiohttp.ClientSession(timeout=timeout) as http, backends() as listeners:
            await play(stack, Cluster(stack.kube_url, http), listeners)
            await throttle(stack, http)
            await report(stack, http)
    except (Unsettled, ServerError, aiohttp.ClientError) as error:
        print(f"\nmake demo: {error}", file=sys.stderr)
        for name in ("watcher", "allocator", "prober", "nrp-sync", "applier"):
            with contextlib.suppress(KeyError):
                print(f"\n--- {name}\n{stack.child(name).last_output(5)}", file=sys.stderr)
        return 1
    finally:
        await stack.stop()
    say(f"\nall settled, {time.monotonic() - began:.1f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
