"""nrp_sync when the provider throttles, refuses, answers late or not at all, and when it dies."""

import asyncio
import signal
import time

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from sandbox.nrp import Fault
from schema import events
from services.kit import config, db
from services.nrp_sync.main import policy_of
from services.nrp_sync.projection import NrpProjection
from tests.feeding import T0
from tests.system.nrp_rig import node, rig, service, slice_of, uid
from tests.waiting import eventually

N1 = node("n1", "172.16.0.1")


async def test_two_endpoints_on_one_node_make_one_entry(nats_url, database_url):
    """[report-52] Each location and address is named once, though two slices list it."""
    async with rig(nats_url, database_url) as r:
        await r.seen(N1, service())
        await r.synced()
        await r.start()
        await r.reason("web", "Registered")
        await r.seen(
            slice_of("web-a", "web", ["10.0.0.4", "10.0.0.5"], 101),
            slice_of("web-b", "web", ["10.0.0.4"], 102),
        )
        await r.settled(1, "10.0.0.4", "10.0.0.5")
        assert await r.batches() == [{"172.16.0.1": {"10.0.0.4": [uid(1)], "10.0.0.5": [uid(1)]}}]
        assert all(200 <= entry.status < 300 for entry in r.changes())


async def test_only_the_deleted_services_things_go(nats_url, database_url):
    """[report-53] Ownership is by exact name: a service whose name begins alike is untouched."""
    names = {1: ("default", "web"), 2: ("default", "web-api"), 3: ("a-b", "c"), 4: ("a", "b-c")}
    async with rig(nats_url, database_url) as r:
        await r.seen(N1)
        for number, (namespace, name) in names.items():
            await r.seen(
                service(name, number, namespace=namespace),
                slice_of(
                    f"{name}-x", name, [f"10.0.0.{number}"], 100 + number, namespace=namespace
                ),
            )
        await r.synced()
        await r.start()
        for number in names:
            await r.settled(number, f"10.0.0.{number}")
        for number in (1, 4):
            namespace, name = names[number]
            await r.feeder.gone(service(name, number, namespace=namespace))
        await eventually(lambda: r.registered() == {uid(2), uid(3)})
        kept = {uid(2), f"{uid(2)}-pip", uid(3), f"{uid(3)}-pip"}
        await eventually(lambda: r.resources() == kept)
        assert r.locations() == {"172.16.0.1": {"10.0.0.2": {uid(2)}, "10.0.0.3": {uid(3)}}}


async def test_throttled_changes_become_one_wish(nats_url, database_url):
    """[report-54] Retry-After is waited out; 200 changes meanwhile are sent as what they end at."""
    async with rig(nats_url, database_url) as r:
        await r.seen(N1, service(), slice_of("web-a", "web", ["10.0.0.1"]))
        await r.synced()
        await r.start()
        await r.settled(1, "10.0.0.1")
        r.server.faults.add(Fault(kind="error", op="update_*", status=429, retry_after=2, count=1))
        await r.seen(slice_of("web-a", "web", ["10.0.0.2"]))
        refused = await eventually(lambda: [e for e in r.changes() if e.status == 429])
        await r.reason("web", "Throttled")
        for number in range(3, 203):
            await r.seen(slice_of("web-a", "web", [f"10.0.1.{number}"]))
        await r.seen(slice_of("web-a", "web", ["10.0.0.9"]))
        await r.settled(1, "10.0.0.9")
        later = [e for e in r.changes() if e.seq > refused[0].seq]
        assert len(later) == 1
        assert later[0].started - refused[0].started >= 2.0
        await r.reason("web", "Registered")


async def test_one_bad_service_fails_alone(nats_url, database_url):
    """[report-54] A batch refused for one entry is halved until that one stands alone."""
    async with rig(nats_url, database_url, LBLEDGER_NRP_PARK_S="60") as r:
        r.server.faults.add(Fault(kind="error", op="update_services", status=400, contains=uid(2)))
        await r.seen(N1)
        for number, name in ((1, "one"), (2, "bad"), (3, "three")):
            await r.seen(
                service(name, number), slice_of(name, name, [f"10.0.0.{number}"], 100 + number)
            )
        await r.synced()
        await r.start()
        await r.settled(1, "10.0.0.1")
        await r.settled(3, "10.0.0.3")
        image = await r.reason("bad", "Rejected")
        assert not image.in_step
        await r.reason("one", "Registered")
        await r.reason("three", "Registered")


