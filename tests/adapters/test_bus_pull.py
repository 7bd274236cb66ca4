"""Reading: every message after a position, in order, or a Gap that says why not."""

import asyncio
import shutil
import signal
import sys
from asyncio.subprocess import PIPE
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
import structlog

from sandbox.servers import NatsServer
from services.kit import bus_consumer
from services.kit.bus import Bus, BusError, Gap, Message, Puller, StreamMissing, Unavailable
from tests.adapters.proxy import Proxy
from tests.adapters.streams import (
    SPEC,
    STREAM,
    connected,
    fill,
    numbers,
    publishing,
    read_all,
)
from tests.infra import Server
from tests.waiting import eventually

READER = """
import asyncio, sys
from services.kit.bus import Bus
async def main():
    bus = await Bus.connect(sys.argv[1], name="victim")
    puller = bus.puller("TEST", start_seq=1)
    print(len(await puller.fetch(10, 10)), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def _take(puller: Puller, count: int, timeout: float = 20.0) -> list[Message]:
    """So many messages, or what has come in the time."""
    found: list[Message] = []
    async with asyncio.timeout(timeout):
        while len(found) < count:
            found += await puller.fetch(count - len(found), 1.0)
    return found


async def _consumers(url: str) -> list[dict[str, Any]]:
    client = await nats.connect(url)
    try:
        answer = await client.request(f"$JS.API.CONSUMER.LIST.{STREAM}", timeout=5)
        return list(msgspec.json.decode(answer.data).get("consumers") or [])
    finally:
        await client.close()


async def test_reads_everything_in_order_and_then_what_comes(nats_url: str) -> None:
    """From a position to the end, in sequence; then each new message as it is stored."""
    async with connected(nats_url) as bus:
        await fill(bus, 3000)
        puller = bus.puller(STREAM, start_seq=1)
        found = await _take(puller, 3000)
        assert [message.seq for message in found] == list(range(1, 3001))
        assert numbers(found) == list(range(3000))
        assert (puller.position, puller.lag) == (3000, 0)
        assert {message.stream for message in found} == {STREAM}
        assert all(a.time_ns <= b.time_ns for a, b in pairwise(found))
        waiting = asyncio.create_task(puller.fetch(10, 10))
        await asyncio.sleep(0.05)
        await fill(bus, 1, start=3000)
        assert numbers(await waiting) == [3000]
        await puller.close()


async def test_resumes_where_another_stopped(nats_url: str) -> None:
    """The position is the caller's: a second reader goes on without a hole or a repetition."""
    async with connected(nats_url) as bus:
        await fill(bus, 900)
        first = bus.puller(STREAM, start_seq=1)
        before = await first.fetch(300, 5)
        assert first.lag == 900 - len(before)
        await first.close()
        second = bus.puller(STREAM, start_seq=before[-1].seq + 1)
        after = await _take(second, 900 - len(before))
        assert numbers(before + after) == list(range(900))
        await second.close()


async def test_filters_choose_subjects(nats_url: str) -> None:
    """One filter or several; the rest of the stream is not sent."""
    async with connected(nats_url) as bus:
        await fill(bus, 100)
        for filters, digits in ((["t.3"], "3"), (["t.3", "t.8"], "38")):
            puller = bus.puller(STREAM, start_seq=1, filters=filters)
            found = await _take(puller, 10 * len(digits))
            assert {message.subject for message in found} == {f"t.{digit}" for digit in digits}
            assert await puller.fetch(10, 0.1) == []
            await puller.close()


async def test_empty_stream_is_no_error_and_no_noise(nats_url: str) -> None:
    """Nothing to read gives nothing, after the time asked for, and no log line."""
    async with connected(nats_url) as bus:
        puller = bus.puller(STREAM, start_seq=1)
        assert await puller.fetch(10, 0.5) == []
        with structlog.testing.capture_logs() as logs:
            started = asyncio.get_running_loop().time()
            assert await puller.fetch(10, 0.3) == []
            assert asyncio.get_running_loop().time() - started >= 0.29
        assert logs == []
        await puller.close()


