"""What the allocator knows: owners, their requests, pools, leases.

An owner is a load balancer or a Service that asks for an address; its identity is the uid, its
name only a preference for the address it had. Objects here are mutable and belong to one State.
Requests are immutable and shared by all owners that ask for the same.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, NamedTuple

from schema import addresses, objects
from schema.pools import Plan
from services.allocator.core.space import Space

LOADBALANCERS: Final = "loadbalancers"
SERVICES: Final = "services"

# What an owner asks for.
NOTHING: Final = "nothing"  # not (or no longer) ours
POOL: Final = "pool"
DHCP: Final = "dhcp"

# Where an owner stands.
PENDING: Final = "pending"  # its request is not decided yet
HELD: Final = "held"
DELEGATED: Final = "delegated"
WAITING: Final = "waiting"


Slots = tuple[tuple[int, int], ...]
"""Ports by protocol, as ranges of one number line; none are all of them."""


class Request(NamedTuple):
    """What an owner wants, as far as addresses go. Equal requests are one object."""

    mode: str
    namespace: str = ""
    pool: str = ""
    families: tuple[int, ...] = ()  # wanted, the first one first; (): any one, IPv4 preferred
    strict: bool = False  # all families or none
    addresses: tuple[int, ...] = ()  # asked for by value
    network: str = ""
    cluster: str = ""
    share: str = ""  # key under which the address may be shared
    slots: Slots = ()  # for sharing
    policy: str = ""  # what sharers must have in common besides the key
    guest: str = ""  # the Service inside a guest cluster that a ticket stands for
    guest_cluster: str = ""
    problem: str = ""  # why the request can't be followed

    @property
    def sharing_key(self) -> str:
        """Owners share within their namespace."""
        return f"{self.namespace}/{self.share}" if self.share else ""


class Refusal(NamedTuple):
    reason: str
    message: str
    pool: str = ""
    considered: tuple[tuple[str, str, str], ...] = ()  # pool, reason, message
    kept: str = ""


Wait = tuple[object, ...]
"""What an owner waits for: ("pool", name, family) capacity, ("address", number) its release,
("quota", pool, ...) a place in a quota, ("name", pool) a change of that pool, ("need", Need) a
pool that is chosen, ("fit", Need) any pool that fits, ("share", key) a holder to join."""


class Claim(NamedTuple):
    """An address that the cluster already shows for an owner."""

    address: int
    pool: str
    source: str


@dataclass(slots=True, eq=False)
class Terms:
    """What only a lease that is shared, or that ends a move, has."""

    share: str = ""  # key under which others may hold the same address
    slots: Slots = ()  # that it covers
    policy: str = ""  # what sharers must have in common
    retiring: datetime | None = None  # since when it waits for the owner to show another one


NO_TERMS: Final = Terms()
_SERIAL: Final = (1 << 40) - 1


class Lease:
    """One address of one owner. There may be a million: everything unusual is in `terms`."""

    __slots__ = ("_number", "address", "epoch", "owner", "pool", "terms")

    def __init__(
        self, owner: Owner, address: int, pool: str, epoch: str, seq: int, serial: int
    ) -> None:
        self.owner = owner
        self.address = address
        self.pool = pool
        self.epoch = epoch
        self._number = seq << 40 | serial
        self.terms = NO_TERMS

    @classmethod
    def of(cls, lease_id: str, owner: Owner, address: int, pool: str) -> Lease:
        epoch, seq, serial = lease_id.rsplit(":", 2)
        return cls(owner, address, pool, sys.intern(epoch), int(seq), int(serial))

    @property
    def id(self) -> str:
        """`<epoch>:<sequence>` of the cause, and a number that no other lease of the ledger has."""
        return f"{self.epoch}:{self._number >> 40}:{self._number & _SERIAL}"

    @property
    def serial(self) -> int:
        """Grows from lease to lease, whatever the epoch."""
        return self._number & _SERIAL

    @property
    def share(self) -> str:
        return self.terms.share

    @property
    def slots(self) -> Slots:
        return self.terms.slots

    @property
    def policy(self) -> str:
        return self.terms.policy

    @property
    def retiring(self) -> datetime | None:
        return self.terms.retiring

    def cover(self, share: str, slots: Slots, policy: str) -> None:
        self.terms = Terms(share, slots if share else (), policy, self.terms.retiring)

    def retire(self, since: datetime | None) -> None:
        terms = self.terms
        self.terms = Terms(terms.share, terms.slots, terms.policy, since)


@dataclass(slots=True, eq=False)
class Rare:
    """What few owners have at a time."""

    claims: tuple[Claim, ...] = ()
    created: str = ""  # creation time of the object, to decide between claimants
    gone_at: datetime | None = None  # when the object went away, while leases are left of it
    gone_how: str = ""  # deleted | replaced | vanished
    condemned: str = ""  # why its object is to be deleted
    refusal: Refusal | None = None
    waits: tuple[Wait, ...] = ()  # what would let it be tried again

    def __bool__(self) -> bool:
        return bool(
            self.claims
            or self.created
            or self.gone_at
            or self.gone_how
            or self.condemned
            or self.refusal
            or self.waits
        )


class Owner:
    """Who asks. There may be a million: everything unusual is in `rare`."""

    __slots__ = (
        "_leases",
        "_uid",
        "epoch",
        "generation",
        "key",
        "phase",
        "plural",
        "rare",
        "request",
        "stored",
        "ticket",
    )

    def __init__(
        self, plural: str, key: str, uid: str, request: Request, epoch: str, generation: int = 0
    ) -> None:
        self.plural = plural
        self.key = key  # namespace/name
        self._uid: str | int = uid
        self.request = request
        self.epoch = epoch  # in which it was last seen
        self.generation = generation
        self.phase = PENDING
        self.ticket = 0  # its place in the order of those who wait; kept while it waits
        self._leases: tuple[Lease, ...] | Lease = ()
        self.rare: Rare | None = None
        self.stored = False  # a row of it exists

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Usually one, and then kept without a tuple around it."""
        leases = self._leases
        return leases if isinstance(leases, tuple) else (leases,)

    @leases.setter
    def leases(self, leases: tuple[Lease, ...]) -> None:
        self._leases = leases[0] if len(leases) == 1 else leases

    @property
    def uid(self) -> str:
        uid = self._uid
        if isinstance(uid, str):
            return uid
        text = f"{uid:032x}"
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def has_uid(self, uid: str) -> bool:
        mine = self._uid
        if isinstance(mine, str):
            return mine == uid
        return is_uuid(uid) is not None and mine == int(uid.replace("-", ""), 16)

    def compact(self) -> None:
        """Keep a uid of the usual form as a number, at half the size."""
        uid = self._uid
        if isinstance(uid, str) and is_uuid(uid):
            self._uid = int(uid.replace("-", ""), 16)

    @property
    def namespace(self) -> str:
        return self.key.partition("/")[0]

    @property
    def name(self) -> str:
        return self.key.partition("/")[2]

    @property
    def claims(self) -> tuple[Claim, ...]:
        return self.rare.claims if self.rare is not None else ()

    @property
    def created(self) -> str:
        return self.rare.created if self.rare is not None else ""

    @property
    def gone_at(self) -> datetime | None:
        return self.rare.gone_at if self.rare is not None else None

    @property
    def gone_how(self) -> str:
        return self.rare.gone_how if self.rare is not None else ""

    @property
    def condemned(self) -> str:
        return self.rare.condemned if self.rare is not None else ""

    @property
    def refusal(self) -> Refusal | None:
        return self.rare.refusal if self.rare is not None else None

    @property
    def waits(self) -> tuple[Wait, ...]:
        return self.rare.waits if self.rare is not None else ()

    def note(self, **fields: object) -> None:
        """Set something unusual; with nothing unusual left there is nothing to keep."""
        rare = self.rare or Rare()
        for name, value in fields.items():
            setattr(rare, name, value)
        self.rare = rare or None


