"""Streams as data: made, compared, changed; and direct reads."""

import asyncio
from typing import Any

import msgspec
import nats
import pytest
import structlog

from schema.subjects import STREAMS, StreamSpec
from services.kit.bus import BusError, StreamMissing
from tests.adapters.streams import SPEC, STREAM, connected, fill, publishing


async def _config(url: str, stream: str) -> dict[str, Any]:
    client = await nats.connect(url)
    try:
        answer = await client.request(f"$JS.API.STREAM.INFO.{stream}", timeout=5)
        return dict(msgspec.json.decode(answer.data)["config"])
    finally:
        await client.close()


async def test_stream_is_made_as_specified(nats_url: str) -> None:
    """A full log on files, pruned by age and size only, that nobody can edit."""
    async with connected(nats_url):
        config = await _config(nats_url, STREAM)
    wanted = {
        "subjects": ["t.>"],
        "storage": "file",
        "retention": "limits",
        "discard": "old",
        "max_age": 3600 * 10**9,
        "max_bytes": 1 << 30,
        "max_msgs_per_subject": -1,
        "duplicate_window": 120 * 10**9,
        "compression": "s2",
        "allow_direct": True,
        "allow_atomic": True,
        "deny_delete": True,
        "deny_purge": True,
    }
    assert {key: config.get(key) for key in wanted} == wanted


async def test_our_own_streams_can_be_made(nats_url: str) -> None:
    """The specifications in the contract are ones that the server takes."""
    async with connected(nats_url, ensure=None) as bus:
        for spec in STREAMS.values():
            state = await bus.ensure_stream(spec)
            assert (state.name, state.last_seq) == (spec.name, 0)
            assert await bus.ensure_stream(spec) == state


async def test_many_at_once_make_one_stream(nats_url: str) -> None:
    """Services start together; whoever is later finds the stream."""
    async with connected(nats_url, ensure=None) as bus:
        states = await asyncio.gather(*(bus.ensure_stream(SPEC) for _ in range(8)))
        assert len({state.created for state in states}) == 1


async def test_change_keeps_messages_and_what_others_set(nats_url: str) -> None:
    """An update touches only our settings."""
    async with connected(nats_url) as bus:
        await fill(bus, 5)
        before = await bus.stream_state(STREAM)
        client = await nats.connect(nats_url)
        config = await _config(nats_url, STREAM) | {"description": "by hand"}
        await client.request(f"$JS.API.STREAM.UPDATE.{STREAM}", msgspec.json.encode(config))
        await client.close()
        longer = msgspec.structs.replace(SPEC, max_age_s=7200.0, subjects=("t.>", "u.>"))
        assert await bus.ensure_stream(longer) == before
        config = await _config(nats_url, STREAM)
        assert (config["max_age"], config["subjects"]) == (7200 * 10**9, ["t.>", "u.>"])
        assert config["description"] == "by hand"


async def test_lowered_retention_is_said(nats_url: str) -> None:
    """Whoever shortens what is kept finds a warning with both values."""
    async with connected(nats_url) as bus:
        with structlog.testing.capture_logs() as logs:
            await bus.ensure_stream(msgspec.structs.replace(SPEC, max_age_s=60.0))
        lowered = [line for line in logs if line["event"] == "bus.stream.retention_lowered"]
        assert [(line["limit"], line["after"]) for line in lowered] == [("max_age", 60 * 10**9)]
        assert lowered[0]["before"] == 3600 * 10**9


async def test_refused_specification_says_why(nats_url: str) -> None:
    """What the server cannot do is an error with its words, not something to wait for."""
    async with connected(nats_url, ensure=None) as bus:
        with pytest.raises(BusError, match=r"(?i)replicas"):
            await bus.ensure_stream(msgspec.structs.replace(SPEC, replicas=3))
        overlapping = StreamSpec(name="TEST2", subjects=("t.a",), max_age_s=60.0, max_bytes=1 << 20)
        await bus.ensure_stream(SPEC)
        with pytest.raises(BusError, match="overlap"):
            await bus.ensure_stream(overlapping)


@pytest.mark.parametrize("allow_direct", [True, False])
async def test_direct_reads(nats_url: str, allow_direct: bool) -> None:
    """By subject and by sequence; absent ones are None; also where direct reads are off."""
    async with connected(nats_url) as bus, publishing(bus) as publisher:
        if not allow_direct:
            client = await nats.connect(nats_url)
            config = await _config(nats_url, STREAM) | {"allow_direct": False}
            await client.request(f"$JS.API.STREAM.UPDATE.{STREAM}", msgspec.json.encode(config))
            await client.close()
        for number in range(3):
            await publisher.publish("t.a", b"%d" % number, {"N": f"{number}"}, msg_id=f"{number}")
        newest, second = await bus.last(STREAM, "t.a"), await bus.get(STREAM, 2)
        assert newest is not None
        assert second is not None
        assert (newest.seq, newest.data, newest.headers["N"]) == (3, b"2", "2")
        assert (second.seq, second.subject, second.data) == (2, "t.a", b"1")
        assert second.time_ns < newest.time_ns
        assert await bus.last(STREAM, "t.none") is None
        assert await bus.get(STREAM, 99) is None


async def test_missing_stream_is_named(nats_url: str) -> None:
    """Every question about a stream that is not there has the same error."""
    async with connected(nats_url, ensure=None) as bus:
        with pytest.raises(StreamMissing, match="TEST"):
            await bus.stream_state(STREAM)
        with pytest.raises(StreamMissing, match="TEST"):
            await bus.last(STREAM, "t.a")
        with pytest.raises(StreamMissing, match="TEST"):
            await bus.get(STREAM, 1)
