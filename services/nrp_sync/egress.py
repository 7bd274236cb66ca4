"""Egress pods: who leaves by which gateway, and when a pod that has left may go.

A pod with the egress label is accepted while it is Pending or Running, not terminating, scheduled
and has an address; its finalizer is asked for and seen before its addresses are sent (or, when it
can't be had for a while, they are sent without, visibly). A gateway is wanted while it has a pod.

A pod's finalizer goes when every address that it had has left the provider as far as that gateway
is concerned, and for the last pod of a gateway when the gateway itself is gone. A pod that changes
its address, node or gateway while it lives keeps its finalizer. What can't be known holds it.
"""

from __future__ import annotations

import msgspec

from schema import events, objects
from schema.names import EGRESS_LABEL, NRP_FINALIZER
from services.nrp_sync import images, operations
from services.nrp_sync.batches import Key
from services.nrp_sync.core import member_of, settle, start, stirred
from services.nrp_sync.diff import possible
from services.nrp_sync.shapes import parse_ip
from services.nrp_sync.sources import NOWHERE, Name, Reading, Source
from services.nrp_sync.state import Pod, Release, State, Trace, stamp
from services.nrp_sync.wishes import OutboundSpec, Refusal, read_egress, refuse_egress, shown

LIVE = ("Pending", "Running")
WITHOUT = "ServiceGatewayFinalizerAddFailed"


def see_pod(state: State, view: objects.Pod, *, cause: str, now: float) -> None:
    """A Pod as it is now."""
    name = Name(view.metadata.namespace, view.metadata.name)
    old = state.pods.get(name)
    if old is not None and old.uid != view.metadata.uid:
        gone_pod(state, name, old.uid, now=now)
    pod = _read(name, view, cause, state.policy.egress_allowed)
    if old is not None and old.uid == pod.uid:
        pod.asked_at, pod.without = old.asked_at, old.without
    elif told := state.told.get(("pods", name)):
        pod.without = told.reason == WITHOUT and told.owner.uid == pod.uid
    state.pods[name] = pod
    state.tell_pods.add(name)
    _follow(state, pod, now)
    if not (pod.accepted or pod.finalizer or pod.refusal):
        del state.pods[name]


def gone_pod(state: State, name: Name, uid: str, *, now: float) -> None:
    """A Pod does not exist any more, so nothing has to be held for it."""
    pod = state.pods.get(name)
    if pod is None or pod.uid != uid:
        return
    _leave(state, pod, now)
    del state.pods[name]
    state.awaited.pop(name, None)
    _forget_release(state, uid)
    state.tell_pods.add(name)


def _read(name: Name, view: objects.Pod, cause: str, allowed: tuple[str, ...]) -> Pod:
    meta, status = view.metadata, view.status or objects.PodStatus()
    label = (meta.labels or {}).get(EGRESS_LABEL, "").strip()
    read = read_egress(label) if label else ""
    identity = read if isinstance(read, str) else ""
    refusal = read if isinstance(read, Refusal) else None
    if identity:
        refusal = refuse_egress(name.namespace, identity, allowed)
    texts = [entry.ip for entry in status.pod_ips or () if entry.ip] or [status.pod_ip]
    addresses: list[str] = []
    malformed: list[str] = []
    for text in filter(None, texts):
        address = parse_ip(text)
        if address is None:
            malformed.append(text)
        else:
            addresses.append(address)
    live = meta.deletion_timestamp is None and status.phase in LIVE
    return Pod(
        name=name,
        uid=meta.uid,
        identity=identity,
        refusal=refusal if live and refusal else _malformed(malformed, live),
        accepted=live and refusal is None and bool(identity and addresses and view.spec.node_name),
        addresses=tuple(sorted(set(addresses))),
        node=view.spec.node_name,
        finalizer=NRP_FINALIZER in (meta.finalizers or ()),
        cause=cause,
    )


def _malformed(texts: list[str], live: bool) -> Refusal | None:
    if not texts or not live:
        return None
    return Refusal(
        reason="ServiceGatewayInvalidPodIP",
        field="status.podIPs",
        message=f"status.podIPs holds {shown(texts[0])}, which is no IP address; it is left out",
    )


# --- coming and going ---------------------------------------------------------------------------


def _follow(state: State, pod: Pod, now: float) -> None:
    if not pod.accepted:
        state.awaited.pop(pod.name, None)
        _leave(state, pod, now)
        if pod.finalizer:
            _hold(state, pod)
        return
    _stay(state, pod.uid)
    if not pod.asked_at:
        pod.asked_at = now
    if pod.finalizer or pod.without or _entered(state, pod):
        state.awaited.pop(pod.name, None)
        _enter(state, pod, now)
    else:
        state.awaited[pod.name] = pod.asked_at + state.policy.finalizer_grace


