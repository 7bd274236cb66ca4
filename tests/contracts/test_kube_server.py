"""What the recordings do not show of the development Kubernetes API: time, faults and limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sandbox.kube import KubeServer
from sandbox.kube.journal import StateError
from tests.contracts.kube_crds import definitions

_GROUP = "loadbalancer.harvesterhci.io"
_LBS = f"/apis/{_GROUP}/v1beta1/namespaces/default/loadbalancers"
_MAPS = "/api/v1/namespaces/default/configmaps"
_SERVICES = "/api/v1/namespaces/default/services"
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_MERGE = "application/merge-patch+json"
_APPLY = "application/apply-patch+yaml"
_TIMEOUT = aiohttp.ClientTimeout(total=20)


class Http:
    """A client with the server's token."""

    def __init__(self, server: KubeServer) -> None:
        self.server = server
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT)

    async def __call__(
        self, method: str, path: str, body: Any = None, *, kind: str = "application/json"
    ) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.server.token}", "Content-Type": kind}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        async with self._session.request(
            method, self.server.url + path, data=data, headers=headers
        ) as answer:
            raw = await answer.read()
            is_json = "json" in answer.content_type
            return answer.status, json.loads(raw) if is_json else raw.decode()

    async def made(self, path: str, body: Any) -> Any:
        status, obj = await self("POST", path, body)
        assert status == 201, obj
        return obj

    def watch(self, path: str, **query: str) -> Stream:
        return Stream(self._session, self.server, path, query)

    async def close(self) -> None:
        await self._session.close()


class Stream:
    """An open watch."""

    def __init__(
        self, session: aiohttp.ClientSession, server: KubeServer, path: str, query: dict[str, str]
    ) -> None:
        self._open = session.get(
            server.url + path,
            params={"watch": "true"} | query,
            headers={"Authorization": f"Bearer {server.token}"},
        )

    async def __aenter__(self) -> Stream:
        self._response = await self._open
        assert self._response.status == 200, await self._response.text()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._response.close()

    async def next(self, timeout: float = 10) -> Any:
        """The next event; None at the end of the stream."""
        async with asyncio.timeout(timeout):
            line = await self._response.content.readline()
        return json.loads(line) if line else None

    async def names(self, count: int) -> list[tuple[str, str]]:
        events = [await self.next() for _ in range(count)]
        return [(e["type"], e["object"]["metadata"].get("name", "")) for e in events]


@pytest.fixture
async def server() -> AsyncIterator[KubeServer]:
    async with KubeServer(token="secret", bookmark_every=0.2) as running:
        yield running


@pytest.fixture
async def http(server: KubeServer) -> AsyncIterator[Http]:
    client = Http(server)
    yield client
    await client.close()


def _map(name: str, **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"name": name} | metadata, "data": {"k": "v"}}


def _service(name: str = "web", **spec: Any) -> dict[str, Any]:
    ports = {"ports": [{"name": "http", "port": 80}]}
    return {"metadata": {"name": name}, "spec": ports | spec}


def _fields(answer: tuple[int, Any]) -> list[tuple[str, str]]:
    """The causes of a 422."""
    status, body = answer
    assert status == 422, body
    return [(cause["field"], cause["message"]) for cause in body["details"]["causes"]]


# -- lists and pages ---------------------------------------------------------------------------


async def test_pages_show_one_moment(http: Http) -> None:
    """A paged list is the list of its first page's moment, whatever is written in between."""
    for name in "abcd":
        await http.made(_MAPS, _map(name))
    _, first = await http("GET", f"{_MAPS}?limit=2")
    assert 2 == first["metadata"]["remainingItemCount"]
    await http("DELETE", f"{_MAPS}/c")
    await http.made(_MAPS, _map("bb"))
    token = first["metadata"]["continue"]
    _, second = await http("GET", f"{_MAPS}?limit=2&continue={token}")
    found = [item["metadata"]["name"] for page in (first, second) for item in page["items"]]
    assert ["a", "b", "c", "d"] == found
    assert first["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"]
    assert "continue" not in second["metadata"]


