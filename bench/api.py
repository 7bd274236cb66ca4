"""A scripted API server for `watch_to_fact`: empty lists, and one watch that says it all at once.

`python -m bench.api COUNT READY_FILE`: the watch of Services delivers COUNT additions as fast as
the reader takes them. A process of its own, so that its work is not counted as the watcher's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from aiohttp import web


def line(i: int) -> bytes:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": f"svc-{i:07d}",
            "namespace": f"ns-{i % 50}",
            "uid": f"00000000-0000-4000-8000-{i:012d}",
            "resourceVersion": str(100 + i),
            "creationTimestamp": "2026-11-30T12:00:00Z",
            "labels": {"app": f"app-{i % 300}"},
            "managedFields": [
                {"manager": "kubectl", "operation": "Apply", "fieldsV1": {"f:x": {}}}
            ],
        },
        "spec": {
            "type": "LoadBalancer",
            "loadBalancerClass": "lbledger.io/pool",
            "clusterIP": f"10.96.{i // 250 % 250}.{i % 250}",
            "clusterIPs": [f"10.96.{i // 250 % 250}.{i % 250}"],
            "ipFamilies": ["IPv4"],
            "ipFamilyPolicy": "SingleStack",
            "ports": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080}],
            "selector": {"app": f"app-{i % 300}"},
        },
        "status": {"loadBalancer": {}},
    }
    return json.dumps({"type": "ADDED", "object": service}).encode() + b"\n"


async def main(count: int, ready: Path) -> None:
    lines = [line(i) for i in range(count)]
    chunks = [b"".join(lines[i : i + 200]) for i in range(0, count, 200)]

    async def services(request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") not in ("1", "true", "True"):
            body = {"kind": "ServiceList", "apiVersion": "v1", "items": []}
            return web.json_response({**body, "metadata": {"resourceVersion": "99"}})
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if request.query.get("resourceVersion") == "99":
            for chunk in chunks:
                await response.write(chunk)
        await asyncio.sleep(300)
        return response

    async def resources(_: web.Request) -> web.Response:
        found = {"name": "services", "namespaced": True, "kind": "Service", "verbs": ["list"]}
        body = {"kind": "APIResourceList", "groupVersion": "v1", "resources": [found]}
        return web.json_response(body)

    app = web.Application()
    app.router.add_get("/api/v1/services", services)
    app.router.add_get("/api/v1", resources)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    size = sum(len(chunk) for chunk in chunks)
    facts = {"port": runner.addresses[0][1], "pid": os.getpid(), "bytes": size}
    written = ready.with_suffix(".part")
    written.write_text(json.dumps(facts))
    written.rename(ready)  # whoever waits for the file never reads half of it
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2])))
