"""Atomic batches: all or, where the server refuses, one by one; never twice."""

import asyncio

import msgspec
import nats
import pytest

from services.kit.bus import BusError, Outgoing, Published, TooLarge, Unavailable, WrongLast
from tests.adapters.proxy import Proxy
from tests.adapters.streams import SPEC, STREAM, connected, fill, numbers, publishing, read_all
from tests.infra import Server
from tests.waiting import eventually


def _batch(start: int, count: int, subjects: int = 1000) -> list[Outgoing]:
    return [
        Outgoing(f"t.{n % subjects}", b"%d" % n, {"N": f"{n}"}, f"m{n}")
        for n in range(start, start + count)
    ]


async def test_batch_is_stored_together_in_order(nats_url: str) -> None:
    """Consecutive sequences in the order given; the next batch and single know them."""
    async with connected(nats_url) as bus, publishing(bus) as publisher:
        first = await publisher.publish_batch(_batch(0, 1000))
        second = await publisher.publish_batch(_batch(1000, 1000))
        third = asyncio.create_task(publisher.publish_batch(_batch(3000, 10)))
        await asyncio.sleep(0)
        await publisher.drain(10)
        assert third.done() or await third
        single = await publisher.publish("t.5", b"2000", {}, msg_id="m2000")
        assert [done.seq for done in first + second] == list(range(1, 2001))
        assert single == Published(2011, False)
        assert publisher.batches.refused == 0
        stored = await read_all(bus)
        assert numbers(stored) == [*range(2000), *range(3000, 3010), 2000]
        assert stored[42].headers["N"] == "42"


async def test_several_messages_of_one_subject_keep_their_order(nats_url: str) -> None:
    """A subject may occur in a batch more than once."""
    async with connected(nats_url) as bus, publishing(bus) as publisher:
        await publisher.publish_batch(_batch(0, 30, subjects=4))
        await publisher.publish_batch(_batch(30, 30, subjects=4))
        assert publisher.batches.refused == 0
        assert numbers(await read_all(bus)) == list(range(60))


async def test_repeated_id_costs_the_batch_and_no_message(nats_url: str) -> None:
    """The server rejects all of it; each then goes alone, and the repetition is told."""
    async with connected(nats_url) as bus, publishing(bus) as publisher:
        await publisher.publish("t.3", b"3", {}, msg_id="m3")
        done = await publisher.publish_batch(_batch(0, 6))
        assert publisher.batches.refused == 1
        assert done[3] == Published(1, True)
        assert sorted(numbers(await read_all(bus))) == list(range(6))


async def test_unknown_last_sequence_is_adopted(nats_url: str) -> None:
    """A new publisher does not know what others wrote; its batch still gets through."""
    async with connected(nats_url) as bus, publishing(bus) as publisher:
        await fill(bus, 20, subjects=20)
        done = await publisher.publish_batch(_batch(20, 40, subjects=20))
        assert [p.duplicate for p in done] == [False] * 40
        stored = numbers(await read_all(bus))
        for subject in range(20):
            mine = [n for n in stored if n % 20 == subject]
            assert mine == [subject, subject + 20, subject + 40]


async def test_one_conflict_is_raised_and_the_rest_stored(nats_url: str) -> None:
    """Who expected a wrong sequence is told; the other messages of the batch are not lost."""
    async with connected(nats_url) as bus, publishing(bus) as publisher:
        await fill(bus, 1)
        batch = [message._replace(expected=0) for message in _batch(0, 5)]
        batch[0] = batch[0]._replace(msg_id="other")
        with pytest.raises(WrongLast) as caught:
            await publisher.publish_batch(batch)
        assert (caught.value.subject, caught.value.last) == ("t.0", 1)
        assert sorted(numbers(await read_all(bus))) == list(range(5))
        assert publisher.pending == 0


async def test_singles_and_batches_of_one_subject_stay_in_order(nats_url: str) -> None:
    """A batch waits for what is under way on its subjects, and what comes later waits for it."""
    async with connected(nats_url) as bus, publishing(bus) as publisher:
        work: list[asyncio.Future[object]] = []
        for start in range(0, 400, 40):
            single = _batch(start, 1, subjects=7)[0]
            future = publisher.submit(single.subject, single.data, {}, msg_id=single.msg_id)
            work.append(future)  # type: ignore[arg-type]
            batch = publisher.publish_batch(_batch(start + 1, 39, subjects=7))
            work.append(asyncio.ensure_future(batch))
            await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*work), 30)
        stored = numbers(await read_all(bus))
        for subject in range(7):
            mine = [n for n in stored if n % 7 == subject]
            assert mine == list(range(subject, 400, 7))