async def test_a_page_after_compaction_is_gone_but_can_go_on(
    http: Http, server: KubeServer
) -> None:
    """A token older than the history is a 410 that carries a token for an inconsistent rest."""
    for name in "abc":
        await http.made(_MAPS, _map(name))
    _, first = await http("GET", f"{_MAPS}?limit=1")
    await http("DELETE", f"{_MAPS}/b")
    server.compact()
    await http.made(_MAPS, _map("d"))
    token = first["metadata"]["continue"]
    status, gone = await http("GET", f"{_MAPS}?limit=1&continue={token}")
    assert (410, "Expired") == (status, gone["reason"])
    token = gone["metadata"]["continue"]
    _, rest = await http("GET", f"{_MAPS}?continue={token}")
    assert ["c", "d"] == [item["metadata"]["name"] for item in rest["items"]]


async def test_exact_versions(http: Http, server: KubeServer) -> None:
    """A past version can be read exactly until history is gone."""
    made = await http.made(_MAPS, _map("a"))
    version = made["metadata"]["resourceVersion"]
    await http.made(_MAPS, _map("b"))
    exact = f"{_MAPS}?resourceVersion={version}&resourceVersionMatch=Exact"
    _, past = await http("GET", exact)
    assert ["a"] == [item["metadata"]["name"] for item in past["items"]]
    assert version == past["metadata"]["resourceVersion"]
    server.compact()
    status, _ = await http("GET", exact)
    assert 410 == status
    status, refused = await http("GET", f"{_MAPS}?resourceVersionMatch=Exact")
    assert (422, "ListOptions") == (status, refused["details"]["kind"])


async def test_items_of_built_in_lists_do_not_repeat_their_kind(http: Http) -> None:
    """Items of a typed list carry no apiVersion and kind, as from a real server."""
    await http.made(_MAPS, _map("a"))
    _, listed = await http("GET", _MAPS)
    assert {"metadata", "data"} == set(listed["items"][0])


# -- watches -----------------------------------------------------------------------------------


async def test_bookmarks_follow_writes_elsewhere(http: Http) -> None:
    """A quiet watch is told how far it has looked, once there was something to tell."""
    _, listed = await http("GET", _MAPS)
    start = listed["metadata"]["resourceVersion"]
    query = {"resourceVersion": start, "allowWatchBookmarks": "true"}
    async with http.watch(_MAPS, **query) as stream:
        made = await http.made(_SERVICES, _service())
        event = await stream.next()
        assert "BOOKMARK" == event["type"]
        assert made["metadata"]["resourceVersion"] == event["object"]["metadata"]["resourceVersion"]


async def test_a_watch_ends_at_its_time_out(http: Http) -> None:
    """The server ends a stream cleanly when its seconds are over."""
    async with http.watch(_MAPS, resourceVersion="0", timeoutSeconds="1") as stream:
        assert await stream.next() is None


async def test_a_selection_turns_changes_into_coming_and_going(http: Http) -> None:
    """An object that enters a selection is ADDED, one that leaves it DELETED."""
    await http.made(_MAPS, _map("a", labels={"in": "no"}))
    async with http.watch(_MAPS, labelSelector="in=yes") as stream:
        for value in ("yes", "yes", "no", "yes"):
            patch = {"metadata": {"labels": {"in": value}}, "data": {"k": value * 2}}
            await http("PATCH", f"{_MAPS}/a", patch, kind=_MERGE)
        await http("DELETE", f"{_MAPS}/a")
        kinds = [kind for kind, _ in await stream.names(4)]
    assert ["ADDED", "DELETED", "ADDED", "DELETED"] == kinds


