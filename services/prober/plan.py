"""What a load balancer's spec asks of the prober, read once and made plain.

Guarantees: every part of a plan can be acted on as it stands. What can't be is left out and told in
`reason` and `message`, which name the field, its value and what would be right; the rest of the
spec still holds. A health check that can't be followed is `broken`: nothing is probed then, and no
backend changes on its account.

Extension fields may also stand in annotations (`lbledger.io/...`), for clusters that keep
Harvester's own CRD; a field of the spec wins over its annotation.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from schema import objects
from schema.events import SlicePort

FAMILIES: Final = ("IPv4", "IPv6")
PROTOCOLS: Final = ("TCP", "HTTP", "HTTPS", "GRPC", "UDP")
MAX_THRESHOLD: Final = 1_000
MAX_SECONDS: Final = 86_400
MAX_PATH: Final = 2_048
MAX_CODES: Final = 256
ANNOTATION: Final = "lbledger.io/"
CHECK_NOTES: Final = frozenset({"health-check", "listener-health-checks"})
_LABEL_KEY: Final = re.compile(
    r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
)
_LABEL_VALUE: Final = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_HOST: Final = re.compile(
    r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*"
)
_SERVICE: Final = re.compile(r"[A-Za-z0-9_./-]{0,253}")
_CODES: Final = re.compile(r"([1-5]\d\d)(?:-([1-5]\d\d))?")

Selector = Mapping[str, list[str]]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to find out about each backend, and how often it must be found out."""

    protocol: str = "TCP"
    port: int
    path: str = "/"
    host: str = ""
    codes: tuple[tuple[int, int], ...] = ((200, 399),)
    service: str = ""
    verify: bool = True
    success: int = 1
    failure: int = 3
    period: float = 5.0
    timeout: float = 3.0

    @property
    def meaning(self) -> tuple[Any, ...]:
        """What is asked, without how often: counters survive a change of the rest."""
        return (
            *(self.protocol, self.port, self.path, self.host),
            *(self.codes, self.service, self.verify),
        )


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values of a health check that leaves them out (or 0)."""

    success: int = 1
    failure: int = 3
    period: int = 5
    timeout: int = 3
    second: float = 1.0  # how long a second of a spec lasts; less in tests and demonstrations


class Explicit(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    address: str
    port: int = 0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    ports: tuple[SlicePort, ...] = ()
    vms: dict[str, list[str]] = {}
    pods: dict[str, list[str]] = {}
    explicit: tuple[Explicit, ...] = ()
    network: str = ""
    families: tuple[str, ...] = ("IPv4",)
    checking: Literal["off", "on", "broken"] = "off"
    checks: tuple[Check, ...] = ()
    config: str = ""  # digest of the checks: a verdict on another digest is an old one
    reason: str = ""
    message: str = ""


class Unfit(ValueError):
    """One part of a spec that can't be followed; the text is for the person who wrote it."""


