"""Which backends are ready and whether the dummy stands in: tables, and a model for any history."""

from datetime import timedelta

import msgspec
import pytest
from hypothesis import HealthCheck as Health
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from schema.events import BackendsResolved
from schema.objects import ExplicitBackend, HealthCheck, Listener
from services.prober.core import KINDS, State
from services.prober.images import Hold, Verdict
from services.prober.members import VMIS, matches, member
from services.prober.plan import read
from tests.core.prober_objects import DEFAULTS, DUMMIES, NOW, balancer, machine, pod, ref

CHECK = HealthCheck(port=8080, failure_threshold=2)
OTHER = HealthCheck(port=8080, failure_threshold=4)
BROKEN = HealthCheck(port=80)


class World:
    """A state with everything listed, and short words for what may happen to it."""

    def __init__(self):
        self.state = State(DEFAULTS, DUMMIES)
        self.started = 0.0

    def see(self, *objs):
        for obj in objs:
            if obj.metadata.name.startswith(("vm", "pod")):
                self.state.see_member(ref(obj), obj)
            else:
                self.state.see_balancer(obj.metadata.uid, obj)
        return self

    def lose(self, obj):
        if obj.metadata.name.startswith(("vm", "pod")):
            self.state.see_member(ref(obj), None)
        else:
            self.state.see_balancer(obj.metadata.uid, None)
        return self

    def settle(self, synced=KINDS):
        return self.state.resolve(synced, NOW, 1_000)

    def verdict(self, name, healthy, *, address="10.0.0.4", lb="uid-web", started=None, config=""):
        self.started += 1
        plan = self.state.balancers[lb].plan
        return Verdict(
            owner=lb,
            uid=f"uid-{name}",
            address=address,
            config=config or plan.config,
            started=self.started if started is None else started,
            healthy=healthy,
            reason="" if healthy else "connection refused",
            ended=NOW,
        )

    def judge(self, *verdicts, holds=()):
        return self.state.judge(verdicts, holds, NOW)

    @property
    def image(self) -> BackendsResolved:
        image = self.state.balancers["uid-web"].image
        assert image is not None
        return image

    @property
    def ready(self):
        return [b.name for b in self.image.backends if b.ready]

    @property
    def states(self):
        return {b.name: b.state for b in self.image.backends}


def test_the_first_image_of_an_empty_load_balancer_has_the_dummy():
    """S1a, S1c, L19: present from the first slice, before any backend and any address."""
    world = World().see(balancer(), machine("vm1", "10.0.0.4", labels={}))
    (event,) = world.settle()
    assert (event.revision, event.dummy, event.backends, event.matched) == (1, "192.0.0.8", [], 0)
    assert (event.checked, event.reason) == (False, "")


def test_a_selector_without_keys_takes_no_backend():
    """S1c: machines run in the namespace, none is taken."""
    world = World().see(balancer(backend_server_selector={}), machine("vm1", "10.0.0.4"))
    world.settle()
    assert (world.ready, world.image.matched) == ([], 0)


def test_backends_come_in_order_and_a_repeated_fact_decides_nothing():
    """Order is by namespace, name, address, whatever the order of the facts."""
    vms = [machine(f"vm{i}", f"10.0.0.{i}") for i in (3, 1, 2)]
    world = World().see(balancer(), *vms)
    world.settle()
    assert world.ready == ["vm1", "vm2", "vm3"]
    world.see(balancer(), *reversed(vms))
    assert world.settle() == []


def test_a_machine_without_an_address_matches_and_is_no_backend():
    """L14: it counts as matched, so that the reason can be told."""
    world = World().see(balancer(), machine("vm1"))
    world.settle()
    assert (world.image.matched, world.image.backends) == (1, [])


def test_an_edited_selector_replaces_the_backends():
    """S2e: the removed machine gets no traffic."""
    world = World().see(balancer(), machine("vm1", "10.0.0.4"))
    world.see(machine("vm2", "10.0.0.5", labels={"app": "db"})).settle()
    world.see(balancer(backend_server_selector={"app": ["db"]})).settle()
    assert world.ready == ["vm2"]


