"""Replaying recorded exchanges against a server, and comparing what is behaviour.

A recording names things that differ from run to run: uids, resource versions, continue tokens.
`Names` learns which of ours stands for which of theirs, insists that the same one always does,
and that different ones never share one: so "the resource version did not change" is compared
although its value is not. Times, addresses and ports only have to be of the right form.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

DATA = Path(__file__).parent.parent / "data" / "kube-contract"
_LEARNED = ("uid", "resourceVersion", "continue")
_TIMES = ("creationTimestamp", "deletionTimestamp", "time")
_FORM_ONLY = ("clusterIP", "nodePort", "serverAddress", "storageVersionHash")
_AGE = re.compile(r"(\d+[smhd]){1,2}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
#: Numbers and generated names inside messages.
_IN_TEXT = (
    (re.compile(r"current: \d+"), "current: N"),
    (re.compile(r"(too old resource version: \d+) \(\d+\)"), r"\1 (N)"),
    (re.compile(r"web\.[a-z0-9]{5}\b"), "web.XXXXX"),
)


@dataclass(frozen=True)
class Exchange:
    """One line of a recording."""

    file: str
    index: int
    name: str
    request: dict[str, Any]
    response: dict[str, Any]

    @property
    def id(self) -> str:
        words = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return f"{self.file}-{self.index:02}-{words}"[:90]


def load(file: str) -> list[Exchange]:
    """The exchanges of one recording; `kubectl`'s are named after the command they serve."""
    exchanges = []
    command = ""
    for index, line in enumerate((DATA / f"{file}.jsonl").read_text().splitlines()):
        entry = json.loads(line)
        command = entry.get("command", command)
        if "request" in entry:
            request = entry["request"]
            name = entry.get("name") or f"{command} {request['method']} {_last(request['path'])}"
            exchanges.append(Exchange(file, index, name, request, entry["response"]))
    return exchanges


def _last(path: str) -> str:
    return path.partition("?")[0].rstrip("/").rpartition("/")[2]