async def test_changes_during_a_request_are_sent_after_it(nats_url, database_url):
    """[report-55] An acknowledgement counts for what was sent, later changes stay to be sent."""
    async with rig(nats_url, database_url) as r:
        await r.seen(N1, service())
        await r.synced()
        await r.start()
        await r.reason("web", "Registered")
        r.server.faults.add(Fault(kind="slow", op="update_address_locations", seconds=1.5, count=1))
        await r.seen(slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2"]))
        await eventually(lambda: r.requests("update_address_locations"))
        await r.seen(slice_of("web-a", "web", ["10.0.0.2", "10.0.0.3"]))
        await r.seen(slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2"]))
        await r.seen(slice_of("web-a", "web", ["10.0.0.3"]))
        await r.settled(1, "10.0.0.3")
        assert [set(batch["172.16.0.1"]) for batch in await r.batches()] == [
            {"10.0.0.1", "10.0.0.2"},
            {"10.0.0.1", "10.0.0.2", "10.0.0.3"},
        ]


async def test_nothing_is_removed_on_a_partial_view(nats_url, database_url):
    """[report-57] Before every list is complete nothing leaves; then nothing has to be sent."""
    async with rig(nats_url, database_url) as r:
        await r.seen(N1, service(), slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2"]))
        await r.synced()
        await r.start()
        await r.settled(1, "10.0.0.1", "10.0.0.2")
        await r.reason("web", "Registered")
        await r.stop()
        await r.rows(
            "truncate nrp_sync.stream_offset, nrp_sync.mirror, nrp_sync.slice, "
            "nrp_sync.endpoint, nrp_sync.operation, nrp_sync.location, "
            "nrp_sync.address, nrp_sync.request, nrp_sync.told, nrp_sync.view, "
            "nrp_sync.sync_mark"
        )
        sent = len(r.changes())
        await r.feeder.send(events.EpochStarted(at=T0, epoch="e2", reason="test"))
        r.feeder.epoch = "e2"
        await r.seen(service(), N1)
        await r.feeder.synced("services", "nodes", "pods")
        await r.start()
        await r.reason("web", "Pending")
        await asyncio.sleep(1.0)  # a wrong removal would come within the window
        assert len(r.changes()) == sent
        await r.seen(slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2"]))
        await r.feeder.synced("endpointslices")
        await r.reason("web", "Registered")
        assert len(r.changes()) == sent
        assert r.addresses(1) == {"10.0.0.1", "10.0.0.2"}


async def test_nothing_to_change_sends_nothing(nats_url, database_url):
    """[report-59] A change without meaning sends nothing, moves the generation, blocks nothing."""
    async with rig(nats_url, database_url) as r:
        await r.seen(N1, service(), slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2"]))
        await r.synced()
        await r.start()
        await r.settled(1, "10.0.0.1", "10.0.0.2")
        await r.reason("web", "Registered")
        sent = len(r.changes())
        await r.seen(
            slice_of("web-a", "web", ["10.0.0.2", "10.0.0.1"], annotations={"x": "y"}),
            service(generation=2),
        )

        async def moved_on():
            image = await r.image("web")
            return image is not None and image.generation == 2 and image.in_step

        await eventually(moved_on)
        assert len(r.changes()) == sent
        await r.seen(slice_of("web-a", "web", ["10.0.0.2", "10.0.0.1", "10.0.0.3"]))
        await r.settled(1, "10.0.0.1", "10.0.0.2", "10.0.0.3")


@pytest.mark.parametrize("fault", ["applied_hang", "applied_error", "drop", "applied_drop"])
async def test_a_request_without_answer_is_settled_by_sending_again(nats_url, database_url, fault):
    """Applied or not, a request that was not answered is sent again until it is."""
    async with rig(nats_url, database_url, LBLEDGER_NRP_REQUEST_TIMEOUT_S="0.7") as r:
        await r.seen(N1, service(), slice_of("web-a", "web", ["10.0.0.1"]))
        await r.synced()
        await r.start()
        await r.settled(1, "10.0.0.1")
        r.server.faults.add(
            Fault(kind=fault, op="update_address_locations", status=503, count=1, seconds=3.0)
        )
        await r.seen(slice_of("web-a", "web", []))
        await eventually(lambda: [e for e in r.changes() if e.fault])
        await r.seen(slice_of("web-a", "web", ["10.0.0.1"]))  # back before anybody knows

        async def settled():
            rows = await r.rows("select 1 from nrp_sync.address where not sure")
            return not rows and r.addresses(1) == {"10.0.0.1"}

        await eventually(settled, 20)


async def test_wait_after_a_failure_survives_a_restart(nats_url, database_url):
    """A process that comes back into an outage goes on waiting where the one before it was."""
    async with rig(nats_url, database_url, LBLEDGER_NRP_RETRY_FIRST_S="20") as r:
        await r.seen(N1, service(), slice_of("web-a", "web", ["10.0.0.1"]))
        await r.synced()
        await r.start()
        await r.settled(1, "10.0.0.1")
        r.server.faults.add(Fault(kind="error", op="update_address_locations", status=503))
        await r.seen(slice_of("web-a", "web", ["10.0.0.2"]))
        query = "select finished_at from nrp_sync.request where state = 'unknown'"
        failed = await eventually(lambda: r.rows(query))
        await r.stop()
        engine = create_async_engine(db.driver_url(database_url))
        projection = NrpProjection(policy_of(config.load(r.env).nrp))
        async with engine.connect() as conn:
            await projection.load(conn)
        await engine.dispose()
        lane = projection.state.lanes["locations"]
        assert lane.retries == 1
        assert lane.retry_at >= failed[0]["finished_at"].timestamp() + 20.0


async def test_killed_between_sending_and_committing(nats_url, database_url):
    """SIGKILL with a request under way: the next process takes it up, nothing is lost or twice."""
    async with rig(nats_url, database_url) as r:
        r.server.faults.add(Fault(kind="slow", op="update_*", seconds=1.0, count=2))
        await r.seen(N1, service(), slice_of("web-a", "web", ["10.0.0.1"]))
        await r.synced()
        process = await r.spawn()
        await eventually(lambda: r.requests("update_services"), 40)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        rows = await r.rows("select state from nrp_sync.request where state = 'sent'")
        assert rows
        began = time.monotonic()
        await r.start()
        await r.settled(1, "10.0.0.1")
        await r.reason("web", "Registered")
        assert time.monotonic() - began < 30
        open_ = await r.rows("select state from nrp_sync.request where state = 'sent'")
        assert open_ == []
