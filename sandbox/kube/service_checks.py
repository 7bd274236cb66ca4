"""What may be wrong with a Service, in the words of a real API server."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import Any

from sandbox.kube import names
from sandbox.kube.errors import (
    FieldError,
    duplicate,
    forbidden_field,
    required,
    unsupported,
    wrong,
)
from sandbox.kube.resources import Object

_TYPES = ("ClusterIP", "ExternalName", "LoadBalancer", "NodePort")
_PROTOCOLS = ("SCTP", "TCP", "UDP")
#: Where cluster IPs come from.
RANGES = {
    "IPv4": ipaddress.ip_network("10.96.0.0/16"),
    "IPv6": ipaddress.ip_network("fd00:10:96::/112"),
}
_ONCE = "may not change once set"


def check(obj: Object, old: Object | None, *, status: bool) -> Iterator[FieldError]:
    """Every fault of a Service; of its status only, where only that is written."""
    spec = obj["spec"]
    if not status:
        yield from _ports(spec)
        yield from _spec(spec)
        if old is not None:
            yield from _unchanged(spec, old["spec"])
    yield from _ingress(obj)


def _ports(spec: Object) -> Iterator[FieldError]:
    ports = spec.get("ports") or []
    if not ports and spec["type"] != "ExternalName" and spec.get("clusterIP") != "None":
        yield required("spec.ports")
    seen_names: set[str] = set()
    seen: list[Any] = []
    for index, port in enumerate(ports):
        where = f"spec.ports[{index}]"
        name = port.get("name", "")
        if not name and len(ports) > 1:
            yield required(f"{where}.name")
        elif name:
            if fault := names.label(name):
                yield wrong(f"{where}.name", name, fault)
            if name in seen_names:
                yield duplicate(f"{where}.name", name)
            seen_names.add(name)
        number = port.get("port", 0)
        if not 0 < number < 65536:
            yield wrong(f"{where}.port", number, "must be between 1 and 65535, inclusive")
        if port.get("protocol") not in _PROTOCOLS:
            yield unsupported(f"{where}.protocol", port.get("protocol"), _PROTOCOLS)
        yield from _target(port.get("targetPort"), f"{where}.targetPort")
        key = {"port": number, "protocol": port.get("protocol")}
        if key in seen:
            yield duplicate(where, key)
        seen.append(key)


def _target(target: Any, where: str) -> Iterator[FieldError]:
    if isinstance(target, int):
        if not 0 < target < 65536:
            yield wrong(where, target, "must be between 1 and 65535, inclusive")
    elif not re.fullmatch(r"(?=.*[a-z])[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?", str(target)):
        text = "must contain at least one letter (a-z), only a-z, 0-9 and '-', at most 15"
        yield wrong(where, target, text)


def _spec(spec: Object) -> Iterator[FieldError]:
    kind = spec["type"]
    if kind not in _TYPES:
        yield unsupported("spec.type", kind, _TYPES)
    if spec.get("sessionAffinity") not in ("ClientIP", "None"):
        yield unsupported("spec.sessionAffinity", spec["sessionAffinity"], ("ClientIP", "None"))
    if kind == "ExternalName" and not spec.get("externalName"):
        yield required("spec.externalName")
    if spec.get("loadBalancerClass") is not None:
        if kind != "LoadBalancer":
            text = "may only be used when `type` is 'LoadBalancer'"
            yield forbidden_field("spec.loadBalancerClass", text)
        elif fault := names.qualified(spec["loadBalancerClass"]):
            yield wrong("spec.loadBalancerClass", spec["loadBalancerClass"], fault)
    if spec.get("allocateLoadBalancerNodePorts") is not None and kind != "LoadBalancer":
        text = "may only be used when `type` is 'LoadBalancer'"
        yield forbidden_field("spec.allocateLoadBalancerNodePorts", text)
    policy = spec.get("externalTrafficPolicy")
    if policy is not None:
        outside = kind in ("NodePort", "LoadBalancer") or spec.get("externalIPs")
        if not outside:
            text = "may only be set for externally-accessible services"
            yield wrong("spec.externalTrafficPolicy", policy, text)
        elif policy not in ("Cluster", "Local"):
            yield unsupported("spec.externalTrafficPolicy", policy, ("Cluster", "Local"))
    inner = spec.get("internalTrafficPolicy")
    if inner not in (None, "Cluster", "Local"):
        yield unsupported("spec.internalTrafficPolicy", inner, ("Cluster", "Local"))
    yield from _families(spec)
    for index, cidr in enumerate(spec.get("loadBalancerSourceRanges") or ()):
        try:
            ipaddress.ip_network(cidr.strip())
        except ValueError:
            text = "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)"
            yield wrong(f"spec.loadBalancerSourceRanges[{index}]", cidr, text)


def _families(spec: Object) -> Iterator[FieldError]:
    policies = ("SingleStack", "PreferDualStack", "RequireDualStack")
    if spec.get("ipFamilyPolicy") not in (None, *policies):
        yield unsupported("spec.ipFamilyPolicy", spec["ipFamilyPolicy"], sorted(policies))
    families = spec.get("ipFamilies") or []
    for index, family in enumerate(families):
        if family not in RANGES:
            yield unsupported(f"spec.ipFamilies[{index}]", family, ("IPv4", "IPv6"))
        elif family in families[:index]:
            yield duplicate(f"spec.ipFamilies[{index}]", family)
    for index, ip in enumerate(spec.get("clusterIPs") or ()):
        if ip == "None":
            continue
        try:
            address = ipaddress.ip_address(ip)
        except ValueError:
            text = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)"
            yield wrong(f"spec.clusterIPs[{index}]", ip, text)
            continue
        if not any(address in network for network in RANGES.values()):
            ranges = " or ".join(str(network) for network in RANGES.values())
            text = f"failed to allocate IP {ip}: the provided IP is not in {ranges}"
            yield wrong("spec.clusterIPs", spec["clusterIPs"], text)


def _unchanged(spec: Object, old: Object) -> Iterator[FieldError]:
    if spec["type"] == old["type"] == "LoadBalancer" and (
        spec.get("loadBalancerClass") != old.get("loadBalancerClass")
    ):
        yield wrong("spec.loadBalancerClass", spec.get("loadBalancerClass"), _ONCE)
    if "ExternalName" in (spec["type"], old["type"]):
        return
    now, before = spec.get("clusterIPs") or [], old.get("clusterIPs") or []
    if before and now[:1] != before[:1]:
        yield wrong("spec.clusterIPs[0]", now[0] if now else "", _ONCE)
    families, earlier = spec.get("ipFamilies") or [], old.get("ipFamilies") or []
    if earlier and families and families[0] != earlier[0]:
        yield wrong("spec.ipFamilies[0]", families[0], _ONCE)


def _ingress(obj: Object) -> Iterator[FieldError]:
    ingress = ((obj.get("status") or {}).get("loadBalancer") or {}).get("ingress") or []
    where = "status.loadBalancer.ingress"
    if ingress and obj["spec"]["type"] != "LoadBalancer":
        text = 'may only be used when `spec.type` is "LoadBalancer"'
        yield forbidden_field(where, text)
        return
    for index, entry in enumerate(ingress):
        if ip := entry.get("ip"):
            try:
                ipaddress.ip_address(ip)
            except ValueError:
                text = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)"
                yield wrong(f"{where}[{index}].ip", ip, text)
        mode = entry.get("ipMode")
        if mode is not None and not entry.get("ip"):
            text = "may not be specified when `ip` is not set"
            yield forbidden_field(f"{where}[{index}].ipMode", text)
        elif mode not in (None, "VIP", "Proxy"):
            yield unsupported(f"{where}[{index}].ipMode", mode, ("Proxy", "VIP"))
