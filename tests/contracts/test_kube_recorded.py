"""The sandbox's Kubernetes API answers as a real kube-apiserver 1.36 did.

Every recorded exchange is replayed, in order, against a sandbox that was brought into the state
which its recording presumes; each is one test. Left out of the comparison, with the reason:

* prose of `columnDefinitions[].description`: documentation, not behaviour;
* groups and resources that the sandbox does not serve (discovery): what it does serve must be
  listed exactly as recorded;
* OpenAPI bodies: the recording holds only their length; status and content type are compared;
* the body of `/version` names the build of the recorded server; its shape and the two numbers
  are compared;
* a protobuf body: the sandbox answers the next type that the client accepts, JSON.
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from sandbox.kube import KubeServer
from tests.contracts.kube_crds import definitions
from tests.contracts.kube_replay import Answer, Client, Exchange, Names, all_of, load

_HARVESTER = "loadbalancer.harvesterhci.io"
_LBS = f"/apis/{_HARVESTER}/v1beta1/namespaces/default/loadbalancers"
_POOLS = f"/apis/{_HARVESTER}/v1beta1/ippools"
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_PYTHON = "Python/3.11 aiohttp/3.9"
_FILES = ("lifecycle", "watch", "errors", "core", "discovery", "kubectl")
_RECORDED = {file: load(file) for file in _FILES}
_ALL = [exchange for file in _FILES for exchange in _RECORDED[file]]


def _recorded(file: str, name: str) -> Exchange:
    return next(e for e in _RECORDED[file] if e.name == name)


def _mended() -> None:
    """Undo what the recorder did to three exchanges: it kept objects that it edited later on."""
    update = _recorded("lifecycle", "update spec: generation grows")
    update.request["body"]["spec"]["description"] = "front door"
    put = _recorded("lifecycle", "PUT main resource drops status? (is status a subresource?)")
    got = _recorded("lifecycle", "get")
    got.response["body"]["status"] = copy.deepcopy(put.response["body"]["status"])
    made = _recorded("lifecycle", "status subresource: create drops status")
    del made.response["body"]["status"]
    made.response["body"]["spec"]["description"] = "front"


_mended()


class Replay:
    """One server, brought into a state and then asked what a recording asked."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.names: dict[str, Names] = {}
        self.faults: dict[str, BaseException] = {}

    async def run(self) -> None:
        await all_of(
            [
                self._served(self._lifecycle_and_watch),
                self._served(self._errors),
                self._served(self._core),
                self._served(self._discovery),
                self._served(self._kubectl, agent="kubectl/v1.37.1"),
            ]
        )

    async def _served(self, steps: Any, agent: str = _PYTHON) -> None:
        async with KubeServer() as server:
            client = Client(server.url, server.token, agent=agent)
            try:
                for crd in [
                    *definitions(_HARVESTER, status=False),
                    *definitions("lb.example.org", status=True),
                ]:
                    answer = await client.call("POST", _CRDS, crd)
                    assert answer.status == 201, answer
                await steps(client)
            finally:
                await client.close()

    async def _one(self, client: Client, exchange: Exchange, body: Any = None) -> None:
        """Replay one exchange; its names are learnt at once, for those that follow need them."""
        answer = await client.send(exchange, body=body)
        self.answers[exchange.id] = answer
        try:
            _compare(exchange, answer, client.names)
        except (AssertionError, KeyError) as error:
            self.faults[exchange.id] = error

    async def _lifecycle_and_watch(self, client: Client) -> None:
        for exchange in _RECORDED["lifecycle"]:
            await self._one(client, exchange)
        watch = {e.index: e for e in _RECORDED["watch"]}
        await self._one(client, watch[0])
        for number in range(3):
            await _made(client, f"w{number}", {"i": str(number)})
        await self._one(client, watch[1])
        await all_of([self._one(client, watch[2]), _while_watched(client)])
        await _changed(client, "w0", {"metadata": {"labels": {"i": "7"}}})
        for number in range(3):
            other = {"metadata": {"name": f"other-{number}"}}
            await client.call("POST", "/api/v1/namespaces/default/configmaps", other)
        await all_of(self._one(client, watch[index]) for index in range(3, 11))
        for index in (11, 12, 13):
            await self._one(client, watch[index])

    async def _errors(self, client: Client) -> None:
        for exchange in _RECORDED["errors"]:
            await self._one(client, exchange)

    async def _core(self, client: Client) -> None:
        for exchange in _RECORDED["core"]:
            body = _thousand_and_one() if exchange.name == "EndpointSlice 1001 endpoints" else None
            await self._one(client, exchange, body)

    async def _discovery(self, client: Client) -> None:
        for exchange in _RECORDED["discovery"]:
            await self._one(client, exchange)

    async def _kubectl(self, client: Client) -> None:
        python = client.as_agent(_PYTHON)
        try:
            await _what_kubectl_found(python)
        finally:
            await python.close()
        for exchange in _RECORDED["kubectl"]:
            await self._one(client, exchange)


