"""What the answers of an API server mean for a write of the applier."""

from datetime import UTC, datetime

import msgspec
import pytest

from sandbox.kube import KubeServer
from schema import events, names
from services.applier import plans, writing
from services.applier.targets import ABSENT, Key
from services.kit.kube import Kube
from tests.system.applier_rig import EVENT, FORMS, balancer
from tests.system.watcher_rig import CRD, LB, SERVICE

OWNER = events.Owner(plural="loadbalancers", namespace="default", name="web", uid="u1")


@pytest.fixture
async def api():
    async with KubeServer() as server:
        yield server


@pytest.fixture
async def kube(api, tmp_path):
    async with await Kube.connect(str(api.write_kubeconfig(tmp_path / "kubeconfig"))) as client:
        yield client


def service(**metadata):
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web", "namespace": "default", **metadata},
        "spec": {
            "type": "LoadBalancer",
            "loadBalancerIP": "192.0.2.10",
            "ports": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080}],
        },
    }


def write(verb, body, *, plural="services", part="", **more):
    return plans.Write(
        key=Key(plural, "default", "web", part),
        entity="u1",
        owner=OWNER,
        target="test",
        verb=verb,
        body=body,
        digest="d",
        **more,
    )


async def get(kube, resource=SERVICE, name="web"):
    return msgspec.json.decode(await kube.get(resource.path("default", name)))


async def test_create_makes_the_object_and_takes_over_nobody_elses(kube):
    """The first creates; a second, which did not see the first, is a conflict and changes nothing,
    and brings the object as it is."""
    done = await writing.perform(kube, write("apply", service(), creates=True), 0)
    assert done.outcome.outcome == "written"
    before = await get(kube)

    other = service(labels={"x": "y"})
    other["spec"]["ports"][0]["targetPort"] = 1
    again = await writing.perform(kube, write("apply", other, creates=True), 0)
    assert (again.outcome.outcome, again.outcome.retry_in) == ("conflict", 0.0)
    assert again.outcome.seen.metadata.uid == before["metadata"]["uid"]
    assert await get(kube) == before


async def test_update_brings_back_nothing_that_was_deleted(kube):
    """With the uid of the object that it was thought out on, an apply neither creates nor touches
    a successor."""
    gone = await writing.perform(kube, write("apply", service(uid="of-the-old-one")), 0)
    assert (gone.outcome.outcome, gone.outcome.seen) == ("conflict", ABSENT)
    await writing.perform(kube, write("apply", service(), creates=True), 0)
    before = await get(kube)
    body = service(uid="of-the-old-one", labels={"x": "y"})
    other = await writing.perform(kube, write("apply", body), 0)
    assert other.outcome.outcome == "conflict"
    assert await get(kube) == before


async def test_stale_patches_are_conflicts_with_the_object_as_it_is(kube):
    """A merge patch by its resourceVersion, a JSON patch by its test."""
    await writing.perform(kube, write("apply", service(), creates=True), 0)
    version = (await get(kube))["metadata"]["resourceVersion"]
    test = {"op": "test", "path": "/metadata/resourceVersion", "value": "1"}
    for stale in (
        write("json", [test, {"op": "remove", "path": "/spec/ports/0"}]),
        write("merge", {"metadata": {"resourceVersion": "1", "finalizers": ["a.b/c"]}}),
    ):
        result = await writing.perform(kube, stale, 0)
        assert result.outcome.outcome == "conflict", stale
        assert result.outcome.seen.metadata.resource_version == version


async def test_deleting_is_done_when_it_is_gone_and_spares_a_successor(kube):
    """404 is what was wanted; another uid under the name is not ours to delete."""
    done = await writing.perform(kube, write("delete", None, uid="u"), 0)
    assert done.outcome.outcome == "deleted"
    await writing.perform(kube, write("apply", service(), creates=True), 0)
    kept = await writing.perform(kube, write("delete", None, uid="u"), 0)
    assert kept.outcome.outcome == "conflict"
    assert await get(kube) is not None
    uid = (await get(kube))["metadata"]["uid"]
    done = await writing.perform(kube, write("delete", None, uid=uid), 0)
    assert (done.outcome.outcome, done.outcome.seen) == ("deleted", ABSENT)


