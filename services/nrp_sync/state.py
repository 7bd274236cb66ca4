"""Everything that nrp_sync knows, in one place, and the policy that it follows.

Only the core's functions change it. What they decide leaves by three doors: `said` (events), the
dirty sets (rows), and `outgoing` (requests to be made once their rows are committed).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from schema import events
from services.nrp_sync import steps
from services.nrp_sync.batches import Key, Limits, LocationCall
from services.nrp_sync.diff import Before, Provided
from services.nrp_sync.operations import Operation
from services.nrp_sync.provider import (
    AddressLocation,
    LoadBalancer,
    NatGateway,
    PublicAddress,
    ServiceBatch,
    ServiceRegistration,
)
from services.nrp_sync.sources import Kind, Member, Name, Refs
from services.nrp_sync.steps import Failure, Phase, Retrying, Step
from services.nrp_sync.wishes import InboundSpec, Refusal

SOURCES: Final = ("services", "endpointslices", "nodes", "pods")
"""Nothing is taken from the provider before each of these was listed completely."""
OpKey: TypeAlias = tuple[Kind, str]
LaneName: TypeAlias = Literal["inbound", "outbound", "locations", "resources", "read"]
_NAMESPACE: Final = uuid.UUID("6c62656c-6467-6572-8000-6e72705f7379")


class Policy(NamedTuple):
    """What can be set. Times are seconds."""

    classless: bool = False
    first_family: bool = False
    egress_allowed: tuple[str, ...] = ()
    """Patterns `NAMESPACE/GATEWAY` of who may leave by what; () for everybody by everything."""
    limits: Limits = Limits()
    quiet: float = 0.1
    """A change waits this long for more of its kind ..."""
    latency: float = 1.0
    """... but never longer than this."""
    interval: float = 0.1
    """Between the starts of two location batches."""
    workers: int = 10
    lanes: int = 2
    """Location batches at once, never two for one location."""
    services_per_batch: int = 100
    read_interval: float = 300.0
    finalizer_grace: float = 30.0
    """A pod whose finalizer can't be had for so long is served without."""
    orphan_grace: float = 2.0
    """A request that a dead process left behind may still arrive for this long."""
    retrying: Retrying = Retrying()


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All that the provider holds, read completely."""

    services: list[ServiceRegistration] = []
    locations: list[AddressLocation] = []
    public_ips: list[PublicAddress] = []
    load_balancers: list[LoadBalancer] = []
    nat_gateways: list[NatGateway] = []


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One operation's share in a request."""

    kind: Kind
    identity: str
    step: Step

    @property
    def key(self) -> OpKey:
        return self.kind, self.identity


Payload: TypeAlias = ServiceBatch | LocationCall | PublicAddress | LoadBalancer | NatGateway | None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One call to the provider. `target` names the resource where the payload does not."""

    number: int
    id: str
    lane: LaneName
    verb: str
    target: str = ""
    payload: Payload = None
    parts: tuple[Part, ...] = ()
    sent_at: float
    attempt: int = 1
    hash: str = ""


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The provider acknowledged. `address`: of a public IP. `snapshot`: of a reading."""

    provider_request: str = ""
    address: str = ""
    snapshot: Snapshot | None = None
    duration: float = 0.0


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    failure: Failure
    duration: float = 0.0


Outcome: TypeAlias = Done | Failed


@dataclass(slots=True)
class Flight:
    """A request under way, with what to go back to. `before` of a request from before a restart is
    not remembered; then its outcome, if it comes, settles what it can."""

    request: Request
    steps: dict[OpKey, steps.Before] = field(default_factory=dict)
    locations: Before | None = None
    orphaned_until: float = 0.0
    touched_ops: set[OpKey] = field(default_factory=set)
    touched_locations: set[str] = field(default_factory=set)
    """Of a reading: what changed while it went on, so that it says nothing about them."""


