"""What a pool's spec means: which addresses it may give out, and what is wrong with a bad spec.

Everybody who judges a pool (the allocator, admission, a simulation) reads it here.

Rules for one range:
- `subnet` is a CIDR; host bits are masked off.
- Usable are, for a subnet of more than two addresses, all but the first and the last one (IPv4:
  network and broadcast; IPv6: only the first, the subnet-router anycast address). A /31 and a
  /127 have two usable addresses, a /32 and a /128 one.
- `rangeStart` and `rangeEnd` (inclusive) narrow that; each stands alone or with the other. Both
  must be usable addresses of the subnet, and the start must not come after the end: a swapped
  pair is more likely a typing error than a wish.
- `gateway` must be a usable address; without it, it is the first usable one for subnets of more
  than two addresses, and there is none for smaller ones.

Never given out, whichever range they lie in: the gateway, network and broadcast address of each
range of the pool, what `exclude` names, and with `avoidBuggyIPs` IPv4 addresses that end in .0 or
.255. `total` counts exactly what is left, so it reaches zero when allocation refuses.
"""

from __future__ import annotations

import ipaddress
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

from schema import addresses, objects
from schema.addresses import AddressError

EXCLUDE_ANNOTATION: Final = "lbledger.io/exclude"
AVOID_BUGGY_ANNOTATION: Final = "lbledger.io/avoid-buggy-ips"
DISABLED_ANNOTATION: Final = "lbledger.io/disabled"
QUOTAS_ANNOTATION: Final = "lbledger.io/quotas"

Span = tuple[int, int]


class Problem(NamedTuple):
    """Something in a spec that can't be followed: which field, and what would be right."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class PoolError(ValueError):
    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.problem = Problem(field, message)


@dataclass(frozen=True, slots=True)
class Range:
    """One item of `spec.ranges`, with its defaults filled in."""

    first: int  # of the subnet
    last: int
    start: int  # of what may be given out
    end: int
    gateway: int | None
    prefix: int

    @property
    def family(self) -> int:
        return addresses.family(self.first)

    @property
    def mask(self) -> str:
        """Dotted for IPv4, the prefix length for IPv6."""
        if self.family == 6:
            return str(self.prefix)
        return addresses.text((0xFFFFFFFF << (32 - self.prefix)) & 0xFFFFFFFF)

    @property
    def gateway_text(self) -> str:
        return "" if self.gateway is None else addresses.text(self.gateway)

    def __str__(self) -> str:
        return f"{addresses.text(self.start)}-{addresses.text(self.end)}"

    def reserved(self) -> Iterable[tuple[int, str]]:
        if self.gateway is not None:
            yield self.gateway, "is subnet's gateway"
        if self.last - self.first > 1:
            yield self.first, "is the network address"
            if self.family == 4:
                yield self.last, "is the broadcast address"


@dataclass(frozen=True, slots=True)
class Shape:
    """The addresses of one family that a pool may give out, as disjoint ascending spans."""

    spans: tuple[Span, ...] = ()
    avoid_buggy: bool = False
    total: int = 0
    _starts: tuple[int, ...] = field(default=(), repr=False)

    def __contains__(self, address: int) -> bool:
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address > self.spans[index][1]:
            return False
        return not (self.avoid_buggy and is_buggy(address))


@dataclass(frozen=True, slots=True)
class Plan:
    """A pool's ranges as numbers."""

    ranges: tuple[Range, ...]
    excluded: tuple[Span, ...]
    reserved: dict[int, str]
    shapes: dict[int, Shape]  # by family, families without a range are absent
    avoid_buggy: bool = False

    @property
    def total(self) -> int:
        return sum(shape.total for shape in self.shapes.values())

    def __contains__(self, address: int) -> bool:
        shape = self.shapes.get(addresses.family(address))
        return shape is not None and address in shape

    def common_texts(self) -> dict[int, tuple[str, str]]:
        """Mask and gateway by family, where all addresses of the family have the same."""
        found: dict[int, set[tuple[str, str]]] = {}
        for item in self.ranges:
            found.setdefault(item.family, set()).add((item.mask, item.gateway_text))
        return {family: texts.pop() for family, texts in found.items() if len(texts) == 1}

    def range_of(self, address: int) -> Range | None:
        """The range that the address lies in, given out or not; else the subnet around it."""
        around = None
        for item in self.ranges:
            if item.start <= address <= item.end:
                return item
            if item.first <= address <= item.last:
                around = around or item
        return around

    def why_not(self, address: int) -> str:
        """Why the pool never gives this address out; empty when it may."""
        if address in self:
            return ""
        name = addresses.text(address)
        if address in self.reserved:
            return f"requested ip {name} {self.reserved[address]}"
        if not any(item.start <= address <= item.end for item in self.ranges):
            return f"requested ip {name} not in range set {self.text(addresses.family(address))}"
        if self.avoid_buggy and is_buggy(address):
            return f"requested ip {name} is avoided: avoidBuggyIPs is on"
        return f"requested ip {name} is excluded"

    def text(self, family: int = 0) -> str:
        """The ranges as people read them in a message."""
        return ",".join(str(r) for r in self.ranges if family in (0, r.family))


