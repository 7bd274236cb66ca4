"""The compacted read of a full log: each subject's newest message."""

import pytest

from services.kit.bus import Message, Outgoing, StreamMissing, Unavailable
from tests.adapters.proxy import Proxy
from tests.adapters.streams import STREAM, connected, fill, publishing
from tests.waiting import eventually


async def test_twenty_thousand_subjects_newest_only(nats_url: str) -> None:
    """Every subject once, with its newest message, in order of sequence."""
    async with connected(nats_url) as bus, publishing(bus) as publisher:
        for version in range(2):
            for start in range(0, 20_000, 1000):
                await publisher.publish_batch(
                    [
                        Outgoing(f"t.{n}", b"%d" % version, {}, f"{version}:{n}")
                        for n in range(start, start + 1000)
                    ]
                )
        await publisher.publish("t.7", b"newest", {}, msg_id="x")
        found = [message async for message in bus.last_per_subject(STREAM, "t.>")]
    assert len(found) == 20_000
    assert {message.subject for message in found} == {f"t.{n}" for n in range(20_000)}
    assert [message.seq for message in found] == sorted(message.seq for message in found)
    assert {message.data for message in found[:-1]} == {b"1"}
    assert (found[-1].subject, found[-1].data) == ("t.7", b"newest")


async def test_headers_only_and_filter(nats_url: str) -> None:
    """Only what the filter takes, without bodies when none are wanted."""
    async with connected(nats_url) as bus, publishing(bus) as publisher:
        for subject in ("t.a.1", "t.a.2", "t.b.1"):
            await publisher.publish(subject, b"body", {"H": subject}, msg_id=subject)
        found = [m async for m in bus.last_per_subject(STREAM, "t.a.*", headers_only=True)]
        assert [(m.subject, m.data, m.headers["H"]) for m in found] == [
            ("t.a.1", b"", "t.a.1"),
            ("t.a.2", b"", "t.a.2"),
        ]


async def test_nothing_there_ends_at_once(nats_url: str) -> None:
    """An empty stream, and a filter that takes nothing, give nothing."""
    async with connected(nats_url) as bus:
        assert [m async for m in bus.last_per_subject(STREAM, "t.>")] == []
        await fill(bus, 3)
        assert [m async for m in bus.last_per_subject(STREAM, "t.none")] == []


async def test_changes_meanwhile_neither_prolong_nor_stop_it(nats_url: str) -> None:
    """A busy stream has an end too: what was there at the beginning."""
    async with connected(nats_url) as bus, publishing(bus) as publisher:
        await fill(bus, 5000, subjects=5000)
        found: list[Message] = []
        async for message in bus.last_per_subject(STREAM, "t.>"):
            if len(found) % 500 == 0:
                subject = f"t.{4999 - len(found)}"
                await publisher.publish(subject, b"-1", {}, msg_id=f"new{len(found)}")
            found.append(message)
        assert len(found) == 5000
        assert len({message.subject for message in found}) == 5000


async def test_missing_stream_and_lost_connection_are_errors(nats_url: str) -> None:
    """A partial snapshot never looks like a whole one."""
    async with connected(nats_url, ensure=None) as bus:
        with pytest.raises(StreamMissing):
            await anext(bus.last_per_subject(STREAM, "t.>"))
    async with Proxy(nats_url) as proxy, connected(proxy.url) as bus:
        await fill(bus, 8000, subjects=8000)
        reading = bus.last_per_subject(STREAM, "t.>")
        first = await anext(reading)
        assert first.seq == 1
        proxy.cut()
        with pytest.raises(Unavailable):
            [message async for message in reading]
        await bus.wait_connected(10)
        assert len([m async for m in bus.last_per_subject(STREAM, "t.>")]) == 8000


async def test_it_leaves_no_consumer(nats_url: str) -> None:
    """Read to the end or left half way, the server is asked to forget it."""
    async with connected(nats_url) as bus:
        await fill(bus, 50, subjects=50)
        assert len([m async for m in bus.last_per_subject(STREAM, "t.>")]) == 50
        reading = bus.last_per_subject(STREAM, "t.>")
        await anext(reading)
        await reading.aclose()  # type: ignore[attr-defined]  # it is a generator
        await eventually(lambda: _consumers(nats_url))


async def _consumers(url: str) -> bool:
    import nats

    client = await nats.connect(url)
    try:
        return not await client.jetstream().consumers_info(STREAM)
    finally:
        await client.close()
