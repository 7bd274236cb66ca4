"""A TCP proxy before a server: answers can be held back, and connections cut.

What it holds is lost with the connection, as on a network that broke at that moment.
"""

import asyncio
import contextlib
from typing import Self
from urllib.parse import urlsplit

from sandbox.child import free_port


class Proxy:
    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        self._target = (str(target.hostname), int(target.port or 0))
        self._port = free_port()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    def hold(self) -> None:
        """From now on nothing of what the server says gets through."""
        self._open.clear()

    def let_through(self) -> None:
        self._open.set()

    def cut(self) -> None:
        """End every connection; what was held is lost. New ones work."""
        for writer in self._writers:
            writer.transport.abort()
        self._open.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        pair = {writer, inner_writer}
        self._writers |= pair
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(
                self._copy(reader, inner_writer, held=False),
                self._copy(inner_reader, writer, held=True),
            )
        self._writers -= pair

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, held: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if held:
                    await self._open.wait()
                if writer.is_closing():
                    break
                writer.write(data)
                await writer.drain()
        writer.close()
