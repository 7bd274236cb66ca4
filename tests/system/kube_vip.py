"""A stand-in for kube-vip 1.2: it announces the addresses of one namespace's Services.

As the real one does, it takes the wanted address from `kube-vip.io/loadbalancerIPs`, obtains one
by DHCP for `0.0.0.0`, and publishes it as ingress only while the Service's slices hold a ready
endpoint. A lease by DHCP ends with its Service.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aiohttp

from tests.system.whole import Api, Refused, path_of

WANTED = "kube-vip.io/loadbalancerIPs"
BY_DHCP = "0.0.0.0"


class KubeVip:
    def __init__(self, api: Api, namespace: str, network: str) -> None:
        self._api, self._namespace, self._network = api, namespace, network
        self._numbers = iter(range(200, 250))
        self.leases: dict[str, str] = {}  # by Service, by DHCP
        self.announced: dict[str, str] = {}  # by Service: what is on the wire
        self._services: dict[str, dict[str, Any]] = {}
        self._endpoints: dict[str, bool] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> KubeVip:
        self._tasks = [
            asyncio.create_task(self._follow("Service", self._see_service)),
            asyncio.create_task(self._follow("EndpointSlice", self._see_slice)),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def renew(self, name: str) -> str:
        """The DHCP server gives this Service another address."""
        self.leases[name] = self._next()
        await self._announce(name)
        return self.leases[name]

    async def _follow(self, kind: str, see: Any) -> None:
        while True:
            with contextlib.suppress(
                aiohttp.ClientError, OSError, ValueError, Refused, TimeoutError
            ):
                listed = await self._api.send("GET", path_of(kind, self._namespace))
                for found in listed["items"]:
                    await see("ADDED", found)
                version = listed["metadata"]["resourceVersion"]
                async for type_, found in self._api.watch(kind, self._namespace, version):
                    if type_ == "ERROR":
                        break
                    await see(type_, found)
            await asyncio.sleep(0.05)

    async def _see_service(self, type_: str, found: dict[str, Any]) -> None:
        name = found["metadata"]["name"]
        if type_ == "DELETED":
            for known in (self._services, self.leases, self.announced):
                known.pop(name, None)
            return
        self._services[name] = found
        await self._announce(name)

    async def _see_slice(self, type_: str, found: dict[str, Any]) -> None:
        name = found["metadata"]["labels"].get("kubernetes.io/service-name", "")
        ready = any(e["conditions"]["ready"] for e in found.get("endpoints") or [])
        self._endpoints[name] = ready and type_ != "DELETED"
        if name in self._services:
            await self._announce(name)

    async def _announce(self, name: str) -> None:
        service = self._services[name]
        wanted = (service["metadata"].get("annotations") or {}).get(WANTED, "")
        if not wanted or not self._endpoints.get(name) or service["spec"]["type"] != "LoadBalancer":
            return
        address = wanted
        if wanted == BY_DHCP:
            address = self.leases.setdefault(name, "") or self._next()
            self.leases[name] = address
        if self.announced.get(name) == address:
            return
        ingress = [{"ip": address, "ipMode": "VIP"}]
        with contextlib.suppress(Refused):  # it has gone meanwhile
            await self._api.merge(
                "Service",
                name,
                self._namespace,
                {"status": {"loadBalancer": {"ingress": ingress}}},
                "status",
            )
            self.announced[name] = address

    def _next(self) -> str:
        return f"{self._network}.{next(self._numbers)}"