@pytest.mark.parametrize(
    ("status", "reason", "least", "most", "pause"),
    [
        (422, "Invalid", 600, 600, False),
        (403, "Forbidden", 0.05, 0.1, False),
        (429, "Throttled", 7, 7, True),
        (503, "Unavailable", 0.05, 7, False),
        (500, "Unavailable", 0.05, 7, False),
    ],
)
async def test_each_refusal_has_its_own_patience(api, kube, status, reason, least, most, pause):
    """What is wrong waits for a change, what is busy as long as it asks, the rest backs off."""
    api.faults.fail(verb="patch", path="/services/web", status=status, retry_after=7, times=1)
    result = await writing.perform(kube, write("apply", service(), creates=True), 0)
    assert (result.outcome.outcome, result.outcome.reason) == ("failed", reason)
    assert least <= result.outcome.retry_in <= most
    assert bool(result.pause) == pause


async def test_failures_wait_longer_each_time_up_to_a_bound(api, kube):
    """A server that does not answer is asked ever more rarely, and never given up."""
    api.faults.fail(verb="patch", path="/services/web", drop="before", times=100)
    waits = []
    for attempts in (0, 3, 6, 12, 60):
        result = await writing.perform(kube, write("apply", service(), creates=True), attempts)
        waits.append(result.outcome.retry_in)
    assert waits[0] <= 0.1
    assert 0.4 <= waits[1] <= 0.8
    assert 15 <= waits[3] <= 30
    assert 15 <= waits[4] <= 30


async def test_missing_namespace_is_no_conflict_and_no_success(kube):
    """404 on a create: the namespace is gone; tried again, ever more slowly."""
    missing = msgspec.structs.replace(
        write("apply", service(namespace="nowhere"), creates=True),
        key=Key("services", "nowhere", "web"),
    )
    result = await writing.perform(kube, missing, 3)
    assert (result.outcome.outcome, result.outcome.reason) == ("failed", "NotFound")
    assert result.outcome.retry_in > 0


@pytest.mark.parametrize("form", ["ours", "harvester"])
async def test_status_written_the_wrong_way_is_noticed(kube, form):
    """With the other form of the CRD a status is refused or silently not kept: both are said to be
    a reason to look at the form again."""
    for definition in FORMS[form]():
        await kube.create(CRD.path(), definition)
    await kube.create(LB.path("default"), balancer("web"))
    wrong = "" if form == "ours" else "status"
    condition = {"type": "Ready", "status": "True"}
    body = {"metadata": {}, "status": {"conditions": [condition]}}
    status = write("merge", body, plural="loadbalancers", part="status", subresource=wrong)
    result = await writing.perform(kube, status, 0)
    assert result.outcome.outcome == "failed"
    assert result.rediscover

    right = msgspec.structs.replace(status, subresource="" if wrong else "status")
    result = await writing.perform(kube, right, 0)
    assert result.outcome.outcome == "written"
    assert not result.rediscover


async def test_pruned_fields_are_learned_from_the_answer(kube):
    """Harvester's schema keeps neither observedGeneration nor status.backends."""
    for definition in FORMS["harvester"]():
        await kube.create(CRD.path(), definition)
    await kube.create(LB.path("default"), balancer("web"))
    condition = {"type": "Ready", "status": "True", "observedGeneration": 1}
    backends = [{"name": "vm1", "address": "10.52.1.7", "ready": True, "state": "healthy"}]
    body = {"metadata": {}, "status": {"conditions": [condition], "backends": backends}}
    status = write("merge", body, plural="loadbalancers", part="status")
    result = await writing.perform(kube, status, 0)
    assert set(result.outcome.pruned) == {"observedGeneration", "backends"}


async def test_an_event_that_was_posted_is_not_posted_again(kube):
    """Its name follows from what it says."""
    notice = plans.Notice(
        kind="LoadBalancer",
        api_version="loadbalancer.harvesterhci.io/v1beta1",
        namespace="default",
        name="web",
        uid="u1",
        warning=True,
        reason="PoolExhausted",
        message="no free address in pool p1",
        event_name="web.0123abcd",
    )
    for _ in range(3):
        await writing.post(kube, notice, "test", datetime.now(UTC))
    body = msgspec.json.decode(await kube.get(EVENT.path("default")))
    (event,) = body["items"]
    assert event["note"] == "no free address in pool p1"
    assert event["reportingController"].startswith(names.FIELD_MANAGER)