@dataclass(slots=True)
class Comparing:
    """A reading whose locations are still being compared, some at a time."""

    flight: Flight
    shown: dict[str, dict[str, Refs]]
    foreign: dict[str, dict[str, Refs]]
    left: list[str]
    found: int = 0


@dataclass(slots=True)
class Lane:
    """Requests of one sort: how they have been going."""

    flights: set[int] = field(default_factory=set)
    retries: int = 0
    retry_at: float = 0.0
    started_at: float = 0.0
    failure: Failure | None = None
    worked: bool = False
    """One has succeeded since our rows were read."""


@dataclass(slots=True)
class Service:
    """A Kubernetes Service as far as it concerns us."""

    name: Name
    uid: str
    generation: int
    claimed: bool
    terminating: bool
    finalizer: bool
    """Our finalizer is on the object, as last seen."""
    spec: InboundSpec | None = None
    refusal: Refusal | None = None
    cause: str = ""

    @property
    def identity(self) -> str:
        return self.uid.lower()


@dataclass(slots=True)
class Pod:
    """A Pod with the egress label, or with our finalizer still on it."""

    name: Name
    uid: str
    identity: str
    """The gateway that its label names, "" for none that can be."""
    refusal: Refusal | None
    accepted: bool
    """Its addresses should leave by its gateway."""
    addresses: tuple[str, ...]
    node: str
    finalizer: bool
    cause: str = ""
    asked_at: float = 0.0
    without: bool = False
    """Its addresses are sent although our finalizer could not be had."""
    released: bool = False


class Trace(NamedTuple):
    """An address that a pod had at a gateway, and may still have at the provider."""

    identity: str
    address: str


@dataclass(slots=True)
class Release:
    """What a pod leaves behind, and whether it waits for that to be gone."""

    name: Name
    uid: str
    traces: set[Trace]
    leaving: bool = False
    """The pod may go once every trace is gone; otherwise it lives on, somewhere else."""
    identity: str = ""
    """The gateway that it left, when it leaves."""
    last: bool = False
    """It was the last of its gateway: the gateway has to be gone too."""
    places: tuple[Key, ...] = ()
    """Where its addresses were, to look there first."""


@dataclass(slots=True)
class Quarantined:
    """An address that the provider refused as it was to be; left out until that changes."""

    wish: Refs
    code: str
    message: str
    since: float
    retry_at: float
    attempts: int = 1


class Note(NamedTuple):
    """A count or a measure for the metrics, of something that has been committed."""

    metric: str
    labels: tuple[str, ...] = ()
    value: float = 1.0


class Said(NamedTuple):
    event: events.Event
    cause: str


class Ended(NamedTuple):
    """How a request ended, for its row."""

    state: Literal["ok", "failed", "unknown"]
    at: float
    provider_request: str = ""
    code: str = ""
    message: str = ""
    duration: float = 0.0


