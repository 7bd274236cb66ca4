"""A running prober with every kind of backend, check and address."""

import asyncio
import contextlib

import msgspec
import pytest
from prometheus_client import REGISTRY

from schema import objects
from tests.system.prober_rig import DIAL_MAP, balancer, changed, machine, rig_of
from tests.waiting import eventually


@pytest.fixture
async def rig(nats_url, database_url):
    async with rig_of(nats_url, database_url) as rig:
        await rig.start(LBLEDGER_PROBER_DIAL_MAP=f"{DIAL_MAP},2001:db8::/120=::/120")
        yield rig


def listener(rig, **rest):
    return objects.Listener(name="http", port=80, backend_port=rig.port, **rest)


def check(rig, **rest):
    rest = {"failure_threshold": 2, "period_seconds": 1, "timeout_seconds": 1, **rest}
    return objects.HealthCheck(port=rig.port, **rest)


@contextlib.asynccontextmanager
async def web_server(address, port, answers):
    """An HTTP server whose answer is read from `answers` at each request."""

    async def serve(reader, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answers["now"])
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, address, port)
    yield
    server.close()
    await server.wait_closed()


async def test_6100_an_http_check_follows_the_application(rig):
    """The port is open all the time; what the application says decides."""
    lb = balancer(listeners=[listener(rig)], check=check(rig, protocol="HTTP", path="/hz"))
    answers = {"now": b"HTTP/1.1 503 Busy\r\n\r\n"}
    async with web_server("127.10.0.4", rig.port, answers):
        await rig.feed.seen(lb)
        await rig.feed.seen(machine("vm1", "10.0.0.4"))
        await rig.synced()
        image = await rig.until(states={"vm1": "unhealthy"})
        assert image.backends[0].reason == "HTTP status 503"
        answers["now"] = b"HTTP/1.1 200 OK\r\n\r\n"
        await rig.until(states={"vm1": "healthy"}, dummy="")
        codes = changed(lb, health_check=check(rig, protocol="HTTP", path="/hz", codes="204"))
        await rig.feed.seen(codes)
        image = await rig.until(states={"vm1": "unhealthy"})
        assert image.backends[0].reason == "HTTP status 200"


async def test_an_ipv6_load_balancer_checks_ipv6_backends(rig):
    """Its slice has IPv6 endpoints, and an IPv6 dummy while none is ready."""
    lb = balancer(listeners=[listener(rig)], check=check(rig), ip_families=["IPv6"])
    await rig.feed.seen(lb)
    await rig.feed.seen(machine("vm1", "10.0.0.4", "2001:db8::1"))
    await rig.synced()
    await rig.until(states={"vm1": "unhealthy"}, dummy="", dummy6="100::1")
    server = await asyncio.start_server(lambda r, w: w.close(), "::1", rig.port)
    image = await rig.until(states={"vm1": "healthy"}, dummy6="")
    assert image.backends[0].address == "2001:db8::1"
    server.close()


async def test_pods_and_plain_addresses_are_backends(rig):
    """Beside machines, in one slice, each checked; a finished pod is none."""
    lb = balancer(
        listeners=[listener(rig)],
        check=check(rig),
        backend_pod_selector={"app": ["pod"]},
        backends=[objects.ExplicitBackend(name="db", address="10.0.0.9")],
    )
    meta = objects.ObjectMeta(
        name="pod1", namespace="default", uid="uid-pod1", labels={"app": "pod"}
    )
    pod = objects.Pod(
        metadata=meta,
        spec=objects.PodSpec(node_name="n1"),
        status=objects.PodStatus(phase="Running", pod_ip="10.0.0.7"),
    )
    for address in ("127.10.0.4", "127.10.0.7", "127.10.0.9"):
        await rig.backends.answer(address, rig.port)
    for obj in (lb, pod, machine("vm1", "10.0.0.4")):
        await rig.feed.seen(obj)
    await rig.synced()
    image = await rig.until(ready=["db", "pod1", "vm1"], matched=3)
    assert [b.kind for b in image.backends] == ["Address", "Pod", "VirtualMachineInstance"]
    done = msgspec.structs.replace(
        pod, status=msgspec.structs.replace(pod.status, phase="Succeeded")
    )
    await rig.feed.seen(done)
    await rig.until(ready=["db", "vm1"], matched=2)


async def test_a_named_network_chooses_the_address(rig):
    """By a field, or by its annotation where the CRD has none."""
    notes = {"lbledger.io/backend-network": "nic1"}
    lb = balancer(listeners=[listener(rig)], annotations=notes)
    await rig.feed.seen(lb)
    await rig.feed.seen(machine("vm1", "10.0.0.4", "10.0.1.4"))
    await rig.synced()
    image = await rig.until(ready=["vm1"])
    assert image.backends[0].address == "10.0.1.4"
    await rig.feed.seen(changed(lb, backend_network="nic0"))
    await eventually(lambda: rig.image().backends[0].address == "10.0.0.4")


async def test_a_load_balancer_that_is_made_anew_starts_anew(rig):
    """A deletion and a creation under one name: another uid, the first revision, no old verdict."""
    await rig.backends.answer("127.10.0.4", rig.port)
    lb = balancer(listeners=[listener(rig)], check=check(rig))
    await rig.feed.seen(lb)
    await rig.feed.seen(machine("vm1", "10.0.0.4"))
    await rig.synced()
    await rig.until(ready=["vm1"])
    await rig.backends.refuse("127.10.0.4", rig.port)
    await rig.until(ready=[])
    await rig.feed.gone(lb)
    again = balancer(uid="uid-again", listeners=[listener(rig)], check=check(rig))
    await rig.feed.seen(again)
    image = await rig.until("again", states={"vm1": "unhealthy"})
    first = next(e for e in rig.log if e.owner.uid == "uid-again")
    assert (first.revision, first.backends[0].state) == (1, "unknown")
    assert image.owner.name == "web"


def network_of(kind, *cidrs):
    meta = objects.ObjectMeta(name="n1", uid="uid-n1")
    if kind == "pods":
        return objects.Node(metadata=meta, spec=objects.NodeSpec(pod_cidrs=list(cidrs)))
    return objects.ServiceCIDR(metadata=meta, spec=objects.ServiceCIDRSpec(cidrs=list(cidrs)))


@pytest.mark.parametrize("kind", ["pods", "services"])
async def test_a_dummy_within_a_network_of_the_cluster_is_told(rig, kind):
    """In the metrics and the log: it could be the address of a pod, or of a Service."""

    def told():
        return REGISTRY.get_sample_value("lbledger_prober_dummy_in_cluster_network")

    await rig.feed.seen(network_of(kind, "fd00:10:96::/112", "192.0.0.0/24"))
    await eventually(lambda: told() == 1)
    await rig.feed.seen(network_of(kind, "10.52.0.0/24"))
    await eventually(lambda: told() == 0)
    await rig.feed.seen(network_of(kind, "100::/64"))
    await eventually(lambda: told() == 1)
    await rig.feed.gone(network_of(kind))
    await eventually(lambda: told() == 0)
