"""Publishing: once, in order per subject, whatever happens to the connection or the server."""

import asyncio
from collections import defaultdict

import msgspec
import pytest

from sandbox.servers import NatsServer
from schema.subjects import StreamSpec
from services.kit.bus import Bus, BusError, Outgoing, Published, TooLarge, Unavailable, WrongLast
from services.kit.bus_types import MSG_ID
from tests.adapters.proxy import Proxy
from tests.adapters.streams import SPEC, STREAM, connected, numbers, publishing, read_all
from tests.infra import Server
from tests.waiting import eventually

SUBJECTS = 40


async def _publish_many(bus: Bus, count: int, running: asyncio.Event) -> list[Published]:
    """Pipelined over many subjects; sets the event after a third."""
    async with publishing(bus, window=128, ack_timeout=0.5) as publisher:
        futures = []
        for number in range(count):
            await publisher.room()
            body = str(number).encode()
            subject = f"t.{number % SUBJECTS}"
            futures.append(publisher.submit(subject, body, {}, msg_id=f"m{number}"))
            if number == count // 3:
                running.set()
        await publisher.drain(60)
        return [await future for future in futures]


@pytest.mark.parametrize("crashes", [1, 3])
async def test_report_39_restart_with_the_same_store_loses_and_repeats_nothing(
    nats_server: Server, crashes: int
) -> None:
    """Through SIGKILLs of the server: every message once, gapless, in order per subject."""
    async with connected(nats_server.url) as bus:
        running = asyncio.Event()
        work = asyncio.create_task(_publish_many(bus, 6000, running))
        await running.wait()
        for _ in range(crashes):
            await nats_server.kill()
            await nats_server.start()
            await bus.wait_connected(20)
        published = await asyncio.wait_for(work, 60)
        stored = await read_all(bus)
    assert [message.seq for message in stored] == list(range(1, 6001))
    assert sorted(numbers(stored)) == list(range(6000))
    assert {p.seq: n for n, p in enumerate(published)} == dict(
        zip((m.seq for m in stored), numbers(stored), strict=True)
    )
    by_subject = defaultdict(list)
    for message in stored:
        by_subject[message.subject].append(int(message.data))
    assert all(found == sorted(found) for found in by_subject.values())


async def test_report_39_restart_with_an_empty_store_goes_on_in_order(nats_server: Server) -> None:
    """The stream is made again, and what follows is complete, in order and without repetition."""
    async with connected(nats_server.url) as bus:
        running = asyncio.Event()
        work = asyncio.create_task(_publish_many(bus, 6000, running))
        await running.wait()
        await nats_server.kill()
        await nats_server.restart(wipe=True)
        await bus.wait_connected(20)
        await bus.ensure_stream(SPEC)
        published = await asyncio.wait_for(work, 60)
        stored = await read_all(bus)
    assert len(published) == 6000
    found = numbers(stored)
    assert len(set(found)) == len(found)
    assert max(found) == 5999
    for residue in range(SUBJECTS):
        mine = [number for number in found if number % SUBJECTS == residue]
        assert mine == list(range(mine[0], 6000, SUBJECTS))


async def test_stale_second_writer_is_rejected(nats_url: str) -> None:
    """Who expects an old sequence is told the real one, and nothing is stored."""
    async with connected(nats_url) as bus, publishing(bus) as publisher:
        first = await publisher.publish("t.a", b"1", {}, msg_id="1", expected=0)
        await publisher.publish("t.b", b"x", {}, msg_id="x", expected=0)
        second = await publisher.publish("t.a", b"2", {}, msg_id="2", expected=first.seq)
        async with publishing(bus) as stale:
            with pytest.raises(WrongLast) as caught:
                await stale.publish("t.a", b"3", {}, msg_id="3", expected=first.seq)
            assert (caught.value.subject, caught.value.expected) == ("t.a", first.seq)
            assert caught.value.last == second.seq
            with pytest.raises(WrongLast):
                await stale.publish("t.a", b"4", {}, msg_id="4", expected=0)
        with pytest.raises(WrongLast) as caught:
            await publisher.publish("t.new", b"5", {}, msg_id="5", expected=7)
        assert caught.value.last == 0
        assert (await bus.stream_state(STREAM)).messages == 3


