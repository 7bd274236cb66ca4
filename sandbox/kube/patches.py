"""JSON Patch, JSON Merge Patch and strategic merge: a document and a patch in, a document out.

Only strategic merge needs a schema, for the keys by which list items are told apart. Documents
are private copies; they may be changed.
"""

from __future__ import annotations

from typing import Any

from sandbox.kube.errors import ApiError
from sandbox.kube.schema import Schema, copy

MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"


class PatchError(ApiError):
    """A patch that does not fit its document."""

    def __init__(self, why: str) -> None:
        super().__init__(
            422,
            "the server rejected our request due to an error in our request",
            details={"causes": [{"reason": "UnexpectedServerResponse", "message": why}]},
        )


def merge(document: Any, patch: Any) -> Any:
    """JSON Merge Patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(document) if isinstance(document, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge(merged.get(name), value)
    return merged


def json_patch(document: Any, operations: Any) -> Any:
    """JSON Patch (RFC 6902)."""
    if not isinstance(operations, list):
        raise ApiError(400, "error decoding patch: json: cannot unmarshal object into Go value of "
                            "type jsonpatch.Patch")  # fmt: skip
    box = {"": document}
    for operation in operations:
        _operate(box, operation)
    return box[""]


def _operate(box: dict[str, Any], operation: Any) -> None:
    if not isinstance(operation, dict) or not isinstance(operation.get("path"), str):
        raise PatchError("Unexpected kind: an operation needs op and path")
    name, path = operation.get("op"), operation["path"]
    match name:
        case "add":
            _put(box, path, _value(operation), insert=True)
        case "replace":
            _get(box, path, "replace")
            _put(box, path, _value(operation), insert=False)
        case "remove":
            _take(box, path, "remove")
        case "move":
            value = _take(box, str(operation.get("from")), "move")
            _put(box, path, value, insert=True)
        case "copy":
            value = _get(box, str(operation.get("from")), "copy")
            _put(box, path, copy({"": value})[""], insert=True)
        case "test":
            if _get(box, path, "test") != operation.get("value"):
                raise PatchError(f"testing path {path} failed: test failed")
        case _:
            raise PatchError(f"Unexpected kind: {name}")


def _value(operation: dict[str, Any]) -> Any:
    if "value" not in operation:
        raise PatchError(f"{operation['op']} operation without a value: {operation['path']}")
    return operation["value"]


def _steps(path: str) -> list[str]:
    if path and not path.startswith("/"):
        raise PatchError(f"path {path} must start with /")
    return [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")]


def _parent(box: dict[str, Any], path: str, name: str) -> tuple[Any, str]:
    *above, last = _steps(path)
    at: Any = box
    for step in above:
        at = _below(at, step, path, name)
    return at, last


def _below(at: Any, step: str, path: str, name: str) -> Any:
    try:
        return at[int(step)] if isinstance(at, list) else at[step]
    except (KeyError, IndexError, ValueError, TypeError) as error:
        text = f"{name} operation does not apply: doc is missing path: {path}: missing value"
        raise PatchError(text) from error


def _get(box: dict[str, Any], path: str, name: str) -> Any:
    parent, last = _parent(box, path, name)
    return _below(parent, last, path, name)


def _take(box: dict[str, Any], path: str, name: str) -> Any:
    parent, last = _parent(box, path, name)
    value = _below(parent, last, path, name)
    del parent[int(last) if isinstance(parent, list) else last]
    return value


def _put(box: dict[str, Any], path: str, value: Any, *, insert: bool) -> None:
    parent, last = _parent(box, path, "add")
    if isinstance(parent, dict):
        parent[last] = value
    elif not isinstance(parent, list):
        raise PatchError(f"add operation does not apply: doc is missing path: {path}")
    elif last == "-":
        parent.append(value)
    elif not last.isdigit() or int(last) > len(parent):
        raise PatchError(f"Unable to access invalid index: {last}: invalid index referenced")
    elif insert:
        parent.insert(int(last), value)
    else:
        parent[int(last)] = value


_DIRECTIVE = "$patch"
_RETAIN = "$retainKeys"
_DELETE = "$deleteFromPrimitiveList/"
_ORDER = "$setElementOrder/"


def strategic(document: Any, patch: Any, schema: Schema) -> Any:
    """Strategic merge: lists with a merge key are merged item by item."""
    if not isinstance(patch, dict):
        return patch
    if patch.get(_DIRECTIVE) == "replace":
        return {k: v for k, v in patch.items() if k != _DIRECTIVE}
    if patch.get(_DIRECTIVE) == "delete":
        return {}
    merged = dict(document) if isinstance(document, dict) else {}
    if _RETAIN in patch:
        merged = {k: v for k, v in merged.items() if k in patch[_RETAIN]}
    for name, value in patch.items():
        if name in (_DIRECTIVE, _RETAIN) or name.startswith(_ORDER):
            continue
        if name.startswith(_DELETE):
            kept = [item for item in merged.get(name[len(_DELETE) :], []) if item not in value]
            merged[name[len(_DELETE) :]] = kept
        elif value is None:
            merged.pop(name, None)
        else:
            merged[name] = _strategic_value(merged.get(name), value, schema.child(name))
    for name, order in patch.items():
        if name.startswith(_ORDER):
            field = name[len(_ORDER) :]
            merged[field] = _in_order(merged.get(field) or [], order, schema.child(field))
    return merged


def _strategic_value(before: Any, value: Any, schema: Schema) -> Any:
    if isinstance(value, dict):
        if schema.patch_replace:
            return value
        return strategic(before, value, schema)
    if isinstance(value, list):
        if schema.merge_key:
            return _keyed(before or [], value, schema)
        if schema.list_type == "set":
            return [*(before or []), *(item for item in value if item not in (before or []))]
    return value


def _keyed(before: list[Any], patch: list[Any], schema: Schema) -> list[Any]:
    key = schema.merge_key
    if any(item == {_DIRECTIVE: "replace"} for item in patch):
        return [item for item in patch if _DIRECTIVE not in item]
    merged = list(before)
    for item in patch:
        if not isinstance(item, dict) or key not in item:
            raise PatchError(f"map: {item} does not contain declared merge key: {key}")
        places = [i for i, old in enumerate(merged) if old.get(key) == item[key]]
        if item.get(_DIRECTIVE) == "delete":
            merged = [old for old in merged if old.get(key) != item[key]]
        elif places:
            merged[places[0]] = strategic(merged[places[0]], item, schema.element())
        else:
            merged.append({k: v for k, v in item.items() if v is not None and k != _DIRECTIVE})
    return merged


def _in_order(items: list[Any], order: list[Any], schema: Schema) -> list[Any]:
    """Items as `order` lists them; what it does not list stays behind them."""
    key = schema.merge_key

    def name(item: Any) -> Any:
        return item.get(key) if key and isinstance(item, dict) else item

    places = {repr(name(item)): place for place, item in enumerate(order)}
    return sorted(items, key=lambda item: places.get(repr(name(item)), len(places)))
