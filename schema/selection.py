"""Which pools may serve a request, and in which order: one written rule for everybody.

A pool serves a request when its network is the request's and one of its scope items matches. Per
field of an item, `*` matches everything and a value matches itself. How well a pool fits:

1. exact: some item matches, an empty field only the empty value;
2. loose: some item matches when an empty field counts as "any" (not an item that is empty
   altogether);
3. global: exactly one item, of three `*`; by default whatever its network, as Harvester has it;
4. open: no item at all, only where the setting lets such pools serve those that do not name them.

Within one fit the larger priority comes first, then the name. The order is total: two pools never
tie, whatever order they are looked at. A `*` in a request is no wish: it counts as empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple, Protocol

from schema import objects

ANY = "*"


class Fit(IntEnum):
    EXACT = 1
    LOOSE = 2
    GLOBAL = 3
    OPEN = 4


class Need(NamedTuple):
    """Who asks. Project and namespace come from the Namespace object, never from annotations."""

    network: str = ""
    project: str = ""
    namespace: str = ""
    cluster: str = ""

    def __str__(self) -> str:
        return (
            f"&{{Network:{self.network} Project:{self.project} "
            f"Namespace:{self.namespace} Cluster:{self.cluster}}}"
        )


class Rules(NamedTuple):
    """The settings that change who is served."""

    global_per_network: bool = False  # a global pool serves only its own network
    open_pools: bool = False  # a pool without scope serves those that no other pool fits
    explicit_bypasses_scope: bool = False  # naming a pool is enough, as in Harvester


class Selectable(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def view(self) -> objects.IPPool: ...


def is_global(pool: objects.IPPool) -> bool:
    selector = pool.spec.selector
    scope = (selector.scope if selector else None) or []
    return len(scope) == 1 and all(
        value == ANY for value in (scope[0].project, scope[0].namespace, scope[0].guest_cluster)
    )


def fit(pool: objects.IPPool, need: Need, rules: Rules = Rules()) -> Fit | None:  # noqa: B008
    """How well the pool fits; None when it does not serve the request."""
    selector = pool.spec.selector or objects.PoolSelector()
    same_network = selector.network == need.network
    if is_global(pool):
        return Fit.GLOBAL if same_network or not rules.global_per_network else None
    if not same_network:
        return None
    if not selector.scope:
        return Fit.OPEN if rules.open_pools else None
    if any(matches(item, need) for item in selector.scope):
        return Fit.EXACT
    if any(matches(item, need, loose=True) for item in selector.scope):
        return Fit.LOOSE
    return None


def matches(item: objects.PoolScope, need: Need, *, loose: bool = False) -> bool:
    pairs = (
        (item.project, need.project),
        (item.namespace, need.namespace),
        (item.guest_cluster, need.cluster),
    )
    if loose and not any(mine for mine, _ in pairs):
        return False
    return all(mine in (ANY, theirs) or (loose and not mine) for mine, theirs in pairs)


def permits(pool: objects.IPPool, need: Need, rules: Rules = Rules()) -> bool:  # noqa: B008
    """Whether an owner that names the pool may use it: its scope counts, its network does not."""
    scope = (pool.spec.selector.scope if pool.spec.selector else None) or []
    if rules.explicit_bypasses_scope or not scope:
        return True
    return any(matches(item, need, loose=True) for item in scope)


def why_not(pool: objects.IPPool, need: Need, rules: Rules = Rules()) -> str:  # noqa: B008
    """In words, for a pool that fit() refuses."""
    selector = pool.spec.selector or objects.PoolSelector()
    if selector.network != need.network:
        theirs = need.network or "none"
        return f"the pool is for network {selector.network or 'none'}, the request names {theirs}"
    if not selector.scope:
        return "the pool has no scope: it serves only owners that name it"
    return (
        f"no scope of the pool matches project {need.project!r}, namespace {need.namespace!r}, "
        f"guest cluster {need.cluster!r}"
    )


def rank(
    pools: Iterable[Selectable],
    need: Need,
    rules: Rules = Rules(),  # noqa: B008
) -> list[tuple[Fit, Selectable]]:
    """The pools that serve the request, the first choice first."""
    found = [(how, pool) for pool in pools if (how := fit(pool.view, need, rules)) is not None]
    return sorted(found, key=lambda pair: (pair[0], -priority(pair[1].view), pair[1].name))


def priority(pool: objects.IPPool) -> int:
    return pool.spec.selector.priority if pool.spec.selector else 0
