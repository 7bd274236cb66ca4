"""At most so many addresses of a pool for one project, namespace or guest cluster.

A quota's field that is empty is not regarded, `*` counts each value by itself, another value makes
the quota speak only of owners with that value. Lowering a quota takes nothing away.
"""

from __future__ import annotations

from schema import objects, selection

QuotaKey = tuple[object, ...]  # pool, number of the quota, the values that it counts by


def keys(pool: str, quotas: tuple[objects.PoolQuota, ...], need: selection.Need) -> list[QuotaKey]:
    """What an owner's address in this pool counts towards."""
    found: list[QuotaKey] = []
    for index, quota in enumerate(quotas):
        values: list[str] = []
        for wanted, value in (
            (quota.project, need.project),
            (quota.namespace, need.namespace),
            (quota.guest_cluster, need.cluster),
        ):
            if not wanted:
                continue
            if wanted not in (selection.ANY, value):
                break
            values.append(value)
        else:
            found.append((pool, index, *values))
    return found


def text(quota: objects.PoolQuota, key: QuotaKey) -> str:
    named = [
        name
        for name, wanted in (
            ("project", quota.project),
            ("namespace", quota.namespace),
            ("guest cluster", quota.guest_cluster),
        )
        if wanted
    ]
    parts = [f"{name} {value!r}" for name, value in zip(named, key[2:], strict=True)]
    return f"at most {quota.limit} for {' in '.join(parts) or 'everybody'}"
