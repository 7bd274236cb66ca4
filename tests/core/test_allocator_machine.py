"""Random histories of a cluster against the promises that hold in every one of them.

A brute-force model looks at every state: who holds what, what is free, who waits though something
is free. Replaying the log of facts and decisions must give the same state, telling the same fact
twice must decide nothing, and an allocator that is restarted decides what one does that is not.
"""

from __future__ import annotations

import itertools
import random
from datetime import datetime, timedelta

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from schema import addresses, events, objects, selection
from services.allocator.core import Rules, State, decide, tick
from services.allocator.core.evolve import replay, replay_tick
from services.allocator.core.model import Lease
from services.allocator.core.state_of import fingerprint
from tests.core.allocating import EVERYWHERE, World, reborn, shown

NAMES = st.sampled_from("abcdefgh")
POOLS = st.sampled_from(["p1", "p2", "p3"])
RANGES = st.sampled_from(
    [
        ("192.0.2.0/30",),
        ("192.0.2.0/29",),
        ("192.0.2.0/29 192.0.2.2-192.0.2.4",),
        ("192.0.2.4/31", "2001:db8::/126"),
        ("198.51.100.0/30",),
        ("198.51.100.0/30", "2001:db8::/125"),
        ("2001:db8:1::/64",),
        ("192.0.2.0/33",),
        ("192.0.2.3/32",),
    ]
)
SCOPES = st.sampled_from(
    [
        (EVERYWHERE,),
        (objects.PoolScope(project="*", namespace="default", guest_cluster="*"),),
        (objects.PoolScope(project="*", namespace="other", guest_cluster="*"),),
        None,
    ]
)
ADDRESSES = st.sampled_from(["", "", "", "192.0.2.2", "192.0.2.3", "192.0.2.1", "2001:db8::2"])
FAMILIES = st.sampled_from(
    [
        {},
        {"ip_families": ["IPv6"]},
        {"ip_families": ["IPv4", "IPv6"], "ip_family_policy": "PreferDualStack"},
        {"ip_families": ["IPv6", "IPv4"], "ip_family_policy": "RequireDualStack"},
    ]
)


class Thorough(State):
    """One that never goes the short way (services/allocator/core/express.py)."""

    settled = False  # type: ignore[assignment]


def to_store(state: State) -> tuple[object, ...]:
    """What one fact has left to be written."""
    changes = state.changes
    owners = sorted(
        (owner.plural, owner.key, owner.uid, owner.phase, state.knows(owner))
        for owner in changes.owners
    )
    granted = {lease.id: begun for lease, begun in changes.granted.items()}
    ended = {lease.id: closed for lease, closed in changes.ended.items()}
    altered = sorted(lease.id for lease in changes.altered)
    found = (owners, granted, ended, altered, changes.closed, changes.used, changes.memos.keys())
    state.forget_changes()
    return found


