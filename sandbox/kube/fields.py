"""Sets of field paths: what a manager owns, what a write changed, what an apply merges.

A path is a tuple of elements written as `FieldsV1` writes them: `f:<field>`, `k:{<keys>}` for an
item of a keyed list, `v:<value>` for an item of a set. A set of paths is a plain Python set, so
that union, difference and intersection are the language's own. The rules of comparing, merging
and removing are those of structured merge in Kubernetes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from sandbox.kube.schema import Schema

Path = tuple[str, ...]
Paths = set[Path]


class _Missing:
    """Marks a side that has no value; `None` is a value."""


MISSING = _Missing()

_encode = msgspec.json.encode


class Comparison(NamedTuple):
    added: Paths
    modified: Paths
    removed: Paths


def element_of(item: Any, schema: Schema) -> str:
    """The path element of an item of a keyed list or a set."""
    if schema.list_type == "map" and isinstance(item, dict):
        keys = {}
        for name in sorted(schema.list_keys):
            value = item.get(name)
            if value is None:
                value = schema.element().child(name).default
            if value is not None:
                keys[name] = value
        return "k:" + _encode(keys).decode()
    return "v:" + _encode(item).decode()


def indexed(items: Iterable[Any], schema: Schema) -> dict[str, Any]:
    """Items of a keyed list or set by their path element; of equal ones the last."""
    return {element_of(item, schema): item for item in items}


def owned_by_config(value: Any, schema: Schema) -> Paths:
    """The paths an applied configuration claims: its leaves, its list items, its map keys."""
    paths: Paths = set()
    _claim(value, schema, (), paths)
    return paths


def _claim(value: Any, schema: Schema, path: Path, paths: Paths) -> None:
    if isinstance(value, dict) and not schema.atomic_map:
        for name, item in value.items():
            below = (*path, "f:" + name)
            _claim(item, schema.child(name), below, paths)
            if item is None or item == {} or name not in schema.properties:
                paths.add(below)
    elif isinstance(value, list) and schema.list_type != "atomic":
        for name, item in indexed(value, schema).items():
            below = (*path, name)
            _claim(item, schema.element(), below, paths)
            paths.add(below)
    elif path:
        paths.add(path)


def compare(old: Any, new: Any, schema: Schema) -> Comparison:
    """The paths that a write added, modified and removed."""
    comparison = Comparison(set(), set(), set())
    _compare(old, new, schema, (), comparison)
    return comparison


def _compare(old: Any, new: Any, schema: Schema, path: Path, found: Comparison) -> None:
    if old is new or (old is not MISSING and new is not MISSING and _same(old, new)):
        return
    sides = [side for side in (old, new) if side is not MISSING and side is not None]
    if sides and all(isinstance(side, dict) and not schema.atomic_map for side in sides):
        if any(sides):
            _compare_maps(_map(old), _map(new), schema, path, found)
    elif sides and all(isinstance(side, list) for side in sides) and schema.list_type != "atomic":
        if any(sides):
            _compare_lists(_list(old), _list(new), schema, path, found)
    elif old is not MISSING and new is not MISSING:
        found.modified.add(path)
    if old is MISSING and path:
        found.added.add(path)
    elif new is MISSING and path:
        found.removed.add(path)


def _same(old: Any, new: Any) -> bool:
    # 1 == True in Python but not in JSON.
    return bool(old == new) and type(old) is type(new)


def _map(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _compare_maps(
    old: dict[str, Any], new: dict[str, Any], schema: Schema, path: Path, found: Comparison
) -> None:
    for name, value in new.items():
        before = old.get(name, MISSING)
        _compare(before, value, schema.child(name), (*path, "f:" + name), found)
    for name, value in old.items():
        if name not in new:
            _compare(value, MISSING, schema.child(name), (*path, "f:" + name), found)


def _compare_lists(
    old: list[Any], new: list[Any], schema: Schema, path: Path, found: Comparison
) -> None:
    before, after = indexed(old, schema), indexed(new, schema)
    for name in before.keys() | after.keys():
        left, right = before.get(name, MISSING), after.get(name, MISSING)
        _compare(left, right, schema.element(), (*path, name), found)


def merge(live: Any, config: Any, schema: Schema) -> Any:
    """`live` with everything `config` says laid over it; neither is changed."""
    if isinstance(live, dict) and isinstance(config, dict) and not schema.atomic_map:
        merged = dict(live)
        for name, value in config.items():
            if name in live:
                value = merge(live[name], value, schema.child(name))
            merged[name] = value
        return merged
    if isinstance(live, list) and isinstance(config, list) and schema.list_type != "atomic":
        return _merge_lists(live, config, schema)
    return config


def _merge_lists(live: list[Any], config: list[Any], schema: Schema) -> list[Any]:
    """Both lists in one: shared items in the order of `config`, the rest where they stood."""
    left, right = indexed(live, schema), indexed(config, schema)
    mine, theirs = list(left), list(right)
    shared = [name for name in theirs if name in left]
    merged: list[Any] = []
    at = 0
    for name in theirs:
        # What only `live` has goes first, up to the next item that both have.
        while at < len(mine) and not (shared and mine[at] == shared[0]):
            if mine[at] not in right:
                merged.append(left[mine[at]])
            at += 1
        item = right[name]
        if name in left:
            item = merge(left[name], item, schema.element())
            shared.remove(name)
            if at < len(mine) and mine[at] == name:
                at += 1
        merged.append(item)
    merged.extend(left[name] for name in mine[at:] if name not in right)
    return merged


def remove(value: Any, paths: Paths, schema: Schema, keep: Paths | None = None) -> Any:
    """`value` without the paths; a map or list that becomes empty goes too, unless in `keep`."""
    return _remove(value, _tree(paths), schema, (), keep or set())


Tree = dict[str, Any]
_HERE = ""


def _tree(paths: Iterable[Path]) -> Tree:
    tree: Tree = {}
    for path in paths:
        node = tree
        for element in path:
            node = node.setdefault(element, {})
        node[_HERE] = True
    return tree


def _remove(value: Any, tree: Tree, schema: Schema, path: Path, keep: Paths) -> Any:
    if isinstance(value, dict) and not schema.atomic_map:
        named = [("f:" + name, name, item, schema.child(name)) for name, item in value.items()]
        left = _left(named, tree, path, keep)
        return dict(left) if left or not value or path in keep else MISSING
    if isinstance(value, list) and schema.list_type != "atomic":
        below = schema.element()
        items = [(element_of(item, schema), "", item, below) for item in value]
        left = _left(items, tree, path, keep)
        return [item for _, item in left] if left or not value or path in keep else MISSING
    return value


def _left(
    items: list[tuple[str, str, Any, Schema]], tree: Tree, path: Path, keep: Paths
) -> list[tuple[str, Any]]:
    """What is left of the items of a map or list, by name."""
    left = []
    for element, name, item, schema in items:
        below = tree.get(element)
        if below is not None:
            if _HERE in below:
                continue
            item = _remove(item, below, schema, (*path, element), keep)
            if item is MISSING:
                continue
        left.append((name, item))
    return left


def named_members(paths: Paths, schema: Schema) -> Paths:
    """The paths and, for each, the declared fields on the way to it.

    A struct's field counts as there when anything below it is, so that removing all of it
    removes the field.
    """
    members = set(paths)
    for path in paths:
        node = schema
        for depth, element in enumerate(path[:-1], 1):
            if element.startswith("f:"):
                name = element[2:]
                if name in node.properties:
                    members.add(path[:depth])
                node = node.child(name)
            else:
                node = node.element()
    return members


def encode(paths: Paths) -> dict[str, Any]:
    """A set of paths as `FieldsV1`."""

    def shape(tree: Tree) -> dict[str, Any]:
        below = {name: shape(child) for name, child in sorted(tree.items()) if name != _HERE}
        if _HERE in tree and below:
            return {".": {}} | below
        return below

    return shape(_tree(paths))


def decode(fields: dict[str, Any]) -> Paths:
    """`FieldsV1` as a set of paths."""
    paths: Paths = set()

    def walk(node: dict[str, Any], path: Path) -> None:
        if path and (not node or "." in node):
            paths.add(path)
        for name, below in node.items():
            if name != ".":
                walk(below if isinstance(below, dict) else {}, (*path, name))

    walk(fields, ())
    return paths


def dotted(path: Path) -> str:
    """A path as conflict messages print it: `.spec.ports[port=80,protocol="TCP"].name`."""
    text = ""
    for element in path:
        kind, rest = element[:2], element[2:]
        if kind == "f:":
            text += "." + rest
        elif kind == "k:":
            keys = msgspec.json.decode(rest)
            text += "[" + ",".join(f"{k}={_encode(v).decode()}" for k, v in keys.items()) + "]"
        else:
            text += f"[={rest}]"
    return text