async def test_a_watch_of_one_namespace_or_name_sees_only_that(http: Http) -> None:
    """Namespaces and metadata.name restrict a watch."""
    await http.made("/api/v1/namespaces", {"metadata": {"name": "other"}})
    async with http.watch(_MAPS, fieldSelector="metadata.name=b") as one:
        async with http.watch("/api/v1/configmaps") as every:
            await http.made(_MAPS, _map("a"))
            await http.made("/api/v1/namespaces/other/configmaps", _map("b"))
            await http.made(_MAPS, _map("b"))
            assert [("ADDED", "a"), ("ADDED", "b"), ("ADDED", "b")] == await every.names(3)
        assert [("ADDED", "b")] == await one.names(1)


async def test_a_slow_watch_is_told_that_it_fell_behind() -> None:
    """A client that asks for what has fallen out of the history gets the 410, not a gap."""
    async with KubeServer(token="secret", history=10) as server:
        http = Http(server)
        try:
            first = await http.made(_MAPS, _map("first"))
            for number in range(30):
                await http.made(_MAPS, _map(f"m{number}"))
            version = first["metadata"]["resourceVersion"]
            async with http.watch(_MAPS, resourceVersion=version) as stream:
                event = await stream.next()
                assert ("ERROR", 410) == (event["type"], event["object"]["code"])
                assert await stream.next() is None
        finally:
            await http.close()


async def test_a_running_watch_outlives_a_compaction(http: Http, server: KubeServer) -> None:
    """Compaction is felt by who starts in the past, not by who has kept up."""
    _, listed = await http("GET", _MAPS)
    start = listed["metadata"]["resourceVersion"]
    async with http.watch(_MAPS, resourceVersion=start) as running:
        await http.made(_SERVICES, _service())
        server.compact()
        await http.made(_MAPS, _map("a"))
        assert [("ADDED", "a")] == await running.names(1)
    async with http.watch(_MAPS, resourceVersion=start) as late:
        assert "ERROR" == (await late.next())["type"]


async def test_initial_events_end_with_a_marked_bookmark(http: Http) -> None:
    """A streaming list sends what is there, then says that this was it."""
    await http.made(_MAPS, _map("a"))
    query = {
        "sendInitialEvents": "true",
        "resourceVersionMatch": "NotOlderThan",
        "allowWatchBookmarks": "true",
    }
    async with http.watch(_MAPS, **query) as stream:
        assert [("ADDED", "a"), ("BOOKMARK", "")] == await stream.names(2)
        await http.made(_MAPS, _map("b"))
        assert [("ADDED", "b")] == await stream.names(1)


async def test_every_watch_sees_every_write_in_order(http: Http) -> None:
    """Fan-out loses nothing and keeps the order of resource versions."""
    _, listed = await http("GET", _MAPS)
    start = listed["metadata"]["resourceVersion"]

    async def follow() -> list[int]:
        async with http.watch(_MAPS, resourceVersion=start) as stream:
            events = [await stream.next() for _ in range(200)]
        return [int(event["object"]["metadata"]["resourceVersion"]) for event in events]

    async def write(worker: int) -> None:
        for number in range(50):
            await http.made(_MAPS, _map(f"w{worker}-{number}"))

    seen = await asyncio.gather(*(follow() for _ in range(3)), *(write(n) for n in range(4)))
    versions = seen[:3]
    assert versions[0] == versions[1] == versions[2] == sorted(versions[0])
    assert 200 == len(set(versions[0]))


# -- state -------------------------------------------------------------------------------------


async def test_a_folder_has_one_server(tmp_path: Path) -> None:
    """A second server on the same folder is refused, and the first is not disturbed."""
    async with KubeServer(state=tmp_path) as first:
        with pytest.raises(StateError, match="in use by another server"):
            await KubeServer(state=tmp_path).start()
        http = Http(first)
        try:
            await http.made(_MAPS, _map("a"))
        finally:
            await http.close()


async def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    """A damaged line is named with its file and number."""
    (tmp_path / "objects.jsonl").write_text('{"version":200}\n{"collection":\n')
    with pytest.raises(StateError, match=r"objects\.jsonl, line 2 cannot be read"):
        await KubeServer(state=tmp_path).start()


# -- faults ------------------------------------------------------------------------------------