def test_other_namespaces_and_cluster_load_balancers_are_not_ours():
    """Backends are of the same namespace; a cluster's data path is in the cluster."""
    world = World().see(balancer(), machine("vm1", "10.0.0.4", namespace="other"))
    world.see(balancer("guest", workload_type="cluster"))
    assert [event.owner.name for event in world.settle()] == ["web"]
    assert world.image.matched == 0


def test_a_deleting_load_balancer_is_left_alone():
    """Its slice goes with it; no decision and no check is made for it any more."""
    world = World().see(balancer(), machine("vm1", "10.0.0.4"))
    world.settle()
    world.see(balancer(deleting=NOW)).see(machine("vm2", "10.0.0.5"))
    assert world.settle() == []
    assert world.state.changed >= {"uid-web"}


def test_new_backends_start_not_ready_with_the_dummy_and_one_event_swaps_them():
    """A2: unknown is not ready and no failure; both parts of the swap are one event."""
    world = World().see(balancer(health_check=CHECK), machine("vm1", "10.0.0.4"))
    world.settle()
    assert (world.ready, world.states, world.image.dummy) == ([], {"vm1": "unknown"}, "192.0.0.8")
    (up,) = world.judge(world.verdict("vm1", True))
    assert (up.dummy, up.healthy, up.total, up.revision) == ("", 1, 1, 2)
    (down,) = world.judge(world.verdict("vm1", False))
    assert (down.dummy, down.healthy, down.total) == ("192.0.0.8", 0, 1)
    assert down.changes[0].reason == "connection refused"


def test_many_transitions_of_one_tick_are_one_event():
    """S4c: both backends fail at once, the dummy comes with them."""
    vms = [machine("vm1", "10.0.0.4"), machine("vm2", "10.0.0.5")]
    world = World().see(balancer(health_check=CHECK), *vms)
    world.settle()
    world.judge(world.verdict("vm1", True), world.verdict("vm2", True, address="10.0.0.5"))
    (event,) = world.judge(
        world.verdict("vm1", False), world.verdict("vm2", False, address="10.0.0.5")
    )
    assert [c.uid for c in event.changes] == ["uid-vm1", "uid-vm2"]
    assert (event.healthy, event.total, event.dummy) == (0, 2, "192.0.0.8")


def test_switching_checks_off_makes_all_ready_and_on_keeps_them():
    """S4e, S4f: off makes a failing backend ready; on again, it stays until it fails."""
    world = World().see(balancer(health_check=CHECK), machine("vm1", "10.0.0.4"))
    world.settle()
    world.judge(world.verdict("vm1", False))
    world.see(balancer())
    (off,) = world.settle()
    assert (world.ready, world.states, off.dummy) == (["vm1"], {"vm1": "unchecked"}, "")
    world.see(balancer(health_check=CHECK)).settle()
    assert (world.ready, world.states) == (["vm1"], {"vm1": "unknown"})
    world.judge(world.verdict("vm1", False))
    assert (world.ready, world.image.dummy) == ([], "192.0.0.8")


@pytest.mark.parametrize("check", [OTHER, BROKEN], ids=["other-threshold", "invalid"])
def test_a_changed_check_never_flashes_a_backend_ready_or_down(check):
    """The verdict stands through an edit, also through one that can't be followed."""
    vms = [machine("vm1", "10.0.0.4"), machine("vm2", "10.0.0.5")]
    world = World().see(balancer(health_check=CHECK), *vms)
    world.settle()
    world.judge(world.verdict("vm1", True), world.verdict("vm2", False, address="10.0.0.5"))
    world.see(balancer(health_check=check, generation=2)).settle()
    assert world.states == {"vm1": "healthy", "vm2": "unhealthy"}
    assert world.ready == ["vm1"]


def test_edited_listeners_never_flash_a_failing_backend_as_ready():
    """Ports change, verdicts stay."""
    world = World().see(balancer(health_check=CHECK), machine("vm1", "10.0.0.4"))
    world.settle()
    world.judge(world.verdict("vm1", False))
    more = [
        Listener(name="http", port=80, backend_port=8080),
        Listener(name="b", port=1, backend_port=2),
    ]
    (event,) = world.see(balancer(health_check=CHECK, listeners=more)).settle()
    assert (world.ready, event.dummy, len(event.ports)) == ([], "192.0.0.8", 2)