def is_buggy(address: int) -> bool:
    """Whether old equipment may drop it: an IPv4 address that ends in .0 or .255."""
    return address <= 0xFFFFFFFF and (address & 0xFF in (0, 0xFF))


def read_plan(pool: objects.IPPool) -> Plan:
    """The pool's ranges; PoolError names the first thing that is wrong."""
    spec = pool.spec
    if not spec.ranges:
        raise PoolError("spec.ranges", "range can't be empty")
    ranges = tuple(_read_range(item, f"spec.ranges[{i}]") for i, item in enumerate(spec.ranges))
    _refuse_overlaps(ranges)
    avoid = spec.avoid_buggy_ips or flag(pool, AVOID_BUGGY_ANNOTATION)
    excluded = tuple(_read_exclusions(pool))
    reserved = {address: why for item in ranges for address, why in item.reserved()}
    shapes = {}
    for family in sorted({item.family for item in ranges}):
        whole = merge((r.start, r.end) for r in ranges if r.family == family)
        holes = merge([*excluded, *((address, address) for address in reserved)])
        spans = subtract(whole, holes)
        shapes[family] = Shape(
            spans, avoid, _count(spans, avoid), tuple(start for start, _ in spans)
        )
    return Plan(ranges, excluded, reserved, shapes, avoid)


def flag(pool: objects.IPPool, annotation: str) -> bool:
    value = (pool.metadata.annotations or {}).get(annotation, "")
    if value.strip().lower() in ("", "false"):
        return False
    if value.strip().lower() == "true":
        return True
    raise PoolError(f"metadata.annotations[{annotation}]", f'{value!r} must be "true" or "false"')


def read_quotas(pool: objects.IPPool) -> tuple[objects.PoolQuota, ...]:
    """The quotas of the spec and of the annotation (a JSON list of the same items)."""
    quotas = list(pool.spec.quotas or ())
    where = "spec.quotas"
    text = (pool.metadata.annotations or {}).get(QUOTAS_ANNOTATION, "")
    if text.strip():
        try:
            quotas += msgspec.json.decode(text, type=list[objects.PoolQuota])
        except msgspec.MsgspecError as error:
            where = f"metadata.annotations[{QUOTAS_ANNOTATION}]"
            message = f'{error}; write it like [{{"namespace": "*", "limit": 5}}]'
            raise PoolError(where, message) from error
    for quota in quotas:
        if quota.limit < 0:
            raise PoolError(where, f"limit {quota.limit} must not be negative")
    return tuple(quotas)


def _read_range(item: objects.PoolRange, where: str) -> Range:
    first, last, prefix = _read_subnet(item.subnet, f"{where}.subnet")
    family = addresses.family(first)
    small = last - first <= 1
    low = first if small else first + 1
    high = last if small or family == 6 else last - 1
    bounds = (first, last, item.subnet)
    start = _read_bound("range start", item.range_start, f"{where}.rangeStart", bounds)
    end = _read_bound("range end", item.range_end, f"{where}.rangeEnd", bounds)
    gateway = _read_bound("gateway", item.gateway, f"{where}.gateway", bounds)
    start = low if start is None else start
    end = high if end is None else end
    if start > end:
        message = (
            f"range start {addresses.text(start)} comes after range end {addresses.text(end)}: "
            "swap them"
        )
        raise PoolError(f"{where}.rangeStart", message)
    if gateway is None and not small:
        gateway = low
    return Range(first, last, start, end, gateway, prefix)


