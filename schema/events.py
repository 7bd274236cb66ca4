"""Every event on the bus: facts that the watcher saw, decisions that a service took, and outcomes.

An event is a tagged, versioned struct in JSON. The tag (`<Name>.v<N>`) is the `type` field and the
`Lb-Type` header. A field may be added with a default within a version; anything else is a new
version beside the old one, which stays decodable for ever (schema/samples/ proves it). Unknown
fields are ignored; an unknown tag is skipped by consumers with a metric, never guessed at.

Times are RFC 3339 in UTC. Addresses are canonical text without a prefix length.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, TypeAlias

import msgspec

from schema import objects, subjects
from schema.subjects import ObjectRef


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of every event. `at` is when the producer saw or decided it."""

    at: datetime


# --- facts: stream KUBE, by the watcher ---------------------------------------------------------
#
# `omitted` names the parts of a view that were left out to fit the bus's limit on a message.


class LoadBalancerSeen(Event, frozen=True, kw_only=True, tag="LoadBalancerSeen.v1"):
    object: objects.LoadBalancer
    omitted: list[str] = []


class IPPoolSeen(Event, frozen=True, kw_only=True, tag="IPPoolSeen.v1"):
    object: objects.IPPool
    omitted: list[str] = []


class VirtualMachineInstanceSeen(
    Event, frozen=True, kw_only=True, tag="VirtualMachineInstanceSeen.v1"
):
    object: objects.VirtualMachineInstance
    omitted: list[str] = []


class VirtualMachineSeen(Event, frozen=True, kw_only=True, tag="VirtualMachineSeen.v1"):
    object: objects.VirtualMachine
    omitted: list[str] = []


class NetworkAttachmentDefinitionSeen(
    Event, frozen=True, kw_only=True, tag="NetworkAttachmentDefinitionSeen.v1"
):
    object: objects.NetworkAttachmentDefinition
    omitted: list[str] = []


class NamespaceSeen(Event, frozen=True, kw_only=True, tag="NamespaceSeen.v1"):
    object: objects.Namespace
    omitted: list[str] = []


class NodeSeen(Event, frozen=True, kw_only=True, tag="NodeSeen.v1"):
    object: objects.Node
    omitted: list[str] = []


class ServiceCIDRSeen(Event, frozen=True, kw_only=True, tag="ServiceCIDRSeen.v1"):
    object: objects.ServiceCIDR
    omitted: list[str] = []


class ServiceSeen(Event, frozen=True, kw_only=True, tag="ServiceSeen.v1"):
    object: objects.Service
    omitted: list[str] = []


class EndpointSliceSeen(Event, frozen=True, kw_only=True, tag="EndpointSliceSeen.v1"):
    object: objects.EndpointSlice
    omitted: list[str] = []


class PodSeen(Event, frozen=True, kw_only=True, tag="PodSeen.v1"):
    object: objects.Pod
    omitted: list[str] = []


class ConfigMapSeen(Event, frozen=True, kw_only=True, tag="ConfigMapSeen.v1"):
    object: objects.ConfigMap
    omitted: list[str] = []


class ObjectGone(Event, frozen=True, kw_only=True, tag="ObjectGone.v1"):
    """Tombstone: the object with this uid does not exist any more."""

    plural: str
    namespace: str = ""
    name: str
    uid: str
    resource_version: str = ""
    reason: str = (
        "deleted"  # deleted | vanished (missing from a complete list) | replaced (new uid)
    )


class ObjectUnfit(Event, frozen=True, kw_only=True, tag="ObjectUnfit.v1"):
    """The object exists but does not fit its view; consumers keep the last one that did."""

    plural: str
    namespace: str = ""
    name: str
    uid: str
    resource_version: str = ""
    problem: str  # names the field and what was expected


class SyncStarted(Event, frozen=True, kw_only=True, tag="SyncStarted.v1"):
    """A complete list of one kind begins."""

    plural: str
    epoch: str


