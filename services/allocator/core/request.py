"""What a load balancer or a Service asks for, read from its object.

A part that can't be followed does not raise: the request carries the problem, and the owner is
refused with it. Who asks (namespace) is taken from the object's place, never from an annotation.
"""

from __future__ import annotations

from typing import Final

from schema import addresses, names, objects
from schema.addresses import AddressError
from services.allocator.core.model import DHCP, NOTHING, POOL, Claim, Request

ADDRESS_ANNOTATION: Final = "lbledger.io/address"
POOL_ANNOTATION: Final = "lbledger.io/pool"
FAMILIES_ANNOTATION: Final = "lbledger.io/ip-families"
POLICY_ANNOTATION: Final = "lbledger.io/ip-family-policy"
SHARE_ANNOTATION: Final = "lbledger.io/allow-shared-ip"
NETWORK_ANNOTATION: Final = "loadbalancer.harvesterhci.io/network"
MANAGEMENT_ANNOTATION: Final = "cloudprovider.harvesterhci.io/managementNetwork"
CLUSTER_ANNOTATION: Final = "loadbalancer.harvesterhci.io/cluster"
BACKING_LABEL: Final = "loadbalancer.harvesterhci.io/servicelb"
GUEST_LABELS: Final = (
    "cloudprovider.harvesterhci.io/cluster",
    "cloudprovider.harvesterhci.io/serviceNamespace",
    "cloudprovider.harvesterhci.io/serviceName",
)
BY_DHCP: Final = "0.0.0.0"  # noqa: S104  (kube-vip's word for "by DHCP", not a bind)
PROTOCOLS: Final = {"TCP": 0, "UDP": 1 << 16, "SCTP": 2 << 16}

NO_REQUEST: Final = Request(NOTHING)


class RequestError(ValueError):
    """A part of the object that can't be followed; names field, value and remedy."""


_KEYS: Final = (
    ADDRESS_ANNOTATION,
    POOL_ANNOTATION,
    FAMILIES_ANNOTATION,
    POLICY_ANNOTATION,
    NETWORK_ANNOTATION,
    MANAGEMENT_ANNOTATION,
    CLUSTER_ANNOTATION,
    SHARE_ANNOTATION,
)
_READ: Final = frozenset(_KEYS)
_SIX: Final = ((False,), (True,))


Parts = tuple[object, ...]
"""What of an object decides what it asks for."""


def shares(parts: Parts) -> bool:
    """Whether a Service asks for an address that it shares."""
    annotations = parts[-1]
    return isinstance(annotations, tuple) and bool(annotations[-1])


class Reader:
    """Requests by the parts of an object that they are read from.

    Most objects of a namespace ask for the same; what one asks for is worked out once.
    """

    def __init__(self, *, classless: bool) -> None:
        self._classless = classless
        self._known: dict[Parts, Request] = {}

    @staticmethod
    def balancer_parts(obj: objects.LoadBalancer) -> Parts:
        spec, meta = obj.spec, obj.metadata
        labels = tuple(map(meta.labels.get, GUEST_LABELS)) if meta.labels else None
        families = tuple(spec.ip_families) if spec.ip_families else None
        return (
            *(meta.namespace, spec.ipam, spec.ip_pool, spec.workload_type, spec.address),
            *(families, labels, _read_annotations(meta)),
        )

    @staticmethod
    def service_parts(obj: objects.Service) -> Parts:
        spec, meta = obj.spec, obj.metadata
        families = tuple(spec.ip_families) if spec.ip_families else None
        ips = spec.cluster_ips
        if ips is not None and len(ips) == 1:  # nearly always
            six: tuple[bool, ...] = _SIX[":" in ips[0]] if ips[0] != "None" else ()
        else:
            six = tuple([":" in ip for ip in ips or (spec.cluster_ip,) if ip and ip != "None"])
        return (
            meta.namespace,
            spec.load_balancer_ip,
            spec.ip_family_policy,
            families,
            six,
            _read_annotations(meta) if meta.annotations else None,
        )

    def load_balancer(self, obj: objects.LoadBalancer) -> Request:
        parts = self.balancer_parts(obj)
        found = self._known.get(parts)
        return found if found is not None else self._keep(parts, of_load_balancer(obj))

    def service(self, obj: objects.Service) -> Request:
        """Of a Service that is ours."""
        parts = self.service_parts(obj)
        if shares(parts):
            return self._sharer(parts, obj)
        found = self._known.get(parts)
        if found is not None:
            return found
        return self._keep(parts, of_service(obj, classless=self._classless))

    def _sharer(self, parts: Parts, obj: objects.Service) -> Request:
        """Sharers of one key differ by their ports."""
        local = _share_policy(obj)
        found = self._known.get((*parts, local))
        if found is None:
            found = of_service(obj, classless=self._classless)
            return found if found.problem else self._keep((*parts, local), found)
        try:
            slots = _slots(obj.spec.ports)
        except RequestError:
            return of_service(obj, classless=self._classless)
        return Request(*found[:_SLOTS], slots, *found[_SLOTS + 1 :])  # type: ignore[call-arg, arg-type]

    def _keep(self, parts: Parts, request: Request) -> Request:
        if len(self._known) >= _KNOWN_LIMIT:
            self._known.clear()
        self._known[parts] = request
        return request


