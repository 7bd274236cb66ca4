"""Watches that misbehave: what the watcher publishes, and what it asks for next.

A scripted server sends what a real one would not; the NATS is real.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from prometheus_client import REGISTRY

from schema import events, subjects
from services.watcher.main import KINDS
from tests.fakes.scripted_api import (
    ScriptedApi,
    abort,
    event,
    page,
    refuse,
    send,
    service,
    status,
)
from tests.system.watcher_rig import (
    SERVICE,
    SLICE,
    Fact,
    chain_is_whole,
    facts_of,
    log,
    published,
    watching,
)
from tests.waiting import eventually

ALWAYS = [k.plural for k in KINDS if not k.optional]


def colors(facts: list[object]) -> list[str]:
    return [f.event.object.metadata.labels["color"] for f in facts]  # type: ignore[attr-defined]


async def names(api: ScriptedApi, *versions: str) -> None:
    """Wait until the watches of services were opened at exactly these versions."""

    def equal() -> bool:
        assert api.watch_versions("services") == list(versions)
        return True

    await eventually(equal, 15)


@pytest.mark.parametrize("plural", ALWAYS)
async def test_a_bookmark_moves_the_version_and_is_no_fact_report_34(
    plural: str, nats_url: str, tmp_path: Path
) -> None:
    """A bookmark's empty shell breaks nothing; the next watch starts at its version."""
    shell = {
        "kind": "X",
        "apiVersion": "v1",
        "metadata": {"resourceVersion": "2000"},
        "spec": {"containers": None},
        "status": {},
    }
    async with ScriptedApi() as api:
        api.watches[plural].append(send(event("BOOKMARK", shell)))
        async with watching(nats_url, api.kubeconfig(tmp_path)) as running:
            await eventually(lambda: len(api.watch_versions(plural)) >= 2, 15)
            assert api.watch_versions(plural)[:2] == ["1000", "2000"]
            found = await log(running.bus, f"kube.{plural}.>")

    assert found == []


async def test_a_silent_watch_is_opened_again_report_35(nats_url: str, tmp_path: Path) -> None:
    """Nothing for the idle limit: reconnect from the last event; the gauge rose meanwhile."""
    async with ScriptedApi() as api:

        async def silent(_: object) -> None:
            await api.hold()

        api.watches["services"] += [
            send(event("ADDED", service("a", 1001)), then=silent),
            send(event("MODIFIED", service("a", 1002, "blue"))),
        ]
        async with watching(nats_url, api.kubeconfig(tmp_path), idle_s=1.0) as running:
            await published(running.bus, SERVICE, "default", "a", "ServiceSeen", "ServiceSeen")
            assert api.watch_versions("services")[:2] == ["1000", "1001"]
            gauge = "lbledger_watcher_idle_seconds"
            value = REGISTRY.get_sample_value(gauge, {"plural": "services"})
            assert value is not None
            assert value < 60

            def rises() -> bool:
                now = REGISTRY.get_sample_value(gauge, {"plural": "services"}) or 0.0
                return now > 0.5

            await eventually(rises, 10)


async def test_half_a_line_is_dropped_report_35(nats_url: str, tmp_path: Path) -> None:
    """A stream cut within a line goes on from the last whole event, which is said once."""
    whole = event("ADDED", service("a", 1001))
    half = event("MODIFIED", service("a", 1002, "blue"))[:90]
    async with ScriptedApi() as api:
        api.watches["services"] += [
            send(whole + half, then=abort),
            send(whole, half),  # a clean end in the middle of a line, after a replay
            send(event("MODIFIED", service("a", 1002, "green"))),
        ]
        async with watching(nats_url, api.kubeconfig(tmp_path)) as running:
            await published(running.bus, SERVICE, "default", "a", "ServiceSeen", "ServiceSeen")
            found = await facts_of(running.bus, SERVICE, "default", "a")
            assert colors(found) == ["red", "green"]
            assert api.watch_versions("services")[:3] == ["1000", "1001", "1001"]


