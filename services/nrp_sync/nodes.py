"""Nodes: where the addresses behind them are, and which families the cluster has.

A node that changes its InternalIP moves what runs on it; one that is gone takes it along, also if
the deletions of its pods never come.
"""

from __future__ import annotations

from schema import objects
from services.nrp_sync import egress
from services.nrp_sync.core import stirred
from services.nrp_sync.sources import NOWHERE, Location, read_node
from services.nrp_sync.state import State


def see_node(state: State, view: objects.Node, *, now: float) -> None:
    """A Node as it is now."""
    _put(state, view.metadata.name, read_node(view), now)


def gone_node(state: State, name: str, *, now: float) -> None:
    """A Node does not exist any more."""
    _put(state, name, NOWHERE, now)


def _put(state: State, name: str, location: Location, now: float) -> None:
    desired = state.provided.desired
    old = desired.nodes.get(name, NOWHERE)
    _tell_waiting(state, name)
    desired.put_node(name, location)
    _tell_waiting(state, name)
    state.six_nodes += _six(location) - _six(old)
    if _six(location) and state.six_nodes == 1:
        for identity in sorted(state.gateways):
            egress.want_gateway(state, identity, now)
    stirred(state, now)


def _six(location: Location) -> bool:
    return location.v6 is not None


def _tell_waiting(state: State, name: str) -> None:
    """Who waits for a node, or waited, has a new image."""
    for source in state.provided.desired.waiting.get(name, ()):
        if source.service is not None:
            state.tell.add(source.service)
        else:
            state.tell_pods.add(source.name)