async def test_ordered_refusals(http: Http, server: KubeServer) -> None:
    """Only the next matching requests fail, with the status and Retry-After that were ordered."""
    server.faults.fail(verb="create", path="/configmaps", status=429, retry_after=3, times=2)
    for _ in range(2):
        status, refused = await http("POST", _MAPS, _map("a"))
        assert (429, 3) == (status, refused["details"]["retryAfterSeconds"])
    await http.made(_MAPS, _map("a"))
    status, _ = await http("GET", f"{_MAPS}/a")
    assert 200 == status
    assert 3 == server.faults.counts["create", "configmaps"]
    assert 3 == server.faults.writes()


@pytest.mark.parametrize(("drop", "stored"), [("before", 404), ("after", 200)])
async def test_a_lost_connection(http: Http, server: KubeServer, drop: str, stored: int) -> None:
    """A connection can be cut before a write takes effect, or once it has."""
    server.faults.fail(verb="create", drop=drop)
    with pytest.raises(aiohttp.ClientError):
        await http("POST", _MAPS, _map("a"))
    status, _ = await http("GET", f"{_MAPS}/a")
    assert stored == status


async def test_late_answers(http: Http, server: KubeServer) -> None:
    """With only a latency ordered, the request is answered as usual, but later."""
    server.faults.fail(path="/configmaps", latency=0.3)
    began = asyncio.get_running_loop().time()
    await http.made(_MAPS, _map("a"))
    assert asyncio.get_running_loop().time() - began >= 0.3


async def test_cut_watches(http: Http, server: KubeServer) -> None:
    """A watch can end cleanly, with a 410, within a line, or fall silent and stay open."""
    async with http.watch(_MAPS) as clean:
        assert 1 == server.cut_watches("clean", "configmaps")
        assert await clean.next() is None
    async with http.watch(_MAPS) as error:
        server.cut_watches("error")
        event = await error.next()
        assert ("ERROR", 410) == (event["type"], event["object"]["code"])
    async with http.watch(_MAPS) as midline:
        server.cut_watches("midline")
        with pytest.raises((aiohttp.ClientError, json.JSONDecodeError)):
            await midline.next()
    async with http.watch(_MAPS) as silent, http.watch(_MAPS) as other:
        assert 2 == server.cut_watches("hang", "configmaps")
        await http.made(_MAPS, _map("a"))
        with pytest.raises(TimeoutError):
            await silent.next(timeout=0.5)
        async with http.watch(_MAPS) as fresh:
            assert [("ADDED", "a")] == await fresh.names(1)
        del other


async def test_token_rotation(http: Http, server: KubeServer) -> None:
    """After a rotation the old token gets a 401; kept, it works on beside the new one."""
    old = server.token
    server.rotate_token("new", keep_old=True)
    assert 200 == (await http("GET", _MAPS))[0]
    server.token = old
    assert 200 == (await http("GET", _MAPS))[0]
    server.rotate_token("newer")
    server_token, server.token = server.token, old
    client = Http(server)
    try:
        server.token = server_token
        headers = {"Authorization": f"Bearer {old}"}
        async with aiohttp.ClientSession(headers=headers) as stale:
            async with stale.get(server.url + _MAPS) as answer:
                assert 401 == answer.status
    finally:
        await client.close()


async def test_the_administrative_door(http: Http, server: KubeServer) -> None:
    """Faults, cuts, compaction, tokens and counts work over HTTP too, and refuse nonsense."""
    assert (200, {"pending": 1}) == await http(
        "POST", "/sandbox/faults", {"verb": "list", "status": 503}
    )
    assert 503 == (await http("GET", _MAPS))[0]
    await http.made(_MAPS, _map("a"))
    _, told = await http("GET", "/sandbox/counts")
    assert 1 == told["writes"]
    assert {"verb": "create", "resource": "configmaps", "count": 1} in told["counts"]
    async with http.watch(_MAPS) as stream:
        await stream.next()
        assert {"cut": 1} == (await http("POST", "/sandbox/watches/cut", {"how": "clean"}))[1]
        assert await stream.next() is None
    _, compacted = await http("POST", "/sandbox/compact")
    assert server.store.version == compacted["resourceVersion"]
    for path, body in (("faults", {"status": 200}), ("watches/cut", {"how": "softly"})):
        status, refused = await http("POST", f"/sandbox/{path}", body)
        assert 400 == status
        assert "must be" in refused["message"]
    assert {"token": "other"} == (await http("POST", "/sandbox/token", {"token": "other"}))[1]


