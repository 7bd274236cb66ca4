"""The stock `nats` CLI: from PATH, else built with Go, in the background while other tests run.

The build takes minutes of a small machine, so it begins when a run that needs it does, and takes
only what nobody else wants. A lock that the compiler itself holds tells when it is done.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from pathlib import Path

MODULE = "github.com/nats-io/natscli/nats@v0.5.0"
FOLDER = Path(__file__).parents[2] / ".venv" / "go"
PROGRAM = FOLDER / "nats"
BUILD_S = 600.0
_building: list[subprocess.Popen[bytes]] = []


def begin() -> None:
    """Start the build, unless there is the program, no Go, or somebody else who builds."""
    if shutil.which("nats") or not shutil.which("go") or PROGRAM.exists():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        with (FOLDER / "log").open("w") as log:
            _building.append(
                subprocess.Popen(
                    ["nice", "-n", "19", "go", "install", MODULE],
                    env={**os.environ, "GOBIN": str(FOLDER), "CGO_ENABLED": "0"},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[lock.fileno()],
                )
            )


def end() -> None:
    """Give up a build that nobody waited for."""
    for process in _building:
        process.terminate()
        process.wait(10)


def program() -> str | None:
    """The program, waited for; None where there is none and no Go to build it with."""
    found = shutil.which("nats")
    if found or not shutil.which("go"):
        return found
    deadline = time.monotonic() + BUILD_S
    while not PROGRAM.exists():
        failed = [process for process in _building if process.poll()]
        assert not failed, (FOLDER / "log").read_text()[-2000:]
        assert time.monotonic() < deadline, f"the build of {MODULE} takes too long"
        begin()  # also where another worker gave up the one that it had begun
        time.sleep(0.2)
    return str(PROGRAM)