def _entered(state: State, pod: Pod) -> bool:
    source = state.provided.desired.pods.get(pod.name)
    return source is not None and source.uid == pod.uid


def overdue(state: State, now: float) -> None:
    """Go on without a finalizer that could not be had."""
    for name in sorted(name for name, until in state.awaited.items() if until <= now):
        pod = state.pods[name]
        pod.without = True
        state.note("pod_finalizer_add_failed_total")
        state.tell_pods.add(name)
        _follow(state, pod, now)


def _enter(state: State, pod: Pod, now: float) -> None:
    """The pod's addresses should leave by its gateway."""
    source = state.provided.desired.pods.get(pod.name)
    if source is not None:
        _trace(state, pod, source)
    before = source.member.identity if source is not None and source.member is not None else ""
    if before and before != pod.identity:
        _quit(state, before, pod.name, now)
    state.gateways.setdefault(pod.identity, set()).add(pod.name)
    op = state.operations.get(("outbound", pod.identity))
    if op is None:
        op = start(state, ("outbound", pod.identity), Name("", pod.identity), now)
    op.cause = pod.cause
    want_gateway(state, pod.identity, now)
    endpoints = dict.fromkeys(pod.addresses, pod.node)
    state.provided.desired.put_pod(
        Reading(name=pod.name, uid=pod.uid, endpoints=endpoints), member_of(state, op)
    )
    stirred(state, now)


def want_gateway(state: State, identity: str, now: float) -> None:
    """A gateway has pods: it is wanted, with a family more once the cluster has one more."""
    op = state.operations["outbound", identity]
    had = [s.families for s in (op.wanted, op.applied) if isinstance(s, OutboundSpec)]
    both = state.six_nodes > 0 or any(6 in families for families in had)
    if op.deleting and op.recreate is None:
        _mark_last(state, identity, False)
    if operations.wish(op, OutboundSpec(families=(4, 6) if both else (4,)), now):
        settle(state, op, now)


def _leave(state: State, pod: Pod, now: float) -> None:
    """The pod's addresses should not leave by any gateway any more."""
    desired = state.provided.desired
    source = desired.pods.get(pod.name)
    if source is None or source.member is None:
        return
    identity = source.member.identity
    if source.uid == pod.uid and pod.finalizer:
        pod.identity = identity
        pod.addresses = tuple(sorted(source.endpoints))
        _trace(state, pod, source)
        _hold(state, pod)
    desired.drop_pod(pod.name)
    stirred(state, now)
    _quit(state, identity, pod.name, now)


def _quit(state: State, identity: str, name: Name, now: float) -> None:
    """One pod fewer; a gateway without pods is not wanted."""
    pods = state.gateways[identity]
    pods.discard(name)
    if pods:
        return
    del state.gateways[identity]
    op = state.operations[("outbound", identity)]
    _mark_last(state, identity, True)
    if operations.unwish(op):
        settle(state, op, now)


def _mark_last(state: State, identity: str, last: bool) -> None:
    for uid, held in state.releases.items():
        if held.leaving and held.identity == identity and held.last != last:
            held.last = last
            state.dirty_releases.add(uid)


# --- letting pods go ----------------------------------------------------------------------------


def _trace(state: State, pod: Pod, source: Source) -> None:
    """Note what of a pod is, or may come, at the provider before its wish is changed."""
    if source.member is None or source.uid != pod.uid:
        return
    nodes = state.provided.desired.nodes
    traces = {Trace(source.member.identity, address) for address in source.endpoints}
    places = [
        Key(location, address)
        for address, node in sorted(source.endpoints.items())
        if (location := nodes.get(node, NOWHERE).of(address)) is not None
    ]
    held = state.releases.get(pod.uid)
    if held is None:
        if pod.accepted and traces == {Trace(pod.identity, a) for a in pod.addresses}:
            return  # nothing is left behind
        held = state.releases[pod.uid] = Release(pod.name, pod.uid, set())
    held.places = tuple(sorted({*held.places, *places}))
    if not traces <= held.traces:
        held.traces |= traces
        state.dirty_releases.add(pod.uid)


