"""What a request asks for: resource, verb and options, read from its path, query and headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from sandbox.kube.errors import ApiError, PlainError, forbidden_field, invalid
from sandbox.kube.resources import Registry, Resource
from sandbox.kube.selectors import Selection

_BY_METHOD = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_SUBRESOURCES = ("status", "finalize")


@dataclass(frozen=True, slots=True)
class Target:
    """The resource a path names, or a part of it."""

    resource: Resource
    namespace: str | None
    name: str
    subresource: str

    def verb(self, method: str, query: Mapping[str, str]) -> str:
        """The verb by which permissions and counters call this request."""
        if method in ("GET", "HEAD"):
            if query.get("watch") in ("1", "true", "True"):
                return "watch"
            return "get" if self.name else "list"
        verb = _BY_METHOD.get(method, "")
        if verb == "delete" and not self.name:
            verb = "deletecollection"
        one = verb in ("update", "patch", "delete")
        placed = self.namespace is not None or not self.resource.namespaced
        if verb not in self.resource.verbs or one != bool(self.name) or not placed:
            raise ApiError(405, "the server does not allow this method on the requested resource")
        return verb

    @property
    def noun(self) -> str:
        """Plural and subresource, as counters and refusals name them."""
        plural = self.resource.plural
        return f"{plural}/{self.subresource}" if self.subresource else plural


def target(registry: Registry, path: str) -> Target:
    """Read a path below /api or /apis; an unknown one is a 404 in plain text."""
    parts = [unquote(part) for part in path.strip("/").split("/")]
    if parts[0] == "api":
        group, version, rest = "", parts[1] if len(parts) > 1 else "", parts[2:]
    else:
        group, version, rest = ([*parts, "", "", ""])[1], ([*parts, "", "", ""])[2], parts[3:]
    namespace: str | None = None
    if len(rest) >= 3 and rest[0] == "namespaces" and rest[2] not in _SUBRESOURCES:
        namespace, rest = rest[1], rest[2:]
    if not rest or len(rest) > 3 or not all(rest):
        raise PlainError(404, "404 page not found\n")
    plural, name, subresource = ([*rest, "", ""])[:3]
    found = registry.find(group, version, plural)
    if found is None:
        if registry.serves(group, version):
            raise _absent()
        raise PlainError(404, "404 page not found\n")
    if (namespace is not None) != found.namespaced and (name or namespace is not None):
        raise _absent()
    if subresource and not _has(found, subresource):
        raise _no_subresource(found, name)
    return Target(found, namespace, name, subresource)


def _has(resource: Resource, subresource: str) -> bool:
    if subresource == "finalize":
        return resource.kind == "Namespace"
    return subresource == "status" and resource.status


def _absent() -> ApiError:
    return ApiError(404, "the server could not find the requested resource", details={})


def _no_subresource(resource: Resource, name: str) -> ApiError:
    details = {"name": name, "group": resource.group, "kind": resource.plural}
    return ApiError(
        404,
        f'{resource.full_name} "{name}" not found',
        details={k: v for k, v in details.items() if v},
    )


def anonymous(target: Target, verb: str) -> ApiError:
    """The refusal of a request without a token."""
    resource = target.resource
    named = f' "{target.name}"' if target.name else ""
    where = f'in the namespace "{target.namespace}"' if target.namespace else "at the cluster scope"
    details = {"name": target.name, "group": resource.group, "kind": resource.plural}
    return ApiError(
        403,
        f'{resource.full_name}{named} is forbidden: User "system:anonymous" cannot {verb} resource '
        f'"{target.noun}" in API group "{resource.group}" {where}',
        details={k: v for k, v in details.items() if v},
    )


def number(query: Mapping[str, str], name: str) -> int:
    """A whole number of the query; 0 where it is not given."""
    text = query.get(name, "")
    try:
        return int(text or 0)
    except ValueError as error:
        why = f'strconv.ParseInt: parsing "{text}": invalid syntax'
        raise ApiError(400, f"unable to decode query parameter {name}: {why}") from error


def selection(query: Mapping[str, str], resource: Resource) -> Selection:
    return Selection(
        query.get("labelSelector", ""), query.get("fieldSelector", ""), resource.selectable
    )


def version_of(query: Mapping[str, str]) -> int | None:
    """`resourceVersion` as a number; None where it is not given."""
    text = query.get("resourceVersion", "")
    if not text:
        return None
    if not text.isdigit():
        raise ApiError(
            500,
            f'resourceVersion: Invalid value: "{text}": strconv.ParseUint: parsing "{text}": '
            "invalid syntax",
            reason=None,
        )
    return int(text)


def check_list(query: Mapping[str, str], *, watch: bool) -> None:
    """Options of list and watch that do not go together."""
    match = query.get("resourceVersionMatch", "")
    initial = watch and "sendInitialEvents" in query
    error = None
    if initial and match != "NotOlderThan":
        text = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
        error = forbidden_field("resourceVersionMatch", text)
    elif match and not initial:
        if watch:
            text = (
                "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided"
            )
            error = forbidden_field("resourceVersionMatch", text)
        elif not query.get("resourceVersion"):
            text = "resourceVersionMatch is forbidden unless resourceVersion is provided"
            error = forbidden_field("resourceVersionMatch", text)
        elif query.get("continue"):
            text = "resourceVersionMatch is forbidden when continue is provided"
            error = forbidden_field("resourceVersionMatch", text)
        elif match == "Exact" and query["resourceVersion"] == "0":
            text = 'resourceVersionMatch "Exact" is forbidden for resourceVersion "0"'
            error = forbidden_field("resourceVersionMatch", text)
        elif match not in ("Exact", "NotOlderThan"):
            text = 'supported values: "Exact", "NotOlderThan"'
            error = forbidden_field("resourceVersionMatch", text)
    if error is not None:
        raise invalid("ListOptions", "meta.k8s.io", "", [error])


@dataclass(frozen=True, slots=True)
class Form:
    """In which form objects are wanted: as they are, as a table, or only their metadata."""

    name: str = ""  # "", "Table", "PartialObjectMetadata", "PartialObjectMetadataList"
    version: str = "v1"

    @property
    def content_type(self) -> str:
        return "application/json"


def form(accept: str) -> Form:
    """The first media type of an Accept header that can be answered."""
    for part in (accept or "*/*").split(","):
        kind, *parameters = (text.strip() for text in part.split(";"))
        if kind not in ("application/json", "*/*", "application/*"):
            continue
        given = dict(p.partition("=")[::2] for p in parameters)
        wanted = given.get("as", "")
        if not wanted:
            return Form()
        if given.get("g") == "meta.k8s.io" and wanted in (
            "Table",
            "PartialObjectMetadata",
            "PartialObjectMetadataList",
        ):
            return Form(wanted, given.get("v", "v1"))
    raise ApiError(406, "only the following media types are accepted: application/json")
