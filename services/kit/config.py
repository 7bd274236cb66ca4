"""Settings: built-in defaults, then a TOML file, then the environment. Checked once, at start.

The file is named by LBLEDGER_CONFIG (or `--config`). A setting in section `prober` named
`dial_map` is `[prober] dial_map = [...]` in the file and LBLEDGER_PROBER_DIAL_MAP in the
environment; settings without a section have just their name. Lists in the environment are
comma-separated (or JSON). A wrong or unknown setting stops the process with one line that names
the setting, its source, the value and what would be right. Secrets are `Secret` and print masked.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_args, get_origin, get_type_hints

import msgspec

ENV_PREFIX: Final = "LBLEDGER_"
MASK: Final = "********"


class ConfigError(ValueError):
    """A setting that can't be used; the text is meant for the person who set it."""


class Secret(str):
    """Text that must not be shown: repr and format are masked, `reveal()` gives it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(MASK if str.__str__(self) else "")

    def __str__(self) -> str:
        return MASK if len(self) else ""

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def reveal(self) -> str:
        return str.__str__(self)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every group of settings."""


class NatsSettings(Section, frozen=True, kw_only=True):
    url: str = "nats://127.0.0.1:4222"
    user: str = ""
    password: Secret = Secret("")
    token: Secret = Secret("")
    credentials: str = ""  # path of a .creds file
    tls_ca: str = ""
    replicas: int = 1  # of each stream
    # Retention; 0 keeps the default. The server reserves max_bytes of each stream on its disk.
    kube_max_age_s: float = 0.0  # 14 days
    kube_max_bytes: int = 0  # 4 GiB
    lb_max_age_s: float = 0.0  # 90 days
    lb_max_bytes: int = 0  # 4 GiB


class DatabaseSettings(Section, frozen=True, kw_only=True):
    url: Secret = Secret("postgresql://lbledger@127.0.0.1:5432/lbledger")
    pool_size: int = 4
    statement_timeout_s: float = 30.0
    connect_timeout_s: float = 10.0
    # A replica that freezes inside a transaction holds up the next one for this long (in the
    # middle of a statement: for statement_timeout_s).
    idle_transaction_s: float = 8.0


class KubeSettings(Section, frozen=True, kw_only=True):
    kubeconfig: str = ""  # "" with a service account mounted: in-cluster
    context: str = ""


class LogSettings(Section, frozen=True, kw_only=True):
    level: str = "info"  # debug | info | warning | error
    format: str = "auto"  # json | console | auto: console on a terminal


