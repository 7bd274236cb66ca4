"""Reading request bodies: JSON or YAML in, a checked object of one kind out."""

from __future__ import annotations

from typing import Any

import msgspec
import yaml

from sandbox.kube import protobuf
from sandbox.kube.checks import check
from sandbox.kube.errors import ApiError, unsupported_media
from sandbox.kube.resources import Object, Resource
from sandbox.kube.schema import fill, prune

JSON = "application/json"
YAML = "application/yaml"
PROTOBUF = "application/vnd.kubernetes.protobuf"


class _Loader(yaml.CSafeLoader):
    """YAML as Kubernetes reads it: a time stays text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


def media_type(content_type: str | None) -> str:
    return (content_type or JSON).partition(";")[0].strip().lower()


def json_fault(body: bytes, error: msgspec.DecodeError) -> str:
    """A JSON error in the words of Go's decoder."""
    if "truncated" in str(error):
        return "unexpected end of JSON input"
    text = body.strip()
    first = chr(text[0]) if text else ""
    return f"invalid character '{first}' looking for beginning of value"


def parse(body: bytes, resource: Resource, content_type: str | None) -> Any:
    """The decoded body, whatever it holds."""
    kind = media_type(content_type)
    if kind == PROTOBUF:
        return protobuf.read(body)
    if kind not in (JSON, YAML):
        raise unsupported_media([JSON, YAML, PROTOBUF])
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        if kind == JSON:
            shown = body[:1024].decode(errors="replace")
            raise ApiError(
                400,
                "the object provided is unrecognized (must be of type "
                f"{resource.kind}): couldn't get version/kind; json parse error: "
                f"{json_fault(body, error)} ({shown})",
            ) from error
    return parse_yaml(body)


def parse_yaml(body: bytes) -> Any:
    """YAML (or JSON, which is YAML that a faster reader takes first)."""
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        pass
    try:
        value = yaml.load(body, _Loader)  # noqa: S506 - a safe loader
        # Through JSON, so that only what JSON can hold goes on.
        return msgspec.json.decode(msgspec.json.encode(value))
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ApiError(400, f"error decoding YAML: {error}") from error


def expect_kind(obj: Any, resource: Resource) -> Object:
    """The body as an object of this kind; another kind or version is refused."""
    if not isinstance(obj, dict):
        raise ApiError(
            400, f"the object provided is unrecognized (must be of type {resource.kind})"
        )
    version, kind = obj.get("apiVersion"), obj.get("kind")
    if version not in (None, "", resource.api_version):
        raise ApiError(
            400,
            f"the API version in the data ({version}) does not match the expected API version "
            f"({resource.api_version})",
        )
    if kind not in (None, "", resource.kind):
        raise ApiError(
            400,
            f'{kind} in version "{resource.version}" cannot be handled as a {resource.kind}: '
            f"the kind in the data does not match the path",
        )
    if not isinstance(obj.get("metadata", {}), dict):
        raise _misfit(resource, "json: cannot unmarshal into Go struct field ObjectMeta.metadata")
    obj.setdefault("metadata", {})
    head = {"apiVersion": resource.api_version, "kind": resource.kind}
    return head | {k: v for k, v in obj.items() if k not in head}


def _misfit(resource: Resource, why: str) -> ApiError:
    return ApiError(
        400, f'{resource.kind} in version "{resource.version}" cannot be handled as a '
        f"{resource.kind}: {why}"
    )  # fmt: skip


def admit(obj: Object, resource: Resource, unknown: list[str]) -> Object:
    """Make an object fit its shape: nulls, unknown fields and wrong types out, defaults in.

    What no field declares is dropped and named in `unknown`. A built-in kind with a value of the
    wrong type is refused here, as a decoder would; a custom one later, by validation.
    """
    metadata = _without_nulls(obj["metadata"])
    for name in ("labels", "annotations", "finalizers", "ownerReferences", "managedFields"):
        if name in metadata and not metadata[name]:
            del metadata[name]
    obj["metadata"] = metadata
    if not resource.custom:
        obj = _without_nulls(obj)
    prune(obj, resource.schema, "", unknown)
    shape, value, where = resource.meta, obj["metadata"], "metadata"
    if not resource.custom:
        shape, value, where = resource.schema, obj, ""
    for error in check(value, shape, where):
        if error.reason == "FieldValueTypeInvalid":
            said = error.text.partition('"')[2].partition('"')[0]
            wanted = error.text.rpartition("must be of type ")[2].partition(":")[0]
            field = f"{'ObjectMeta' if where else resource.kind}.{error.field}"
            raise _misfit(
                resource,
                f"json: cannot unmarshal {said} into Go struct field {field} of type {wanted}",
            )
    fill(obj, resource.schema)
    resource.rules.default(obj)
    return obj


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def strict(unknown: list[str]) -> str:
    return "strict decoding error: " + ", ".join(f'unknown field "{name}"' for name in unknown)


def misfit(resource: Resource, unknown: list[str]) -> ApiError:
    """The refusal of unknown fields under `fieldValidation=Strict`."""
    return _misfit(resource, strict(unknown))
