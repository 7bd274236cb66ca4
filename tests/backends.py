"""Real backends on loopback for tests of checks: each can be made to answer, refuse or stall."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable


class Backends:
    """Listeners by (address, port). `connections` counts what each has accepted."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, int], asyncio.Server] = {}
        self._stalled: dict[tuple[str, int], list[socket.socket]] = {}
        self.connections: dict[str, int] = {}

    async def answer(self, address: str, port: int) -> int:
        """Accept connections at the address; returns the port (0: any free one)."""
        (taken,) = await self.answer_all([address], port)
        return taken

    async def answer_all(self, addresses: list[str], port: int) -> list[int]:
        """The same at many addresses, all at one instant as far as this loop can see."""
        listeners = [_listener(address, port) for address in addresses]
        taken = [int(listener.getsockname()[1]) for listener in listeners]
        for address, listener, bound in zip(addresses, listeners, taken, strict=True):
            server = await asyncio.start_server(self._accept(address), sock=listener)
            self._servers[address, bound] = server
        return taken

    def _accept(self, address: str) -> Callable[..., Awaitable[None]]:
        async def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections[address] = self.connections.get(address, 0) + 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

        return accepted

    def answers(self, address: str, port: int) -> bool:
        return (address, port) in self._servers

    async def refuse(self, address: str, port: int) -> None:
        """Close the listener: connections are refused from now on."""
        await self.refuse_all([address], port)

    async def refuse_all(self, addresses: list[str], port: int) -> None:
        """The same at many addresses, all at one instant as far as this loop can see."""
        servers = [self._servers.pop((address, port)) for address in addresses]
        for server in servers:
            server.close()
        for server in servers:
            await server.wait_closed()

    def stall(self, address: str, port: int) -> None:
        """A listener whose queue is full: connections get no answer at all."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(0)
        held = [listener]
        for _ in range(2):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex((address, port))
            held.append(filler)
        self._stalled[address, port] = held

    async def close(self) -> None:
        for address, port in list(self._servers):
            await self.refuse(address, port)
        for held in self._stalled.values():
            for sock in held:
                sock.close()


def _listener(address: str, port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(128)
    return listener


def free_port() -> int:
    """A port that is free on every loopback address at the moment."""
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])