async def test_lines_of_megabytes_pass_report_36(nats_url: str, tmp_path: Path) -> None:
    """A line of 5 MB, in bytes as the network cuts them, and what follows it are both facts; so is
    a slice of 1,000 endpoints in a list."""
    big = service("big", 1001)
    big["metadata"]["annotations"] = {"kubectl.kubernetes.io/x": "x" * 5_000_000}
    endpoints = [
        {"addresses": [f"10.0.{i // 250}.{i % 250}"], "nodeName": f"node-{i}.{'x' * 200}"}
        for i in range(1000)
    ]
    wide = {**service("wide", 900), "addressType": "IPv4", "endpoints": endpoints}
    async with ScriptedApi() as api:
        api.items["endpointslices"] = [wide]
        line = event("ADDED", big)
        pieces = [line[i : i + 70_001] for i in range(0, len(line), 70_001)]
        api.watches["services"].append(send(*pieces, event("ADDED", service("small", 1002))))
        async with watching(nats_url, api.kubeconfig(tmp_path)) as running:
            await published(running.bus, SERVICE, "default", "big", "ServiceSeen")
            await published(running.bus, SERVICE, "default", "small", "ServiceSeen")
            await published(running.bus, SLICE, "default", "wide", "EndpointSliceSeen")
            (fact,) = await facts_of(running.bus, SLICE, "default", "wide")
            assert len(fact.event.object.endpoints) == 1000


async def test_a_burst_is_complete_though_one_of_it_is_refused(
    nats_url: str, tmp_path: Path
) -> None:
    """Facts that go out together are stored once each, also when somebody wrote to a subject."""
    names = [f"s{i}" for i in range(800)]
    burst = b"".join(event("ADDED", service(name, 1001 + i)) for i, name in enumerate(names))
    begin = asyncio.Event()

    async def script(_: object, response: web.StreamResponse) -> None:
        await begin.wait()
        await response.write(burst)

    async with ScriptedApi() as api:
        api.watches["services"].append(script)
        async with watching(nats_url, api.kubeconfig(tmp_path), check_s=60.0) as running:
            await running.synced()
            gone = events.ObjectGone(at=datetime.now(UTC), plural="services", name="s5", uid="?")
            publisher = running.bus.publisher("KUBE")
            headers = {subjects.HEADER_TYPE: events.tag_of(gone)}
            subject = "kube.services.default.s5"
            await publisher.publish(subject, events.encode(gone), headers, msg_id="theirs")
            await publisher.close()
            begin.set()

            async def all_of_them() -> list[Fact]:
                found = await log(running.bus, "kube.services.>")
                return found if len(found) == len(names) + 1 else []

            found = await eventually(all_of_them, 20)
            chain_is_whole(found)
            said = [fact.subject.rpartition(".")[2] for fact in found if fact.type == "ServiceSeen"]
            assert sorted(said) == sorted(names)


@pytest.mark.parametrize(
    "aged",
    [
        refuse(410, "Expired", "too old resource version: 1000 (1005)"),
        send(event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})),
    ],
    ids=["status", "event-headlamp-7451"],
)
async def test_an_aged_version_is_listed_anew(aged: object, nats_url: str, tmp_path: Path) -> None:
    """410 in both forms: a new list, its version is gone on from, the Status is no object."""
    async with ScriptedApi() as api:
        api.items["services"] = [service("a", 900)]
        api.watches["services"].append(aged)  # type: ignore[arg-type]
        async with watching(nats_url, api.kubeconfig(tmp_path)) as running:
            await api.arrived.wait()
            api.version = "1005"
            await eventually(lambda: api.watch_versions("services")[-1:] == ["1005"], 15)
            await published(running.bus, SERVICE, "default", "a", "ServiceSeen")
            assert api.list_count("services") == 2
            found = await log(running.bus, "kube.services.>")

    assert {fact.subject for fact in found} == {"kube.services.default.a"}


async def test_another_error_event_is_retried(nats_url: str, tmp_path: Path) -> None:
    """An ERROR event that is no 410 ends the watch; it goes on from the last event."""
    error = {"kind": "Status", "code": 500, "reason": "InternalError", "message": "etcd"}
    async with ScriptedApi() as api:
        api.watches["services"].append(
            send(event("ADDED", service("a", 1001)), event("ERROR", error))
        )
        async with watching(nats_url, api.kubeconfig(tmp_path)) as running:
            await names(api, "1000", "1001")
            await published(running.bus, SERVICE, "default", "a", "ServiceSeen")
            assert api.list_count("services") == 1


