"""Real `kubectl` drives the sandbox's Kubernetes API, as its users will.

The server is a process of its own, started as `python -m sandbox.kube`; every test works in a
namespace of its own.
"""

from __future__ import annotations

import itertools
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.contracts.kube_crds import definitions

_GROUP = "loadbalancer.harvesterhci.io"
_LB = f"loadbalancers.{_GROUP}"
_KUBECTL = Path(sys.executable).parent / "kubectl"
_WAIT_S = 30.0
_NUMBERS = itertools.count(1)


class Cluster:
    """A sandbox API server in its own process, and `kubectl` pointed at it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.kubeconfig = folder / "kubeconfig"
        self._process: subprocess.Popen[bytes] | None = None
        self.facts: dict[str, Any] = {}

    def start(self) -> None:
        ready = self._folder / "ready.json"
        ready.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sandbox.kube", "--port", "0"),
                *("--state", str(self._folder / "state"), "--ready-file", str(ready)),
                *("--kubeconfig", str(self.kubeconfig)),
            ]
        )
        deadline = time.monotonic() + _WAIT_S
        while not ready.exists():
            assert self._process.poll() is None, "the server ended while starting"
            assert time.monotonic() < deadline, "the server was not ready in time"
            time.sleep(0.02)
        self.facts = json.loads(ready.read_text())

    def end(self, number: int = signal.SIGTERM) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(timeout=_WAIT_S)

    def kill(self) -> None:
        """Leave nothing behind, whatever happened."""
        if self._process is not None and self._process.poll() is None:
            self.end(signal.SIGKILL)

    def command(self, *argv: str) -> list[str]:
        return [str(_KUBECTL), "--kubeconfig", str(self.kubeconfig), *argv]

    def run(self, *argv: str, stdin: Any = None, code: int = 0) -> str:
        """Run kubectl; returns what it printed, on both channels if it was to fail."""
        text = None
        if stdin is not None:
            many = stdin if isinstance(stdin, list) else [stdin]
            text = stdin if isinstance(stdin, str) else yaml.safe_dump_all(many)
        done = subprocess.run(
            self.command(*argv),
            input=text,
            capture_output=True,
            text=True,
            timeout=_WAIT_S,
            env={"PATH": "/usr/bin:/bin", "HOME": str(self._folder)},
            check=False,
        )
        assert done.returncode == code, f"kubectl {argv}: {done.stdout}{done.stderr}"
        return done.stdout if code == 0 else done.stdout + done.stderr

    def json(self, *argv: str) -> Any:
        return json.loads(self.run("get", *argv, "-o", "json"))


class Space:
    """One namespace of the cluster."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name

    def run(self, *argv: str, stdin: Any = None, code: int = 0) -> str:
        return self.cluster.run("-n", self.name, *argv, stdin=stdin, code=code)

    def json(self, *argv: str) -> Any:
        return self.cluster.json("-n", self.name, *argv)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("kube"))
    made.start()
    crds = [*definitions(_GROUP, status=False), *definitions("lb.example.org", status=True)]
    made.run("apply", "-f", "-", stdin=crds)
    try:
        yield made
        assert made.end() == 0, "SIGTERM ends the server cleanly"
    finally:
        made.kill()


@pytest.fixture
def space(cluster: Cluster) -> Space:
    # Created by protobuf: so kubectl sends this command.
    name = f"space-{next(_NUMBERS)}"
    cluster.run("create", "namespace", name)
    return Space(cluster, name)


def _lb(name: str = "shop", **spec: Any) -> dict[str, Any]:
    listener = {"name": "http", "port": 80, "protocol": "TCP", "backendPort": 8080}
    return {
        "apiVersion": f"{_GROUP}/v1beta1",
        "kind": "LoadBalancer",
        "metadata": {"name": name},
        "spec": {"ipam": "pool", "workloadType": "vm", "listeners": [listener]} | spec,
    }