def usable(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address, unless it is none or one that Kubernetes refuses in an EndpointSlice."""
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return None
    if ip.is_unspecified or ip.is_loopback or ip.is_link_local or ip.is_multicast:
        return None
    if isinstance(ip, ipaddress.IPv6Address) and (ip.scope_id or ip.ipv4_mapped):
        return None  # to Kubernetes a mapped address is IPv4, and so at home in no slice
    return ip


def read(balancer: objects.LoadBalancer, defaults: Defaults) -> Plan:
    """Read a spec; never raises for what stands in it."""
    return _Reader(balancer, defaults).plan()


class _Reader:
    def __init__(self, balancer: objects.LoadBalancer, defaults: Defaults) -> None:
        self.spec = balancer.spec
        self.notes = balancer.metadata.annotations or {}
        self.defaults = defaults
        self.problems: list[tuple[str, str]] = []
        self.remarks: list[str] = []
        self.unread: set[str] = set()  # annotations

    def plan(self) -> Plan:
        listeners = self._listeners()
        checking, checks = self._checks(listeners)
        vms = self._selector("backendServerSelector", self.spec.backend_server_selector)
        pods = self._selector(
            "backendPodSelector",
            self._either(
                self.spec.backend_pod_selector, "backend-pod-selector", dict[str, list[str]]
            ),
        )
        families = self._families()
        explicit = self._explicit(len(listeners), families)
        problems = self.problems
        return Plan(
            ports=tuple(
                SlicePort(name=p.name, protocol=p.protocol, port=p.backend_port)
                for _, p in listeners
            ),
            vms=vms,
            pods=pods,
            explicit=explicit,
            network=self.spec.backend_network or self.notes.get(ANNOTATION + "backend-network", ""),
            families=families,
            checking=checking,
            checks=checks,
            config=digest(checks) if checks else "",
            reason=problems[0][0] if problems else "",
            message="; ".join([text for _, text in problems] + self.remarks),
        )

    def _fail(self, reason: str, text: str) -> None:
        self.problems.append((reason, text))

    def _either(self, value: Any, annotation: str, kind: Any) -> Any:
        """The field of the spec, or else what its annotation holds in JSON."""
        if value:
            return value
        text = self.notes.get(ANNOTATION + annotation, "")
        if not text:
            return value
        try:
            return msgspec.json.decode(text, type=kind)
        except (msgspec.MsgspecError, UnicodeError) as error:
            self._fail("InvalidAnnotation", f"annotation {ANNOTATION}{annotation}: {error}")
            self.unread.add(annotation)
            return value

    # --- listeners ---

    def _listeners(self) -> list[tuple[int, objects.Listener]]:
        checks = self._either(None, "listener-health-checks", dict[str, objects.HealthCheck]) or {}
        kept: list[tuple[int, objects.Listener]] = []
        names: set[str] = set()
        if not self.spec.listeners:
            self._fail("InvalidListener", "spec.listeners is empty: must hold at least one")
        for index, listener in enumerate(self.spec.listeners or ()):
            field = f"spec.listeners[{index}]"
            try:
                _in_range(f"{field}.port", listener.port, 1, 65_535)
                _in_range(f"{field}.backendPort", listener.backend_port, 1, 65_535)
                if listener.protocol not in ("TCP", "UDP"):
                    raise Unfit(f"{field}.protocol is {listener.protocol!r}: must be TCP or UDP")
                if listener.name in names:
                    raise Unfit(f"{field}.name is {listener.name!r}: another listener has it")
            except Unfit as error:
                self._fail("InvalidListener", str(error))
                continue
            names.add(listener.name)
            if listener.health_check is None and listener.name in checks:
                listener = msgspec.structs.replace(listener, health_check=checks[listener.name])
            kept.append((index, listener))
        return kept

    # --- checks ---

    def _checks(
        self, listeners: list[tuple[int, objects.Listener]]
    ) -> tuple[Literal["off", "on", "broken"], tuple[Check, ...]]:
        found: dict[tuple[Any, ...], Check] = {}  # by meaning: nothing is asked twice
        own = {p.backend_port for _, p in listeners if p.health_check is not None}
        try:
            whole = self._with_annotation(self.spec.health_check)
            if whole is not None and whole.port != 0:
                field = "spec.healthCheck"
                protocol = _protocol(field, whole)
                _fits(f"{field}.port", whole.port, protocol, [p for _, p in listeners])
                if whole.port not in own:
                    _add(found, self._check(field, whole, protocol, whole.port))
            for index, listener in listeners:
                part = listener.health_check
                if part is None:
                    continue
                field = f"spec.listeners[{index}].healthCheck"
                protocol = _protocol(field, part)
                port = part.port or listener.backend_port
                _fits(f"{field}.port", port, protocol, [p for _, p in listeners])
                _add(found, self._check(field, part, protocol, port))
        except Unfit as error:
            self._fail("InvalidHealthCheck", str(error))
            return "broken", ()
        if self.unread & CHECK_NOTES:  # what is asked may be another thing than what was meant
            return "broken", ()
        return ("on", tuple(found.values())) if found else ("off", ())

    def _with_annotation(self, check: objects.HealthCheck | None) -> objects.HealthCheck | None:
        if check is None or check.port == 0:
            return check
        noted = self._either(None, "health-check", objects.HealthCheck)
        if noted is None:
            return check
        set_here = {
            name: value
            for name in ("protocol", "path", "host", "codes", "service", "insecure_skip_verify")
            if (value := getattr(noted, name)) and not getattr(check, name)
        }
        return msgspec.structs.replace(check, **set_here)

    def _check(self, field: str, check: objects.HealthCheck, protocol: str, port: int) -> Check:
        base = self.defaults
        _in_range(f"{field}.port", port, 1, 65_535)
        for name, value, top in (
            ("successThreshold", check.success_threshold, MAX_THRESHOLD),
            ("failureThreshold", check.failure_threshold, MAX_THRESHOLD),
            ("periodSeconds", check.period_seconds, MAX_SECONDS),
            ("timeoutSeconds", check.timeout_seconds, MAX_SECONDS),
        ):
            _in_range(f"{field}.{name}", value, 0, top, "0 (the default)")
        path = check.path or "/"
        if not path.startswith("/") or not path.isascii() or re.search(r"[\s\x00-\x1f\x7f]", path):
            raise Unfit(
                f"{field}.path is {path!r}: must start with '/' and hold no space, control"
                " character or anything beyond ASCII (percent-encode it)"
            )
        for name, text, most in (("path", path, MAX_PATH), ("codes", check.codes, MAX_CODES)):
            if len(text) > most:
                raise Unfit(f"{field}.{name} has {len(text)} characters: must be at most {most}")
        if check.host and not (_HOST.fullmatch(check.host) and len(check.host) <= 253):
            raise Unfit(f"{field}.host is {check.host!r}: must be a host name or an address")
        if not _SERVICE.fullmatch(check.service):
            raise Unfit(f"{field}.service is {check.service!r}: must be a gRPC service name")
        period = check.period_seconds or base.period
        timeout = check.timeout_seconds or min(base.timeout, period)
        if timeout > period:
            self.remarks.append(
                f"{field}.timeoutSeconds is {timeout}, longer than periodSeconds ({period}):"
                " a check starts when the one before it has ended"
            )
        http = protocol in ("HTTP", "HTTPS")
        return Check(
            protocol=protocol,
            port=port,
            path=path if http else "/",
            host=check.host if http or protocol == "GRPC" else "",
            codes=_codes(f"{field}.codes", check.codes) if http and check.codes else ((200, 399),),
            service=check.service if protocol == "GRPC" else "",
            verify=not (protocol == "HTTPS" and check.insecure_skip_verify),
            success=check.success_threshold or base.success,
            failure=check.failure_threshold or base.failure,
            period=period * base.second,
            timeout=timeout * base.second,
        )

    # --- backends ---

    def _selector(self, name: str, selector: Selector | None) -> dict[str, list[str]]:
        """A selector that can't be followed matches nothing, as does an empty one."""
        field = f"spec.{name}"
        for key, values in (selector or {}).items():
            if not _LABEL_KEY.fullmatch(key):
                problem = f"{field} has the key {key!r}: must be a label key"
            elif not values:
                problem = f"{field}[{key!r}] is empty: must list at least one value"
            elif bad := [value for value in values if not _LABEL_VALUE.fullmatch(value)]:
                problem = f"{field}[{key!r}] has the value {bad[0]!r}: must be a label value"
            else:
                continue
            self._fail("InvalidSelector", problem)
            return {}
        return dict(selector or {})

    def _explicit(self, listeners: int, families: tuple[str, ...]) -> tuple[Explicit, ...]:
        listed = self._either(self.spec.backends, "backends", list[objects.ExplicitBackend])
        kept: dict[str, Explicit] = {}
        for index, backend in enumerate(listed or ()):
            field = f"spec.backends[{index}]"
            try:
                if not backend.name:
                    raise Unfit(f"{field}.name is empty: must be a name")
                if backend.name in kept:
                    raise Unfit(f"{field}.name is {backend.name!r}: another backend has it")
                ip = usable(backend.address)
                if ip is None:
                    raise Unfit(
                        f"{field}.address is {backend.address!r}: must be an IPv4 or IPv6 address,"
                        " not loopback, link-local, multicast, unspecified or IPv4-mapped"
                    )
                if f"IPv{ip.version}" not in families:
                    raise Unfit(
                        f"{field}.address is {backend.address!r}: must be {' or '.join(families)}"
                        " by spec.ipFamilies"
                    )
                _in_range(f"{field}.port", backend.port, 0, 65_535, "0 (the listener's)")
                if backend.port and listeners > 1:
                    raise Unfit(
                        f"{field}.port is {backend.port}: can be set with a single listener only"
                    )
            except Unfit as error:
                self._fail("InvalidBackend", str(error))
                continue
            kept[backend.name] = Explicit(name=backend.name, address=str(ip), port=backend.port)
        return tuple(kept.values())

    def _families(self) -> tuple[str, ...]:
        noted = self.notes.get(ANNOTATION + "ip-families", "")
        listed = self.spec.ip_families or [part.strip() for part in noted.split(",") if part]
        bad = [family for family in listed if family not in FAMILIES]
        if bad:
            self._fail("InvalidFamily", f"spec.ipFamilies has {bad[0]!r}: must be IPv4 or IPv6")
            return ("IPv4",)
        return tuple(dict.fromkeys(listed)) or ("IPv4",)


def digest(checks: tuple[Check, ...]) -> str:
    return hashlib.blake2b(msgspec.json.encode(checks), digest_size=8).hexdigest()


def _add(found: dict[tuple[Any, ...], Check], check: Check) -> None:
    found.setdefault(check.meaning, check)


def _in_range(field: str, value: int, low: int, high: int, low_text: str = "") -> None:
    if not low <= value <= high:
        raise Unfit(f"{field} is {value}: must be {low_text or low} to {high}")


def _protocol(field: str, check: objects.HealthCheck) -> str:
    protocol = check.protocol or "TCP"
    if protocol not in PROTOCOLS:
        raise Unfit(f"{field}.protocol is {protocol!r}: must be one of {', '.join(PROTOCOLS)}")
    return protocol


def _fits(field: str, port: int, protocol: str, listeners: list[objects.Listener]) -> None:
    """The port must be one that backends serve, by the transport that the check speaks."""
    transport = "UDP" if protocol == "UDP" else "TCP"
    choices = sorted({p.backend_port for p in listeners if p.protocol == transport})
    if port in choices:
        return
    if port in {p.backend_port for p in listeners}:
        other = "TCP" if transport == "UDP" else "UDP"
        what = f"a {protocol} check on a {other}-only backend port"
    else:
        what = "not a backend port"
        front = [p for p in listeners if p.port == port]
        if front:
            what += f" (it is the port of listener {front[0].name!r})"
    if choices:
        right = f"choose one of {', '.join(map(str, choices))}"
    else:
        right = f"there is no {transport} listener to choose from"
    raise Unfit(f"{field} is {port}: {what}; {right}")


def _codes(field: str, text: str) -> tuple[tuple[int, int], ...]:
    ranges = []
    for part in text.split(","):
        match = _CODES.fullmatch(part.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if low > high:
            raise Unfit(f"{field} is {text!r}: must be codes and ranges, like '200-299,404'")
        ranges.append((low, high))
    return tuple(ranges)
