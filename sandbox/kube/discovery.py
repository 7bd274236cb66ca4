"""Discovery: which groups, versions and resources there are, in the old form and the new."""

from __future__ import annotations

from typing import Any

from sandbox.kube.resources import Registry, Resource

AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"

VERSION = {
    "major": "1",
    "minor": "36",
    "emulationMajor": "1",
    "emulationMinor": "36",
    "minCompatibilityMajor": "1",
    "minCompatibilityMinor": "35",
    "gitVersion": "v1.36.0+lbledger-sandbox",
    "gitCommit": "",
    "gitTreeState": "",
    "buildDate": "1970-01-01T00:00:00Z",
    "goVersion": "",
    "compiler": "",
    "platform": "linux/amd64",
}
_STATUS_VERBS = ["get", "patch", "update"]


def wants_aggregated(accept: str) -> bool:
    first = (accept or "").replace(" ", "").split(",")[0]
    return "g=apidiscovery.k8s.io" in first and "v=v2;" in first + ";"


def versions(address: str) -> dict[str, Any]:
    """/api"""
    return {
        "kind": "APIVersions",
        "versions": ["v1"],
        "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": address}],
    }


def groups(registry: Registry) -> dict[str, Any]:
    """/apis"""
    names = [name for name in registry.groups() if name]
    return {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [_group(registry, name) for name in names],
    }


def group(registry: Registry, name: str) -> dict[str, Any]:
    """/apis/<group>"""
    return {"kind": "APIGroup", "apiVersion": "v1"} | _group(registry, name)


def _group(registry: Registry, name: str) -> dict[str, Any]:
    served = [
        {"groupVersion": f"{name}/{version}", "version": version}
        for version in registry.versions(name)
    ]
    return {"name": name, "versions": served, "preferredVersion": served[0]}


def resources(registry: Registry, name: str, version: str) -> dict[str, Any]:
    """/api/v1 and /apis/<group>/<version>"""
    made: dict[str, Any] = {"kind": "APIResourceList"}
    if name:
        made["apiVersion"] = "v1"
    made["groupVersion"] = f"{name}/{version}" if name else version
    made["resources"] = [
        entry for resource in registry.of(name, version) for entry in _entries(resource)
    ]
    return made


def _entries(resource: Resource) -> list[dict[str, Any]]:
    entry: dict[str, Any] = {
        "name": resource.plural,
        "singularName": resource.singular,
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": list(resource.verbs),
    }
    if resource.short_names:
        entry["shortNames"] = list(resource.short_names)
    if resource.categories:
        entry["categories"] = list(resource.categories)
    entry["storageVersionHash"] = resource.storage_hash
    below = []
    if resource.kind == "Namespace":
        below.append(("finalize", ["update"]))
    if resource.status:
        below.append(("status", _STATUS_VERBS))
    return [entry] + [
        {
            "name": f"{resource.plural}/{name}",
            "singularName": "",
            "namespaced": resource.namespaced,
            "kind": resource.kind,
            "verbs": verbs,
        }
        for name, verbs in below
    ]


def aggregated(registry: Registry, *, core: bool) -> dict[str, Any]:
    """/api or /apis as one document."""
    names = [name for name in registry.groups() if bool(name) != core]
    items = []
    for name in names:
        served = [
            {
                "version": version,
                "resources": [
                    _aggregated(resource)
                    for resource in sorted(registry.of(name, version), key=lambda r: r.plural)
                ],
                "freshness": "Current",
            }
            for version in registry.versions(name)
        ]
        metadata = {"name": name} if name else {}
        items.append({"metadata": metadata, "versions": served})
    return {
        "kind": "APIGroupDiscoveryList",
        "apiVersion": "apidiscovery.k8s.io/v2",
        "metadata": {},
        "items": items,
    }


def _aggregated(resource: Resource) -> dict[str, Any]:
    kind = {"group": "", "version": "", "kind": resource.kind}
    if resource.custom:
        kind |= {"group": resource.group, "version": resource.version}
    entry: dict[str, Any] = {
        "resource": resource.plural,
        "responseKind": kind,
        "scope": "Namespaced" if resource.namespaced else "Cluster",
        "singularResource": resource.singular,
        "verbs": list(resource.verbs),
    }
    if resource.short_names:
        entry["shortNames"] = list(resource.short_names)
    if resource.categories:
        entry["categories"] = list(resource.categories)
    below = []
    if resource.kind == "Namespace":
        below.append({"subresource": "finalize", "responseKind": kind, "verbs": ["update"]})
    if resource.status:
        below.append({"subresource": "status", "responseKind": kind, "verbs": _STATUS_VERBS})
    if below:
        entry["subresources"] = below
    return entry
