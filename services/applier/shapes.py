"""The Service and the EndpointSlices of a load balancer, as they ought to be.

Field for field what Harvester's controller writes, so that kube-vip and its kin see no difference:
same names, labels, owner reference, port rules, dummy endpoint. Node ports are never sent. A
comparison looks only at what is ours; what the API server or somebody else adds is no difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from schema import events, names, objects
from services.applier.documents import Backends, OwnerDoc

LB_API: Final = "loadbalancer.harvesterhci.io/v1beta1"
LB_KIND: Final = "LoadBalancer"
MAX_ENDPOINTS: Final = 1000  # of one EndpointSlice, by its API
BY_DHCP: Final = "0.0.0.0"  # noqa: S104  (kube-vip's word for "by DHCP", not a bind)
Body = dict[str, Any]

# Where each announcer reads the wanted addresses.
ANNOUNCER_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "kube-vip": ("kube-vip.io/loadbalancerIPs",),
    "metallb": ("metallb.io/loadBalancerIPs", "metallb.universe.tf/loadBalancerIPs"),
    "cilium": ("lbipam.cilium.io/ips",),
    "none": (),
}


class Announcing(NamedTuple):
    """How the announcer is told: `none` means that we publish the address ourselves."""

    announcer: str = "none"
    legacy_metallb: bool = False

    @property
    def ours(self) -> bool:
        return self.announcer == "none"

    def annotations(self, addresses: list[str]) -> dict[str, str]:
        keys = ANNOUNCER_KEYS[self.announcer]
        if self.announcer == "metallb":
            keys = keys[1:] if self.legacy_metallb else keys[:1]
        return {key: ",".join(addresses) for key in keys} if addresses else {}


def wanted_addresses(doc: OwnerDoc) -> list[str]:
    if doc.delegated:
        return [doc.delegated]
    return [lease.address for lease in doc.addresses()]


# --- Service ---


def service(lb: objects.LoadBalancer, doc: OwnerDoc, announcing: Announcing) -> Body:
    """The Service of a vm load balancer, as sent by server-side apply."""
    addresses = wanted_addresses(doc)
    annotations = announcing.annotations(addresses)
    spec: Body = {
        "type": "LoadBalancer",
        "ports": [
            {
                **({"name": listener.name} if listener.name else {}),
                "protocol": listener.protocol or "TCP",
                "port": listener.port,
                "targetPort": listener.backend_port,
            }
            for listener in lb.spec.listeners or []
        ],
    }
    spec["loadBalancerIP"] = addresses[0] if addresses else ""
    spec |= _passed_on(lb)
    metadata = {
        "name": lb.metadata.name,
        "namespace": lb.metadata.namespace,
        "labels": {names.SERVICELB_LABEL: "true"},
        "ownerReferences": [owner_reference(doc)],
    }
    if annotations:
        metadata["annotations"] = annotations
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _passed_on(lb: objects.LoadBalancer) -> Body:
    """Extension fields that go to the Service as they are, or their annotation forms."""
    spec, notes = lb.spec, lb.metadata.annotations or {}
    passed: Body = {}
    policy = spec.external_traffic_policy or notes.get("lbledger.io/external-traffic-policy", "")
    if policy in ("Cluster", "Local"):
        passed["externalTrafficPolicy"] = policy
    affinity = spec.session_affinity or notes.get("lbledger.io/session-affinity", "")
    if affinity in ("None", "ClientIP"):
        passed["sessionAffinity"] = affinity
    node_ports = spec.allocate_load_balancer_node_ports
    if node_ports is None:
        said = notes.get("lbledger.io/allocate-node-ports", "")
        node_ports = {"true": True, "false": False}.get(said)
    if node_ports is not None:
        passed["allocateLoadBalancerNodePorts"] = node_ports
    families = spec.ip_families or [
        part.strip()
        for part in notes.get("lbledger.io/ip-families", "").split(",")
        if part.strip() in ("IPv4", "IPv6")
    ]
    if families:
        passed["ipFamilies"] = families
        passed["ipFamilyPolicy"] = "PreferDualStack" if len(families) > 1 else "SingleStack"
    return passed


def service_differs(wanted: Body, known: objects.Service) -> list[str]:
    """The parts of a Service that are not as wanted."""
    spec, want = known.spec, wanted["spec"]
    found = _metadata_differs(wanted["metadata"], known.metadata)
    if spec.type != want["type"]:
        found.append("type")
    if spec.load_balancer_ip != want["loadBalancerIP"]:
        found.append("loadBalancerIP")
    if not {_wanted_port(port) for port in want["ports"]} <= {
        _known_port(port) for port in spec.ports or []
    }:
        found.append("ports")
    shown = {
        "externalTrafficPolicy": spec.external_traffic_policy,
        "sessionAffinity": spec.session_affinity,
        "allocateLoadBalancerNodePorts": spec.allocate_load_balancer_node_ports,
    }
    found += [field for field, value in shown.items() if field in want and want[field] != value]
    if "ipFamilies" in want:
        if want["ipFamilies"][0] not in (spec.ip_families or []):
            found.append("ipFamilies")
        # A cluster of one family shows one, whatever is preferred: only the policy tells.
        if want["ipFamilyPolicy"] != spec.ip_family_policy:
            found.append("ipFamilyPolicy")
    return found


def foreign_parts(wanted: Body, known: objects.Service) -> list[Body]:
    """JSON patch that takes out what somebody else put in: an apply can't remove what it never
    owned. A selector would make the cluster's own controller add endpoints beside ours."""
    keys = {(port["port"], port["protocol"]) for port in wanted["spec"]["ports"]}
    surplus = [
        index
        for index, port in enumerate(known.spec.ports or [])
        if (port.port, port.protocol) not in keys
    ]
    removed = [f"/spec/ports/{index}" for index in reversed(surplus)]
    if known.spec.selector:
        removed.append("/spec/selector")
    if not removed:
        return []
    version = known.metadata.resource_version
    test = {"op": "test", "path": "/metadata/resourceVersion", "value": version}
    return [test, *({"op": "remove", "path": path} for path in removed)]