async def test_lost_commit_is_found_to_be_ours(nats_url: str) -> None:
    """Stored, answer lost: the messages are recognised one by one."""
    async with connected(nats_url) as direct, Proxy(nats_url) as proxy:
        async with connected(proxy.url) as bus, publishing(bus) as publisher:
            proxy.hold()
            work = asyncio.create_task(publisher.publish_batch(_batch(0, 50, subjects=20)))

            async def stored() -> bool:
                return (await direct.stream_state(STREAM)).messages == 50

            await eventually(stored)
            proxy.cut()
            done = await asyncio.wait_for(work, 20)
            assert done == [Published(n, True) for n in range(1, 51)]
        assert numbers(await read_all(direct)) == list(range(50))


async def test_batches_through_a_crash_of_the_server(nats_server: Server) -> None:
    """SIGKILL in the middle: every message once, in order per subject."""
    async with connected(nats_server.url) as bus, publishing(bus, ack_timeout=0.5) as publisher:
        half = asyncio.Event()

        async def work() -> None:
            for start in range(0, 8000, 200):
                await publisher.publish_batch(_batch(start, 200, subjects=50))
                if start == 2000:
                    half.set()

        task = asyncio.create_task(work())
        await half.wait()
        await nats_server.kill()
        await nats_server.start()
        await asyncio.wait_for(task, 60)
        stored = await read_all(bus)
        assert [message.seq for message in stored] == list(range(1, 8001))
        for subject in range(50):
            mine = [n for n in numbers(stored) if n % 50 == subject]
            assert mine == list(range(subject, 8000, 50))


async def test_server_without_batches(nats_url: str) -> None:
    """A stream that does not take batches gets single messages, in order."""
    async with connected(nats_url) as bus, publishing(bus) as publisher:
        client = await nats.connect(nats_url)
        answer = await client.request(f"$JS.API.STREAM.INFO.{STREAM}")
        config = msgspec.json.decode(answer.data)["config"] | {"allow_atomic": False}
        await client.request(f"$JS.API.STREAM.UPDATE.{STREAM}", msgspec.json.encode(config))
        await client.close()
        for start in (0, 30):
            done = await publisher.publish_batch(_batch(start, 30, subjects=30))
            assert [p.duplicate for p in done] == [False] * 30
        assert publisher.batches.refused == 1  # not tried again for a while
        assert sorted(numbers(await read_all(bus))) == list(range(60))


async def test_limits_are_said_before_anything_is_sent(nats_url: str) -> None:
    """Too many, too large: an error, and nothing stored. None at all is fine."""
    async with connected(nats_url) as bus, publishing(bus) as publisher:
        with pytest.raises(BusError, match="1001 messages"):
            await publisher.publish_batch(_batch(0, 1001))
        with pytest.raises(TooLarge):
            await publisher.publish_batch(
                [*_batch(0, 2), Outgoing("t.x", b"x" * (1 << 20), {}, "x")]
            )
        assert await publisher.publish_batch([]) == []
        assert publisher.pending == 0
        assert (await bus.stream_state(STREAM)).messages == 0


async def test_cancelled_batch_frees_its_subjects(nats_server: Server) -> None:
    """Whoever gives up waiting for a batch leaves nothing locked and nothing counted."""
    async with connected(nats_server.url, ensure=SPEC) as bus:
        async with publishing(bus) as publisher, Proxy(nats_server.url) as proxy:
            async with connected(proxy.url) as far, publishing(far) as held:
                proxy.hold()
                task = asyncio.create_task(held.publish_batch(_batch(0, 10)))
                waiting = asyncio.create_task(held.publish_batch(_batch(0, 10)))
                await asyncio.sleep(0.1)
                for each in (waiting, task):
                    each.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await each
                proxy.let_through()
                assert held.pending == 0
                done = await asyncio.wait_for(held.publish("t.0", b"10", {}, msg_id="m10"), 10)
                assert done.seq == 11
            with pytest.raises(Unavailable):
                await held.publish_batch(_batch(0, 2))
            assert (await publisher.publish("t.1", b"11", {}, msg_id="m11")).seq == 12