# -- objects -----------------------------------------------------------------------------------


async def test_objects_have_a_limit(http: Http) -> None:
    """An object beyond the size that etcd takes is refused, and so is an endless body."""
    big = _map("big") | {"data": {"k": "x" * (1600 * 1024)}}
    status, refused = await http("POST", _MAPS, big)
    assert (500, "etcdserver: request is too large") == (status, refused["message"])
    status, _ = await http("POST", _MAPS, b'{"data":"' + b"x" * (4 * 1024 * 1024) + b'"}')
    assert 413 == status
    await http.made(_MAPS, _map("small"))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", f"{_MAPS}/a", 405),
        ("PUT", _MAPS, 405),
        ("PATCH", _MAPS, 405),
        ("DELETE", "/api/v1/namespaces", 405),
        ("POST", "/api/v1/configmaps", 405),
        ("DELETE", "/api/v1/configmaps", 405),
        ("GET", f"{_MAPS}?limit=x", 400),
        ("GET", f"{_MAPS}?labelSelector=a%20in%20b", 400),
        ("GET", f"{_MAPS}?fieldSelector=data.k=v", 400),
        ("POST", _MAPS, 400),
        ("GET", "/api/v1/things", 404),
        ("GET", f"{_MAPS}/a/status", 404),
        ("GET", "/api/v2/pods", 404),
    ],
)
async def test_requests_that_make_no_sense(http: Http, method: str, path: str, status: int) -> None:
    """A request that cannot be meant is refused with its code, and the server goes on."""
    body = b"[1, 2]" if method in ("POST", "PUT", "PATCH") else None
    assert status == (await http(method, path, body))[0]
    await http.made(_MAPS, _map("fine"))


async def test_unconditional_updates(http: Http) -> None:
    """A built-in kind takes a PUT without resource version, a custom one does not."""
    await http.made(_MAPS, _map("a"))
    assert 200 == (await http("PUT", f"{_MAPS}/a", _map("a")))[0]
    for crd in definitions(_GROUP, status=True):
        await http.made(_CRDS, crd)
    await http.made(_LBS, {"metadata": {"name": "a"}, "spec": {}})
    found = _fields(await http("PUT", f"{_LBS}/a", {"metadata": {"name": "a"}, "spec": {}}))
    assert [
        ("metadata.resourceVersion", "Invalid value: 0x0: must be specified for an update")
    ] == found


async def test_a_write_meant_for_an_earlier_object(http: Http) -> None:
    """A uid in a write guards against an object of the same name that came later."""
    made = await http.made(_MAPS, _map("a"))
    other = {"metadata": {"name": "a", "uid": "00000000-0000-0000-0000-000000000000"}}
    status, refused = await http("PUT", f"{_MAPS}/a", other)
    assert (409, "Conflict") == (status, refused["reason"])
    found = [
        (
            "metadata.uid",
            'Invalid value: "00000000-0000-0000-0000-000000000000": field is immutable',
        )
    ]
    assert found == _fields(await http("PATCH", f"{_MAPS}/a", other, kind=_MERGE))
    path = f"{_MAPS}/a?fieldManager=t&force=true"
    assert found == _fields(await http("PATCH", path, other, kind=_APPLY))
    other["metadata"]["uid"] = made["metadata"]["uid"]
    assert 200 == (await http("PATCH", path, other, kind=_APPLY))[0]