def _service(*ports: tuple[str, int], **more: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {
            "type": "LoadBalancer",
            "loadBalancerClass": "lbledger.io/pool",
            "ports": [{"name": name, "port": port} for name, port in ports],
        }
        | more,
    }


def _managers(obj: Any) -> list[tuple[str, str]]:
    return [(e["manager"], e["operation"]) for e in obj["metadata"]["managedFields"]]


def test_client_side_apply_of_a_custom_resource(space: Space) -> None:
    """Apply creates, changes, leaves alone, and takes away a field that was dropped."""
    first = _lb(description="front")
    assert "shop created" in space.run("apply", "-f", "-", stdin=first)
    assert "shop unchanged" in space.run("apply", "-f", "-", stdin=first)
    assert "shop configured" in space.run("apply", "-f", "-", stdin=_lb(ipPool="p1"))
    shop = space.json(_LB, "shop")
    assert ("p1", None, 2) == (
        shop["spec"]["ipPool"],
        shop["spec"].get("description"),
        shop["metadata"]["generation"],
    )


def test_client_side_apply_of_a_service(space: Space) -> None:
    """A port that is no longer in the file goes, and what the server allocated stays."""
    space.run("apply", "-f", "-", stdin=_service(("http", 80), ("https", 443)))
    before = space.json("service", "web")["spec"]
    space.run("apply", "-f", "-", stdin=_service(("http", 80), ("alt", 8443)))
    after = space.json("service", "web")["spec"]
    assert [("http", 80), ("alt", 8443)] == [(p["name"], p["port"]) for p in after["ports"]]
    assert before["clusterIP"] == after["clusterIP"]
    assert before["ports"][0]["nodePort"] == after["ports"][0]["nodePort"]


def test_server_side_apply_and_its_conflicts(space: Space) -> None:
    """A field of another manager is refused with its name, taken by force, and given up."""
    space.run("apply", "--server-side", "-f", "-", stdin=_lb(description="mine"))
    theirs = _lb(description="theirs")
    other = ("apply", "--server-side", "--field-manager=other", "-f", "-")
    refused = space.run(*other, stdin=theirs, code=1)
    assert 'conflict with "kubectl": .spec.description' in refused
    space.run(*other, "--force-conflicts", stdin=theirs)
    shop = space.json(_LB, "shop", "--show-managed-fields")
    assert "theirs" == shop["spec"]["description"]
    assert [("kubectl", "Apply"), ("other", "Apply")] == _managers(shop)
    space.run(*other, stdin=_lb())
    assert "description" not in space.json(_LB, "shop")["spec"]


def test_from_client_side_to_server_side_apply(space: Space) -> None:
    """An object that was applied by the client is taken over without a conflict."""
    space.run("apply", "-f", "-", stdin=_lb(description="old"))
    space.run("apply", "--server-side", "-f", "-", stdin=_lb(description="new"))
    shop = space.json(_LB, "shop", "--show-managed-fields")
    assert "new" == shop["spec"]["description"]
    assert ("kubectl", "Apply") in _managers(shop)
    assert ("kubectl-client-side-apply", "Update") not in _managers(shop)