async def test_without_expectation_a_newer_message_is_adopted(nats_url: str) -> None:
    """Two writers that expect nothing both get through, each message once."""
    async with connected(nats_url) as bus, publishing(bus) as one, publishing(bus) as two:
        for number in range(6):
            writer = (one, two)[number % 2]
            done = await writer.publish("t.a", b"%d" % number, {}, msg_id=f"{number}")
            assert (done.seq, done.duplicate) == (number + 1, False)
        assert numbers(await read_all(bus)) == list(range(6))


async def test_two_busy_writers_on_one_subject_both_finish(nats_url: str) -> None:
    """Conflict after conflict, none gives up and nothing is stored twice."""
    async with connected(nats_url) as bus, publishing(bus) as one, publishing(bus) as two:
        work = [
            writer.publish("t.a", b"%d" % number, {}, msg_id=f"{number}")
            for number in range(30)
            for writer in [(one, two)[number % 2]]
        ]
        await asyncio.wait_for(asyncio.gather(*work), 30)
        assert sorted(numbers(await read_all(bus))) == list(range(30))


@pytest.mark.parametrize("expected", [None, 0])
async def test_lost_acknowledgement_is_found_to_be_ours(
    nats_url: str, expected: int | None
) -> None:
    """Stored, answer lost, connection cut: the retry is refused, and counts as our success."""
    async with connected(nats_url) as direct, Proxy(nats_url) as proxy:
        async with connected(proxy.url) as bus, publishing(bus) as publisher:
            proxy.hold()
            work = asyncio.create_task(
                publisher.publish("t.a", b"1", {}, msg_id="1", expected=expected)
            )
            await eventually(lambda: _messages(direct, 1))
            proxy.cut()
            assert await asyncio.wait_for(work, 10) == Published(1, True)
            assert await publisher.publish("t.a", b"2", {}, msg_id="2") == Published(2, False)
        assert numbers(await read_all(direct)) == [1, 2]


async def test_lost_acknowledgement_is_found_below_a_newer_message(nats_url: str) -> None:
    """Even when somebody else wrote after it, ours is found, and the newer one is known."""
    async with connected(nats_url) as direct, Proxy(nats_url) as proxy:
        async with connected(proxy.url) as bus, publishing(bus) as publisher:
            proxy.hold()
            work = asyncio.create_task(publisher.publish("t.a", b"1", {}, msg_id="1", expected=0))
            await eventually(lambda: _messages(direct, 1))
            async with publishing(direct) as other:
                await other.publish("t.a", b"2", {}, msg_id="2", expected=1)
            proxy.cut()
            assert await asyncio.wait_for(work, 10) == Published(1, True)
            assert await publisher.publish("t.a", b"3", {}, msg_id="3") == Published(3, False)


async def test_restarted_publisher_recognises_its_last_message(nats_url: str) -> None:
    """Sent again by a successor who knows no sequence, long after the server forgot the id."""
    forgetful = msgspec.structs.replace(SPEC, duplicate_window_s=0.1)
    async with connected(nats_url, ensure=forgetful) as bus:
        async with publishing(bus) as before:
            for number in range(3):
                await before.publish("t.a", b"%d" % number, {}, msg_id=f"{number}")
        await asyncio.sleep(0.3)  # the window of repeated ids
        async with publishing(bus) as after:
            assert await after.publish("t.a", b"2", {}, msg_id="2") == Published(3, True)
            assert await after.publish("t.a", b"3", {}, msg_id="3") == Published(4, False)
        assert numbers(await read_all(bus)) == list(range(4))


async def test_late_acknowledgement_does_not_complete_twice(nats_url: str) -> None:
    """An answer after its timeout, and that of the retry: one success, one stored message."""
    async with connected(nats_url) as direct, Proxy(nats_url) as proxy:
        async with connected(proxy.url) as bus, publishing(bus, ack_timeout=0.2) as publisher:
            proxy.hold()
            work = asyncio.create_task(publisher.publish("t.a", b"1", {}, msg_id="1"))
            await eventually(lambda: _messages(direct, 1))
            await asyncio.sleep(0.5)  # past the timeout, into the retries
            proxy.let_through()
            assert (await asyncio.wait_for(work, 10)).seq == 1
            await publisher.drain(10)
        assert (await direct.stream_state(STREAM)).messages == 1


