"""What the API refuses, and how: `Status` bodies worded as a real API server words them.

Every refusal in this package is an `ApiError`; the server turns it into one response. A
`FieldError` names a field, its value and what would be right, and becomes one cause of a 422.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from sandbox.kube.resources import Resource

_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    406: "NotAcceptable",
    409: "Conflict",
    410: "Expired",
    413: "RequestEntityTooLarge",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


class ApiError(Exception):
    """One refusal: the HTTP code and the `Status` that explains it."""

    def __init__(
        self,
        code: int,
        message: str,
        *,
        reason: str | None = "",
        details: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = _REASONS.get(code, "") if reason == "" else reason
        self.details = details
        self.headers = dict(headers or {})
        self.metadata = dict(metadata or {})

    def body(self) -> dict[str, Any]:
        status: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": self.metadata,
            "status": "Failure",
            "message": self.message,
        }
        if self.reason:
            status["reason"] = self.reason
        if self.details:
            status["details"] = dict(self.details)
        status["code"] = self.code
        return status


class PlainError(Exception):
    """A refusal that a real server answers in plain text, as for a path it does not know."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class FieldError(msgspec.Struct, frozen=True):
    """One field that is wrong: the reason of its cause, and the text after the field's name."""

    field: str
    reason: str
    text: str

    def __str__(self) -> str:
        return f"{self.field}: {self.text}"


def show(value: Any) -> str:
    """A value as it stands in an error text."""
    return msgspec.json.encode(value).decode()


def wrong(field: str, value: Any, detail: str) -> FieldError:
    return FieldError(field, "FieldValueInvalid", f"Invalid value: {show(value)}: {detail}")


def wrong_type(field: str, value: Any, detail: str) -> FieldError:
    return FieldError(field, "FieldValueTypeInvalid", f"Invalid value: {show(value)}: {detail}")


def required(field: str, detail: str = "") -> FieldError:
    return FieldError(field, "FieldValueRequired", "Required value" + (detail and f": {detail}"))


def duplicate(field: str, value: Any) -> FieldError:
    return FieldError(field, "FieldValueDuplicate", f"Duplicate value: {show(value)}")


def forbidden_field(field: str, detail: str) -> FieldError:
    return FieldError(field, "FieldValueForbidden", f"Forbidden: {detail}")


def unsupported(field: str, value: Any, supported: Sequence[Any]) -> FieldError:
    names = ", ".join(show(str(name)) for name in supported)
    text = f"Unsupported value: {show(value)}: supported values: {names}"
    return FieldError(field, "FieldValueNotSupported", text)


def too_many(field: str, count: int, most: int) -> FieldError:
    text = f"Too many: {count}: must have at most {most} items"
    return FieldError(field, "FieldValueTooMany", text)


def too_long(field: str, most: int) -> FieldError:
    text = f"Too long: may not be more than {most} bytes"
    return FieldError(field, "FieldValueTooLong", text)


def qualified(kind: str, group: str) -> str:
    return f"{kind}.{group}" if group else kind


def _details(group: str, kind: str, name: str = "", **more: Any) -> dict[str, Any]:
    details: dict[str, Any] = {}
    if name:
        details["name"] = name
    if group:
        details["group"] = group
    details["kind"] = kind
    return details | more


def invalid(kind: str, group: str, name: str, errors: Sequence[FieldError]) -> ApiError:
    texts = [str(error) for error in errors]
    said = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    causes = [{"reason": e.reason, "message": e.text, "field": e.field} for e in errors]
    return ApiError(
        422,
        f"{qualified(kind, group)} {show(name)} is invalid: {said}",
        details=_details(group, kind, name, causes=causes),
    )


def not_found(resource: Resource, name: str) -> ApiError:
    return ApiError(
        404,
        f"{resource.full_name} {show(name)} not found",
        details=_details(resource.group, resource.plural, name),
    )


def already_exists(resource: Resource, name: str) -> ApiError:
    return ApiError(
        409,
        f"{resource.full_name} {show(name)} already exists",
        reason="AlreadyExists",
        details=_details(resource.group, resource.plural, name),
    )


def terminating(resource: Resource, name: str, namespace: str) -> ApiError:
    """A create in a namespace that is on its way out."""
    cause = {
        "reason": "NamespaceTerminating",
        "message": f"namespace {namespace} is being terminated",
        "field": "metadata.namespace",
    }
    return ApiError(
        403,
        f"{resource.full_name} {show(name)} is forbidden: unable to create new content in "
        f"namespace {namespace} because it is being terminated",
        details=_details(resource.group, resource.plural, name, causes=[cause]),
    )


def conflict(resource: Resource, name: str, why: str, *, by_kind: bool = False) -> ApiError:
    """A refused write; precondition failures name the kind where other conflicts the plural."""
    noun = resource.kind if by_kind else resource.plural
    return ApiError(
        409,
        f"Operation cannot be fulfilled on {qualified(noun, resource.group)} {show(name)}: {why}",
        details=_details(resource.group, noun, name),
    )


STALE = (
    "the object has been modified; please apply your changes to the latest version and try again"
)


def gone(message: str, **metadata: Any) -> ApiError:
    return ApiError(410, message, metadata=metadata)


def too_large_version(asked: int, current: int) -> ApiError:
    return ApiError(
        504,
        f"Timeout: Too large resource version: {asked}, current: {current}",
        details={
            "causes": [
                {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
            ],
            "retryAfterSeconds": 1,
        },
        headers={"Retry-After": "1"},
    )


def unsupported_media(accepted: Sequence[str]) -> ApiError:
    return ApiError(
        415,
        "the body of the request was in an unknown format - accepted media types include: "
        + ", ".join(accepted),
    )


def not_acceptable(accepted: Sequence[str]) -> ApiError:
    return ApiError(
        406,
        "only the following media types are accepted: " + ", ".join(accepted),
    )
