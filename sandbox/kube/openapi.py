"""OpenAPI as `kubectl` needs it: for validation by the server, `explain`, and merge rules.

Each group version has a v3 document with the schemas of its kinds and the operations that say
which query parameters a patch takes. The v2 document is empty: clients fall back on v3.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from aiohttp import web

from sandbox.kube.errors import ApiError
from sandbox.kube.resources import Registry, Resource

_encode = msgspec.json.encode
_V2_PROTO = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"


def answer(registry: Registry, path: str, accept: str) -> web.Response:
    if path == "/openapi/v2":
        return _v2(accept)
    if path == "/openapi/v3":
        return web.Response(
            body=_encode(_index(registry)), content_type="text/plain", charset="utf-8"
        )
    parts = path.removeprefix("/openapi/v3/").split("/")
    group, version = ("", parts[1]) if parts[0] == "api" else ([*parts[1:], "", ""])[:2]
    if not registry.serves(group, version):
        raise ApiError(404, "the server could not find the requested resource", details={})
    body = _encode(document(registry, group, version))
    return web.Response(body=body, content_type="application/json")


def _v2(accept: str) -> web.Response:
    info = {"title": "Kubernetes", "version": "sandbox"}
    if "protobuf" not in accept:
        made = {"swagger": "2.0", "info": info, "paths": {}, "definitions": {}}
        return web.Response(body=_encode(made), content_type="application/json")

    def text(number: int, value: bytes) -> bytes:
        return bytes([number << 3 | 2, len(value)]) + value

    told = text(1, info["title"].encode()) + text(2, info["version"].encode())
    body = text(1, b"2.0") + text(2, told) + text(8, b"")
    return web.Response(body=body, headers={"Content-Type": _V2_PROTO})


def _index(registry: Registry) -> dict[str, Any]:
    paths = {}
    for group in registry.groups():
        for version in registry.versions(group):
            where = f"apis/{group}/{version}" if group else f"api/{version}"
            body = _encode(document(registry, group, version))
            digest = hashlib.sha512(body).hexdigest().upper()
            paths[where] = {"serverRelativeURL": f"/openapi/v3/{where}?hash={digest}"}
    return {"paths": paths}


def document(registry: Registry, group: str, version: str) -> dict[str, Any]:
    """The v3 document of one group version."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for resource in registry.of(group, version):
        name = _schema_name(resource)
        schemas[name] = dict(resource.schema.raw) | {
            "x-kubernetes-group-version-kind": [_gvk(resource)]
        }
        paths |= _paths(resource, name)
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes sandbox", "version": "1.36"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _schema_name(resource: Resource) -> str:
    reversed_group = ".".join(reversed((resource.group or "core.api.k8s.io").split(".")))
    return f"{reversed_group}.{resource.version}.{resource.kind}"


def _gvk(resource: Resource) -> dict[str, str]:
    return {"group": resource.group, "version": resource.version, "kind": resource.kind}


def _paths(resource: Resource, name: str) -> dict[str, Any]:
    root = f"/apis/{resource.group}" if resource.group else "/api"
    space = "/namespaces/{namespace}" if resource.namespaced else ""
    every = f"{root}/{resource.version}{space}/{resource.plural}"
    one = every + "/{name}"
    made = {
        every: {
            "get": _operation(resource, name, "list"),
            "post": _operation(resource, name, "post", writes=True),
        },
        one: {
            "get": _operation(resource, name, "get"),
            "put": _operation(resource, name, "put", writes=True),
            "patch": _operation(resource, name, "patch", writes=True),
            "delete": _operation(resource, name, "delete"),
        },
    }
    if resource.status:
        made[one + "/status"] = {
            "patch": _operation(resource, name, "patch", writes=True),
        }
    return made


def _operation(
    resource: Resource, name: str, action: str, *, writes: bool = False
) -> dict[str, Any]:
    asked: tuple[str, ...] = ("dryRun", "fieldManager", "fieldValidation") if writes else ()
    if action == "patch":
        asked += ("force",)
    return {
        "operationId": f"{action}{resource.kind}",
        "parameters": [
            {"name": parameter, "in": "query", "schema": {"type": "string"}} for parameter in asked
        ],
        "responses": {
            "200": {
                "description": "OK",
                "content": {
                    "application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}
                },
            }
        },
        "x-kubernetes-action": action,
        "x-kubernetes-group-version-kind": _gvk(resource),
    }
