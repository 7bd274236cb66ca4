"""Checking values against a structural schema, in the words of a real API server.

`check` names every fault it finds, not only the first; rules written in CEL are checked by
`sandbox.kube.rules`, and only when the shape itself is right.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any

from sandbox.kube.errors import (
    FieldError,
    duplicate,
    required,
    too_long,
    too_many,
    unsupported,
    wrong,
    wrong_type,
)
from sandbox.kube.fields import MISSING
from sandbox.kube.schema import Schema

#: The Python types that need no second look.
_EXACT = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list}


def type_name(value: Any) -> str:
    """The JSON type of a value, as an error text calls it."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case dict():
            return "object"
        case _:
            return "array"


def _fits(value: Any, wanted: str) -> bool:
    found = type_name(value)
    if wanted == "number":
        return found in ("number", "integer")
    if wanted == "int-or-string":
        return found in ("integer", "string")
    return found == wanted


def check(value: Any, schema: Schema, path: str, old: Any = MISSING) -> Iterator[FieldError]:
    """Every fault of a value, depth first.

    What is as it was before (`old`) is let pass, so that a stricter schema does not block the
    objects that were there earlier.
    """
    if (value is None and schema.nullable) or (old is not MISSING and value == old):
        return
    if schema.type and type(value) is not _EXACT.get(schema.type) and not _fits(value, schema.type):
        found = type_name(value)
        wanted = "integer,string" if schema.type == "int-or-string" else schema.type
        yield wrong_type(path, found, f'{path} in body must be of type {wanted}: "{found}"')
        return
    enum = schema.raw.get("enum")
    if enum is not None and value not in enum:
        yield unsupported(path, value, enum)
    match value:
        case dict():
            yield from _object(value, schema, path, old if isinstance(old, dict) else {})
        case list():
            yield from _array(value, schema, path)
        case str():
            yield from _string(value, schema, path)
        case bool():
            pass
        case int() | float():
            yield from _number(value, schema, path)
    if schema.combined:
        yield from _combined(value, schema, path)


def _object(
    value: dict[str, Any], schema: Schema, path: str, old: dict[str, Any]
) -> Iterator[FieldError]:
    raw = schema.raw
    dot = f"{path}." if path else ""
    for name in raw.get("required", ()):
        if name not in value:
            yield required(f"{dot}{name}")
    if (least := raw.get("minProperties")) is not None and len(value) < least:
        text = f"{path} in body should have at least {least} properties"
        yield wrong(path, len(value), text)
    if (most := raw.get("maxProperties")) is not None and len(value) > most:
        yield too_many(path, len(value), most)
    for name, item in value.items():
        child = schema.properties.get(name)
        if child is not None:
            yield from check(item, child, f"{dot}{name}", old.get(name, MISSING))
        elif schema.additional is not None:
            yield from check(item, schema.additional, f"{dot}{name}", old.get(name, MISSING))


def _array(value: list[Any], schema: Schema, path: str) -> Iterator[FieldError]:
    raw = schema.raw
    if (most := raw.get("maxItems")) is not None and len(value) > most:
        yield too_many(path, len(value), most)
    if (least := raw.get("minItems")) is not None and len(value) < least:
        yield wrong(path, len(value), f"{path} in body should have at least {least} items")
    if schema.items is not None:
        for index, item in enumerate(value):
            yield from check(item, schema.items, f"{path}[{index}]")
    yield from _repeated(value, schema, path)


def _repeated(value: list[Any], schema: Schema, path: str) -> Iterator[FieldError]:
    if schema.list_type == "atomic":
        return
    seen: list[Any] = []
    for index, item in enumerate(value):
        if schema.list_type == "map":
            if not isinstance(item, dict):
                continue
            item = {k: item[k] for k in schema.list_keys if k in item}
        if item in seen:
            yield duplicate(f"{path}[{index}]", item)
        seen.append(item)


def _string(value: str, schema: Schema, path: str) -> Iterator[FieldError]:
    raw = schema.raw
    if (most := raw.get("maxLength")) is not None and len(value) > most:
        yield too_long(path, most)
    if (least := raw.get("minLength")) is not None and len(value) < least:
        yield wrong(path, value, f"{path} in body should be at least {least} chars long")
    if (pattern := raw.get("pattern")) is not None and not _pattern(pattern).search(value):
        yield wrong(path, value, f"{path} in body should match '{pattern}'")
    form = raw.get("format", "")
    reader = _FORMATS.get(form)
    if reader is not None and not _reads(reader, value):
        yield wrong(path, value, f'{path} in body must be of type {form}: "{value}"')


def _number(value: int | float, schema: Schema, path: str) -> Iterator[FieldError]:
    raw = schema.raw
    least, most = raw.get("minimum"), raw.get("maximum")
    if least is not None and (value < least or (raw.get("exclusiveMinimum") and value == least)):
        bound = "greater than" if raw.get("exclusiveMinimum") else "greater than or equal to"
        yield wrong(path, value, f"{path} in body should be {bound} {least}")
    if most is not None and (value > most or (raw.get("exclusiveMaximum") and value == most)):
        bound = "less than" if raw.get("exclusiveMaximum") else "less than or equal to"
        yield wrong(path, value, f"{path} in body should be {bound} {most}")
    step = raw.get("multipleOf")
    if step and value % step:
        yield wrong(path, value, f"{path} in body should be a multiple of {step}")
    bits = {"int32": 31, "int64": 63}.get(raw.get("format", ""))
    if bits is not None and not -(2**bits) <= value < 2**bits:
        text = f'{path} in body must be of type {raw["format"]}: "{value}"'
        yield wrong(path, value, text)


def _combined(value: Any, schema: Schema, path: str) -> Iterator[FieldError]:
    raw = schema.raw
    for part in raw.get("allOf", ()):
        yield from check(value, _part(part), path)
    for word, kind in (("anyOf", "at least one"), ("oneOf", "one and only one")):
        parts = raw.get(word)
        if not parts or schema.type == "int-or-string":
            continue
        matches = sum(not any(check(value, _part(part), path)) for part in parts)
        if matches == 0 or (word == "oneOf" and matches != 1):
            yield wrong(path, "", f'"{path}" must validate {kind} schema ({word})')
    if (part := raw.get("not")) is not None and not any(check(value, _part(part), path)):
        yield wrong(path, "", f'"{path}" must not validate the schema (not)')


def _part(raw: dict[str, Any]) -> Schema:
    return Schema({"x-kubernetes-preserve-unknown-fields": True} | raw)


@lru_cache(maxsize=512)
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text)


def _reads(reader: Callable[[str], Any], value: str) -> bool:
    try:
        return reader(value) is not False
    except ValueError:
        return False


def _date_time(value: str) -> datetime:
    return datetime.fromisoformat(value.replace("Z", "+00:00"))


_FORMATS: dict[str, Callable[[str], Any]] = {
    "date-time": _date_time,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "cidr": lambda value: "/" in value and ipaddress.ip_network(value, strict=False),
}
