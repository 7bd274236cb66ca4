"""Public IPs, load balancers, NAT gateways and service gateways, and the rules between them.

The rules are those that a client has to respect: what exists before what refers to it, what may
not be deleted while it is used, spelling of SKUs, one rule per backend port and protocol, and
that an omitted reference stays while an explicit null clears it.
"""

import copy
import ipaddress
from collections.abc import Callable, Iterator
from typing import Any

from sandbox.nrp import arm, balancer
from sandbox.nrp.arm import (
    LOAD_BALANCERS,
    NAT_GATEWAYS,
    PUBLIC_IPS,
    SERVICE_GATEWAYS,
    ArmError,
    Doc,
    bad,
)
from sandbox.nrp.gateway import DEFAULT, Gateway, Service

_SKUS = {
    PUBLIC_IPS: ("StandardV2", "Standard"),
    LOAD_BALANCERS: ("Service", "Standard"),
    NAT_GATEWAYS: ("StandardV2", "Standard"),
    SERVICE_GATEWAYS: ("Standard",),
}
# Documentation ranges first; the benchmarking range takes over when they are used up.
_RANGES = {4: ("203.0.113.0/24", "198.51.100.0/24", "198.18.0.0/15"), 6: ("2001:db8:ffff::/64",)}


class Quota:
    """How much the subscription may have."""

    def __init__(
        self,
        public_ips: int = 100_000,
        load_balancers: int = 100_000,
        nat_gateways: int = 10_000,
        services: int = 100_000,
        addresses: int = 2_000_000,
    ) -> None:
        self.limits = {
            PUBLIC_IPS: public_ips,
            LOAD_BALANCERS: load_balancers,
            NAT_GATEWAYS: nat_gateways,
            SERVICE_GATEWAYS: 100,
        }
        self.services = services
        self.addresses = addresses


