"""The event log read with the stock `nats` CLI: subjects, headers and payloads are for people too.

The CLI is taken from PATH, else built with Go. Where there is neither, as on a user's machine, this
one test says why it did not run.
"""

import json
import os
import pty
import select
import subprocess
import time

import pytest

from schema import objects
from tests.feeding import Feeder
from tests.system import nats_cli


@pytest.fixture(scope="session")
def cli():
    found = nats_cli.program()
    if found is None:
        pytest.skip("no nats on PATH and no Go to build it with")
    return found


def run(cli, url, *argv):
    done = subprocess.run(
        [cli, "--server", url, *argv], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout + done.stderr


def on_terminal(cli, url, *argv, until):
    """Run on a pseudo-terminal (the pager wants one); what was shown up to some text."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [cli, "--server", url, *argv], stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True
    )
    os.close(theirs)
    shown, deadline = b"", time.monotonic() + 30
    try:
        while until.encode() not in shown and time.monotonic() < deadline:
            if select.select([ours], [], [], 1.0)[0]:
                shown += os.read(ours, 65536)
    except OSError:  # it ended, and the terminal with it
        pass
    finally:
        process.kill()
        process.wait(10)
        os.close(ours)
    return shown.decode(errors="replace")


@pytest.mark.timeout(1000)
async def test_the_log_can_be_read_with_the_nats_cli(cli, nats_url):
    """`stream view`, `stream get --last-for`, `stream subjects` and `sub` show facts as JSON with
    their headers, under subjects that name the object."""
    feeder = await Feeder.start(nats_url)
    try:
        lb = objects.LoadBalancer(
            metadata=objects.ObjectMeta(
                name="my.web", namespace="default", uid="u1", resource_version="7"
            ),
            spec=objects.LoadBalancerSpec(ip_pool="p1"),
        )
        seq = await feeder.seen(lb)
    finally:
        await feeder.close()

    subject = "kube.loadbalancers.default.my_web"
    view = on_terminal(cli, nats_url, "stream", "view", "KUBE", "10", until='"ipPool":"p1"')
    last = json.loads(run(cli, nats_url, "stream", "get", "KUBE", "--last-for", subject, "--json"))
    subjects = run(cli, nats_url, "stream", "subjects", "KUBE", "--json")

    assert subject in view
    assert "Lb-Type: LoadBalancerSeen.v1" in view
    assert '"ipPool":"p1"' in view
    assert (subject, seq) == (last["subject"], last["seq"])
    assert subject in subjects
