"""What the stream holds through restarts, outages, losses, and with two watchers at once."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sandbox.kube import KubeServer
from sandbox.servers import NatsServer
from schema import events, subjects
from services.kit.bus import Bus, StreamMissing
from services.kit.kube import AlreadyExists, Kube
from tests.infra import Server
from tests.system.watcher_rig import (
    CONFIGMAP,
    POOL,
    SERVICE,
    SLICE,
    Fact,
    chain_is_whole,
    create,
    facts_of,
    install,
    log,
    merge,
    published,
    service,
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


async def labelled(kube: Kube, name: str, color: str) -> None:
    await merge(kube, SERVICE, "default", name, {"metadata": {"labels": {"color": color}}})


async def says_the_truth(bus: Bus, kube: Kube) -> bool:
    """The last fact of every Service is what the API holds, and of no other."""
    body = msgspec.json.decode(await kube.get(SERVICE.path()))
    truth = {
        (o["metadata"]["uid"], o["metadata"].get("labels", {}).get("color")) for o in body["items"]
    }
    last = {fact.subject: fact for fact in await log(bus, "kube.services.>")}
    said = set()
    for fact in last.values():
        if fact.type == "ServiceSeen":
            metadata = fact.event.object.metadata
            said.add((metadata.uid, (metadata.labels or {}).get("color")))
    assert said == truth
    return True


def epochs(found: list[Fact]) -> list[str]:
    """The epochs that were begun, in order, without repetitions of a mark."""
    return list(dict.fromkeys(f.event.epoch for f in found if f.type == "EpochStarted"))


async def test_a_restart_says_only_what_changed(kube: Kube, config: Path, nats_url: str) -> None:
    """From the bus alone: same epoch, nothing unchanged again, changes and tombstones."""
    for name in ("same", "changed", "gone"):
        await create(kube, SERVICE, service(name))
    async with watching(nats_url, config) as running:
        await running.synced()
        await running.stop()
    await labelled(kube, "changed", "blue")
    await wipe(kube, SERVICE, "default", "gone")
    async with watching(nats_url, config) as running:
        await running.synced(2)
        await published(running.bus, SERVICE, "default", "same", "ServiceSeen")
        await published(running.bus, SERVICE, "default", "changed", "ServiceSeen", "ServiceSeen")
        await published(running.bus, SERVICE, "default", "gone", "ServiceSeen", "ObjectGone")
        found = await log(running.bus)
    assert len(epochs(found)) == 1
    assert {fact.headers[subjects.HEADER_EPOCH] for fact in found} == set(epochs(found))
    chain_is_whole(found)


async def test_the_bus_goes_away_and_keeps_its_store_report_39a(
    kube: Kube, config: Path, nats_server: Server
) -> None:
    """What changes meanwhile is published afterwards, in the same epoch; readiness shows it."""
    async with watching(nats_server.url, config) as running:
        await running.synced()
        await create(kube, SERVICE, service("before"))
        await published(running.bus, SERVICE, "default", "before", "ServiceSeen")
        await nats_server.halt()
        await eventually(lambda: not running.rt.health.ready, 10)
        await create(kube, SERVICE, service("during"))
        await labelled(kube, "before", "blue")
        await nats_server.start()
        await eventually(lambda: running.rt.health.ready, 20)
        await published(running.bus, SERVICE, "default", "during", "ServiceSeen")
        await published(running.bus, SERVICE, "default", "before", "ServiceSeen", "ServiceSeen")
        found = await log(running.bus)
    assert len(epochs(found)) == 1
    chain_is_whole(found)


async def test_the_bus_returns_empty_report_39b(
    kube: Kube, config: Path, nats_server: Server
) -> None:
    """A new epoch with a reason, and everything anew under it, without a restart."""
    await create(kube, SERVICE, service("web"))
    async with watching(nats_server.url, config) as running:
        await running.synced()
        (old,) = epochs(await log(running.bus))
        await nats_server.restart(wipe=True)
        await running.synced()
        await create(kube, SERVICE, service("later"))
        await published(running.bus, SERVICE, "default", "web", "ServiceSeen")
        await published(running.bus, SERVICE, "default", "later", "ServiceSeen")
        found = await log(running.bus)
    (new,) = epochs(found)
    assert new != old
    began = next(fact.event for fact in found if fact.type == "EpochStarted")
    assert began.reason
    assert all(fact.headers[subjects.HEADER_EPOCH] == new for fact in found if fact.seq > 1)
    chain_is_whole(found)


async def test_a_lost_tail_begins_an_epoch(kube: Kube, config: Path, tmp_path: Path) -> None:
    """The store comes back as it was earlier: a new epoch, every object said again under it."""
    store, copy = tmp_path / "nats", tmp_path / "copy"
    async with NatsServer(state_dir=store) as nats:
        await create(kube, SERVICE, service("web"))
        async with watching(nats.url, config) as running:
            await running.synced()
            await nats.halt()
            await asyncio.to_thread(shutil.copytree, store, copy)
            await nats.start()
            for color in ("red", "blue", "green"):
                await labelled(kube, "web", color)
            await published(running.bus, SERVICE, "default", "web", *["ServiceSeen"] * 4)
            await nats.kill()
            await asyncio.to_thread(shutil.rmtree, store)
            await asyncio.to_thread(copy.rename, store)
            await nats.start()

            async def two() -> bool:
                return len(epochs(await log(running.bus))) == 2

            await eventually(two, 20)
            await published(running.bus, SERVICE, "default", "web", "ServiceSeen", "ServiceSeen")
            await eventually(lambda: says_the_truth(running.bus, kube), 15)
            found = await log(running.bus)
            await running.stop()
    old, new = epochs(found)
    mark = next(f for f in found if f.type == "EpochStarted" and f.event.epoch == new)
    assert mark.event.previous == old
    assert "lost" in mark.event.reason
    again = [f for f in found if f.subject.startswith("kube.services.") and f.seq > mark.seq]
    assert {fact.headers[subjects.HEADER_EPOCH] for fact in again} == {new}
    assert len({fact.subject for fact in again}) == 2
    chain_is_whole(found)


async def test_two_watchers_agree(api: KubeServer, kube: Kube, config: Path, nats_url: str) -> None:
    """Each change is one fact, whoever is quicker; one of them may die at any time."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(watching(nats_url, config))
        second = await stack.enter_async_context(watching(nats_url, config))
        await first.synced(2)
        for i in range(30):
            await create(kube, SERVICE, service(f"s{i}"))
            await labelled(kube, f"s{i // 2}", f"c{i}")
        await eventually(lambda: says_the_truth(first.bus, kube), 15)
        await first.crash()
        for i in range(30):
            if i % 3:
                await labelled(kube, f"s{i}", "last")
            else:
                await wipe(kube, SERVICE, "default", f"s{i}")
        await eventually(lambda: says_the_truth(second.bus, kube), 15)
        found = await log(second.bus)
        assert not second.task.done()
    assert len(epochs(found)) == 1
    chain_is_whole(found)
    said = [
        (fact.subject, fact.type, fact.headers.get(subjects.HEADER_DIGEST))
        for fact in found
        if fact.subject.startswith("kube.services.")
    ]
    assert len(said) == len(set(said))  # no color came twice, so no fact did