@pytest.mark.parametrize("down_first", [True, False])
async def test_report_39_restart_with_the_same_store(nats_server: Server, down_first: bool) -> None:
    """After a crash the reader goes on by itself: nothing missing, nothing twice."""
    async with connected(nats_server.url) as bus:
        await fill(bus, 1000)
        puller = bus.puller(STREAM, start_seq=1)
        found = await puller.fetch(100, 5)
        await nats_server.kill()
        if down_first:  # nothing while it is down, and no exception
            await eventually(lambda: not bus.connected)
            assert await puller.fetch(100, 0.2) == []
        await nats_server.start()
        await bus.wait_connected(20)
        await fill(bus, 500, start=1000)
        found += await _take(puller, 1500 - len(found))
        assert [message.seq for message in found] == list(range(1, 1501))
        assert sorted(numbers(found)) == list(range(1500))
        for subject in {message.subject for message in found}:  # the order that is promised
            part = numbers([message for message in found if message.subject == subject])
            assert part == sorted(part)
        await puller.close()
    assert await _consumers(nats_server.url) == []


async def test_report_39_restart_with_an_empty_store(nats_server: Server) -> None:
    """The stream is another one: said once and for all, so that the reader begins afresh."""
    async with connected(nats_server.url) as bus:
        await fill(bus, 200)
        puller = bus.puller(STREAM, start_seq=1)
        await _take(puller, 200)
        await nats_server.kill()
        await nats_server.restart(wipe=True)
        await bus.wait_connected(20)
        with pytest.raises(StreamMissing):
            await puller.fetch(10, 0.5)
        await bus.ensure_stream(SPEC)
        await fill(bus, 300)
        for _ in range(2):
            with pytest.raises(Gap) as caught:
                await _take(puller, 1)
            assert caught.value.kind == "stream_recreated"
        await puller.close()
        assert numbers(await read_all(bus)) == list(range(300))


async def test_stream_that_comes_later_is_waited_for(nats_url: str) -> None:
    """A reader that starts first says StreamMissing at the pace of its timeout, then reads."""
    async with connected(nats_url, ensure=None) as bus:
        puller = bus.puller(STREAM, start_seq=1)
        with pytest.raises(StreamMissing):
            await puller.fetch(10, 0.2)
        await bus.ensure_stream(SPEC)
        await fill(bus, 5)
        found: list[Message] = []
        while len(found) < 5:
            try:
                found += await puller.fetch(10, 2)
            except StreamMissing:
                continue
        assert numbers(found) == list(range(5))
        await puller.close()


async def test_another_stream_than_the_position_belongs_to(nats_url: str) -> None:
    """A stored position carries the stream's birth; a later stream is found out at once."""
    async with connected(nats_url) as bus:
        await fill(bus, 5)
        born = (await bus.stream_state(STREAM)).created
        puller = bus.puller(STREAM, start_seq=3, created=born)
        assert len(await _take(puller, 3)) == 3
        await puller.close()
        other = bus.puller(STREAM, start_seq=3, created="2020-01-01T00:00:00Z")
        with pytest.raises(Gap, match="stream_recreated"):
            await other.fetch(10, 5)
        await other.close()


async def test_retention_that_overtook_a_stopped_reader(nats_url: str) -> None:
    """What follows the position was pruned: a Gap, not a silent jump."""
    small = msgspec.structs.replace(SPEC, max_bytes=64 * 1024, compression="none")
    async with connected(nats_url, ensure=small) as bus:
        await fill(bus, 2000)
        state = await bus.stream_state(STREAM)
        assert state.first_seq > 101
        late = bus.puller(STREAM, start_seq=101)
        with pytest.raises(Gap) as caught:
            await late.fetch(10, 5)
        assert (caught.value.kind, caught.value.stream) == ("retention", STREAM)
        await late.close()
        newborn = bus.puller(STREAM, start_seq=1)  # has no past to miss
        assert (await newborn.fetch(1, 5))[0].seq == state.first_seq
        await newborn.close()
        exact = bus.puller(STREAM, start_seq=state.first_seq)
        assert (await exact.fetch(1, 5))[0].seq == state.first_seq
        await exact.close()


async def test_position_beyond_the_end_is_a_lost_tail(nats_url: str) -> None:
    """The server would wait in silence for ever; we say it."""
    async with connected(nats_url) as bus:
        await fill(bus, 10)
        puller = bus.puller(STREAM, start_seq=12)
        with pytest.raises(Gap) as caught:
            await puller.fetch(10, 5)
        assert caught.value.kind == "tail_lost"
        await puller.close()
        at_the_end = bus.puller(STREAM, start_seq=11)
        assert await at_the_end.fetch(10, 0.3) == []
        await at_the_end.close()


