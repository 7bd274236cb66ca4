"""What a load balancer may look like: one frontend configuration or more, pools, rules.

Members of a pool are the service gateway's business here; a client that sends some is refused,
because it would fight with it.
"""

from collections.abc import Callable
from typing import Any

from sandbox.nrp import arm
from sandbox.nrp.arm import LOAD_BALANCERS, NAT_GATEWAYS, Doc, bad

FRONTEND = "frontend"
_PROTOCOLS = ("Tcp", "Udp", "All")


def public_ips_of(kind: str, doc: Doc) -> list[str]:
    """Ids of the public IPs that a resource of this kind uses."""
    given = arm.properties(doc)
    if kind == LOAD_BALANCERS:
        return [
            frontend["properties"]["publicIPAddress"]["id"]
            for frontend in given["frontendIPConfigurations"]
        ]
    if kind == NAT_GATEWAYS:
        refs = given.get("publicIpAddresses", []) + given.get("publicIpAddressesV6", [])
        return [ref["id"] for ref in refs]
    return []


def build(target: str, given: Doc) -> Doc:
    """The properties of a load balancer from a request; 400 with the reason when it is wrong."""
    frontends = _parts(target, given, "frontendIPConfigurations", _frontend)
    pools = _parts(target, given, "backendAddressPools", _pool)
    rules = _parts(target, given, "loadBalancingRules", _rule)
    known = {str(part["id"]).lower() for part in frontends + pools}
    seen_front: set[tuple[Any, ...]] = set()
    seen_back: set[tuple[Any, ...]] = set()
    for rule in rules:
        made = rule["properties"]
        front = made["frontendIPConfiguration"]["id"].lower()
        pool = made["backendAddressPool"]["id"].lower()
        for ref in (front, pool):
            if ref not in known:
                raise bad("InvalidResourceReference", f"rule {rule['name']}: {ref} does not exist")
        key = (front, made["protocol"], made["frontendPort"])
        if key in seen_front:
            raise bad("RulesUseSameFrontendPortProtocolAndIPConfig", f"rule {rule['name']}")
        seen_front.add(key)
        key = (pool, made["protocol"], made["backendPort"])
        if key in seen_back:
            raise bad("RulesUseSameBackendPortProtocolAndPool", f"rule {rule['name']}")
        seen_back.add(key)
    return {
        "frontendIPConfigurations": frontends,
        "backendAddressPools": pools,
        "loadBalancingRules": rules,
    }


def _parts(target: str, given: Doc, field: str, make: Callable[[Doc], Doc]) -> list[Doc]:
    made: dict[str, Doc] = {}
    for part in arm.objects(arm.listed(given, field) or [], field):
        name = arm.check_name(part.get("name"), f"{field}.name")
        if name.lower() in made:
            raise bad("DuplicateResourceName", f"{field}: {name} is listed twice")
        made[name.lower()] = {
            "name": name,
            "id": f"{target}/{field}/{name}",
            "properties": make(arm.properties(part)) | {"provisioningState": "Succeeded"},
        }
    return list(made.values())


def _frontend(given: Doc) -> Doc:
    public_ip = arm.reference(given.get("publicIPAddress"), "publicIPAddress")
    if public_ip is None:
        raise bad("InvalidRequestFormat", "a frontend needs publicIPAddress.id")
    return {"publicIPAddress": {"id": public_ip}}


def _pool(given: Doc) -> Doc:
    if given.get("loadBalancerBackendAddresses"):
        raise bad(
            "BackendAddressesNotAllowed", "members of this pool are managed by the service gateway"
        )
    network = arm.reference(given.get("virtualNetwork"), "virtualNetwork")
    return {"virtualNetwork": {"id": network}} if network else {}


def _rule(given: Doc) -> Doc:
    protocol = given.get("protocol")
    if protocol not in _PROTOCOLS:
        raise bad("InvalidProtocol", f"protocol is {protocol!r}, it must be one of {_PROTOCOLS}")
    reset = bool(given.get("enableTcpReset", False))
    if reset and protocol != "Tcp":
        raise bad("TcpResetNotAllowed", f"enableTcpReset is for Tcp, the rule's is {protocol}")
    return {
        "protocol": protocol,
        "frontendPort": _number(given, "frontendPort", 1, 65534),
        "backendPort": _number(given, "backendPort", 1, 65535),
        "idleTimeoutInMinutes": _number(given, "idleTimeoutInMinutes", 4, 30, default=4),
        "enableFloatingIP": bool(given.get("enableFloatingIP", False)),
        "enableTcpReset": reset,
        "frontendIPConfiguration": {"id": _ref(given, "frontendIPConfiguration")},
        "backendAddressPool": {"id": _ref(given, "backendAddressPool")},
    }


def _number(given: Doc, field: str, low: int, high: int, *, default: int | None = None) -> int:
    value = given.get(field, default)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise bad("InvalidValue", f"{field} is {value!r}, it must be a number from {low} to {high}")
    return value


def _ref(given: Doc, field: str) -> str:
    target = arm.reference(given.get(field), field)
    if target is None:
        raise bad("InvalidRequestFormat", f"a rule needs {field}.id")
    return target