class Names:
    """Which of our values stands for which recorded one."""

    def __init__(self) -> None:
        self._ours: dict[tuple[str, str], str] = {}
        self._theirs: dict[tuple[str, str], str] = {}

    def learn(self, kind: str, theirs: str, ours: str, where: str) -> None:
        if theirs == "" or ours == "":
            assert theirs == ours, f"{where}: recorded {theirs!r}, got {ours!r}"
            return
        known = self._ours.setdefault((kind, theirs), ours)
        assert known == ours, f"{where}: {kind} {theirs} was {known} before and is {ours} now"
        back = self._theirs.setdefault((kind, ours), theirs)
        assert back == theirs, f"{where}: {kind} {ours} stands for both {back} and {theirs}"

    def ours(self, kind: str, theirs: str) -> str:
        return self._ours.get((kind, theirs), theirs)

    def in_path(self, path: str) -> str:
        def swap(found: re.Match[str]) -> str:
            return found[1] + "=" + quote(self.ours(found[1], found[2]))

        return re.sub(r"\b(resourceVersion|continue)=([^&]+)", swap, path)

    def in_body(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {
                k: self.ours(k, v) if k in _LEARNED and isinstance(v, str) else self.in_body(v)
                for k, v in value.items()
            }
        if isinstance(value, list):
            return [self.in_body(item) for item in value]
        return value

    def in_text(self, text: str) -> str:
        """A recorded text with our uids in it."""
        for (kind, theirs), ours in self._ours.items():
            if kind == "uid":
                text = text.replace(theirs, ours)
        return text

    def same(self, theirs: Any, ours: Any, where: str = "") -> None:
        """Assert that two values are the same but for what may differ."""
        key = where.rpartition(".")[2]
        if isinstance(theirs, dict) and isinstance(ours, dict):
            extra = {k: v for k, v in ours.items() if k not in theirs}
            missing = {k: v for k, v in theirs.items() if k not in ours}
            assert ({}, {}) == (missing, extra), f"{where}: missing {missing}, too much {extra}"
            for name, value in theirs.items():
                self.same(value, ours[name], f"{where}.{name}")
        elif isinstance(theirs, list) and isinstance(ours, list):
            if key == "managedFields":
                theirs, ours = _in_order(theirs), _in_order(ours)
            assert len(theirs) == len(ours), f"{where}: recorded {theirs}, got {ours}"
            for index, (left, right) in enumerate(zip(theirs, ours, strict=True)):
                self.same(left, right, f"{where}[{index}]")
        elif key in _LEARNED and isinstance(theirs, str) and isinstance(ours, str):
            self.learn(key, theirs, ours, where)
        elif key in _TIMES and isinstance(theirs, str):
            assert _TIME.fullmatch(str(ours)), f"{where}: {ours!r} is not a time"
        elif key in _FORM_ONLY or "clusterIPs[" in key:
            assert type(theirs) is type(ours), f"{where}: recorded {theirs!r}, got {ours!r}"
        elif "cells[" in key and isinstance(theirs, str) and _AGE.fullmatch(theirs):
            assert _AGE.fullmatch(str(ours)), f"{where}: {ours!r} is not an age"
        elif isinstance(theirs, str) and isinstance(ours, str):
            wanted, got = self.in_text(theirs), ours
            for pattern, plain in _IN_TEXT:
                wanted, got = pattern.sub(plain, wanted), pattern.sub(plain, got)
            assert wanted == got, f"{where}: recorded {wanted!r}, got {got!r}"
        else:
            assert theirs == ours, f"{where}: recorded {theirs!r}, got {ours!r}"
            assert type(theirs) is type(ours), f"{where}: recorded {theirs!r}, got {ours!r}"


def _in_order(entries: list[Any]) -> list[Any]:
    """managedFields by manager: their own order goes by the second in which a write fell."""
    due = sorted(entries, key=lambda e: (e["operation"], e.get("time", ""), e["manager"]))
    assert [e["manager"] for e in due] == [e["manager"] for e in entries], entries
    return sorted(entries, key=lambda e: (e["operation"], e["manager"], e.get("subresource", "")))


@dataclass(frozen=True)
class Answer:
    """What our server answered."""

    status: int
    content_type: str
    headers: dict[str, str]
    body: Any


class Client:
    """Sends recorded requests, with our names for theirs."""

    def __init__(self, url: str, token: str, *, agent: str) -> None:
        self._url = url
        self._token = token
        self._agent = agent
        self.names = Names()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=30),
        )

    def as_agent(self, agent: str) -> Client:
        """Another client of the same server, known under another name."""
        return Client(self._url, self._token, agent=agent)

    async def close(self) -> None:
        await self._session.close()

    async def send(self, exchange: Exchange, *, body: Any = None) -> Answer:
        """Send the request of an exchange (with another body, if one is given)."""
        request = exchange.request
        sent = request.get("body") if body is None else body
        authorization: str | None = f"Bearer {self._token}"
        if exchange.name == "no token":
            authorization = None
        elif exchange.name == "bad token":
            authorization = "Bearer wrong"
        return await self.call(
            request["method"],
            self.names.in_path(request["path"]),
            sent if isinstance(sent, str) else self.names.in_body(sent),
            accept=request.get("accept", "application/json"),
            content_type=request.get("contentType"),
            authorization=authorization,
        )

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        accept: str = "application/json",
        content_type: str | None = "application/json",
        authorization: str | None = "",
    ) -> Answer:
        headers = {"Accept": accept, "User-Agent": self._agent}
        if authorization is not None:
            headers["Authorization"] = authorization or f"Bearer {self._token}"
        data = None
        if body is not None:
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            headers["Content-Type"] = content_type or "application/json"
        async with self._session.request(
            method, self._url + path, data=data, headers=headers, skip_auto_headers=["Content-Type"]
        ) as response:
            raw = await response.read()
            kind = response.headers.get("Content-Type", "")
            return Answer(response.status, kind, dict(response.headers), _decoded(raw, kind))


def _decoded(raw: bytes, kind: str) -> Any:
    if "json" not in kind:
        return raw.decode(errors="replace")
    lines = raw.splitlines()
    if len(lines) > 1 or raw.startswith(b'{"type":'):
        return [json.loads(line) for line in lines]
    return json.loads(raw) if raw else []


async def all_of(calls: Iterable[Any]) -> list[Any]:
    return list(await asyncio.gather(*calls))