async def test_a_stale_watchers_word_is_corrected(kube: Kube, config: Path, nats_url: str) -> None:
    """A fact older than the truth, published by somebody else, does not stay the last one."""
    await create(kube, SERVICE, service("web"))
    async with watching(nats_url, config) as running:
        await running.synced()
        (old,) = await facts_of(running.bus, SERVICE, "default", "web")
        await labelled(kube, "web", "blue")
        await published(running.bus, SERVICE, "default", "web", "ServiceSeen", "ServiceSeen")
        await say_again(running.bus, old)
        await published(running.bus, SERVICE, "default", "web", *["ServiceSeen"] * 4)
        await eventually(lambda: says_the_truth(running.bus, kube), 15)
        chain_is_whole(await log(running.bus))


async def say_again(bus: Bus, fact: Fact, **headers: str) -> None:
    """Publish a message as another watcher would, after what is there."""
    publisher = bus.publisher("KUBE")
    kept = {k: v for k, v in fact.headers.items() if k.startswith("Lb-")}
    msg_id = f"{fact.headers[subjects.HEADER_MSG_ID]}:{len(headers)}:stale"
    await publisher.publish(fact.subject, fact.message.data, {**kept, **headers}, msg_id=msg_id)
    await publisher.close()


async def test_an_epoch_of_another_watcher_is_taken_over(
    kube: Kube, config: Path, nats_url: str
) -> None:
    """Somebody else began an epoch: everything is said under that one; no third one is begun."""
    await create(kube, SERVICE, service("web"))
    async with watching(nats_url, config) as running:
        await running.synced()
        state = await running.bus.stream_state("KUBE")
        began = events.EpochStarted(
            at=datetime.now(UTC), epoch="theirs", reason="test", created=state.created
        )
        publisher = running.bus.publisher("KUBE")
        headers = {subjects.HEADER_EPOCH: "theirs", subjects.HEADER_TYPE: events.tag_of(began)}
        await publisher.publish(
            subjects.EPOCH_SUBJECT, events.encode(began), headers, msg_id="theirs"
        )
        await publisher.close()
        await running.synced(2)
        await published(running.bus, SERVICE, "default", "web", "ServiceSeen", "ServiceSeen")
        found = await log(running.bus)
    assert epochs(found)[1:] == ["theirs"]
    last = {fact.subject: fact for fact in found}
    assert {fact.headers[subjects.HEADER_EPOCH] for fact in last.values()} == {"theirs"}
    chain_is_whole(found)


