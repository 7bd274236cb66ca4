"""Real backends on loopback for tests of checks: each can be made to answer, refuse or stall."""

from __future__ import annotations

import asyncio
import contextlib
import socket


class Backends:
    """Listeners by (address, port). `connections` counts what each has accepted."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, int], asyncio.Server] = {}
        self._stalled: dict[tuple[str, int], list[socket.socket]] = {}
        self.connections: dict[str, int] = {}

    async def answer(self, address: str, port: int) -> int:
        """Accept connections at the address; returns the port (0: any free one)."""

        async def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections[address] = self.connections.get(address, 0) + 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

        server = await asyncio.start_server(accepted, address, port, reuse_address=True)
        taken = server.sockets[0].getsockname()[1]
        self._servers[address, taken] = server
        return int(taken)

    async def refuse(self, address: str, port: int) -> None:
        """Close the listener: connections are refused from now on."""
        server = self._servers.pop((address, port))
        server.close()
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


def free_port() -> int:
    """A port that is free on every loopback address at the moment."""
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])