_KNOWN_LIMIT: Final = 65_536
_SLOTS: Final = Request._fields.index("slots")


def _read_annotations(meta: objects.ObjectMeta) -> tuple[str | None, ...] | None:
    annotations = meta.annotations
    if not annotations or _READ.isdisjoint(annotations):
        return None
    return tuple(map(annotations.get, _KEYS))


def of_load_balancer(obj: objects.LoadBalancer) -> Request:
    spec, meta = obj.spec, obj.metadata
    annotations = meta.annotations or {}
    if spec.ipam == "dhcp":
        return Request(DHCP, meta.namespace)
    cluster = spec.workload_type == "cluster"
    try:
        if spec.ipam not in ("", "pool"):
            raise RequestError(f"spec.ipam: {spec.ipam!r} must be pool or dhcp")
        where, text = _requested(("spec.address", spec.address), annotations, ADDRESS_ANNOTATION)
        wanted = _addresses(text, where)
        families = _families(spec.ip_families, annotations.get(FAMILIES_ANNOTATION, ""))
        strict = annotations.get(POLICY_ANNOTATION, "") == "RequireDualStack"
        _fit_families(wanted, families, where)
    except RequestError as error:
        return Request(POOL, meta.namespace, problem=str(error))
    return Request(
        POOL,
        meta.namespace,
        pool=spec.ip_pool or annotations.get(POOL_ANNOTATION, ""),
        families=families,
        strict=strict,
        addresses=wanted,
        network=_network(annotations),
        cluster=_no_wildcard(annotations.get(CLUSTER_ANNOTATION, "")) if cluster else "",
        guest=_guest(meta.labels) if cluster else "",
        guest_cluster=(meta.labels or {}).get(GUEST_LABELS[0], "") if cluster else "",
    )


def of_service(obj: objects.Service, *, classless: bool = False) -> Request:
    """Ports matter to those who share an address; for others the API server has checked them."""
    if not is_ours(obj, classless=classless):
        return NO_REQUEST
    spec, meta = obj.spec, obj.metadata
    annotations = meta.annotations or {}
    try:
        where, text = _requested(
            ("spec.loadBalancerIP", spec.load_balancer_ip), annotations, ADDRESS_ANNOTATION
        )
        if text.strip() == BY_DHCP:
            return Request(DHCP, meta.namespace)
        wanted = _addresses(text, where)
        families, strict = _service_families(spec)
        _fit_families(wanted, families, where)
        share = annotations.get(SHARE_ANNOTATION, "")
        slots = _slots(spec.ports) if share else ()
    except RequestError as error:
        return Request(POOL, meta.namespace, problem=str(error))
    return Request(
        POOL,
        meta.namespace,
        pool=annotations.get(POOL_ANNOTATION, ""),
        families=families,
        strict=strict,
        addresses=wanted,
        network=_network(annotations),
        share=share,
        slots=slots,
        policy=_share_policy(obj) if share else "",
    )


def is_ours(obj: objects.Service, *, classless: bool = False) -> bool:
    """Whether a Service asks us for an address; cheap, most Services do not."""
    spec = obj.spec
    if spec.type != "LoadBalancer":
        return False
    if spec.load_balancer_class:
        return spec.load_balancer_class == names.POOL_CLASS
    if not classless:
        return False
    # The Service that carries a load balancer of ours has no wish of its own.
    if (obj.metadata.labels or {}).get(BACKING_LABEL) == "true":
        return False
    return not any(ref.kind == "LoadBalancer" for ref in obj.metadata.owner_references or ())


def claims_of_load_balancer(obj: objects.LoadBalancer) -> tuple[Claim, ...]:
    """The address that the status shows as allocated."""
    status = obj.status
    shown = status.allocated_address if status else None
    if shown is None or not shown.ip or shown.ip == BY_DHCP:
        return ()
    try:
        address = addresses.parse(shown.ip)
    except AddressError:
        return ()
    return (Claim(address, shown.ip_pool, "status.allocatedAddress"),)


