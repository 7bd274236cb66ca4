"""Trimmed views of the Kubernetes objects that lbledger watches.

A view holds what some service decides by, and nothing else: no managedFields, no heartbeat, no
foreign annotation. The watcher publishes when the digest of a view changes, so a field added here
is a field whose every change becomes a fact. Names follow the Kubernetes JSON (camelCase).

Views are lenient: an absent or null field takes its default, unknown fields are dropped.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, TypeAlias

import msgspec

from schema.subjects import ObjectRef

KEPT_ANNOTATION_PREFIXES: Final = (
    "lbledger.io/",
    "loadbalancer.harvesterhci.io/",
    "cloudprovider.harvesterhci.io/",
    "harvesterhci.io/",
    "network.harvesterhci.io/",
    "field.cattle.io/projectId",
    "kube-vip.io/",
    "metallb.io/",
    "metallb.universe.tf/",
    "lbipam.cilium.io/",
    "io.cilium/",
    "service.beta.kubernetes.io/azure-",
    "kubernetes.azure.com/",
)


class View(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of every view and of every part of one."""


class OwnerReference(View, frozen=True, kw_only=True):
    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""


class ObjectMeta(View, frozen=True, kw_only=True):
    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    finalizers: list[str] | None = None
    owner_references: list[OwnerReference] | None = None


class Condition(View, frozen=True, kw_only=True):
    """A metav1 condition, plus Harvester's `lastUpdateTime`."""

    type: str
    status: str = "Unknown"
    reason: str = ""
    message: str = ""
    observed_generation: int = 0
    last_transition_time: str = ""
    last_update_time: str = ""


# --- loadbalancer.harvesterhci.io/v1beta1 -------------------------------------------------------


class HealthCheck(View, frozen=True, kw_only=True):
    """`port` 0 means disabled (in a listener: its backendPort); a 0 elsewhere means the default.

    The fields from `protocol` on are extensions.
    """

    port: int = 0
    success_threshold: int = 0
    failure_threshold: int = 0
    period_seconds: int = 0
    timeout_seconds: int = 0
    protocol: str = ""  # TCP (the default) | HTTP | HTTPS | GRPC | UDP
    path: str = ""  # HTTP, HTTPS; "" is /
    host: str = ""  # HTTP, HTTPS, GRPC: Host header and TLS name; "" is the backend's address
    codes: str = ""  # HTTP, HTTPS: expected, as "200-299,404"; "" is 200-399
    service: str = ""  # GRPC: name to ask for; "" is the whole server
    insecure_skip_verify: bool = False  # HTTPS: take any certificate


class Listener(View, frozen=True, kw_only=True):
    name: str = ""
    port: int = 0
    protocol: str = "TCP"
    backend_port: int = 0
    health_check: HealthCheck | None = None  # in place of the load balancer's (extension)


class ExplicitBackend(View, frozen=True, kw_only=True):
    """A backend that is no Kubernetes object."""

    name: str = ""
    address: str = ""
    port: int = 0  # 0: the listener's backendPort


class LoadBalancerSpec(View, frozen=True, kw_only=True):
    description: str = ""
    workload_type: str = ""  # "" is vm
    ipam: str = ""  # "" is pool
    ip_pool: str = ""
    address: str = ""  # requested address (extension)
    listeners: list[Listener] | None = None
    backend_server_selector: dict[str, list[str]] | None = None
    health_check: HealthCheck | None = None
    backend_pod_selector: dict[str, list[str]] | None = (
        None  # as the one above, of pods (extension)
    )
    backends: list[ExplicitBackend] | None = None  # extension
    backend_network: str = ""  # interface, or network as namespace/name, of the VMs (extension)
    ip_families: list[str] | None = None  # IPv4 (the default), IPv6 or both (extension)
    external_traffic_policy: str = ""  # this and the next two: passed on to the Service (extension)
    session_affinity: str = ""
    allocate_load_balancer_node_ports: bool | None = None


class AllocatedAddress(View, frozen=True, kw_only=True):
    ip_pool: str = ""
    ip: str = ""
    mask: str = ""
    gateway: str = ""


class BackendStatus(View, frozen=True, kw_only=True):
    name: str = ""
    address: str = ""
    ready: bool = False
    state: str = ""
    message: str = ""
    since: str = ""
    last_error: str = ""


class LoadBalancerStatus(View, frozen=True, kw_only=True):
    allocated_address: AllocatedAddress | None = None
    address: str = ""
    backend_servers: list[str] | None = None
    backends: list[BackendStatus] | None = None  # extension
    conditions: list[Condition] | None = None