is_uuid: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}").fullmatch


@dataclass(slots=True, eq=False)
class Pool:
    name: str
    uid: str
    view: objects.IPPool  # spec and identity, without status
    epoch: str
    generation: int = 0
    plan: Plan | None = None
    good: objects.IPPool | None = None  # the last view whose ranges could be read
    problem: str = ""
    reason: str = ""
    spaces: dict[int, Space] = field(default_factory=dict)
    overlapping: tuple[str, ...] = ()
    claims: dict[str, str] = field(default_factory=dict)  # status.allocated, until adopted
    history: dict[str, str] = field(default_factory=dict)  # status.allocatedHistory, likewise
    last_allocated: int = -1
    texts: dict[int, tuple[str, str]] = field(default_factory=dict)  # mask and gateway of a family
    quotas: tuple[objects.PoolQuota, ...] = ()

    @property
    def usable(self) -> bool:
        return self.plan is not None and not self.reason

    def __contains__(self, address: int) -> bool:
        return self.plan is not None and address in self.plan

    def space(self, family: int) -> Space | None:
        return self.spaces.get(family)

    def mask_and_gateway(self, address: int) -> tuple[str, str]:
        texts = self.texts.get(6 if address >= addresses.V6 else 4)
        if texts is not None:
            return texts
        item = self.plan.range_of(address) if self.plan is not None else None
        return (item.mask, item.gateway_text) if item is not None else ("", "")

    @property
    def last_text(self) -> str:
        return addresses.text(self.last_allocated) if self.last_allocated >= 0 else ""

    @property
    def total(self) -> int:
        return self.plan.total if self.plan is not None else 0

    def available(self) -> int:
        return sum(space.available for space in self.spaces.values())
