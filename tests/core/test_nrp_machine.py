"""The core against the sandbox's provider, with faults, in any order: it ends at exact equality."""

from datetime import UTC, datetime

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.nrp_sync import core
from services.nrp_sync import provider as port
from services.nrp_sync.batches import Limits
from services.nrp_sync.sources import Name
from services.nrp_sync.state import SOURCES
from services.nrp_sync.steps import Retrying
from tests.core.nrp_sandbox import SandboxProvider
from tests.core.nrp_world import POLICY, World, node, pod, service, slice_of

NODES = ("n1", "n2", "n3")
SERVICES = ("a", "b", "c")
GATEWAYS = ("egress-a", "egress-b")
ADDRESSES = [f"10.0.0.{n}" for n in range(1, 7)] + ["2001:db8::1", "2001:db8::2"]
GONE = datetime(2026, 11, 30, tzinfo=UTC)

endpoints = st.dictionaries(st.sampled_from(ADDRESSES), st.sampled_from(NODES), max_size=5)


class NrpMachine(RuleBasedStateMachine):
    """Facts, ticks, answers, faults and restarts as they come."""

    def __init__(self):
        super().__init__()
        policy = POLICY._replace(
            limits=Limits(addresses=3), retrying=Retrying(tries=4, cooldown=20)
        )
        self.world = World(policy, provider=SandboxProvider())
        self.count = 0

    def fresh(self):
        self.count += 1
        return self.count

    @initialize(alone=st.booleans())
    def begin(self, alone):
        """Mostly from a cluster at work, so that there is something to go wrong."""
        if alone:
            return
        world = self.world
        world.see(node("n1", "172.16.0.1", "2001:db8:f::1"), node("n2", "172.16.0.11"))
        for number, name in enumerate(SERVICES[:2]):
            world.see(service(name, self.fresh()))
            world.see(
                slice_of(f"{name}-0", name, [(a, "n1") for a in ADDRESSES[:3]], number=500 + number)
            )
        for number in range(2):
            world.see(pod(f"p{number}", self.fresh(), GATEWAYS[0], ADDRESSES[number]))
        world.run()
        world.check_equal()

    # --- the cluster ---

    @rule(name=st.sampled_from(NODES), last=st.integers(1, 3), six=st.booleans())
    def node_seen(self, name, last, six):
        number = NODES.index(name) * 10 + last
        extra = [f"2001:db8:f::{number}"] if six else []
        self.world.see(node(name, f"172.16.0.{number}", *extra))

    @rule(name=st.sampled_from(NODES))
    def node_gone(self, name):
        view = self.world.objects.get(("nodes", Name("", name)))
        if view is not None:
            self.world.gone(view)

    @rule(name=st.sampled_from(SERVICES), port_number=st.integers(80, 82))
    def service_seen(self, name, port_number):
        old = self.world.objects.get(("services", Name("default", name)))
        if old is not None and old.metadata.deletion_timestamp is not None:
            return
        number = int(old.metadata.uid[-12:]) if old is not None else self.fresh()
        made = service(name, number, ports=[(port_number, 8080)])
        if old is not None:
            made = msgspec.structs.replace(made, metadata=old.metadata)
        self.world.see(made)

    @rule(name=st.sampled_from(SERVICES))
    def service_retyped(self, name):
        old = self.world.objects.get(("services", Name("default", name)))
        if old is not None and old.metadata.deletion_timestamp is None:
            spec = msgspec.structs.replace(old.spec, type="ClusterIP", load_balancer_class="")
            self.world.see(msgspec.structs.replace(old, spec=spec))

    @rule(name=st.sampled_from(SERVICES), forced=st.booleans())
    def service_deleted(self, name, forced):
        self.deleted(self.world.objects.get(("services", Name("default", name))), forced)

    @rule(name=st.sampled_from(SERVICES), part=st.integers(0, 1), ends=endpoints)
    def slice_seen(self, name, part, ends):
        number = 500 + SERVICES.index(name) * 2 + part
        self.world.see(slice_of(f"{name}-{part}", name, list(ends.items()), number=number))

    @rule(name=st.sampled_from(SERVICES), part=st.integers(0, 1))
    def slice_gone(self, name, part):
        view = self.world.objects.get(("endpointslices", Name("default", f"{name}-{part}")))
        if view is not None:
            self.world.gone(view)

    @rule(
        number=st.integers(0, 3),
        gateway=st.sampled_from(GATEWAYS),
        addresses=st.lists(st.sampled_from(ADDRESSES), max_size=2, unique=True),
        node_name=st.sampled_from(NODES),
        phase=st.sampled_from(["Running", "Running", "Pending", "Succeeded"]),
    )
    def pod_seen(self, number, gateway, addresses, node_name, phase):
        name = f"p{number}"
        old = self.world.objects.get(("pods", Name("default", name)))
        if old is not None and old.metadata.deletion_timestamp is not None:
            return
        made = pod(name, self.fresh(), gateway, *addresses, node_name=node_name, phase=phase)
        if old is not None:
            meta = msgspec.structs.replace(
                made.metadata, uid=old.metadata.uid, finalizers=old.metadata.finalizers
            )
            made = msgspec.structs.replace(made, metadata=meta)
        self.world.see(made)

    @rule(number=st.integers(0, 3), forced=st.booleans())
    def pod_deleted(self, number, forced):
        self.deleted(self.world.objects.get(("pods", Name("default", f"p{number}"))), forced)

    def deleted(self, view, forced):
        """With a finalizer an object stays, terminating; without, or by force, it is gone."""
        if view is None:
            return
        if forced or not view.metadata.finalizers:
            self.world.gone(view)
            return
        meta = msgspec.structs.replace(view.metadata, deletion_timestamp=GONE)
        self.world.see(msgspec.structs.replace(view, metadata=meta))

    @rule(data=st.data())
    def repeated_fact(self, data):
        """A fact that is delivered again changes nothing."""
        if self.world.objects:
            key = data.draw(st.sampled_from(sorted(self.world.objects)))
            self.world.see(self.world.objects[key])

    # --- everybody else ---

    @rule()
    def applier(self):
        self.world.apply_finalizers()

    @rule(steps=st.integers(1, 6), answering=st.booleans())
    def work(self, steps, answering):
        """Go to the next moment at which something is due, some times over."""
        for _ in range(steps):
            self.world.apply_finalizers()
            self.world.advance()
            if answering:
                self.world.answer_all()

    @rule(seconds=st.sampled_from([0.0, 0.05, 0.2, 1.0, 5.0, 40.0, 400.0]))
    def tick(self, seconds):
        self.world.tick(seconds)

    @precondition(lambda self: self.world.flying)
    @rule(data=st.data())
    def answered(self, data):
        self.world.answer(data.draw(st.sampled_from(self.world.flying)))

    @precondition(lambda self: self.world.flying)
    @rule(
        data=st.data(),
        cls=st.sampled_from(
            [
                port.Throttled,
                port.Conflict,
                port.PreconditionFailed,
                port.NotFound,
                port.Invalid,
                port.QuotaExceeded,
                port.AuthFailed,
                port.Unreachable,
                port.Unreadable,
            ]
        ),
        retry_after=st.sampled_from([None, 3.0]),
    )
    def refused(self, data, cls, retry_after):
        """It failed, and was surely not applied."""
        request = data.draw(st.sampled_from(self.world.flying))
        self.world.answer(request, cls(request.verb, "injected", retry_after=retry_after))

    @precondition(lambda self: self.world.flying)
    @rule(data=st.data(), applied=st.booleans())
    def unanswered(self, data, applied):
        """Nobody knows whether it was applied."""
        request = data.draw(st.sampled_from(self.world.flying))
        self.world.answer(request, port.Unknown(request.verb, "injected"), applied=applied)

    @rule(data=st.data())
    def killed(self, data):
        """The process dies; its requests reach the provider before, after, out of order, never."""
        world = self.world
        for request in data.draw(st.permutations(world.flying)):
            match data.draw(st.sampled_from(["before", "after", "never"])):
                case "before":
                    world.reach(request)
                case "after":
                    delay = data.draw(st.floats(0.0, 0.9)) * world.policy.orphan_grace
                    world.late.append((world.now + delay, request))
        world.restart()

    @rule()
    def listed_anew(self):
        """A new epoch: until its lists are complete nothing may be taken away."""
        core.new_epoch(self.world.state)
        self.world.settle()

    @rule(plural=st.sampled_from(SOURCES))
    def list_finished(self, plural):
        self.world.synced(plural)

    @rule(
        data=st.data(),
        what=st.sampled_from(["service", "address", "location", "balancer", "foreign"]),
    )
    def edited_by_hand(self, data, what):
        """Somebody changes the provider behind our back; a reading finds it."""
        self.world.edit(what, lambda choices: data.draw(st.sampled_from(sorted(choices))))

    def teardown(self):
        self.world.synced()
        self.world.run()
        if not self.world.checks:
            self.world.state.read_wanted = True
            self.world.run()
        self.world.check_equal()


TestNrpMachine = NrpMachine.TestCase
TestNrpMachine.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