def _wanted_port(port: Body) -> tuple[str, str, int, int | str]:
    return port.get("name", ""), port["protocol"], port["port"], port["targetPort"]


def _known_port(port: objects.ServicePort) -> tuple[str, str, int, int | str]:
    return port.name, port.protocol, port.port, port.target_port


# --- EndpointSlices ---


def slices(lb: objects.LoadBalancer, doc: OwnerDoc) -> list[Body]:
    """Every slice of the load balancer. The main one carries its name; the names of others hold a
    dot, which no Service name can, so two load balancers never want one slice."""
    image = doc.backends
    if image is None:
        return []
    made: list[Body] = []
    for family in image.families or ["IPv4"]:
        six = family == "IPv6"
        stem = lb.metadata.name + (".ipv6" if six else "")
        for port, group in _groups(image, six):
            endpoints = [_endpoint(backend) for backend in group]
            if port == 0:
                endpoints += _dummy(lb, image, six)
            base = stem if port == 0 else f"{stem}.port-{port}"
            chunks = [
                endpoints[start : start + MAX_ENDPOINTS]
                for start in range(0, len(endpoints), MAX_ENDPOINTS)
            ] or [[]]
            for index, chunk in enumerate(chunks):
                name = base if index == 0 else f"{base}.{index + 1}"
                made.append(_slice(lb, doc, name, family, _slice_ports(image, port), chunk))
    return made


def _groups(image: Backends, six: bool) -> Iterator[tuple[int, list[events.Backend]]]:
    """Backends of one family by their own port; the group without one comes first, always."""
    groups: dict[int, list[events.Backend]] = {0: []}
    for backend in image.backends:
        if (":" in backend.address) == six:
            groups.setdefault(backend.port, []).append(backend)
    yield from sorted(groups.items())


def _endpoint(backend: events.Backend) -> Body:
    endpoint: Body = {"addresses": [backend.address], "conditions": {"ready": backend.ready}}
    if backend.kind != "Address":
        endpoint["targetRef"] = {
            "namespace": backend.namespace,
            "name": backend.name,
            "uid": backend.uid,
        }
    return endpoint


def _dummy(lb: objects.LoadBalancer, image: Backends, six: bool) -> list[Body]:
    address = image.dummy6 if six else image.dummy
    if not address:
        return []
    target = {
        "namespace": lb.metadata.namespace,
        "name": lb.metadata.name,
        "uid": names.DUMMY_UID,
    }
    return [{"addresses": [address], "conditions": {"ready": True}, "targetRef": target}]