def test_a_restarted_machine_starts_from_unknown():
    """A new uid or another address is another backend."""
    world = World().see(balancer(health_check=CHECK), machine("vm1", "10.0.0.4"))
    world.settle()
    world.judge(world.verdict("vm1", True))
    world.see(machine("vm1", "10.0.0.4", uid="uid-2")).settle()
    assert (world.ready, world.image.dummy) == ([], "192.0.0.8")


def test_thousands_of_backends_fit_into_events_that_the_bus_carries():
    """However long their names and their errors are. What does not fit is told, and which are left
    out does not depend on how they are."""
    world = World()
    node = "node-" + "n" * 200
    vms = [machine(f"vm{i:04}-{'x' * 50}", f"10.0.{i // 250}.{1 + i % 250}") for i in range(4_000)]
    vms = [
        msgspec.structs.replace(vm, status=msgspec.structs.replace(vm.status, node_name=node))
        for vm in vms
    ]
    (image,) = world.see(balancer(health_check=CHECK), *vms).settle()
    used = [b.name for b in image.backends]
    assert 1_000 < len(used) < 4_000
    assert f"the first {len(used)} of 4000 backends" in image.message
    verdicts = [
        world.verdict(b.name, False, address=b.address)._replace(reason="e" * 250)
        for b in image.backends
    ]
    told = world.judge(*verdicts)
    assert sum(len(event.changes) for event in told) == len(used)
    told += world.lose(vms[-1]).settle() + world.see(balancer()).settle()
    assert [b.name for b in world.image.backends] == used
    assert max(len(msgspec.json.encode(event)) for event in [image, *told]) < 1_000_000


def test_the_last_error_stays_with_a_backend_that_has_recovered():
    """Through other changes of the image, until checks are off; another machine has none."""
    lb = balancer(health_check=CHECK)
    world = World().see(lb, machine("vm1", "10.0.0.4"))
    world.settle()
    for healthy in (False, True):
        world.judge(world.verdict("vm1", healthy))
    world.see(machine("vm2", "10.0.0.5")).settle()
    errors = {b.name: (b.state, b.reason, b.last_error) for b in world.image.backends}
    assert errors == {"vm1": ("healthy", "", "connection refused"), "vm2": ("unknown", "", "")}
    world.see(balancer()).settle()
    assert [b.last_error for b in world.image.backends] == ["", ""]


@pytest.mark.parametrize("how", ["old-config", "old-time", "other-address", "removed", "no-owner"])
def test_a_result_that_is_not_of_now_changes_nothing(how):
    """An old configuration, an older time, a backend or a load balancer that left."""
    world = World().see(balancer(health_check=CHECK), machine("vm1", "10.0.0.4"))
    world.settle()
    world.judge(world.verdict("vm1", True, started=50))
    late = world.verdict("vm1", False, started=60)
    match how:
        case "old-config":
            late = late._replace(config=read(balancer(health_check=OTHER), DEFAULTS).config)
        case "old-time":
            late = late._replace(started=49.0)
        case "other-address":
            late = late._replace(address="10.0.0.99")
        case "removed":
            world.lose(machine("vm1", "10.0.0.4")).settle()
        case "no-owner":
            world.lose(balancer())
    assert world.judge(late) == []


def test_one_backend_may_be_behind_several_load_balancers():
    """B24: verdicts belong to the load balancer, the backend's uid and its address."""
    world = World().see(balancer(health_check=CHECK), balancer("two", health_check=CHECK))
    world.see(machine("vm1", "10.0.0.4")).settle()
    (event,) = world.judge(world.verdict("vm1", True, lb="uid-two"))
    assert event.owner.name == "two"
    assert world.ready == []


def test_explicit_backends_and_pods_are_backends_too():
    """Things that are no machines: by address with a port of their own, and pods by selector."""
    lb = balancer(
        backend_pod_selector={"app": ["pod"]},
        backends=[ExplicitBackend(name="db", address="10.9.0.1", port=5432)],
    )
    world = World().see(
        lb, pod("pod1", "10.0.1.1", labels={"app": "pod"}), machine("vm1", "10.0.0.4")
    )
    (event,) = world.settle()
    assert [(b.kind, b.name, b.port) for b in event.backends] == [
        ("Address", "db", 5432),
        ("Pod", "pod1", 0),
        ("VirtualMachineInstance", "vm1", 0),
    ]
    assert event.matched == 3
    assert event.backends[1].node == "n1"