@pytest.mark.parametrize("written_after", [0, 30], ids=["shorter", "numbers-used-again"])
async def test_lost_tail_under_a_running_reader(tmp_path: Path, written_after: int) -> None:
    """A store set back to an older copy is noticed, even when its numbers were used again."""
    state, copy = tmp_path / "state", tmp_path / "copy"
    async with NatsServer(state) as server:
        async with connected(server.url) as bus:
            await fill(bus, 10)
            await server.halt()
            shutil.copytree(state / "jetstream", copy)
            await server.start()
            await bus.wait_connected(20)
            await fill(bus, 10, start=10)
            puller = bus.puller(STREAM, start_seq=1)
            assert len(await _take(puller, 20)) == 20
            await server.kill()
            await server.wipe()
            shutil.copytree(copy, state / "jetstream")
            await server.start()
            await bus.wait_connected(20)
            if written_after:
                await fill(bus, written_after, start=100)
            with pytest.raises(Gap) as caught:
                await _take(puller, 1)
            assert caught.value.kind == "tail_lost"
            await puller.close()


async def test_consumer_deleted_by_somebody_is_replaced(nats_url: str) -> None:
    """Deleted under a waiting reader: another is made after the last message, unasked."""
    async with connected(nats_url) as bus:
        await fill(bus, 50)
        puller = bus.puller(STREAM, start_seq=1)
        assert len(await _take(puller, 50)) == 50
        waiting = asyncio.create_task(_take(puller, 5))
        for name in [consumer["name"] for consumer in await _consumers(nats_url)]:
            client = await nats.connect(nats_url)
            await client.request(f"$JS.API.CONSUMER.DELETE.{STREAM}.{name}", timeout=5)
            await client.close()
        await fill(bus, 5, start=50)
        assert numbers(await waiting) == [50, 51, 52, 53, 54]
        assert len(await _consumers(nats_url)) == 1
        await puller.close()


