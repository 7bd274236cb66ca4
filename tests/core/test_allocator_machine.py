"""Random histories of a cluster against the promises that hold in every one of them.

A brute-force model looks at every state: who holds what, what is free, who waits though something
is free. Replaying the log of facts and decisions must give the same state, and telling the same
fact twice must decide nothing.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from schema import addresses, events, objects
from services.allocator.core import State
from services.allocator.core.evolve import replay
from services.allocator.core.state_of import fingerprint
from tests.core.allocating import EVERYWHERE, World, shown

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


class Allocation(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(synced=False)
        self.steps: list[tuple[events.AnyEvent, int, str, list[events.Event]]] = []
        feed = self.world.feed

        def recording(fact: events.AnyEvent) -> list[events.Event]:
            out = feed(fact)
            self.steps.append((fact, self.world.seq, self.world.epoch, out))
            self.check_decisions(out)
            return out

        self.world.feed = recording  # type: ignore[method-assign]
        self.ever: dict[str, set[int]] = {}

    @initialize(early=st.booleans())
    def begin(self, early: bool) -> None:
        self.world.namespace("default", "c:p1")
        if not early:
            self.world.sync()

    # --- what happens ---

    @rule(name=POOLS, ranges=RANGES, scope=SCOPES, priority=st.integers(0, 2))
    def pool(self, name: str, ranges: tuple[str, ...], scope, priority: int) -> None:
        self.world.pool(name, *ranges, scope=scope, priority=priority)

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

    @rule(project=st.sampled_from(["", "c:p1", "c:p2"]))
    def namespace(self, project: str) -> None:
        self.world.namespace("default", project)

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
            assert self.world.feed(events.SEEN[plural](at=self.world.at(), object=obj)) == []

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
        held = Counter(lease.address for o in everybody.values() for lease in o.leases)
        assert not [addresses.text(a) for a, n in held.items() if n > 1]

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
                    space = state.pools[str(wait[1])].spaces[int(str(wait[2]))]
                    assert space.available == 0, (owner, wait)
                if wait[0] == "address":
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
            replay(state, fact, out, epoch=epoch, seq=seq)
        assert fingerprint(state) == fingerprint(self.world.state)


Allocation.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestAllocation = Allocation.TestCase