def test_tables(space: Space) -> None:
    """`get` prints the columns of a CRD and of built-in kinds."""
    space.run("apply", "-f", "-", stdin=[_lb(description="front"), _service(("http", 80))])
    patch = json.dumps({"status": {"address": "192.0.2.7"}})
    space.run("patch", _LB, "shop", "--type=merge", "-p", patch)
    head, row = space.run("get", _LB).splitlines()
    assert ["NAME", "DESCRIPTION", "WORKLOADTYPE", "IPAM", "ADDRESS", "AGE"] == head.split()
    assert ["shop", "front", "vm", "pool", "192.0.2.7"] == row.split()[:-1]
    head, row = space.run("get", "service", "-o", "wide").splitlines()
    assert ["web", "LoadBalancer", "<pending>", "<none>"] == [row.split()[i] for i in (0, 1, 3, 6)]
    assert "SELECTOR" in head
    assert f"{_LB.replace('loadbalancers', 'loadbalancer')}/shop\n" == space.run(
        "get", _LB, "-o", "name"
    )


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["-l", "tier=web"], ["a", "b"]),
        (["-l", "tier in (web,db),zone!=2"], ["a", "c"]),
        (["-l", "!zone"], ["c"]),
        (["--field-selector", "metadata.name=b"], ["b"]),
        (["--chunk-size=1"], ["a", "b", "c"]),
        (["--sort-by=.metadata.labels.tier"], ["c", "a", "b"]),
    ],
)
def test_selection(space: Space, argv: list[str], found: list[str]) -> None:
    """Selectors, pages and sorting find what they should."""
    labels = {
        "a": {"tier": "web", "zone": "1"},
        "b": {"tier": "web", "zone": "2"},
        "c": {"tier": "db"},
    }
    objects = []
    for name, own in labels.items():
        obj = _lb(name)
        obj["metadata"]["labels"] = own
        objects.append(obj)
    space.run("apply", "-f", "-", stdin=objects)
    template = "jsonpath={.items[*].metadata.name}"
    assert found == space.run("get", _LB, *argv, "-o", template).split()


