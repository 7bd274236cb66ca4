"""A cluster, a provider and the core between them, without a clock of its own and without I/O.

`World` plays everybody else: it feeds facts, writes finalizers as the applier would, makes the
calls that the core asks for (or lets them fail), keeps the rows that the store would keep, and
restarts the core from them. After each step it checks what must hold at every moment.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import msgspec

from schema import events, objects
from schema.names import EGRESS_LABEL, NRP_CLASS, NRP_FINALIZER, SERVICE_NAME_LABEL
from services.nrp_sync import core, effects, egress, images, nodes, outcomes, planning
from services.nrp_sync import provider as port
from services.nrp_sync.batches import Key, LocationCall
from services.nrp_sync.diff import Seen
from services.nrp_sync.memory import MemoryProvider
from services.nrp_sync.operations import Operation
from services.nrp_sync.provider import DEFAULT_SERVICE, ServiceBatch
from services.nrp_sync.sources import Name, Source
from services.nrp_sync.state import SOURCES, Failed, Outcome, Policy, Request, State
from services.nrp_sync.steps import REMOVING
from tests.core.nrp_sandbox import Hand

FOREIGN = "172.16.0.99"
"""A location of the provider's own service, put there by hand."""
POLICY = Policy(quiet=0.1, latency=0.5, interval=0.0)


