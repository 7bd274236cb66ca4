"""Addresses as numbers: what decides about addresses computes with ints, text lives at the edges.

An IPv4 address is its 32-bit value; an IPv6 address is its 128-bit value with bit 128 set, so that
the two families never meet and sort one after the other. An IPv4-mapped IPv6 address is the IPv4
address that it means: it can't become a second holder of the same address.
"""

from __future__ import annotations

import ipaddress
import re
from socket import AF_INET6, inet_ntop, inet_pton  # mere arithmetic, several times faster
from typing import Final

V6: Final = 1 << 128
_LAST_V4: Final = (1 << 32) - 1

WIDTHS: Final = {4: 32, 6: 128}
NAMES: Final = {4: "IPv4", 6: "IPv6"}
FAMILIES: Final = {"IPv4": 4, "IPv6": 6}


class AddressError(ValueError):
    """Text that is no address; the message says what would be one."""


_octet: Final = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_PLAIN_V4: Final = re.compile(rf"{_octet}(\.{_octet}){{3}}", re.ASCII).fullmatch


def family(address: int) -> int:
    return 6 if address > _LAST_V4 else 4


def parse(text: str) -> int:
    """One host address, in any spelling, with or without its full prefix length."""
    if _PLAIN_V4(text):
        return parse_canonical(text)
    if "%" in text:
        raise AddressError(f"invalid IP {text!r}: an address with a zone belongs to one node")
    try:
        interface = ipaddress.ip_interface(text.strip())
    except ValueError as error:
        raise AddressError(
            f"invalid IP {text!r}: write it like 192.0.2.5 or 2001:db8::5"
        ) from error
    if interface.network.num_addresses != 1:
        raise AddressError(f"invalid IP {text!r}: a prefix is not one address")
    return number(interface.ip)


def number(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> int:
    if isinstance(address, ipaddress.IPv4Address):
        return int(address)
    mapped = address.ipv4_mapped
    return int(mapped) if mapped is not None else int(address) | V6


def text(address: int) -> str:
    """The canonical spelling, without a prefix length."""
    if address > _LAST_V4:
        value = address ^ V6
        if value >> 48:
            return inet_ntop(AF_INET6, value.to_bytes(16, "big"))
        return str(ipaddress.IPv6Address(value))  # where the C library writes some as IPv4
    return f"{address >> 24}.{address >> 16 & 255}.{address >> 8 & 255}.{address & 255}"


def parse_canonical(text: str) -> int:
    """What text() gave; faster than parse() and without its tolerance."""
    if ":" in text:
        return int.from_bytes(inet_pton(AF_INET6, text), "big") | V6
    a, b, c, d = text.split(".")
    return int(a) << 24 | int(b) << 16 | int(c) << 8 | int(d)