class SyncFinished(Event, frozen=True, kw_only=True, tag="SyncFinished.v1"):
    """Every object of the kind that existed at `resource_version` has been published in `epoch`."""

    plural: str
    epoch: str
    resource_version: str = ""
    count: int = 0
    absent: bool = False  # the kind is not installed (its CRD is awaited): complete and empty


class EpochStarted(Event, frozen=True, kw_only=True, tag="EpochStarted.v1"):
    """The stream can't be trusted to continue the one before; everything is listed anew."""

    epoch: str
    previous: str = ""
    reason: str
    created: str = ""  # when the stream was, which tells it from its successor


# --- decisions: stream LB -----------------------------------------------------------------------


class Owner(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Who a decision is about. Identity is the uid; the name is for people and subjects."""

    plural: str  # loadbalancers | services
    namespace: str
    name: str
    uid: str

    @property
    def ref(self) -> ObjectRef:
        return ObjectRef(self.plural, self.namespace, self.name)


class LeaseGranted(Event, frozen=True, kw_only=True, gc=False, tag="LeaseGranted.v1"):
    owner: Owner
    lease: str  # unique id of this lease, `<epoch>:<sequence>:<n>` of its cause
    address: str
    pool: str
    mask: str = ""  # dotted for IPv4, prefix length as text for IPv6
    gateway: str = ""
    rule: str = ""  # requested | returning | never-used | longest-released | ...
    sharing_key: str = ""
    generation: int = 0  # of the owner's spec that was decided on


class LeaseAdopted(Event, frozen=True, kw_only=True, tag="LeaseAdopted.v1"):
    """An address that the cluster already showed (or our ledger held) becomes a lease."""

    owner: Owner
    lease: str
    address: str
    pool: str
    mask: str = ""
    gateway: str = ""
    source: str = ""  # status.allocatedAddress | status.loadBalancer | pool.status | ledger ...
    sharing_key: str = ""
    generation: int = 0


class LeaseReleased(Event, frozen=True, kw_only=True, tag="LeaseReleased.v1"):
    owner: Owner
    lease: str
    address: str
    pool: str
    reason: str  # owner-deleted | request-changed | replaced | reclaimed | manual ...


class LeasesRestated(Event, frozen=True, kw_only=True, tag="LeasesRestated.v1"):
    """All leases that stand on the addresses from `first` up to, not including, `before`.

    Said after the LB stream was lost, following the leases themselves: whoever still knows another
    lease on these addresses knows one whose release the log lost. IPv4 sorts before IPv6; empty
    is the beginning, or the end, of all addresses.
    """

    first: str = ""
    before: str = ""
    leases: list[str]


class PoolVerdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a pool that was considered did not serve."""

    pool: str
    reason: str
    message: str = ""


class LeaseRefused(Event, frozen=True, kw_only=True, tag="LeaseRefused.v1"):
    """The owner has no address (or keeps `kept`) and waits for what the reason names."""

    owner: Owner
    reason: str  # PoolExhausted | NoMatchingPool | PoolNotFound | RequestedAddressUnavailable ...
    message: str
    pool: str = ""
    considered: list[PoolVerdict] = []
    kept: str = ""  # the address that stays while the request can't be met
    generation: int = 0


class AddressDelegated(Event, frozen=True, kw_only=True, tag="AddressDelegated.v1"):
    """The announcer obtains the address by itself (DHCP): `0.0.0.0` is published for it."""

    owner: Owner
    address: str = "0.0.0.0"  # noqa: S104  (kube-vip's word for "by DHCP", not a bind)
    generation: int = 0


class AddressContested(Event, frozen=True, kw_only=True, tag="AddressContested.v1"):
    """Two owners show the same address; told to both, `kept` says whether this one holds it."""

    owner: Owner
    address: str
    pool: str
    other: Owner
    kept: bool
    message: str


class OwnerCondemned(Event, frozen=True, kw_only=True, tag="OwnerCondemned.v1"):
    """Nothing stands behind this load balancer any more: whoever writes objects is to delete it."""

    owner: Owner
    reason: str  # GuestClusterRemoved | GuestServiceReplaced
    message: str


class ReleaseAnswered(Event, frozen=True, kw_only=True, tag="ReleaseAnswered.v1"):
    """What became of a pool's manuallyReleaseIP annotation, which is to be removed now."""

    pool: str
    uid: str
    request: str  # the annotation's value
    released: bool
    message: str


class ImportedPool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A pool to create unless it exists; `history` tells who had which address."""

    name: str
    spec: objects.IPPoolSpec
    history: dict[str, str] = {}


class PoolsImported(Event, frozen=True, kw_only=True, tag="PoolsImported.v1"):
    """Pools of a kube-vip ConfigMap; when they exist it is marked as converted."""

    namespace: str
    name: str
    uid: str
    pools: list[ImportedPool]
    problems: list[str] = []  # entries that can't be read: key, value and what would be right


class PoolAccounted(Event, frozen=True, kw_only=True, tag="PoolAccounted.v1"):
    """A pool's use after a batch of decisions; on subject lb.lease.ippools._.<pool>."""

    pool: str
    uid: str
    generation: int = 0
    total: int
    available: int
    waiting: int = 0
    last_allocated: str = ""
    ready: bool = True
    reason: str = "Ready"  # InvalidRange ... when not ready
    message: str = ""


class SlicePort(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str = ""
    protocol: str = "TCP"
    port: int


class Backend(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One backend with an address. `state`: unchecked (check off), unknown, healthy, unhealthy."""

    kind: str = "VirtualMachineInstance"
    namespace: str
    name: str
    uid: str
    address: str
    node: str = ""
    ready: bool
    state: str
    reason: str = ""  # last error of the check
    port: int = 0  # where the backend has a port of its own (explicit backends only)
    since: datetime | None = None  # when the check that brought this state ended
    last_error: str = ""  # of a check, when it was unhealthy the last time; kept when it recovers

    def after(self, change: HealthChange) -> Backend:
        """The backend with another verdict."""
        return msgspec.structs.replace(
            self,
            state=change.state,
            ready=change.ready,
            reason=change.reason,
            since=change.since or self.since,
            last_error=change.reason if change.state == "unhealthy" else self.last_error,
        )


class BackendsResolved(Event, frozen=True, kw_only=True, tag="BackendsResolved.v1"):
    """The complete image of one load balancer's endpoints, in the order of the slice."""

    owner: Owner
    revision: int  # grows with every BackendsResolved and HealthChanged of this owner
    generation: int
    ports: list[SlicePort]
    backends: list[Backend]
    matched: int  # backends that match, with or without an address
    dummy: str = ""  # address of the dummy endpoint while it stands in the IPv4 slice
    dummy6: str = ""  # the same in the IPv6 slice
    families: list[str] = []  # slices there are to be; empty is IPv4 alone
    checked: bool = False  # a health check is on
    held: str = ""  # see HealthChanged
    reason: str = ""  # InvalidHealthCheck, InvalidSelector ...: the spec can't be followed as it is
    message: str = ""  # without a reason: a remark, nothing is wrong


class HealthChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    uid: str
    address: str
    state: str
    ready: bool
    reason: str = ""
    since: datetime | None = None  # when the check that brought this state ended


class HealthChanged(Event, frozen=True, kw_only=True, tag="HealthChanged.v1"):
    """Verdicts that changed since the last BackendsResolved or HealthChanged of the owner.

    `dummy`, `dummy6` and `held` are the whole truth after it. `held` says why failures are not
    acted on: everything failed at once, so the fault is taken for the prober's own.
    """

    owner: Owner
    revision: int
    changes: list[HealthChange]
    healthy: int  # ready backends
    total: int  # backends with an address
    dummy: str = ""
    dummy6: str = ""
    held: str = ""


class ProviderOperationStarted(Event, frozen=True, kw_only=True, tag="ProviderOperationStarted.v1"):
    owner: Owner  # a service, or plural "nodes" for a location
    operation: str
    request: str = ""  # our id of the request
    payload_hash: str = ""
    attempt: int = 1


class ProviderOperationSucceeded(
    Event, frozen=True, kw_only=True, tag="ProviderOperationSucceeded.v1"
):
    owner: Owner
    operation: str
    request: str = ""
    provider_request: str = ""  # the provider's own request id
    duration_ms: float = 0.0


class ProviderOperationFailed(Event, frozen=True, kw_only=True, tag="ProviderOperationFailed.v1"):
    owner: Owner
    operation: str
    request: str = ""
    provider_request: str = ""
    code: str
    message: str
    retry_at: datetime | None = None  # None: parked or quarantined until something changes
    duration_ms: float = 0.0


class ProviderStateChanged(Event, frozen=True, kw_only=True, tag="ProviderStateChanged.v1"):
    """The complete image of what the provider holds for one service, for whoever renders it."""

    owner: Owner
    generation: int = 0
    finalizer: bool = True  # whether our finalizer must stand on the Service
    addresses: list[str] = []  # public addresses to publish as ingress
    in_step: bool = False
    backends: int = 0
    reason: str = ""  # Registered | Pending | Rejected | Throttled | Parked | Quarantined | ...
    message: str = ""


class Applied(Event, frozen=True, kw_only=True, tag="Applied.v1"):
    """One write of the applier, on subject lb.applied.<plural>.<namespace>.<name>."""

    owner: Owner
    target: str  # Service, Service/status, EndpointSlice, LoadBalancer/status, IPPool/status, ...
    outcome: str  # written | deleted | conflict | failed
    resource_version: str = ""
    ready: bool | None = None  # with target status: the Ready condition written
    reason: str = ""
    message: str = ""
    duration_ms: float = 0.0


class DeadLettered(Event, frozen=True, kw_only=True, tag="DeadLettered.v1"):
    """An event that a service could not take; on subject lb.dead.<service>."""

    service: str
    stream: str
    sequence: int
    subject: str
    reason: str  # what is wrong and what would be right
    payload: str = ""  # up to 2,000 characters, undecodable bytes escaped


Fact: TypeAlias = (
    LoadBalancerSeen
    | IPPoolSeen
    | VirtualMachineInstanceSeen
    | VirtualMachineSeen
    | NetworkAttachmentDefinitionSeen
    | NamespaceSeen
    | NodeSeen
    | ServiceCIDRSeen
    | ServiceSeen
    | EndpointSliceSeen
    | PodSeen
    | ConfigMapSeen
    | ObjectGone
    | ObjectUnfit
    | SyncStarted
    | SyncFinished
    | EpochStarted
)
Decision: TypeAlias = (
    LeaseGranted
    | LeaseAdopted
    | LeaseReleased
    | LeaseRefused
    | LeasesRestated
    | AddressDelegated
    | AddressContested
    | OwnerCondemned
    | ReleaseAnswered
    | PoolsImported
    | PoolAccounted
    | BackendsResolved
    | HealthChanged
    | ProviderOperationStarted
    | ProviderOperationSucceeded
    | ProviderOperationFailed
    | ProviderStateChanged
    | Applied
    | DeadLettered
)
AnyEvent: TypeAlias = Fact | Decision

SEEN: Final[dict[str, type]] = {
    "loadbalancers": LoadBalancerSeen,
    "ippools": IPPoolSeen,
    "virtualmachineinstances": VirtualMachineInstanceSeen,
    "virtualmachines": VirtualMachineSeen,
    "network-attachment-definitions": NetworkAttachmentDefinitionSeen,
    "namespaces": NamespaceSeen,
    "nodes": NodeSeen,
    "servicecidrs": ServiceCIDRSeen,
    "services": ServiceSeen,
    "endpointslices": EndpointSliceSeen,
    "pods": PodSeen,
    "configmaps": ConfigMapSeen,
}
_SEEN_TYPES: Final = frozenset(SEEN.values())

EVENT_TYPES: Final[dict[str, type[Event]]] = {
    str(cls.__struct_config__.tag): cls for cls in Event.__subclasses__()
}

_TAGS: Final = {cls: tag for tag, cls in EVENT_TYPES.items()}

_BRANCHES: Final[dict[type, str]] = {
    LeaseGranted: "lb.lease",
    LeaseAdopted: "lb.lease",
    LeaseReleased: "lb.lease",
    LeaseRefused: "lb.lease",
    AddressDelegated: "lb.lease",
    AddressContested: "lb.lease",
    OwnerCondemned: "lb.lease",
    BackendsResolved: "lb.backends",
    HealthChanged: "lb.health",
    ProviderOperationStarted: "lb.provider",
    ProviderOperationSucceeded: "lb.provider",
    ProviderOperationFailed: "lb.provider",
    ProviderStateChanged: "lb.provider",
    Applied: "lb.applied",
}


class UnknownEvent(ValueError):
    """The tag names no event that this version knows; skip it, it is from a newer producer."""


_encoder = msgspec.json.Encoder()
_decoders = {tag: msgspec.json.Decoder(cls) for tag, cls in EVENT_TYPES.items()}
_head = msgspec.json.Decoder(msgspec.defstruct("Head", [("type", str)]))


def tag_of(event: Event) -> str:
    return _TAGS[type(event)]


def encode(event: Event) -> bytes:
    return _encoder.encode(event)


def decode(data: bytes, tag: str | None = None) -> AnyEvent:
    """Decode one event; `tag` (from the Lb-Type header) saves a look into the body.

    Raises UnknownEvent for a tag of the future, msgspec.DecodeError or ValidationError (both
    ValueError) naming the field for everything else that is wrong.
    """
    if tag is None or tag not in _decoders:
        tag = _head.decode(data).type  # type: ignore[attr-defined]
        if tag not in _decoders:
            msg = f"unknown event type {tag!r}"
            raise UnknownEvent(msg)
    return _decoders[tag].decode(data)  # type: ignore[return-value]


def subject_of(event: Event) -> str:
    """The subject an event is published on."""
    kind = type(event)  # looked up, not matched: every event of every service passes here
    branch = _BRANCHES.get(kind)
    if branch is not None:
        return subjects.object_subject(branch, event.owner.ref)  # type: ignore[attr-defined]
    if kind in _SEEN_TYPES:
        return subjects.fact_subject(objects.object_ref(event.object))  # type: ignore[attr-defined]
    match event:
        case ObjectGone() | ObjectUnfit():
            return subjects.fact_subject(ObjectRef(event.plural, event.namespace, event.name))
        case SyncStarted() | SyncFinished():
            return subjects.sync_subject(event.plural)
        case PoolAccounted() | ReleaseAnswered():
            return subjects.object_subject("lb.lease", ObjectRef("ippools", "", event.pool))
        case PoolsImported():
            ref = ObjectRef("configmaps", event.namespace, event.name)
            return subjects.object_subject("lb.lease", ref)
        case LeasesRestated():
            return subjects.RESTATED_SUBJECT
        case DeadLettered():
            return subjects.dead_subject(event.service)
        case EpochStarted():
            return subjects.EPOCH_SUBJECT
    raise TypeError(f"{kind.__name__} is no event with a subject")


def fact_ref(event: Event) -> ObjectRef | None:
    """The object a fact speaks of; None for marks, epochs and decisions."""
    kind = type(event)
    if kind in _SEEN_TYPES:
        return objects.object_ref(event.object)  # type: ignore[attr-defined]
    if kind is ObjectGone or kind is ObjectUnfit:
        return ObjectRef(event.plural, event.namespace, event.name)  # type: ignore[attr-defined]
    return None
