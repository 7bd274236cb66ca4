"""Every service as a process: waits for what is not there, says so, and ends cleanly on SIGTERM."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from sandbox.child import free_port
from sandbox.kube import KubeServer
from tests.waiting import eventually

SERVICES = ["watcher", "allocator", "prober", "nrp-sync", "applier"]


class Process:
    def __init__(self, name, env):
        self.port = free_port()
        clean = {k: v for k, v in os.environ.items() if not k.startswith("LBLEDGER_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", name],
            env={**clean, "LBLEDGER_HEALTH_PORT": str(self.port), **env},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def get(self, path):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def end(self):
        """SIGTERM; returns (exit code, seconds, standard error)."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            _, err = self.process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, err = self.process.communicate()
        return self.process.returncode, time.monotonic() - began, err.decode()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def named(service):
    """Whether it is not ready and names an address, or a file, that it waits for."""
    status, body = service.get("/readyz")
    if status != 503:
        return False
    waiting = [part["why"] for part in json.loads(body)["parts"].values() if not part["ready"]]
    return any("127.0.0.1:1" in why or "absent" in why for why in waiting)


@pytest.mark.parametrize("name", SERVICES)
async def test_a_service_waits_for_what_is_not_there(name, tmp_path):
    """Without NATS, Postgres, API server and provider it is live, not ready, names what it waits
    for without the password, and ends with 0 within 10 s of SIGTERM."""
    env = {
        "LBLEDGER_NATS_URL": "nats://user:hunter2@127.0.0.1:1",
        "LBLEDGER_DATABASE_URL": "postgresql://user:hunter2@127.0.0.1:1/db",
        "LBLEDGER_KUBE_KUBECONFIG": str(tmp_path / "absent"),
        "LBLEDGER_NRP_ENDPOINT": "http://127.0.0.1:1",
        "LBLEDGER_NRP_TOKEN": "hunter2",
    }
    with Process(name, env) as service:
        await eventually(lambda: named(service), timeout=30)

        live = service.get("/healthz")[0]
        code, seconds, err = service.end()

    assert live == 200
    assert (0, True) == (code, seconds < 10)
    assert "hunter2" not in err


@pytest.mark.parametrize("name", SERVICES)
async def test_a_ready_service_ends_cleanly(name, tmp_path, nats_url, database_url):
    """Started before its API server, it becomes ready when that comes, and ends with 0 in 10 s."""
    kubeconfig = tmp_path / "kubeconfig"
    env = {
        "LBLEDGER_NATS_URL": nats_url,
        "LBLEDGER_DATABASE_URL": database_url,
        "LBLEDGER_KUBE_KUBECONFIG": str(kubeconfig),
        "LBLEDGER_NRP_ENDPOINT": "http://127.0.0.1:1",
        "LBLEDGER_NRP_TOKEN": "t",
    }
    with Process(name, env) as service:
        await eventually(lambda: service.get("/healthz")[0] == 200, timeout=30)
        async with KubeServer(token="t") as kube:
            kube.write_kubeconfig(kubeconfig)
            # nrp-sync is not ready without a provider, and still has to end well.
            if name != "nrp-sync":
                await eventually(lambda: _get_off_loop(service), timeout=40)
            metrics = await _threaded(service.get, "/metrics")
            code, seconds, err = await _threaded(service.end)

    assert b"lbledger_ready" in metrics[1]
    assert (0, True) == (code, seconds < 10), err[-2000:]


async def _threaded(function, *args):
    return await asyncio.to_thread(function, *args)


async def _get_off_loop(service):
    return (await _threaded(service.get, "/readyz"))[0] == 200


def test_a_wrong_setting_ends_a_service_with_2():
    """Exit code 2 and one line that names the setting."""
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "allocator"],
        env={**os.environ, "LBLEDGER_APPLIER_ANNOUNCER": "bgp"},
        capture_output=True,
        timeout=30,
        check=False,
    )

    assert done.returncode == 2
    assert b"applier.announcer is 'bgp'" in done.stderr
    assert 1 == len(done.stderr.strip().splitlines())
