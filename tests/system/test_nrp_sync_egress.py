"""Egress pods from facts to gateways at the provider, and their finalizers."""

from datetime import UTC, datetime

from tests.system.nrp_rig import node, pod, rig, service, slice_of, uid
from tests.waiting import eventually

GONE = datetime(2026, 11, 30, 12, tzinfo=UTC)
BOTH = node("n1", "172.16.0.1", "2001:db8:2::1")


async def held(r, name):
    """Whether our finalizer is to stay on a pod."""
    image = await r.image(name)
    return image is not None and image.finalizer


async def test_pods_leave_by_a_gateway_of_their_own(nats_url, database_url):
    """A gateway with an address per family is made, used, and deleted before its last pod goes."""
    async with rig(nats_url, database_url) as r:
        await r.seen(BOTH, pod("p1", 1, "Shop", "10.0.0.1", "2001:db8:1::1", finalizer=False))
        await r.synced()
        await r.start()
        await eventually(lambda: held(r, "p1"))
        assert r.changes() == []
        await r.seen(
            pod("p1", 1, "Shop", "10.0.0.1", "2001:db8:1::1"), pod("p2", 2, "shop", "10.0.0.2")
        )
        await eventually(
            lambda: (
                r.locations()
                == {
                    "172.16.0.1": {"10.0.0.1": {"shop"}, "10.0.0.2": {"shop"}},
                    "2001:db8:2::1": {"2001:db8:1::1": {"shop"}},
                }
            )
        )
        assert r.resources() == {"shop", "shop-pip", "shop-pip-v6"}
        await r.seen(pod("p2", 2, "shop", "10.0.0.2", deletion_timestamp=GONE))
        await eventually(lambda: released(r, "p2"))
        assert r.locations()["172.16.0.1"] == {"10.0.0.1": {"shop"}}
        await r.seen(pod("p1", 1, "shop", "10.0.0.1", "2001:db8:1::1", deletion_timestamp=GONE))
        await eventually(lambda: released(r, "p1"))
        assert r.resources() == set()
        assert r.registered() == set()
        assert r.locations() == {}


async def released(r, name):
    image = await r.image(name)
    return image is not None and not image.finalizer


async def test_address_in_both_roles_keeps_the_other(nats_url, database_url):
    """A pod that is backend and leaves by a gateway keeps one role when it loses the other."""
    async with rig(nats_url, database_url) as r:
        await r.seen(
            BOTH,
            service("web", 5),
            slice_of("web-a", "web", ["10.0.0.1"]),
            pod("p1", 1, "shop", "10.0.0.1"),
        )
        await r.synced()
        await r.start()
        await eventually(lambda: r.locations() == {"172.16.0.1": {"10.0.0.1": {"shop", uid(5)}}})
        await r.seen(pod("p1", 1, "", "10.0.0.1"))
        await eventually(lambda: r.locations() == {"172.16.0.1": {"10.0.0.1": {uid(5)}}})
        await eventually(lambda: r.registered() == {uid(5)})


async def test_egress_survives_a_restart(nats_url, database_url):
    """After a restart nothing is sent that was sent before, and a pod on its way out is let go."""
    async with rig(nats_url, database_url) as r:
        await r.seen(BOTH, pod("p1", 1, "shop", "10.0.0.1"), pod("p2", 2, "shop", "10.0.0.2"))
        await r.synced()
        await r.start()
        await eventually(lambda: len(r.locations().get("172.16.0.1", {})) == 2)
        await r.stop()
        sent = len(r.changes())
        await r.seen(pod("p2", 2, "shop", "10.0.0.2", deletion_timestamp=GONE))
        await r.start()
        await eventually(lambda: released(r, "p2"))
        assert len(r.changes()) == sent + 1