async def test_window_bounds_what_is_on_the_wire(nats_url: str) -> None:
    """While nothing is acknowledged, no more than a window reaches the server."""
    async with connected(nats_url) as direct, Proxy(nats_url) as proxy:
        async with connected(proxy.url) as bus, publishing(bus, window=16) as publisher:
            proxy.hold()
            futures = [publisher.submit(f"t.{n}", b"x", {}, msg_id=f"{n}") for n in range(100)]
            waiting = asyncio.create_task(publisher.room())
            await eventually(lambda: _messages(direct, 16))
            await asyncio.sleep(0.1)  # were there more, they would come now
            assert (await direct.stream_state(STREAM)).messages == 16
            assert (publisher.pending, waiting.done()) == (100, False)
            proxy.let_through()
            await asyncio.wait_for(asyncio.gather(*futures), 10)
            await asyncio.wait_for(waiting, 1)
        assert (await direct.stream_state(STREAM)).messages == 100


async def test_one_message_per_subject_is_under_way(nats_url: str) -> None:
    """The next of a subject is sent when the one before is acknowledged, in the order given."""
    async with connected(nats_url) as direct, Proxy(nats_url) as proxy:
        async with connected(proxy.url) as bus, publishing(bus) as publisher:
            proxy.hold()
            futures = [publisher.submit("t.a", b"%d" % n, {}, msg_id=f"{n}") for n in range(20)]
            await eventually(lambda: _messages(direct, 1))
            await asyncio.sleep(0.1)  # were there more, they would come now
            assert (await direct.stream_state(STREAM)).messages == 1
            proxy.let_through()
            await asyncio.wait_for(asyncio.gather(*futures), 10)
        assert numbers(await read_all(direct)) == list(range(20))


async def test_oversize_message_is_refused_before_it_harms_the_connection(nats_url: str) -> None:
    """The error names subject, size and limit; others go on over the same connection."""
    states: list[bool] = []
    bus = await Bus.connect(nats_url, name="test", on_state=states.append)
    await bus.ensure_stream(SPEC)
    async with publishing(bus) as publisher:
        with pytest.raises(TooLarge) as caught:
            await publisher.publish("t.a", b"x" * (1 << 20), {}, msg_id="1")
        assert (caught.value.subject, caught.value.limit) == ("t.a", 1 << 20)
        assert caught.value.size > 1 << 20
        size = caught.value.limit - 400
        with pytest.raises(TooLarge):  # headers count
            await publisher.publish("t.a", b"x" * size, {"H": "y" * 500}, msg_id="2")
        with pytest.raises(TooLarge):  # as bytes
            await publisher.publish("t.a", b"x" * size, {"H": "ü" * 200}, msg_id="2")
        assert (await publisher.publish("t.a", b"x" * size, {}, msg_id="3")).seq == 1
        assert publisher.pending == 0
    assert states == [True]
    await bus.close()


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xfe", b"null", b'{"type":"X.v99"}', b"x" * 900_000, b"a\r\nMSG b 1 1\r\nc"],
    ids=["empty", "not-utf8", "null", "unknown-version", "900kB", "protocol"],
)
async def test_report_44_any_bytes_travel_unchanged(nats_url: str, data: bytes) -> None:
    """Whatever a payload holds, it is neither looked at nor able to disturb what follows."""
    async with connected(nats_url) as bus, publishing(bus) as publisher:
        await publisher.publish("t.my_lb", data, {}, msg_id="1")
        await publisher.publish("t.other", b"next", {}, msg_id="2")
        assert [message.data for message in await read_all(bus)] == [data, b"next"]
        last = await bus.last(STREAM, "t.my_lb")
        assert last is not None
        assert (last.data, last.seq, last.subject) == (data, 1, "t.my_lb")