class Allocation(RuleBasedStateMachine):
    how = Rules()

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.how, synced=False)
        self.steps: list[tuple[events.AnyEvent | datetime, int, str, list[events.Event]]] = []
        self.twin = Thorough(self.how)  # never restarted
        feed = self.world.feed

        def recording(fact: events.AnyEvent) -> list[events.Event]:
            out = feed(fact)
            twins = decide(self.twin, fact, epoch=self.world.epoch, seq=self.world.seq)
            assert out == twins, "a restart, or the short way, has changed a decision"
            assert to_store(self.world.state) == to_store(self.twin)
            self.steps.append((fact, self.world.seq, self.world.epoch, out))
            self.check_decisions(out)
            return out

        self.world.feed = recording  # type: ignore[method-assign]

    @initialize(early=st.booleans())
    def begin(self, early: bool) -> None:
        self.world.namespace("default", "c:p1")
        self.world.pool("p1", "192.0.2.0/29 192.0.2.2-192.0.2.4", "2001:db8::/126")
        if not early:
            self.world.sync()

    # --- what happens ---

    @rule(
        name=POOLS,
        ranges=RANGES,
        scope=SCOPES,
        priority=st.integers(0, 2),
        quota=st.sampled_from([0, 0, 1, 3]),
    )
    def pool(self, name: str, ranges: tuple[str, ...], scope, priority: int, quota: int) -> None:
        limits = [objects.PoolQuota(namespace="*", limit=quota)] if quota else None
        self.world.pool(name, *ranges, scope=scope, priority=priority, quotas=limits)

    @rule(name=POOLS)
    def pool_gone(self, name: str) -> None:
        if ("ippools", "", name) in self.world.objects:
            self.world.gone("ippools", name)

    @rule(name=NAMES, pool=st.sampled_from(["", "", "p1", "p2"]), address=ADDRESSES)
    def lb(self, name: str, pool: str, address: str) -> None:
        self.world.lb(name, ip_pool=pool, address=address)

    @rule(name=NAMES, claim=st.sampled_from(["192.0.2.2", "192.0.2.3", "198.51.100.2"]))
    def lb_with_status(self, name: str, claim: str) -> None:
        self.world.lb(name, status=shown(claim, "p1"))

    @rule(name=NAMES, claim=st.sampled_from(["192.0.2.2", "192.0.2.3", "198.51.100.2"]))
    def svc_with_status(self, name: str, claim: str) -> None:
        self.world.svc(name, ingress=[claim])

    @rule(name=NAMES, data=st.data())
    def lb_shows_what_it_holds(self, name: str, data: st.DataObject) -> None:
        known = self.world.objects.get(("loadbalancers", "default", name))
        held = self.world.addresses("loadbalancers", name)
        if known is not None and held:
            address = data.draw(st.sampled_from(held))
            status = msgspec.structs.replace(shown(address, "p1"), address=address)
            self.world.see(msgspec.structs.replace(known, status=status))

    @rule(seconds=st.sampled_from([1, 30, 100]))
    def time_passes(self, seconds: int) -> None:
        before = self.world.state.now
        out = self.world.tick(seconds)
        assert out == tick(self.twin, before + timedelta(seconds=seconds))
        self.check_decisions(out)
        self.steps.append((before + timedelta(seconds=seconds), self.world.seq, "", out))

    @rule(
        name=NAMES,
        key=st.sampled_from(["", "k1", "k2"]),
        port=st.sampled_from(["TCP/80", "TCP/443", "UDP/80"]),
        address=ADDRESSES,
        policy=st.sampled_from(["Cluster", "Local"]),
    )
    def sharer(self, name: str, key: str, port: str, address: str, policy: str) -> None:
        annotations = {"lbledger.io/allow-shared-ip": key, "lbledger.io/address": address}
        self.world.svc(name, annotations=annotations, ports=[port], external_traffic_policy=policy)

    @rule(name=NAMES)
    def lb_by_dhcp(self, name: str) -> None:
        self.world.lb(name, ipam="dhcp")

    @rule(name=NAMES, families=FAMILIES, kind=st.sampled_from(["LoadBalancer", "ClusterIP"]))
    def svc(self, name: str, families: dict[str, object], kind: str) -> None:
        self.world.svc(name, kind=kind, **families)  # type: ignore[arg-type]

    @rule(
        name=NAMES,
        plural=st.sampled_from(["loadbalancers", "services"]),
        reason=st.sampled_from(["deleted", "vanished"]),
    )
    def gone(self, name: str, plural: str, reason: str) -> None:
        if (plural, "default", name) in self.world.objects:
            self.world.gone(plural, name, reason=reason)

    @rule(name=NAMES)
    def recreated(self, name: str) -> None:
        if ("loadbalancers", "default", name) in self.world.objects:
            self.world.lb(name, uid=f"new-{self.world.seq}")

    @rule(seed=st.integers(0, 99))
    def restarted(self, seed: int) -> None:
        self.world.state = reborn(self.world.state, random.Random(seed))
        assert fingerprint(self.world.state) == fingerprint(self.twin)

    @rule(project=st.sampled_from(["", "c:p1", "c:p2"]))
    def namespace(self, project: str) -> None:
        self.world.namespace("default", project)

    @rule()
    def namespace_gone(self) -> None:
        if ("namespaces", "", "default") in self.world.objects:
            self.world.gone("namespaces", "default")

    @rule()
    def synced(self) -> None:
        self.world.sync()

    @rule(keep=st.booleans())
    def new_epoch(self, keep: bool) -> None:
        self.world.new_epoch(f"e{self.world.seq}")
        for (plural, _, _), obj in list(self.world.objects.items()):
            if keep or plural != "loadbalancers":
                self.world.feed(events.SEEN[plural](at=self.world.at(), object=obj))
            else:
                del self.world.objects[plural, obj.metadata.namespace, obj.metadata.name]
        self.world.sync()

    @precondition(lambda self: self.steps)
    @rule()
    def told_again(self) -> None:
        """The last state of an object once more is no news."""
        for (plural, _, _), obj in list(self.world.objects.items())[:3]:
            out = self.world.feed(events.SEEN[plural](at=self.world.at(), object=obj))
            assert out == [], (obj.metadata.name, plural, out)

    # --- what must hold ---

    def check_decisions(self, out: list[events.Event]) -> None:
        state = self.world.state
        assert state.ready or not out, "a decision before all kinds were known"
        for event in out:
            if isinstance(event, events.LeaseGranted):
                pool = state.pools[event.pool]
                assert pool.plan is not None
                assert not pool.plan.why_not(addresses.parse(event.address))

    @invariant()
    def no_address_is_held_twice(self) -> None:
        everybody = {id(o): o for o in self.world.state.all_owners()}
        everybody.update((id(o), o) for o in self.world.state.departed.values())
        held: dict[int, list[Lease]] = {}
        for owner in everybody.values():
            for lease in owner.leases:
                held.setdefault(lease.address, []).append(lease)
        for leases in held.values():
            for one, other in itertools.combinations(leases, 2):
                assert one.share == other.share != ""
                assert not set(one.slots) & set(other.slots)

    @invariant()
    def pools_count_right(self) -> None:
        state = self.world.state
        everybody = {id(o): o for o in [*state.all_owners(), *state.departed.values()]}
        live = [lease for o in everybody.values() for lease in o.leases]
        for pool in state.pools.values():
            for family, space in pool.spaces.items():
                inside = {lease.address for lease in live if lease.address in space.shape}
                assert inside == {a for a in space.held if a in space.shape}
                assert space.available == space.shape.total - len(inside) >= 0
                assert not set(space.free) & set(space.held)
                self.check_fresh(space, family)

    def check_fresh(self, space, family: int) -> None:
        """The frontier stands at the lowest address that is neither held nor remembered."""
        expected = None
        for first, last in space.shape.spans:
            for address in range(first, min(last, first + 40) + 1):
                if expected is None and address not in space.held and address not in space.free:
                    expected = address
        assert space.fresh() == expected

    @invariant()
    def nobody_waits_for_what_is_free(self) -> None:
        state = self.world.state
        if not state.ready:
            return
        for owner in state.all_owners():
            if not owner.ticket or owner.gone_at is not None:
                continue
            for wait in owner.waits:
                if wait[0] == "pool" and owner.refusal and owner.refusal.reason == "PoolExhausted":
                    pool, family = state.pools[str(wait[1])], int(str(wait[2]))
                    assert not state.grantable(pool, family), (owner, wait)
                if wait[0] == "address" and not self.world.rules.cooldown:
                    assert (
                        any(
                            int(str(wait[1])) in space.held
                            for pool in state.pools.values()
                            for space in pool.spaces.values()
                        )
                        or int(str(wait[1])) in state.strays
                    )

    @invariant()
    def satisfied_or_waiting(self) -> None:
        state = self.world.state
        if not state.ready:
            return
        assert not state.undecided
        for owner in state.all_owners():
            if owner.gone_at is None:
                assert bool(owner.ticket) == (owner.phase == "waiting")

    def teardown(self) -> None:
        """The log of facts and decisions, replayed, gives the same state."""
        state = State(self.world.rules)
        for fact, seq, epoch, out in self.steps:
            if isinstance(fact, datetime):
                replay_tick(state, fact, out)
            else:
                replay(state, fact, out, epoch=epoch, seq=seq)
        assert fingerprint(state) == fingerprint(self.world.state)


Allocation.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class PatientAllocation(Allocation):
    """The same with overflow to the next pool, cool-downs and a grace period."""

    how = Rules(
        overflow=True,
        grace=timedelta(seconds=20),
        cooldown=timedelta(seconds=10),
        selection=selection.Rules(open_pools=True),
    )


PatientAllocation.TestCase.settings = Allocation.TestCase.settings
TestAllocation = Allocation.TestCase
TestPatientAllocation = PatientAllocation.TestCase
