"""The built-in kinds and their rules, but for Services and CRDs."""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from sandbox.kube import columns, names, shapes
from sandbox.kube.errors import (
    FieldError,
    duplicate,
    forbidden_field,
    required,
    too_many,
    unsupported,
    wrong,
)
from sandbox.kube.events import CoreEventRules, EventRules
from sandbox.kube.resources import VERBS, Column, Object, Resource, Rules
from sandbox.kube.schema import Schema, copy
from sandbox.kube.services import ServiceRules

if TYPE_CHECKING:
    from sandbox.kube.store import Store


class NamespaceRules(Rules):
    returns_deleted = True
    selectable = frozenset({"status.phase"})
    empty: ClassVar[Mapping[str, Any]] = {"spec": {}, "status": {}}
    check_name = staticmethod(names.label)

    def default(self, obj: Object) -> None:
        # The label by which policies select a namespace by its name cannot be dropped.
        if name := obj["metadata"].get("name"):
            obj["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = name

    def prepare(self, obj: Object, old: Object | None, store: Store) -> list[FieldError]:
        if old is None:
            obj["spec"] = {"finalizers": ["kubernetes"]}
            obj["status"] = {"phase": "Active"}
        return []


class PodRules(Rules):
    """Pods as an API server keeps them. No kubelet runs here: a deleted Pod goes at once."""

    generation = True
    returns_deleted = True
    selectable = frozenset({"spec.nodeName", "status.phase", "status.podIP"})
    empty: ClassVar[Mapping[str, Any]] = {"spec": {"containers": None}, "status": {}}

    def default(self, obj: Object) -> None:
        spec = obj.setdefault("spec", {})
        spec.setdefault("restartPolicy", "Always")
        spec.setdefault("terminationGracePeriodSeconds", 30)
        spec.setdefault("dnsPolicy", "ClusterFirst")
        spec.setdefault("securityContext", {})
        spec.setdefault("schedulerName", "default-scheduler")
        spec.setdefault("enableServiceLinks", True)
        for container in [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]:
            latest = ":" not in container.get("image", "") or container["image"].endswith(":latest")
            container.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
            container.setdefault("resources", {})
            container.setdefault("terminationMessagePath", "/dev/termination-log")
            container.setdefault("terminationMessagePolicy", "File")

    def prepare(self, obj: Object, old: Object | None, store: Store) -> list[FieldError]:
        if old is None:
            obj["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
        return []

    def validate(self, obj: Object, old: Object | None, *, status: bool) -> Iterator[FieldError]:
        spec = obj["spec"]
        if status:
            return
        if not spec.get("containers"):
            yield required("spec.containers")
        seen: set[str] = set()
        for index, container in enumerate(spec.get("containers") or ()):
            where = f"spec.containers[{index}]"
            name = container.get("name", "")
            if not name:
                yield required(f"{where}.name")
            elif fault := names.label(name):
                yield wrong(f"{where}.name", name, fault)
            if name in seen:
                yield duplicate(f"{where}.name", name)
            seen.add(name)
            if not container.get("image"):
                yield required(f"{where}.image")
        if old is not None and _fixed_part(spec) != _fixed_part(old["spec"]):
            yield forbidden_field(
                "spec",
                "pod updates may not change fields other than `spec.containers[*].image`,"
                "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` "
                "(only additions to existing tolerations),`spec.terminationGracePeriodSeconds` "
                "(allow it to be set to 1 if it was previously negative)",
            )


def _fixed_part(spec: Object) -> Object:
    """What an update of a Pod may not touch. A Pod may still be bound to a node."""
    fixed = copy(spec)
    for name in ("activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds"):
        fixed.pop(name, None)
    for name in ("containers", "initContainers"):
        for container in fixed.get(name) or ():
            container.pop("image", None)
    return fixed


class NodeRules(Rules):
    born_with_status = True
    selectable = frozenset({"spec.unschedulable"})
    empty: ClassVar[Mapping[str, Any]] = {"spec": {}, "status": {}}


class ServiceCIDRRules(Rules):
    """A range is only shown: Services get their clusterIPs from the first one, always."""

    empty: ClassVar[Mapping[str, Any]] = {"spec": {}, "status": {}}

    def validate(self, obj: Object, old: Object | None, *, status: bool) -> Iterator[FieldError]:
        cidrs = (obj.get("spec") or {}).get("cidrs") or []
        if not cidrs:
            yield required("spec.cidrs", "at least one CIDR required")
        for index, text in enumerate(cidrs):
            try:
                ipaddress.ip_network(text)
            except ValueError:
                where = f"spec.cidrs[{index}]"
                yield wrong(
                    where, text, "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)"
                )


class LeaseRules(Rules):
    unconditional = False
    create_by_put = True
    empty: ClassVar[Mapping[str, Any]] = {"spec": {}}


class SecretRules(Rules):
    selectable = frozenset({"type"})

    def default(self, obj: Object) -> None:
        obj.setdefault("type", "Opaque")
        for name, text in (obj.pop("stringData", None) or {}).items():
            encoded = base64.b64encode(text.encode()).decode()
            obj.setdefault("data", {})[name] = encoded


_LOOPBACK = "may not be in the loopback range (127.0.0.0/8, ::1/128)"
_LINK_LOCAL = "may not be in the link-local range (169.254.0.0/16, fe80::/10)"
_LINK_MULTICAST = "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)"
_UNSPECIFIED = "may not be unspecified (0.0.0.0 or ::)"
_PROTOCOLS = ("SCTP", "TCP", "UDP")


class EndpointSliceRules(Rules):
    generation = True
    create_by_put = True
    empty: ClassVar[Mapping[str, Any]] = {"endpoints": None}

    def changed(self, obj: Object, old: Object) -> bool:
        def content(of: Object) -> Any:
            rest = {k: v for k, v in of.items() if k != "metadata"}
            return rest, of["metadata"].get("labels") or {}

        return bool(content(obj) != content(old))

    def default(self, obj: Object) -> None:
        obj.setdefault("endpoints", None)
        obj.setdefault("ports", None)

    def validate(self, obj: Object, old: Object | None, *, status: bool) -> Iterator[FieldError]:
        family = obj.get("addressType", "")
        if old is not None and family != old.get("addressType"):
            yield wrong("addressType", family, "field is immutable")
            return
        if not family:
            yield required("addressType")
        elif family not in ("FQDN", "IPv4", "IPv6"):
            yield unsupported("addressType", family, ("FQDN", "IPv4", "IPv6"))
        endpoints = obj.get("endpoints") or []
        if len(endpoints) > 1000:
            yield too_many("endpoints", len(endpoints), 1000)
            return
        for index, endpoint in enumerate(endpoints):
            yield from _endpoint(endpoint, family, f"endpoints[{index}]")
        yield from _slice_ports(obj.get("ports") or [])


def _endpoint(endpoint: Object, family: str, where: str) -> Iterator[FieldError]:
    addresses = endpoint.get("addresses") or []
    if not addresses:
        yield required(f"{where}.addresses", "must contain at least 1 address")
    elif len(addresses) > 100:
        yield too_many(f"{where}.addresses", len(addresses), 100)
    for index, address in enumerate(addresses):
        field = f"{where}.addresses[{index}]"
        if family == "FQDN":
            if fault := names.subdomain(address):
                yield wrong(field, address, fault)
        elif fault := _address(address, family):
            yield wrong(field, address, fault)
    if (host := endpoint.get("hostname")) and (fault := names.label(host)):
        yield wrong(f"{where}.hostname", host, fault)


def _address(text: str, family: str) -> str | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)"
    mapped = isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None
    if f"IPv{address.version}" != family or mapped:  # to Go a mapped address is IPv4
        return f"must be an {family} address"
    if address.is_unspecified:
        return _UNSPECIFIED
    if address.is_loopback:
        return _LOOPBACK
    if address.is_link_local:
        return _LINK_LOCAL
    if address in ipaddress.ip_network("224.0.0.0/24") or address in ipaddress.ip_network(
        "ff02::/16"
    ):
        return _LINK_MULTICAST
    return None


def _slice_ports(ports: list[Object]) -> Iterator[FieldError]:
    if len(ports) > 100:
        yield too_many("ports", len(ports), 100)
        return
    seen: set[str] = set()
    for index, port in enumerate(ports):
        where = f"ports[{index}]"
        name = port.get("name") or ""
        if name in seen:
            yield duplicate(f"{where}.name", name)
        seen.add(name)
        if name and (fault := names.label(name)):
            yield wrong(f"{where}.name", name, fault)
        if port.get("protocol") not in _PROTOCOLS:
            yield unsupported(f"{where}.protocol", port.get("protocol"), _PROTOCOLS)
        number = port.get("port")
        if number is not None and not 0 < number < 65536:
            yield wrong(f"{where}.port", number, "must be between 1 and 65535, inclusive")


def _core(
    plural: str,
    kind: str,
    shape: shapes.Raw,
    rules: Rules,
    *,
    namespaced: bool = True,
    status: bool = False,
    short: Iterable[str] = (),
    categories: Iterable[str] = (),
    table: Iterable[Column] = (),
    group: str = "",
) -> Resource:
    return Resource(
        group=group,
        version="v1",
        plural=plural,
        kind=kind,
        namespaced=namespaced,
        schema=Schema(shape),
        rules=rules,
        collection=f"{plural}.{group}" if group else plural,
        short_names=tuple(short),
        categories=tuple(categories),
        status=status,
        columns=tuple(table),
    )


def builtin() -> list[Resource]:
    """The built-in kinds, new ones for each server: Services keep books in their rules."""
    no_collection = tuple(verb for verb in VERBS if verb != "deletecollection")
    namespaces = _core(
        "namespaces",
        "Namespace",
        shapes.NAMESPACE,
        NamespaceRules(),
        namespaced=False,
        status=True,
        short=["ns"],
        table=columns.NAMESPACE,
    )
    namespaces.verbs = no_collection
    core_events = _core(
        "events", "Event", shapes.CORE_EVENT, CoreEventRules(), short=["ev"], table=columns.EVENT
    )
    events = _core(
        "events",
        "Event",
        shapes.EVENT,
        EventRules(),
        short=["ev"],
        table=columns.EVENT,
        group="events.k8s.io",
    )
    events.collection = core_events.collection
    events.stored = False
    return [
        _core("configmaps", "ConfigMap", shapes.CONFIG_MAP, Rules(), short=["cm"],
              table=columns.CONFIG_MAP),
        core_events,
        namespaces,
        _core("nodes", "Node", shapes.NODE, NodeRules(), namespaced=False, status=True,
              short=["no"], table=columns.NODE),
        _core("pods", "Pod", shapes.POD, PodRules(), status=True, short=["po"],
              categories=["all"], table=columns.POD),
        _core("secrets", "Secret", shapes.SECRET, SecretRules(), table=columns.SECRET),
        _core("serviceaccounts", "ServiceAccount", shapes.SERVICE_ACCOUNT, Rules(), short=["sa"],
              table=columns.SERVICE_ACCOUNT),
        _core("services", "Service", shapes.SERVICE, ServiceRules(), status=True, short=["svc"],
              categories=["all"], table=columns.SERVICE),
        events,
        _core("leases", "Lease", shapes.LEASE, LeaseRules(), group="coordination.k8s.io",
              table=columns.LEASE),
        _core("endpointslices", "EndpointSlice", shapes.ENDPOINT_SLICE, EndpointSliceRules(),
              group="discovery.k8s.io", table=columns.ENDPOINT_SLICE),
        _core("servicecidrs", "ServiceCIDR", shapes.SERVICE_CIDR, ServiceCIDRRules(),
              namespaced=False, status=True, group="networking.k8s.io",
              table=columns.SERVICE_CIDR),
    ]  # fmt: skip
