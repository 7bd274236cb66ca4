"""What every Azure resource has: an id, an etag, and one shape of error.

Ids are compared without regard to case; a key of ours is the id in lower case.
"""

import ipaddress
import re
import uuid
from typing import Any

Doc = dict[str, Any]
"""A resource as JSON, as the wire has it."""

PROVIDER = "Microsoft.Network"
PUBLIC_IPS = "publicIPAddresses"
LOAD_BALANCERS = "loadBalancers"
NAT_GATEWAYS = "natGateways"
SERVICE_GATEWAYS = "serviceGateways"
TYPES = (PUBLIC_IPS, LOAD_BALANCERS, NAT_GATEWAYS, SERVICE_GATEWAYS)

_TYPES_BY_KEY = {name.lower(): name for name in TYPES}


class ArmError(Exception):
    """An answer that is an error: HTTP status, ARM code, text, and how long to wait."""

    def __init__(
        self, status: int, code: str, message: str, *, retry_after: float | None = None
    ) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.code = code
        self.message = message
        self.retry_after = retry_after

    def body(self) -> Doc:
        """The body that Azure's resource manager gives such an error."""
        return {"error": {"code": self.code, "message": self.message, "details": []}}


def bad(code: str, message: str) -> ArmError:
    """A request that will never be accepted as it is."""
    return ArmError(400, code, message)


def new_etag() -> str:
    """A fresh entity tag, in the weak form that the provider uses."""
    return f'W/"{uuid.uuid4()}"'


def resource_id(subscription: str, group: str, kind: str, name: str) -> str:
    """The canonical id of a resource of this provider."""
    return (
        f"/subscriptions/{subscription}/resourceGroups/{group}/providers/{PROVIDER}/{kind}/{name}"
    )


def type_of(text: str) -> str:
    """The resource type in its proper spelling; 404 for one that this server does not know."""
    try:
        return _TYPES_BY_KEY[text.lower()]
    except KeyError:
        raise ArmError(
            404,
            "InvalidResourceType",
            f"resource type {text!r} is unknown here, known are {', '.join(TYPES)}",
        ) from None


def reference(value: Any, field: str) -> str | None:
    """The id in `{"id": ...}`; None for null; 400 for anything else."""
    if value is None:
        return None
    if isinstance(value, dict) and isinstance(value.get("id"), str) and value["id"]:
        return str(value["id"])
    raise bad("InvalidRequestFormat", f"{field} must be an object with an id, or null")


def listed(doc: Doc, field: str, *, required: bool = False) -> list[Any] | None:
    """A list field: None when absent; 400 when it is null or no list (or absent but required)."""
    if field not in doc and not required:
        return None
    value = doc.get(field)
    if not isinstance(value, list):
        shown = "null" if value is None else type(value).__name__
        raise bad("InvalidRequestFormat", f"{field} must be a list, it is {shown}; send []")
    return value


def objects(values: list[Any], field: str) -> list[Doc]:
    """The same list, every entry checked to be an object."""
    for position, value in enumerate(values):
        if not isinstance(value, dict):
            raise bad("InvalidRequestFormat", f"{field}[{position}] must be an object")
    return values


def properties(doc: Doc) -> Doc:
    """The `properties` of a resource, an empty object when there are none."""
    value = doc.get("properties", {})
    if not isinstance(value, dict):
        raise bad("InvalidRequestFormat", "properties must be an object")
    return value


def sku_name(doc: Doc) -> str:
    """The SKU that a resource names, empty when it names none."""
    sku = doc.get("sku")
    return str(sku.get("name", "")) if isinstance(sku, dict) else ""


def ip(text: Any, field: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as an object, so that two spellings are one; 400 for anything else."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        raise bad("InvalidIPAddress", f"{field} is {text!r}, which is no IP address") from None


_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,78}[A-Za-z0-9_])?")


def check_name(name: Any, field: str) -> str:
    """A resource or service name of 1 to 80 characters; 400 for anything else."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad(
            "InvalidResourceName",
            f"{field} is {name!r}; it must start with a letter or digit, end with one or '_', "
            "and hold at most 80 letters, digits, '.', '_' or '-'",
        )
    return name