class Lines:
    """The lines that a command prints, while it runs."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._lines: queue.Queue[str] = queue.Queue(maxsize=1000)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def next(self) -> list[str]:
        return self._lines.get(timeout=_WAIT_S).split()

    def end(self) -> None:
        self._process.kill()
        self._process.wait(timeout=_WAIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


def test_get_watch_prints_each_change(space: Space) -> None:
    """`get -w` shows what is there, then each change as a row of the same table."""
    space.run("apply", "-f", "-", stdin=_lb())
    lines = Lines(space.cluster.command("-n", space.name, "get", _LB, "-w"))
    try:
        assert "NAME" == lines.next()[0]
        assert "shop" == lines.next()[0]
        space.run("patch", _LB, "shop", "--type=merge", "-p", '{"status":{"address":"192.0.2.9"}}')
        assert "192.0.2.9" in lines.next()
        space.run("apply", "-f", "-", stdin=_lb("second"))
        assert "second" == lines.next()[0]
    finally:
        lines.end()


async def test_describe_shows_events_of_the_new_api(space: Space) -> None:
    """An event written through events.k8s.io is shown by `describe`, which asks core/v1."""
    space.run("apply", "-f", "-", stdin=_lb())
    shop = space.json(_LB, "shop")
    event = {
        "metadata": {"generateName": "shop-"},
        "eventTime": "2026-11-30T00:00:00.000000Z",
        "reportingController": "lbledger.io/applier",
        "reportingInstance": "applier-0",
        "action": "Allocate",
        "reason": "PoolExhausted",
        "type": "Warning",
        "note": "no free address",
        "regarding": {
            "apiVersion": shop["apiVersion"],
            "kind": "LoadBalancer",
            "name": "shop",
            "namespace": space.name,
            "uid": shop["metadata"]["uid"],
        },
    }
    token = yaml.safe_load(space.cluster.kubeconfig.read_text())["users"][0]["user"]["token"]
    url = f"{space.cluster.facts['url']}/apis/events.k8s.io/v1/namespaces/{space.name}/events"
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as http,
        http.post(url, json=event) as answer,
    ):
        assert answer.status == 201, await answer.text()
    told = space.run("describe", _LB, "shop")
    assert "Warning  PoolExhausted" in told
    assert "lbledger.io/applier" in told
    assert "no free address" in told
    assert "loadbalancer/shop" in space.run("get", "events")


def test_patches_of_every_type(space: Space) -> None:
    """Merge, JSON and strategic patches work where a real server takes them."""
    space.run("apply", "-f", "-", stdin=[_lb(), _service(("http", 80))])
    space.run("patch", _LB, "shop", "--type=merge", "-p", '{"spec":{"description":"x"}}')
    replace = '[{"op":"replace","path":"/spec/description","value":"y"}]'
    space.run("patch", _LB, "shop", "--type=json", "-p", replace)
    assert "y" == space.json(_LB, "shop")["spec"]["description"]
    strategic = '{"spec":{"ports":[{"name":"https","port":443}]}}'
    space.run("patch", "service", "web", "-p", strategic)
    assert {80, 443} == {p["port"] for p in space.json("service", "web")["spec"]["ports"]}
    space.run("patch", "service", "web", "-p", '{"spec":{"ports":[{"port":80,"$patch":"delete"}]}}')
    assert [443] == [p["port"] for p in space.json("service", "web")["spec"]["ports"]]
    refused = space.run("patch", _LB, "shop", "--type=strategic", "-p", "{}", code=1)
    assert "application/strategic-merge-patch+json is not supported" in refused
    test = '[{"op":"test","path":"/spec/ipam","value":"dhcp"}]'
    assert "failed" in space.run("patch", _LB, "shop", "--type=json", "-p", test, code=1)


def test_status_subresource(space: Space) -> None:
    """With a status subresource, `--subresource=status` writes status and nothing else does."""
    obj = _lb() | {"apiVersion": "lb.example.org/v1beta1"}
    space.run("apply", "-f", "-", stdin=obj)
    kind = "loadbalancers.lb.example.org"
    patch = '{"spec":{"ipam":"dhcp"},"status":{"address":"192.0.2.1"}}'
    space.run("patch", kind, "shop", "--subresource=status", "--type=merge", "-p", patch)
    space.run("patch", kind, "shop", "--type=merge", "-p", '{"status":{"address":"192.0.2.2"}}')
    shop = space.json(kind, "shop")
    assert ("192.0.2.1", "pool", 1) == (
        shop["status"]["address"],
        shop["spec"]["ipam"],
        shop["metadata"]["generation"],
    )


def test_annotate_and_label(space: Space) -> None:
    """Annotations and labels are set, guarded against overwriting, and removed."""
    space.run("apply", "-f", "-", stdin=_lb())
    space.run("annotate", _LB, "shop", "lbledger.io/note=a")
    space.run("label", _LB, "shop", "tier=web")
    assert "already has a value" in space.run("label", _LB, "shop", "tier=db", code=1)
    space.run("label", _LB, "shop", "tier=db", "--overwrite")
    space.run("annotate", _LB, "shop", "lbledger.io/note-")
    metadata = space.json(_LB, "shop")["metadata"]
    assert {"tier": "db"} == metadata["labels"]
    assert "lbledger.io/note" not in metadata["annotations"]
    stale = ("label", _LB, "shop", "tier=x", "--overwrite", "--resource-version=1")
    assert "object has been modified" in space.run(*stale, code=1)


def test_a_finalizer_holds_a_delete(space: Space) -> None:
    """A held object stays, marked, until its finalizer goes; `delete` waits for that."""
    obj = _lb()
    obj["metadata"]["finalizers"] = ["lbledger.io/lease"]
    space.run("apply", "-f", "-", stdin=obj)
    deleting = subprocess.Popen(
        space.cluster.command("-n", space.name, "delete", _LB, "shop"), stdout=subprocess.DEVNULL
    )
    space.run("wait", _LB, "shop", "--for=jsonpath={.metadata.deletionTimestamp}", "--timeout=10s")
    assert deleting.poll() is None, "kubectl did not wait"
    assert 2 == space.json(_LB, "shop")["metadata"]["generation"]
    space.run("patch", _LB, "shop", "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    assert 0 == deleting.wait(timeout=_WAIT_S)
    assert "not found" in space.run("get", _LB, "shop", code=1)


def test_a_stale_replace_is_refused(space: Space) -> None:
    """A replace of an old version is a conflict, and changes nothing."""
    space.run("apply", "-f", "-", stdin=_lb(description="first"))
    stale = space.json(_LB, "shop")
    space.run("patch", _LB, "shop", "--type=merge", "-p", '{"spec":{"description":"second"}}')
    stale["spec"]["description"] = "stale"
    refused = space.run("replace", "-f", "-", stdin=stale, code=1)
    assert "the object has been modified" in refused
    fresh = space.json(_LB, "shop")
    assert "second" == fresh["spec"]["description"]
    fresh["spec"]["description"] = "third"
    space.run("replace", "-f", "-", stdin=fresh)
    assert "third" == space.json(_LB, "shop")["spec"]["description"]


def _owned(name: str, owner: Any, *, blocks: bool = False) -> dict[str, Any]:
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "blockOwnerDeletion": blocks,
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "ownerReferences": [reference]},
    }


@pytest.mark.parametrize(
    ("cascade", "left"), [("background", ""), ("foreground", ""), ("orphan", "configmap/child\n")]
)
def test_cascading_delete(space: Space, cascade: str, left: str) -> None:
    """What an object owns goes with it, or is released, as the user asked."""
    space.run("apply", "-f", "-", stdin=_lb())
    owner = space.json(_LB, "shop")
    space.run("create", "-f", "-", stdin=_owned("child", owner, blocks=True))
    space.run("delete", _LB, "shop", f"--cascade={cascade}")
    if left:
        assert "ownerReferences" not in space.json("configmap", "child")["metadata"]
    else:
        space.run("wait", "configmap", "child", "--for=delete", "--timeout=10s")
    assert left == space.run("get", "configmap", "-o", "name")


def test_an_object_whose_owner_is_gone_goes(space: Space) -> None:
    """A dependent that comes after its owner left is collected."""
    space.run("apply", "-f", "-", stdin=_lb())
    owner = space.json(_LB, "shop")
    space.run("delete", _LB, "shop")
    space.run("create", "-f", "-", stdin=_owned("late", owner))
    space.run("wait", "configmap", "late", "--for=delete", "--timeout=10s")


def test_a_namespace_takes_its_content_along(space: Space) -> None:
    """Deleting a namespace empties it first, and waits for finalizers in it."""
    held = _lb("held")
    held["metadata"]["finalizers"] = ["lbledger.io/lease"]
    space.run("apply", "-f", "-", stdin=[_lb(), held, _service(("http", 80))])
    space.run("delete", "namespace", space.name, "--wait=false")
    space.run("wait", _LB, "held", "--for=jsonpath={.metadata.deletionTimestamp}", "--timeout=10s")
    refused = space.run("create", "-f", "-", stdin=_lb("new"), code=1)
    assert "because it is being terminated" in refused
    space.run("patch", _LB, "held", "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    space.run("wait", "namespace", space.name, "--for=delete", "--timeout=10s")


def test_imperative_create(space: Space) -> None:
    """Commands that send protobuf are understood."""
    space.run("create", "configmap", "settings", "--from-literal=a=b")
    space.run("create", "secret", "generic", "key", "--from-literal=k=v")
    space.run("create", "service", "clusterip", "plain", "--tcp=80:http")
    space.run("create", "serviceaccount", "robot")
    assert {"a": "b"} == space.json("configmap", "settings")["data"]
    assert {"k": "dg=="} == space.json("secret", "key")["data"]
    port = space.json("service", "plain")["spec"]["ports"][0]
    assert ("80-http", 80, "http") == (port["name"], port["port"], port["targetPort"])


def test_explain(space: Space) -> None:
    """`explain` prints the fields of a CRD and of a built-in kind."""
    assert "backendPort" in space.run("explain", f"{_LB}.spec.listeners")
    assert "nodePort" in space.run("explain", "service.spec.ports")


def test_unknown_fields_are_refused(space: Space) -> None:
    """A field that does not exist is named, by client-side and by server-side apply."""
    refused = space.run("apply", "-f", "-", stdin=_lb(ipPol="p1"), code=1)
    assert 'unknown field "spec.ipPol"' in refused
    refused = space.run("apply", "--server-side", "-f", "-", stdin=_lb(ipPol="p1"), code=1)
    assert ".spec.ipPol: field not declared in schema" in refused
    assert "" == space.run("get", _LB, "-o", "name")


def test_invalid_values_are_refused(space: Space) -> None:
    """Each wrong value is named with what would be right."""
    refused = space.run("apply", "-f", "-", stdin=_lb(ipam="x", workloadType=3), code=1)
    assert 'spec.ipam: Unsupported value: "x": supported values: "pool", "dhcp"' in refused
    assert "spec.workloadType in body must be of type string" in refused
    refused = space.run("apply", "-f", "-", stdin=_service(("a", 0)), code=1)
    assert "spec.ports[0].port: Invalid value: 0" in refused


def test_diff_and_dry_run_write_nothing(space: Space) -> None:
    """`diff` and `--dry-run=server` say what would happen, and it does not."""
    space.run("apply", "-f", "-", stdin=_lb(description="old"))
    version = space.json(_LB, "shop")["metadata"]["resourceVersion"]
    told = space.run("diff", "-f", "-", stdin=_lb(description="new"), code=1)
    assert "+  description: new" in told
    space.run("apply", "--dry-run=server", "-f", "-", stdin=_lb(description="new"))
    space.run("create", "--dry-run=server", "-f", "-", stdin=_service(("http", 80)))
    space.run("delete", "--dry-run=server", _LB, "shop")
    assert version == space.json(_LB, "shop")["metadata"]["resourceVersion"]
    assert "" == space.run("get", "service", "-o", "name")


def test_the_cluster_as_a_whole(cluster: Cluster) -> None:
    """Versions, resources and health are there to be asked for."""
    assert "Server Version: v1.36" in cluster.run("version")
    assert "loadbalancers" in cluster.run("api-resources")
    assert "ok" == cluster.run("get", "--raw", "/readyz")
    crd = f"crd/{_LB}"
    assert "condition met" in cluster.run("wait", crd, "--for=condition=Established")


def test_a_wrong_token_is_refused(cluster: Cluster) -> None:
    """Who does not know the token gets nothing."""
    refused = cluster.run("get", "nodes", "--token=wrong", code=1)
    assert "Unauthorized" in refused


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster that a test may kill."""
    made = Cluster(tmp_path)
    made.start()
    yield made
    made.kill()


