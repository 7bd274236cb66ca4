"""Wiring of the prober: settings, projection, engine, and who may probe when."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
from dataclasses import dataclass
from typing import Final

import structlog
from prometheus_client import Gauge

from services.kit.config import ConfigError, ProberSettings
from services.kit.projector import Projector
from services.kit.retry import wait_or_stop
from services.kit.runtime import Runtime
from services.prober.checks import Engine
from services.prober.dialling import BadDialMap, DialMap
from services.prober.dialogues import Dialogues
from services.prober.driving import Driver
from services.prober.images import Dummies
from services.prober.monitor import EVERYTHING_FAILED, Monitor
from services.prober.plan import Defaults, usable
from services.prober.projection import Judgement, Prober, Settle
from services.prober.sharing import Sharing
from services.prober.verdicts import OwnFault

log = structlog.get_logger()
_misplaced = Gauge(
    "lbledger_prober_dummy_in_cluster_network",
    "1 while the dummy could be the address of a pod or a Service",
)
_share = Gauge("lbledger_prober_share", "Checks that this replica repeats now")
LOOK_S: Final = 0.1
LEAST_SILENCE_S: Final = 0.3  # three beats of the loop that keeps an eye on things
SPARE_DESCRIPTORS: Final = 256


@dataclass
class _Parts:
    projector: Projector
    projection: Prober
    monitor: Monitor
    driver: Driver
    sharing: Sharing


async def run(rt: Runtime) -> None:
    parts, dial = _assemble(rt)
    parts.sharing.serve(await rt.bus(), parts.monitor.engine, dial, parts.driver.nudge)
    async with asyncio.TaskGroup() as group:
        group.create_task(parts.projector.run())
        group.create_task(parts.driver.run(rt.stop))
        group.create_task(_supervise(rt, parts))


def _assemble(rt: Runtime) -> tuple[_Parts, DialMap]:
    settings = rt.settings.prober
    defaults, dummies, dial = read_settings(settings)
    dialogues = _dialogues(settings.ca_file)
    projection = Prober(defaults, dummies)
    projector = Projector(rt, projection)
    limit = _sockets(settings.max_in_flight)
    sharing = Sharing(settings.replica_silence_s)

    def submit(judgement: Judgement) -> bool:
        try:
            projector.submit(judgement)
        except asyncio.QueueFull:
            return False
        return True

    monitor = Monitor(
        state=lambda: projection.state,
        submit=submit,
        make_engine=lambda take: Engine(
            sharing.taking(take), max_in_flight=limit, dialogues=dialogues
        ),
        dial=dial,
        fault=OwnFault(
            share=settings.hold_share,
            targets=settings.hold_backends,
            owners=settings.hold_load_balancers,
        ),
        leader=sharing.leader,
    )
    driver = Driver(monitor.engine)

    def committed(owners: set[str]) -> None:
        monitor.update(owners)
        driver.nudge()
        if projection.unsettled:
            with contextlib.suppress(asyncio.QueueFull):
                projector.submit(Settle())

    projection.on_commit = committed
    return _Parts(projector, projection, monitor, driver, sharing), dial


async def _supervise(rt: Runtime, parts: _Parts) -> None:
    """Judge while this replica may, from what is on record, and decide what was left over; while
    another one may, make the checks that it asks for."""
    projection, monitor, sharing = parts.projection, parts.monitor, parts.sharing
    loads = 0
    while not await wait_or_stop(rt.stop, LOOK_S):
        active = parts.projector.active
        if active and (not monitor.running or loads != projection.loads):
            loads = projection.loads
            sharing.follow(False)
            monitor.start()
            parts.driver.nudge()
        elif not active and monitor.running:
            log.warning("prober.paused", why="this replica does not hold the fence now")
            monitor.stop()
        if active:
            monitor.tick()
        else:
            sharing.follow(True)
        if active and projection.unsettled:
            await parts.projector.asubmit(Settle())
        _share.set(monitor.engine.repeated)
        rt.health.set("checks", not monitor.holding, EVERYTHING_FAILED)
        _report_dummy(projection.misplaced_dummy())
    monitor.stop()
    sharing.follow(False)


def _report_dummy(misplaced: tuple[str, str] | None) -> None:
    if misplaced is None:
        return
    dummy, network = misplaced
    _misplaced.set(bool(dummy))
    if dummy:
        log.error(
            "prober.dummy_in_cluster_network",
            dummy=dummy,
            network=network,
            right="an address that nothing in the cluster can have, see prober.dummy_address",
        )


def read_settings(settings: ProberSettings) -> tuple[Defaults, Dummies, DialMap]:
    """Raises ConfigError, which names the setting, its value and what would be right."""
    for name, value in (
        ("success_threshold", settings.success_threshold),
        ("failure_threshold", settings.failure_threshold),
        ("period_s", settings.period_s),
        ("timeout_s", settings.timeout_s),
        ("second_s", settings.second_s),
        ("max_in_flight", settings.max_in_flight),
        ("hold_backends", settings.hold_backends),
        ("hold_load_balancers", settings.hold_load_balancers),
    ):
        if not value > 0:
            raise ConfigError(f"prober.{name} is {value}: must be greater than 0")
    if not 0.5 <= settings.hold_share <= 1:
        raise ConfigError(f"prober.hold_share is {settings.hold_share}: must be 0.5 to 1")
    silence = settings.replica_silence_s
    if silence and not LEAST_SILENCE_S <= silence <= settings.period_s:
        raise ConfigError(
            f"prober.replica_silence_s is {silence:g}: must be {LEAST_SILENCE_S:g} to"
            f" prober.period_s ({settings.period_s}), or 0 for no sharing"
        )
    if settings.timeout_s > settings.period_s:
        raise ConfigError(
            f"prober.timeout_s is {settings.timeout_s}: must be at most prober.period_s"
            f" ({settings.period_s})"
        )
    try:
        dial = DialMap(settings.dial_map)
    except BadDialMap as error:
        raise ConfigError(str(error)) from error
    networks = _networks(settings.cluster_cidrs)
    dummies = Dummies(
        _dummy("dummy_address", settings.dummy_address, 4, networks),
        _dummy("dummy_address6", settings.dummy_address6, 6, networks),
    )
    defaults = Defaults(
        success=settings.success_threshold,
        failure=settings.failure_threshold,
        period=settings.period_s,
        timeout=settings.timeout_s,
        second=settings.second_s,
    )
    return defaults, dummies, dial


def _dialogues(ca_file: str) -> Dialogues:
    try:
        return Dialogues(ca_file)
    except OSError as error:
        raise ConfigError(
            f"prober.ca_file is {ca_file!r}: {error.strerror or error}; must be a file with"
            " certificates in PEM"
        ) from error


def _networks(texts: tuple[str, ...]) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    try:
        return [ipaddress.ip_network(text) for text in texts]
    except ValueError as error:
        raise ConfigError(f"prober.cluster_cidrs: {error}; must be CIDRs of the cluster") from error


def _dummy(
    name: str,
    text: str,
    version: int,
    networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network],
) -> str:
    ip = usable(text)
    if ip is None or ip.version != version:
        raise ConfigError(
            f"prober.{name} is {text!r}: must be an IPv{version} address that may stand in an"
            " EndpointSlice (not loopback, link-local, multicast, unspecified or IPv4-mapped)"
        )
    for network in networks:
        if ip in network:
            raise ConfigError(
                f"prober.{name} is {text}, inside {network} of prober.cluster_cidrs: must be an"
                " address that nothing in the cluster can have"
            )
    return str(ip)


def _sockets(wanted: int) -> int:
    """How many sockets may be open at once: as set, within what the process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    room = max(64, soft - SPARE_DESCRIPTORS)
    if room < wanted:
        log.warning("prober.few_descriptors", max_in_flight=wanted, descriptors=soft, used=room)
    return min(wanted, room)
