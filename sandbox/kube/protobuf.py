"""Reading protobuf bodies of the few kinds that `kubectl create` sends that way.

A message is described by its fields: number, JSON name, and how to read it. Answers are always
JSON, which those clients accept as well.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from sandbox.kube.errors import ApiError

_MAGIC = b"k8s\0"
Fields = dict[int, tuple[str, Any]]

_OWNER: Fields = {
    1: ("kind", "str"),
    3: ("name", "str"),
    4: ("uid", "str"),
    5: ("apiVersion", "str"),
    6: ("controller", "bool"),
    7: ("blockOwnerDeletion", "bool"),
}
_META: Fields = {
    1: ("name", "str"),
    2: ("generateName", "str"),
    3: ("namespace", "str"),
    5: ("uid", "str"),
    6: ("resourceVersion", "str"),
    8: ("creationTimestamp", "time"),
    11: ("labels", "map"),
    12: ("annotations", "map"),
    13: ("ownerReferences", [_OWNER]),
    14: ("finalizers", ["str"]),
}
_PORT: Fields = {
    1: ("name", "str"),
    2: ("protocol", "str"),
    3: ("port", "int"),
    4: ("targetPort", "int-or-string"),
    5: ("nodePort", "int"),
    6: ("appProtocol", "str"),
}
_SERVICE_SPEC: Fields = {
    1: ("ports", [_PORT]),
    2: ("selector", "map"),
    3: ("clusterIP", "str"),
    4: ("type", "str"),
    5: ("externalIPs", ["str"]),
    7: ("sessionAffinity", "str"),
    8: ("loadBalancerIP", "str"),
    9: ("loadBalancerSourceRanges", ["str"]),
    10: ("externalName", "str"),
    11: ("externalTrafficPolicy", "str"),
    13: ("publishNotReadyAddresses", "bool"),
    17: ("ipFamilyPolicy", "str"),
    18: ("clusterIPs", ["str"]),
    19: ("ipFamilies", ["str"]),
    20: ("allocateLoadBalancerNodePorts", "bool"),
    21: ("loadBalancerClass", "str"),
    22: ("internalTrafficPolicy", "str"),
}
_KINDS: dict[str, Fields] = {
    "Namespace": {1: ("metadata", _META)},
    "ConfigMap": {
        1: ("metadata", _META),
        2: ("data", "map"),
        3: ("binaryData", "bytes-map"),
        4: ("immutable", "bool"),
    },
    "Secret": {
        1: ("metadata", _META),
        2: ("data", "bytes-map"),
        3: ("type", "str"),
        4: ("stringData", "map"),
        5: ("immutable", "bool"),
    },
    "Service": {1: ("metadata", _META), 2: ("spec", _SERVICE_SPEC)},
    "ServiceAccount": {1: ("metadata", _META)},
    "DeleteOptions": {
        1: ("gracePeriodSeconds", "int"),
        2: ("preconditions", {1: ("uid", "str"), 2: ("resourceVersion", "str")}),
        3: ("orphanDependents", "bool"),
        4: ("propagationPolicy", "str"),
        5: ("dryRun", ["str"]),
    },
}


def read(body: bytes) -> dict[str, Any]:
    """A protobuf body as the JSON object that it stands for."""
    try:
        return _read(body)
    except (IndexError, UnicodeDecodeError, ValueError) as error:
        raise ApiError(400, f"the protobuf body cannot be read: {error}") from error


def _read(body: bytes) -> dict[str, Any]:
    if not body.startswith(_MAGIC):
        raise ValueError("it does not begin with k8s and a zero byte")
    envelope = dict(_fields(body[len(_MAGIC) :]))
    head = _message(envelope.get(1, b""), {1: ("apiVersion", "str"), 2: ("kind", "str")})
    shape = _KINDS.get(head.get("kind", ""))
    if shape is None:
        kinds = ", ".join(sorted(_KINDS))
        raise ApiError(
            415,
            f"the sandbox reads protobuf of {kinds}, not of {head.get('kind', 'nothing')}; "
            "send JSON",
        )
    return head | _message(envelope.get(2, b""), shape)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
        elif wire == 2:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise ValueError("it ends too early")
            yield tag >> 3, data[at : at + size]
            at += size
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} is unknown")


def _message(data: bytes, shape: Fields) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for number, raw in _fields(data):
        if number not in shape:
            continue
        name, kind = shape[number]
        if isinstance(kind, list):
            made.setdefault(name, []).append(_value(raw, kind[0]))
        elif kind in ("map", "bytes-map"):
            pair = _message(raw, {1: ("key", "str"), 2: ("value", "bytes")})
            value = pair.get("value", b"")
            text = base64.b64encode(value) if kind == "bytes-map" else value
            made.setdefault(name, {})[pair.get("key", "")] = text.decode()
        else:
            made[name] = _value(raw, kind)
    # Go writes empty strings for fields that are not set; JSON leaves them out.
    return {name: value for name, value in made.items() if value not in ("", {}, None)}


def _value(raw: Any, kind: Any) -> Any:
    if isinstance(kind, dict):
        return _message(raw, kind)
    match kind:
        case "str":
            return raw.decode()
        case "bytes":
            return raw
        case "bool":
            return bool(raw)
        case "int":
            return raw - (1 << 64) if raw >= 1 << 63 else raw
        case "int-or-string":
            parts = dict(_fields(raw))
            return parts.get(3, b"").decode() if parts.get(1) else parts.get(2, 0)
        case _:
            parts = dict(_fields(raw))
            if not parts:
                return None
            moment = datetime.fromtimestamp(parts.get(1, 0), UTC)
            return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
