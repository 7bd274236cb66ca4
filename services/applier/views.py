"""How much of each object the applier keeps: all of what it writes, names of the rest.

A cluster has many more Services and EndpointSlices than load balancers. Of those that are not ours
only the identity stays, so that a name that is taken is noticed, and their changes cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from schema import names, objects
from services.applier.shapes import LB_KIND

T = TypeVar("T")


def pool(view: objects.IPPool) -> objects.IPPool:
    return msgspec.structs.replace(view, spec=objects.IPPoolSpec())


def service(view: objects.Service) -> objects.Service:
    status = view.status or objects.ServiceStatus()
    ours = (
        view.spec.type == "LoadBalancer"
        or _owned(view.metadata)
        or names.NRP_FINALIZER in (view.metadata.finalizers or [])
        or any(c.type.startswith("lbledger.io/") for c in status.conditions or [])
    )
    if ours:
        return view
    spec = objects.ServiceSpec(type=view.spec.type)
    return msgspec.structs.replace(view, metadata=_identity(view.metadata), spec=spec, status=None)


def endpoint_slice(view: objects.EndpointSlice) -> objects.EndpointSlice:
    if _owned(view.metadata):
        return view
    return msgspec.structs.replace(
        view, metadata=_identity(view.metadata), endpoints=None, ports=None
    )


def pod(view: objects.Pod) -> objects.Pod:
    return msgspec.structs.replace(view, spec=objects.PodSpec(), status=None)


def _owned(meta: objects.ObjectMeta) -> bool:
    labels = meta.labels or {}
    return names.SERVICELB_LABEL in labels or any(
        reference.kind == LB_KIND for reference in meta.owner_references or []
    )


def _identity(meta: objects.ObjectMeta) -> objects.ObjectMeta:
    return objects.ObjectMeta(name=meta.name, namespace=meta.namespace, uid=meta.uid)


def _whole(view: T) -> T:
    return view


REDUCE: Final[Mapping[str, Callable[[Any], Any]]] = {
    "loadbalancers": _whole,
    "ippools": pool,
    "services": service,
    "endpointslices": endpoint_slice,
    "pods": pod,
}


def decode(plural: str, body: bytes) -> Any:
    """An API server's answer as the view that the watcher would show of it; None if unreadable."""
    try:
        view = msgspec.json.decode(body, type=objects.VIEWS[plural])
    except msgspec.MsgspecError:
        return None
    return REDUCE.get(plural, _whole)(objects.trim(view))
