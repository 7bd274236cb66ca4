"""Events: one collection, shown by core/v1 and by events.k8s.io/v1 under different names.

They are stored as core/v1 shows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from sandbox.kube.errors import FieldError, required, wrong
from sandbox.kube.resources import Object, Rules

#: Fields of an event: as core/v1 stores them, and as events.k8s.io/v1 shows them.
_EVENT_FIELDS = {
    "involvedObject": "regarding",
    "message": "note",
    "source": "deprecatedSource",
    "firstTimestamp": "deprecatedFirstTimestamp",
    "lastTimestamp": "deprecatedLastTimestamp",
    "count": "deprecatedCount",
    "reportingComponent": "reportingController",
}
_EVENT_FIELDS_BACK = {new: old for old, new in _EVENT_FIELDS.items()}


class CoreEventRules(Rules):
    create_by_put = True
    selectable = frozenset(
        {
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
            "involvedObject.apiVersion",
            "involvedObject.resourceVersion",
            "involvedObject.fieldPath",
            "reason",
            "reportingComponent",
            "source",
            "type",
        }
    )
    empty: ClassVar[Mapping[str, Any]] = {"involvedObject": {}, "source": {}}

    def default(self, obj: Object) -> None:
        obj.setdefault("source", {})
        for name in ("firstTimestamp", "lastTimestamp", "eventTime"):
            obj.setdefault(name, None)
        for name in ("reportingComponent", "reportingInstance"):
            obj.setdefault(name, "")

    def validate(self, obj: Object, old: Object | None, *, status: bool) -> Iterator[FieldError]:
        about = (obj.get("involvedObject") or {}).get("namespace", "")
        namespace = obj["metadata"].get("namespace", "")
        if about != namespace and not (not about and namespace == "default"):
            yield wrong("involvedObject.namespace", about, "does not match event.namespace")


class EventRules(CoreEventRules):
    """events.k8s.io/v1: another view of the same objects, and stricter."""

    selectable = frozenset({"reason", "type", "reportingController"}) | {
        "regarding." + name for name in ("kind", "namespace", "name", "uid", "apiVersion")
    }
    empty: ClassVar[Mapping[str, Any]] = {}

    def default(self, obj: Object) -> None:
        """Defaults stand in the stored form."""

    def to_storage(self, obj: Object) -> Object:
        stored = {_EVENT_FIELDS_BACK.get(k, k): v for k, v in obj.items()}
        stored |= {"apiVersion": "v1", "kind": "Event"}
        super().default(stored)
        return stored

    def from_storage(self, obj: Object) -> Object:
        shown = {_EVENT_FIELDS.get(k, k): v for k, v in obj.items()}
        nothing: tuple[Any, ...] = (None, "", {})
        return {k: v for k, v in shown.items() if k == "eventTime" or v not in nothing}

    def validate(self, obj: Object, old: Object | None, *, status: bool) -> Iterator[FieldError]:
        """Checks the stored form, and names fields as the events.k8s.io view does."""
        if old is not None:
            return
        if not obj.get("eventTime"):
            yield required("eventTime")
        kind = obj.get("type", "")
        if kind not in ("Normal", "Warning"):
            yield wrong("type", kind, "has invalid value: " + kind)
        if not obj.get("reportingComponent"):
            yield required("reportingController")
        if not obj.get("reportingInstance"):
            yield required("reportingInstance")
        if not obj.get("action"):
            yield required("action")
        if not obj.get("reason"):
            yield required("reason")
        if len(obj.get("message", "")) > 1024:
            yield wrong("note", "", "can have at most 1024 characters")
        yield from super().validate(obj, old, status=status)
