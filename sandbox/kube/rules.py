"""CEL rules of a CRD (`x-kubernetes-validations`), with transition rules by `oldSelf`.

Rules are compiled once, when their CRD is written, so that a bad one is refused there. A rule is
not evaluated where its part of the object did not change, and one that mentions `oldSelf` only
where there is an old value to compare with: in an unkeyed list there is none.

Supported is standard CEL with its string functions, and `isIP` and `isCIDR`. A rule that needs
more is refused with the compiler's message instead of being passed over.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_strings

from sandbox.kube.errors import FieldError, required, wrong
from sandbox.kube.fields import MISSING, indexed
from sandbox.kube.resources import Object
from sandbox.kube.schema import MARKS, RESERVED, Schema

_OLD = re.compile(r"\boldSelf\b")


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_cidr(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return "/" in text


def _function(name: str, implementation: Any) -> Any:
    overload = cel.Overload(
        id=f"{name}_string",
        return_type=cel.Type.BOOL,
        parameters=[cel.Type.STRING],
        impl=implementation,
    )
    return cel.FunctionDecl(name, [overload])


@lru_cache(maxsize=1)
def _environment() -> Any:
    return cel.NewEnv(
        variables={"self": cel.Type.DYN, "oldSelf": cel.Type.DYN},
        extensions=[ext_strings.ExtStrings()],
        functions=[_function("isIP", _is_ip), _function("isCIDR", _is_cidr)],
    )


@lru_cache(maxsize=2048)
def _compiled(rule: str) -> Any:
    return _environment().compile(rule)


@lru_cache(maxsize=2048)
def _is_transition(rule: str) -> bool:
    return _OLD.search(rule) is not None


def faults_of(raw: Any, where: str) -> Iterator[FieldError]:
    """What is wrong with the rules of one node of a CRD's schema."""
    for index, rule in enumerate(raw.get("x-kubernetes-validations") or ()):
        field = f"{where}.x-kubernetes-validations[{index}]"
        text = rule.get("rule", "")
        if not text.strip():
            yield required(f"{field}.rule", "rule is not specified")
        if rule.get("optionalOldSelf"):
            yield wrong(f"{field}.optionalOldSelf", True, "not supported by this server")
        for name in ("rule", "messageExpression"):
            if source := rule.get(name, ""):
                try:
                    _compiled(source)
                except RuntimeError as error:
                    said = str(error).partition("\n")[0]
                    yield wrong(f"{field}.{name}", source, f"compilation failed: {said}")


def check_rules(obj: Object, old: Object | None, schema: Schema) -> Iterator[FieldError]:
    """Every rule that an object breaks."""
    yield from _check(_bare(obj), MISSING if old is None else _bare(old), schema, "")


def _bare(obj: Object) -> Object:
    """An object as rules see it: of its metadata only the name."""
    metadata = {k: obj["metadata"][k] for k in ("name", "generateName") if k in obj["metadata"]}
    return obj | {"metadata": metadata}


def _check(value: Any, old: Any, schema: Schema, path: str) -> Iterator[FieldError]:
    if value is None or (old is not MISSING and value == old):
        return
    if schema.rules:
        yield from _evaluate(value, old, schema, path)
    if isinstance(value, dict):
        before = old if isinstance(old, dict) else {}
        for name, item in value.items():
            child = schema.properties.get(name) or schema.additional
            if child is not None and child.ruled:
                below = f"{path}.{name}" if path else name
                yield from _check(item, before.get(name, MISSING), child, below)
    elif isinstance(value, list) and schema.items is not None and schema.items.ruled:
        known = isinstance(old, list) and schema.list_type == "map"
        before = indexed(old, schema) if known else {}
        names = list(indexed(value, schema)) if known else []
        for index, item in enumerate(value):
            was = before.get(names[index], MISSING) if index < len(names) else MISSING
            yield from _check(item, was, schema.items, f"{path}[{index}]")


def _evaluate(value: Any, old: Any, schema: Schema, path: str) -> Iterator[FieldError]:
    data = {"self": _shown(value, schema)}
    if old is not MISSING:
        data["oldSelf"] = _shown(old, schema)
    activation = _environment().Activation(data)
    for rule in schema.rules:
        if old is MISSING and _is_transition(rule["rule"]):
            continue
        result = _compiled(rule["rule"]).eval(activation)
        if result.value() is True:
            continue
        field = path + (rule.get("fieldPath") or "")
        yield _fault(field.lstrip("."), value, schema, rule, activation, result)


def _fault(
    path: str, value: Any, schema: Schema, rule: Mapping[str, Any], activation: Any, result: Any
) -> FieldError:
    kind = schema.type or "object"
    if result.type() == cel.Type.ERROR:
        return wrong(path, kind, f"rule evaluation error: {result.value()}: {rule['rule']}")
    said = rule.get("message") or f"failed rule: {rule['rule'].strip()}"
    if expression := rule.get("messageExpression"):
        told = _compiled(expression).eval(activation).value()
        said = told if isinstance(told, str) and told else said
    if rule.get("reason") == "FieldValueRequired":
        return required(path, said)
    return wrong(path, kind, said)


def _shown(value: Any, schema: Schema) -> Any:
    """A value as CEL sees it: a null field absent, reserved names escaped, times as times."""
    if not schema.translated:
        return value
    if isinstance(value, dict):
        shown = {}
        for name, item in value.items():
            if name not in schema.properties:
                shown[name] = _shown(item, schema.child(name))
            elif item is not None:
                shown[_escaped(name)] = _shown(item, schema.properties[name])
        return shown
    if isinstance(value, list):
        return [_shown(item, schema.element()) for item in value]
    if schema.raw.get("format") == "date-time" and isinstance(value, str):
        return datetime.fromisoformat(value.replace("Z", "+00:00"))
    return value


def _escaped(name: str) -> str:
    if name in RESERVED:
        return f"__{name}__"
    for mark, word in MARKS.items():
        name = name.replace(mark, f"__{word}__")
    return name
