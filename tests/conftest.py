"""Servers for tests: one NATS and one Postgres per run, clean for each test, and private ones.

`nats_url`: no stream exists when the test begins. `database_url`: a database of its own with our
tables, copied from a template; `empty_database_url`: one with nothing in it. `nats_server`,
`postgres_server`: a server that this test may kill and restart.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import nats
import pytest
from xdist.scheduler import LoadFileScheduling

from services.kit.migrate import upgrade
from tests import infra

_numbers = itertools.count(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--infra",
        choices=infra.MODES,
        default=infra.default_mode(),
        help="where NATS and Postgres come from (default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--infra") == "external" and getattr(config.option, "numprocesses", 0):
        raise pytest.UsageError("tests on servers of your own run one at a time: use WORKERS=0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest first, so that no worker is left alone with it at the end; what waits
    for a build that others leave little of the machine to, last."""
    items.sort(
        key=lambda item: (
            "/test_nats_cli" in item.nodeid,
            "/system/" not in item.nodeid,
            not _whole(item.nodeid),
        )
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "OneMachine":
    return OneMachine(config, log)


class OneMachine(LoadFileScheduling):
    """A worker takes whole files, and one of them all that need the running machine."""

    def _split_scope(self, nodeid: str) -> str:
        return "whole" if _whole(nodeid) else str(super()._split_scope(nodeid))


def _whole(nodeid: str) -> bool:
    return "/test_whole_" in nodeid


@pytest.fixture(scope="session")
def infra_mode(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--infra"))


@pytest.fixture(scope="session")
def shared_nats(infra_mode: str) -> Iterator[infra.Server]:
    """Many tests' NATS. It is not to be stopped."""
    external = infra_mode == "external"
    server = (
        infra.ExternalServer("LBLEDGER_NATS_URL") if external else infra.nats_server(infra_mode)
    )
    asyncio.run(server.start())
    yield server
    asyncio.run(server.stop())


@pytest.fixture(scope="session")
def shared_postgres(infra_mode: str) -> Iterator[infra.Server]:
    """Many tests' Postgres. It is not to be stopped."""
    if infra_mode == "external":
        server: infra.Server = infra.ExternalServer("LBLEDGER_DATABASE_URL")
    else:
        server = infra.postgres_server(infra_mode)
    asyncio.run(server.start())
    yield server
    asyncio.run(server.stop())


@pytest.fixture
async def nats_url(shared_nats: infra.Server, infra_mode: str) -> str:
    """A NATS server without a stream (somebody else's server: without those that tests make)."""
    client = await nats.connect(shared_nats.url)
    try:
        manager = client.jetstream()
        for stream in await manager.streams_info():
            name = str(stream.config.name)
            if infra_mode != "external" or name in ("KUBE", "LB") or name.startswith("TEST"):
                await manager.delete_stream(name)
    finally:
        await client.close()
    return shared_nats.url


@pytest.fixture(scope="session")
def database_template(shared_postgres: infra.Server) -> Iterator[str]:
    """The name of a database with every migration applied, made once per run."""
    name = f"test_template_{os.getpid()}"
    asyncio.run(_execute(shared_postgres.url, f'create database "{name}"'))
    upgrade(_with_database(shared_postgres.url, name))
    yield name
    asyncio.run(_execute(shared_postgres.url, f'drop database "{name}" with (force)'))


@pytest.fixture
async def database_url(shared_postgres: infra.Server, database_template: str) -> AsyncIterator[str]:
    """A new database with all our tables, empty."""
    async for url in _database(shared_postgres.url, database_template):
        yield url


@pytest.fixture
async def empty_database_url(shared_postgres: infra.Server) -> AsyncIterator[str]:
    """A new database with nothing in it."""
    async for url in _database(shared_postgres.url, "template1"):
        yield url


@pytest.fixture
async def nats_server(infra_mode: str) -> AsyncIterator[infra.Server]:
    """A NATS server of this test's own, to be killed and restarted as it likes."""
    server = infra.nats_server(infra_mode)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def postgres_server(infra_mode: str) -> AsyncIterator[infra.Server]:
    """A Postgres server of this test's own, to be killed and restarted as it likes."""
    server = infra.postgres_server(infra_mode)
    await server.start()
    yield server
    await server.stop()


async def _database(server_url: str, template: str) -> AsyncIterator[str]:
    name = f"test_{os.getpid()}_{next(_numbers)}"
    admin = await asyncpg.connect(server_url)
    try:
        await admin.execute(f'create database "{name}" template "{template}"')
        yield _with_database(server_url, name)
        await admin.execute(f'drop database "{name}" with (force)')
    finally:
        await admin.close()


async def _execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def _with_database(url: str, name: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))