class HealthSettings(Section, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port; -1: no server


class ProjectorSettings(Section, frozen=True, kw_only=True):
    batch: int = 1000  # a transaction, and what the bus takes at once
    beat_s: float = 1.0  # how often the active replica proves that it still holds the fence
    effects_deadline_s: float = 3.0  # without a proof for this long, no effects outside
    takeover_poll_s: float = 0.5
    # An active replica that is frozen for this long is replaced. One that is reading its state, or
    # was too busy for a sign of life lately, has up to eight times as long.
    silence_s: float = 4.0


class WatcherSettings(Section, frozen=True, kw_only=True):
    namespaces: tuple[str, ...] = ()  # empty: all
    selectors: dict[str, str] = {}  # plural -> label selector
    # Otherwise only those with the label of egress gateways, and none for backendPodSelector.
    all_pods: bool = False
    republish_s: float = 7 * 86_400.0
    page_size: int = 500
    watch_timeout_s: float = 290.0
    idle_s: float = 120.0  # no byte for this long: the watch is taken for dead
    absent_poll_s: float = 10.0
    relist_jitter_s: float = 1.0
    relist_s: float = 0.0  # list everything anew this often; 0: only when it is needed
    check_s: float = 10.0  # how often the stream and the epoch are looked at


class AllocatorSettings(Section, frozen=True, kw_only=True):
    classless: bool = False  # also take Services of type LoadBalancer without a class
    overflow: bool = False  # an exhausted pool hands over to the next one that fits
    global_per_network: bool = False  # a global pool serves only requests of its own network
    open_pools: bool = False  # pools without scope also serve those that do not name them
    explicit_bypasses_scope: bool = False  # naming a pool is enough to use it, as in Harvester
    grace_s: float = 60.0  # before the lease of an owner that a complete list lacks is reclaimed
    cooldown_s: float = 0.0  # before a freed address goes to somebody else
    retention_days: float = 365.0  # how long the ledger keeps leases that ended; 0: for ever
    retire_s: float = 60.0  # how long after a move the old address is kept if the new never shows


class ProberSettings(Section, frozen=True, kw_only=True):
    dial_map: tuple[str, ...] = ()  # "CIDR=CIDR": dial the second for objects that say the first
    # Stand in while no backend is ready. IANA's "IPv4 dummy address" (RFC 7600) and an address of
    # the IPv6 discard-only block (RFC 6666): no host has them and no router forwards to them.
    dummy_address: str = "192.0.0.8"
    dummy_address6: str = "100::1"
    cluster_cidrs: tuple[str, ...] = ()  # of pods and services; the dummies must be in none
    success_threshold: int = 1  # these four hold where a health check says nothing (or 0)
    failure_threshold: int = 3
    period_s: int = 5
    timeout_s: int = 3
    second_s: float = 1.0  # how long a second of a health check lasts (less in demonstrations)
    ca_file: str = ""  # PEM of authorities for HTTPS checks, besides the system's
    max_in_flight: int = 8192  # sockets open at once
    # All of this failing within one period is taken for a fault of our own, and nothing changes:
    hold_share: float = 0.9  # of the backends that are on record as ready,
    hold_backends: int = 6  # at least so many,
    hold_load_balancers: int = 3  # of at least so many load balancers
    # Replicas share the checks; the share of one that is silent for this long goes to the others.
    # 0: only the active one checks.
    replica_silence_s: float = 1.5


class NrpSettings(Section, frozen=True, kw_only=True):
    classless: bool = False
    endpoint: str = ""  # base URL of the provider's API
    subscription: str = "00000000-0000-0000-0000-000000000000"
    resource_group: str = "lbledger"
    gateway: str = "gateway"
    location: str = "local"
    virtual_network: str = "vnet"
    token: Secret = Secret("")  # a fixed bearer token (sandbox); empty: azure-identity's chain
    provider: str = "azure"  # azure | memory | module:function
    vnet_resource_group: str = ""  # empty: resource_group
    network_subscription: str = ""  # of the network resources; empty: subscription
    api_version: str = "2025-09-01"
    request_timeout_s: float = 60.0  # one HTTP exchange
    operation_timeout_s: float = 300.0  # a whole operation, long-running ones included
    poll_s: float = 5.0  # between two looks at a long-running operation
    rate_limit: float = 0.0  # requests a second and kind that we allow ourselves; 0: no limit
    dual_stack: str = "reject"  # reject | first-family: serve a dual-stack Service in its first
    egress_allowed: tuple[str, ...] = ()  # "NAMESPACE/GATEWAY", either with *; empty: everybody
    quiet_s: float = 0.1  # a change waits this long for more of its kind ...
    latency_s: float = 1.0  # ... but never longer than this
    interval_s: float = 0.1  # between two batches of addresses
    batch_addresses: int = 500
    batch_bytes: int = 1 << 20
    batches: int = 2  # of addresses, at once
    workers: int = 10  # calls about single resources at once
    read_interval_s: float = 300.0  # how often the provider is read back to find drift
    retry_first_s: float = 1.0
    retry_cap_s: float = 30.0
    park_s: float = 300.0  # an operation that ran out of tries rests this long
    orphan_grace_s: float = 2.0  # requests of a dead process may still arrive for this long
    keep_requests: int = 5000


class ApplierSettings(Section, frozen=True, kw_only=True):
    announcer: str = "none"  # kube-vip | metallb | cilium | none
    workers: int = 16
    echo_s: float = 0.2
    undecided_s: float = 2.0  # a new load balancer's status waits this long for the prober
    pool_status_s: float = 1.0
    pool_map_entries: int = 1000
    backend_entries: int = 100  # of a load balancer's status.backends
    metallb_legacy_annotation: bool = False  # metallb.universe.tf/ instead of metallb.io/


class Settings(Section, frozen=True, kw_only=True):
    nats: NatsSettings = NatsSettings()
    database: DatabaseSettings = DatabaseSettings()
    kube: KubeSettings = KubeSettings()
    log: LogSettings = LogSettings()
    health: HealthSettings = HealthSettings()
    projector: ProjectorSettings = ProjectorSettings()
    watcher: WatcherSettings = WatcherSettings()
    allocator: AllocatorSettings = AllocatorSettings()
    prober: ProberSettings = ProberSettings()
    nrp: NrpSettings = NrpSettings()
    applier: ApplierSettings = ApplierSettings()


_CONFIG_VARIABLE: Final = "LBLEDGER_CONFIG"
# Kubernetes puts these into every pod beside a Service called lbledger-something.
_SERVICE_LINK: Final = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT\w*|PORT|PORT_\d+_(TCP|UDP|SCTP)\w*)$"
)


