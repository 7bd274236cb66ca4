"""Which address is dialled for an address that an object holds.

Normally the same one. `dial_map` maps networks one to one ("10.0.0.0/16=127.10.0.0/16"), so that a
sandbox or a test can answer on loopback for objects with ordinary addresses.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class BadDialMap(ValueError):
    """A rule that can't be used; the text names it and says what would be right."""


class DialMap:
    """The most specific rule that holds an address maps it."""

    def __init__(self, rules: Iterable[str] = ()) -> None:
        self._rules: list[tuple[Network, Network]] = []
        for rule in rules:
            source, target = _parse(rule)
            if any(source == other for other, _ in self._rules):
                raise BadDialMap(f"prober.dial_map has two rules for {source}: must be one")
            self._rules.append((source, target))
        self._rules.sort(key=lambda pair: -pair[0].prefixlen)

    def __call__(self, address: str) -> str:
        if not self._rules:
            return address
        ip = ipaddress.ip_address(address)
        for source, target in self._rules:
            if ip in source:
                offset = int(ip) - int(source.network_address)
                return str(target[offset])
        return address


def _parse(rule: str) -> tuple[Network, Network]:
    left, equals, right = rule.partition("=")
    try:
        if not equals:
            raise ValueError("there is no '='")
        source, target = ipaddress.ip_network(left.strip()), ipaddress.ip_network(right.strip())
        if source.version != target.version:
            raise ValueError("the families differ")
        if source.prefixlen != target.prefixlen:
            raise ValueError("the prefix lengths differ")
    except ValueError as error:
        raise BadDialMap(
            f"prober.dial_map has {rule!r}: {error}; must be CIDR=CIDR of one family and length,"
            " like 10.0.0.0/16=127.10.0.0/16"
        ) from error
    return source, target