def test_objects_survive_a_kill(lone: Cluster, tmp_path: Path) -> None:
    """With a state folder a killed server comes back with its objects, versions and token."""

    def token() -> str:
        user = yaml.safe_load(lone.kubeconfig.read_text())["users"][0]["user"]
        return str(user["token"])

    lone.run("apply", "-f", "-", stdin=definitions(_GROUP, status=False))
    lone.run("apply", "-f", "-", stdin=[_lb(description="kept"), _service(("http", 80))])
    lone.run("create", "configmap", "gone")
    lone.run("delete", "configmap", "gone")
    before, service, known = lone.json(_LB, "shop"), lone.json("service", "web"), token()
    assert -signal.SIGKILL == lone.end(signal.SIGKILL)
    with (tmp_path / "state" / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"collection":"configmaps","type":"ADD')  # torn by the crash
    lone.start()
    assert before == lone.json(_LB, "shop")
    assert service == lone.json("service", "web")
    assert "" == lone.run("get", "configmap", "-o", "name")
    assert known == token()
    lone.run("patch", _LB, "shop", "--type=merge", "-p", '{"spec":{"description":"new"}}')
    after = lone.json(_LB, "shop")["metadata"]
    assert int(after["resourceVersion"]) > int(before["metadata"]["resourceVersion"])
    assert 0o600 == lone.kubeconfig.stat().st_mode & 0o777
    assert 0 == lone.end()