def load(env: Mapping[str, str] | None = None, config: str | None = None) -> Settings:
    """Read the settings; raises ConfigError."""
    env = os.environ if env is None else env
    path = config or env.get(_CONFIG_VARIABLE, "")
    data = _from_file(Path(path)) if path else {}
    known = dict(_fields())
    for section, values in data.items():
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {section!r} must be a section, like [{section}]")
        for name in values:
            if (section, name) not in known:
                raise ConfigError(f"{path}: unknown setting [{section}] {name}{_near(name)}")
    by_variable = {_variable(section, name): (section, name) for section, name in known}
    for variable, text in env.items():
        if not variable.startswith(ENV_PREFIX) or variable == _CONFIG_VARIABLE:
            continue
        if variable not in by_variable:
            if _SERVICE_LINK.search(variable):
                continue
            raise ConfigError(f"unknown setting {variable} in the environment{_near(variable)}")
        section, name = by_variable[variable]
        data.setdefault(section, {})[name] = _parse(variable, text, known[section, name])
    try:
        settings = msgspec.convert(data, Settings, dec_hook=_decode_secret)
    except msgspec.ValidationError as error:
        raise ConfigError(f"bad setting: {error}") from error
    _check(settings)
    return settings


def show(settings: Settings) -> dict[str, Any]:
    """The effective settings as plain data, secrets masked, passwords cut out of URLs."""
    shown: dict[str, Any] = msgspec.to_builtins(settings, enc_hook=_mask, str_keys=True)
    for section, name in _secret_fields():
        if shown[section][name]:
            shown[section][name] = MASK
    shown["nats"]["url"] = public_url(settings.nats.url)
    return shown


def public_url(url: str) -> str:
    """The URL without user and password, fit for a log line."""
    head, sep, rest = str.__str__(url).partition("://")
    if not sep:
        return "<unreadable URL>"
    return f"{head}://{rest.rpartition('@')[2].partition('?')[0]}"


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"can't read the configuration {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _fields() -> Iterator[tuple[tuple[str, str], Any]]:
    for section, cls in get_type_hints(Settings).items():
        for name, hint in get_type_hints(cls).items():
            if not name.startswith("__"):
                yield (section, name), hint


def _secret_fields() -> list[tuple[str, str]]:
    return [key for key, hint in _fields() if hint is Secret]


def _variable(section: str, name: str) -> str:
    return f"{ENV_PREFIX}{section}_{name}".upper()


