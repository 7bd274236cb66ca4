"""Run the development provider by itself: `python -m sandbox.nrp --port 0 --ready-file FILE`."""

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import msgspec

from sandbox.nrp.faults import Plan
from sandbox.nrp.server import GATEWAY, GROUP, REGION, SUBSCRIPTION, VNET, NrpServer


def main() -> int:
    """Serve until SIGTERM or SIGINT; exit 2 on wrong use, 1 when it cannot listen."""
    parser = argparse.ArgumentParser(
        prog="python -m sandbox.nrp",
        description="A network resource provider for development and tests. Not a cloud.",
    )
    parser.add_argument("--port", type=int, default=0, help="port of 127.0.0.1; 0: any free one")
    parser.add_argument("--ready-file", type=Path, help="written when it listens (JSON: url, pid)")
    parser.add_argument("--state", type=Path, help="folder that keeps what it holds")
    parser.add_argument("--page-size", type=int, default=100, help="entries in one page of a list")
    parser.add_argument("--faults", type=Path, help="JSON file with a plan of faults")
    options = parser.parse_args()
    if options.page_size < 1:
        parser.error(f"--page-size is {options.page_size}, it must be at least 1")
    plan = None
    if options.faults is not None:
        try:
            plan = msgspec.json.decode(options.faults.read_bytes(), type=Plan)
        except (OSError, msgspec.DecodeError) as error:
            parser.error(f"--faults {options.faults}: {error}")
    try:
        asyncio.run(_serve(options, plan))
    except (OSError, ValueError) as error:
        print(f"sandbox.nrp: {error}", file=sys.stderr)  # the way out of a program
        return 1
    return 0


async def _serve(options: argparse.Namespace, plan: Plan | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sent in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sent, stop.set)
    server = NrpServer(
        port=options.port, state=options.state, page_size=options.page_size, plan=plan
    )
    async with server:
        facts = {
            "url": server.url,
            "port": server.port,
            "pid": os.getpid(),
            "subscription_id": SUBSCRIPTION,
            "resource_group": GROUP,
            "region": REGION,
            "service_gateway": GATEWAY,
            "vnet": VNET,
        }
        print(f"sandbox provider (development only) on {server.url}", flush=True)
        if options.ready_file is not None:
            new = options.ready_file.with_suffix(".new")
            new.write_text(json.dumps(facts))
            new.replace(options.ready_file)
        await stop.wait()


if __name__ == "__main__":
    sys.exit(main())
