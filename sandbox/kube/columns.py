"""The columns in which `kubectl get` shows the built-in kinds, and how a table is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from sandbox.kube.resources import Column, Object

_NAME = "The name of the object, unique among its kind in a namespace."


def age(stamp: Any) -> str:
    """How long ago a time was, in the two units that `kubectl` prints."""
    if not isinstance(stamp, str) or not stamp:
        return "<unknown>"
    try:
        then = datetime.fromisoformat(stamp.replace("Z", "+00:00"))
    except ValueError:
        return "<invalid>"
    seconds = int((datetime.now(UTC) - then).total_seconds())
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if seconds < -1:
        return "<invalid>"
    if seconds < 120:
        return f"{max(seconds, 0)}s"
    if minutes < 10:
        return f"{minutes}m{seconds % 60}s" if seconds % 60 else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    if hours < 192:
        return f"{days}d{hours % 24}h" if hours % 24 else f"{days}d"
    if days < 365 * 2:
        return f"{days}d"
    return f"{days // 365}y{days % 365}d"


def at(obj: Any, path: str, missing: Any = None) -> Any:
    """The value at a dotted path of plain fields."""
    for part in path.split("."):
        obj = obj.get(part) if isinstance(obj, dict) else None
        if obj is None:
            return missing
    return obj


def _field(name: str, path: str, missing: Any = "<none>", priority: int = 0) -> Column:
    return Column(name, lambda obj: at(obj, path, missing), priority=priority)


NAME = Column("Name", lambda obj: at(obj, "metadata.name"), format="name", description=_NAME)
AGE = Column("Age", lambda obj: age(at(obj, "metadata.creationTimestamp")))


def _hidden_name() -> Column:
    return Column("Name", NAME.cell, format="name", description=_NAME, priority=1)


def _listing(items: Iterable[Any], most: int = 3) -> str:
    texts = [str(item) for item in items if item not in (None, "")]
    if len(texts) > most:
        return ",".join(texts[:most]) + f" + {len(texts) - most} more..."
    return ",".join(texts) or "<unset>"


def _external_ips(obj: Object) -> str:
    kind = at(obj, "spec.type")
    fixed = at(obj, "spec.externalIPs", [])
    if kind == "ExternalName":
        return str(at(obj, "spec.externalName", ""))
    ingress = at(obj, "status.loadBalancer.ingress", []) if kind == "LoadBalancer" else []
    found = [entry.get("ip") or entry.get("hostname") for entry in ingress] + list(fixed)
    if found:
        return ",".join(str(ip) for ip in found)
    return "<pending>" if kind == "LoadBalancer" else "<none>"


def _service_ports(obj: Object) -> str:
    texts = []
    for port in at(obj, "spec.ports", []):
        node = f":{port['nodePort']}" if port.get("nodePort") else ""
        texts.append(f"{port['port']}{node}/{port.get('protocol', 'TCP')}")
    return ",".join(texts) or "<none>"


def _selector(obj: Object) -> str:
    pairs = at(obj, "spec.selector", {})
    return ",".join(f"{k}={v}" for k, v in sorted(pairs.items())) or "<none>"


def _ready(obj: Object) -> str:
    statuses = at(obj, "status.containerStatuses", [])
    ready = sum(bool(status.get("ready")) for status in statuses)
    return f"{ready}/{len(at(obj, 'spec.containers', []))}"


def _restarts(obj: Object) -> str:
    statuses = at(obj, "status.containerStatuses", [])
    return str(sum(status.get("restartCount", 0) for status in statuses))


def _pod_status(obj: Object) -> str:
    if at(obj, "metadata.deletionTimestamp"):
        return "Terminating"
    return str(at(obj, "status.phase", "Pending"))


def _node_status(obj: Object) -> str:
    ready = [c.get("status") for c in at(obj, "status.conditions", []) if c.get("type") == "Ready"]
    text = {"True": "Ready", "False": "NotReady"}.get(ready[0] if ready else "", "Unknown")
    return text + (",SchedulingDisabled" if at(obj, "spec.unschedulable") else "")


def _node_roles(obj: Object) -> str:
    mark = "node-role.kubernetes.io/"
    labels = at(obj, "metadata.labels", {})
    return ",".join(sorted(k[len(mark) :] for k in labels if k.startswith(mark))) or "<none>"


def _node_address(kind: str) -> Column:
    def cell(obj: Object) -> str:
        addresses = at(obj, "status.addresses", [])
        return next((a["address"] for a in addresses if a.get("type") == kind), "<none>")

    return Column("Internal-IP" if kind == "InternalIP" else "External-IP", cell, priority=1)


def _event_object(obj: Object) -> str:
    about = at(obj, "involvedObject", {})
    return f"{about.get('kind', '').lower()}/{about.get('name', '')}"


def _event_source(obj: Object) -> str:
    parts = (at(obj, "source.component", ""), at(obj, "source.host", ""))
    if any(parts):
        return ", ".join(part for part in parts if part)
    return ", ".join(
        part for part in (obj.get("reportingComponent"), obj.get("reportingInstance")) if part
    )


def _seen_last(obj: Object) -> str:
    series = at(obj, "series.lastObservedTime")
    return age(series or obj.get("lastTimestamp") or obj.get("eventTime"))


def _seen_first(obj: Object) -> str:
    return age(obj.get("firstTimestamp") or obj.get("eventTime"))


def _times(obj: Object) -> int:
    return int(at(obj, "series.count") or obj.get("count") or 1)


NAMESPACE = (
    NAME,
    Column("Status", lambda obj: at(obj, "status.phase", "")),
    AGE,
)
CONFIG_MAP = (
    NAME,
    Column("Data", lambda obj: len(obj.get("data") or {}) + len(obj.get("binaryData") or {})),
    AGE,
)
SECRET = (
    NAME,
    Column("Type", lambda obj: obj.get("type", "")),
    Column("Data", lambda obj: len(obj.get("data") or {})),
    AGE,
)
SERVICE_ACCOUNT = (
    NAME,
    Column("Secrets", lambda obj: len(obj.get("secrets") or ())),
    AGE,
)
LEASE = (NAME, _field("Holder", "spec.holderIdentity", ""), AGE)
SERVICE = (
    NAME,
    _field("Type", "spec.type", ""),
    _field("Cluster-IP", "spec.clusterIP"),
    Column("External-IP", _external_ips),
    Column("Port(s)", _service_ports),
    AGE,
    Column("Selector", _selector, priority=1),
)
ENDPOINT_SLICE = (
    NAME,
    _field("AddressType", "addressType", ""),
    Column("Ports", lambda obj: _listing(p.get("port") for p in obj.get("ports") or ())),
    Column(
        "Endpoints",
        lambda obj: _listing(a for e in obj.get("endpoints") or () for a in e.get("addresses", ())),
    ),
    AGE,
)
POD = (
    NAME,
    Column("Ready", _ready),
    Column("Status", _pod_status),
    Column("Restarts", _restarts),
    AGE,
    _field("IP", "status.podIP", priority=1),
    _field("Node", "spec.nodeName", priority=1),
    _field("Nominated Node", "status.nominatedNodeName", priority=1),
    Column("Readiness Gates", lambda obj: "<none>", priority=1),
)
NODE = (
    NAME,
    Column("Status", _node_status),
    Column("Roles", _node_roles),
    AGE,
    _field("Version", "status.nodeInfo.kubeletVersion", ""),
    _node_address("InternalIP"),
    _node_address("ExternalIP"),
    _field("OS-Image", "status.nodeInfo.osImage", "<unknown>", priority=1),
    _field("Kernel-Version", "status.nodeInfo.kernelVersion", "<unknown>", priority=1),
    _field("Container-Runtime", "status.nodeInfo.containerRuntimeVersion", "<unknown>", 1),
)
SERVICE_CIDR = (NAME, Column("CIDRs", lambda obj: ",".join(at(obj, "spec.cidrs", ()))), AGE)
EVENT = (
    Column("Last Seen", _seen_last, description="When it was seen last."),
    _field("Type", "type", ""),
    _field("Reason", "reason", ""),
    Column("Object", _event_object, description="What it is about."),
    _field("Subobject", "involvedObject.fieldPath", "", priority=1),
    Column("Source", _event_source, priority=1),
    Column("Message", lambda obj: (obj.get("message") or "").strip()),
    Column("First Seen", _seen_first, priority=1),
    Column("Count", _times, priority=1),
    _hidden_name(),
)
CRD = (
    NAME,
    Column("Created At", lambda obj: at(obj, "metadata.creationTimestamp"), type="date"),
)


def definitions(columns: Sequence[Column]) -> list[dict[str, Any]]:
    return [
        {
            "name": column.name,
            "type": column.type,
            "format": column.format,
            "description": column.description,
            "priority": column.priority,
        }
        for column in columns
    ]


def partial(obj: Object) -> Object:
    """Only the metadata of an object."""
    return {
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": obj["metadata"],
    }


def table(
    columns: Sequence[Column], objects: Iterable[Object], metadata: Object, include: str
) -> Object:
    """A `Table` of objects; `include` says how much of each object a row carries."""
    rows = []
    for obj in objects:
        row: Object = {"cells": [column.cell(obj) for column in columns]}
        if include == "Object":
            row["object"] = obj
        elif include != "None":
            row["object"] = partial(obj)
        rows.append(row)
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": definitions(columns),
        "rows": rows,
    }