async def test_silence_of_the_server_is_noticed(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No heartbeat over a connection that looks open: the consumer is given up and replaced."""
    monkeypatch.setattr(bus_consumer, "SILENCE_S", 0.4)
    monkeypatch.setattr(bus_consumer, "HEARTBEAT_NS", 150_000_000)
    async with connected(nats_url) as direct, Proxy(nats_url) as proxy:
        async with connected(proxy.url) as bus:
            puller = bus.puller(STREAM, start_seq=1)
            await fill(direct, 3)
            assert numbers(await _take(puller, 3)) == [0, 1, 2]
            with structlog.testing.capture_logs() as logs:
                proxy.hold()
                await fill(direct, 3, start=3)
                assert await puller.fetch(10, 1.0) == []
                proxy.cut()
                assert numbers(await _take(puller, 3)) == [3, 4, 5]
            reasons = [str(line.get("reason")) for line in logs]
            assert any("nothing heard" in reason for reason in reasons)
            await puller.close()


async def test_idle_reader_stays_connected_over_many_heartbeats(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats and the ends of pulls are no reason for a new consumer."""
    monkeypatch.setattr(bus_consumer, "HEARTBEAT_NS", 100_000_000)
    monkeypatch.setattr(bus_consumer, "EXPIRES_NS", 300_000_000)
    async with connected(nats_url) as bus:
        puller = bus.puller(STREAM, start_seq=1)
        await fill(bus, 1)
        assert len(await _take(puller, 1)) == 1
        before = await _consumers(nats_url)
        assert await puller.fetch(10, 1.2) == []
        await fill(bus, 1, start=1)
        assert len(await _take(puller, 1)) == 1
        after = await _consumers(nats_url)
        assert [c["name"] for c in before] == [c["name"] for c in after]
        await puller.close()


async def test_report_41_unacknowledged_messages_stop_nothing(nats_url: str) -> None:
    """There is no acknowledgement, so no limit of open ones: thousands are read without any."""
    async with connected(nats_url) as bus:
        await fill(bus, 5000)
        puller = bus.puller(STREAM, start_seq=1)
        assert len(await _take(puller, 5000)) == 5000
        (consumer,) = await _consumers(nats_url)
        assert consumer["config"]["ack_policy"] == "none"
        assert consumer["num_ack_pending"] == 0
        await puller.close()


async def test_report_42_and_43_nothing_is_delivered_again(nats_url: str) -> None:
    """A slow reader and a second one: each message once to each, in order, none given up on."""
    async with connected(nats_url) as bus:
        await fill(bus, 30)
        slow, other = bus.puller(STREAM, start_seq=1), bus.puller(STREAM, start_seq=1)
        found = await slow.fetch(1, 5)
        assert numbers(await _take(other, 30)) == list(range(30))
        found += await _take(slow, 29)
        assert numbers(found) == list(range(30))
        assert await slow.fetch(10, 0.2) == []
        await slow.close()
        await other.close()


async def test_reader_that_does_not_read_is_sent_a_bounded_amount(nats_url: str) -> None:
    """What waits on our side has a limit; the rest stays on the server."""
    async with connected(nats_url) as bus:
        await fill(bus, 10_000)
        puller = bus.puller(STREAM, start_seq=1)
        assert len(await puller.fetch(1, 5)) == 1

        async def delivered() -> int:
            (consumer,) = await _consumers(nats_url)
            return int(consumer["delivered"]["consumer_seq"])

        await eventually(delivered)
        await asyncio.sleep(0.2)  # were there more, they would come now
        assert await delivered() <= 2500
        assert len(await _take(puller, 9_999)) == 9_999
        await puller.close()


async def test_large_messages_do_not_stop_a_reader(nats_url: str) -> None:
    """A pull that is full by bytes is followed by the next."""
    async with connected(nats_url) as bus, publishing(bus) as publisher:
        size = 900_000
        for number in range(30):
            await publisher.publish("t.a", b"%06d" % number * (size // 6), {}, msg_id=f"{number}")
        puller = bus.puller(STREAM, start_seq=1)
        found = await _take(puller, 30)
        assert [int(message.data[:6]) for message in found] == list(range(30))
        await puller.close()


async def test_close_leaves_no_consumer(nats_url: str) -> None:
    """Closed while idle, while reading or while being made: the server keeps nothing of ours."""
    async with connected(nats_url) as bus:
        await fill(bus, 10)
        pullers = [bus.puller(STREAM, start_seq=1) for _ in range(3)]
        await pullers[0].fetch(1, 5)
        await _take(pullers[1], 10)
        early = asyncio.create_task(pullers[2].fetch(1, 5))
        waiting = asyncio.create_task(pullers[1].fetch(1, 5))
        await asyncio.sleep(0)
        for puller in reversed(pullers):
            await puller.close()
        for fetching in (early, waiting):
            with pytest.raises(Unavailable, match="closed"):
                await fetching
        assert await _consumers(nats_url) == []
        with pytest.raises(Unavailable, match="closed"):
            await pullers[0].fetch(1, 0.1)


async def test_killed_reader_leaves_a_consumer_that_the_server_forgets(nats_url: str) -> None:
    """After SIGKILL nobody can delete it: it carries the time after which the server does."""
    async with connected(nats_url) as bus:
        await fill(bus, 10)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", READER, nats_url, stdout=PIPE
    )
    try:
        assert process.stdout is not None
        while (line := await asyncio.wait_for(process.stdout.readline(), 20)).strip() != b"10":
            assert line, "the reader ended early"
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    (consumer,) = await _consumers(nats_url)
    assert consumer["name"].startswith("victim-")
    config = consumer["config"]
    assert config["inactive_threshold"] == 30 * 10**9
    assert config["mem_storage"] is True
    assert "durable_name" not in config


async def test_names_and_positions_are_checked(nats_url: str) -> None:
    """A name that is no token is made one; a position before the first is a mistake."""
    bus = await Bus.connect(nats_url, name="a.b *>/é")
    await bus.ensure_stream(SPEC)
    puller = bus.puller(STREAM, start_seq=1)
    assert await puller.fetch(1, 0.2) == []
    (consumer,) = await _consumers(nats_url)
    assert consumer["name"].startswith("a_b")
    await puller.close()
    with pytest.raises(BusError, match="start_seq is 0"):
        bus.puller(STREAM, start_seq=0)
    await bus.close()
