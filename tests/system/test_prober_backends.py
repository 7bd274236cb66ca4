"""A running prober with real NATS, Postgres and sockets: which backends answer, what follows."""

from datetime import UTC, datetime

import pytest

from schema import events, objects
from tests.system.prober_rig import balancer, changed, machine, rig_of

DUMMY = "192.0.0.8"
NOW = datetime(2026, 11, 30, tzinfo=UTC)


@pytest.fixture
async def rig(nats_url, database_url):
    async with rig_of(nats_url, database_url) as rig:
        await rig.start()
        yield rig


def checked(rig, **values):
    """A TCP check of the rig's port: every second, failing after two."""
    values = {"failure_threshold": 2, "period_seconds": 1, "timeout_seconds": 1, **values}
    return objects.HealthCheck(port=rig.port, **values)


def web(rig, **values):
    listener = objects.Listener(name="http", port=80, backend_port=rig.port)
    return balancer(listeners=[listener], **values)


async def test_without_a_check_every_backend_with_an_address_is_ready(rig):
    """S2a, S2b: backends join and leave, the dummy stands in only while there is none."""
    lb = web(rig)
    await rig.feed.seen(lb)
    await rig.synced()
    image = await rig.until(ready=[], dummy=DUMMY, matched=0)
    assert image.ports == [events.SlicePort(name="http", protocol="TCP", port=rig.port)]

    await rig.feed.seen(machine("vm1", "10.0.0.4"))
    await rig.until(ready=["vm1"], dummy="", states={"vm1": "unchecked"})
    await rig.feed.seen(machine("vm2", "10.0.0.5"))
    await rig.until(ready=["vm1", "vm2"])
    await rig.feed.gone(machine("vm2", "10.0.0.5"))
    await rig.until(ready=["vm1"], dummy="")
    await rig.feed.gone(machine("vm1", "10.0.0.4"))
    await rig.until(ready=[], dummy=DUMMY)


async def test_nothing_is_decided_before_the_first_complete_list(rig):
    """A restart on a partial view never empties a slice: decisions wait for the sync marks."""
    await rig.feed.seen(web(rig))
    await rig.feed.seen(machine("vm1", "10.0.0.4"))
    await rig.feed.synced("loadbalancers", "pods")
    await rig.feed.seen(machine("vm2", "10.0.0.5"))
    await rig.feed.synced("virtualmachineinstances")
    await rig.until(ready=["vm1", "vm2"])
    assert len(rig.log) == 1
    assert rig.causes[0].startswith("e1:")


async def test_report_24_a_stopping_or_relabelled_vm_leaves_at_once(rig):
    """Out at the deletionTimestamp, not only at the deletion; out when a label stops matching."""
    await rig.feed.seen(web(rig))
    await rig.feed.seen(machine("vm1", "10.0.0.4"))
    await rig.feed.seen(machine("vm2", "10.0.0.5"))
    await rig.synced()
    await rig.until(ready=["vm1", "vm2"])
    await rig.feed.seen(machine("vm1", "10.0.0.4", deletion_timestamp=NOW))
    await rig.until(ready=["vm2"])
    await rig.feed.seen(machine("vm2", "10.0.0.5", labels={"app": "other"}))
    await rig.until(ready=[], dummy=DUMMY, matched=0)


async def test_edited_labels_and_selectors_move_backends(rig):
    """S2d, S2e: a label that comes to match joins, an edited selector replaces the backends."""
    lb = web(rig)
    await rig.feed.seen(lb)
    await rig.feed.seen(machine("vm1", "10.0.0.4", labels={"app": "db"}))
    await rig.feed.seen(machine("vm2", "10.0.0.5"))
    await rig.synced()
    await rig.until(ready=["vm2"])
    await rig.feed.seen(machine("vm1", "10.0.0.4"))
    await rig.until(ready=["vm1", "vm2"])
    await rig.feed.seen(machine("vm1", "10.0.0.4", labels={"app": "db"}))
    await rig.until(ready=["vm2"])
    await rig.feed.seen(changed(lb, backend_server_selector={"app": ["db"]}))
    await rig.until(ready=["vm1"])


async def test_one_failing_backend_of_two_leaves_alone(rig):
    """S4a, S4b, S4d: it goes after its threshold, the other stays, and it comes back."""
    for number in (1, 2):
        await rig.backends.answer(f"127.10.0.{number}", rig.port)
    await rig.feed.seen(web(rig, check=checked(rig)))
    await rig.feed.seen(machine("vm1", "10.0.0.1"))
    await rig.feed.seen(machine("vm2", "10.0.0.2"))
    await rig.synced()
    await rig.until(ready=["vm1", "vm2"])
    await rig.backends.refuse("127.10.0.1", rig.port)
    await rig.until(ready=["vm2"], dummy="")
    await rig.backends.answer("127.10.0.1", rig.port)
    await rig.until(ready=["vm1", "vm2"])
    assert rig.states("vm2") == ["unknown", "healthy"]


async def test_a_change_is_one_event_with_many_backends(rig):
    """B7: one external change of a load balancer with 200 backends is one decision."""
    await rig.feed.seen(web(rig))
    vms = [machine(f"vm{i:03}", f"10.0.{i // 100}.{i % 100 + 1}") for i in range(200)]
    await rig.feed.send_all([events.VirtualMachineInstanceSeen(at=NOW, object=vm) for vm in vms])
    await rig.synced()
    await rig.until(matched=200)
    before = len(rig.log)
    await rig.feed.gone(vms[77])
    await rig.until(matched=199)
    await rig.feed.seen(vms[78])  # nothing new about it
    await rig.feed.seen(machine("vm200", "10.0.9.9"))
    await rig.until(matched=200)
    assert len(rig.log) == before + 2


