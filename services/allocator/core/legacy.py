"""Pools from the ConfigMap of the kube-vip cloud provider, imported once.

`cidr-<name>` holds CIDRs, `range-<name>` holds first-last ranges, each a comma-separated list; the
name is the namespace that the pool serves, `global` serves all. `kubevip-services` tells which
Service had which address. An entry that can't be read is reported and stops nothing else.
"""

from __future__ import annotations

from typing import Final

import msgspec

from schema import addresses, events, objects
from schema.pools import PoolError, read_plan, read_span

CONVERTED: Final = "loadbalancer.harvesterhci.io/after-conversion"
SERVICES_KEY: Final = "kubevip-services"


class _Vip(msgspec.Struct, rename="camel"):
    vip: str = ""
    service_name: str = ""


class _Vips(msgspec.Struct):
    services: list[_Vip] = []


def wanted(config: objects.ConfigMap) -> bool:
    meta = config.metadata
    if (meta.namespace, meta.name) != ("kube-system", "kubevip") or not config.data:
        return False
    return (meta.annotations or {}).get(CONVERTED) != "true"


def convert(data: dict[str, str], namespace: str) -> tuple[list[events.ImportedPool], list[str]]:
    """The pools, the global one first, and what could not be read."""
    ranges: dict[str, list[objects.PoolRange]] = {}
    problems: list[str] = []
    for key, value in sorted(data.items()):
        kind, dash, name = key.partition("-")
        if key == SERVICES_KEY:
            continue
        if not dash or not name or kind not in ("cidr", "range"):
            problems.append(f"{key}: must be cidr-<namespace> or range-<namespace>; skipped")
            continue
        try:
            found = [_range(kind, text.strip(), key) for text in value.split(",")]
        except PoolError as error:
            problems.append(str(error))
        else:
            ranges.setdefault(name, []).extend(found)
    pools: dict[str, objects.IPPool] = {}
    for name in sorted(ranges, key=lambda name: (name != "global", name)):
        pool = objects.IPPool(
            metadata=objects.ObjectMeta(name=name), spec=_spec(name, ranges[name])
        )
        try:
            read_plan(pool)
        except PoolError as error:
            problems.append(f"pool {name}: {error}")
        else:
            pools[name] = pool
    histories = _histories(data.get(SERVICES_KEY, ""), namespace, pools, problems)
    imported = [
        events.ImportedPool(name=name, spec=pool.spec, history=histories.get(name, {}))
        for name, pool in pools.items()
    ]
    return imported, problems


def _range(kind: str, text: str, key: str) -> objects.PoolRange:
    first, last = read_span(text, key)
    if kind == "cidr":
        if "/" not in text:
            raise PoolError(key, f"{text!r} must be a CIDR")
        return objects.PoolRange(subnet=text)
    if first == last or "/" in text:
        raise PoolError(key, f"{text!r} must be first-last")
    width = addresses.WIDTHS[addresses.family(first)]
    bits = (first ^ last).bit_length()
    # The smallest prefix that both ends have in common, as Harvester takes it.
    subnet = f"{addresses.text(first >> bits << bits)}/{width - bits}"
    return objects.PoolRange(
        subnet=subnet, range_start=addresses.text(first), range_end=addresses.text(last)
    )


def _spec(name: str, ranges: list[objects.PoolRange]) -> objects.IPPoolSpec:
    namespace = "*" if name == "global" else name
    scope = objects.PoolScope(project="*", namespace=namespace, guest_cluster="*")
    return objects.IPPoolSpec(ranges=ranges, selector=objects.PoolSelector(scope=[scope]))


def _histories(
    text: str, namespace: str, pools: dict[str, objects.IPPool], problems: list[str]
) -> dict[str, dict[str, str]]:
    histories: dict[str, dict[str, str]] = {}
    if not text:
        return histories
    try:
        listed = msgspec.json.decode(text, type=_Vips).services
    except msgspec.MsgspecError as error:
        problems.append(f"{SERVICES_KEY}: {error}")
        return histories
    plans = {name: read_plan(pools[name]) for name in (namespace, "global") if name in pools}
    for item in listed:
        try:
            address = addresses.parse(item.vip)
        except addresses.AddressError as error:
            problems.append(f"{SERVICES_KEY}: {item.service_name}: {error}")
            continue
        pool = next((name for name, plan in plans.items() if address in plan), "")
        if pool and address:
            owner = f"{namespace}/{item.service_name}"
            histories.setdefault(pool, {})[addresses.text(address)] = owner
    return histories
