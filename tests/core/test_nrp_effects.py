"""How the end of a call becomes a value."""

import msgspec
import pytest

from services.nrp_sync import effects
from services.nrp_sync import provider as port
from services.nrp_sync.memory import MemoryProvider
from services.nrp_sync.rows import decode_request
from services.nrp_sync.state import Done, Failed, Part, Request
from services.nrp_sync.steps import Step, Verb
from tests.core.nrp_world import World, node, pod, run_now, service, slice_of

CLASSES = [
    (port.Throttled, "throttled"),
    (port.PreconditionFailed, "precondition_failed"),
    (port.InUse, "in_use"),
    (port.Conflict, "conflict"),
    (port.NotFound, "not_found"),
    (port.Invalid, "invalid"),
    (port.QuotaExceeded, "quota_exceeded"),
    (port.OverlayMappings, "overlay_mappings"),
    (port.AuthFailed, "auth_failed"),
    (port.Unreachable, "unreachable"),
    (port.Unreadable, "unreadable"),
    (port.Unknown, "unknown"),
]


def putting():
    step = Step(verb=Verb.PUT_PUBLIC_IP, resource="x-pip", generation=1)
    return Request(
        number=1,
        id="r",
        lane="resources",
        verb="put_public_ip",
        payload=port.PublicAddress(name="x-pip"),
        parts=(Part(kind="inbound", identity="x", step=step),),
        sent_at=0.0,
    )


@pytest.mark.parametrize(("cls", "kind"), CLASSES)
def test_each_error_has_its_kind(cls, kind):
    """The class of the error decides what follows, with its code, request and Retry-After."""
    provider = MemoryProvider()
    error = cls("put_public_ip", "no", code="C", status=400, request_id="p", retry_after=7.0)
    provider.fail(error)
    outcome = run_now(effects.perform(provider, putting()))
    assert isinstance(outcome, Failed)
    failure = outcome.failure
    assert (failure.kind, failure.code, failure.message) == (kind, "C", "no")
    assert (failure.retry_after, failure.provider_request) == (7.0, "p")


@pytest.mark.parametrize(
    ("asked", "waits"),
    [(1e300, 3600.0), (float("inf"), 3600.0), (float("nan"), None), (-1.0, None)],
)
def test_whatever_a_provider_says_fits_a_row(asked, waits):
    """Texts that no row can hold are cleaned, waits without end are bounded."""
    provider = MemoryProvider()
    message = "no\0 \ud800" + "x" * 5000
    provider.fail(
        port.Throttled("put_public_ip", message, code="\0", request_id="\0", retry_after=asked)
    )
    failure = run_now(effects.perform(provider, putting())).failure
    assert failure.retry_after == waits
    for text in (failure.message, failure.code, failure.provider_request):
        assert "\0" not in text
        assert len(text.encode()) <= 1000


def test_call_that_blows_up_may_have_been_applied():
    """[U07] A fault of our own is an outcome that nobody knows, and the process goes on."""

    class Broken(MemoryProvider):
        async def put_public_ip(self, wanted, *, if_match="", request_id=""):
            raise RuntimeError("bug")

    outcome = run_now(effects.perform(Broken(), putting()))
    assert (outcome.failure.kind, outcome.failure.code) == ("unknown", "RuntimeError")


def test_what_was_made_is_told():
    """An acknowledged public IP brings its address."""
    provider = MemoryProvider()
    outcome = run_now(effects.perform(provider, putting()))
    assert isinstance(outcome, Done)
    assert outcome.address == provider.public_ips["x-pip"].address


def test_every_request_survives_its_row():
    """A request that is read back from its row is the request that was written."""
    world = World()
    world.see(node("n1", "172.16.0.1"), service("web", 1), slice_of("a", "web", ["10.0.0.1"]))
    world.see(pod("p", 9, "shop", "10.0.0.2"))
    world.run()
    world.gone(service("web", 1))
    world.gone(pod("p", 9, "shop", "10.0.0.2"))
    world.run()
    verbs = {part.step.verb for request in world.history for part in request.parts}
    assert verbs == set(Verb)
    for request in world.history:
        assert decode_request(msgspec.json.encode(request)) == request
