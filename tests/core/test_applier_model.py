"""Whatever the order of facts, decisions, failures, edits and restarts: the same cluster.

A state machine drives the core against a model API server and a watcher that lags at will. At every
step the invariants hold; at the end everything is delivered and the cluster must equal what a few
lines of plain code derive from the last decisions alone.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from schema import names
from schema.subjects import ObjectRef
from services.applier.shapes import Announcing
from services.applier.targets import Options
from tests.core.applying import DUMMY, World, backend

NAMES = ("web", "db")
lbs = st.sampled_from(NAMES)
FORMS = (
    {},
    {"subresource": False},
    {"subresource": False, "prunes": True},
)


class Applier(RuleBasedStateMachine):
    @initialize(form=st.sampled_from(FORMS), announcer=st.sampled_from(["none", "kube-vip"]))
    def begin(self, form, announcer):
        self.world = World(Options(announcing=Announcing(announcer)), **form)
        self.ours = announcer == "none"
        self.owners = {}
        self.leases = {}
        self.images = {}
        self.repeats = []
        self.serial = 0

    # --- what happens ---

    @rule(name=lbs)
    def created(self, name):
        if name not in self.owners:
            self.owners[name] = self.world.balancer(name)

    @rule(name=lbs)
    def deleted(self, name):
        """With what hangs on it, as the garbage collector does."""
        owner = self.owners.pop(name, None)
        if owner is None:
            return
        self.images.pop(name, None)
        for plural in ("loadbalancers", "services", "endpointslices"):
            ref = ObjectRef(plural, "default", name)
            if ref in self.world.api.objects:
                self.world.api.put(ref, None)
        for lease, address in self.leases.pop(name, []):
            self.world.release(owner, lease, address)

    @rule(name=lbs, keep=st.booleans())
    def granted(self, name, keep):
        owner = self.owners.get(name)
        if owner is None:
            return
        self.serial += 1
        address = f"192.0.2.{self.serial % 250 + 1}"
        lease = self.world.grant(owner, address)
        if not keep:
            for old, old_address in self.leases.get(name, []):
                self.world.release(owner, old, old_address)
            self.leases[name] = []
        self.leases.setdefault(name, []).append((lease, address))

    @rule(name=lbs)
    def refused(self, name):
        owner = self.owners.get(name)
        if owner is not None and not self.leases.get(name):
            self.world.refuse(owner)

    @rule(name=lbs, ready=st.lists(st.booleans(), max_size=3), checked=st.booleans())
    def resolved(self, name, ready, checked):
        owner = self.owners.get(name)
        if owner is None:
            return
        vms = [
            backend(f"vm{i}", f"10.52.1.{i}", ready=up, state="healthy" if up else "unknown")
            for i, up in enumerate(ready)
        ]
        self.repeats.append(self.world.resolve(owner, *vms, checked=checked))
        self.images[name] = dict(enumerate(ready))

    @rule(name=lbs, number=st.integers(0, 2), ready=st.booleans())
    def verdict(self, name, number, ready):
        owner, image = self.owners.get(name), self.images.get(name, {})
        if owner is None or number not in image:
            return
        image[number] = ready
        vm = backend(f"vm{number}", f"10.52.1.{number}")
        dummy = "" if any(image.values()) else DUMMY
        self.world.verdict(owner, vm, ready, dummy=dummy)

    @rule()
    def restated(self):
        """The newest image of an owner is read again."""
        newest = {event.owner.uid: event for event in self.repeats}
        for event in newest.values():
            doc = self.world.state.owners.get(event.owner.uid)
            if doc and doc.backends and doc.backends.revision == event.revision:
                self.world.state.decide(event)

    # --- others, and trouble ---

    @rule(name=lbs, what=st.sampled_from(["labels", "type", "mode", "gone", "address"]))
    def meddled_with_service(self, name, what):
        ref = ObjectRef("services", "default", name)
        api = self.world.api
        if ref not in api.objects:
            return
        if what == "gone":
            api.put(ref, None)
        elif what == "mode":
            shown = (api.objects[ref].get("status") or {}).get("loadBalancer", {}).get("ingress")
            if shown:
                entries = [{**entry, "ipMode": "VIP"} for entry in shown]
                api.edit(ref, status={"loadBalancer": {"ingress": entries}})
        else:
            edits = {
                "labels": {"metadata": {"labels": {names.SERVICELB_LABEL: "false"}}},
                "type": {"spec": {"type": "ClusterIP"}},
                "address": {"spec": {"loadBalancerIP": "203.0.113.1"}},
            }
            api.edit(ref, **edits[what])

    @rule(name=lbs, gone=st.booleans())
    def meddled_with_slice(self, name, gone):
        ref = ObjectRef("endpointslices", "default", name)
        if ref in self.world.api.objects:
            if gone:
                self.world.api.put(ref, None)
            else:
                stranger = [{"addresses": ["10.9.9.9"], "conditions": {"ready": True}}]
                self.world.api.edit(ref, endpoints=stranger)

    @rule(name=lbs)
    def announced(self, name):
        """kube-vip publishes what the Service asks for."""
        ref = ObjectRef("services", "default", name)
        if self.ours or ref not in self.world.api.objects:
            return
        self._announce(ref)

    def _announce(self, ref):
        asked = self.world.api.objects[ref]["spec"].get("loadBalancerIP")
        entries = [{"ip": asked}] if asked else None
        self.world.api.edit(ref, status={"loadBalancer": {"ingress": entries}})

    @rule(code=st.sampled_from([409, 429, 503, 422]))
    def trouble_ahead(self, code):
        self.world.api.fail.append(code)

    @rule(count=st.integers(1, 4))
    def shown(self, count):
        self.world.deliver(count)

    @rule(name=lbs, plural=st.sampled_from(["services", "endpointslices"]))
    def deleted_unseen(self, name, plural):
        """An object of ours goes, and of what the watcher missed it will show what is there."""
        self.planned()
        ref = ObjectRef(plural, "default", name)
        if ref in self.world.api.objects:
            self.world.api.put(ref, None)
        self.world.relist()

    @rule(seconds=st.sampled_from([0.1, 1.0, 60.0]))
    def time_passed(self, seconds):
        self.world.wait(seconds)

    @rule()
    def planned(self):
        for entity in list(self.world.state.dirty)[:1]:
            self.world.step(entity)

    @rule()
    def restarted(self):
        self.world.restart()

    # --- what must hold ---

    @invariant()
    def safe(self):
        if not hasattr(self, "world"):
            return
        api = self.world.api
        for owner in self.owners.values():
            status = self.world.status(owner)
            conditions = {c.type: c for c in (status.conditions if status else None) or []}
            ready = conditions.get("Ready")
            if ready is not None and ready.status == "True":
                assert status.address
                assert status.allocated_address.ip
                assert conditions["AddressPublished"].status == "True"
                assert conditions["BackendsHealthy"].status == "True"
        for write in api.writes[-4:]:
            if write.target == "EndpointSlice" and write.verb == "apply":
                assert any(e["conditions"]["ready"] for e in write.body["endpoints"])

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        world.api.fail.clear()
        for _ in range(4):
            world.wait(2000)
            if not self.ours:
                for ref in [r for r in world.api.objects if r.plural == "services"]:
                    self._announce(ref)
        world.wait(2000)
        for name in NAMES:
            self._check(name)
        for uid in world.state.owners:
            world.state.touch(uid)
        assert world.wait(4000) == [], "what is as wanted is not written again"

    def _check(self, name):
        world, owner = self.world, self.owners.get(name)
        if owner is None:
            assert world.service(name) is None
            assert world.slice(name) is None
            return
        held = [address for _, address in self.leases.get(name, [])][-1:]
        image = self.images.get(name)
        service, found = world.service(name), world.slice(name)
        if image is None or (not held and service is None):
            return
        if held:
            assert service.spec.load_balancer_ip == held[0]
            assert [e.ip for e in service.status.load_balancer.ingress] == held
            assert world.status(owner).address == held[0]
            expected = [[f"10.52.1.{number}"] for number in image]
            dummy = [] if any(image.values()) else [[DUMMY]]
            assert [e.addresses for e in found.endpoints] == expected + dummy
            ready = [number for number, up in image.items() if up]
            shown = [e for e in found.endpoints if e.conditions.ready and e.addresses != [DUMMY]]
            assert [e.addresses for e in shown] == [[f"10.52.1.{number}"] for number in ready]
            assert (world.condition(owner).status == "True") == bool(ready)
        else:
            assert service.spec.load_balancer_ip == ""
            assert world.condition(owner).status == "False"


TestApplier = Applier.TestCase
TestApplier.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
