"""Rules of Services: defaults, cluster IPs, node ports, what may change and what may not.

Addresses come from two ranges that nothing routes; they are bookkeeping, as in a cluster, and
are given back when the Service goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from sandbox.kube import names
from sandbox.kube.errors import (
    FieldError,
    wrong,
)
from sandbox.kube.resources import Object, Rules
from sandbox.kube.service_checks import RANGES, check

if TYPE_CHECKING:
    from sandbox.kube.store import Store

_NODE_PORTS = range(30000, 32768)


class _Addresses:
    """Cluster IPs and node ports in use, and a free one from a moving mark.

    Choosing takes nothing: what a Service holds is noted when it is stored, so that a refused
    write or a dry run leaves no trace.
    """

    def __init__(self) -> None:
        self.ips: set[str] = set()
        self.ports: set[int] = set()
        self._next_ip = dict.fromkeys(RANGES, 10)
        self._next_port = 1000

    def ip(self, family: str) -> str:
        network = RANGES[family]
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
        return check(obj, old, status=status)


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