async def test_versions_of_a_custom_resource(http: Http) -> None:
    """Each served version shows the same object under its own apiVersion."""
    for crd in definitions(_GROUP, status=False):
        await http.made(_CRDS, crd)
    await http.made(_LBS, {"metadata": {"name": "a"}, "spec": {"ipam": "pool"}})
    old = _LBS.replace("v1beta1", "v1alpha1")
    _, shown = await http("GET", f"{old}/a")
    assert f"{_GROUP}/v1alpha1" == shown["apiVersion"]
    _, changed = await http("PATCH", f"{old}/a", {"spec": {"description": "x"}}, kind=_MERGE)
    assert f"{_GROUP}/v1alpha1" == changed["apiVersion"]
    _, stored = await http("GET", f"{_LBS}/a")
    assert (f"{_GROUP}/v1beta1", "x") == (stored["apiVersion"], stored["spec"]["description"])


async def test_a_change_of_the_storage_version(http: Http) -> None:
    """Objects that were stored in one version are still shown in each."""
    for crd in definitions(_GROUP, status=False):
        await http.made(_CRDS, crd)
    await http.made(_LBS, {"metadata": {"name": "a"}, "spec": {"ipam": "pool"}})
    path = f"{_CRDS}/loadbalancers.{_GROUP}"
    _, crd = await http("GET", path)
    for version in crd["spec"]["versions"]:
        version["storage"] = not version["storage"]
    status, changed = await http("PUT", path, crd)
    assert (200, ["v1beta1", "v1alpha1"]) == (status, changed["status"]["storedVersions"])
    for version in ("v1alpha1", "v1beta1"):
        _, listed = await http("GET", _LBS.replace("v1beta1", version))
        assert [f"{_GROUP}/{version}"] == [item["apiVersion"] for item in listed["items"]]


async def test_a_deleted_definition_takes_its_kind_along(http: Http) -> None:
    """Objects of a deleted CRD go first, seen by watches; then the kind is served no more."""
    crds = definitions(_GROUP, status=False)
    for crd in crds:
        await http.made(_CRDS, crd)
    await http.made(_LBS, {"metadata": {"name": "a"}, "spec": {}})
    path = f"{_CRDS}/{crds[0]['metadata']['name']}"
    async with http.watch(_LBS) as objects, http.watch(_CRDS) as definitions_:
        assert [("ADDED", "a")] == await objects.names(1)
        await definitions_.names(2)
        await http("DELETE", path)
        assert [("DELETED", "a")] == await objects.names(1)
        kinds = [kind for kind, _ in await definitions_.names(2)]
        assert ["MODIFIED", "DELETED"] == kinds
    assert 404 == (await http("GET", path))[0]
    assert 404 == (await http("GET", _LBS))[0]


def _ruled(rules: list[dict[str, Any]], **schema: Any) -> dict[str, Any]:
    """A CRD of things with CEL rules on their spec."""
    spec = {"type": "object", "x-kubernetes-validations": rules} | schema
    return {
        "metadata": {"name": "things.example.org"},
        "spec": {
            "group": "example.org",
            "scope": "Namespaced",
            "names": {"kind": "Thing", "plural": "things"},
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}},
                }
            ],
        },
    }


_THINGS = "/apis/example.org/v1/namespaces/default/things"
_MODE = {"properties": {"mode": {"type": "string", "default": "a"}, "ip": {"type": "string"}}}


async def test_rules_of_a_definition(http: Http) -> None:
    """CEL rules, transition rules, defaults, pruning and field paths work as declared."""
    rules = [
        {"rule": "!has(self.ip) || isIP(self.ip)", "message": "ip must be one", "fieldPath": ".ip"},
        {"rule": "self.mode == oldSelf.mode", "messageExpression": "'was ' + oldSelf.mode"},
    ]
    await http.made(_CRDS, _ruled(rules, **_MODE))
    thing = await http.made(_THINGS, {"metadata": {"name": "t"}, "spec": {"other": 1}})
    assert {"mode": "a"} == thing["spec"]
    found = _fields(await http("POST", _THINGS, {"metadata": {"name": "u"}, "spec": {"ip": "x"}}))
    assert [("spec.ip", 'Invalid value: "object": ip must be one')] == found
    patched = await http("PATCH", f"{_THINGS}/t", {"spec": {"mode": "b"}}, kind=_MERGE)
    assert [("spec", 'Invalid value: "object": was a')] == _fields(patched)


