"""What the looking commands make of the last events in a real NATS."""

import pytest

from schema import events
from services.cli import looking
from tests.core.prober_objects import balancer
from tests.feeding import T0, Feeder

OLD = events.Owner(plural="loadbalancers", namespace="default", name="web", uid="uid-old")
WEB = events.Owner(plural="loadbalancers", namespace="default", name="web", uid="uid-web")


def image(owner, revision, *ready):
    backends = [
        events.Backend(
            namespace="default",
            name=f"vm{i}",
            uid=f"uid-{i}",
            address=f"10.0.0.{i}",
            ready=up,
            state="healthy",
        )
        for i, up in enumerate(ready)
    ]
    return events.BackendsResolved(
        at=T0, owner=owner, revision=revision, generation=1, ports=[], backends=backends,
        matched=len(ready),
    )  # fmt: skip


def health(owner, revision, healthy, total, dummy=""):
    return events.HealthChanged(
        at=T0, owner=owner, revision=revision, changes=[], healthy=healthy, total=total, dummy=dummy
    )


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ([image(WEB, 1, False, True), health(WEB, 2, 2, 2)], (2, 2, "")),
        ([image(WEB, 1, True), health(WEB, 2, 0, 1, "192.0.0.8"), image(WEB, 3, True)], (1, 1, "")),
        ([image(OLD, 8, True), health(OLD, 9, 0, 1, "192.0.0.8"), image(WEB, 1, True)], (1, 1, "")),
        ([image(OLD, 8, True)], (None, None, "")),
    ],
    ids=["newer-verdict", "checks-off", "made-anew", "not-looked-at-yet"],
)
async def test_the_newest_word_about_this_object_counts(nats_url, said, shown):
    """Images and verdicts come on two subjects, and a name may have belonged to another before."""
    feeder = await Feeder.start(nats_url)
    publisher = feeder.bus.publisher("LB")
    try:
        await feeder.seen(balancer())
        for number, event in enumerate(said):
            await publisher.publish(
                events.subject_of(event), events.encode(event), {}, msg_id=str(number)
            )
        (web,) = await looking.balancers(feeder.bus)
    finally:
        await publisher.close()
        await feeder.close()
    assert (web.healthy, web.backends, web.dummy) == shown
