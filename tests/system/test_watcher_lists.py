"""Lists, kinds that come and go, and what is selected; a Kubernetes API on loopback, real NATS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from sandbox.child import free_port
from sandbox.kube import KubeServer
from sandbox.servers import NatsServer
from services.kit.bus import Bus
from services.kit.kube import Kube
from services.kit.runtime import Runtime
from services.watcher.main import EGRESS_LABEL, run
from tests.system.watcher_rig import (
    CONFIGMAP,
    CRD,
    LB,
    NODE,
    POD,
    SERVICE,
    SERVICE_CIDR,
    Watching,
    chain_is_whole,
    create,
    facts_of,
    install,
    load_balancer,
    log,
    merge,
    published,
    service,
    settings,
    watching,
    wipe,
)
from tests.waiting import eventually


@pytest.fixture
async def api() -> AsyncIterator[KubeServer]:
    async with KubeServer() as server:
        yield server


@pytest.fixture
def config(api: KubeServer, tmp_path: Path) -> Path:
    return api.write_kubeconfig(tmp_path / "kubeconfig")


@pytest.fixture
async def kube(config: Path) -> AsyncIterator[Kube]:
    async with await Kube.connect(str(config)) as client:
        yield client


def lose_history(api: KubeServer, plural: str) -> None:
    """What happens to a watch that was away for too long: it has to list anew."""
    api.compact()
    api.cut_watches("error", plural)


async def test_deletions_missed_while_away_report_38(
    api: KubeServer, kube: Kube, config: Path, nats_url: str
) -> None:
    """Another uid under the name: tombstone, then the new object. Vanished: a tombstone."""
    for name in ("web", "gone", "stays"):
        await create(kube, SERVICE, service(name))
    async with watching(nats_url, config) as running:
        await running.synced()
        api.faults.fail(verb="watch", path="/services", status=503, times=3)
        api.cut_watches("clean", "services")
        await wipe(kube, SERVICE, "default", "web", "gone")
        made = await create(kube, SERVICE, service("web"))
        await create(kube, SERVICE, service("brief"))
        await wipe(kube, SERVICE, "default", "brief")
        api.compact()

        await published(
            running.bus, SERVICE, "default", "web", "ServiceSeen", "ObjectGone", "ServiceSeen"
        )
        await published(running.bus, SERVICE, "default", "gone", "ServiceSeen", "ObjectGone")
        await published(running.bus, SERVICE, "default", "stays", "ServiceSeen")
        assert await facts_of(running.bus, SERVICE, "default", "brief") == []
        first, old, new = await facts_of(running.bus, SERVICE, "default", "web")
        assert old.event.uid == first.event.object.metadata.uid
        assert old.event.reason == "replaced"
        assert new.event.object.metadata.uid == made["metadata"]["uid"]
        (_, vanished) = await facts_of(running.bus, SERVICE, "default", "gone")
        assert vanished.event.reason == "vanished"
        chain_is_whole(await log(running.bus))


async def test_an_object_that_vanished_before_its_fact_was_out_report_38(
    api: KubeServer, kube: Kube, config: Path
) -> None:
    """ADDED is still queued when the list without the object begins: it ends as absent."""
    async with NatsServer() as nats, watching(nats.url, config) as running:
        await running.synced()
        await nats.kill()
        await create(kube, SERVICE, service("blip"))
        await eventually(lambda: REGISTRY.get_sample_value("lbledger_watcher_unsettled") == 1.0)
        api.faults.fail(verb="watch", path="/services", status=503, times=2)
        api.cut_watches("clean", "services")
        await wipe(kube, SERVICE, "default", "blip")
        api.compact()
        await eventually(lambda: not api.faults.pending)
        await nats.start()

        await published(running.bus, SERVICE, "default", "blip", "ServiceSeen", "ObjectGone")
        await running.stop()


async def test_the_marks_enclose_the_whole_list_report_7(
    api: KubeServer, kube: Kube, config: Path, nats_url: str
) -> None:
    """No finished mark before every page is published, however slow; what comes later is later."""
    for name in ("a", "b", "c"):
        await create(kube, SERVICE, service(name))
    api.faults.fail(verb="list", path="/services.*continue", latency=0.4, times=9)
    async with watching(nats_url, config, page_size=1) as running:
        await eventually(lambda: api.faults.counts["list", "services"] >= 2, 10)
        await create(kube, SERVICE, service("late"))
        await published(running.bus, SERVICE, "default", "late", "ServiceSeen")
        marks = await log(running.bus, "kube.sync.services")
        facts = {fact.subject.rpartition(".")[2]: fact for fact in await log(
            running.bus, "kube.services.>")}  # fmt: skip

    started, finished = marks
    assert (started.type, finished.type) == ("SyncStarted", "SyncFinished")
    assert finished.event.count == 4  # with the Service "kubernetes"
    listed = [facts[name].seq for name in ("a", "b", "c", "kubernetes")]
    assert started.seq < min(listed)
    assert max(listed) < finished.seq < facts["late"].seq


async def test_a_change_that_nobody_decides_by_is_no_fact(
    kube: Kube, config: Path, nats_url: str
) -> None:
    """Foreign annotations and managedFields change nothing; what a view holds does."""
    await create(kube, SERVICE, service("web"))
    async with watching(nats_url, config) as running:
        await running.synced()
        for i in range(3):
            noise = {"metadata": {"annotations": {"example.com/heartbeat": str(i)}}}
            await merge(kube, SERVICE, "default", "web", noise)
        await merge(kube, SERVICE, "default", "web", {"metadata": {"labels": {"a": "b"}}})
        await published(running.bus, SERVICE, "default", "web", "ServiceSeen", "ServiceSeen")


async def test_an_absent_kind_is_awaited(
    api: KubeServer, kube: Kube, config: Path, nats_url: str
) -> None:
    """A kind without CRD is complete and empty; installed later, it is followed at once."""
    async with watching(nats_url, config) as running:
        await running.synced()
        assert running.rt.health.ready
        marks = await log(running.bus, "kube.sync.loadbalancers")
        assert [(m.type, getattr(m.event, "absent", None)) for m in marks] == [
            ("SyncStarted", None),
            ("SyncFinished", True),
        ]
        await install(kube)
        await create(kube, LB, load_balancer("web"))
        await published(running.bus, LB, "default", "web", "LoadBalancerSeen")
        await eventually(_finished(running, "loadbalancers", absent=False), 10)


async def test_the_networks_of_services_are_followed(
    kube: Kube, config: Path, nats_url: str
) -> None:
    """The one that the cluster was born with, and one that is added and taken away."""
    body = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "ServiceCIDR",
        "metadata": {"name": "more"},
        "spec": {"cidrs": ["10.97.0.0/24"]},
    }
    async with watching(nats_url, config) as running:
        await running.synced()
        (first,) = await facts_of(running.bus, SERVICE_CIDR, "", "kubernetes")
        assert first.event.object.spec.cidrs == ["10.96.0.0/16", "fd00:10:96::/112"]
        await create(kube, SERVICE_CIDR, body)
        await wipe(kube, SERVICE_CIDR, "", "more")
        await published(running.bus, SERVICE_CIDR, "", "more", "ServiceCIDRSeen", "ObjectGone")


async def test_a_kind_that_is_removed_takes_its_objects_with_it(
    api: KubeServer, kube: Kube, config: Path, nats_url: str
) -> None:
    """Its objects end when discovery says that it is not installed, and not before."""
    await install(kube)
    await create(kube, LB, load_balancer("web"))
    async with watching(nats_url, config, watch_timeout_s=3.0) as running:
        await running.synced()
        # A server that answers 404 for a while without meaning it.
        api.faults.fail(verb="list", path="/loadbalancers", status=404, reason="NotFound", times=2)
        lose_history(api, "loadbalancers")
        await eventually(_finished(running, "loadbalancers", times=2), 15)
        await published(running.bus, LB, "default", "web", "LoadBalancerSeen")

        await kube.delete(CRD.path(name="loadbalancers.loadbalancer.harvesterhci.io"))
        await published(running.bus, LB, "default", "web", "LoadBalancerSeen", "ObjectGone")
        await eventually(_finished(running, "loadbalancers", absent=True), 15)


async def test_only_the_chosen_namespaces_are_read(kube: Kube, config: Path, nats_url: str) -> None:
    """Outside them nothing is seen, and what was known of there is not taken for gone."""
    for name in ("a", "b"):
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        await kube.create("/api/v1/namespaces", body)
    await create(kube, SERVICE, service("old", "b"))
    async with watching(nats_url, config) as running:
        await running.synced()
        await running.stop()
    await wipe(kube, SERVICE, "b", "old")
    async with watching(nats_url, config, namespaces=("a", "default")) as running:
        await running.synced(2)
        await create(kube, SERVICE, service("unseen", "b"))
        await create(kube, SERVICE, service("one", "a"))
        await create(kube, SERVICE, service("two", "default"))
        await create(kube, NODE, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n.x"}})
        await published(running.bus, SERVICE, "a", "one", "ServiceSeen")
        await published(running.bus, SERVICE, "default", "two", "ServiceSeen")
        await published(running.bus, NODE, "", "n.x", "NodeSeen")
        await published(running.bus, SERVICE, "b", "old", "ServiceSeen")
        assert await facts_of(running.bus, SERVICE, "b", "unseen") == []


async def test_pods_only_while_they_carry_the_egress_label(
    kube: Kube, config: Path, nats_url: str
) -> None:
    """A pod is seen with the label, gone without it, seen again with it."""
    path = POD.path("default", "p")
    async with watching(nats_url, config, selectors={"pods": "app=x"}) as running:
        await running.synced()
        await create(kube, POD, pod("p", app="x"))
        await create(kube, POD, pod("other", app="y", **{EGRESS_LABEL: "g"}))
        await merge(kube, POD, "default", "p", {"metadata": {"labels": {EGRESS_LABEL: "g"}}})
        await published(running.bus, POD, "default", "p", "PodSeen")
        await merge(kube, POD, "default", "p", {"metadata": {"labels": {EGRESS_LABEL: None}}})
        await published(running.bus, POD, "default", "p", "PodSeen", "ObjectGone")
        await merge(kube, POD, "default", "p", {"metadata": {"labels": {EGRESS_LABEL: "h"}}})
        await published(running.bus, POD, "default", "p", "PodSeen", "ObjectGone", "PodSeen")
        assert await facts_of(running.bus, POD, "default", "other") == []
        assert path == "/api/v1/namespaces/default/pods/p"


async def test_all_pods_where_they_can_be_backends(kube: Kube, config: Path, nats_url: str) -> None:
    """With the setting also those without the label; a selector narrows it down."""
    settings = {"all_pods": True, "selectors": {"pods": "app=x"}}
    async with watching(nats_url, config, **settings) as running:
        await running.synced()
        await create(kube, POD, pod("other", app="y"))
        await create(kube, POD, pod("p", app="x"))
        await published(running.bus, POD, "default", "p", "PodSeen")
        assert await facts_of(running.bus, POD, "default", "other") == []


async def test_one_config_map_and_no_other(kube: Kube, config: Path, nats_url: str) -> None:
    """kube-system/kubevip is a fact; no other ConfigMap is, in whatever namespace."""
    async with watching(nats_url, config) as running:
        await running.synced()
        for namespace, name in (("kube-system", "other"), ("default", "kubevip"),
                                ("kube-system", "kubevip")):  # fmt: skip
            body = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"cidr-global": "x"}}
            metadata = {"name": name, "namespace": namespace}
            await create(kube, CONFIGMAP, {**body, "metadata": metadata})
        await published(running.bus, CONFIGMAP, "kube-system", "kubevip", "ConfigMapSeen")
        found = await log(running.bus, "kube.configmaps.>")
        assert [fact.subject for fact in found] == ["kube.configmaps.kube-system.kubevip"]


async def test_a_rotated_token_needs_no_restart_report_37(
    api: KubeServer, tmp_path: Path, nats_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """After a rotation one 401 at most, then lists and watches go on; no token in the output."""
    old = api.token
    token_file = tmp_path / "token"
    token_file.write_text(old + "\n")
    path = tmp_path / "kubeconfig"
    path.write_text(
        "{apiVersion: v1, kind: Config, current-context: c,"
        f" clusters: [{{name: c, cluster: {{server: '{api.url}'}}}}],"
        f" users: [{{name: u, user: {{tokenFile: '{token_file}'}}}}],"
        " contexts: [{name: c, context: {cluster: c, user: u}}]}"
    )
    async with await Kube.connect(str(path)) as kube, watching(nats_url, path) as running:
        await running.synced()
        new = api.rotate_token("second-token-of-this-test")
        token_file.write_text(new)
        api.cut_watches("clean")
        await create(kube, SERVICE, service("web"))
        await published(running.bus, SERVICE, "default", "web", "ServiceSeen")
        await eventually(lambda: running.rt.health.ready, 10)
        assert not running.task.done()
    output = "".join(capfd.readouterr())
    assert old not in output
    assert new not in output


async def test_start_order_does_not_matter(tmp_path: Path) -> None:
    """Neither bus, kubeconfig nor API at first: it waits, not ready, and then does its work."""
    config, later, port = tmp_path / "kubeconfig", tmp_path / "later", free_port()
    async with KubeServer(port=port, token="t", state=tmp_path / "api") as api:
        api.write_kubeconfig(later)
    nats = NatsServer(port=free_port())
    rt = Runtime.create("watcher", settings(f"nats://127.0.0.1:{nats.port}", config))
    task = asyncio.create_task(run(rt))
    try:
        await eventually(lambda: "bus" in str(rt.health.report()))
        await nats.start()
        await eventually(lambda: "no such file" in str(rt.health.report()), 15)
        later.rename(config)
        await eventually(lambda: "Network" in str(rt.health.report()), 15)
        assert not rt.health.ready
        async with KubeServer(port=port, token="t", state=tmp_path / "api"):
            await eventually(lambda: rt.health.ready, 30)
            bus = await Bus.connect(nats.url, name="test")
            assert await log(bus, "kube.namespaces.>")
            await bus.close()
    finally:
        rt.stop.set()
        await asyncio.wait_for(task, 10)
        await rt.close()
        await nats.stop()


async def test_an_api_server_that_goes_away_and_returns(tmp_path: Path, nats_url: str) -> None:
    """Not ready meanwhile; afterwards what changed is seen, and what did not is not said again."""
    port, folder = free_port(), tmp_path / "api"
    async with KubeServer(port=port, token="t", state=folder) as api:
        config = api.write_kubeconfig(tmp_path / "kubeconfig")
        async with await Kube.connect(str(config)) as kube:
            await create(kube, SERVICE, service("web"))
            await create(kube, SERVICE, service("gone"))
        async with watching(nats_url, config) as running:
            await running.synced()
            await api.stop()
            await eventually(lambda: not running.rt.health.ready, 10)
            async with KubeServer(port=port, token="t", state=folder):
                async with await Kube.connect(str(config)) as kube:
                    await wipe(kube, SERVICE, "default", "gone")
                await published(
                    running.bus, SERVICE, "default", "gone", "ServiceSeen", "ObjectGone"
                )
                await published(running.bus, SERVICE, "default", "web", "ServiceSeen")
                await eventually(lambda: running.rt.health.ready, 20)
                await running.stop()


def pod(name: str, **labels: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": labels},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }


def _finished(running: Watching, plural: str, *, absent: bool = False, times: int = 1):  # type: ignore[no-untyped-def]
    """Whether so many finished marks of a kind, of that sort, are there."""

    async def there() -> bool:
        marks = await log(running.bus, f"kube.sync.{plural}")
        found = [m for m in marks if m.type == "SyncFinished" and m.event.absent == absent]
        return len(found) >= times

    return there