class LoadBalancer(View, frozen=True, kw_only=True):
    metadata: ObjectMeta
    spec: LoadBalancerSpec = LoadBalancerSpec()
    status: LoadBalancerStatus | None = None


class PoolRange(View, frozen=True, kw_only=True):
    subnet: str = ""
    range_start: str = ""
    range_end: str = ""
    gateway: str = ""


class PoolScope(View, frozen=True, kw_only=True):
    project: str = ""
    namespace: str = ""
    guest_cluster: str = ""


class PoolSelector(View, frozen=True, kw_only=True):
    priority: int = 0
    network: str = ""
    scope: list[PoolScope] | None = None


class PoolQuota(View, frozen=True, kw_only=True):
    """At most `limit` addresses of the pool for each owner group that the other fields name."""

    project: str = ""  # "*": each project by itself; likewise below
    namespace: str = ""
    guest_cluster: str = ""
    limit: int = 0


class IPPoolSpec(View, frozen=True, kw_only=True):
    """The fields from `exclude` on are extensions."""

    description: str = ""
    ranges: list[PoolRange] | None = None
    selector: PoolSelector | None = None
    exclude: list[str] | None = None  # addresses, ranges first-last, CIDRs
    avoid_buggy_ips: bool = msgspec.field(default=False, name="avoidBuggyIPs")
    disabled: bool = False  # gives out nothing; what is held stays
    quotas: list[PoolQuota] | None = None


class IPPoolStatus(View, frozen=True, kw_only=True):
    total: int = 0
    available: int = 0
    last_allocated: str = ""
    allocated: dict[str, str] | None = None
    allocated_history: dict[str, str] | None = None
    conditions: list[Condition] | None = None


class IPPool(View, frozen=True, kw_only=True):
    metadata: ObjectMeta
    spec: IPPoolSpec = IPPoolSpec()
    status: IPPoolStatus | None = None


# --- kubevirt.io/v1, k8s.cni.cncf.io/v1 ---------------------------------------------------------


class VMInterface(View, frozen=True, kw_only=True):
    name: str = ""
    ip_address: str = ""
    ip_addresses: list[str] | None = None


class VMIStatus(View, frozen=True, kw_only=True):
    phase: str = ""
    node_name: str = ""
    interfaces: list[VMInterface] | None = None


class MultusNetwork(View, frozen=True, kw_only=True):
    network_name: str = ""  # [namespace/]name of a NetworkAttachmentDefinition


class VMNetwork(View, frozen=True, kw_only=True):
    name: str = ""
    multus: MultusNetwork | None = None


class VMISpec(View, frozen=True, kw_only=True):
    networks: list[VMNetwork] | None = None


class VirtualMachineInstance(View, frozen=True, kw_only=True):
    metadata: ObjectMeta
    spec: VMISpec | None = None
    status: VMIStatus | None = None


class VirtualMachine(View, frozen=True, kw_only=True):
    metadata: ObjectMeta


class NetworkAttachmentDefinitionSpec(View, frozen=True, kw_only=True):
    config: str = ""


class NetworkAttachmentDefinition(View, frozen=True, kw_only=True):
    metadata: ObjectMeta
    spec: NetworkAttachmentDefinitionSpec = NetworkAttachmentDefinitionSpec()


# --- core/v1, discovery.k8s.io/v1, networking.k8s.io/v1 -----------------------------------------


class NamespaceStatus(View, frozen=True, kw_only=True):
    phase: str = ""


class Namespace(View, frozen=True, kw_only=True):
    metadata: ObjectMeta
    status: NamespaceStatus | None = None


class NodeAddress(View, frozen=True, kw_only=True):
    type: str = ""
    address: str = ""


class NodeSpec(View, frozen=True, kw_only=True):
    pod_cidrs: list[str] | None = msgspec.field(default=None, name="podCIDRs")


class NodeStatus(View, frozen=True, kw_only=True):
    addresses: list[NodeAddress] | None = None


class Node(View, frozen=True, kw_only=True):
    metadata: ObjectMeta
    spec: NodeSpec = NodeSpec()
    status: NodeStatus | None = None


class ServiceCIDRSpec(View, frozen=True, kw_only=True):
    cidrs: list[str] | None = None


class ServiceCIDR(View, frozen=True, kw_only=True):
    """networking.k8s.io/v1: where clusterIPs come from, one network of each family at most."""

    metadata: ObjectMeta
    spec: ServiceCIDRSpec = ServiceCIDRSpec()


class ServicePort(View, frozen=True, kw_only=True):
    name: str = ""
    protocol: str = "TCP"
    port: int = 0
    target_port: int | str = 0
    node_port: int = 0


