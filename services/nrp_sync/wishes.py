"""What one Kubernetes object asks of the provider, or why it can't be had.

Pure reading of a Service or an egress label: specs, refusals, and the names and shapes of the
resources that follow from a spec. A refusal names the field, the value and what would be right; it
is a value, never an exception. The order of a Service's ports is no part of a spec.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Final, Literal, TypeAlias

import msgspec

from schema import objects
from schema.names import NRP_CLASS
from services.nrp_sync.provider import (
    DEFAULT_SERVICE,
    LoadBalancer,
    NatGateway,
    PublicAddress,
    Rule,
)

IDLE_TIMEOUT: Final = "service.beta.kubernetes.io/azure-load-balancer-tcp-idle-timeout"
INTERNAL: Final = "service.beta.kubernetes.io/azure-load-balancer-internal"
IDLE_DEFAULT: Final = 4
IDLE_RANGE: Final = range(4, 31)
FRONTEND_RANGE: Final = range(1, 65_535)
BACKEND_RANGE: Final = range(1, 65_536)
SHOWN: Final = 80

_UID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_EGRESS: Final = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,71}[a-z0-9_])?")

Family: TypeAlias = Literal[4, 6]


class Port(msgspec.Struct, frozen=True, order=True):
    protocol: Literal["Tcp", "Udp"]
    port: int
    target: int


class InboundSpec(msgspec.Struct, frozen=True, kw_only=True, tag="inbound", omit_defaults=True):
    """A load balancer: one public address of one family, and its forwarded ports in order."""

    ports: tuple[Port, ...]
    idle_minutes: int = IDLE_DEFAULT
    family: Family = 4


class OutboundSpec(msgspec.Struct, frozen=True, kw_only=True, tag="outbound", omit_defaults=True):
    """A NAT gateway with one public address of each family."""

    families: tuple[Family, ...] = (4,)


Spec: TypeAlias = InboundSpec | OutboundSpec


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a wish can't be met. `reason` becomes the reason of a condition and of an Event."""

    reason: str
    field: str
    message: str


def claims(service: objects.Service, *, classless: bool) -> bool:
    """Whether the Service wants a load balancer from us, whatever else is wrong with it."""
    if service.spec.type != "LoadBalancer" or service.metadata.deletion_timestamp is not None:
        return False
    wanted = service.spec.load_balancer_class
    return wanted == NRP_CLASS or (wanted == "" and classless)


def read_service(
    service: objects.Service, *, first_family: bool = False
) -> InboundSpec | Refusal | None:
    """The spec of a claimed Service; None while it has no port (then there is nothing to do yet).

    `first_family`: serve a dual-stack Service in its first family instead of refusing it.
    """
    if not service.spec.ports:
        return None
    refusal = _admit(service, first_family=first_family)
    if refusal is not None:
        return refusal
    idle = _idle_minutes(service)
    if isinstance(idle, Refusal):
        return idle
    ports = _ports(service.spec.ports)
    if isinstance(ports, Refusal):
        return ports
    families = service.spec.ip_families or ["IPv4"]
    return InboundSpec(ports=ports, idle_minutes=idle, family=6 if families[0] == "IPv6" else 4)


def _admit(service: objects.Service, *, first_family: bool) -> Refusal | None:
    spec, annotations = service.spec, service.metadata.annotations or {}
    if annotations.get(INTERNAL, "").strip().lower() == "true":
        return Refusal(
            reason="UnsupportedInternalLoadBalancer",
            field=f"metadata.annotations[{INTERNAL}]",
            message=f"{INTERNAL} is 'true'; only public load balancers are served, remove it",
        )
    if spec.session_affinity not in ("", "None"):
        return Refusal(
            reason="UnsupportedSessionAffinity",
            field="spec.sessionAffinity",
            message=f"spec.sessionAffinity is {shown(spec.session_affinity)}, it must be 'None'",
        )
    if spec.load_balancer_ip:
        return Refusal(
            reason="UnsupportedLoadBalancerIP",
            field="spec.loadBalancerIP",
            message=f"spec.loadBalancerIP is {shown(spec.load_balancer_ip)}, it must be empty: "
            "the provider chooses the address",
        )
    if len(spec.ip_families or ()) > 1 and not first_family:
        return Refusal(
            reason="UnsupportedDualStack",
            field="spec.ipFamilies",
            message=f"spec.ipFamilies is {spec.ip_families}, it must name one family",
        )
    return None


def _idle_minutes(service: objects.Service) -> int | Refusal:
    text = (service.metadata.annotations or {}).get(IDLE_TIMEOUT)
    if text is None:
        return IDLE_DEFAULT
    text = text.strip()
    if text.isascii() and text.isdecimal() and len(text) < 4 and int(text) in IDLE_RANGE:
        return int(text)
    return Refusal(
        reason="InvalidIdleTimeout",
        field=f"metadata.annotations[{IDLE_TIMEOUT}]",
        message=f"{IDLE_TIMEOUT} is {shown(text)}, it must be a whole number of minutes "
        "from 4 to 30",
    )


def shown(text: str) -> str:
    """What somebody wrote, quoted, as much of it as fits a message."""
    return repr(text) if len(text) <= SHOWN else f"{text[:SHOWN]!r}... ({len(text)} characters)"