async def _made(client: Client, name: str, labels: dict[str, str]) -> None:
    obj = copy.deepcopy(_recorded("lifecycle", "create").request["body"])
    obj["metadata"] = {"name": name, "labels": labels}
    answer = await client.call("POST", _LBS, obj)
    assert answer.status == 201, answer


async def _changed(client: Client, name: str, patch: dict[str, Any]) -> None:
    kind = "application/merge-patch+json"
    answer = await client.call("PATCH", f"{_LBS}/{name}", patch, content_type=kind)
    assert answer.status == 200, answer


async def _while_watched(client: Client) -> None:
    """What happened while the recording watched."""
    await asyncio.sleep(0.3)
    await _changed(client, "w0", {"spec": {"description": "d1"}})
    await _changed(client, "w1", {"metadata": {"labels": {"i": "9"}}})
    await client.call("DELETE", f"{_LBS}/w2")


async def _what_kubectl_found(client: Client) -> None:
    """The objects that were there before the recorded commands."""
    await _made(client, "w0", {"i": "7"})
    await _changed(client, "w0", {"spec": {"description": "d1"}})
    await _made(client, "w1", {"i": "9"})
    pool = _recorded("core", "IPPool with status via main resource").request["body"]
    await client.call("POST", _POOLS, pool)
    # Three steps: created, changed, and at last the owners that a server-side apply had left.
    shop = copy.deepcopy(_RECORDED["kubectl"][4].response["body"])
    assert shop["metadata"]["name"] == "shop"
    first = copy.deepcopy(shop)
    first["metadata"] = {"name": "shop"}
    first["spec"]["listeners"][0]["port"] = 80
    made = await client.call("POST", _LBS, first)
    owners = shop["metadata"].pop("managedFields")
    for more in ({}, {"managedFields": owners}):
        shop["metadata"] |= {k: made.body["metadata"][k] for k in ("uid", "resourceVersion")}
        made = await client.call(
            "PUT", f"{_LBS}/shop", shop | {"metadata": shop["metadata"] | more}
        )
        assert made.status == 200, made
    event = {
        "metadata": {"name": "openshift-kube-apiserver.18ecd79f899f21ce", "managedFields": [{}]},
        "involvedObject": {
            "kind": "Namespace",
            "name": "openshift-kube-apiserver",
            "namespace": "default",
        },
        "reason": "KubeAPIReadyz",
        "message": "readyz=true",
        "source": {"component": "apiserver", "host": "vm"},
        "type": "Warning",
        "count": 1,
        "firstTimestamp": "2026-11-30T14:03:51Z",
        "lastTimestamp": "2026-11-30T14:03:51Z",
    }
    answer = await client.call("POST", "/api/v1/namespaces/default/events", event)
    assert answer.status == 201, answer


def _thousand_and_one() -> dict[str, Any]:
    addresses = [f"10.52.{n // 250}.{n % 250 + 1}" for n in range(1001)]
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "big"},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address]} for address in addresses],
        "ports": [{"name": "p", "port": 80}],
    }


