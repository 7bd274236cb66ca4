"""From a path to what it asks for. Azure's paths are matched without regard to case."""

from dataclasses import dataclass
from urllib.parse import unquote

from sandbox.nrp import arm
from sandbox.nrp.arm import SERVICE_GATEWAYS, ArmError

_NOUNS = {
    arm.PUBLIC_IPS: "public_ip",
    arm.LOAD_BALANCERS: "load_balancer",
    arm.NAT_GATEWAYS: "nat_gateway",
    SERVICE_GATEWAYS: "service_gateway",
}
_VERBS = {"GET": "get", "PUT": "put", "PATCH": "tag", "DELETE": "delete"}
_BELOW_GATEWAY = {
    ("GET", "services"): "list_services",
    ("GET", "addresslocations"): "list_address_locations",
    ("POST", "updateservices"): "update_services",
    ("POST", "updateaddresslocations"): "update_address_locations",
}


@dataclass(frozen=True, slots=True)
class Route:
    """An operation, and the resource (or the folder of resources) that it is about."""

    op: str
    kind: str
    subscription: str
    target: str
    name: str


def parse(method: str, path: str) -> Route:
    """What a request asks for; 404 or 405 when it is nothing that this server knows."""
    parts = [unquote(part) for part in path.strip("/").split("/")]
    keys = [part.lower() for part in parts]
    if keys[0] != "subscriptions" or len(parts) < 5:
        raise _unknown(path)
    subscription = parts[1]
    if keys[2] == "providers" and keys[3] == arm.PROVIDER.lower():
        return _below_subscription(method, path, subscription, parts[4:])
    if keys[2] != "resourcegroups" or len(parts) < 7 or keys[4] != "providers":
        raise _unknown(path)
    if keys[5] != arm.PROVIDER.lower():
        raise ArmError(404, "InvalidResourceNamespace", f"provider {parts[5]!r} is unknown here")
    kind = arm.type_of(parts[6])
    if len(parts) == 7:
        folder = arm.resource_id(subscription, parts[3], kind, "")
        return _list(method, path, kind, subscription, folder)
    target = arm.resource_id(subscription, parts[3], kind, parts[7])
    if len(parts) == 8 and method in _VERBS:
        return Route(f"{_VERBS[method]}_{_NOUNS[kind]}", kind, subscription, target, parts[7])
    op = _BELOW_GATEWAY.get((method, keys[8])) if len(parts) == 9 else None
    if op is None or kind != SERVICE_GATEWAYS:
        raise _unknown(path)
    return Route(op, kind, subscription, target, parts[7])


def _below_subscription(method: str, path: str, subscription: str, rest: list[str]) -> Route:
    if len(rest) == 4 and rest[0].lower() == "locations" and method == "GET":
        page = {"operations": "get_operation", "operationresults": "get_operation_result"}
        op = page.get(rest[2].lower())
        if op is not None:
            return Route(op, "", subscription, path, rest[3])
    if len(rest) != 1:
        raise _unknown(path)
    return _list(
        method, path, arm.type_of(rest[0]), subscription, f"/subscriptions/{subscription}/"
    )


def _list(method: str, path: str, kind: str, subscription: str, folder: str) -> Route:
    if method != "GET":
        raise ArmError(405, "MethodNotAllowed", f"{method} is not possible on {path}")
    return Route(f"list_{_NOUNS[kind]}s", kind, subscription, folder, "")


def _unknown(path: str) -> ArmError:
    return ArmError(404, "NotFound", f"nothing is known here about the path {path}")
