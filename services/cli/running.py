"""The commands that run something: the services, the sandbox, migrations."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import msgspec

import schema
from services.cli import session
from services.kit import config as settings_module
from services.kit import garbage


def service(name: str) -> int:
    """Run one service until a signal."""
    settings = settings_module.load()
    with garbage.importing():
        from services.kit.runtime import run_service

        module = importlib.import_module(f"services.{name}.main")
    return run_service(name, module.run, settings)


def up(kubeconfig: str, state: str, nats_port: int, crds: bool) -> int:
    """Run everything; the sandbox is loaded by name so that an image can do without it."""
    try:
        stack = importlib.import_module("sandbox.stack")
    except ImportError as error:
        print(
            f"lbledger up needs the sandbox ({error.name} is missing): "
            "install lbledger[sandbox], or work in a clone of the repository",
            file=sys.stderr,
        )
        return 2
    return int(stack.up(kubeconfig=kubeconfig, state=state, nats_port=nats_port, crds=crds))


def migrate() -> int:
    from services.kit import db
    from services.kit.migrate import upgrade

    settings = session.settings()
    address = settings_module.public_url(settings.database.url.reveal())
    try:
        revision = upgrade(settings.database.url.reveal())
    except Exception as error:  # noqa: BLE001  (one line for a person instead of a traceback)
        print(f"can't migrate {address}: {db.plain_error(error)}", file=sys.stderr)
        return 1
    print(f"{address} is at revision {revision}")
    return 0


def crds() -> int:
    folder = Path(schema.__file__).parent / "crds"
    print("---\n".join(path.read_text() for path in sorted(folder.glob("*.yaml"))), end="")
    return 0


def config(as_json: bool) -> int:
    shown = settings_module.show(session.settings())
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(shown)).decode())
        return 0
    for section, values in shown.items():
        print(f"[{section}]")
        for name, value in values.items():
            print(f"{name} = {msgspec.json.encode(value).decode()}")
        print()
    return 0
