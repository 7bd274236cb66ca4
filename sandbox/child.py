"""Child processes of the sandbox: they never outlive us, and they stop in bounded time.

A development server that survives its terminal keeps a port and a lock on its store, and the next
run fails for a reason nobody sees. So the kernel is asked to end the child when the thread that
started it goes (Linux), the child gets a session of its own (a Ctrl-C in the terminal reaches only
us, and we stop the children in order), and a stop escalates to SIGKILL.

Nothing here is bound to an event loop: a server started in one loop may be stopped in another.
"""

import asyncio
import atexit
import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.01
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class ServerError(Exception):
    """A sandbox server could not be started, or did not do what was asked in time."""


@dataclass(frozen=True, slots=True)
class User:
    """Whom a child runs as, when we are root and the program refuses to be."""

    name: str
    uid: int
    gid: int


class Child:
    """One running program, its output in a file."""

    def __init__(
        self,
        argv: Sequence[str | Path],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        user: User | None = None,
        death_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(  # noqa: S603  # our own words
                [str(part) for part in argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env) if env is not None else None,
                start_new_session=True,
                preexec_fn=_die_with_parent(death_signal),  # noqa: PLW1509  # set up before fork
                user=user.uid if user else None,
                group=user.gid if user else None,
                extra_groups=[] if user else None,
            )
        _running.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    async def wait(self, timeout: float) -> bool:
        """True when it has ended within the time."""
        deadline = time.monotonic() + timeout
        while self._process.poll() is None:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(_POLL_S)
        _running.discard(self)
        return True

    async def stop(self, *steps: tuple[signal.Signals, float]) -> None:
        """Send each signal and wait its time; SIGKILL at the end."""
        for sent, seconds in (*steps, (signal.SIGKILL, 10.0)):
            self.send(sent)
            if await self.wait(seconds):
                return
        raise ServerError(f"process {self.pid} did not end after SIGKILL")

    def send(self, sent: signal.Signals) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(sent)

    def last_output(self, lines: int = 12) -> str:
        try:
            text = self.log.read_bytes()[-8192:].decode(errors="replace")
        except OSError as error:
            return f"(no output: {error})"
        return "\n".join(text.splitlines()[-lines:])


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now, outside the range of outgoing connections.

    A port inside that range can be taken, while the server is down for a restart, by any outgoing
    connection of the machine, even by a client's own attempt to reconnect to it.
    """
    ports = range(10240, max(_first_ephemeral_port(), 12240))
    for _ in range(200):
        port = random.choice(ports)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise ServerError(f"no free port on 127.0.0.1 between {ports.start} and {ports.stop}")


async def run(argv: Sequence[str | Path], *, log: Path, user: User | None, timeout: float) -> None:
    """Run a program to its end; raise with its last output unless it succeeds."""
    child = Child(argv, log=log, user=user, env=plain_environment())
    try:
        if not await child.wait(timeout):
            raise ServerError(f"{Path(argv[0]).name} did not end within {timeout:g} s")
    finally:
        await child.stop()
    if child.exit_code:
        raise ServerError(
            f"{Path(argv[0]).name} failed with status {child.exit_code}:\n{child.last_output()}"
        )


def plain_environment() -> dict[str, str]:
    """Messages in English and no settings of a person's own client (PGHOST and so on)."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}


def _die_with_parent(death_signal: signal.Signals) -> Callable[[], None]:
    parent, number = os.getpid(), int(death_signal)

    def in_child() -> None:
        # Runs after the change of user, which would clear the setting.
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
            if os.getppid() != parent:  # it went before the setting was made
                os._exit(1)

    return in_child


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


_running: weakref.WeakSet[Child] = weakref.WeakSet()


@atexit.register
def _stop_what_is_left() -> None:
    """For an exit that skipped stop(), and for systems without a parent-death signal."""
    for child in list(_running):
        child.send(signal.SIGTERM)