async def test_everything_is_said_again_slowly(kube: Kube, config: Path, nats_url: str) -> None:
    """Unchanged facts, the epoch and the marks return as they were under new ids; no tombstone."""
    for name in ("a", "b", "gone"):
        await create(kube, SERVICE, service(name))
    async with watching(nats_url, config, republish_s=1.5) as running:
        await running.synced()
        await wipe(kube, SERVICE, "default", "gone")

        async def repeated() -> list[Fact]:
            return [f for f in await log(running.bus) if ":again" in f.headers["Nats-Msg-Id"]]

        async def all_of_them() -> bool:
            found = {fact.subject for fact in await repeated()}
            wanted = {"kube.epoch", "kube.sync.services", "kube.sync.loadbalancers"}
            return wanted | {f"kube.services.default.{name}" for name in "ab"} <= found

        await eventually(all_of_them, 20)
        await running.stop()
        found = await log(running.bus)
        again = {f.seq for f in await repeated()}
    chain_is_whole(found)
    for name in "ab":
        said = [f for f in found if f.subject == f"kube.services.default.{name}"]
        assert len({f.message.data for f in said}) == 1
        assert len({f.headers["Nats-Msg-Id"] for f in said}) == len(said)
    assert [f.type for f in found if f.subject == "kube.services.default.gone"][-1] == "ObjectGone"
    assert not [f for f in found if f.seq in again and f.type == "ObjectGone"]
    assert len(epochs(found)) == 1


async def test_somebody_elses_messages_do_no_harm_report_44(
    kube: Kube, config: Path, nats_url: str
) -> None:
    """Junk on our subjects, at start and in the middle of work: the facts come after it."""
    await create(kube, SERVICE, service("web"))
    await create(kube, SERVICE, service("late"))
    bus = await Bus.connect(nats_url, name="junk")
    async with watching(nats_url, config) as running:
        await running.synced()
        await running.stop()
    publisher = bus.publisher("KUBE")
    for number, data in enumerate((b"", b"\xff\xfe", b"null", b"x" * 900_000)):
        for subject in ("kube.services.default.web", "kube.a.b", "kube.epoch", "kube.sync.services",
                        "kube.services.default.my_lb.x"):  # fmt: skip
            await publisher.publish(subject, data, {}, msg_id=f"junk {number} {subject}")
    async with watching(nats_url, config) as running:
        mark = (await bus.stream_state("KUBE")).last_seq

        async def last(name: str) -> Any:
            message = await bus.last("KUBE", f"kube.services.default.{name}")
            assert message is not None
            assert message.seq > mark
            return events.decode(message.data)

        assert isinstance(await eventually(lambda: last("web"), 15), events.ServiceSeen)
        assert isinstance(await eventually(lambda: last("late"), 15), events.ServiceSeen)
        await eventually(lambda: running.rt.health.ready, 15)
        await publisher.publish("kube.services.default.late", b"\xff", {}, msg_id="junk again")
        mark = (await bus.stream_state("KUBE")).last_seq
        await labelled(kube, "late", "blue")
        assert isinstance(await eventually(lambda: last("late"), 15), events.ServiceSeen)
        assert not running.task.done()
    await publisher.close()
    await bus.close()