async def test_report_69_a_load_balancer_may_come_before_its_backends(rig):
    """Only the dummy at first; the backend joins later without a touch of the load balancer."""
    await rig.synced()
    await rig.feed.seen(web(rig, selector={"vmName": ["vm9"]}))
    await rig.until(matched=0, dummy=DUMMY, names=[])
    await rig.feed.seen(machine("vm9", "10.0.0.9", labels={"vmName": "vm9"}))
    await rig.until(matched=1, dummy="", ready=["vm9"])


async def test_report_17_only_what_answers_gets_traffic_and_the_node_is_never_exposed(rig):
    """S4a to S4f: refuse, answer, stop, check off and on again; one event swaps dummy and backend.

    The rig checks at every event that a ready endpoint is there.
    """
    lb = web(rig, check=checked(rig))
    await rig.feed.seen(lb)
    await rig.feed.seen(machine("vm1", "10.0.0.4"))
    await rig.synced()
    await rig.until(states={"vm1": "unhealthy"}, dummy=DUMMY, checked=True)

    await rig.backends.answer("127.10.0.4", rig.port)
    await rig.until(states={"vm1": "healthy"}, ready=["vm1"], dummy="")

    await rig.backends.refuse("127.10.0.4", rig.port)
    image = await rig.until(states={"vm1": "unhealthy"}, ready=[], dummy=DUMMY)
    assert image.backends[0].reason == "connection refused"

    off = changed(lb, health_check=None)
    await rig.feed.seen(off)
    await rig.until(states={"vm1": "unchecked"}, ready=["vm1"], dummy="", checked=False)

    await rig.feed.seen(changed(off, health_check=checked(rig)))
    await rig.until(states={"vm1": "unhealthy"}, ready=[], dummy=DUMMY)
    assert rig.states("vm1") == [
        *("unknown", "unhealthy", "healthy", "unhealthy"),
        *("unchecked", "unknown", "unhealthy"),
    ]
    on_again = [e for e in rig.log if isinstance(e, events.BackendsResolved)][-1]
    assert [b.ready for b in on_again.backends] == [True], "it was live when the check came on"


async def test_report_19_a_new_member_is_unknown_and_never_down_before_its_checks(rig):
    """b3 goes from unknown to healthy after its successes; nobody else is touched."""
    for number in (1, 2, 3):
        await rig.backends.answer(f"127.10.0.{number}", rig.port)
    await rig.feed.seen(web(rig, check=checked(rig, success_threshold=2)))
    await rig.feed.seen(machine("b1", "10.0.0.1"))
    await rig.feed.seen(machine("b2", "10.0.0.2"))
    await rig.synced()
    await rig.until(ready=["b1", "b2"])
    await rig.feed.seen(machine("b3", "10.0.0.3"))
    await rig.until(ready=["b1", "b2", "b3"])
    assert rig.states("b3") == ["unknown", "healthy"]
    assert rig.states("b1") == ["unknown", "healthy"]


@pytest.mark.parametrize(
    ("port", "told"),
    [
        (8088, "spec.healthCheck.port is 8088: not a backend port"),
        (53, "spec.healthCheck.port is 53: a TCP check on a UDP-only backend port"),
    ],
    ids=["report-66-front-port", "report-66-udp-port"],
)
async def test_a_check_on_a_port_that_no_backend_serves_by_tcp(rig, port, told):
    """The field, its value and the choices are named, and nothing is probed."""
    listeners = [
        objects.Listener(name="http", port=8088, backend_port=rig.port),
        objects.Listener(name="dns", port=53, backend_port=53, protocol="UDP"),
    ]
    await rig.backends.answer("127.10.0.4", rig.port)
    check = objects.HealthCheck(port=port, period_seconds=1)
    await rig.feed.seen(balancer(listeners=listeners, check=check))
    await rig.feed.seen(machine("vm1", "10.0.0.4"))
    # Another one, to know when checks would long have been made.
    await rig.feed.seen(web(rig, name="other", check=checked(rig, success_threshold=3)))
    await rig.synced()
    await rig.until("other", ready=["vm1"])
    seen = rig.backends.connections["127.10.0.4"]
    image = await rig.until(reason="InvalidHealthCheck", states={"vm1": "unknown"}, dummy=DUMMY)
    assert image.message.startswith(told)
    assert image.message.endswith(f"choose one of {rig.port}")
    assert seen >= 3


async def test_a_restart_never_flaps(rig, nats_url, database_url):
    """SIGKILL: verdicts are taken up from the rows, and only real changes are published."""
    for number in (1, 2):
        await rig.backends.answer(f"127.10.0.{number}", rig.port)
    await rig.feed.seen(web(rig, check=checked(rig)))
    for number in (1, 2, 3):
        await rig.feed.seen(machine(f"b{number}", f"10.0.0.{number}"))
    await rig.synced()
    states = {"b1": "healthy", "b2": "healthy", "b3": "unhealthy"}
    await rig.until(states=states)
    for replica in rig._replicas:
        await replica.close()
    first = await rig.spawn()
    before = len(rig.log)
    await rig.backends.refuse("127.10.0.2", rig.port)
    await rig.until(states=states | {"b2": "unhealthy"})
    assert len(rig.log) == before + 1, "a restart published something else"

    first.kill()
    await rig.backends.answer("127.10.0.3", rig.port)
    await rig.spawn()
    await rig.until(states={"b1": "healthy", "b2": "unhealthy", "b3": "healthy"})
    assert len(rig.log) == before + 2