def test_an_explicit_backend_at_another_port_is_another_one():
    """Nobody has asked that port yet: it is not ready, and a late verdict changes nothing."""
    db = {"name": "db", "address": "10.9.0.1"}
    world = World().see(
        balancer(
            health_check=CHECK,
            backend_server_selector={},
            backends=[ExplicitBackend(**db, port=5432)],
        )
    )
    (event,) = world.settle()
    (old,) = event.backends
    late = world.verdict("db", True, address=old.address)._replace(uid=old.uid)
    assert world.judge(late)[0].healthy == 1
    moved = [ExplicitBackend(**db, port=5433)]
    world.see(balancer(health_check=CHECK, backend_server_selector={}, backends=moved))
    (event,) = world.settle()
    assert (event.backends[0].ready, event.dummy) == (False, "192.0.0.8")
    assert world.judge(late._replace(started=2.0)) == []


def test_a_selector_of_pods_without_a_pod_says_where_to_look():
    """Most pods are not watched unless a setting says so; it is told until there is one."""
    world = World().see(balancer(backend_pod_selector={"app": ["pod"]}), machine("vm1", "10.0.0.4"))
    (event,) = world.settle()
    assert "watcher.all_pods" in event.message
    (event,) = world.see(pod("pod1", "10.0.1.1", labels={"app": "pod"})).settle()
    assert event.message == ""


def test_each_family_has_its_own_dummy():
    """A dual-stack load balancer whose IPv4 backends fail keeps the IPv4 side closed."""
    lb = balancer(ip_families=["IPv4", "IPv6"], health_check=CHECK)
    world = World().see(lb, machine("vm1", "10.0.0.4", "2001:db8::4"))
    (event,) = world.settle()
    assert (event.families, event.dummy, event.dummy6) == (["IPv4", "IPv6"], "192.0.0.8", "100::1")
    (up,) = world.judge(world.verdict("vm1", True, address="2001:db8::4"))
    assert (up.dummy, up.dummy6) == ("192.0.0.8", "")


def test_a_verdict_between_an_edit_and_its_image_keeps_the_old_slices_whole():
    """The spec has other families by now, the image does not: the dummy is that of the image."""
    world = World().see(balancer(health_check=CHECK), machine("vm1", "10.0.0.4", "2001:db8::4"))
    world.settle()
    world.judge(world.verdict("vm1", True))
    world.see(balancer(health_check=CHECK, ip_families=["IPv6"]))
    (event,) = world.judge(world.verdict("vm1", False))
    assert (event.dummy, event.dummy6) == ("192.0.0.8", "")


def test_an_ipv6_load_balancer_takes_only_ipv6_addresses():
    """Its only dummy is the IPv6 one."""
    world = World().see(balancer(ip_families=["IPv6"]), machine("vm1", "10.0.0.4", "2001:db8::4"))
    (event,) = world.settle()
    assert [b.address for b in event.backends] == ["2001:db8::4"]
    assert (event.dummy, event.dummy6) == ("", "")
    assert World().see(balancer(ip_families=["IPv6"])).settle()[0].dummy6 == "100::1"


def test_a_hold_is_told_once_and_taken_back_once():
    """Failures not acted on are said on the load balancer, without a change of any backend."""
    world = World().see(balancer(health_check=CHECK), machine("vm1", "10.0.0.4"))
    world.settle()
    world.judge(world.verdict("vm1", True))
    (held,) = world.judge(holds=[Hold("uid-web", "why")])
    assert (held.held, held.changes, held.healthy) == ("why", [], 1)
    assert world.judge(holds=[Hold("uid-web", "why")]) == []
    assert world.see(machine("vm2", "10.0.0.5")).settle()[0].held == "why"
    (free,) = world.judge(holds=[Hold("uid-web", "")])
    assert free.held == ""