def _hold(state: State, pod: Pod) -> None:
    """The pod has left; it may go when its traces are gone."""
    state.check_releases = True
    held = state.releases.get(pod.uid)
    if held is None:
        held = state.releases[pod.uid] = Release(pod.name, pod.uid, set())
    traces = {Trace(pod.identity, address) for address in pod.addresses if pod.identity}
    if not held.leaving or not traces <= held.traces:
        op = state.operations.get(("outbound", pod.identity))
        held.last = held.last or (op is not None and op.deleting)
        held.leaving, held.identity = True, pod.identity
        held.traces |= traces
        state.dirty_releases.add(pod.uid)


def _stay(state: State, uid: str) -> None:
    """The pod lives (again): it waits for nothing."""
    held = state.releases.get(uid)
    if held is not None and held.leaving:
        held.leaving = held.last = False
        state.dirty_releases.add(uid)


def _forget_release(state: State, uid: str) -> None:
    if state.releases.pop(uid, None) is not None:
        state.dirty_releases.add(uid)


def release(state: State) -> None:
    """Let go the pods whose addresses have left, if anything happened that they wait for."""
    if not state.check_releases or not state.read_at or not state.complete:
        return
    state.check_releases = False
    for uid in sorted(state.releases):
        held = state.releases[uid]
        if not _has_left(state, held):
            continue
        _forget_release(state, uid)
        pod = state.pods.get(held.name)
        if held.leaving and pod is not None and pod.uid == uid:
            pod.released = True
            state.tell_pods.add(held.name)


def _has_left(state: State, held: Release) -> bool:
    provided = state.provided
    op = state.operations.get(("outbound", held.identity))
    if held.last and op is not None and op.deleting:
        return False
    if not held.traces and held.leaving:
        # Its addresses are not known: wait until nothing about the gateway is open.
        return held.identity not in provided.unsettled
    traces = [trace for trace in held.traces if trace.identity in provided.mapped]
    for place in held.places:
        if any(
            t.address == place.address and _still_there(state, t.identity, place) for t in traces
        ):
            return False
    return not any(
        _still_there(state, trace.identity, Key(location, trace.address))
        for trace in traces
        for location in provided.population
    )


def _still_there(state: State, identity: str, key: Key) -> bool:
    """Whether the provider may map the address to the gateway, and nobody else wants it to."""
    provided = state.provided
    return identity in possible(provided.seen(*key)) and identity not in provided.desired.refs(*key)


# --- images -------------------------------------------------------------------------------------


def tell_pods(state: State, now: float) -> None:
    """State the images of pods that changed."""
    for name in sorted(state.tell_pods):
        _tell(state, name, now)
    state.tell_pods.clear()


def _tell(state: State, name: Name, now: float) -> None:
    key, pod = ("pods", name), state.pods.get(name)
    if pod is None:
        images.forget(state, "pods", name, "", now)
        return
    holds = pod.accepted or (pod.finalizer and not pod.released)
    images.let_go(state, key, carried=pod.finalizer and not holds, now=now)
    reason, message = _standing(state, pod)
    image = events.ProviderStateChanged(
        at=stamp(0.0),
        owner=events.Owner(plural="pods", namespace=name.namespace, name=name.name, uid=pod.uid),
        finalizer=holds,
        in_step=pod.released,
        backends=len(pod.addresses) if pod.accepted else 0,
        reason=reason,
        message=message,
    )
    if state.told.get(key) == image:
        return
    state.told[key] = image
    state.dirty_told.add(key)
    state.say(msgspec.structs.replace(image, at=stamp(now)), pod.cause)


def _standing(state: State, pod: Pod) -> tuple[str, str]:
    """(reason, message)"""
    if pod.refusal is not None:
        return pod.refusal.reason, pod.refusal.message
    if not pod.accepted:
        if pod.released or not pod.finalizer:
            return "Released", ""
        return "Draining", f"its addresses still leave by {pod.identity}"
    if pod.without and not pod.finalizer:
        return WITHOUT, "our finalizer is not on the Pod; its addresses are sent without it"
    location = state.provided.desired.nodes.get(pod.node)
    missing = [a for a in pod.addresses if location is not None and location.of(a) is None]
    if missing:
        return (
            "ServiceGatewayNoNodeLocation",
            f"node {pod.node} has no InternalIP of the family of {missing[0]}",
        )
    return "Accepted", f"leaves by {pod.identity}"


def tidy(state: State, now: float) -> None:
    """After loading: a gateway that no pod leaves by is not wanted."""
    for key in sorted(state.operations):
        op = state.operations[key]
        if op.kind == "outbound" and not op.deleting and op.identity not in state.gateways:
            operations.unwish(op)
            settle(state, op, now)