def _slice_ports(image: Backends, own: int) -> list[Body]:
    return [
        {
            **({"name": port.name} if port.name else {}),
            "protocol": port.protocol or "TCP",
            "port": own or port.port,
        }
        for port in image.ports
    ]


def _slice(
    lb: objects.LoadBalancer,
    doc: OwnerDoc,
    name: str,
    family: str,
    ports: list[Body],
    endpoints: list[Body],
) -> Body:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": lb.metadata.namespace,
            "labels": {
                names.SERVICELB_LABEL: "true",
                names.SERVICE_NAME_LABEL: lb.metadata.name,
            },
            "ownerReferences": [owner_reference(doc)],
        },
        "addressType": family,
        "ports": ports,
        "endpoints": endpoints,
    }


def opening(wanted: list[Body], shown: Mapping[str, objects.EndpointSlice | None]) -> set[str]:
    """Families of which a slice is to get a ready endpoint that it does not show yet."""
    return {
        body["addressType"]
        for body in wanted
        if _wants_ready(body) and not _shows_ready(shown[body["metadata"]["name"]])
    }


def closes(wanted: Body, known: objects.EndpointSlice | None) -> bool:
    """Whether a slice is to have no ready endpoint any more."""
    return _shows_ready(known) and not _wants_ready(wanted)


def _wants_ready(wanted: Body) -> bool:
    return any(endpoint["conditions"]["ready"] for endpoint in wanted["endpoints"])


def _shows_ready(known: objects.EndpointSlice | None) -> bool:
    return known is not None and any(
        endpoint.conditions is None or endpoint.conditions.ready is not False
        for endpoint in known.endpoints or []
    )


def slice_differs(wanted: Body, known: objects.EndpointSlice) -> list[str]:
    """The parts of a slice that are not as wanted."""
    found = _metadata_differs(wanted["metadata"], known.metadata)
    ports = [(port.name, port.protocol, port.port) for port in known.ports or []]
    if ports != [(p.get("name", ""), p["protocol"], p["port"]) for p in wanted["ports"]]:
        found.append("ports")
    if [_known_endpoint(endpoint) for endpoint in known.endpoints or []] != [
        _wanted_endpoint(endpoint) for endpoint in wanted["endpoints"]
    ]:
        found.append("endpoints")
    return found


def _wanted_endpoint(endpoint: Body) -> tuple[Any, ...]:
    target = endpoint.get("targetRef", {})
    return (
        endpoint["addresses"],
        endpoint["conditions"]["ready"],
        target.get("namespace", ""),
        target.get("name", ""),
        target.get("uid", ""),
    )


def _known_endpoint(endpoint: objects.Endpoint) -> tuple[Any, ...]:
    target = endpoint.target_ref or objects.TargetRef()
    ready = endpoint.conditions.ready
    return (
        endpoint.addresses or [],
        True if ready is None else ready,
        target.namespace,
        target.name,
        target.uid,
    )


# --- ownership ---


def owner_reference(doc: OwnerDoc) -> Body:
    return {"apiVersion": LB_API, "kind": LB_KIND, "name": doc.name, "uid": doc.uid}


def standing(doc: OwnerDoc, known: objects.Service | objects.EndpointSlice) -> str:
    """Whose an object of our name is: ours, former (of a load balancer that is gone), foreign."""
    meta = known.metadata
    if doc.made.get(made_key(known)) == meta.uid != "":
        return "ours"
    former = False
    for reference in meta.owner_references or []:
        if reference.uid == doc.uid:
            return "ours"
        former = former or (reference.kind == LB_KIND and reference.name == doc.name)
    return "former" if former else "foreign"


def made_key(known: objects.Service | objects.EndpointSlice) -> str:
    return f"{objects.PLURALS[type(known)]}/{known.metadata.name}"


def _metadata_differs(wanted: Body, known: objects.ObjectMeta) -> list[str]:
    found = []
    labels, notes = known.labels or {}, known.annotations or {}
    if any(labels.get(key) != value for key, value in wanted["labels"].items()):
        found.append("labels")
    if any(notes.get(key) != value for key, value in wanted.get("annotations", {}).items()):
        found.append("annotations")
    references = {reference.uid for reference in known.owner_references or []}
    if any(reference["uid"] not in references for reference in wanted["ownerReferences"]):
        found.append("ownerReferences")
    return found