async def test_facts_over_the_limit_of_the_bus_report_36(
    api: KubeServer, kube: Kube, config: Path
) -> None:
    """A smaller form that says what it left out; where there is none, an ObjectUnfit and a dead
    letter that name size and limit. Never silence."""
    await install(kube, "ippools")
    async with (
        NatsServer(max_payload=64 * 1024) as nats,
        watching(nats.url, config) as running,
    ):
        await running.synced()
        pool = {
            "apiVersion": "loadbalancer.harvesterhci.io/v1beta1",
            "kind": "IPPool",
            "metadata": {"name": "p"},
            "spec": {"ranges": [{"subnet": "198.18.0.0/15"}]},
        }
        await create(kube, POOL, pool)
        history = {f"198.18.{i // 250}.{i % 250}": f"default/lb-{i}" for i in range(4000)}
        status = {"status": {"total": 9, "available": 7, "allocatedHistory": history}}
        await kube.patch(POOL.path(name="p"), status, subresource="status")
        endpoints = [
            {"addresses": [f"10.{i // 250}.{i % 250}.{n}" for n in range(1, 40)]}
            for i in range(200)
        ]
        await create(kube, SLICE, {
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": "s", "namespace": "default"}, "endpoints": endpoints,
        })  # fmt: skip
        await create(kube, CONFIGMAP, {
            "apiVersion": "v1", "kind": "ConfigMap", "data": {"cidr-global": "x" * 100_000},
            "metadata": {"name": "kubevip", "namespace": "kube-system"},
        })  # fmt: skip
        await published(running.bus, POOL, "", "p", "IPPoolSeen", "IPPoolSeen")
        (_, reduced) = await facts_of(running.bus, POOL, "", "p")
        assert reduced.event.omitted == ["status.allocatedHistory"]
        assert reduced.event.object.status.available == 7
        await published(running.bus, SLICE, "default", "s", "EndpointSliceSeen")
        (slim,) = await facts_of(running.bus, SLICE, "default", "s")
        assert slim.event.omitted == ["endpoints[].addresses[1:]"]
        assert len(slim.event.object.endpoints) == 200
        await published(running.bus, CONFIGMAP, "kube-system", "kubevip", "ObjectUnfit")
        (unfit,) = await facts_of(running.bus, CONFIGMAP, "kube-system", "kubevip")
        assert "65536" in unfit.event.problem
        letter = await eventually(lambda: running.bus.last("LB", "lb.dead.watcher"), 10)
        assert b"65536" in letter.data
        # The same again says nothing new: relist all.
        api.compact()
        api.cut_watches("error")
        await running.synced(2, "configmaps", "ippools")
        await published(running.bus, CONFIGMAP, "kube-system", "kubevip", "ObjectUnfit")
        await published(running.bus, POOL, "", "p", "IPPoolSeen", "IPPoolSeen")
        await running.stop()


async def test_a_stop_while_the_bus_is_away_is_quick(
    kube: Kube, config: Path, nats_server: Server
) -> None:
    """Facts that can't be sent do not hold the process; the next start publishes them."""
    async with watching(nats_server.url, config) as running:
        await running.synced()
        await nats_server.halt()
        await create(kube, SERVICE, service("web"))
        async with asyncio.timeout(9.5):
            await running.stop()
        await nats_server.start()
    async with watching(nats_server.url, config) as running:
        await published(running.bus, SERVICE, "default", "web", "ServiceSeen")
        await running.stop()


async def last_seq(bus: Bus) -> int:
    try:
        return (await bus.stream_state("KUBE")).last_seq
    except StreamMissing:
        return 0


class Process:
    """The watcher as a process, to be killed."""

    def __init__(self, nats_url: str, config: Path) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("LBLEDGER_")}
        self._env = env | {
            "LBLEDGER_NATS_URL": nats_url,
            "LBLEDGER_KUBE_KUBECONFIG": str(config),
            "LBLEDGER_HEALTH_PORT": "-1",
            "LBLEDGER_WATCHER_CHECK_S": "0.3",
        }
        self._command = [sys.executable, "-m", "services.cli", "watcher"]

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, env=self._env, stderr=subprocess.DEVNULL)


async def test_killed_at_any_moment_the_log_stays_whole(
    kube: Kube, config: Path, nats_url: str
) -> None:
    """SIGKILL in the middle of a stream of changes, again and again: nothing lost or doubled."""
    watcher = Process(nats_url, config)
    bus = await Bus.connect(nats_url, name="test")
    stop = asyncio.Event()

    async def churn() -> None:
        for i in itertools.count():
            if stop.is_set():
                return
            name = f"s{i % 25}"
            try:
                await create(kube, SERVICE, service(name))
            except AlreadyExists:
                if i % 3:
                    await labelled(kube, name, f"c{i}")
                else:
                    await wipe(kube, SERVICE, "default", name)

    churning = asyncio.create_task(churn())
    process = watcher.start()
    try:
        for _ in range(2):
            before = await last_seq(bus)

            async def more(before: int = before) -> bool:
                return await last_seq(bus) > before + 100

            await eventually(more, 45, interval=0.05)
            process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(process.wait, 10)
            process = watcher.start()
        stop.set()
        await churning
        await eventually(lambda: says_the_truth(bus, kube), 60, interval=0.1)
        found = await log(bus)
        process.terminate()
        assert await asyncio.to_thread(process.wait, 10) == 0
    finally:
        stop.set()
        process.kill()
        await asyncio.to_thread(process.wait, 10)
        await asyncio.gather(churning, return_exceptions=True)
        await bus.close()
    assert len(epochs(found)) == 1
    chain_is_whole(found)
    alive: dict[str, str] = {}
    for fact in found:
        uid = fact.headers.get(subjects.HEADER_UID, "")
        if fact.type == "ObjectGone":
            assert alive.pop(fact.subject) == uid
        elif uid:
            assert alive.setdefault(fact.subject, uid) == uid