def test_only_a_changed_spec_moves_the_generation():
    """Without a status subresource every write of a status bumps it: that must not echo."""
    world = World().see(balancer(generation=1))
    world.settle()
    assert world.see(balancer(generation=7)).settle() == []
    (event,) = world.see(balancer(generation=8, description="text")).settle()
    assert event.generation == 8


def test_what_waits_for_a_kind_is_decided_when_it_is_complete():
    """A load balancer of machines waits for their list; one of addresses alone does not."""
    world = World().see(balancer(), machine("vm1", "10.0.0.4"))
    world.see(
        balancer(
            "plain",
            backend_server_selector={},
            backends=[ExplicitBackend(name="db", address="10.9.0.1")],
        )
    )
    assert [e.owner.name for e in world.settle(["loadbalancers"])] == ["plain"]
    assert world.settle(KINDS) == []
    world.state.see_complete()
    assert [e.owner.name for e in world.settle(KINDS)] == ["web"]


@pytest.mark.parametrize(
    ("networks", "found"),
    [
        (["10.52.0.0/24", "2001:db8::/64"], None),
        (["10.52.0.0/24", "192.0.0.0/24"], ("192.0.0.8", "192.0.0.0/24")),
        (["100::/64"], ("100::1", "100::/64")),
        (["nonsense", ""], None),
    ],
)
def test_a_dummy_inside_a_pod_network_is_found(networks, found):
    """There it could be the address of a pod, and traffic for nobody would reach somebody."""
    assert DUMMIES.inside(networks) == found


def test_large_changes_are_decided_in_portions():
    """At most so many images per transaction; the rest follow."""
    world = World().see(*(balancer(f"lb{i}") for i in range(5)))
    assert [len(world.state.resolve(KINDS, NOW, 2)) for _ in range(4)] == [2, 2, 1, 0]


# --- any history ---

NAMES = st.sampled_from(["vm1", "vm2", "vm3"])
OWNERS = st.sampled_from(["lb1", "lb2"])
VERSIONS = st.sampled_from("aaab")
SELECTORS = st.sampled_from(
    [{"a": ["1", "2"]}, {"a": ["1"]}, {"a": ["1"], "b": ["1"]}, {}, {"a": []}]
)
CHECKS = st.sampled_from([CHECK, CHECK, OTHER, None, BROKEN])
FAMILIES = st.sampled_from([None, None, ["IPv6"], ["IPv4", "IPv6"]])
LABELS = st.sampled_from([{"a": "1"}, {"a": "1", "b": "1"}, {"a": "2"}, {"b": "1"}, {}])
SELDOM = st.sampled_from([False] * 7 + [True])
ADDRESSES = st.lists(
    st.sampled_from(["10.0.0.1", "10.0.0.2", "2001:db8::1", "127.0.0.1", "nonsense"]), max_size=2
)


