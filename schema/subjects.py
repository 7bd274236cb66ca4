"""Where an event lives on the bus: subject <-> object identity, and the streams as data.

A NATS token can hold no dot while a Kubernetes name can, so `.` becomes `_`; `_` is illegal in
those names, which makes the escape reversible. An object without namespace has `_` in its place.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

DAY_S: Final = 86_400.0
KUBE_BRANCH: Final = "kube"
NO_NAMESPACE: Final = "_"
EPOCH_SUBJECT: Final = "kube.epoch"
SYNC_PREFIX: Final = "kube.sync."
RESTATED_SUBJECT: Final = "lb.lease.restated"

# Headers. NATS header values are single-valued strings here.
HEADER_MSG_ID: Final = "Nats-Msg-Id"
HEADER_EXPECTED_LAST: Final = "Nats-Expected-Last-Subject-Sequence"
HEADER_EPOCH: Final = "Lb-Epoch"
HEADER_TYPE: Final = "Lb-Type"  # name and version of the event, equal to its tag
HEADER_CAUSE: Final = "Lb-Cause"  # <epoch>:<sequence> of the fact behind a decision
HEADER_DIGEST: Final = "Lb-Digest"  # of the trimmed view, so that a watcher restarts from headers
HEADER_UID: Final = "Lb-Uid"
HEADER_OUTBOX: Final = "Lb-Outbox"  # <incarnation>:<row id>, tells a relay what it already sent
HEADER_TRACE: Final = "traceparent"


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One JetStream stream, always file storage, pruned by age and size only."""

    name: str
    subjects: tuple[str, ...]
    max_age_s: float
    max_bytes: int
    replicas: int = 1
    duplicate_window_s: float = 120.0
    compression: str = "s2"


KUBE = StreamSpec(name="KUBE", subjects=("kube.>",), max_age_s=14 * DAY_S, max_bytes=4 << 30)
LB = StreamSpec(name="LB", subjects=("lb.>",), max_age_s=90 * DAY_S, max_bytes=4 << 30)
STREAMS: Final = {spec.name: spec for spec in (KUBE, LB)}


class ObjectRef(NamedTuple):
    """A Kubernetes object by plural, namespace ("" where it has none) and name."""

    plural: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return "/".join(part for part in self if part)


_NO_NAME: Final = re.compile(r"[_ *>\t\r\n]")


def token(text: str) -> str:
    """Escape one name for a subject; raises ValueError for what no Kubernetes name can hold."""
    if not text or _NO_NAME.search(text):
        msg = f"not a Kubernetes name: {text!r} (must be non-empty, without '_', '*', '>' or space)"
        raise ValueError(msg)
    return text.replace(".", "_")


def untoken(text: str) -> str:
    return text.replace("_", ".")


def object_subject(branch: str, ref: ObjectRef) -> str:
    """`<branch>.<plural>.<namespace>.<name>`; branch is `kube`, `lb.lease`, `lb.backends`, ..."""
    return _before_name(branch, ref.plural, ref.namespace) + token(ref.name)


@lru_cache(maxsize=16_384)  # one for every kind and namespace: a lookup instead of two escapes
def _before_name(branch: str, plural: str, namespace: str) -> str:
    return f"{branch}.{token(plural)}.{token(namespace) if namespace else NO_NAMESPACE}."


def fact_subject(ref: ObjectRef) -> str:
    return object_subject(KUBE_BRANCH, ref)


def sync_subject(plural: str) -> str:
    return SYNC_PREFIX + token(plural)


def dead_subject(service: str) -> str:
    return f"lb.dead.{service}"


def subject_ref(subject: str) -> ObjectRef | None:
    """The object that a subject speaks of; None for marks, epochs and dead letters."""
    parts = subject.split(".")
    if parts[0] == KUBE_BRANCH:
        parts = parts[1:]
    elif parts[0] == "lb":
        parts = parts[2:]
    else:
        return None
    if len(parts) != 3:
        return None
    plural, namespace, name = parts
    return ObjectRef(
        untoken(plural),
        "" if namespace == NO_NAMESPACE else untoken(namespace),
        untoken(name),
    )
