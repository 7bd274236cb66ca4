"""What is decided about each owner and each pool: the shapes in which it is kept.

One `OwnerDoc` per uid, whatever its kind: the newest word of every service about it, and what the
applier itself has to remember (since when each condition stands, which objects it made). They are
folded from the decisions on the bus (folding.py) and stored as they are, so a restart goes on where
the last commit stood.
"""

from __future__ import annotations

from typing import Final

import msgspec

from schema import events

# Reasons of the provider's images that a person has to act on.
WRONG: Final = ("Rejected", "QuotaExceeded", "Parked", "Quarantined", "InvalidIdleTimeout")
WRONG_PREFIXES: Final = ("Unsupported", "ServiceGateway")


class Lease(msgspec.Struct, frozen=True, omit_defaults=True):
    lease: str
    address: str
    pool: str
    mask: str = ""
    gateway: str = ""


class Refusal(msgspec.Struct, frozen=True, omit_defaults=True):
    reason: str
    message: str
    pool: str = ""
    kept: str = ""


class Backends(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last complete image, with the verdicts that came after it."""

    revision: int
    ports: list[events.SlicePort]
    backends: list[events.Backend]
    matched: int
    families: list[str] = []
    dummy: str = ""
    dummy6: str = ""
    checked: bool = False
    held: str = ""
    reason: str = ""
    message: str = ""

    @property
    def ready(self) -> int:
        return sum(backend.ready for backend in self.backends)


class Provider(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the provider holds for a Service."""

    finalizer: bool = True
    addresses: list[str] = []
    in_step: bool = False
    backends: int = 0
    reason: str = ""
    message: str = ""

    @property
    def wrong(self) -> bool:
        """Whether somebody has to change something: the wish, or what the provider allows."""
        return self.reason in WRONG or self.reason.startswith(WRONG_PREFIXES)


class Mark(msgspec.Struct, frozen=True, omit_defaults=True):
    """A condition as we last stated it, and since when."""

    status: str
    reason: str
    message: str
    since: str
    updated: str


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something to tell a person once, by a Kubernetes Event."""

    reason: str
    message: str
    warning: bool = True


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of a request by annotation; the annotation goes while it still says `request`."""

    request: str
    said: Said


class OwnerDoc(msgspec.Struct, omit_defaults=True):
    """All that is decided about one object. `generation` grows with what is to be written,
    `applied` is the generation at which the cluster last showed all of it."""

    plural: str
    namespace: str
    name: str
    uid: str
    leases: list[Lease] = []
    delegated: str = ""
    refusal: Refusal | None = None
    backends: Backends | None = None
    early: list[events.HealthChanged] = []
    provider: Provider | None = None
    marks: dict[str, Mark] = {}
    noticed: str = ""
    tell: list[Said] = []
    condemned: Said | None = None  # to be deleted
    made: dict[str, str] = {}  # "<plural>/<name>" of an object that we made -> its uid
    generation: int = 0
    applied: int = 0

    @property
    def owner(self) -> events.Owner:
        return events.Owner(
            plural=self.plural, namespace=self.namespace, name=self.name, uid=self.uid
        )

    @property
    def holder(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def decided(self) -> bool:
        """Whether there is anything to write or to tell about it."""
        return bool(self.decided_on_address or self.tell or self.condemned)

    @property
    def decided_on_address(self) -> bool:
        """Whether anybody has said anything about its address, now or before."""
        said = self.leases or self.delegated or self.refusal or self.provider
        return bool(said or self.noticed)

    @property
    def idle(self) -> bool:
        """Whether nothing is held for it, so that it may be forgotten once its owner is gone."""
        return not self.leases

    def addresses(self) -> list[Lease]:
        """The leases in force: the newest of each family, IPv4 first."""
        newest: dict[bool, Lease] = {}
        for lease in self.leases:
            newest[":" in lease.address] = lease
        return [newest[six] for six in (False, True) if six in newest]


class PoolDoc(msgspec.Struct, omit_defaults=True):
    """The newest account of one pool."""

    name: str
    uid: str = ""
    total: int = 0
    available: int = 0
    waiting: int = 0
    last_allocated: str = ""
    ready: bool = True
    reason: str = "Ready"
    message: str = ""
    accounted: bool = False
    marks: dict[str, Mark] = {}
    noticed: str = ""
    tell: list[Said] = []
    answer: Answer | None = None


class ImportDoc(msgspec.Struct, omit_defaults=True):
    """Pools of a kube-vip ConfigMap, to be created before it is marked as converted."""

    namespace: str
    name: str
    uid: str
    pools: list[events.ImportedPool]
    tell: list[Said] = []


class Bookings(msgspec.Struct):
    """Who holds each address of a pool, and who held it before: for the pool's status."""

    live: dict[str, tuple[str, ...]] = {}  # address -> uids of its owners
    history: dict[str, str] = {}  # address -> namespace/name, the longest released first
