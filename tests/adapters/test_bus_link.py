"""Connections: waited for, watched, replaced; and what of the client library this rests on."""

import asyncio
from collections.abc import Iterator

import pytest
import structlog
from structlog.typing import EventDict

from sandbox.child import free_port
from sandbox.servers import NatsServer
from services.kit.bus import Bus, BusError, Unavailable
from services.kit.bus_link import Link
from services.kit.bus_wire import Credentials
from tests.adapters.proxy import Proxy
from tests.adapters.streams import SPEC, STREAM, connected, publishing
from tests.infra import Server
from tests.waiting import eventually


@pytest.fixture
def logs() -> Iterator[list[EventDict]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


async def test_listener_gets_what_is_on_the_wire(nats_url: str) -> None:
    """The internals of the client library that we replace are still what they were."""
    link = Link(nats_url, "test", Credentials())
    await link.start()
    heard: list[tuple[bytes, bytes, bytes | None, bytes]] = []
    try:
        link.listen("raw.*", lambda *message: heard.append(message))
        link.send("raw.a", "back.here", b"NATS/1.0\r\nA: b\r\n\r\n", b"\x00\xff")
        link.send("raw.b", "", b"", b"")
        await eventually(lambda: len(heard) == 2)
        assert heard == [
            (b"raw.a", b"back.here", b"NATS/1.0\r\nA: b\r\n\r\n", b"\x00\xff"),
            (b"raw.b", b"", None, b""),
        ]
    finally:
        await link.close()


async def test_failing_listener_does_not_deafen_the_connection(nats_url: str) -> None:
    """An exception in one listener is logged, and later messages still arrive."""
    link = Link(nats_url, "test", Credentials())
    await link.start()
    heard: list[bytes] = []

    def listener(_: bytes, __: bytes, ___: bytes | None, data: bytes) -> None:
        heard.append(data)
        raise RuntimeError(data)

    try:
        link.listen("raw", listener)
        for body in (b"1", b"2"):
            link.send("raw", "", b"", body)
        await eventually(lambda: heard == [b"1", b"2"])
    finally:
        await link.close()


async def test_connect_waits_for_a_server_that_comes_later(logs: list[EventDict]) -> None:
    """The order in which things start does not matter; meanwhile a log names the address."""
    port = free_port()
    connecting = asyncio.create_task(Bus.connect(f"nats://127.0.0.1:{port}", name="early"))
    await eventually(lambda: any(line["event"] == "bus.waiting" for line in logs))
    assert logs[0]["address"] == f"nats://127.0.0.1:{port}"
    async with NatsServer(port=port):
        bus = await asyncio.wait_for(connecting, 10)
        assert bus.connected
        await bus.close()


async def test_connect_can_be_cancelled() -> None:
    """Giving up leaves no task behind."""
    before = len(asyncio.all_tasks())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await Bus.connect(f"nats://127.0.0.1:{free_port()}", name="test")
    assert len(asyncio.all_tasks()) == before


@pytest.mark.parametrize("url", ["", "http://h:1", "nats://", "nats://h:port", "nats://a:1,h:2"])
async def test_what_is_no_address_is_refused_at_once(url: str) -> None:
    """A mistake in the setting is an error with what would be right, not an endless wait."""
    with pytest.raises(BusError, match="must be nats://host:port"):
        await Bus.connect(url, name="test")


async def test_credentials_are_used_and_never_shown(logs: list[EventDict]) -> None:
    """The right password connects; a wrong one waits, and no log line holds it."""
    auth = 'authorization { user: "u", password: "right-secret" }'
    async with NatsServer(config=auth) as server:
        bus = await Bus.connect(server.url, name="test", user="u", password="right-secret")
        await bus.close()
        inside = server.url.replace("//", "//u:right-secret@")
        bus = await Bus.connect(inside, name="test")
        assert bus.address == server.url
        await bus.close()
        wrong = server.url.replace("//", "//u:wrong-secret@")
        for url, user, password in ((server.url, "u", "wrong-secret"), (wrong, None, None)):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await Bus.connect(url, name="test", user=user, password=password)
    assert any("Authorization" in str(line.get("reason")) for line in logs)
    assert "-secret" not in str(logs)


async def test_state_is_told_and_subscriptions_return(nats_server: Server) -> None:
    """After a restart of the server everything works again on the same objects."""
    states: list[bool] = []
    bus = await Bus.connect(nats_server.url, name="test", on_state=states.append)
    await bus.ensure_stream(SPEC)
    async with publishing(bus) as publisher:
        await publisher.publish("t.a", b"1", {}, msg_id="1")
        await nats_server.kill()
        await eventually(lambda: not bus.connected)
        with pytest.raises(Unavailable):
            await bus.stream_state(STREAM)
        with pytest.raises(Unavailable, match="no NATS server at nats://127"):
            await bus.wait_connected(0.05)
        await nats_server.start()
        await bus.wait_connected(20)
        assert (await publisher.publish("t.a", b"2", {}, msg_id="2")).seq == 2
    assert states == [True, False, True]
    await bus.close()
    assert states[-1] is False


async def test_failing_state_callback_costs_nothing(nats_server: Server) -> None:
    """A mistake in the callback is logged; the connection is had again all the same."""

    def callback(up: bool) -> None:
        raise RuntimeError(up)

    bus = await Bus.connect(nats_server.url, name="test", on_state=callback)
    await nats_server.halt()
    await eventually(lambda: not bus.connected)
    await nats_server.start()
    await bus.wait_connected(20)
    await bus.close()


async def test_request_in_flight_fails_when_the_connection_goes(nats_url: str) -> None:
    """A question whose answer is lost fails at once instead of at its timeout."""
    async with Proxy(nats_url) as proxy, connected(proxy.url) as bus:
        proxy.hold()
        asking = asyncio.create_task(bus.stream_state(STREAM))
        await asyncio.sleep(0.05)
        proxy.cut()
        with pytest.raises(Unavailable, match="lost"):
            await asyncio.wait_for(asking, 2)
        await bus.wait_connected(10)
        assert (await bus.stream_state(STREAM)).messages == 0


async def test_server_that_ends_the_connection_for_an_error_is_returned_to() -> None:
    """A protocol error makes the library give up for good; the link does not."""
    async with NatsServer() as server:
        link = Link(server.url, "test", Credentials())
        await link.start()
        states: list[bool] = []
        link.watch(states.append)
        try:
            link.send("a b c d e", "", b"", b"")
            await eventually(lambda: states == [False, True])
        finally:
            await link.close()
