"""Metrics of nrp_sync: what the core noted, after its commit, and gauges of where it stands.

Names and labels are those that operators of such controllers know, under our prefix.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from services.nrp_sync.sources import Name
from services.nrp_sync.state import Note, Pod, Service, State
from services.nrp_sync.steps import Phase

PREFIX: Final = "lbledger_nrp_sync_"
_KINDS: Final = ("inbound", "outbound")
_started = time.monotonic()


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(PREFIX + name, text, labels)


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return Gauge(PREFIX + name, text, labels)


_seconds = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_counters: Final[dict[str, Counter]] = {
    "service_operations_total": _counter(
        "service_operations_total",
        "Attempts of sub-steps",
        "operation",
        "service_type",
        "result",
        "error_code",
        "is_orphan",
    ),
    "requests_total": _counter(
        "requests_total", "Requests to the provider", "lane", "verb", "result", "error_code"
    ),
    "orphaned_resources_cleaned_total": _counter(
        "orphaned_resources_cleaned_total", "Orphans whose deletion succeeded"
    ),
    "pod_finalizer_add_failed_total": _counter(
        "pod_finalizer_add_failed_total", "Egress pods that are served without our finalizer"
    ),
    "pod_finalizer_remove_failed_total": _counter(
        "pod_finalizer_remove_failed_total", "Times that a Pod let go still had our finalizer"
    ),
    "service_finalizer_remove_failed_total": _counter(
        "service_finalizer_remove_failed_total",
        "Times that a Service let go still had our finalizer",
    ),
    "service_external_ip_recovery_failed_total": _counter(
        "service_external_ip_recovery_failed_total",
        "Times that the provider had no address for a public IP in use",
    ),
    "service_operations_parked_total": _counter(
        "service_operations_parked_total", "Operations that were parked", "reason"
    ),
    "location_sync_terminal_errors_total": _counter(
        "location_sync_terminal_errors_total", "Entries that the provider will not accept"
    ),
    "location_sync_abandoned_total": _counter(
        "location_sync_abandoned_total", "Long runs of failed batches; syncing goes on", "reason"
    ),
    "delete_substep_failures_total": _counter(
        "delete_substep_failures_total", "Failed steps before a deletion", "step"
    ),
    "drift_found_total": _counter(
        "drift_found_total", "Differences that a reading of the provider found"
    ),
}
_histograms: Final[dict[str, Histogram]] = {
    "service_operation_duration_seconds": Histogram(
        PREFIX + "service_operation_duration_seconds",
        "One attempt of a sub-step",
        ("operation", "service_type"),
        buckets=_seconds,
    ),
    "request_duration_seconds": Histogram(
        PREFIX + "request_duration_seconds",
        "One request",
        ("lane",),
        buckets=(0.005, 0.02, *_seconds),
    ),
    "location_batch_addresses": Histogram(
        PREFIX + "location_batch_addresses",
        "Addresses in one batch",
        buckets=(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000),
    ),
    "location_batch_age_seconds": Histogram(
        PREFIX + "location_batch_age_seconds",
        "Age of the oldest change in a batch when it is sent",
        buckets=(0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
    ),
    "service_operation_retries": Histogram(
        PREFIX + "service_operation_retries",
        "Retries of an operation, once it succeeded or was parked",
        ("operation", "service_type"),
        buckets=(0, 1, 2, 3, 5, 10, 20),
    ),
}
_initialization = _gauge("initialization_duration_seconds", "Start to first reading")
_enabled = _gauge("servicegateway_enabled", "1 while this replica keeps the provider in step")
_pending = _gauge("pending_service_operations", "Operations", "state", "service_type")
_oldest = _gauge(
    "pending_operation_oldest_age_seconds", "Age of the oldest", "state", "service_type"
)
_deletions = _gauge("pending_deletions", "Deletions that wait for addresses to leave")
_blocked = _gauge("services_blocked_by_locations", "Of those, still referred to")
_tracked = _gauge("tracked_services_total", "Services by where they are known", "state")
_locations = _gauge("locations_total", "Locations at the provider")
_addresses = _gauge("addresses_total", "Addresses at the provider")
_differing = _gauge("differing_addresses", "Addresses that are not in step")
_unknown = _gauge("unknown_addresses", "Of those, sent and not answered, or answered by nobody")
_quarantined = _gauge("quarantined_entries", "Entries put aside after a refusal")
_held = _gauge("pods_held", "Egress pods that wait for their addresses to leave")
_scheduled = _counter(
    "finalizers_recovery_scheduled_total", "Objects that waited to be let go when we became active"
)
_recovered = _counter("finalizers_recovered_total", "Of those, let go since")


def count(notes: Iterable[Note]) -> None:
    """Take what was noted."""
    for note in notes:
        if note.metric in _counters:
            counter = _counters[note.metric]
            (counter.labels(*note.labels) if note.labels else counter).inc(note.value)
        elif note.metric in _histograms:
            histogram = _histograms[note.metric]
            (histogram.labels(*note.labels) if note.labels else histogram).observe(note.value)
        elif note.metric == "first_read":
            _initialization.set(time.monotonic() - _started)


def gauge(state: State, now: float, *, active: bool) -> None:
    """Show where things stand. Costs as much as there are operations."""
    _enabled.set(active)
    counts = dict.fromkeys(((phase, kind) for phase in Phase for kind in _KINDS), 0)
    oldest = dict.fromkeys(counts, now)
    for op in state.operations.values():
        key = (op.phase, op.kind)
        counts[key] += 1
        oldest[key] = min(oldest[key], op.created_at)
    for (phase, kind), number in counts.items():
        _pending.labels(str(phase), kind).set(number)
        _oldest.labels(str(phase), kind).set(max(0.0, now - oldest[phase, kind]))
    provided = state.provided
    draining = [op for op in state.operations.values() if op.phase is Phase.DRAINING]
    _deletions.set(len(draining))
    _blocked.set(sum(op.identity in provided.mapped for op in draining))
    _tracked.labels("k8s_services").set(sum(s.claimed for s in state.services.values()))
    for kind, name in (("inbound", "nrp_loadbalancers"), ("outbound", "nrp_natgateways")):
        registered = sum(op.registered and op.kind == kind for op in state.operations.values())
        _tracked.labels(name).set(registered)
    _locations.set(len(provided.located))
    _addresses.set(sum(provided.population.values()))
    _differing.set(provided.differing())
    _unknown.set(provided.unknown)
    _quarantined.set(len(state.quarantine))
    _held.set(sum(held.leaving for held in state.releases.values()))


class Recoveries:
    """Objects that a process finds waiting to be let go: counted once then, and once at the end."""

    def __init__(self) -> None:
        self._open: set[tuple[str, Name, str]] | None = None

    def look(self, state: State, *, active: bool) -> None:
        """Compare with what is there now. The first look counts what begins."""
        if not active or state.provided.desired.loading:
            return
        if self._open is None:
            self._open = {("services", n, s.uid) for n, s in state.services.items() if _waits(s)}
            self._open |= {("pods", n, p.uid) for n, p in state.pods.items() if _waits(p)}
            _scheduled.inc(len(self._open))
        ended = {key for key in self._open if not _there(state, *key)}
        _recovered.inc(len(ended))
        self._open -= ended


def _waits(seen: Service | Pod) -> bool:
    return seen.finalizer and not (seen.accepted if isinstance(seen, Pod) else seen.claimed)


def _there(state: State, plural: str, name: Name, uid: str) -> bool:
    seen = state.services.get(name) if plural == "services" else state.pods.get(name)
    return seen is not None and seen.uid == uid and _waits(seen)
