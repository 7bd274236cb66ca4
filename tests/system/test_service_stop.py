"""SIGTERM while something does not answer: every service ends within 10 s, and says nothing secret.

A port that takes connections and never says a word is what a frozen server looks like: no error
comes, only silence.
"""

import asyncio
import contextlib
import os
import signal

import pytest

from sandbox.servers import NatsServer, PostgresServer
from services.kit.migrate import upgrade
from tests.system.test_service_life import Process, _threaded
from tests.waiting import eventually

# The others wait for the API server first.
CONSUMERS = ["allocator", "prober", "nrp-sync"]


@contextlib.asynccontextmanager
async def silent_port():
    """Takes connections and never answers."""

    async def mute(reader, writer):
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def environment(nats_url, database_url, tmp_path):
    return {
        "LBLEDGER_NATS_URL": nats_url,
        "LBLEDGER_DATABASE_URL": database_url,
        "LBLEDGER_KUBE_KUBECONFIG": str(tmp_path / "absent"),
        "LBLEDGER_NRP_ENDPOINT": "http://127.0.0.1:1",
        "LBLEDGER_NRP_TOKEN": "hunter2",
    }


def waits_for(service, part):
    """Whether it is live, and not ready because of this part."""
    status, body = service.get("/readyz")
    return status == 503 and f'"{part}":{{"ready":false'.encode() in body


@pytest.mark.parametrize("name", CONSUMERS)
@pytest.mark.parametrize("silent", ["bus", "database"])
async def test_a_start_against_a_silent_server_can_be_stopped(name, silent, tmp_path, nats_url):
    """The server accepts the connection and never answers: live, not ready, gone on SIGTERM."""
    async with silent_port() as port:
        bus = f"nats://user:hunter2@127.0.0.1:{port}" if silent == "bus" else nats_url
        env = environment(bus, f"postgresql://user:hunter2@127.0.0.1:{port}/db", tmp_path)
        with Process(name, env) as service:
            await eventually(lambda: _threaded(waits_for, service, silent), timeout=30)
            code, seconds, err = await _threaded(service.end)

    assert (0, True) == (code, seconds < 10), err[-2000:]
    assert "hunter2" not in err


@pytest.mark.parametrize("frozen", ["bus", "database"])
async def test_a_working_service_whose_server_freezes_can_be_stopped(
    frozen, tmp_path, nats_server, postgres_server
):
    """In the middle of work the server is stopped, not killed: no error comes, and still the
    service ends within 10 s of SIGTERM, with nothing half done."""
    env = environment(nats_server.url, postgres_server.url, tmp_path)
    await _threaded(upgrade, postgres_server.url)
    server = nats_server if frozen == "bus" else postgres_server
    assert isinstance(server, NatsServer | PostgresServer)
    with Process("allocator", env) as service:
        await eventually(lambda: _threaded(lambda: service.get("/readyz")[0] == 200), timeout=40)
        pids = family(server.pid)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            code, seconds, err = await _threaded(service.end)
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    assert (0, True) == (code, seconds < 10), err[-2000:]


def family(pid):
    """A process and its children, from /proc."""
    found = [pid]
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as stat:
                if int(stat.read().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry))
    return found
