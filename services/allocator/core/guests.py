"""Load balancers that stand for Services inside guest clusters, and when nothing stands behind one.

The guest's cloud provider names the load balancer after the Service's uid: a Service that was
created again has a new one, and the old one is an orphan. When a guest cluster is torn down with
its disks, its load balancers go with it. Both are decided here and carried out by whoever writes.
"""

from __future__ import annotations

from typing import Final

from schema import events, objects
from services.allocator.core.ledger import event_owner
from services.allocator.core.model import LOADBALANCERS, Owner
from services.allocator.core.state import State

CREATOR: Final = ("harvesterhci.io/creator", "docker-machine-driver-harvester")
CLUSTER_LABEL: Final = "guestcluster.harvesterhci.io/name"
TEARDOWN: Final = "harvesterhci.io/removeAllPersistentVolumeClaims"


def torn_down(vm: objects.VirtualMachine) -> tuple[str, str] | None:
    """Namespace and guest cluster of a machine that goes away together with its cluster."""
    meta = vm.metadata
    labels, annotations = meta.labels or {}, meta.annotations or {}
    cluster = labels.get(CLUSTER_LABEL, "")
    if (
        meta.deletion_timestamp is None
        or labels.get(CREATOR[0]) != CREATOR[1]
        or annotations.get(TEARDOWN) != "true"
        or not cluster
    ):
        return None
    return meta.namespace, cluster


def condemn(state: State) -> None:
    """Judge what changed since the last call."""
    removed, state.clusters_removed = state.clusters_removed, {}
    for namespace, cluster in removed:
        for owner in list(state.guests.get((namespace, cluster), {})):
            message = f"guest cluster {cluster} is being removed with its machines"
            _condemn(state, owner, "GuestClusterRemoved", message)
    changed, state.guests_changed = state.guests_changed, {}
    for owner in changed:
        _condemn_orphans(state, owner)


def _condemn_orphans(state: State, owner: Owner) -> None:
    """Of several for one guest Service, all but the newest."""
    group = state.guests.get((owner.namespace, owner.request.guest_cluster), {})
    same = [one for one in group if one.request.guest == owner.request.guest]
    if not owner.request.guest or len(same) < 2:
        return
    newest = max(one.created for one in same)
    for one in same:
        if one.created < newest:
            message = f"guest Service {one.request.guest} was created again and has a newer one"
            _condemn(state, one, "GuestServiceReplaced", message)


def _condemn(state: State, owner: Owner, reason: str, message: str) -> None:
    if owner.condemned or owner.gone_at is not None or owner.plural != LOADBALANCERS:
        return
    owner.note(condemned=reason)
    state.changed(owner)
    state.out.append(
        events.OwnerCondemned(
            at=state.now, owner=event_owner(owner), reason=reason, message=message
        )
    )
