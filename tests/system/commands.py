"""`lbledger` commands run for tests: each a process, from nothing or from one that has imported
everything, with its output piped or on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import struct
import sys
import tempfile
import termios
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from services import cli
from tests import forking

COLUMNS = 80
TIMEOUT_S = 100.0


class Done:
    def __init__(self, code: int | None, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def __repr__(self) -> str:
        return f"exit {self.code}\n{self.out}{self.err}"

    @property
    def json(self) -> Any:
        return json.loads(self.out)


async def lbledger(env: Mapping[str, str], *argv: str) -> Done:
    """Run a command with its output in files."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = forking.start(_run, dict(env), argv, str(out), str(err))
        with _ending(process.sentinel) as ended:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await ended.wait()
            except TimeoutError:
                process.kill()
                raise
            finally:
                process.join()
        return Done(process.exitcode, out.read_text(), err.read_text())


@contextlib.contextmanager
def _ending(sentinel: int) -> Iterator[asyncio.Event]:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sentinel, ended.set)
    try:
        yield ended
    finally:
        loop.remove_reader(sentinel)


def _run(env: dict[str, str], argv: tuple[str, ...], out: str, err: str) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["lbledger", *argv]
    cli.main()


async def from_nothing(env: Mapping[str, str], *argv: str) -> Done:
    """Run a command as a person's shell does, with its output piped."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", *argv),
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(TIMEOUT_S):
        out, err = await process.communicate()
    return Done(process.returncode, out.decode(), err.decode())


async def on_terminal(env: Mapping[str, str], *argv: str) -> Done:
    """The same on a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", *argv),
        env={**env, "TERM": "xterm-256color"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)

    def read() -> bytes:
        found = b""
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            while part := os.read(ours, 65536):
                found += part
        return found

    async with asyncio.timeout(TIMEOUT_S):
        found = await asyncio.to_thread(read)
        await process.wait()
    os.close(ours)
    return Done(process.returncode, found.decode().replace("\r\n", "\n"), "")
