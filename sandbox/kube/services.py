"""Rules of Services: defaults, cluster IPs, node ports, what may change and what may not.

Addresses come from two ranges that nothing routes; they are bookkeeping, as in a cluster, and
are given back when the Service goes.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from sandbox.kube import names
from sandbox.kube.errors import (
    FieldError,
    duplicate,
    forbidden_field,
    required,
    unsupported,
    wrong,
)
from sandbox.kube.resources import Object, Rules

if TYPE_CHECKING:
    from sandbox.kube.store import Store

_TYPES = ("ClusterIP", "ExternalName", "LoadBalancer", "NodePort")
_PROTOCOLS = ("SCTP", "TCP", "UDP")
_RANGES = {
    "IPv4": ipaddress.ip_network("10.96.0.0/16"),
    "IPv6": ipaddress.ip_network("fd00:10:96::/112"),
}
_NODE_PORTS = range(30000, 32768)
_ONCE = "may not change once set"


class _Addresses:
    """Cluster IPs and node ports in use, and a free one from a moving mark.

    Choosing takes nothing: what a Service holds is noted when it is stored, so that a refused
    write or a dry run leaves no trace.
    """

    def __init__(self) -> None:
        self.ips: set[str] = set()
        self.ports: set[int] = set()
        self._next_ip = dict.fromkeys(_RANGES, 10)
        self._next_port = 1000

    def ip(self, family: str) -> str:
        network = _RANGES[family]
        for _ in range(65_000):
            self._next_ip[family] = self._next_ip[family] % 65_000 + 1
            address = str(network[self._next_ip[family]])
            if address not in self.ips:
                return address
        raise RuntimeError(f"no cluster IP is left in {network}")

    def port(self) -> int:
        for _ in _NODE_PORTS:
            self._next_port = (self._next_port + 1) % len(_NODE_PORTS)
            port = _NODE_PORTS[self._next_port]
            if port not in self.ports:
                return port
        raise RuntimeError("no node port is left in 30000-32767")


class ServiceRules(Rules):
    create_by_put = True
    returns_deleted = True
    selectable = frozenset({"spec.clusterIP", "spec.type"})
    empty: ClassVar[Mapping[str, Any]] = {"spec": {}, "status": {"loadBalancer": {}}}
    check_name = staticmethod(names.dns1035)

    def __init__(self) -> None:
        self._held = _Addresses()

    def default(self, obj: Object) -> None:
        spec = obj.setdefault("spec", {})
        if not isinstance(spec, dict):
            return
        spec.setdefault("sessionAffinity", "None")
        if not spec.get("type"):
            spec["type"] = "ClusterIP"
        if spec["sessionAffinity"] == "ClientIP":
            config = spec.setdefault("sessionAffinityConfig", {})
            config.setdefault("clientIP", {}).setdefault("timeoutSeconds", 10800)
        for port in spec.get("ports") or ():
            if not port.get("targetPort"):
                port["targetPort"] = port.get("port", 0)
        if spec["type"] in ("NodePort", "LoadBalancer") or spec.get("externalIPs"):
            spec.setdefault("externalTrafficPolicy", "Cluster")
        if spec["type"] != "ExternalName":
            spec.setdefault("internalTrafficPolicy", "Cluster")
        if spec["type"] == "LoadBalancer":
            spec.setdefault("allocateLoadBalancerNodePorts", True)
            status = obj.get("status") or {}
            for ingress in (status.get("loadBalancer") or {}).get("ingress") or ():
                if ingress.get("ip"):
                    ingress.setdefault("ipMode", "VIP")

    def prepare(self, obj: Object, old: Object | None, store: Store) -> list[FieldError]:
        spec = obj["spec"]
        obj.setdefault("status", {}).setdefault("loadBalancer", {})
        _align_cluster_ips(spec, (old or {}).get("spec", {}))
        if old is not None:
            _keep_allocated(spec, old["spec"])
            _drop_by_type(spec, old["spec"])
            if old["spec"]["type"] == "LoadBalancer" != spec["type"]:
                obj["status"]["loadBalancer"] = {}
        if any(self.validate(obj, old, status=False)):
            return []  # validation names the faults; nothing is allocated for them
        errors: list[FieldError] = []
        if spec["type"] != "ExternalName":
            errors += self._cluster_ips(spec, old)
        return errors + self._node_ports(spec, old)

    def _cluster_ips(self, spec: Object, old: Object | None) -> list[FieldError]:
        held = set((old or {}).get("spec", {}).get("clusterIPs") or ())
        ips: list[str] = list(spec.get("clusterIPs") or [])
        if not ips and spec.get("clusterIP"):
            ips = [spec["clusterIP"]]
        families = list(spec.get("ipFamilies") or []) or [_family(ip) for ip in ips if ip != "None"]
        families = families or ["IPv4"]
        policy = spec.get("ipFamilyPolicy") or "SingleStack"
        if policy != "SingleStack" and len(families) == 1:
            families.append("IPv6" if families[0] == "IPv4" else "IPv4")
        elif policy == "SingleStack":
            families = families[:1]
        if ips == ["None"]:
            spec |= {"clusterIP": "None", "clusterIPs": ips}
        else:
            for ip in ips:
                if ip not in held and ip in self._held.ips:
                    text = f"failed to allocate IP {ip}: provided IP is already allocated"
                    return [wrong("spec.clusterIPs", ips, text)]
            have = {_family(ip): ip for ip in ips}
            ips = [have.get(family) or self._held.ip(family) for family in families]
            spec |= {"clusterIP": ips[0], "clusterIPs": ips}
        spec |= {"ipFamilies": families, "ipFamilyPolicy": policy}
        return []

    def _node_ports(self, spec: Object, old: Object | None) -> list[FieldError]:
        held = _node_ports_of(old)
        wanted = _needs_node_ports(spec)
        taken: dict[int, int] = {}
        errors = []
        for index, port in enumerate(spec.get("ports") or ()):
            asked = port.get("nodePort")
            same = taken.get(port["port"])
            if asked and asked not in held and asked != same:
                where = f"spec.ports[{index}].nodePort"
                if asked not in _NODE_PORTS:
                    text = (
                        "provided port is not in the valid range. The range of valid ports is "
                        "30000-32767"
                    )
                    errors.append(wrong(where, asked, text))
                elif asked in self._held.ports:
                    errors.append(wrong(where, asked, "provided port is already allocated"))
            elif not asked and wanted:
                # TCP and UDP of one port share the node port, as on a real server.
                port["nodePort"] = same or self._held.port()
            if port.get("nodePort"):
                taken[port["port"]] = port["nodePort"]
        if _needs_health_port(spec) and not spec.get("healthCheckNodePort"):
            spec["healthCheckNodePort"] = self._held.port()
        return errors

    def written(self, obj: Object, old: Object | None) -> None:
        if old is not None:
            self.removed(old)
        self._held.ips.update(ip for ip in obj["spec"].get("clusterIPs") or () if ip != "None")
        self._held.ports.update(_node_ports_of(obj))

    def removed(self, obj: Object) -> None:
        self._held.ips.difference_update(obj["spec"].get("clusterIPs") or ())
        self._held.ports.difference_update(_node_ports_of(obj))

    def validate(self, obj: Object, old: Object | None, *, status: bool) -> Iterator[FieldError]:
        spec = obj["spec"]
        if not status:
            yield from _ports(spec)
            yield from _spec(spec)
            if old is not None:
                yield from _unchanged(spec, old["spec"])
        yield from _ingress(obj)


def _family(ip: str) -> str:
    return "IPv6" if ":" in ip else "IPv4"


def _node_ports_of(obj: Object | None) -> set[int]:
    spec = (obj or {}).get("spec", {})
    ports = {port["nodePort"] for port in spec.get("ports") or () if port.get("nodePort")}
    if spec.get("healthCheckNodePort"):
        ports.add(spec["healthCheckNodePort"])
    return ports


def _needs_node_ports(spec: Object) -> bool:
    return bool(
        spec["type"] == "NodePort"
        or (spec["type"] == "LoadBalancer" and spec.get("allocateLoadBalancerNodePorts", True))
    )


def _needs_health_port(spec: Object) -> bool:
    return spec["type"] == "LoadBalancer" and spec.get("externalTrafficPolicy") == "Local"


def _align_cluster_ips(spec: Object, old: Object) -> None:
    """`clusterIP` is the first of `clusterIPs`; a writer may set either."""
    first, every = spec.get("clusterIP"), spec.get("clusterIPs")
    if first and not every:
        spec["clusterIPs"] = [first]
    elif first and every == old.get("clusterIPs") and first != old.get("clusterIP"):
        spec["clusterIPs"] = [first, *(every or [])[1:]]
    elif every and not first:
        spec["clusterIP"] = every[0]


def _keep_allocated(spec: Object, old: Object) -> None:
    """An update that leaves out what was allocated keeps it."""
    if spec["type"] != "ExternalName" and old["type"] != "ExternalName":
        if not spec.get("clusterIP") and not spec.get("clusterIPs"):
            for name in ("clusterIP", "clusterIPs"):
                if old.get(name):
                    spec[name] = old[name]
        for name in ("ipFamilies", "ipFamilyPolicy"):
            if not spec.get(name) and old.get(name):
                spec[name] = old[name]
    if _needs_node_ports(spec) and _needs_node_ports(old):
        before = {
            (port["port"], port.get("protocol")): port.get("nodePort")
            for port in old.get("ports") or ()
        }
        for port in spec.get("ports") or ():
            kept = before.get((port.get("port"), port.get("protocol")))
            if kept and not port.get("nodePort"):
                port["nodePort"] = kept
    if _needs_health_port(spec) and _needs_health_port(old) and old.get("healthCheckNodePort"):
        spec.setdefault("healthCheckNodePort", old["healthCheckNodePort"])


def _drop_by_type(spec: Object, old: Object) -> None:
    """A change of type takes along what only the old type had, unless it was set anew."""

    def same(name: str) -> bool:
        return bool(spec.get(name) == old.get(name))

    def drop(name: str) -> None:
        spec.pop(name, None)

    balanced = spec["type"] == "LoadBalancer"
    was_balanced = old["type"] == "LoadBalancer"
    if spec["type"] == "ExternalName" != old["type"]:
        for name in ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy"):
            if same(name):
                drop(name)
    if (
        _needs_node_ports(old)
        and not _needs_node_ports(spec)
        and _node_ports_of({"spec": spec}) <= _node_ports_of({"spec": old})
    ):
        for port in spec.get("ports") or ():
            port.pop("nodePort", None)
    if was_balanced and not balanced:
        for name in ("allocateLoadBalancerNodePorts", "loadBalancerClass"):
            if same(name):
                drop(name)
    outside = spec["type"] in ("NodePort", "LoadBalancer") or spec.get("externalIPs")
    if not outside and same("externalTrafficPolicy"):
        drop("externalTrafficPolicy")
    if not _needs_health_port(spec) and same("healthCheckNodePort"):
        drop("healthCheckNodePort")


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
        if family not in _RANGES:
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
        if not any(address in network for network in _RANGES.values()):
            ranges = " or ".join(str(network) for network in _RANGES.values())
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