def _near(name: str) -> str:
    names = [_variable(s, n) for (s, n), _ in _fields()] if name.isupper() else []
    names = names or [n for (_, n), _ in _fields()]
    found = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def _parse(variable: str, text: str, hint: Any) -> Any:
    kind = get_origin(hint) or hint
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]
        if kind is int:
            return int(text)
        if kind is float:
            return float(text)
        if kind in (tuple, list):
            if text.strip().startswith("["):
                return msgspec.json.decode(text)
            return [part.strip() for part in text.split(",") if part.strip()]
        if kind is dict:
            if text.strip().startswith("{"):
                return msgspec.json.decode(text)
            return dict(part.strip().split("=", 1) for part in text.split(",") if part.strip())
    except (KeyError, ValueError) as error:
        shape = {bool: "true or false", int: "a whole number", float: "a number"}.get(
            kind, f"a comma-separated list ({get_args(hint)})"
        )
        raise ConfigError(f"{variable}={text!r}: must be {shape}") from error
    return text


def _decode_secret(kind: type, value: object) -> object:
    if kind is Secret and isinstance(value, str):
        return Secret(value)
    raise NotImplementedError(kind)  # msgspec's word for "not mine"


def _mask(value: object) -> object:
    if isinstance(value, Secret):
        return str(value)
    raise NotImplementedError(type(value))  # msgspec's word for "not mine"


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}: must be one of {', '.join(choices)}")


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} is {value}: must be greater than 0")


def _check(settings: Settings) -> None:
    """What types can't say. Every message names the setting, the value and what would be right."""
    _choice("log.level", settings.log.level, ("debug", "info", "warning", "error"))
    _choice("log.format", settings.log.format, ("auto", "json", "console"))
    _choice(
        "applier.announcer", settings.applier.announcer, ("none", "kube-vip", "metallb", "cilium")
    )
    _choice("nrp.dual_stack", settings.nrp.dual_stack, ("reject", "first-family"))
    for pair in settings.nrp.egress_allowed:
        if pair.count("/") != 1 or not all(pair.split("/")):
            raise ConfigError(f"nrp.egress_allowed has {pair!r}: must be NAMESPACE/GATEWAY")
    for name, value in (
        ("nrp.batch_addresses", settings.nrp.batch_addresses),
        ("nrp.batch_bytes", settings.nrp.batch_bytes),
        ("nrp.batches", settings.nrp.batches),
        ("nrp.workers", settings.nrp.workers),
        ("nrp.read_interval_s", settings.nrp.read_interval_s),
        ("nrp.retry_first_s", settings.nrp.retry_first_s),
        ("nrp.keep_requests", settings.nrp.keep_requests),
        ("projector.batch", settings.projector.batch),
        ("projector.beat_s", settings.projector.beat_s),
        ("watcher.republish_s", settings.watcher.republish_s),
        ("watcher.idle_s", settings.watcher.idle_s),
        ("watcher.page_size", settings.watcher.page_size),
        ("watcher.watch_timeout_s", settings.watcher.watch_timeout_s),
        ("watcher.absent_poll_s", settings.watcher.absent_poll_s),
        ("watcher.check_s", settings.watcher.check_s),
        ("applier.workers", settings.applier.workers),
        ("nrp.request_timeout_s", settings.nrp.request_timeout_s),
        ("nrp.operation_timeout_s", settings.nrp.operation_timeout_s),
        ("nrp.poll_s", settings.nrp.poll_s),
        ("database.pool_size", settings.database.pool_size),
        ("database.idle_transaction_s", settings.database.idle_transaction_s),
        ("nats.replicas", settings.nats.replicas),
    ):
        _positive(name, value)
    if not 0 <= settings.applier.backend_entries <= 1000:  # what the CRD allows
        raise ConfigError(
            f"applier.backend_entries is {settings.applier.backend_entries}: must be 0 to 1000"
        )
    if not settings.nats.url.startswith(("nats://", "tls://", "ws://", "wss://")):
        raise ConfigError(
            f"nats.url is {public_url(settings.nats.url)!r}: must start with nats:// or tls://"
        )
    if not settings.database.url.startswith(("postgresql://", "postgres://")):
        raise ConfigError("database.url: must start with postgresql://")
    if settings.projector.effects_deadline_s <= settings.projector.beat_s:
        raise ConfigError("projector.effects_deadline_s must be greater than projector.beat_s")
    if settings.projector.silence_s <= settings.projector.effects_deadline_s:
        raise ConfigError("projector.silence_s must be greater than projector.effects_deadline_s")