class ServiceSpec(View, frozen=True, kw_only=True):
    type: str = ""
    load_balancer_class: str = ""
    load_balancer_ip: str = msgspec.field(default="", name="loadBalancerIP")
    cluster_ip: str = msgspec.field(default="", name="clusterIP")
    cluster_ips: list[str] | None = msgspec.field(default=None, name="clusterIPs")
    ip_families: list[str] | None = None
    ip_family_policy: str = ""
    ports: list[ServicePort] | None = None
    selector: dict[str, str] | None = None
    external_traffic_policy: str = ""
    session_affinity: str = ""
    allocate_load_balancer_node_ports: bool | None = None
    load_balancer_source_ranges: list[str] | None = None


class PortStatus(View, frozen=True, kw_only=True):
    port: int = 0
    protocol: str = "TCP"
    error: str = ""


class Ingress(View, frozen=True, kw_only=True):
    ip: str = ""
    hostname: str = ""
    ip_mode: str = ""
    ports: list[PortStatus] | None = None


class LoadBalancerIngress(View, frozen=True, kw_only=True):
    ingress: list[Ingress] | None = None


class ServiceStatus(View, frozen=True, kw_only=True):
    load_balancer: LoadBalancerIngress | None = None
    conditions: list[Condition] | None = None


class Service(View, frozen=True, kw_only=True):
    metadata: ObjectMeta
    spec: ServiceSpec = ServiceSpec()
    status: ServiceStatus | None = None


class TargetRef(View, frozen=True, kw_only=True):
    kind: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""


class EndpointConditions(View, frozen=True, kw_only=True):
    """None is "not said": ready counts as true then, as discovery.k8s.io defines."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Endpoint(View, frozen=True, kw_only=True):
    addresses: list[str] | None = None
    conditions: EndpointConditions = EndpointConditions()
    node_name: str = ""
    target_ref: TargetRef | None = None


class EndpointPort(View, frozen=True, kw_only=True):
    name: str = ""
    protocol: str = "TCP"
    port: int | None = None


class EndpointSlice(View, frozen=True, kw_only=True):
    metadata: ObjectMeta
    address_type: str = ""
    endpoints: list[Endpoint] | None = None
    ports: list[EndpointPort] | None = None


class PodSpec(View, frozen=True, kw_only=True):
    node_name: str = ""
    host_network: bool = False


class PodIP(View, frozen=True, kw_only=True):
    ip: str = ""


class PodStatus(View, frozen=True, kw_only=True):
    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    pod_ips: list[PodIP] | None = msgspec.field(default=None, name="podIPs")


class Pod(View, frozen=True, kw_only=True):
    metadata: ObjectMeta
    spec: PodSpec = PodSpec()
    status: PodStatus | None = None


class ConfigMap(View, frozen=True, kw_only=True):
    metadata: ObjectMeta
    data: dict[str, str] | None = None


AnyObject: TypeAlias = (
    LoadBalancer
    | IPPool
    | VirtualMachineInstance
    | VirtualMachine
    | NetworkAttachmentDefinition
    | Namespace
    | Node
    | ServiceCIDR
    | Service
    | EndpointSlice
    | Pod
    | ConfigMap
)

# plural -> view. The plural is the third word of a fact's subject.
VIEWS: Final[dict[str, type[AnyObject]]] = {
    "loadbalancers": LoadBalancer,
    "ippools": IPPool,
    "virtualmachineinstances": VirtualMachineInstance,
    "virtualmachines": VirtualMachine,
    "network-attachment-definitions": NetworkAttachmentDefinition,
    "namespaces": Namespace,
    "nodes": Node,
    "servicecidrs": ServiceCIDR,
    "services": Service,
    "endpointslices": EndpointSlice,
    "pods": Pod,
    "configmaps": ConfigMap,
}
PLURALS: Final[dict[type, str]] = {view: plural for plural, view in VIEWS.items()}


def object_ref(obj: AnyObject) -> ObjectRef:
    return ObjectRef(PLURALS[type(obj)], obj.metadata.namespace, obj.metadata.name)


def trim(obj: AnyObject) -> AnyObject:
    """Drop the annotations that nobody of ours reads (kubectl's last-applied may be 256 KiB)."""
    annotations = obj.metadata.annotations
    if not annotations:
        return obj
    kept = {k: v for k, v in annotations.items() if k.startswith(KEPT_ANNOTATION_PREFIXES)}
    if len(kept) == len(annotations):
        return obj
    metadata = msgspec.structs.replace(obj.metadata, annotations=kept or None)
    return msgspec.structs.replace(obj, metadata=metadata)