class Resources:
    """Everything that is there. Changes are checked first and handed back as a function."""

    def __init__(self, region: str, quota: Quota) -> None:
        self.region = region
        self.quota = quota
        self.docs: dict[str, dict[str, Doc]] = {kind: {} for kind in arm.TYPES}
        self.gateways: dict[str, Gateway] = {}
        self.hide_addresses = False
        """Public IPs are made without an address while this is set."""
        self._used: dict[str, str] = {}
        self._pool = {family: _addresses(family) for family in (4, 6)}
        self._freed: dict[int, list[str]] = {4: [], 6: []}

    # -- reading ----------------------------------------------------------------------------

    def exists(self, target: str) -> bool:
        """Whether an id names a resource, or a backend pool of a load balancer, that is there."""
        key, _, pool = target.lower().partition("/backendaddresspools/")
        doc = next((docs[key] for docs in self.docs.values() if key in docs), None)
        if doc is None or not pool:
            return doc is not None
        pools = arm.properties(doc).get("backendAddressPools", [])
        return any(str(entry["name"]).lower() == pool for entry in pools)

    def get(self, kind: str, target: str) -> Doc:
        """The resource as the wire has it; 404 when there is none."""
        doc = self.docs[kind].get(target.lower())
        if doc is None:
            raise ArmError(404, "ResourceNotFound", f"the resource {target} was not found")
        return self._shown(kind, doc)

    def page(self, kind: str, prefix: str, after: str, size: int) -> tuple[list[Doc], str | None]:
        """Resources of a kind below an id, in order of id, and the key to go on from."""
        docs = self.docs[kind]
        keys = sorted(key for key in docs if key.startswith(prefix.lower()) and key > after)
        shown = [self._shown(kind, docs[key]) for key in keys[:size]]
        return shown, keys[size - 1] if len(keys) > size else None

    def gateway(self, target: str) -> Gateway:
        """The collections of a service gateway; 404 when there is none."""
        self.get(SERVICE_GATEWAYS, target)
        return self.gateways[target.lower()]

    def _shown(self, kind: str, doc: Doc) -> Doc:
        shown = copy.deepcopy(doc)
        if kind == PUBLIC_IPS:
            user = self._used.get(str(doc["id"]).lower())
            if user is not None:
                field = "natGateway" if f"/{NAT_GATEWAYS}/".lower() in user.lower() else ""
                shown["properties"][field or "ipConfiguration"] = {"id": user}
        return shown

    # -- writing ----------------------------------------------------------------------------

    def put(self, kind: str, target: str, name: str, body: Doc, if_match: str) -> Callable[[], Doc]:
        """Create or replace. Returns the function that applies it and gives the resource."""
        old = self.docs[kind].get(target.lower())
        self._check_etag(old, if_match)
        if old is None and len(self.docs[kind]) >= self.quota.limits[kind]:
            code = "PublicIPCountLimitReached" if kind == PUBLIC_IPS else "QuotaExceeded"
            raise bad(code, f"the subscription may have at most {self.quota.limits[kind]} {kind}")
        if str(body.get("location", "")).lower() != self.region.lower():
            raise bad(
                "InvalidLocation", f"location is {body.get('location')!r}, it is {self.region!r}"
            )
        sku = arm.sku_name(body) or (arm.sku_name(old) if old else "")
        if sku not in _SKUS[kind]:
            raise bad("InvalidSku", f"sku.name is {sku!r}, it must be one of {_SKUS[kind]}")
        doc: Doc = {
            "id": target,
            "name": arm.check_name(name, "name"),
            "type": f"{arm.PROVIDER}/{kind}",
            "location": self.region,
            "sku": {"name": sku, "tier": "Regional"},
            "tags": body.get("tags") or {},
            "properties": _MAKERS[kind](self, target, arm.properties(body), old),
        }
        users = self._users_after(kind, target, doc)

        def apply() -> Doc:
            self._apply(kind, target, doc, old, users)
            return self._shown(kind, doc)

        return apply

    def _apply(self, kind: str, target: str, doc: Doc, old: Doc | None, users: set[str]) -> None:
        key = target.lower()
        doc["etag"] = arm.new_etag()
        doc["properties"]["provisioningState"] = "Succeeded"
        if kind == PUBLIC_IPS and "ipAddress" not in doc["properties"] and not self.hide_addresses:
            version = doc["properties"]["publicIPAddressVersion"]
            doc["properties"]["ipAddress"] = self._allocate(6 if version == "IPv6" else 4)
        self._release_uses(kind, target, old)
        for used in users:
            self._used[used] = _user_of(kind, target)
        self.docs[kind][key] = doc
        if kind == SERVICE_GATEWAYS and old is None:
            self._open_gateway(target)

    def tag(self, kind: str, target: str, body: Doc, if_match: str) -> Callable[[], Doc]:
        """PATCH: tags only."""
        doc = self.docs[kind].get(target.lower())
        if doc is None:
            raise ArmError(404, "ResourceNotFound", f"the resource {target} was not found")
        self._check_etag(doc, if_match)

        def apply() -> Doc:
            doc["tags"] = body.get("tags") or {}
            doc["etag"] = arm.new_etag()
            return self._shown(kind, doc)

        return apply

    def delete(self, kind: str, target: str, if_match: str) -> Callable[[], Doc] | None:
        """Remove. None when it is gone already; 400 while something uses it."""
        key = target.lower()
        doc = self.docs[kind].get(key)
        if doc is None:
            return None
        self._check_etag(doc, if_match)
        _DELETE_CHECKS[kind](self, target, doc)

        def apply() -> Doc:
            self.forget(kind, target)
            return {}

        return apply

    def forget(self, kind: str, target: str) -> None:
        """Remove without asking who uses it (also an edit behind the client's back)."""
        key = target.lower()
        doc = self.docs[kind].pop(key, None)
        self.gateways.pop(key, None)
        self._release_uses(kind, target, doc)
        if doc is not None and kind == PUBLIC_IPS:
            self._used.pop(key, None)
            address = doc["properties"].get("ipAddress")
            if address:
                self._freed[ipaddress.ip_address(address).version].append(address)

    def restore(self, docs: dict[str, dict[str, Doc]]) -> None:
        """Take over resources that an earlier run has kept."""
        self.docs = {kind: dict(docs.get(kind, {})) for kind in arm.TYPES}
        self.gateways.clear()
        self._used = {
            public_ip.lower(): _user_of(kind, str(doc["id"]))
            for kind, found in self.docs.items()
            for doc in found.values()
            for public_ip in balancer.public_ips_of(kind, doc)
        }
        taken = {doc["properties"].get("ipAddress") for doc in self.docs[PUBLIC_IPS].values()}
        for family in (4, 6):
            self._freed[family].clear()
            self._pool[family] = (ip for ip in _addresses(family) if ip not in taken)

    def _check_etag(self, doc: Doc | None, if_match: str) -> None:
        if if_match and if_match != "*" and (doc is None or doc["etag"] != if_match):
            raise ArmError(
                412, "PreconditionFailed", f"If-Match {if_match} is not the etag of the resource"
            )

    def _users_after(self, kind: str, target: str, doc: Doc) -> set[str]:
        """Keys of the public IPs that this resource will use; 400 if another one has them."""
        used = set()
        for public_ip in balancer.public_ips_of(kind, doc):
            key = public_ip.lower()
            if key not in self.docs[PUBLIC_IPS]:
                raise bad("InvalidResourceReference", f"public IP {public_ip} does not exist")
            user = self._used.get(key, "")
            if user and not _belongs(user, target):
                raise bad("PublicIPAddressInUse", f"public IP {public_ip} is used by {user}")
            used.add(key)
        return used

    def _release_uses(self, kind: str, target: str, doc: Doc | None) -> None:
        for public_ip in balancer.public_ips_of(kind, doc) if doc else ():
            if _belongs(self._used.get(public_ip.lower(), ""), target):
                del self._used[public_ip.lower()]

    def _allocate(self, family: int) -> str:
        address = next(self._pool[family], None)
        if address is None:
            if not self._freed[family]:
                raise bad("PublicIPCountLimitReached", "no public address is left")
            address = self._freed[family].pop(0)
        return address

    def _open_gateway(self, target: str) -> None:
        """A new gateway comes with its default egress: a NAT gateway, its IP, its service."""
        base = target.rsplit(f"/{SERVICE_GATEWAYS}/", 1)[0]
        nat = f"{base}/{NAT_GATEWAYS}/{DEFAULT}"
        gateway = Gateway(
            self.exists, max_services=self.quota.services, max_addresses=self.quota.addresses
        )
        self.gateways[target.lower()] = gateway
        if nat.lower() not in self.docs[NAT_GATEWAYS]:
            head = {"location": self.region, "sku": {"name": "StandardV2"}}
            public_ip = f"{base}/{PUBLIC_IPS}/{DEFAULT}-pip"
            self.put(PUBLIC_IPS, public_ip, f"{DEFAULT}-pip", head, "")()
            uses = {"publicIpAddresses": [{"id": public_ip}], "serviceGateway": {"id": target}}
            self.put(NAT_GATEWAYS, nat, DEFAULT, head | {"properties": uses}, "")()
        gateway.services[DEFAULT] = Service(
            name=DEFAULT, kind="Outbound", nat_gateway=nat, default=True
        )

    # -- the rules of each kind ---------------------------------------------------------------

    def _public_ip(self, target: str, given: Doc, old: Doc | None) -> Doc:
        method = given.get("publicIPAllocationMethod", "Static")
        if method != "Static":
            raise bad("InvalidAllocationMethod", f"method is {method!r}, a v2 SKU needs 'Static'")
        had = arm.properties(old) if old else {}
        version = given.get("publicIPAddressVersion", had.get("publicIPAddressVersion", "IPv4"))
        if version not in ("IPv4", "IPv6"):
            raise bad("InvalidIPAddressVersion", f"version is {version!r}, it is IPv4 or IPv6")
        if had and had["publicIPAddressVersion"] != version:
            raise bad("PublicIPAddressVersionCannotBeChanged", f"it is {target}")
        made: Doc = {
            "publicIPAllocationMethod": "Static",
            "publicIPAddressVersion": version,
            "idleTimeoutInMinutes": given.get("idleTimeoutInMinutes", 4),
        }
        return made | ({"ipAddress": had["ipAddress"]} if "ipAddress" in had else {})

    def _load_balancer(self, target: str, given: Doc, old: Doc | None) -> Doc:
        made = balancer.build(target, given)
        had = arm.properties(old)["backendAddressPools"] if old else []
        kept = {str(pool["id"]).lower() for pool in made["backendAddressPools"]}
        if any(str(pool["id"]).lower() not in kept for pool in had):
            self._check_unregistered(target, "InUseBackendAddressPoolCannotBeDeleted")
        return made

    def _nat_gateway(self, target: str, given: Doc, old: Doc | None) -> Doc:
        had = arm.properties(old).get("serviceGateway") if old else None
        made: Doc = {"serviceGateway": had} if had else {}
        for field, version in (("publicIpAddresses", "IPv4"), ("publicIpAddressesV6", "IPv6")):
            refs = arm.listed(given, field) or []
            made[field] = [{"id": self._public_ip_of(ref, field, version)} for ref in refs]
        if "serviceGateway" in given:
            gateway = arm.reference(given["serviceGateway"], "serviceGateway")
            if gateway is None:
                made.pop("serviceGateway", None)
            elif gateway.lower() not in self.docs[SERVICE_GATEWAYS]:
                raise bad("InvalidResourceReference", f"service gateway {gateway} does not exist")
            else:
                made["serviceGateway"] = {"id": gateway}
        return made

    def _public_ip_of(self, ref: Any, field: str, version: str) -> str:
        target = arm.reference(ref, field) or ""
        doc = self.docs[PUBLIC_IPS].get(target.lower())
        if doc is None:
            raise bad("InvalidResourceReference", f"{field}: public IP {target!r} does not exist")
        if doc["properties"]["publicIPAddressVersion"] != version:
            raise bad("InvalidIPAddressVersion", f"{field}: {target} is not {version}")
        return target

    def _service_gateway(self, target: str, given: Doc, old: Doc | None) -> Doc:
        network = arm.reference(given.get("virtualNetwork"), "virtualNetwork")
        if network is None:
            raise bad("InvalidRequestFormat", "virtualNetwork must be an object with an id")
        made: Doc = {"virtualNetwork": {"id": network}}
        for field in ("routeTargetAddress", "routeTargetAddressV6"):
            if given.get(field) is not None:
                made[field] = given[field]
        return made

    def _check_public_ip_free(self, target: str, doc: Doc) -> None:
        user = self._used.get(target.lower())
        if user:
            raise bad(
                "PublicIPAddressCannotBeDeleted",
                f"public IP {target} cannot be deleted while {user} uses it",
            )

    def _check_unregistered(self, target: str, code: str) -> None:
        names = [name for gateway in self.gateways.values() for name in gateway.users_of(target)]
        if names:
            raise bad(code, f"{target} is used by service {', '.join(sorted(names))}")

    def _check_nat_free(self, target: str, doc: Doc) -> None:
        self._check_unregistered(target, "InUseNatGatewayCannotBeDeleted")
        gateway = arm.properties(doc).get("serviceGateway")
        if gateway:
            raise bad("InUseNatGatewayCannotBeDeleted", f"{target} is attached to {gateway['id']}")

    def _check_gateway_empty(self, target: str, doc: Doc) -> None:
        gateway = self.gateways[target.lower()]
        if gateway.locations or any(not s.default for s in gateway.services.values()):
            raise bad("ServiceGatewayInUse", f"{target} still holds services or locations")


