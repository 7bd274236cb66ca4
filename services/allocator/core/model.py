"""What the allocator knows: owners, their requests, pools, leases.

An owner is a load balancer or a Service that asks for an address; its identity is the uid, its
name only a preference for the address it had. Objects here are mutable and belong to one State.
Requests are immutable and shared by all owners that ask for the same.
"""

from __future__ import annotations

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
    slots: tuple[tuple[int, int], ...] = ()  # ports by protocol, for sharing
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
pool that fits."""


class Claim(NamedTuple):
    """An address that the cluster already shows for an owner."""

    address: int
    pool: str
    source: str


@dataclass(slots=True, eq=False)
class Lease:
    id: str
    owner: Owner
    address: int
    pool: str
    share: str = ""  # key under which others may hold the same address
    slots: tuple[tuple[int, int], ...] = ()  # ports that it covers; none: all
    policy: str = ""  # what sharers must have in common
    retiring: datetime | None = None  # since when it waits for the owner to show another one


@dataclass(slots=True, eq=False)
class Owner:
    plural: str
    key: str  # namespace/name
    uid: str
    request: Request
    epoch: str  # in which it was last seen
    generation: int = 0
    phase: str = PENDING
    ticket: int = 0  # its place in the order of those who wait; kept while it waits
    leases: tuple[Lease, ...] = ()
    refusal: Refusal | None = None
    waits: tuple[Wait, ...] = ()  # what would let it be tried again
    claims: tuple[Claim, ...] = ()
    created: str = ""  # creation time of the object, to decide between claimants
    gone_at: datetime | None = None  # when the object went away, while leases are left of it
    gone_how: str = ""  # deleted | replaced | vanished
    condemned: str = ""  # why its object is to be deleted
    stored: bool = False  # a row of it exists

    @property
    def namespace(self) -> str:
        return self.key.partition("/")[0]

    @property
    def name(self) -> str:
        return self.key.partition("/")[2]


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
    texts: tuple[str, str] | None = None  # mask and gateway, where all addresses have the same
    quotas: tuple[objects.PoolQuota, ...] = ()

    @property
    def usable(self) -> bool:
        return self.plan is not None and not self.reason

    def __contains__(self, address: int) -> bool:
        return self.plan is not None and address in self.plan

    def space(self, family: int) -> Space | None:
        return self.spaces.get(family)

    def mask_and_gateway(self, address: int) -> tuple[str, str]:
        if self.texts is not None:
            return self.texts
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
