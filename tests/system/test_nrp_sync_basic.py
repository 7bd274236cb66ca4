"""nrp_sync from facts on the bus to the provider's state, with real NATS, Postgres and HTTP."""

from datetime import UTC, datetime

import pytest

from tests.system.nrp_rig import node, rig, service, slice_of, uid
from tests.waiting import eventually


async def test_service_and_its_pods_become_provider_state(nats_url, database_url):
    """A Service of our class is registered, its addresses mapped, its address told; and undone."""
    async with rig(nats_url, database_url) as r:
        await r.seen(node("n1", "172.16.0.1"), service(), slice_of("web-a", "web", ["10.0.0.4"]))
        await r.synced()
        await r.start()
        await r.settled(1, "10.0.0.4")
        assert r.locations() == {"172.16.0.1": {"10.0.0.4": {uid(1)}}}
        assert r.registered() == {uid(1)}
        image = await r.reason("web", "Registered")
        assert image.backends == 1
        assert len(image.addresses) == 1
        await r.feeder.gone(service())
        await eventually(lambda: not r.registered() and not r.resources())
        assert r.locations() == {}
        await eventually(lambda: untold(r, "web"))


async def untold(r, name):
    return await r.image(name) is None


async def test_slices_of_one_service_are_united(nats_url, database_url):
    """[report-27] All slices of a service count; an address that changes slices stays."""
    async with rig(nats_url, database_url, LBLEDGER_NRP_QUIET_S="0.4") as r:
        await r.seen(
            node("n1", "172.16.0.1"),
            service(),
            slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2", "10.0.0.3"], 101),
            slice_of("web-b", "web", ["10.0.0.4", "10.0.0.5", "10.0.0.6"], 102),
        )
        await r.synced()
        await r.start()
        await r.settled(1, *(f"10.0.0.{n}" for n in range(1, 7)))
        await r.seen(slice_of("web-a", "web", [], 101))
        await r.settled(1, "10.0.0.4", "10.0.0.5", "10.0.0.6")
        sent = len(await r.batches())
        await r.seen(
            slice_of("web-b", "web", ["10.0.0.5", "10.0.0.6"], 102),
            slice_of("web-a", "web", ["10.0.0.4", "10.0.0.7"], 101),
        )
        await r.settled(1, "10.0.0.4", "10.0.0.5", "10.0.0.6", "10.0.0.7")
        assert (await r.batches())[sent:] == [{"172.16.0.1": {"10.0.0.7": [uid(1)]}}]


async def test_only_addresses_of_the_services_family_are_sent(nats_url, database_url):
    """[report-28] The other family and names are left out, are counted, and hold up nothing."""
    async with rig(nats_url, database_url, LBLEDGER_NRP_DUAL_STACK="first-family") as r:
        await r.seen(
            node("n1", "172.16.0.1", "2001:db8:2::1"),
            service(ip_families=["IPv6", "IPv4"], ip_family_policy="RequireDualStack"),
            slice_of("web-4", "web", ["10.0.0.7"], 101),
            slice_of("web-6", "web", ["2001:db8:1::7"], 102),
            slice_of("web-f", "web", ["host.example"], 103),
        )
        await r.synced()
        await r.start()
        await r.settled(1, "2001:db8:1::7")
        image = await r.reason("web", "Registered")
        assert "1 of another family" in image.message
        assert "1 malformed" in image.message
        assert r.locations() == {"2001:db8:2::1": {"2001:db8:1::7": {uid(1)}}}


@pytest.mark.parametrize("order", ["slice-first", "node-first"], ids="report-30-{}".format)
async def test_address_waits_for_its_node(nats_url, database_url, order):
    """[report-30] In either order the backend is there in the end; in between it says why not."""
    async with rig(nats_url, database_url) as r:
        await r.synced()
        await r.start()
        place, backends = node("n1", "172.16.0.1"), slice_of("web-a", "web", ["10.0.0.7"])
        await r.seen(service())
        await r.reason("web", "Registered")
        if order == "slice-first":
            await r.seen(backends)
            image = await r.reason("web", "WaitingForNode")
            assert "n1" in image.message
            await r.seen(place)
        else:
            await r.seen(place, backends)
        await r.settled(1, "10.0.0.7")
        await r.reason("web", "Registered")


async def test_nothing_is_made_before_the_finalizer_is_seen(nats_url, database_url):
    """Our finalizer is asked for first; without it on the object the provider hears nothing."""
    async with rig(nats_url, database_url) as r:
        await r.seen(node("n1", "172.16.0.1"), service(finalizer=False))
        await r.synced()
        await r.start()
        image = await r.reason("web", "WaitingForFinalizer")
        assert image.finalizer
        assert r.changes() == []
        await r.seen(service())
        await r.reason("web", "Registered")
        await r.seen(service(deletion_timestamp=datetime.now(UTC)))

        async def released():
            image = await r.image("web")
            return image is not None and not image.finalizer

        await eventually(released)
        assert not r.registered()
        assert not r.resources()


async def test_odd_spellings_of_addresses_hold_up_nothing(nats_url, database_url):
    """Spellings are one address, IPv4 in IPv6 clothes is IPv4, and what is none is left out."""
    async with rig(nats_url, database_url) as r:
        odd = ["2001:DB8:1:0:0::9", "::ffff:10.0.0.9", "::10.0.0.8", "::2", "fe80::1%eth0", "é"]
        await r.seen(
            node("n1", "::ffff:172.16.0.1", "2001:DB8:2::1"),
            service("six", 6, ip_families=["IPv6"]),
            service("four", 4),
            slice_of("six-a", "six", odd, 101),
            slice_of("four-a", "four", odd, 102),
        )
        await r.synced()
        await r.start()
        await r.settled(6, "2001:db8:1::9")
        await r.settled(4, "10.0.0.9")
        image = await r.reason("six", "Registered")
        assert "4 malformed" in image.message
        assert r.locations().keys() == {"172.16.0.1", "2001:db8:2::1"}
