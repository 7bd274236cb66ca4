"""The state of the provider in one file, so that a restart of `lbledger up` finds it again.

Written to a new file and moved over the old one: a crash leaves the state of a second ago, never
half a file.
"""

import os
from pathlib import Path

import msgspec

from sandbox.nrp.arm import Doc
from sandbox.nrp.gateway import Gateway, Locations, Service
from sandbox.nrp.resources import Resources

_FILE = "nrp.json"


class _Gateway(msgspec.Struct):
    services: list[Service]
    locations: Locations


class _State(msgspec.Struct):
    docs: dict[str, dict[str, Doc]]
    gateways: dict[str, _Gateway]


def save(folder: Path, resources: Resources) -> None:
    """Write everything."""
    folder.mkdir(parents=True, exist_ok=True)
    state = _State(
        docs=resources.docs,
        gateways={
            key: _Gateway(list(gateway.services.values()), gateway.locations)
            for key, gateway in resources.gateways.items()
        },
    )
    new = folder / f"{_FILE}.new"
    with new.open("wb") as file:
        file.write(msgspec.json.encode(state))
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / _FILE)


def load(folder: Path, resources: Resources) -> None:
    """Take up what a folder holds; a folder without a state changes nothing."""
    path = folder / _FILE
    if not path.exists():
        return
    try:
        state = msgspec.json.decode(path.read_bytes(), type=_State)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not a state of this server ({error}); remove it") from error
    resources.restore(state.docs)
    for key, kept in state.gateways.items():
        gateway = Gateway(
            resources.exists,
            max_services=resources.quota.services,
            max_addresses=resources.quota.addresses,
        )
        gateway.services = {service.name.lower(): service for service in kept.services}
        for location, addresses in kept.locations.items():
            gateway.set_location(location, addresses)
        resources.gateways[key] = gateway
