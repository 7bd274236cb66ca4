"""The CRDs that the recorded exchanges presume: Harvester's, and the same with a status
subresource under `lb.example.org`."""

from __future__ import annotations

from typing import Any

_STRING = {"type": "string"}
_INT = {"type": "integer"}


def _object(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "object", "properties": properties}
    return made | ({"required": required} if required else {})


def _list(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


def _map(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": item}


_CONDITIONS = _list(
    _object(
        ["type", "status"],
        type=_STRING,
        status=_STRING,
        lastUpdateTime=_STRING,
        lastTransitionTime=_STRING,
        reason=_STRING,
        message=_STRING,
    )
)
_LISTENERS = _list(
    _object(
        ["port", "protocol", "backendPort"],
        name=_STRING,
        port={"type": "integer", "format": "int32"},
        protocol=_STRING,
        backendPort={"type": "integer", "format": "int32"},
    )
)
_LOAD_BALANCER = _object(
    ["spec"],
    spec=_object(
        description=_STRING,
        workloadType=_STRING | {"enum": ["vm", "cluster"]},
        ipam=_STRING | {"enum": ["pool", "dhcp"]},
        ipPool=_STRING,
        listeners=_LISTENERS,
        backendServerSelector=_map(_list(_STRING)),
        healthCheck=_object(
            port=_INT,
            successThreshold=_INT,
            failureThreshold=_INT,
            periodSeconds=_INT,
            timeoutSeconds=_INT,
        )
        | {"nullable": True},
    ),
    status=_object(
        address=_STRING,
        allocatedAddress=_object(ipPool=_STRING, ip=_STRING, mask=_STRING, gateway=_STRING),
        backendServers=_list(_STRING),
        conditions=_CONDITIONS,
    ),
)
_OLD_LOAD_BALANCER = _object(
    ["spec"],
    spec=_object(
        ["ipam"],
        description=_STRING,
        ipam=_STRING,
        listeners=_LISTENERS,
        backendServers=_list(_STRING),
    ),
    status=_object(address=_STRING, conditions=_CONDITIONS),
)
_POOL = _object(
    ["spec"],
    spec=_object(
        ["ranges"],
        description=_STRING,
        ranges=_list(
            _object(
                ["subnet"], subnet=_STRING, rangeStart=_STRING, rangeEnd=_STRING, gateway=_STRING
            )
        ),
        selector=_object(
            priority={"type": "integer", "format": "int32"},
            network=_STRING,
            scope=_list(_object(project=_STRING, namespace=_STRING, guestCluster=_STRING)),
        ),
    ),
    status=_object(
        ["total", "available", "lastAllocated"],
        total={"type": "integer", "format": "int64"},
        available={"type": "integer", "format": "int64"},
        lastAllocated=_STRING,
        allocated=_map(_STRING),
        allocatedHistory=_map(_STRING),
        conditions=_CONDITIONS,
    ),
)


def _columns(**paths: str) -> list[dict[str, str]]:
    columns = [{"name": n, "jsonPath": p, "type": "string"} for n, p in paths.items()]
    age = {"name": "AGE", "jsonPath": ".metadata.creationTimestamp", "type": "date"}
    return [*columns, age]


def _version(
    name: str, schema: dict[str, Any], columns: list[dict[str, str]], *, stored: bool, status: bool
) -> dict[str, Any]:
    return {
        "name": name,
        "served": True,
        "storage": stored,
        "schema": {"openAPIV3Schema": schema},
        "additionalPrinterColumns": columns,
        "subresources": {"status": {}} if status else {},
    }


def _definition(
    group: str, scope: str, names: dict[str, Any], versions: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names['plural']}.{group}"},
        "spec": {"group": group, "scope": scope, "names": names, "versions": versions},
    }


def definitions(group: str, *, status: bool) -> list[dict[str, Any]]:
    """The two CRDs of a group, with or without status as a subresource."""
    columns = _columns(
        DESCRIPTION=".spec.description",
        WORKLOADTYPE=".spec.workloadType",
        IPAM=".spec.ipam",
        ADDRESS=".status.address",
    )
    old = _columns(DESCRIPTION=".spec.description", IPAM=".spec.ipam", ADDRESS=".status.address")
    pool = _columns(
        DESCRIPTION=".spec.description", RANGES=".spec.ranges", Priority=".spec.selector.priority"
    )
    return [
        _definition(
            group,
            "Namespaced",
            {"kind": "LoadBalancer", "plural": "loadbalancers", "shortNames": ["lb", "lbs"]},
            [
                _version("v1alpha1", _OLD_LOAD_BALANCER, old, stored=False, status=status),
                _version("v1beta1", _LOAD_BALANCER, columns, stored=True, status=status),
            ],
        ),
        _definition(
            group,
            "Cluster",
            {"kind": "IPPool", "plural": "ippools", "shortNames": ["pool", "pools"]},
            [_version("v1beta1", _POOL, pool, stored=True, status=status)],
        ),
    ]