_MAKERS: dict[str, Callable[[Resources, str, Doc, Doc | None], Doc]] = {
    PUBLIC_IPS: Resources._public_ip,
    LOAD_BALANCERS: Resources._load_balancer,
    NAT_GATEWAYS: Resources._nat_gateway,
    SERVICE_GATEWAYS: Resources._service_gateway,
}
_DELETE_CHECKS: dict[str, Callable[[Resources, str, Doc], None]] = {
    PUBLIC_IPS: Resources._check_public_ip_free,
    LOAD_BALANCERS: lambda self, target, _: self._check_unregistered(
        target, "InUseLoadBalancerCannotBeDeleted"
    ),
    NAT_GATEWAYS: Resources._check_nat_free,
    SERVICE_GATEWAYS: Resources._check_gateway_empty,
}


def _user_of(kind: str, target: str) -> str:
    if kind == LOAD_BALANCERS:
        return f"{target}/frontendIPConfigurations/{balancer.FRONTEND}"
    return target


def _belongs(user: str, target: str) -> bool:
    """Whether a user of a public IP is this resource or a part of it: by whole id, not prefix."""
    user, target = user.lower(), target.lower()
    return user == target or user.startswith(target + "/")


def _addresses(family: int) -> Iterator[str]:
    for network in _RANGES[family]:
        for address in ipaddress.ip_network(network).hosts():
            yield str(address)
