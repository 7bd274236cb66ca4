"""Where addresses come from: EndpointSlices and egress pods, read into what they contribute.

Rules: an endpoint counts while `ready` is not false (nothing said is ready); `serving` and
`terminating` are not consulted, a draining endpoint takes no new connections here. Without a
nodeName, or with an address that is none, an endpoint is left out and counted. The location of a
node is its smallest InternalIP of each family, the same one in whatever order it lists them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias

from schema import objects
from schema.names import SERVICE_NAME_LABEL
from services.nrp_sync.shapes import parse_ip
from services.nrp_sync.wishes import Family

Kind: TypeAlias = Literal["inbound", "outbound"]
Refs: TypeAlias = tuple[str, ...]
"""The services of one address: ordered names, () when it should not be there."""
NONE: Final[Refs] = ()


class Name(NamedTuple):
    """Namespace and name of an object."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class Location(NamedTuple):
    """A node's InternalIPs, None for a family that it has none of."""

    v4: str | None
    v6: str | None

    def of(self, address: str) -> str | None:
        return self.v6 if ":" in address else self.v4


NOWHERE: Final = Location(None, None)


class LeftOut(NamedTuple):
    """Endpoints of one source that are no backends, by why."""

    not_ready: int = 0
    draining: int = 0
    no_node: int = 0
    malformed: int = 0

    def __bool__(self) -> bool:
        return any(self[:])


ALL_USED: Final = LeftOut()


class Reading(NamedTuple):
    """What a slice or a pod says."""

    name: Name
    uid: str
    endpoints: dict[str, str]
    """Address to node."""
    service: Name | None = None
    service_uid: str = ""
    left_out: LeftOut = ALL_USED


@dataclass(slots=True, eq=False)
class Member:
    """A service as the addresses behind it see it. `ready`: registered and not being deleted."""

    kind: Kind
    identity: str
    family: Literal[0, 4, 6] = 0
    """The family it takes, 0 for every one."""
    ready: bool = False
    sources: dict[Source, None] = field(default_factory=dict)
    """In the order in which they came; a dict is half as big as a set."""
    alone: Refs = NONE
    """The services of an address that only this one has."""

    def __post_init__(self) -> None:
        self.alone = (self.identity,)

    def takes(self, address: str) -> bool:
        return self.ready and (self.family == 0 or self.family == family_of(address))


class One(Mapping[str, str]):
    """The endpoint of a source that has one, in a quarter of a dict's room: most pods and many
    slices are like that."""

    __slots__ = ("address", "node")

    def __init__(self, address: str, node: str) -> None:
        self.address, self.node = address, node

    def __getitem__(self, address: str) -> str:
        if address != self.address:
            raise KeyError(address)
        return self.node

    def __contains__(self, address: object) -> bool:
        return address == self.address

    def __iter__(self) -> Iterator[str]:
        yield self.address

    def __len__(self) -> int:
        return 1


NO_ENDPOINTS: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Source:
    """An EndpointSlice or an egress pod as we hold it."""

    name: Name
    uid: str
    endpoints: Mapping[str, str] = field(default_factory=lambda: NO_ENDPOINTS)
    """Address to node; changed by `put` and `drop` only."""
    service: Name | None = None
    service_uid: str = ""
    left_out: LeftOut = ALL_USED
    member: Member | None = None
    sixes: int = 0
    """How many of the addresses are of IPv6."""
    epoch: str = ""
    seq: int = 0
    """Epoch and stream sequence of the last fact about it, kept by who reads the stream."""

    def put(self, address: str, node: str) -> None:
        """Add an endpoint."""
        held = self.endpoints
        if isinstance(held, dict):
            held[address] = node
        else:
            self.endpoints = {**held, address: node} if held else One(address, node)
        self.sixes += ":" in address

    def drop(self, address: str) -> None:
        """Take away an endpoint that is there."""
        held = self.endpoints
        if isinstance(held, dict) and len(held) > 1:
            del held[address]
        else:
            self.endpoints = NO_ENDPOINTS
        self.sixes -= ":" in address


def family_of(address: str) -> Family:
    return 6 if ":" in address else 4


def read_slice(view: objects.EndpointSlice, old: Source | None = None) -> Reading:
    """What a slice says. `old`, what it said before, saves parsing the addresses that stayed."""
    meta = view.metadata
    seen = old.endpoints if old is not None else NO_ENDPOINTS
    service = (meta.labels or {}).get(SERVICE_NAME_LABEL)
    endpoints: dict[str, str] = {}
    not_ready = draining = no_node = malformed = 0
    for endpoint in view.endpoints or () if meta.deletion_timestamp is None else ():
        conditions = endpoint.conditions
        if conditions.ready is False:
            if conditions.serving and conditions.terminating:
                draining += 1
            else:
                not_ready += 1
            continue
        if not endpoint.node_name:
            no_node += 1
            continue
        for text in endpoint.addresses or ():
            address = text if text in seen else parse_ip(text)
            if address is None:
                malformed += 1
            else:  # listed twice: on the same node in whatever order
                node = endpoints.get(address, endpoint.node_name)
                endpoints[address] = min(node, endpoint.node_name)
    return Reading(
        name=Name(meta.namespace, meta.name),
        uid=meta.uid,
        endpoints=endpoints,
        service=Name(meta.namespace, service) if service else None,
        service_uid=_owner_uid(meta),
        left_out=LeftOut(not_ready, draining, no_node, malformed),
    )


def _owner_uid(meta: objects.ObjectMeta) -> str:
    for reference in meta.owner_references or ():
        if reference.kind == "Service":
            return reference.uid
    return ""


def read_node(view: objects.Node) -> Location:
    """Where the addresses behind a node are: its smallest InternalIP of each family.

    The smallest, because the order in which a node lists its addresses may change and the location
    must not. Malformed entries are passed over.
    """
    found: dict[Family, str] = {}
    for entry in (view.status.addresses if view.status else None) or ():
        address = parse_ip(entry.address) if entry.type == "InternalIP" else None
        if address is not None:
            family = family_of(address)
            found[family] = min(address, found.get(family, address))
    return Location(found.get(4), found.get(6))
