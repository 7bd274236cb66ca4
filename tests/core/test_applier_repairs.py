"""What the applier does about others: hands, other controllers, refusals of the API server."""

from datetime import timedelta

import pytest

from schema.subjects import ObjectRef
from services.applier.planning import plan
from services.applier.shapes import Announcing
from services.applier.targets import CONTESTED_REPAIRS, Options
from tests.core.applying import LISTENERS, World, backend, said

SERVICE = ObjectRef("services", "default", "web")
SLICE = ObjectRef("endpointslices", "default", "web")


@pytest.fixture
def ready():
    world = World()
    owner = world.balancer()
    world.grant(owner, "192.0.2.10")
    world.resolve(owner, backend())
    world.wait(1)
    assert world.condition(owner).status == "True"
    return world, owner


EDITS = {
    "slice-endpoints": (SLICE, {"endpoints": []}, ["EndpointSlice"]),
    "slice-ready": (
        SLICE,
        {"endpoints": [{"addresses": ["10.52.1.7"], "conditions": {"ready": False}}]},
        ["EndpointSlice"],
    ),
    "slice-ports": (SLICE, {"ports": [{"name": "x", "port": 1}]}, ["EndpointSlice"]),
    "slice-labels": (SLICE, {"metadata": {"labels": None}}, ["EndpointSlice"]),
    "slice-owner": (SLICE, {"metadata": {"ownerReferences": None}}, ["EndpointSlice"]),
    "service-labels": (SERVICE, {"metadata": {"labels": None}}, ["Service"]),
    "service-owner": (SERVICE, {"metadata": {"ownerReferences": None}}, ["Service"]),
    "service-type": (SERVICE, {"spec": {"type": "ClusterIP"}}, ["Service"]),
    "service-address": (SERVICE, {"spec": {"loadBalancerIP": "192.0.2.99"}}, ["Service"]),
    "service-port": (
        SERVICE,
        {"spec": {"ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": 1}]}},
        ["Service"],
    ),
    "service-selector": (SERVICE, {"spec": {"selector": {"app": "x"}}}, ["Service"]),
    "service-more-ports": (
        SERVICE,
        {
            "spec": {
                "ports": [
                    {"name": "a", "protocol": "TCP", "port": 22, "targetPort": 22, "foreign": 1},
                    {"name": "http", "protocol": "TCP", "port": 80, "targetPort": 8080},
                ]
            }
        },
        ["Service"],
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_report_31_an_edit_by_hand_is_undone_in_one_write(ready, edit):
    """Whatever part of a Service or slice of ours somebody changes, one write puts it right."""
    world, _ = ready
    ref, parts, targets = EDITS[edit]
    before = world.api.view(ref)
    world.api.edit(ref, **parts)
    assert world.api.view(ref) != before
    assert said(world.run()) == targets
    after = world.api.view(ref)
    assert after.spec == before.spec if ref is SERVICE else after.endpoints == before.endpoints
    assert after.metadata.labels == before.metadata.labels
    assert after.metadata.owner_references == before.metadata.owner_references


@pytest.mark.parametrize("ref", [SERVICE, SLICE], ids=["service", "slice"])
def test_report_31_a_deleted_object_is_made_again(ready, ref):
    """Label and owner intact, and the load balancer is Ready as before."""
    world, owner = ready
    before = world.api.view(ref)
    world.api.put(ref, None)
    world.wait(1)
    after = world.api.view(ref)
    assert after.metadata.labels == before.metadata.labels
    assert after.metadata.owner_references == before.metadata.owner_references
    assert world.condition(owner).status == "True"


@pytest.mark.parametrize("ref", [SERVICE, SLICE], ids=["service", "slice"])
def test_report_31_what_came_and_went_between_two_looks_of_the_watcher_is_made_again(ref):
    """No fact ever shows an object that was deleted while the watcher was away."""
    world = World()
    owner = world.balancer()
    world.run()
    world.grant(owner, "192.0.2.10")
    world.resolve(owner, backend())
    world.run(show=False)
    world.api.put(ref, None)
    world.relist()
    world.wait(10)
    assert world.api.view(ref) is not None
    assert world.condition(owner).status == "True"


def test_an_object_that_nobody_shows_is_asked_for_ever_more_rarely():
    """While the watcher is away, what we made stays as it is and costs a few requests an hour."""
    world = World()
    owner = world.balancer()
    world.run()
    world.grant(owner, "192.0.2.10")
    world.resolve(owner, backend())
    world.run(show=False)
    made, seen = len(world.api.writes), world.slice()
    end = world.now + timedelta(hours=1)
    while due := [at for at in world.later.values() if at <= end]:
        world.now = max(world.now, min(due))
        for entity in [entity for entity, at in world.later.items() if at <= world.now]:
            del world.later[entity]
            world.state.touch(entity)
        world.run(show=False)
    assert world.slice() == seen
    assert len(world.api.writes) - made < 60


def test_report_31_a_conflict_is_read_again_and_written_once(ready):
    """A 409 on a stale copy: the object is read, the plan made anew, one write ends it."""
    world, owner = ready
    world.api.edit(SLICE, endpoints=[{"addresses": ["10.52.1.7"], "conditions": {"ready": False}}])
    world.api.fail.append(409)
    writes = world.run()
    assert said(writes) == ["EndpointSlice", "EndpointSlice"]
    assert world.slice().endpoints[0].conditions.ready is True
    assert world.condition(owner).status == "True"


def test_a_stale_fact_is_not_taken_for_a_change(ready):
    """A fact from before our own write, shown after it, leads to no second write."""
    world, owner = ready
    world.api.edit(SLICE, endpoints=[])
    world.api.edit(SLICE, ports=[])
    world.resolve(owner, backend(), backend("vm2", "10.52.1.8"))
    world.run(show=False)
    for _ in range(2):
        world.deliver(1)
        assert world.run(show=False) == []
    assert world.wait(1) == []
    assert len(world.slice().endpoints) == 2


def test_a_late_answer_does_not_hide_a_newer_fact(ready):
    """An edit that the watcher showed before the answer to our write came is still undone."""
    world, owner = ready
    world.resolve(owner, backend(), backend("vm2", "10.52.1.8"))
    made = plan(world.state, owner.uid, world.now)
    (write,) = [w for w in made.writes if w.target == "EndpointSlice"]
    outcome = world.api.perform(write, world.now)
    world.api.edit(SLICE, endpoints=[])
    world.deliver()
    world.state.settle(outcome)
    world.wait(1)
    assert len(world.slice().endpoints) == 2


def test_report_62_foreign_fields_in_the_ingress_are_no_difference(ready):
    """Twenty times another controller adds ipMode and ports to our entry: no write of ours."""
    world, _ = ready
    for port in range(20):
        entry = {"ip": "192.0.2.10", "ipMode": "VIP", "ports": [{"port": port, "protocol": "UDP"}]}
        world.api.edit(SERVICE, status={"loadBalancer": {"ingress": [entry]}})
        assert world.run() == []


def test_report_62_another_writer_of_the_address_is_named_and_not_fought_for_ever(ready):
    """Bounded retries, ever more slowly, a Conflict in Ready; and calm when it stops."""
    world, owner = ready
    first = len(world.api.writes)
    for _ in range(600):
        world.api.edit(SERVICE, status={"loadBalancer": {"ingress": [{"ip": "203.0.113.9"}]}})
        world.wait(1)
    fights = [w for w in world.api.writes[first:] if w.target == "Service/status"]
    assert CONTESTED_REPAIRS <= len(fights) <= 15
    assert len(world.api.writes) - first <= 45, "status.address follows, and no more"
    assert world.condition(owner).reason == "Conflict"
    assert "another controller keeps changing" in world.condition(owner).message

    world.wait(3600)
    assert world.condition(owner).status == "True"
    assert world.service().status.load_balancer.ingress[0].ip == "192.0.2.10"


def test_report_62_host_names_of_others_are_kept(ready):
    """An entry with a host name only is not ours; it stays when our address changes."""
    world, owner = ready
    entries = [{"ip": "192.0.2.10"}, {"hostname": "lb.example.org"}]
    world.api.edit(SERVICE, status={"loadBalancer": {"ingress": entries}})
    assert world.run() == []
    world.grant(owner, "192.0.2.11")
    world.wait(1)
    shown = world.service().status.load_balancer.ingress
    assert [(e.ip, e.hostname) for e in shown] == [("192.0.2.11", ""), ("", "lb.example.org")]


@pytest.mark.parametrize("kind", ["services", "endpointslices"])
def test_an_object_of_our_name_that_is_not_ours_is_never_touched(kind):
    """NameConflict names it; when it goes, the load balancer comes up."""
    world = World()
    spec = {"type": "ClusterIP", "ports": [{"port": 80}]}
    foreign = world.create(kind, "web", spec, addressType="IPv4", endpoints=[], ports=[])
    before = world.api.objects[foreign.ref]
    owner = world.balancer()
    world.grant(owner, "192.0.2.10")
    world.resolve(owner, backend())
    world.wait(60)
    assert world.api.objects[foreign.ref] == before
    assert world.condition(owner).reason == "NameConflict"
    assert "default/web" in world.condition(owner).message
    if kind == "services":
        assert world.slice() is None

    world.api.put(foreign.ref, None)
    world.wait(1)
    assert world.condition(owner).status == "True"


def test_a_foreign_object_that_appears_between_is_not_overwritten():
    """The create is refused where the name was taken since the last fact."""
    world = World()
    owner = world.balancer()
    world.grant(owner, "192.0.2.10")
    world.resolve(owner, backend())
    world.deliver()
    foreign = world.create("services", "web", {"type": "ClusterIP", "ports": [{"port": 80}]})
    before = dict(world.api.objects[foreign.ref])
    world.run(show=False)
    world.wait(1)
    assert world.api.objects[foreign.ref] == before
    assert world.condition(owner).reason == "NameConflict"


def test_the_former_service_is_waited_for():
    """A Service of the load balancer before, which the garbage collector has not reached yet."""
    world = World()
    old = {"apiVersion": "v1", "kind": "LoadBalancer", "name": "web", "uid": "gone"}
    service = world.create(
        "services", "web", {"type": "LoadBalancer"}, metadata={"ownerReferences": [old]}
    )
    owner = world.balancer()
    world.grant(owner, "192.0.2.10")
    world.resolve(owner, backend())
    world.wait(2)
    assert world.condition(owner).reason == "WaitingForRemoval"
    world.api.put(service.ref, None)
    world.wait(1)
    assert world.condition(owner).status == "True"


def test_an_invalid_object_is_named_and_not_tried_again_until_it_changes():
    """422: one try, a condition with the server's words, no hot loop; a new spec is tried."""
    world = World()
    owner = world.balancer()
    world.grant(owner, "192.0.2.10")
    world.resolve(owner, backend("vm1", "127.0.0.1"))
    world.deliver()
    world.api.fail.extend([422, 422])
    world.wait(300)
    assert said(world.api.writes) == ["EndpointSlice", "LoadBalancer/status", "Service"]
    assert world.condition(owner).reason == "Invalid"
    told = world.condition(owner).message
    assert told.startswith("fail to create service, error: refused with 422")

    world.api.edit(owner.ref, spec={"listeners": [{**LISTENERS[0], "backendPort": 9}]})
    world.resolve(owner, backend())
    world.wait(5)
    assert world.condition(owner).status == "True"


def test_a_busy_server_is_given_the_time_it_asks_for():
    """429: not before Retry-After, and then it works."""
    world = World()
    owner = world.balancer(workloadType="cluster")
    world.grant(owner, "192.0.2.10")
    world.api.fail.append(429)
    assert len(world.run()) == 1
    assert world.wait(2.5) == []
    assert said(world.wait(1)) == ["LoadBalancer/status"]


def test_an_owner_that_the_server_says_is_gone_is_done():
    """404 on a status: no retry, no complaint; the watcher's word ends it."""
    world = World()
    owner = world.balancer(workloadType="cluster")
    world.deliver()
    world.grant(owner, "192.0.2.10")
    world.api.put(owner.ref, None)
    writes = world.run(show=False)
    assert len(writes) == 1
    assert world.wait(600) == []


def test_wiped_status_is_restored_from_the_documents(ready):
    """A client that saves YAML without status (no subresource) loses nothing."""
    world = World(subresource=False)
    owner = world.balancer()
    world.grant(owner, "192.0.2.10")
    world.resolve(owner, backend())
    world.wait(1)
    before = world.status(owner)
    world.api.edit(owner.ref, status=None)
    assert said(world.wait(1)) == ["LoadBalancer/status"]
    after = world.status(owner)
    assert after.allocated_address == before.allocated_address
    assert [c.last_transition_time for c in after.conditions] == [
        c.last_transition_time for c in before.conditions
    ]


def test_at_every_instant_a_slice_has_a_ready_endpoint_and_stands_before_the_ingress():
    """[report-17] Checked after every single write of a life with failures, edits and a move."""
    world = World(Options(announcing=Announcing("none")))

    def safe():
        service = world.service()
        published = service and service.status and service.status.load_balancer
        if published and published.ingress:
            assert world.slice() is not None
        if world.slice() is not None:
            assert any(e.conditions.ready for e in world.slice().endpoints)

    world.checks.append(safe)
    owner = world.balancer()
    vm = backend(ready=False, state="unknown")
    world.grant(owner, "192.0.2.10")
    world.api.fail.extend([0, 503])  # the Service stands, the slice not yet
    world.resolve(owner, vm, checked=True)
    world.wait(5)
    for up in (True, False, True):
        world.verdict(owner, vm, up)
        world.api.fail.append(503)
        world.wait(5)
    world.resolve(owner)
    world.wait(5)
    world.grant(owner, "198.51.100.7", pool="p2")
    world.wait(5)
    assert world.condition(owner).reason == "NoBackendMatched"