def _ports(given: list[objects.ServicePort]) -> tuple[Port, ...] | Refusal:
    ports: list[Port] = []
    for position, port in enumerate(given):
        made = _port(f"spec.ports[{position}]", port)
        if isinstance(made, Refusal):
            return made
        ports.append(made)
    taken: dict[tuple[str, int], int] = {}
    for position, made in enumerate(ports):
        first = taken.setdefault((made.protocol, made.target), position)
        if first != position:
            return Refusal(
                reason="UnsupportedBackendPortCollision",
                field=f"spec.ports[{position}].targetPort",
                message=f"spec.ports[{position}] and spec.ports[{first}] both lead to "
                f"{made.protocol.upper()} {made.target}; each needs a target port of its own",
            )
    return tuple(sorted(ports))


def _port(field: str, port: objects.ServicePort) -> Port | Refusal:
    protocol = (port.protocol or "TCP").upper()
    if protocol not in ("TCP", "UDP"):
        return Refusal(
            reason="UnsupportedProtocol",
            field=f"{field}.protocol",
            message=f"{field}.protocol is {port.protocol!r}, it must be TCP or UDP",
        )
    if isinstance(port.target_port, str):
        return Refusal(
            reason="UnsupportedNamedTargetPort",
            field=f"{field}.targetPort",
            message=f"{field}.targetPort is {port.target_port!r}, it must be a number",
        )
    target = port.target_port or port.port
    for name, value, allowed in (
        ("port", port.port, FRONTEND_RANGE),
        ("targetPort", target, BACKEND_RANGE),
    ):
        if value not in allowed:
            return Refusal(
                reason="UnsupportedPort",
                field=f"{field}.{name}",
                message=f"{field}.{name} is {value}, it must be from 1 to {allowed[-1]}",
            )
    return Port("Tcp" if protocol == "TCP" else "Udp", port.port, target)


def read_egress(label: str) -> str | Refusal:
    """The egress identity that a label's value names (it is not empty)."""
    identity = label.strip().lower()
    if identity == DEFAULT_SERVICE:
        return Refusal(
            reason="ServiceGatewayReservedEgressLabel",
            field="metadata.labels",
            message=f"the egress label is {label!r}, which is the provider's own; choose another",
        )
    if _EGRESS.fullmatch(identity) is None or is_uid(identity):
        return Refusal(
            reason="ServiceGatewayInvalidEgressLabel",
            field="metadata.labels",
            message=f"the egress label is {label!r}, it must be 1 to 73 letters, digits, '.', '_' "
            "or '-', begin with a letter or digit, end with one or '_', and be no UID",
        )
    return identity


def refuse_egress(namespace: str, identity: str, allowed: tuple[str, ...]) -> Refusal | None:
    """Why a namespace's pods may not leave by a gateway, None when they may."""
    wanted = f"{namespace}/{identity}"
    if not allowed or any(fnmatchcase(wanted, pattern.lower()) for pattern in allowed):
        return None
    return Refusal(
        reason="ServiceGatewayEgressNotAllowed",
        field="metadata.labels",
        message=f"the egress label is {identity!r}, by which namespace {namespace} may not leave: "
        "nrp.egress_allowed does not list it",
    )


def is_uid(text: str) -> bool:
    """Whether a name has the shape that inbound services and their resources of ours have."""
    return _UID.fullmatch(text.lower()) is not None


# --- resources ----------------------------------------------------------------------------------


def public_ip_name(identity: str, family: Family = 4, *, outbound: bool = False) -> str:
    """Only a gateway has an address of each family, so only there the family is in the name."""
    return f"{identity}-pip-v6" if outbound and family == 6 else f"{identity}-pip"


def public_ips(identity: str, spec: Spec) -> tuple[PublicAddress, ...]:
    if isinstance(spec, InboundSpec):
        return (PublicAddress(name=public_ip_name(identity), family=spec.family),)
    return tuple(
        PublicAddress(name=public_ip_name(identity, family, outbound=True), family=family)
        for family in spec.families
    )


def owner_of_public_ip(name: str) -> str:
    """The identity in the name of a public IP, "" when the name is none of ours."""
    for suffix in ("-pip-v6", "-pip"):  # the longer one first: `a-pip-v6` is no `...-pip`
        if name.lower().endswith(suffix):
            return name.lower().removesuffix(suffix)
    return ""


def load_balancer(identity: str, spec: InboundSpec) -> LoadBalancer:
    return LoadBalancer(
        name=identity,
        public_ip=public_ip_name(identity),
        rules=tuple(
            sorted(
                Rule(
                    protocol=port.protocol,
                    frontend_port=port.port,
                    backend_port=port.target,
                    idle_timeout_minutes=spec.idle_minutes,
                )
                for port in spec.ports
            )
        ),
    )


def nat_gateway(identity: str, spec: OutboundSpec) -> NatGateway:
    names = {family: public_ip_name(identity, family, outbound=True) for family in spec.families}
    return NatGateway(
        name=identity,
        public_ips=tuple(name for family, name in names.items() if family == 4),
        public_ips_v6=tuple(name for family, name in names.items() if family == 6),
    )