class AnyHistory(RuleBasedStateMachine):
    """Whatever facts and verdicts come, in any order and however often: the images are those of a
    model that looks at everything anew each time and knows no index."""

    def __init__(self):
        super().__init__()
        self.state = State(DEFAULTS, DUMMIES)
        self.lbs, self.vms = {}, {}
        self.synced = set()
        self.images = {}  # uid -> image, by the events alone
        self.verdicts = {}  # uid -> {(uid, address): (state, ready)}
        self.heard = {}
        self.clock = 0.0
        self.generation = 0

    @initialize(listed=st.sampled_from([True, True, True, False]))
    def begin(self, listed):
        """Most histories begin where something is there to be judged."""
        for vm in (machine("vm1", "10.0.0.1", uid="vm1-a", labels={"a": "1"}),):
            self.state.see_member(ref(vm), vm)
            self.vms["vm1"] = vm
        lb = balancer("lb1", uid="lb1-a", backend_server_selector={"a": ["1"]}, health_check=CHECK)
        self.state.see_balancer("lb1-a", lb)
        self.lbs["lb1-a"] = lb
        if listed:
            self.synced |= set(KINDS)
            self.settle(100)

    # --- facts ---

    @rule(
        name=OWNERS,
        version=VERSIONS,
        selector=SELECTORS,
        check=CHECKS,
        families=FAMILIES,
        deleting=SELDOM,
        settled=st.booleans(),
        kind=st.sampled_from([""] * 4 + ["vm"] * 4 + ["cluster"]),
    )
    def see_balancer(self, name, version, selector, check, families, deleting, settled, kind):
        self.generation += 1
        uid = f"{name}-{version}"
        for other in [u for u in self.lbs if u.startswith(name) and u != uid]:
            self.drop_balancer(other)
        lb = balancer(
            name,
            uid=uid,
            backend_server_selector=selector,
            health_check=check,
            ip_families=families,
            deleting=NOW if deleting else None,
            workload_type=kind,
            generation=self.generation,
        )
        self.state.see_balancer(uid, lb)
        self.lbs[uid] = lb
        if settled:
            self.settle(100)
        if deleting or kind == "cluster":
            self.forget(uid)

    @precondition(lambda self: self.lbs)
    @rule(data=st.data())
    def lose_balancer(self, data):
        self.drop_balancer(data.draw(st.sampled_from(sorted(self.lbs))))

    def drop_balancer(self, uid):
        self.state.see_balancer(uid, None)
        del self.lbs[uid]
        self.forget(uid)

    def forget(self, uid):
        for memory in (self.images, self.verdicts, self.heard):
            memory.pop(uid, None)

    @rule(
        name=NAMES,
        version=VERSIONS,
        labels=LABELS,
        addresses=ADDRESSES,
        deleting=SELDOM,
    )
    def see_machine(self, name, version, labels, addresses, deleting):
        vm = machine(
            name,
            *addresses,
            uid=f"{name}-{version}",
            labels=labels,
            deleting=NOW if deleting else None,
        )
        self.state.see_member(ref(vm), vm)
        self.vms[name] = vm

    @precondition(lambda self: self.vms)
    @rule(data=st.data())
    def lose_machine(self, data):
        name = data.draw(st.sampled_from(sorted(self.vms)))
        self.state.see_member(ref(self.vms.pop(name)), None)

    @precondition(lambda self: self.vms)
    @rule(data=st.data())
    def repeat_machine(self, data):
        vm = self.vms[data.draw(st.sampled_from(sorted(self.vms)))]
        self.state.see_member(ref(vm), vm)

    @rule(plural=st.sampled_from(KINDS))
    def complete(self, plural):
        self.synced.add(plural)
        self.state.see_complete()

    @precondition(lambda self: self.synced >= set(KINDS))
    @rule(sure=st.sampled_from([False] * 3 + [True]))
    def new_epoch(self, sure):
        if not sure:
            return
        self.synced.clear()

    # --- verdicts ---

    @precondition(lambda self: any(image.backends for image in self.images.values()))
    @rule(data=st.data())
    def judge(self, data):
        self.hear(data)

    @precondition(lambda self: any(image.backends for image in self.images.values()))
    @rule(data=st.data())
    def judge_more(self, data):
        for _ in range(3):
            self.hear(data)

    def hear(self, data):
        uid = data.draw(st.sampled_from(sorted(u for u, i in self.images.items() if i.backends)))
        keys = [(b.uid, b.address) for b in self.images[uid].backends] + [("gone", "10.0.0.9")]
        plan = read(self.lbs[uid], DEFAULTS)
        verdicts = []
        for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3)):
            step = data.draw(st.sampled_from([1.0, 1.0, 0.0, -1.0, -5.0]))
            self.clock += max(step, 0.0)
            at = self.clock + min(step, 0.0)
            stale, healthy = data.draw(SELDOM), data.draw(st.booleans())
            config = "stale" if stale else plan.config
            verdicts.append(Verdict(uid, *key, config, at, healthy, "why", NOW))
            if not stale and plan.checking == "on":
                self.expect_verdict(uid, key, at, healthy)
        for event in self.state.judge(verdicts, (), NOW):
            self.take(event)
        if plan.checking == "on":
            found = {(b.uid, b.address): (b.state, b.ready) for b in self.images[uid].backends}
            assert found == self.verdicts[uid]

    def expect_verdict(self, uid, key, at, healthy):
        known = self.verdicts[uid]
        if key in known and at > self.heard[uid].get(key, float("-inf")):
            self.heard[uid][key] = at
            known[key] = ("healthy", True) if healthy else ("unhealthy", False)

    # --- decisions ---

    @rule(limit=st.sampled_from([1, 100, 100]))
    def settle_rule(self, limit):
        self.settle(limit)

    def settle(self, limit):
        for event in self.state.resolve(self.synced, NOW + timedelta(seconds=1), limit):
            self.take(event)
            self.expect(event.owner.uid)
        if limit > 1:
            for uid, lb in self.lbs.items():
                if self.decidable(lb):
                    self.expect(uid)
                    self.compare(uid)

    def take(self, event):
        uid = event.owner.uid
        before = self.images.get(uid)
        assert event.revision == (before.revision + 1 if before else 1)
        if isinstance(event, BackendsResolved):
            assert (
                before is None
                or msgspec.structs.replace(event, at=before.at, revision=before.revision) != before
            ), "a decision that changes nothing"
            self.images[uid] = event
            return
        changed = {(c.uid, c.address): c for c in event.changes}
        backends = []
        for backend in before.backends:
            change = changed.pop((backend.uid, backend.address), None)
            if change is not None:
                backend = backend.after(change)
            backends.append(backend)
        assert not changed, "a change of a backend that is not there"
        assert event.healthy == sum(b.ready for b in backends)
        assert event.total == len(backends)
        self.images[uid] = msgspec.structs.replace(
            before,
            revision=event.revision,
            backends=backends,
            dummy=event.dummy,
            dummy6=event.dummy6,
            held=event.held,
        )

    def decidable(self, lb):
        if lb.metadata.deletion_timestamp or lb.spec.workload_type == "cluster":
            return False
        needs = {"loadbalancers"} | ({VMIS} if read(lb, DEFAULTS).vms else set())
        return needs <= self.synced

    def expect(self, uid):
        """The model: everything that matches now, each with the verdict that it had."""
        lb = self.lbs[uid]
        plan = read(lb, DEFAULTS)
        before = self.verdicts.get(uid, {})
        now = {}
        for vm in self.vms.values():
            found = member(vm)
            if found is None or not matches(plan.vms, found.labels):
                continue
            for family in plan.families:
                key = found.uid, found.address(family, "")
                if not key[1]:
                    continue
                if plan.checking == "off":
                    now[key] = ("unchecked", True)
                elif key in before:
                    state, ready = before[key]
                    now[key] = ("unknown" if state == "unchecked" else state, ready)
                else:
                    now[key] = ("unknown", False)
        self.verdicts[uid] = now
        heard = self.heard.get(uid, {})
        self.heard[uid] = {key: at for key, at in heard.items() if key in now}

    def compare(self, uid):
        image = self.images[uid]
        found = {(b.uid, b.address): (b.state, b.ready) for b in image.backends}
        assert found == self.verdicts[uid]
        order = [(b.namespace, b.name, b.address) for b in image.backends]
        assert order == sorted(order)
        stored = self.state.balancers[uid].image
        assert stored == msgspec.structs.replace(image, at=stored.at)

    @rule()
    def restart(self):
        """Memory is lost: state is what the facts and the stored images give."""
        images = [b.image for b in self.state.balancers.values() if b.image is not None]
        stored = [
            msgspec.json.decode(msgspec.json.encode(i), type=BackendsResolved) for i in images
        ]
        self.state = State(DEFAULTS, DUMMIES)
        for uid, lb in self.lbs.items():
            self.state.see_balancer(uid, lb)
        for vm in self.vms.values():
            self.state.see_member(ref(vm), vm)
        for image in stored:
            self.state.restore(image)
        for uid in self.state.dirty:
            self.state.dirty[uid] = False
        self.heard = {uid: {} for uid in self.heard}

    @invariant()
    def a_slice_always_has_a_ready_endpoint(self):
        for image in self.images.values():
            for family in image.families or ["IPv4"]:
                ready = any(
                    b.ready and (":" in b.address) == (family == "IPv6") for b in image.backends
                )
                dummy = image.dummy6 if family == "IPv6" else image.dummy
                assert bool(dummy) is not ready

    @invariant()
    def nothing_is_remembered_of_what_is_gone(self):
        assert self.state.balancers.keys() <= self.lbs.keys()
        assert len(self.state.members._wishes) <= len(self.lbs)


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[Health.too_slow, Health.filter_too_much],
)