async def test_headers_round_trip(nats_url: str) -> None:
    """What is put in comes out, by every way of reading; the caller's mapping is left alone."""
    headers = {"Lb-Type": "LeaseGranted.v1", "Lb-Cause": "e1:42", "X-Text": "Grüße: a=b", "X": ""}
    async with connected(nats_url) as bus, publishing(bus) as publisher:
        given = dict(headers)
        await publisher.publish("t.a", b"1", given, msg_id="id-1")
        assert given == headers
        pulled = (await read_all(bus))[0]
        by_seq, newest = await bus.get(STREAM, 1), await bus.last(STREAM, "t.a")
        assert by_seq is not None
        assert newest is not None
        for message in (pulled, by_seq, newest):
            assert message.headers.items() >= (headers | {MSG_ID: "id-1"}).items()
            assert (message.seq, message.time_ns) == (1, pulled.time_ns)


@pytest.mark.parametrize(
    ("subject", "headers"),
    [
        ("", {}),
        ("t.a b", {}),
        ("t.*", {}),
        ("t.>", {}),
        ("t..a", {}),
        ("t.a\r\nPUB t.b 0", {}),
        ("t.a", {"A B": "c"}),
        ("t.a", {"": "c"}),
        ("t.a", {"A": "b\r\nNats-Msg-Id: other"}),
    ],
)
async def test_what_would_be_read_otherwise_is_refused(
    nats_url: str, subject: str, headers: dict[str, str]
) -> None:
    """A subject or header that the protocol would take for something else never leaves."""
    async with connected(nats_url) as bus, publishing(bus) as publisher:
        with pytest.raises(BusError, match=r"subject|header"):
            await publisher.publish(subject, b"", headers, msg_id="1")
        assert publisher.pending == 0


async def test_missing_stream_is_waited_for(nats_url: str) -> None:
    """Published before the stream exists: it is stored when the stream does."""
    async with connected(nats_url, ensure=None) as bus, publishing(bus) as publisher:
        work = asyncio.create_task(publisher.publish("t.a", b"1", {}, msg_id="1"))
        await asyncio.sleep(0.2)
        assert not work.done()
        await bus.ensure_stream(SPEC)
        assert await asyncio.wait_for(work, 10) == Published(1, False)


async def test_foreign_stream_on_the_subject_is_an_error(nats_url: str) -> None:
    """A subject that another stream takes is a mistake of configuration, and is said so."""
    other = StreamSpec(name="TEST_OTHER", subjects=("o.>",), max_age_s=60.0, max_bytes=1 << 20)
    async with connected(nats_url) as bus, publishing(bus) as publisher:
        await bus.ensure_stream(other)
        with pytest.raises(BusError, match="expected stream does not match"):
            await publisher.publish("o.a", b"1", {}, msg_id="1")


@pytest.mark.parametrize("subjects", [("o.a", "o.b"), ("t.a", "o.b"), ("o.a", "t.b")], ids=" ".join)
async def test_no_member_of_a_batch_lands_in_a_foreign_stream(nats_url: str, subjects) -> None:
    """Whichever of them has such a subject: it is refused, and stored nowhere."""
    other = StreamSpec(name="TEST_OTHER", subjects=("o.>",), max_age_s=60.0, max_bytes=1 << 20)
    async with connected(nats_url) as bus, publishing(bus) as publisher:
        await bus.ensure_stream(SPEC)
        await bus.ensure_stream(other)
        with pytest.raises(BusError, match="expected stream does not match"):
            await publisher.publish_batch(
                [Outgoing(subject, b"1", {}, f"id-{subject}") for subject in subjects]
            )
        assert (await bus.stream_state("TEST_OTHER")).messages == 0


async def test_smaller_limit_after_a_restart_is_found_out() -> None:
    """What the new server cannot take fails, instead of ending its connections for ever."""
    async with NatsServer() as roomy, connected(roomy.url) as bus, publishing(bus) as publisher:
        await roomy.halt()
        await eventually(lambda: not bus.connected)
        work = publisher.submit("t.a", b"x" * 200_000, {}, msg_id="1")
        async with NatsServer(port=roomy.port, max_payload=100_000):
            with pytest.raises(TooLarge, match="max_payload of 100000"):
                await asyncio.wait_for(work, 10)