def shown_by_load_balancer(obj: objects.LoadBalancer) -> tuple[int, ...]:
    """The address that is in use: for a ticket the one it shows, else what the announcer says."""
    status = obj.status
    if obj.spec.workload_type == "cluster" or status is None:
        return tuple(claim.address for claim in claims_of_load_balancer(obj))
    try:
        return (addresses.parse(status.address),) if status.address else ()
    except AddressError:
        return ()


def claims_of_service(obj: objects.Service) -> tuple[Claim, ...]:
    """The addresses that the status shows as ingress."""
    status = obj.status
    ingress = (status.load_balancer.ingress if status and status.load_balancer else None) or ()
    claims = []
    for item in ingress:
        try:
            if item.ip:
                claims.append(Claim(addresses.parse(item.ip), "", "status.loadBalancer"))
        except AddressError:
            continue  # a hostname in the wrong field, or somebody's typing error: no claim
    return tuple(claims)


def _requested(
    field: tuple[str, str], annotations: dict[str, str], annotation: str
) -> tuple[str, str]:
    """Where the address is asked for, and what stands there; the annotation goes first."""
    if annotations.get(annotation):
        return f"metadata.annotations[{annotation}]", annotations[annotation]
    return field


def _addresses(text: str, where: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        if not part.strip():
            continue
        try:
            found.append(addresses.parse(part))
        except AddressError as error:
            raise RequestError(f"{where}: {error}") from error
    families = [addresses.family(address) for address in found]
    if len(found) > 2 or len(set(families)) != len(families):
        raise RequestError(f"{where}: {text!r} must be one address, or one of each family")
    return tuple(found)


def _families(named: list[str] | None, annotation: str) -> tuple[int, ...]:
    """Of a load balancer: what it names, else one address of whatever family the pool has."""
    texts = named or [part.strip() for part in annotation.split(",") if part.strip()]
    for text in texts:
        if text not in addresses.FAMILIES:
            raise RequestError(f"ipFamilies: {text!r} must be IPv4 or IPv6")
    return tuple(dict.fromkeys(addresses.FAMILIES[text] for text in texts))


def _service_families(spec: objects.ServiceSpec) -> tuple[tuple[int, ...], bool]:
    """As the API server settled them; for a Service without them, those of its cluster addresses.

    A Service with one cluster address gets one address, whatever its policy prefers: traffic to
    another family could not be delivered.
    """
    families = [addresses.FAMILIES[f] for f in spec.ip_families or () if f in addresses.FAMILIES]
    cluster_ips = spec.cluster_ips or ([spec.cluster_ip] if spec.cluster_ip else [])
    held = [6 if ":" in text else 4 for text in cluster_ips if text and text != "None"]
    if held:
        families = [f for f in families if f in held] or held
    families = families or [4]
    if spec.ip_family_policy == "SingleStack":
        families = families[:1]
    return tuple(dict.fromkeys(families)), spec.ip_family_policy == "RequireDualStack"


def _fit_families(wanted: tuple[int, ...], families: tuple[int, ...], where: str) -> None:
    for address in wanted:
        if families and addresses.family(address) not in families:
            allowed = " or ".join(addresses.NAMES[f] for f in families)
            raise RequestError(
                f"{where}: {addresses.text(address)} is not {allowed}, the family that the "
                "object asks for"
            )


def _slots(ports: list[objects.ServicePort] | None) -> tuple[tuple[int, int], ...]:
    """Ports as ranges of one number line: TCP first, then UDP, then SCTP."""
    found = set()
    for port in ports or ():
        if port.protocol not in PROTOCOLS or not 0 < port.port < 1 << 16:
            raise RequestError(
                f"spec.ports: {port.protocol}/{port.port} must be TCP, UDP or SCTP and 1 to 65535"
            )
        slot = PROTOCOLS[port.protocol] + port.port
        found.add((slot, slot))
    return tuple(sorted(found))


def _share_policy(obj: objects.Service) -> str:
    """Sharers with local traffic policy must have the same backends: one node answers for all."""
    if obj.spec.external_traffic_policy != "Local":
        return "Cluster"
    selector = sorted((obj.spec.selector or {}).items())
    return f"Local:{obj.metadata.namespace}:{selector}"


def _network(annotations: dict[str, str]) -> str:
    network = annotations.get(NETWORK_ANNOTATION, "") or annotations.get(MANAGEMENT_ANNOTATION, "")
    return _no_wildcard(network)


def _no_wildcard(text: str) -> str:
    """A `*` in a request widens nothing."""
    return "" if text.strip() == "*" else text.strip()


def _guest(labels: dict[str, str] | None) -> str:
    parts = [(labels or {}).get(label, "") for label in GUEST_LABELS]
    return "/".join(parts) if all(parts) else ""
