"""What a new cluster holds before anybody writes, and the kubeconfig that reaches it."""

from __future__ import annotations

import base64
import secrets
from pathlib import Path

import yaml

from sandbox.kube.options import Options
from sandbox.kube.resources import Object, Registry
from sandbox.kube.service_checks import RANGES
from sandbox.kube.store import Store
from sandbox.kube.tls import write_private
from sandbox.kube.writes import Writer

_NAMESPACES = ("default", "kube-node-lease", "kube-public", "kube-system")


def bootstrap(writer: Writer, registry: Registry, store: Store) -> None:
    """Create the usual namespaces, the Service of the API itself and the range of its address,
    where they are missing."""
    spaces = registry.find("", "v1", "namespaces")
    services = registry.find("", "v1", "services")
    ranges = registry.find("networking.k8s.io", "v1", "servicecidrs")
    assert spaces is not None
    assert services is not None
    assert ranges is not None
    for name in _NAMESPACES:
        if store.get("namespaces", ("", name)) is None:
            writer.create(spaces, "", name, _object("Namespace", name), Options("kube-apiserver"))
    if store.get(ranges.collection, ("", "kubernetes")) is None:
        cidrs = [str(network) for network in RANGES.values()]
        shown = {"kind": "ServiceCIDR", "apiVersion": ranges.api_version, "spec": {"cidrs": cidrs}}
        shown["metadata"] = {"name": "kubernetes"}
        writer.create(ranges, "", "kubernetes", shown, Options("kube-apiserver"))
    if store.get("services", ("default", "kubernetes")) is None:
        service = _object("Service", "kubernetes") | {
            "spec": {
                "clusterIP": "10.96.0.1",
                "ports": [{"name": "https", "port": 443, "targetPort": 6443}],
            }
        }
        service["metadata"]["labels"] = {
            "component": "apiserver",
            "provider": "kubernetes",
        }
        writer.create(services, "default", "kubernetes", service, Options("kube-apiserver"))


def _object(kind: str, name: str) -> Object:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}}


def kubeconfig(path: Path, url: str, token: str, authority: bytes) -> Path:
    """Write a kubeconfig with the token in it, readable by its owner only."""
    cluster = {
        "server": url,
        "certificate-authority-data": base64.b64encode(authority).decode(),
    }
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "sandbox", "cluster": cluster}],
        "users": [{"name": "sandbox", "user": {"token": token}}],
        "contexts": [
            {
                "name": "sandbox",
                "context": {"cluster": "sandbox", "user": "sandbox", "namespace": "default"},
            }
        ],
        "current-context": "sandbox",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, yaml.safe_dump(config, sort_keys=False).encode())
    return path


def kept_token(folder: Path | None) -> str:
    """A random token; with a folder, the one that was random at the first start."""
    if folder is None:
        return secrets.token_urlsafe(24)
    path = folder / "token"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_private(path, secrets.token_urlsafe(24).encode())
    return path.read_text().strip()