def _compare(exchange: Exchange, answer: Answer, names: Names) -> None:
    wanted = exchange.response
    assert wanted["status"] == answer.status, f"status {answer.status}: {answer.body}"
    kind = wanted.get("contentType") or wanted.get("headers", {}).get("Content-Type", "")
    if "stream" in wanted:
        _compare_streams(wanted["stream"], answer.body, names)
        return
    body = wanted["body"]
    if kind == "application/vnd.kubernetes.protobuf":
        # A protobuf EventList without items.
        assert answer.content_type == "application/json"
        assert (answer.body["kind"], answer.body["items"]) == ("EventList", [])
        return
    assert not kind or kind == answer.content_type
    if "Retry-After" in wanted.get("headers", {}):
        assert wanted["headers"]["Retry-After"] == answer.headers["Retry-After"]
    if isinstance(body, str) and body.startswith("<"):
        assert answer.body, "an empty document"
        return
    if exchange.file == "discovery":
        body = _served_part(exchange, body, answer.body)
    names.same(_without_prose(body), _without_prose(answer.body))


def _compare_streams(theirs: list[Any], ours: list[Any], names: Names) -> None:
    assert [event["type"] for event in theirs] == [event["type"] for event in ours]
    for index, (left, right) in enumerate(zip(theirs, ours, strict=True)):
        names.same(left["object"], right["object"], f"event {index}")


def _without_prose(body: Any) -> Any:
    if not (isinstance(body, dict) and "columnDefinitions" in body):
        return body
    bare = [{k: v for k, v in c.items() if k != "description"} for c in body["columnDefinitions"]]
    return body | {"columnDefinitions": bare}


def _served_part(exchange: Exchange, theirs: Any, ours: Any) -> Any:
    """The part of a recorded discovery document that is about what the sandbox serves."""
    if exchange.request["path"] == "/version":
        told = ("major", "minor", "emulationMajor", "emulationMinor")
        return {k: theirs[k] if k in told else ours[k] for k in theirs}
    if not isinstance(theirs, dict):
        return theirs
    part = dict(theirs)
    if "groups" in part:
        part["groups"] = _in_our_order(theirs["groups"], ours["groups"], "name")
    if "resources" in part:
        part["resources"] = _in_our_order(theirs["resources"], ours["resources"], "name")
    if "items" in part:
        _check_aggregated(part, ours)
    return part


def _in_our_order(theirs: list[Any], ours: list[Any], key: str) -> list[Any]:
    by_name = {entry[key]: entry for entry in theirs}
    return [by_name[entry[key]] for entry in ours]


def _check_aggregated(part: dict[str, Any], ours: dict[str, Any]) -> None:
    groups = {item["metadata"].get("name", ""): item for item in part["items"]}
    kept = []
    for item in ours["items"]:
        group = copy.deepcopy(groups[item["metadata"].get("name", "")])
        for left, right in zip(group["versions"], item["versions"], strict=True):
            left["resources"] = _in_our_order(left["resources"], right["resources"], "resource")
        kept.append(group)
    part["items"] = kept


@pytest.fixture(scope="module")
def replay() -> Replay:
    done = Replay()
    asyncio.run(done.run())
    return done


@pytest.mark.parametrize("exchange", _ALL, ids=lambda exchange: exchange.id)
def test_recorded_exchange(replay: Replay, exchange: Exchange) -> None:
    """The sandbox answers this request as the real API server did."""
    fault = replay.faults.get(exchange.id)
    assert exchange.id in replay.answers, "was not replayed"
    assert fault is None, f"{exchange.request['method']} {exchange.request['path']}: {fault}"


def test_every_recording_is_replayed() -> None:
    """No line of the recordings is left out."""
    assert [10, 12, 9, 29] == [
        len(_RECORDED[f]) for f in ("core", "errors", "discovery", "lifecycle")
    ]
    assert (14, 27) == (len(_RECORDED["watch"]), len(_RECORDED["kubectl"]))
