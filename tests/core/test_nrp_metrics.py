"""What is counted, when, and that it is counted once."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from services.nrp_sync import metrics
from services.nrp_sync import provider as port
from services.nrp_sync.provider import PublicAddress
from tests.core.nrp_world import POLICY, World, node, pod, service, slice_of

GONE = datetime(2026, 11, 30, tzinfo=UTC)
GRACE = POLICY.finalizer_grace
PAGE = Path(__file__).parents[2] / "docs" / "network-resource-provider.md"


def noted(w, metric):
    """(labels, value) of each note of a metric so far."""
    return [(note.labels, note.value) for note in w.state.notes if note.metric == metric]


def value(name, **labels):
    return REGISTRY.get_sample_value(metrics.PREFIX + name, labels) or 0.0


def begun(*views):
    w = World()
    w.see(node("n1", "172.16.0.1"), *views)
    w.run()
    w.state.notes.clear()
    return w


def test_the_page_lists_every_metric():
    """[M-names] Each metric that there is has a row on the page, and each row is of one."""
    text = PAGE.read_text().partition("## Metrics")[2]
    listed = set(re.findall(r"^\| `(\w+)`", text, flags=re.MULTILINE))
    found = [m for m in REGISTRY.collect() if m.name.startswith(metrics.PREFIX)]
    known = {
        m.name.removeprefix(metrics.PREFIX) + ("_total" if m.type == "counter" else "")
        for m in found
    }
    assert listed == known


@pytest.mark.parametrize("kind", ["service", "pod"])
def test_finalizer_that_stays_is_counted_once_for_each_wait(kind):
    """[M-finalizer] An object that may go and still carries our finalizer is counted, then not."""
    made = {
        "service": service("web", 1, finalizer=True, deletion_timestamp=GONE),
        "pod": pod("p", 9, "", "10.0.0.1", finalizer=True),
    }[kind]
    w = World()
    w.synced()
    w.tick(1)
    w.answer_all()
    w.see(made)
    w.tick(1)
    metric = f"{kind}_finalizer_remove_failed_total"
    assert noted(w, metric) == []
    w.tick(GRACE)
    w.tick(GRACE / 2)
    assert noted(w, metric) == [((), 1.0)]
    w.tick(GRACE)
    assert len(noted(w, metric)) == 2
    w.gone(made)
    w.tick(GRACE * 3)
    assert len(noted(w, metric)) == 2


def test_public_address_that_is_not_there_is_counted():
    """[M-address] Each try that finds a public IP in use without an address."""
    w = World()
    w.see(node("n1", "172.16.0.1"), service("web", 1))
    w.provider.put_public_ip = without_address(w.provider)
    for _ in range(8):
        w.apply_finalizers()
        w.advance()
        w.answer_all()
    tries = len([r for r in w.history if r.verb == "put_public_ip"])
    assert tries > 2
    assert len(noted(w, "service_external_ip_recovery_failed_total")) == tries - 1


def without_address(provider):
    put = provider.put_public_ip

    async def made(wanted, *, if_match="", request_id=""):
        await put(wanted, if_match=if_match, request_id=request_id)
        return PublicAddress(name=wanted.name)

    return made


@pytest.mark.parametrize("worked", [False, True], ids=["init", "drain"])
def test_long_outage_says_whether_anything_worked_before(worked):
    """[M-abandoned] Once for each outage, with whether it began before the first success."""
    w = begun(service("web", 1))
    w.state.lanes["locations"].worked = worked
    w.see(slice_of("web-a", "web", ["10.0.0.1"]))
    for _ in range(60):
        w.advance()
        for request in list(w.flying):
            w.answer(
                request, port.Unreachable(request.verb, "down") if request.parts == () else None
            )
    reason = "drain_attempts_exhausted" if worked else "init_attempts_exhausted"
    assert noted(w, "location_sync_abandoned_total") == [((reason,), 1.0)]


def test_batches_are_measured():
    """[M-batches] How many addresses, and how long the first of them waited."""
    w = begun(service("web", 1))
    w.see(slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2"]))
    w.run()
    assert noted(w, "location_batch_addresses") == [((), 2)]
    ((_, age),) = noted(w, "location_batch_age_seconds")
    assert POLICY.quiet <= age <= POLICY.latency
    metrics.count(w.state.notes)


def test_unknown_addresses_are_counted_while_they_are():
    """[M-unknown] From sending until somebody says what became of it."""
    w = begun(service("web", 1))
    w.see(slice_of("web-a", "web", ["10.0.0.1", "10.0.0.2"]))
    w.advance()
    (request,) = w.flying
    assert w.state.provided.unknown == 2
    w.answer(request, port.Unknown(request.verb, "no answer"))
    assert w.state.provided.unknown == 2
    w.restart()
    assert w.state.provided.unknown == 2
    w.run()
    assert w.state.provided.unknown == 0


def test_recoveries_close_exactly_once():
    """[F13] What a process finds waiting to be let go is counted then, and when it has gone."""
    going = pod("p", 9, "", "10.0.0.1", finalizer=True)
    w = begun(service("web", 1))
    w.see(going)
    recoveries = metrics.Recoveries()
    before = value("finalizers_recovery_scheduled_total"), value("finalizers_recovered_total")

    def counted():
        recoveries.look(w.state, active=True)
        now = value("finalizers_recovery_scheduled_total"), value("finalizers_recovered_total")
        return now[0] - before[0], now[1] - before[1]

    recoveries.look(World().state, active=False)
    assert counted() == (1, 0)
    w.see(pod("q", 10, "", "10.0.0.2", finalizer=True))  # no recovery: it came later
    assert counted() == (1, 0)
    w.gone(going)
    assert counted() == (1, 1)
    w.run()
    assert counted() == (1, 1)