class State:
    def __init__(self, policy: Policy | None = None, installation: str = "") -> None:
        self.policy = policy or Policy()
        self.installation = installation
        self.provided = Provided()
        self.services: dict[Name, Service] = {}
        self.operations: dict[OpKey, Operation] = {}
        self.members: dict[OpKey, Member] = {}
        self.active: set[OpKey] = set()
        """Operations that are not at rest."""
        self.next_steps: dict[OpKey, Step | None] = {}
        """What each of them would do next, as far as that was asked since it last changed."""
        self.pods: dict[Name, Pod] = {}
        self.gateways: dict[str, set[Name]] = {}
        """Egress identity to the pods that leave by it."""
        self.releases: dict[str, Release] = {}
        """By the pod's uid."""
        self.check_releases = False
        self.awaited: dict[Name, float] = {}
        """Pods whose finalizer is not seen yet, and until when it is waited for."""
        self.letting_go: dict[tuple[str, Name], float] = {}
        """Objects that may go and still carry our finalizer, and from when that is a failure."""
        self.six_nodes = 0
        """How many nodes have an IPv6 address."""
        self.synced: set[str] = set()
        self.flights: dict[int, Flight] = {}
        self.lanes: dict[LaneName, Lane] = {
            "inbound": Lane(),
            "outbound": Lane(),
            "locations": Lane(),
            "resources": Lane(),
            "read": Lane(),
        }
        self.gate_until = 0.0
        """Nothing is sent before, the provider asked for it."""
        self.read_at = 0.0
        """When the provider was last read completely, 0 for never: then nothing is sent yet."""
        self.read_wanted = False
        self.comparing: Comparing | None = None
        self.drift_found = 0
        self.quarantine: dict[Key, Quarantined] = {}
        self.suspects: dict[Key, int] = {}
        self.suspect_ops: dict[OpKey, int] = {}
        self.stirred_at = 0.0
        self.stirred_since = 0.0
        self.stuck = False
        """The last look for a location batch found none; look again when something happens."""
        self.last_number = 0
        self.told: dict[tuple[str, Name], events.ProviderStateChanged] = {}
        # --- what leaves ---
        self.said: list[Said] = []
        self.notes: list[Note] = []
        self.outgoing: list[Request] = []
        self.tell: set[Name] = set()
        self.tell_pods: set[Name] = set()
        self.ended: dict[int, Ended] = {}
        self.dirty_ops: set[OpKey] = set()
        self.dirty_told: set[tuple[str, Name]] = set()
        self.dirty_quarantine: set[Key] = set()
        self.dirty_releases: set[str] = set()
        self.dirty_view = False

    @property
    def complete(self) -> bool:
        """Every source was listed completely in this epoch."""
        return self.synced.issuperset(SOURCES)

    def say(self, event: events.Event, cause: str = "") -> None:
        self.said.append(Said(event, cause))

    def note(self, metric: str, *labels: str, value: float = 1.0) -> None:
        self.notes.append(Note(metric, labels, value))

    def touch(self, op: Operation) -> None:
        """An operation changed: its row is to be written, it is to be looked at."""
        self.dirty_ops.add(op.key)
        self.active.add(op.key)
        self.next_steps.pop(op.key, None)
        if op.kind == "inbound":
            self.tell.add(Name(op.namespace, op.name))
        for flight in self.readings():
            flight.touched_ops.add(op.key)

    def readings(self) -> Iterator[Flight]:
        for number in self.lanes["read"].flights:
            yield self.flights[number]
        if self.comparing is not None:
            yield self.comparing.flight

    def next_id(self) -> tuple[int, str]:
        self.last_number += 1
        return self.last_number, str(
            uuid.uuid5(_NAMESPACE, f"{self.installation}:{self.last_number}")
        )


def purpose(op: Operation) -> str:
    """create, update or delete: what an operation is about just now."""
    if op.deleting:
        return "delete"
    return "create" if op.phase in (Phase.NOT_STARTED, Phase.CREATING) else "update"


def stamp(now: float) -> datetime:
    return datetime.fromtimestamp(now, UTC)


def owner_of(op: Operation) -> events.Owner:
    """Who an operation's events are about."""
    if op.kind == "inbound":
        return events.Owner(
            plural="services",
            namespace=op.namespace,
            name=op.name or op.identity,
            uid=op.identity,
        )
    # A label's value may hold `_`, which a subject can't: `=` can be in no label.
    name = op.identity.replace("_", "=")
    return events.Owner(plural="egresses", namespace="", name=name, uid=op.identity)


def subjects_of(state: State, request: Request) -> Iterator[tuple[events.Owner, str, str]]:
    """(owner, operation, cause) of the events about a request; a reading has none."""
    for part in request.parts:
        op = state.operations[part.key]
        yield owner_of(op), str(part.step.verb), op.cause
    if request.lane == "locations":
        # One for the batch: its addresses are in the request's row.
        owner = events.Owner(plural="nodes", namespace="", name="batch", uid=request.id)
        yield owner, request.verb, ""
