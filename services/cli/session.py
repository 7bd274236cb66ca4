"""How a looking command finds the `lbledger up` of the other terminal.

`up` writes its connection settings, readable by this user only; a command uses them when the
environment itself says nothing about where NATS and Postgres are.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from services.kit.config import Settings, load

_ENOUGH: Final = ("LBLEDGER_NATS_URL", "LBLEDGER_DATABASE_URL", "LBLEDGER_CONFIG")


def session_file() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) if runtime else Path(tempfile.gettempdir())
    return folder / f"lbledger-{os.getuid()}" / "up.json"


def write(env: Mapping[str, str]) -> None:
    """Raises OSError, or PermissionError where the folder is somebody else's."""
    file = session_file()
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if file.parent.stat().st_uid != os.getuid():
        raise PermissionError(f"{file.parent} belongs to somebody else")
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as target:
        target.write(msgspec.json.encode(dict(env)))


def remove() -> None:
    with contextlib.suppress(OSError):
        session_file().unlink()


def settings() -> Settings:
    """The settings of a looking command; raises ConfigError."""
    env = dict(os.environ)
    if not any(env.get(name) for name in _ENOUGH):
        file = session_file()
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            if file.stat().st_uid == os.getuid():
                env = msgspec.json.decode(file.read_bytes(), type=dict[str, str]) | env
    return load(env)