def run_now(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never really waits."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    work.close()
    raise AssertionError("it waited")


def uid(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


def service(
    name="web", number=1, *, ports=((80, 8080),), finalizer=False, annotations=None, **over
):
    """A Service of our class; `over` replaces fields of its spec or its metadata."""
    spec = {
        "type": "LoadBalancer",
        "load_balancer_class": NRP_CLASS,
        "ip_families": ["IPv4"],
        "ports": [p if isinstance(p, objects.ServicePort) else port_of(*p) for p in ports],
    } | {key: over.pop(key) for key in list(over) if key in objects.ServiceSpec.__struct_fields__}
    meta = {
        "name": name,
        "namespace": "default",
        "uid": uid(number),
        "generation": 1,
        "annotations": annotations,
        "finalizers": [NRP_FINALIZER] if finalizer else None,
    } | over
    return objects.Service(metadata=objects.ObjectMeta(**meta), spec=objects.ServiceSpec(**spec))


def port_of(port, target=0, protocol="TCP"):
    return objects.ServicePort(port=port, target_port=target, protocol=protocol)


def endpoint(address, node_name="n1", **conditions):
    return objects.Endpoint(
        addresses=[address],
        node_name=node_name,
        conditions=objects.EndpointConditions(**conditions),
    )


def slice_of(name, service_name, endpoints, *, number=100, owner=0, **meta):
    """Endpoints are addresses on n1, (address, node), or Endpoint structs."""
    made = [
        e if isinstance(e, objects.Endpoint) else endpoint(*([e] if isinstance(e, str) else e))
        for e in endpoints
    ]
    fields = {
        "name": name,
        "namespace": "default",
        "uid": uid(number),
        "labels": {SERVICE_NAME_LABEL: service_name} if service_name else None,
        "owner_references": [objects.OwnerReference(kind="Service", uid=uid(owner))]
        if owner
        else None,
    } | meta
    return objects.EndpointSlice(
        metadata=objects.ObjectMeta(**fields), address_type="IPv4", endpoints=made
    )


def node(name, *addresses, kind="InternalIP"):
    return objects.Node(
        metadata=objects.ObjectMeta(name=name, uid=f"uid-of-{name}"),
        status=objects.NodeStatus(
            addresses=[objects.NodeAddress(type=kind, address=a) for a in addresses]
        ),
    )


def pod(
    name,
    number,
    label="egress-a",
    *addresses,
    node_name="n1",
    phase="Running",
    finalizer=False,
    **meta,
):
    fields = {
        "name": name,
        "namespace": "default",
        "uid": uid(number),
        "labels": {EGRESS_LABEL: label},
        "finalizers": [NRP_FINALIZER] if finalizer else None,
    } | meta
    return objects.Pod(
        metadata=objects.ObjectMeta(**fields),
        spec=objects.PodSpec(node_name=node_name),
        status=objects.PodStatus(
            phase=phase, pod_ips=[objects.PodIP(ip=a) for a in addresses] or None
        ),
    )


class Rows:
    """What the database would hold."""

    def __init__(self) -> None:
        self.operations: dict[Any, Operation] = {}
        self.addresses: dict[Key, Seen] = {}
        self.located: dict[str, bool] = {}
        self.sent: dict[int, Request] = {}
        self.quarantine: dict[Key, Any] = {}
        self.releases: dict[str, Any] = {}
        self.told: dict[Any, Any] = {}
        self.read_at = 0.0
        self.gate_until = 0.0
        self.last_number = 0


class World:
    def __init__(
        self, policy: Policy = POLICY, *, synced: bool = True, provider: Any = None
    ) -> None:
        self.now = 1_000.0
        self.policy = policy
        self.provider = provider or MemoryProvider()
        self.state = State(policy, "test")
        self.rows = Rows()
        self.flying: list[Request] = []
        self.late: list[tuple[float, Request]] = []
        """Requests of dead processes that still arrive, and when."""
        self.said: list[events.Event] = []
        self.history: list[Request] = []
        self.objects: dict[tuple[str, Name], Any] = {}
        self.had: dict[str, set[tuple[str, str]]] = {}
        """Pod to each gateway by which an address of it was ever to leave, with the address."""
        self.checks = True
        """Off while somebody else edits the provider: then it may refuse what we may ask."""
        if synced:
            self.synced()

    # --- facts ---

    def see(self, *views: Any) -> None:
        for view in views:
            name = Name(view.metadata.namespace, view.metadata.name)
            self.objects[objects.PLURALS[type(view)], name] = view
            self._observe(view)
            self._note_wished()
        self.settle()

    def _note_wished(self) -> None:
        for source in self.state.provided.desired.pods.values():
            if source.member is not None:
                gateway = source.member.identity
                wished = {(gateway, address) for address in source.endpoints}
                self.had.setdefault(source.uid, set()).update(wished)

    def _observe(self, view: Any) -> None:
        match view:
            case objects.Service():
                core.see_service(self.state, view, cause="e:1", now=self.now)
            case objects.EndpointSlice():
                core.see_slice(self.state, view, now=self.now)
            case objects.Node():
                nodes.see_node(self.state, view, now=self.now)
            case objects.Pod():
                egress.see_pod(self.state, view, cause="e:1", now=self.now)

    def gone(self, view: Any) -> None:
        plural = objects.PLURALS[type(view)]
        name = Name(view.metadata.namespace, view.metadata.name)
        self.objects.pop((plural, name), None)
        match plural:
            case "services":
                core.gone_service(self.state, name, view.metadata.uid, cause="e:2", now=self.now)
            case "endpointslices":
                core.gone_slice(self.state, name, now=self.now)
            case "nodes":
                nodes.gone_node(self.state, name.name, now=self.now)
            case "pods":
                egress.gone_pod(self.state, name, view.metadata.uid, now=self.now)
        self.settle()

    def synced(self, *plurals: str) -> None:
        for plural in plurals or SOURCES:
            core.finished(self.state, plural)

    # --- the rest of the loop ---

    def settle(self) -> None:
        """End of a transaction: say, and write rows."""
        egress.release(self.state)
        images.tell_all(self.state, self.now)
        egress.tell_pods(self.state, self.now)
        self.said += [said.event for said in self.state.said]
        self.state.said.clear()
        for key, step in self.state.next_steps.items():
            fresh = planning._find_step(self.state, self.state.operations[key])
            assert step == fresh, "a step that is remembered is not the next one any more"
        self._write()

    def _write(self) -> None:
        state, rows = self.state, self.rows
        for key in state.dirty_ops:
            op = state.operations.get(key)
            if op is None:
                rows.operations.pop(key, None)
            else:
                rows.operations[key] = copy.deepcopy(op)
        state.dirty_ops.clear()
        for key in state.provided.dirty:
            seen = state.provided.seen(*key)
            if seen:
                rows.addresses[key] = seen
            else:
                rows.addresses.pop(key, None)
        state.provided.dirty.clear()
        rows.located = {
            place: sure
            for place, sure in state.provided.located.items()
            if place not in state.provided.busy
        } | {p: s for p, s in rows.located.items() if p in state.provided.busy}
        rows.quarantine = copy.copy(state.quarantine)
        rows.releases = copy.deepcopy(state.releases)
        rows.told = dict(state.told)
        rows.read_at, rows.last_number = state.read_at, state.last_number
        if state.outgoing or state.dirty_view:
            rows.gate_until, state.dirty_view = state.gate_until, False
        for request in state.outgoing:
            self._check_request(request)
            self.flying.append(request)
            self.history.append(request)
            rows.sent[request.number] = request
        state.outgoing = []
        for number in state.ended:
            rows.sent.pop(number, None)
        state.ended.clear()

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        for due in [due for due in self.late if due[0] <= self.now]:
            self.late.remove(due)
            self.reach(due[1])
        outcomes.release_orphans(self.state, self.now)
        planning.plan(self.state, self.now)
        self.settle()

    def answer(self, request: Request, failure: port.ProviderError | None = None, *, applied=False):
        """Let one request end: well, or with a failure before or after it was applied."""
        self.flying.remove(request)
        if failure is not None and applied:
            run_now(effects.perform(self.provider, request))
        if failure is None:
            outcome: Outcome = run_now(effects.perform(self.provider, request))
            if isinstance(outcome, Failed) and self.checks:
                wrong = outcome.failure.kind in ("invalid", "overlay_mappings", "not_found")
                assert not wrong, f"the provider refused {request}: {outcome.failure}"
        else:
            outcome = Failed(failure=effects.failure_of(failure))
        self.finish(request, outcome)

    def reach(self, request: Request) -> None:
        """The request is applied, and nobody hears of it."""
        run_now(effects.perform(self.provider, request))

    def finish(self, request: Request, outcome: Outcome) -> None:
        outcomes.finish(self.state, request.number, outcome, self.now)
        self.settle()

    def answer_all(self) -> None:
        for request in list(self.flying):
            self.answer(request)

    def edit(self, what: str, choose: Callable[[Iterable[str]], str]) -> None:
        """Change the provider by hand, as an operator might."""
        self.checks = False
        provider, hand = self.provider, Hand(self.provider)
        places = [place for place in provider.locations if place != FOREIGN]
        ours = [name for name, s in provider.services.items() if not s.default]
        if what == "location" and places:
            hand.set_location(choose(places), {})
        elif what == "address":
            hand.set_location(FOREIGN, {"10.9.9.9": (DEFAULT_SERVICE,)})
            for place in places:
                held = dict(provider.locations[place])
                held.pop("10.0.0.1", None)
                hand.set_location(place, held)
        elif what == "foreign" and places:
            place = choose(places)
            held = dict(provider.locations[place])
            shared = choose(held)
            held[shared] = tuple(sorted({*held[shared], DEFAULT_SERVICE}))
            own = "2001:db8:99::9" if ":" in place else "10.9.9.9"
            hand.set_location(place, {**held, own: (DEFAULT_SERVICE,)})
        elif what == "balancer" and provider.load_balancers:
            hand.drop_rules(choose(provider.load_balancers))
        elif what == "service" and ours:
            hand.drop_service(choose(ours))

    def advance(self) -> None:
        """On to the next moment at which something is due."""
        due = planning.next_due(self.state, self.now)
        if due < self.now + self.policy.read_interval - 1:
            self.now = max(self.now, due)
        self.tick()

    def run(self, *, steps: int = 400) -> None:
        """Go on, with the applier at work and no more faults, until nothing is left to do."""
        for _ in range(steps):
            self.apply_finalizers()
            self.tick()
            self.answer_all()
            if self.flying or self.apply_finalizers():
                continue
            due = planning.next_due(self.state, self.now)
            if due >= self.now + self.policy.read_interval - 1:
                return
            self.now = max(self.now, due)
        raise AssertionError("it does not come to rest")

    def apply_finalizers(self) -> bool:
        """What the applier does on ProviderStateChanged."""
        changed = False
        for (plural, name), image in list(self.state.told.items()):
            view = self.objects.get((plural, name))
            if view is None or view.metadata.uid != image.owner.uid:
                continue
            has = NRP_FINALIZER in (view.metadata.finalizers or ())
            if image.finalizer == has or (image.finalizer and view.metadata.deletion_timestamp):
                continue
            changed = True
            if not image.finalizer:
                self._check_release(plural, view)
                if view.metadata.deletion_timestamp is not None:
                    self.gone(view)
                    continue
            meta = msgspec.structs.replace(
                view.metadata, finalizers=[NRP_FINALIZER] if image.finalizer else None
            )
            self.see(msgspec.structs.replace(view, metadata=meta))
        return changed

    def restart(self) -> None:
        """The process dies and comes back with what its rows say; answers under way are lost."""
        rows, old = self.rows, self.state
        state = self.state = State(self.policy, "test")
        state.provided.desired.loading = True
        for source in old.provided.desired.slices.values():
            self._restore_slice(source)
        state.read_at, state.last_number = rows.read_at, rows.last_number
        state.gate_until = rows.gate_until
        state.operations = {key: copy.deepcopy(op) for key, op in rows.operations.items()}
        for op in state.operations.values():
            op.flight = 0
        state.quarantine = copy.copy(rows.quarantine)
        state.releases = copy.deepcopy(rows.releases)
        state.told = dict(rows.told)
        for (plural, _), view in sorted(self.objects.items(), key=lambda item: item[0]):
            if plural != "endpointslices":
                self._observe(view)
        state.synced = set(old.synced)
        egress.tidy(state, self.now)
        for key in sorted(state.operations):
            core.resume(state, state.operations[key])
        held = sorted((*key, seen) for key, seen in rows.addresses.items())
        state.provided.fill(held, dict(rows.located))
        core.stirred(state, self.now)
        for number, request in sorted(rows.sent.items()):
            if request.lane == "read":
                continue
            flight = planning.take_off(state, request, self.now)
            flight.steps.clear()
            flight.orphaned_until = self.now + self.policy.orphan_grace
            assert number == request.number
        rows.sent = {n: r for n, r in rows.sent.items() if r.lane != "read"}
        self.flying = []
        state.read_wanted = True
        self.settle()

    def _restore_slice(self, source: Source) -> None:
        desired = self.state.provided.desired
        made = Source(
            name=source.name,
            uid=source.uid,
            service=source.service,
            service_uid=source.service_uid,
            left_out=source.left_out,
        )
        desired.hold(made)
        for address, node_name in source.endpoints.items():
            desired.restore(made.name, address, node_name)

    # --- what must hold ---

    def _check_request(self, request: Request) -> None:
        """4.13: what a request may be, at the moment it leaves."""
        busy_services = {p.key for r in self.flying for p in r.parts}
        busy_places = {p for r in self.flying for p in _places(r)}
        assert not busy_services & {p.key for p in request.parts}, "two writers of one service"
        assert not busy_places & set(_places(request)), "two writers of one location"
        if not isinstance(request.payload, LocationCall):
            assert DEFAULT_SERVICE not in repr(request.payload), "the reserved service is touched"
        for part in request.parts:
            op = self.state.operations[part.key]
            if part.step.verb in REMOVING:
                assert op.deleting
                if self.checks:
                    assert op.identity not in self.state.provided.mapped, "addresses refer to it"
            elif op.kind == "inbound":
                known = self.state.services[Name(op.namespace, op.name)]
                assert known.finalizer, "made before our finalizer was seen"
        if isinstance(request.payload, LocationCall):
            self._check_locations(request.payload)
        if isinstance(request.payload, ServiceBatch):
            assert request.payload.services

    def _check_locations(self, call: LocationCall) -> None:
        entries = call.batch.locations
        assert len({e.location for e in entries}) == len(entries), "a location twice"
        assert call.size() <= self.policy.limits.addresses
        for entry in entries:
            assert len({a.address for a in entry.addresses}) == len(entry.addresses)
            for item in entry.addresses:
                assert (":" in item.address) == (":" in entry.location), "families are mixed"
                foreign = self.state.provided.foreign.get(entry.location, {})
                for name in set(item.services).difference(foreign.get(item.address, ())):
                    keys = (("inbound", name), ("outbound", name))
                    ops = [self.state.operations[k] for k in keys if k in self.state.operations]
                    assert any(op.serving for op in ops), f"{name} is not registered"
        if not self.state.complete:
            for entry in entries:
                assert entry.addresses, "a location is deleted on a partial view"
                for item in entry.addresses:
                    there = self.provider.locations.get(entry.location, {}).get(item.address, ())
                    assert set(there) <= set(item.services), "taken away on a partial view"

    def _check_release(self, plural: str, view: Any) -> None:
        """An object is let go only when nothing of it is left."""
        if not self.checks:
            return
        if plural == "services":
            key = view.metadata.uid.lower()
            assert key not in self.provider.services
            assert key not in self.provider.load_balancers
            assert f"{key}-pip" not in self.provider.public_ips
            return
        others = {
            (other.metadata.labels[EGRESS_LABEL], entry.ip)
            for (kind, _), other in self.objects.items()
            if kind == "pods" and other is not view and lives(other)
            for entry in other.status.pod_ips
        }
        for place, held in self.provider.locations.items():
            for label, address in self.had.get(view.metadata.uid, set()) - others:
                if label in held.get(address, ()):
                    wished = self.state.provided.desired.refs(place, address)
                    assert label in wished, f"{address} still leaves by {label}"

    # --- exact equality ---

    def wished(self) -> dict[str, dict[str, set[str]]]:
        """Location to address to services, computed anew from the objects alone."""
        places: dict[str, dict[str, set[str]]] = {}

        def add(node_name: str, address: str, name: str) -> None:
            view = self.objects.get(("nodes", Name("", node_name)))
            same = [
                a.address
                for a in (view.status.addresses if view else ())
                if (":" in a.address) == (":" in address)
            ]
            if same:
                places.setdefault(min(same), {}).setdefault(address, set()).add(name)

        for (plural, _), view in self.objects.items():
            if plural == "endpointslices":
                owner = self.objects.get(
                    ("services", Name("default", view.metadata.labels[SERVICE_NAME_LABEL]))
                )
                if owner is None or not wants(owner):
                    continue
                family = 6 if owner.spec.ip_families == ["IPv6"] else 4
                for e in view.endpoints or ():
                    if e.conditions.ready is not False and e.node_name:
                        for address in e.addresses:
                            if (6 if ":" in address else 4) == family:
                                add(e.node_name, address, owner.metadata.uid)
            elif plural == "pods" and lives(view):
                for entry in view.status.pod_ips or ():
                    add(view.spec.node_name, entry.ip, view.metadata.labels[EGRESS_LABEL])
        return places

    def check_equal(self) -> None:
        """The provider holds exactly what the cluster wants, and nothing beside it."""
        held: dict[str, dict[str, set[str]]] = {}
        for place, addresses in self.provider.locations.items():
            for address, names in addresses.items():
                if ours := {*names} - {DEFAULT_SERVICE}:
                    held.setdefault(place, {})[address] = ours
        if FOREIGN in self.provider.locations:
            assert self.provider.locations[FOREIGN] == {"10.9.9.9": (DEFAULT_SERVICE,)}
        assert held == self.wished()
        inbound = {
            v.metadata.uid for (p, _), v in self.objects.items() if p == "services" and wants(v)
        }
        outbound = {
            v.metadata.labels[EGRESS_LABEL]
            for (p, _), v in self.objects.items()
            if p == "pods" and lives(v)
        }
        registered = {n for n, s in self.provider.services.items() if not s.default}
        assert registered == inbound | outbound
        assert set(self.provider.load_balancers) == inbound
        gateways = {n for n in self.provider.nat_gateways if n != DEFAULT_SERVICE}
        assert gateways == outbound
        ips = {ip for g in self.provider.nat_gateways.values() for ip in g.public_ips}
        ips |= {ip for g in self.provider.nat_gateways.values() for ip in g.public_ips_v6}
        ips |= {f"{DEFAULT_SERVICE}-pip"} | {f"{name}-pip" for name in inbound}
        assert set(self.provider.public_ips) == ips
        assert self.state.provided.deviant == {}
        assert all(not r.parts for r in self.flying)

    def images(self, name: str = "web", plural: str = "services") -> events.ProviderStateChanged:
        return self.state.told[plural, Name("default", name)]


def wants(view: objects.Service) -> bool:
    return view.spec.type == "LoadBalancer" and view.metadata.deletion_timestamp is None


def lives(view: objects.Pod) -> bool:
    live = view.metadata.deletion_timestamp is None and view.status.phase in egress.LIVE
    return bool(live and view.metadata.labels[EGRESS_LABEL] and view.status.pod_ips)


def _places(request: Request) -> list[str]:
    if isinstance(request.payload, LocationCall):
        return list(request.payload.locations())
    return []
