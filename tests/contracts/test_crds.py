"""The CustomResourceDefinitions: what a real API server requires of them, what Harvester's say, and
which objects they take and refuse.

The cases in tests/data/crd_cases.json were checked against the validation code of a real API server
(schema, CEL rules and their cost); here they run against the sandbox's.
"""

import contextlib
import json
from pathlib import Path

import msgspec
import pytest
import yaml

from sandbox.kube import KubeServer
from schema import objects
from services.kit.kube import Kube, KubeError
from tests.contracts.kube_crds import definitions
from tests.system.watcher_rig import CRD, LB, POOL

ROOT = Path(__file__).resolve().parents[2]
GROUP = "loadbalancer.harvesterhci.io"
CASES = json.loads((ROOT / "tests" / "data" / "crd_cases.json").read_text())
RESOURCES = {"loadbalancers": LB, "ippools": POOL}


def definition(plural):
    return yaml.safe_load((ROOT / "schema" / "crds" / f"{plural}.yaml").read_text())


def schema_of(plural):
    (version,) = definition(plural)["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


def walk(node, path=""):
    """Every value schema, with the path to it."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}")
    if "items" in node:
        yield from walk(node["items"], f"{path}[]")
    if isinstance(node.get("additionalProperties"), dict):
        yield from walk(node["additionalProperties"], f"{path}{{}}")


@pytest.mark.parametrize("plural", RESOURCES)
def test_schema_is_structural_and_bounded(plural):
    """Every value has a type and a description; what a rule may walk over has a largest size, so
    that the rules' cost stays within an API server's budget."""
    for path, node in walk(schema_of(plural)):
        if path in ("", ".metadata"):
            continue
        assert "type" in node, path
        if not path.endswith(("[]", "{}")):
            assert "description" in node, path
        if node["type"] == "array":
            assert "maxItems" in node, path
        if node["type"] == "object" and "additionalProperties" in node:
            assert "maxProperties" in node, path
        if node["type"] == "string" and path not in (".apiVersion", ".kind"):
            assert "maxLength" in node or "enum" in node, path
        for junctor in ("allOf", "anyOf", "oneOf"):
            for branch in node.get(junctor, []):
                assert not {"type", "description", "properties"} & set(branch), path


@pytest.mark.parametrize("plural", RESOURCES)
def test_every_field_of_harvesters_crd_is_there_with_its_type(plural):
    """A superset: Harvester's objects keep their meaning."""
    theirs = {d["spec"]["names"]["plural"]: d for d in definitions(GROUP, status=False)}[plural]
    versions = {v["name"]: v for v in theirs["spec"]["versions"]}
    old = dict(walk(versions["v1beta1"]["schema"]["openAPIV3Schema"]))
    ours = dict(walk(schema_of(plural)))
    for path, node in old.items():
        assert path in ours, path
        if "type" in node and path != ".metadata":
            assert ours[path]["type"] == node["type"], path


@pytest.mark.parametrize("plural", RESOURCES)
def test_names_and_columns_are_harvesters(plural):
    """Short names and the columns that people know, in their order; status is a subresource."""
    spec = definition(plural)["spec"]
    (version,) = spec["versions"]
    columns = [c["name"] for c in version["additionalPrinterColumns"] if not c.get("priority")]
    expected = {
        "loadbalancers": (["lb", "lbs"], ["DESCRIPTION", "WORKLOADTYPE", "IPAM", "ADDRESS", "AGE"]),
        "ippools": (["pool", "pools"], ["DESCRIPTION", "RANGES", "Priority", "AGE"]),
    }[plural]
    assert spec["names"]["shortNames"] == expected[0]
    assert [c for c in columns if c in expected[1]] == expected[1]
    assert version["subresources"] == {"status": {}}
    assert definition(plural)["metadata"]["name"] == f"{plural}.{GROUP}"


@pytest.mark.parametrize("plural", RESOURCES)
def test_views_and_schema_name_the_same_fields(plural):
    """What the services read is described, and what is described is read."""
    view = objects.VIEWS[plural]
    described = {path for path, _ in walk(schema_of(plural))}
    read = set(_fields(view, ""))
    assert {p for p in read if p.startswith((".spec", ".status"))} <= described
    assert {p for p in described if p.startswith((".spec.", ".status."))} <= read


def _fields(view, path):
    for field in msgspec.structs.fields(view):
        here = f"{path}.{field.encode_name}"
        yield here
        yield from _below(field.type, here)


def _below(hint, path):
    origin, args = getattr(hint, "__origin__", None), getattr(hint, "__args__", ())
    if isinstance(hint, type) and origin is None and issubclass(hint, msgspec.Struct):
        yield from _fields(hint, path)
    elif origin is list:
        yield f"{path}[]"
        yield from _below(args[0], f"{path}[]")
    elif origin is dict:
        yield f"{path}{{}}"
        yield from _below(args[1], f"{path}{{}}")
    else:
        for arg in args:
            if arg is not type(None):
                yield from _below(arg, path)


@pytest.fixture
async def server(tmp_path):
    async with KubeServer() as api:
        async with await Kube.connect(str(api.write_kubeconfig(tmp_path / "kubeconfig"))) as kube:
            for plural in RESOURCES:
                await kube.create(CRD.path(), definition(plural))
            yield kube


@pytest.mark.parametrize("plural", RESOURCES)
async def test_server_takes_and_refuses(server, plural):
    """Each case as a create, or as an update from its old form; a refusal names what is wrong."""
    resource = RESOURCES[plural]
    wrong = []
    for case in CASES[plural]:
        said = await _try(server, resource, case)
        if said != "" if case["want"] == "" else case["want"] not in said:
            wrong.append((case["name"], case["want"], said))
    assert wrong == []


async def _try(kube, resource, case):
    meta = case["new"]["metadata"]
    path = resource.path(meta.get("namespace", ""), meta["name"])
    try:
        if case["old"] is None:
            await kube.create(resource.path(meta.get("namespace", "")), case["new"])
        else:
            await kube.create(resource.path(meta["namespace"]), case["old"])
            current = msgspec.json.decode(await kube.get(path))
            await kube.replace(path, {**current, "spec": case["new"]["spec"]})
    except KubeError as error:
        return error.message
    finally:
        with contextlib.suppress(KubeError):
            await kube.delete(path)
    return ""