async def test_rules_see_a_null_field_as_absent(http: Http) -> None:
    """`has` is false for a nullable field that is null; reserved names are escaped."""
    rules = [
        {"rule": "has(self.list) && size(self.list) > 0", "message": "list is needed"},
        {"rule": "!has(self.__namespace__) || self.__namespace__ != 'x'", "message": "not x"},
    ]
    strings = {"type": "array", "items": {"type": "string"}, "nullable": True}
    properties = {"list": strings, "namespace": {"type": "string"}}
    await http.made(_CRDS, _ruled(rules, properties=properties))
    body = {"metadata": {"name": "t"}, "spec": {"list": None, "namespace": "x"}}
    said = [text.rpartition(": ")[2] for _, text in _fields(await http("POST", _THINGS, body))]
    assert ["list is needed", "not x"] == said
    await http.made(_THINGS, body | {"spec": {"list": ["a"], "namespace": "y"}})


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        (
            {"x-kubernetes-validations": [{"rule": "self.mode =="}]},
            "x-kubernetes-validations[0].rule",
        ),
        ({"properties": {"mode": {}}}, "properties[mode].type"),
        ({"properties": {"list": {"type": "array"}}}, "properties[list].items"),
    ],
)
async def test_bad_definitions_are_refused(http: Http, schema: Any, field: str) -> None:
    """A CRD with a rule that does not compile, or a schema that is not structural, is a 422."""
    found = _fields(await http("POST", _CRDS, _ruled([], **schema)))
    assert [f"spec.versions[0].schema.openAPIV3Schema.properties[spec].{field}"] == [
        name for name, _ in found
    ]


async def test_stricter_schemas_leave_old_objects_alone(http: Http) -> None:
    """What was valid when it was written can still be updated elsewhere."""
    crd = await http.made(_CRDS, _ruled([], **_MODE))
    await http.made(_THINGS, {"metadata": {"name": "t"}, "spec": {"mode": "odd"}})
    version = crd["spec"]["versions"][0]
    version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["mode"]["enum"] = ["a"]
    status, changed = await http("PUT", f"{_CRDS}/things.example.org", crd)
    assert 200 == status, changed
    assert 200 == (await http("PATCH", f"{_THINGS}/t", {"spec": {"ip": "x"}}, kind=_MERGE))[0]
    found = _fields(await http("PATCH", f"{_THINGS}/t", {"spec": {"mode": "odder"}}, kind=_MERGE))
    assert ["spec.mode"] == [name for name, _ in found]


async def test_apply_takes_yaml(http: Http) -> None:
    """An applied configuration may be YAML, in which a time stays text."""
    body = b"metadata:\n  annotations:\n    at: 2026-11-30T12:00:00Z\ndata: {k: v}\n"
    path = f"{_MAPS}/a?fieldManager=tester"
    status, made = await http("PATCH", path, body, kind=_APPLY)
    assert 201 == status, made
    assert {"at": "2026-11-30T12:00:00Z"} == made["metadata"]["annotations"]
    status, same = await http("PATCH", path, body, kind=_APPLY)
    assert (200, made) == (status, same)


# -- services and endpoint slices --------------------------------------------------------------


async def test_allocations_are_given_back(http: Http) -> None:
    """Cluster IPs and node ports are unique while held, and free once their Service is gone."""
    made = await http.made(_SERVICES, _service("a", type="NodePort"))
    port = made["spec"]["ports"][0]["nodePort"]
    ip = made["spec"]["clusterIP"]
    wanted = [{"port": 80, "nodePort": port}]
    asked = _service("b", type="NodePort", ports=wanted, clusterIP=ip)
    found = _fields(await http("POST", _SERVICES, asked))
    assert {"spec.clusterIPs", "spec.ports[0].nodePort"} == {name for name, _ in found}
    await http("DELETE", f"{_SERVICES}/a")
    again = await http.made(_SERVICES, asked)
    assert (ip, port) == (again["spec"]["clusterIP"], again["spec"]["ports"][0]["nodePort"])


