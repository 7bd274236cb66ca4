"""`python -m sandbox.kube`: the development API server as a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

import msgspec

from sandbox.kube.journal import StateError
from sandbox.kube.server import KubeServer


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sandbox.kube",
        description="A Kubernetes API for development and tests: loopback only, not secure.",
    )
    parser.add_argument("--port", type=int, default=0, help="of TLS; 0 takes a free one")
    parser.add_argument("--state", type=Path, help="folder that keeps the objects; none: memory")
    parser.add_argument("--kubeconfig", type=Path, help="where to write a kubeconfig")
    parser.add_argument("--token", help="bearer token to accept (default: a random one)")
    parser.add_argument(
        "--ready-file", type=Path, help="written once it listens: its addresses and pid, as JSON"
    )
    return parser.parse_args()


async def _serve(arguments: argparse.Namespace) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    server = KubeServer(port=arguments.port, token=arguments.token, state=arguments.state)
    async with server:
        if arguments.kubeconfig is not None:
            server.write_kubeconfig(arguments.kubeconfig)
        if arguments.ready_file is not None:
            _announce(arguments.ready_file, server)
        await ended.wait()


def _announce(path: Path, server: KubeServer) -> None:
    import os

    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    told = {"url": server.url, "secure_url": server.secure_url, "pid": os.getpid()}
    draft.write_bytes(msgspec.json.encode(told))
    draft.replace(path)


def main() -> None:
    arguments = _arguments()
    try:
        asyncio.run(_serve(arguments))
    except (OSError, StateError) as error:
        sys.exit(f"the sandbox's Kubernetes API cannot start: {error}")


if __name__ == "__main__":
    main()