def _read_subnet(text: str, where: str) -> tuple[int, int, int]:
    try:
        if "/" not in text:
            raise ValueError(text)
        network = ipaddress.ip_network(text.strip(), strict=False)
        if isinstance(network, ipaddress.IPv6Network) and network.network_address.ipv4_mapped:
            raise ValueError(text)
        if network.network_address.is_unspecified and network.prefixlen == network.max_prefixlen:
            raise ValueError(text)
        first = addresses.number(network.network_address)
    except ValueError as error:
        message = f"invalid CIDR address: {text}, a valid example is 192.168.1.0/24"
        raise PoolError(where, message) from error
    return first, first + network.num_addresses - 1, network.prefixlen


def _read_bound(what: str, text: str, where: str, bounds: tuple[int, int, str]) -> int | None:
    if not text:
        return None
    first, last, subnet = bounds
    try:
        address = addresses.parse(text)
    except AddressError as error:
        raise PoolError(where, f"invalid {what} {text}: invalid IP {text}") from error
    problem = ""
    if not first <= address <= last:
        problem = f"IP {text} is out of subnet {subnet}"
    elif last - first > 1 and address == first:
        problem = f"IP {text} is the network address"
    elif last - first > 1 and address == last and addresses.family(address) == 4:
        problem = f"IP {text} is the broadcast address"
    if problem:
        raise PoolError(where, f"invalid {what} {text}: {problem}")
    return address


def _refuse_overlaps(ranges: tuple[Range, ...]) -> None:
    numbered = sorted(enumerate(ranges), key=lambda pair: (pair[1].start, pair[0]))
    for (_, one), (index, other) in pairwise(numbered):
        if other.start <= one.end:
            message = f"there are overlaps between range {one} and {other}"
            raise PoolError(f"spec.ranges[{index}]", message)


def _read_exclusions(pool: objects.IPPool) -> Iterable[Span]:
    for index, text in enumerate(pool.spec.exclude or ()):
        yield read_span(text, f"spec.exclude[{index}]")
    annotated = (pool.metadata.annotations or {}).get(EXCLUDE_ANNOTATION, "")
    for text in annotated.split(","):
        if text.strip():
            yield read_span(text, f"metadata.annotations[{EXCLUDE_ANNOTATION}]")


def read_span(text: str, where: str) -> Span:
    """An address, a range `a-b`, or a CIDR (all of it)."""
    text = text.strip()
    try:
        if "/" in text:
            network = ipaddress.ip_network(text, strict=False)
            first = addresses.number(network.network_address)
            return first, first + network.num_addresses - 1
        first_text, dash, last_text = text.partition("-")
        first = addresses.parse(first_text)
        last = addresses.parse(last_text) if dash else first
    except ValueError as error:
        message = f"{text!r} must be an address, a range (first-last) or a CIDR"
        raise PoolError(where, message) from error
    if last < first or addresses.family(first) != addresses.family(last):
        raise PoolError(where, f"{text!r}: the first address must not come after the last")
    return first, last


def merge(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same addresses as disjoint ascending spans, neighbours joined."""
    merged: list[Span] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)


def subtract(whole: tuple[Span, ...], holes: tuple[Span, ...]) -> tuple[Span, ...]:
    """What is in `whole` and not in `holes`; both as merge() gives them."""
    left: list[Span] = []
    index = 0
    for first, last in whole:
        while index < len(holes) and holes[index][1] < first:
            index += 1
        at = index
        while at < len(holes) and holes[at][0] <= last:
            if holes[at][0] > first:
                left.append((first, holes[at][0] - 1))
            first = holes[at][1] + 1
            at += 1
        if first <= last:
            left.append((first, last))
    return tuple(left)


def _count(spans: tuple[Span, ...], avoid_buggy: bool) -> int:
    total = sum(last - first + 1 for first, last in spans)
    if avoid_buggy:
        total -= sum(_buggy_up_to(last) - _buggy_up_to(first - 1) for first, last in spans)
    return total


def _buggy_up_to(address: int) -> int:
    """How many IPv4 addresses from 0 to this one end in .0 or .255."""
    if address < 0 or address > 0xFFFFFFFF:
        return 0
    return 2 * (address >> 8) + 1 + (1 if address & 0xFF == 0xFF else 0)
