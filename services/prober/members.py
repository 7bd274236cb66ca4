"""Which objects are behind which load balancer.

Both sides are indexed by label, so that a change of one object asks only the load balancers that
its old or its new labels may concern, and a new load balancer looks only at objects that share a
label with its selector. A selector without keys matches nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from schema import objects
from schema.subjects import ObjectRef
from services.prober.plan import usable

VMIS = "virtualmachineinstances"
PODS = "pods"
KINDS = {VMIS: "VirtualMachineInstance", PODS: "Pod"}
_FINISHED = ("Succeeded", "Failed")

Selector = Mapping[str, list[str]]


class Place(NamedTuple):
    """One address of an object; `networks` are the names by which its interface may be asked."""

    family: str
    address: str
    networks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """An object that can be a backend."""

    kind: str
    namespace: str
    name: str
    uid: str
    node: str
    labels: Mapping[str, str]
    places: tuple[Place, ...]

    def address(self, family: str, network: str) -> str:
        """The first address of the family (on the network, if one is named); "" without one."""
        for place in self.places:
            if place.family == family and (not network or network in place.networks):
                return place.address
        return ""


def member(obj: objects.VirtualMachineInstance | objects.Pod | None) -> Member | None:
    """The object as a backend; None while it can't be one: deleting, or its run is over."""
    if obj is None or obj.metadata.deletion_timestamp is not None:
        return None
    if obj.status is not None and obj.status.phase in _FINISHED:
        return None  # its addresses may by now be somebody else's
    meta = obj.metadata
    is_pod = isinstance(obj, objects.Pod)
    return Member(
        kind=KINDS[PODS if is_pod else VMIS],
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
        node=_node(obj),
        labels=meta.labels or {},
        places=tuple(_pod_places(obj) if isinstance(obj, objects.Pod) else _vmi_places(obj)),
    )


def _node(obj: objects.VirtualMachineInstance | objects.Pod) -> str:
    if isinstance(obj, objects.Pod):
        return obj.spec.node_name
    return obj.status.node_name if obj.status else ""


def _vmi_places(vmi: objects.VirtualMachineInstance) -> Iterator[Place]:
    nets = {
        net.name: net.multus.network_name
        for net in (vmi.spec.networks if vmi.spec else None) or ()
        if net.multus is not None
    }
    for interface in (vmi.status.interfaces if vmi.status else None) or ():
        names: tuple[str, ...] = (interface.name,) if interface.name else ()
        definition = nets.get(interface.name, "")
        if definition:
            full = definition if "/" in definition else f"{vmi.metadata.namespace}/{definition}"
            names += (definition, full)
        yield from _places([interface.ip_address, *(interface.ip_addresses or ())], names)


def _pod_places(pod: objects.Pod) -> Iterator[Place]:
    if pod.status is not None:
        listed = [pod.status.pod_ip, *(entry.ip for entry in pod.status.pod_ips or ())]
        yield from _places(listed, ())


def _places(texts: Iterable[str], networks: tuple[str, ...]) -> Iterator[Place]:
    for text in dict.fromkeys(texts):
        ip = usable(text)
        if ip is not None:
            yield Place(f"IPv{ip.version}", str(ip), networks)


@dataclass(slots=True)
class _Wish:
    namespace: str
    plural: str
    selector: Selector


@dataclass(slots=True)
class Members:
    """The objects and the selectors. Keys of selectors are the caller's own."""

    known: dict[ObjectRef, Member] = field(default_factory=dict)
    _by_label: dict[tuple[str, str, str, str], set[ObjectRef]] = field(default_factory=dict)
    _wishes: dict[tuple[str, str], _Wish] = field(default_factory=dict)
    _by_anchor: dict[tuple[str, str, str, str], set[str]] = field(default_factory=dict)

    def put(self, ref: ObjectRef, new: Member | None) -> set[str]:
        """Take an object's new form (None: it is no backend now); who selects it, old or new."""
        old = self.known.get(ref)
        concerned = self._selecting(ref, old) | self._selecting(ref, new)
        if old is not None:
            for label in _labels(ref, old):
                _discard(self._by_label, label, ref)
            del self.known[ref]
        if new is not None:
            self.known[ref] = new
            for label in _labels(ref, new):
                self._by_label.setdefault(label, set()).add(ref)
        return concerned

    def select(self, owner: str, plural: str, namespace: str, selector: Selector) -> None:
        """Set an owner's selector for one kind; an empty one is as none."""
        key = (owner, plural)
        gone = self._wishes.pop(key, None)
        if gone is not None:
            for anchor in _anchors(gone):
                _discard(self._by_anchor, anchor, owner)
        if selector:
            wish = self._wishes[key] = _Wish(namespace, plural, selector)
            for anchor in _anchors(wish):
                self._by_anchor.setdefault(anchor, set()).add(owner)

    def matching(self, owner: str, plural: str) -> list[Member]:
        """The objects behind an owner, in no particular order."""
        wish = self._wishes.get((owner, plural))
        if wish is None:
            return []
        found: set[ObjectRef] = set()
        for anchor in _anchors(wish):
            found |= self._by_label.get(anchor, set())
        return [self.known[ref] for ref in found if matches(wish.selector, self.known[ref].labels)]

    def _selecting(self, ref: ObjectRef, obj: Member | None) -> set[str]:
        owners: set[str] = set()
        if obj is None:
            return owners
        for label in _labels(ref, obj):
            for owner in self._by_anchor.get(label, ()):
                if matches(self._wishes[owner, ref.plural].selector, obj.labels):
                    owners.add(owner)
        return owners


def matches(selector: Selector, labels: Mapping[str, str]) -> bool:
    """Every key by one of its values; nothing matches a selector without keys."""
    if not selector:
        return False
    return all(labels.get(key) in values for key, values in selector.items())


def _labels(ref: ObjectRef, obj: Member) -> Iterator[tuple[str, str, str, str]]:
    for key, value in obj.labels.items():
        yield ref.plural, ref.namespace, key, value


def _anchors(wish: _Wish) -> Iterator[tuple[str, str, str, str]]:
    """One key of the selector stands for it in the index: the one with the fewest values."""
    key = min(wish.selector, key=lambda name: (len(wish.selector[name]), name))
    for value in set(wish.selector[key]):
        yield wish.plural, wish.namespace, key, value


def _discard(
    index: dict[tuple[str, str, str, str], set[ObjectRef]]
    | dict[tuple[str, str, str, str], set[str]],
    key: tuple[str, str, str, str],
    item: ObjectRef | str,
) -> None:
    entries: set[object] = index[key]  # type: ignore[assignment]
    entries.discard(item)
    if not entries:
        del index[key]