async def test_empty_closes_are_not_a_hot_loop(nats_url: str, tmp_path: Path) -> None:
    """A server that ends every watch at once is asked again at a slowing pace."""
    async with ScriptedApi() as api:
        for _ in range(200):
            api.watches["services"].append(send())
        async with watching(nats_url, api.kubeconfig(tmp_path)):
            await eventually(lambda: len(api.watch_versions("services")) >= 2, 15)
            before = len(api.watch_versions("services"))
            await asyncio.sleep(1.5)  # the time in which a hot loop would ask hundreds of times
            assert len(api.watch_versions("services")) - before <= 12
            assert api.list_count("services") == 1


async def test_a_throttled_watch_waits(nats_url: str, tmp_path: Path) -> None:
    """429 with Retry-After: the next attempt comes after that, from the same version."""
    async with ScriptedApi() as api:
        api.watches["services"].append(refuse(429, "TooManyRequests", "slow down", Retry_After="1"))
        times: list[float] = []
        clock = asyncio.get_running_loop().time
        original = api._watch

        async def timed(request, plural):  # type: ignore[no-untyped-def]
            if plural == "services":
                times.append(clock())
            return await original(request, plural)

        api._watch = timed  # type: ignore[method-assign]
        async with watching(nats_url, api.kubeconfig(tmp_path)) as running:
            await names(api, "1000", "1000")
            assert times[1] - times[0] >= 1.0
            await eventually(lambda: running.rt.health.ready, 10)


async def test_410_on_the_second_page_deletes_nothing_python_953(
    nats_url: str, tmp_path: Path
) -> None:
    """A list that breaks in the middle is begun anew; a partial list is the ground of nothing."""
    async with ScriptedApi() as api:
        api.items["services"] = [service("a", 900), service("b", 901)]
        async with watching(nats_url, api.kubeconfig(tmp_path)) as running:
            await running.synced()
            await running.stop()
        api.lists["services"] += [
            lambda _: page([service("a", 900)], "1003", more="next"),
            lambda _: status(410, "Expired", "The provided continue parameter is too old"),
        ]
        api.version = "1004"
        async with watching(nats_url, api.kubeconfig(tmp_path)) as running:
            await running.synced(2)
            started = await log(running.bus, "kube.sync.services")
            assert [f.type for f in started] == [
                "SyncStarted", "SyncFinished", "SyncStarted", "SyncStarted", "SyncFinished",
            ]  # fmt: skip
            for name in ("a", "b"):
                await published(running.bus, SERVICE, "default", name, "ServiceSeen")


async def test_an_event_from_before_the_list_is_left_out(nats_url: str, tmp_path: Path) -> None:
    """An old event of an object that the list did not hold does not bring it to life."""
    async with ScriptedApi() as api:
        api.watches["services"].append(
            send(event("ADDED", service("old", 900)), event("ADDED", service("new", 1001)))
        )
        async with watching(nats_url, api.kubeconfig(tmp_path)) as running:
            await published(running.bus, SERVICE, "default", "new", "ServiceSeen")
            assert await facts_of(running.bus, SERVICE, "default", "old") == []


async def test_a_version_from_the_future_is_noticed(nats_url: str, tmp_path: Path) -> None:
    """An API server whose store was put back shows what it holds now, lower versions and all."""
    async with ScriptedApi() as api:
        api.items["services"] = [service("a", 990, "blue"), service("b", 991)]
        proceed = asyncio.Event()

        async def wait(_: object) -> None:
            await proceed.wait()

        api.watches["services"].append(send(then=wait))
        async with watching(nats_url, api.kubeconfig(tmp_path)) as running:
            await running.synced()
            api.items["services"] = [service("a", 500, "red")]
            api.version = api.now = "600"
            proceed.set()
            await published(running.bus, SERVICE, "default", "a", "ServiceSeen", "ServiceSeen")
            await published(running.bus, SERVICE, "default", "b", "ServiceSeen", "ObjectGone")
            assert colors(await facts_of(running.bus, SERVICE, "default", "a")) == ["blue", "red"]
            chain_is_whole(await log(running.bus))


