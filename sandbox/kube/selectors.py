"""Label and field selectors of list, watch and deletecollection."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from sandbox.kube.errors import ApiError

Match = Callable[[Mapping[str, str]], bool]

_TERM = re.compile(
    r"""\s*(?:
        (?P<absent>!)\s*(?P<akey>[\w./-]+)
      | (?P<skey>[\w./-]+)\s+(?P<set>in|notin)\s*\((?P<values>[^)]*)\)
      | (?P<key>[\w./-]+)\s*(?P<op>==|=|!=|>|<)\s*(?P<value>[\w./-]*)
      | (?P<exists>[\w./-]+)
    )\s*(?:,|$)""",
    re.VERBOSE,
)


def labels(text: str) -> list[Match]:
    """The terms of a label selector, all of which must hold."""
    terms: list[Match] = []
    at = 0
    while at < len(text):
        found = _TERM.match(text, at)
        if found is None:
            raise ApiError(
                400,
                "unable to parse requirement: found "
                f"'{text[at:].strip()}', expected: identifier, '!', 'in', 'notin', '=', '==', "
                "'!=', '<' or '>'",
            )
        terms.append(_term(found))
        at = found.end()
    return terms


def _term(found: re.Match[str]) -> Match:
    part = found.groupdict()
    if part["akey"]:
        return lambda have: part["akey"] not in have
    if part["set"]:
        values = {value.strip() for value in part["values"].split(",")}
        if part["set"] == "in":
            return lambda have: have.get(part["skey"]) in values
        return lambda have: have.get(part["skey"]) not in values
    if part["exists"]:
        return lambda have: part["exists"] in have
    key, value = part["key"], part["value"]
    match part["op"]:
        case "=" | "==":
            return lambda have: have.get(key) == value
        case "!=":
            return lambda have: have.get(key) != value
        case ">":
            return lambda have: _number(have.get(key)) > _number(value)
        case _:
            return lambda have: key in have and _number(have[key]) < _number(value)


def _number(text: str | None) -> float:
    try:
        return float(int(text or ""))
    except ValueError:
        return float("-inf")


def field_terms(text: str) -> list[tuple[str, bool, str]]:
    """The terms of a field selector as (field, must be equal, value)."""
    terms = []
    for term in filter(None, (part.strip() for part in text.split(","))):
        found = re.fullmatch(r"([^=!]+)(==|=|!=)(.*)", term)
        if found is None:
            raise ApiError(400, f"invalid selector: \"{text}\"; can't understand '{term}'")
        terms.append((found[1], found[2] != "!=", found[3]))
    return terms


class Selection:
    """Both selectors of one request, and how an object stands to them."""

    def __init__(self, label_text: str, field_text: str, fields_known: frozenset[str]) -> None:
        self._labels = labels(label_text)
        self._fields = field_terms(field_text)
        self.name: str | None = None
        for name, equal, value in self._fields:
            if name not in fields_known:
                raise ApiError(400, f"field label not supported: {name}")
            if name == "metadata.name" and equal:
                self.name = value

    def __bool__(self) -> bool:
        return bool(self._labels or self._fields)

    def holds(self, obj: Mapping[str, Any]) -> bool:
        have = (obj.get("metadata") or {}).get("labels") or {}
        return all(term(have) for term in self._labels) and all(
            (_at(obj, name) == value) == equal for name, equal, value in self._fields
        )


def _at(obj: Mapping[str, Any], path: str) -> str:
    value: Any = obj
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)
