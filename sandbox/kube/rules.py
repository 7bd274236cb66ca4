"""CEL rules of a CRD (`x-kubernetes-validations`), with transition rules by `oldSelf`."""

from __future__ import annotations

from collections.abc import Iterator

from sandbox.kube.errors import FieldError
from sandbox.kube.resources import Object
from sandbox.kube.schema import Schema


def check_rules(obj: Object, old: Object | None, schema: Schema) -> Iterator[FieldError]:
    yield from ()
