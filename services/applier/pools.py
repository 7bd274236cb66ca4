"""What a pool needs: its status, at most once in a while, and answers to requests by annotation."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import msgspec

from schema import events, objects
from schema.subjects import ObjectRef
from services.applier import conditions, shapes, statuses
from services.applier.documents import Bookings, ImportDoc, PoolDoc
from services.applier.plans import (
    Plan,
    Write,
    digest_of,
    marks_of,
    notice_of,
    patch_body,
    status_write,
)
from services.applier.targets import Key

RELEASE: Final = "loadbalancer.harvesterhci.io/manuallyReleaseIP"
CONVERTED: Final = "loadbalancer.harvesterhci.io/after-conversion"
HISTORY: Final = "lbledger.io/history"


def pool(made: Plan, doc: PoolDoc) -> None:
    state = made.state
    ref = ObjectRef("ippools", "", doc.name)
    known = state.known(ref)
    if not isinstance(known, objects.IPPool) or (doc.uid and known.metadata.uid != doc.uid):
        return
    made.notices += [notice_of(known, said) for said in doc.tell]
    if known.metadata.deletion_timestamp is not None or _answered(made, doc, known):
        return
    if not doc.accounted:
        return
    last = state.target(Key(*ref, "status")).written_at
    due = last + timedelta(seconds=state.options.pool_status_s) if last else made.now
    if due > made.now:
        made.wake(due)
        return
    limit = state.options.pool_map_entries
    book = state.books.get(doc.name) or Bookings()
    parts = conditions.of_pool(doc, len(book.live), limit)
    marks = marks_of(made, doc.marks, parts, known.status)
    wanted = statuses.pool(doc, book, state.holder, limit)
    patch = statuses.pool_patch(wanted, marks, known, state.forms["ippools"])
    if patch.status:
        made.add(status_write(made, doc, known, patch.status, wanted, marks))


def _answered(made: Plan, doc: PoolDoc, known: objects.IPPool) -> bool:
    """Take away the annotation of an answered request; returns whether that is a write for now."""
    if doc.answer is None:
        return False
    if (known.metadata.annotations or {}).get(RELEASE) != doc.answer.request:
        made.state.answered(doc.name)
        return False
    body = patch_body(known, {"annotations": {RELEASE: None}})
    return made.add(_write(made, Key("ippools", "", doc.name), "IPPool", "merge", body))


def imported(made: Plan, doc: ImportDoc) -> None:
    """Create what is missing of the pools of a kube-vip ConfigMap, then mark it as converted."""
    config = objects.ConfigMap(
        metadata=objects.ObjectMeta(name=doc.name, namespace=doc.namespace, uid=doc.uid)
    )
    made.notices += [notice_of(config, said) for said in doc.tell]
    missing = [
        item for item in doc.pools if made.state.known(ObjectRef("ippools", "", item.name)) is None
    ]
    for item in missing:
        body = _pool_body(item)
        made.add(_write(made, Key("ippools", "", item.name), "IPPool", "create", body))
    if not missing:
        body = {"metadata": {"uid": doc.uid, "annotations": {CONVERTED: "true"}}}
        key = Key("configmaps", doc.namespace, doc.name)
        made.add(_write(made, key, "ConfigMap", "merge", body))


def _pool_body(item: events.ImportedPool) -> shapes.Body:
    metadata: dict[str, Any] = {"name": item.name}
    if item.history:
        metadata["annotations"] = {HISTORY: msgspec.json.encode(item.history).decode()}
    return {
        "apiVersion": shapes.LB_API,
        "kind": "IPPool",
        "metadata": metadata,
        "spec": msgspec.to_builtins(item.spec),
    }


def _write(made: Plan, key: Key, target: str, verb: str, body: Any) -> Write:
    return Write(
        key=key,
        entity=made.entity,
        owner=made.owner,
        target=target,
        verb=verb,
        body=body,
        digest=digest_of(body),
        creates=verb == "create",
    )
