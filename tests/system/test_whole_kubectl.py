"""Real kubectl against the running system, as the README says, on the files of `examples/`."""

import asyncio
import contextlib
import errno
import json
import re
from pathlib import Path

import pytest

from sandbox.demo import BACKENDS, PORT
from sandbox.stack import kubectl_program
from tests.backends import Backends
from tests.system.whole import Refused
from tests.waiting import eventually

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDERS = ("-f", str(EXAMPLES / "cluster"), "-f", str(EXAMPLES))


@pytest.fixture
async def applied(whole, space):
    """The examples, applied and settled; gone again afterwards."""
    backends = Backends()
    for address in BACKENDS.values():
        try:
            await backends.answer(address, PORT)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # a demonstration beside us answers there
                raise
    try:
        await whole.stack.kubectl("apply", *FOLDERS)
        yield whole.stack
    finally:
        await whole.stack.kubectl("delete", "--ignore-not-found", *FOLDERS)
        await backends.close()

        async def released():
            rows = await whole.rows(
                "select name from allocator.lease where namespace = 'default' and upper_inf(during)"
            )
            left = await space.api.list("Service", "default")
            assert [row["name"] for row in rows] == []
            assert [one["metadata"]["name"] for one in left] == ["kubernetes"]
            return True

        await eventually(released, 30)


async def jsonpath(stack, *argv):
    return json.loads(await stack.kubectl("get", "-n", "default", *argv, "-o", "json"))


async def test_the_examples_as_a_person_applies_them(applied, monkeypatch):
    """apply, get with our columns, wait, describe with conditions and events, edit by hand (and it
    is repaired), explain, delete."""
    stack = applied
    kubectl = stack.kubectl
    for name, status in (("web", "True"), ("placeholder", "False"), ("waiting", "False")):
        await kubectl("wait", f"--for=condition=Ready={status}", f"lb/{name}", "--timeout=30s")

    table = await kubectl("get", "lb")
    header, *rows = table.splitlines()
    assert re.split(r"\s{2,}|\s", header.strip()) == [
        *("NAME", "DESCRIPTION", "WORKLOADTYPE", "IPAM", "ADDRESS", "READY", "AGE")
    ]
    assert len(rows) == 5
    web = next(row for row in rows if row.startswith("web"))
    assert "192.0.2." in web
    assert "True" in web
    wide = await kubectl("get", "lb", "-o", "wide")
    assert "PoolExhausted" in wide
    pools = await kubectl("get", "ippools")
    tiny = next(row for row in pools.splitlines() if row.startswith("tiny"))
    assert re.search(r"198\.51\.100\.7/32", tiny)
    services = await kubectl("get", "svc")
    assert re.search(r"web\s+LoadBalancer\s+\S+\s+192\.0\.2\.\d+", services)

    async def told():
        text = await kubectl("describe", "lb", "waiting")
        assert "PoolExhausted" in text
        assert re.search(r"Warning\s+PoolExhausted", text), text
        return True

    await eventually(told, 20, interval=0.3)
    assert "Allocated Address" in await kubectl("describe", "lb", "web")

    before = await jsonpath(stack, "svc/web")
    await kubectl(
        "patch", "svc", "web", "--type=merge", "-p", '{"spec":{"loadBalancerIP":"192.0.2.99"}}'
    )
    await kubectl("label", "svc", "web", "loadbalancer.harvesterhci.io/servicelb-")
    await kubectl("delete", "endpointslice", "web")

    async def repaired():
        found = await jsonpath(stack, "svc/web")
        assert found["spec"] == before["spec"]
        assert found["metadata"]["labels"] == before["metadata"]["labels"]
        slices = await jsonpath(stack, "endpointslices", "-l", "kubernetes.io/service-name=web")
        assert [len(one["endpoints"]) for one in slices["items"]] == [2]
        return True

    await eventually(repaired, 30, interval=0.2)

    await kubectl("annotate", "lb", "web", "lbledger.io/note=hello")
    monkeypatch.setenv("KUBE_EDITOR", "true")
    await kubectl("edit", "lb", "web")  # looked at, and left as it is
    await kubectl("delete", "lb", "web")
    assert "web" not in await kubectl("get", "svc", "-o", "name")


async def test_a_watch_shows_addresses_appear(applied, space):
    """`kubectl get lb -w` prints a line for what happens to a load balancer."""
    stack = applied
    process = await asyncio.create_subprocess_exec(
        *(kubectl_program(), "--kubeconfig", stack.kubeconfig),
        *("get", "lb", "-n", space.name, "-w"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await space.pool()
        await space.balancer("watched")
        seen = []
        async with asyncio.timeout(30):
            while not (seen and space.pooled(10) in seen[-1]):
                line = (await process.stdout.readline()).decode()
                assert line, seen
                seen.append(line)
    finally:
        process.terminate()
        await process.wait()
    assert seen[0].startswith("NAME")
    assert any(line.startswith("watched") for line in seen)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ("patch", "lb", "web", "--type=merge", "-p", '{"spec":{"ipam":"dhcp"}}'),
            "can't be changed",
        ),
        (("patch", "lb", "web", "--type=merge", "-p", '{"spec":{"listeners":[]}}'), "at least one"),
        (("create", "-f", "/dev/null"), "no objects passed"),
    ],
    ids=["immutable", "no-listener", "empty"],
)
async def test_what_is_refused_is_explained_to_the_person(whole, space, argv, words):
    """The server's rules come through kubectl in words."""
    await space.pool()
    await space.balancer("web")
    await space.becomes("web", "False")

    with pytest.raises(Exception, match=words):
        await whole.stack.kubectl("-n", space.name, *argv)


async def test_two_appliers_of_one_object_do_not_fight(whole, space, tmp_path):
    """`kubectl apply --server-side` of the same LB again and again changes nothing; a field of the
    Service that is ours is told as a conflict and not taken."""
    await space.pool()
    await space.vm("web")
    await space.balancer("web")
    await space.becomes("web", "True")
    await space.quiet()
    service = await space.api.get("Service", "web", space.name)
    file = tmp_path / "service.json"
    body = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web", "namespace": space.name},
        "spec": {"loadBalancerIP": "198.18.255.7"},
    }
    file.write_text(json.dumps(body))

    out = await whole.stack.kubectl("apply", "--server-side", "-f", str(file), check=False)
    with contextlib.suppress(Refused):
        await space.quiet()

    now = await space.api.get("Service", "web", space.name)
    assert now["spec"]["loadBalancerIP"] == service["spec"]["loadBalancerIP"], out