async def test_an_unreadable_event_ends_the_watch_not_the_watcher(
    nats_url: str, tmp_path: Path
) -> None:
    """Bytes that are no event, an object without identity: again from the last good event."""
    async with ScriptedApi() as api:
        api.watches["services"] += [
            send(event("ADDED", service("a", 1001)), b"\xff\xfe\n"),
            send(event("ADDED", service("b", 1002)), event("ADDED", {"metadata": {}})),
            send(event("ADDED", service("c", 1003)), b"null\n"),
            send(event("ADDED", service("d", 1004))),
        ]
        async with watching(nats_url, api.kubeconfig(tmp_path)) as running:
            for name in ("a", "b", "c", "d"):
                await published(running.bus, SERVICE, "default", name, "ServiceSeen")


async def test_a_watch_that_always_breaks_is_listed_anew(nats_url: str, tmp_path: Path) -> None:
    """After some failures in a row the list is made anew: it may be the version that is bad."""
    async with ScriptedApi() as api:
        for _ in range(5):
            api.watches["services"].append(refuse(500, "", "strconv.ParseUint"))
        async with watching(nats_url, api.kubeconfig(tmp_path)):
            await eventually(lambda: api.list_count("services") == 2, 20)


async def test_an_api_server_before_servicecidrs_is_followed_as_well(
    nats_url: str, tmp_path: Path
) -> None:
    """Kubernetes before 1.33 has no such kind: it is complete and empty, and the watcher ready."""
    async with ScriptedApi() as api, watching(nats_url, api.kubeconfig(tmp_path)) as running:
        await running.synced()
        await eventually(lambda: running.rt.health.ready)
        _, finished = await log(running.bus, "kube.sync.servicecidrs")
        assert finished.event.absent
        assert api.list_count("servicecidrs") == 0


async def test_health_says_which_kind_is_forbidden(nats_url: str, tmp_path: Path) -> None:
    """Not ready, naming kind and reason, until the API server answers; the rest goes on."""
    async with ScriptedApi() as api:
        refused = [True]

        def forbidden(request: object) -> object:
            if refused[0]:
                api.lists["nodes"].append(forbidden)  # type: ignore[arg-type]
                return status(403, "Forbidden", 'nodes is forbidden: User "x" cannot list')
            return page([], "1001")

        api.lists["nodes"].append(forbidden)  # type: ignore[arg-type]
        api.items["services"] = [service("a", 900)]
        async with watching(nats_url, api.kubeconfig(tmp_path)) as running:
            await published(running.bus, SERVICE, "default", "a", "ServiceSeen")
            health = running.rt.health

            def named() -> bool:
                return "nodes: 403 Forbidden" in str(health.report())

            await eventually(named, 10)
            assert not health.ready
            refused[0] = False
            await eventually(lambda: health.ready, 20)


async def test_a_listed_object_that_does_not_fit_is_named_report_44(
    nats_url: str, tmp_path: Path
) -> None:
    """One misfit is an ObjectUnfit and a dead letter naming the field; the list goes on."""
    bad = service("bad", 901)
    bad["spec"]["ports"] = "not-a-list"
    async with ScriptedApi() as api:
        api.items["services"] = [service("a", 900), bad, service("z", 902)]
        async with watching(nats_url, api.kubeconfig(tmp_path)) as running:
            await running.synced()
            await published(running.bus, SERVICE, "default", "bad", "ObjectUnfit")
            await published(running.bus, SERVICE, "default", "z", "ServiceSeen")
            (unfit,) = await facts_of(running.bus, SERVICE, "default", "bad")
            assert "$.spec.ports" in unfit.event.problem

            async def dead() -> events.DeadLettered | None:
                message = await running.bus.last("LB", "lb.dead.watcher")
                if message is None:
                    return None
                return msgspec.json.decode(message.data, type=events.DeadLettered)

            letter = await eventually(dead, 10)
            assert letter is not None
            assert (letter.sequence, letter.subject) == (unfit.seq, unfit.subject)
            assert "not-a-list" in letter.payload
