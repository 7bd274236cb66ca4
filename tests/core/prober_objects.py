"""Load balancers, machines and pods for tests of the prober's core."""

from datetime import UTC, datetime

from schema import objects
from schema.subjects import ObjectRef
from services.prober.images import Dummies
from services.prober.plan import Defaults

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
DEFAULTS = Defaults()
DUMMIES = Dummies("192.0.0.8", "100::1")


def balancer(name="web", *, uid="", namespace="default", annotations=None, deleting=None, **spec):
    spec.setdefault("listeners", [objects.Listener(name="http", port=80, backend_port=8080)])
    spec.setdefault("backend_server_selector", {"app": ["web"]})
    meta = objects.ObjectMeta(
        name=name,
        namespace=namespace,
        uid=uid or f"uid-{name}",
        generation=spec.pop("generation", 1),
        annotations=annotations,
        deletion_timestamp=deleting,
    )
    return objects.LoadBalancer(metadata=meta, spec=objects.LoadBalancerSpec(**spec))


def machine(name, *addresses, uid="", namespace="default", labels=None, deleting=None, phase=""):
    meta = objects.ObjectMeta(
        name=name,
        namespace=namespace,
        uid=uid or f"uid-{name}",
        labels={"app": "web"} if labels is None else labels,
        deletion_timestamp=deleting,
    )
    interfaces = [
        objects.VMInterface(name=f"nic{i}", ip_address=a) for i, a in enumerate(addresses)
    ]
    status = objects.VMIStatus(phase=phase or "Running", interfaces=interfaces)
    return objects.VirtualMachineInstance(metadata=meta, status=status)


def pod(name, *addresses, namespace="default", labels=None, phase="Running", node="n1"):
    meta = objects.ObjectMeta(
        name=name,
        namespace=namespace,
        uid=f"uid-{name}",
        labels={"app": "web"} if labels is None else labels,
    )
    ips = [objects.PodIP(ip=a) for a in addresses]
    status = objects.PodStatus(phase=phase, pod_ip=addresses[0] if addresses else "", pod_ips=ips)
    return objects.Pod(metadata=meta, spec=objects.PodSpec(node_name=node), status=status)


def ref(obj) -> ObjectRef:
    return objects.object_ref(obj)