async def test_deadline_ends_a_publish_and_not_the_publisher(nats_server: Server) -> None:
    """No server in time: Unavailable. When it is back, later messages of the subject go on."""
    async with connected(nats_server.url) as bus, publishing(bus, deadline=0.3) as publisher:
        await nats_server.kill()
        results = await asyncio.gather(
            *(publisher.publish("t.a", b"1", {}, msg_id=f"a{n}") for n in range(3)),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [Unavailable] * 3
        await nats_server.start()
        await bus.wait_connected(20)
        assert (await publisher.publish("t.a", b"2", {}, msg_id="b")).duplicate is False
        assert publisher.pending == 0


async def test_cancelled_publish_does_not_block_its_subject(nats_url: str) -> None:
    """Whoever gives up waiting leaves the way free for the next."""
    async with connected(nats_url) as direct, Proxy(nats_url) as proxy:
        async with connected(proxy.url) as bus, publishing(bus) as publisher:
            proxy.hold()
            work = [
                asyncio.create_task(publisher.publish("t.a", b"%d" % n, {}, msg_id=f"{n}"))
                for n in range(4)
            ]
            await eventually(lambda: _messages(direct, 1))
            for task in work[:3]:
                task.cancel()
            proxy.let_through()
            await asyncio.wait_for(work[3], 10)
            assert publisher.pending == 0
        assert numbers(await read_all(direct)) == [0, 3]


async def test_given_up_messages_do_not_pile_up_in_an_outage(nats_server: Server) -> None:
    """Callers that time out and come again, for as long as it lasts, cost bounded memory."""
    async with connected(nats_server.url) as bus, publishing(bus, window=8) as publisher:
        await nats_server.kill()
        await eventually(lambda: not bus.connected)
        for number in range(5000):
            publisher.submit(f"t.{number}", b"", {}, msg_id=f"{number}").cancel()
        assert publisher.pending < 2500
        await nats_server.start()
        await bus.wait_connected(20)
        await publisher.publish("t.a", b"1", {}, msg_id="x")
        await eventually(lambda: publisher.pending == 0)
        assert numbers(await read_all(bus)) == [1]


async def test_repeated_id_elsewhere_is_reported_as_duplicate(nats_url: str) -> None:
    """The server knows ids for the whole stream: a second use is not stored, and is told."""
    async with connected(nats_url) as bus, publishing(bus) as publisher:
        await publisher.publish("t.a", b"1", {}, msg_id="same")
        assert await publisher.publish("t.b", b"2", {}, msg_id="same") == Published(1, True)
        assert await publisher.publish("t.b", b"3", {}, msg_id="new") == Published(2, False)


async def test_close_and_drain_say_what_is_left(nats_url: str) -> None:
    """Unacknowledged messages are an error of drain, and fail at close instead of hanging."""
    async with Proxy(nats_url) as proxy, connected(proxy.url) as bus:
        publisher = bus.publisher(STREAM, window=2)
        proxy.hold()
        futures = [publisher.submit("t.a", b"", {}, msg_id=f"{n}") for n in range(5)]
        with pytest.raises(Unavailable, match="5 messages for TEST"):
            await publisher.drain(0.1)
        await publisher.close()
        for future in futures:
            with pytest.raises(Unavailable, match="closed"):
                await future
        with pytest.raises(Unavailable, match="closed"):
            publisher.submit("t.a", b"", {}, msg_id="9")
        proxy.let_through()


async def test_closing_the_bus_leaves_nobody_waiting(nats_server: Server) -> None:
    """With the server down and the bus closed, a publish and a fetch end with an error."""
    async with connected(nats_server.url) as bus:
        await nats_server.kill()
        await eventually(lambda: not bus.connected)
        publisher, puller = bus.publisher(STREAM), bus.puller(STREAM, start_seq=1)
        publishing_ = asyncio.create_task(publisher.publish("t.a", b"", {}, msg_id="1"))
        fetching = asyncio.create_task(puller.fetch(10, 60))
        await asyncio.sleep(0.05)
        await bus.close()
        for task in (publishing_, fetching):
            with pytest.raises(Unavailable, match="closed"):
                await asyncio.wait_for(task, 2)


async def _messages(bus: Bus, count: int) -> bool:
    return (await bus.stream_state(STREAM)).messages >= count