async def test_a_dry_run_allocates_nothing(http: Http) -> None:
    """What a dry run showed can still be had."""
    asked = _service("a", type="NodePort", ports=[{"port": 80, "nodePort": 30123}])
    await http("POST", f"{_SERVICES}?dryRun=All", asked)
    await http.made(_SERVICES, asked)


@pytest.mark.parametrize(
    ("spec", "families", "count"),
    [
        ({}, ["IPv4"], 1),
        ({"ipFamilies": ["IPv6"]}, ["IPv6"], 1),
        ({"ipFamilyPolicy": "PreferDualStack"}, ["IPv4", "IPv6"], 2),
        ({"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv6"]}, ["IPv6", "IPv4"], 2),
        ({"clusterIP": "None"}, ["IPv4"], 1),
    ],
)
async def test_families(http: Http, spec: Any, families: list[str], count: int) -> None:
    """Families and their addresses follow the policy."""
    made = (await http.made(_SERVICES, _service(**spec)))["spec"]
    assert families == made["ipFamilies"]
    assert count == len(made["clusterIPs"])


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"ports": []}, "spec.ports"),
        ({"ports": [{"port": 80}, {"port": 81}]}, "spec.ports[0].name"),
        ({"type": "Balancer"}, "spec.type"),
        ({"loadBalancerClass": "a/b"}, "spec.loadBalancerClass"),
        ({"externalTrafficPolicy": "Local"}, "spec.externalTrafficPolicy"),
        ({"clusterIP": "192.0.2.1"}, "spec.clusterIPs"),
        ({"type": "ExternalName"}, "spec.externalName"),
        ({"ports": [{"port": 80, "protocol": "ICMP"}]}, "spec.ports[0].protocol"),
    ],
)
async def test_wrong_services(http: Http, spec: Any, field: str) -> None:
    """Each wrong field of a Service is named."""
    assert field in [name for name, _ in _fields(await http("POST", _SERVICES, _service(**spec)))]


async def test_status_needs_a_load_balancer(http: Http) -> None:
    """Ingress addresses belong to Services of type LoadBalancer only."""
    await http.made(_SERVICES, _service())
    status = {"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}}
    found = _fields(await http("PATCH", f"{_SERVICES}/web/status", status, kind=_MERGE))
    assert ["status.loadBalancer.ingress"] == [name for name, _ in found]
    await http.made(_SERVICES, _service("lb", type="LoadBalancer"))
    status["status"]["loadBalancer"]["ingress"][0]["ip"] = "192.0.2"
    found = _fields(await http("PATCH", f"{_SERVICES}/lb/status", status, kind=_MERGE))
    assert ["status.loadBalancer.ingress[0].ip"] == [name for name, _ in found]


@pytest.mark.parametrize(
    ("family", "address", "why"),
    [
        ("IPv4", "127.0.0.1", "loopback"),
        ("IPv6", "::1", "loopback"),
        ("IPv4", "169.254.1.1", "link-local"),
        ("IPv4", "0.0.0.0", "unspecified"),
        ("IPv4", "fd00::1", "must be an IPv4 address"),
        ("IPv4", "web", "valid IP address"),
    ],
)
async def test_wrong_endpoint_addresses(http: Http, family: str, address: str, why: str) -> None:
    """Addresses that no Service may send traffic to are refused."""
    body = {
        "metadata": {"name": "s"},
        "addressType": family,
        "endpoints": [{"addresses": [address]}],
        "ports": [],
    }
    path = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
    ((field, text),) = _fields(await http("POST", path, body))
    assert "endpoints[0].addresses[0]" == field
    assert why in text
