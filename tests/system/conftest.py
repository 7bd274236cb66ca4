"""Fixtures of the tests of the whole running system: one machine per run, one space per test."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.system import nats_cli
from tests.system.kube_vip import KubeVip
from tests.system.whole import Space, Whole, space_of


def pytest_collection_finish(session: pytest.Session) -> None:
    if any("test_nats_cli" in item.nodeid for item in session.items):
        nats_cli.begin()


def pytest_sessionfinish() -> None:
    nats_cli.end()


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory, infra_mode: str) -> Iterator[Whole]:
    """Everything, running. Tests ask for `whole` or `space`, which put it right first."""
    made = Whole(tmp_path_factory.mktemp("whole"), infra_mode)
    try:
        asyncio.run(made.start())
        yield made
    finally:
        asyncio.run(made.stop())


@pytest.fixture
async def whole(machine: Whole) -> Whole:
    await machine.heal()
    return machine


@pytest.fixture
async def space(whole: Whole) -> AsyncIterator[Space]:
    async with space_of(whole) as made:
        yield made


@pytest.fixture
async def vip_space(machine: Whole) -> AsyncIterator[Space]:
    """A space whose addresses kube-vip announces: `vip_space.vip` is the stand-in for it."""
    await machine.heal("kube-vip")
    async with space_of(machine) as made:
        network = made.pooled(0).removesuffix(".0")
        async with KubeVip(made.api, made.name, network) as vip:
            made.vip = vip
            yield made
