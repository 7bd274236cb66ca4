"""Faults that are our own change no endpoint: servers gone, a replica gone, a network gone."""

import asyncio
import json

import pytest

from schema import objects
from schema.events import BackendsResolved, HealthChanged
from services.kit.migrate import upgrade_async
from tests.system.prober_rig import SECOND_S, balancer, machine, rig_of
from tests.waiting import eventually


def checked(rig, name, **values):
    values = {"failure_threshold": 2, "period_seconds": 1, "timeout_seconds": 1, **values}
    return balancer(
        name,
        selector={"lb": [name]},
        listeners=[objects.Listener(name="http", port=80, backend_port=rig.port)],
        check=objects.HealthCheck(port=rig.port, **values),
    )


async def populate(rig, balancers, each, **check):
    """Load balancers lb1.. with backends lb1-1.. that all answer and are all healthy."""
    names = {}
    for number in range(1, balancers + 1):
        lb = f"lb{number}"
        names[lb] = [f"{lb}-{part}" for part in range(1, each + 1)]
        await rig.feed.seen(checked(rig, lb, **check))
        for part, name in enumerate(names[lb], 1):
            await rig.backends.answer(f"127.10.{number}.{part}", rig.port)
            await rig.feed.seen(machine(name, f"10.0.{number}.{part}", labels={"lb": lb}))
    await rig.synced()
    for lb, backends in names.items():
        await rig.until(lb, ready=backends)
    return names


def unready_events(rig, since=0):
    """Everything published since that took a backend away."""
    found = []
    for event in rig.log[since:]:
        if isinstance(event, HealthChanged):
            found += [c for c in event.changes if not c.ready]
        elif isinstance(event, BackendsResolved):
            found += [b for b in event.backends if not b.ready]
    return found


async def parts(replica):
    return replica.rt.health.report()["parts"]


@pytest.mark.parametrize(
    "which", ["postgres", "nats"], ids=["report-21-postgres", "report-21-nats"]
)
async def test_an_outage_of_our_servers_is_no_failure_of_members(
    which, nats_server, postgres_server
):
    """Nothing goes down while a server is gone; a real failure meanwhile is told afterwards."""
    await upgrade_async(postgres_server.url)
    async with rig_of(nats_server.url, postgres_server.url) as rig:
        replica = await rig.start(
            LBLEDGER_PROJECTOR_BEAT_S="0.1", LBLEDGER_PROJECTOR_EFFECTS_DEADLINE_S="0.5"
        )
        await populate(rig, 5, 2)
        before = len(rig.log)
        server = postgres_server if which == "postgres" else nats_server
        await server.kill()

        async def degraded():
            return not replica.rt.health.ready

        await eventually(degraded, timeout=20, message="readiness does not tell")
        await rig.backends.refuse("127.10.1.1", rig.port)
        await asyncio.sleep(50 * SECOND_S)  # many periods of checks during the outage
        assert len(rig.log) == before
        await server.start()
        await rig.until("lb1", ready=["lb1-2"], timeout=30)
        await eventually(lambda: replica.rt.health.ready, timeout=20)
        assert {c.uid for c in unready_events(rig, before)} == {"uid-lb1-1"}


@pytest.mark.parametrize("threshold", [2])
async def test_everything_failing_at_once_is_held_and_said(nats_url, database_url, threshold):
    """The prober has lost its network: no endpoint changes, each load balancer says why, and after
    it only what really fails goes down."""
    async with rig_of(nats_url, database_url) as rig:
        replica = await rig.start()
        names = await populate(rig, 4, 2, failure_threshold=threshold)
        before = len(rig.log)
        everywhere = [f"127.10.{number}.{part}" for number in range(1, 5) for part in (1, 2)]
        await rig.backends.refuse_all(everywhere, rig.port)
        for lb, backends in names.items():
            image = await rig.until(lb, ready=backends, dummy="")
            await eventually(lambda lb=lb: rig.image(lb).held, message=f"{lb} does not tell")
            assert "within one period" in rig.image(lb).held
        assert unready_events(rig, before) == []
        await eventually(lambda: not replica.rt.health.ready)

        everywhere.remove("127.10.2.1")
        await rig.backends.answer_all(everywhere, rig.port)
        await rig.until("lb2", ready=["lb2-2"], held="")
        for lb, backends in names.items():
            image = await rig.until(lb, held="")
            assert len([b for b in image.backends if b.ready]) == len(backends) - (lb == "lb2")
        assert {c.uid for c in unready_events(rig, before)} == {"uid-lb2-1"}
        await eventually(lambda: replica.rt.health.ready)


async def test_a_small_installation_is_acted_on(nats_url, database_url):
    """S4c: all two backends of the only load balancer fail, and that is what is published."""
    async with rig_of(nats_url, database_url) as rig:
        await rig.start()
        await populate(rig, 1, 2)
        await rig.backends.refuse("127.10.1.1", rig.port)
        await rig.backends.refuse("127.10.1.2", rig.port)
        await rig.until("lb1", ready=[], dummy="192.0.0.8", held="")


async def test_one_poisoned_load_balancer_does_not_hold_up_the_others(nats_url, database_url):
    """Bad thresholds, ports, selectors, protocols and addresses: said there, others go on."""
    async with rig_of(nats_url, database_url) as rig:
        await rig.start()
        bad = [
            objects.LoadBalancerSpec(backend_server_selector={"app": []}),
            objects.LoadBalancerSpec(listeners=[objects.Listener(port=-1)]),
            objects.LoadBalancerSpec(listeners=[objects.Listener(port=1, protocol="X")]),
            objects.LoadBalancerSpec(health_check=objects.HealthCheck(port=99)),
            objects.LoadBalancerSpec(backends=[objects.ExplicitBackend(name="x", address="y")]),
            objects.LoadBalancerSpec(ip_families=["IPv9"]),
        ]
        for number, spec in enumerate(bad):
            meta = objects.ObjectMeta(
                name=f"bad{number}", namespace="default", uid=f"uid-bad{number}"
            )
            await rig.feed.seen(objects.LoadBalancer(metadata=meta, spec=spec))
        subject = "kube.loadbalancers.default.broken"
        await rig.feed.raw(subject, json.dumps({"type": "LoadBalancerSeen.v1"}).encode())
        await populate(rig, 1, 1)
        for number in range(len(bad)):
            image = await rig.until(f"bad{number}", dummy="192.0.0.8")
            assert image.reason.startswith("Invalid")
            assert "spec." in image.message
