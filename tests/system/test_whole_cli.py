"""Every `lbledger` command against the running system, and against nothing at all.

People read 80 columns, machines read `--json`; exit codes are 0, 1 (a problem) and 2 (wrong use).
"""

import asyncio
import json
import os
import signal
import sys

from sandbox.child import free_port
from tests.system.commands import COLUMNS, from_nothing, lbledger, on_terminal
from tests.system.whole import gather

NO_BACKEND = "no running backend servers"


async def many(run, env, commands, at_once=3):
    """Run several commands, a few at once; by command line."""
    room = asyncio.Semaphore(at_once)

    async def one(line):
        async with room:
            return await run(env, *line.split())

    return dict(zip(commands, await gather(*(one(line) for line in commands)), strict=True))


async def populate(space):
    """A ready LB, an unhealthy one, one without an address, and a Service of each class."""
    pool = await space.pool(10, 12, name="pool")
    await space.vm("web", answers=True)
    await space.vm("sick")
    await space.balancer("web", healthCheck=space.check())
    await space.becomes("web", "True")
    await space.balancer("sick", healthCheck=space.check())
    await space.service("shop")
    await space.has_ingress("shop")
    await space.becomes("sick", "False", "healthy:0")
    await space.balancer("late", ipPool=pool)
    await space.becomes("late", "False", "no IP addresses available")
    await space.service("checkout", "lbledger.io/nrp")
    await space.pods("checkout", 1, 2)
    await space.provider_has("checkout", 1, 2)
    await space.has_ingress("checkout")
    await space.quiet()
    return pool


async def simulated(whole, space, pool):
    """`pool simulate` with one address more."""
    lines = await lbledger(whole.environment(), "pool", "show", pool, "--json")
    total = lines.json["total"]
    edited = {
        "apiVersion": "loadbalancer.harvesterhci.io/v1beta1",
        "kind": "IPPool",
        "metadata": {"name": pool},
        "spec": {
            "ranges": [
                {
                    "subnet": f"{space.pooled(0)}/24",
                    "rangeStart": space.pooled(10),
                    "rangeEnd": space.pooled(10 + total),
                }
            ]
        },
    }
    file = whole.stack.state / f"{pool}.yaml"
    file.write_text(json.dumps(edited))
    return await from_nothing(whole.environment(), "pool", "simulate", "-f", str(file))


async def test_every_looking_command_for_people_and_for_machines(whole, space):
    """Piped and on a terminal no line is wider than 80 columns, and nothing is coloured when piped;
    what they say is what is; --json is JSON that says the same."""
    pool = await populate(space)
    env, ns = whole.environment(), space.name
    for_people = {
        f"lb list -n {ns}": (
            f"{ns}/web",
            space.pooled(10),
            "1/1",
            "0/1",
            "NotHealthy",
            "Exhausted",
        ),
        f"lb show {ns}/web": ("Ready", "AddressAllocated", "vm1", "healthy"),
        f"lb show {ns}/sick": ("vm2", "unhealthy", "refused"),
        f"lb show services/{ns}/shop": (space.pooled(12), pool),
        f"lb explain {ns}/web": ("LeaseGranted", "BackendsResolved", "Applied", "KUBE:"),
        f"lb explain svc/{ns}/checkout": ("ServiceSeen", "Provider"),
        "pool list": (pool, "198.18."),
        f"pool show {pool}": (space.pooled(10), f"{ns}/web", "waiting", f"{ns}/late"),
        f"lb explain {ns}/late": ("waits", "PoolExhausted", "ahead of it"),
        "leases": (space.pooled(10), f"{ns}/web", f"services/{ns}/shop"),
        "leases --at 2020-01-01T00:00:00Z": ("no lease fits",),
        "nrp status": ("in step", "1 inbound"),
        f"nrp explain {ns}/checkout": (f"{ns}/checkout",),
        "nrp diff": ("no difference",),
        "doctor": ("NATS", "Postgres", "API server", "allocator", "applier"),
        "config": ("[prober]", "dial_map"),
        "events --last 20": ("LB:", "kube."),
    }
    for_machines = [
        "lb list",
        f"lb show {ns}/web",
        f"lb explain {ns}/web",
        "pool list",
        f"pool show {pool}",
        f"leases --owner {ns}/web",
        "events --last 20",
        "nrp status",
        "nrp diff",
        "config",
    ]
    on_screen = [f"lb list -n {ns}", f"lb show {ns}/web", f"lb explain {ns}/web"]
    piped, shown, machine = await gather(
        many(lbledger, env, for_people, at_once=2),
        many(on_terminal, env, on_screen, at_once=1),
        many(lbledger, env, [f"{line} --json" for line in for_machines], at_once=1),
    )

    for line, done in {**piped, **machine}.items():
        assert (done.code, done.err) == (0, ""), (line, done)
        assert "\x1b" not in done.out, line
    for line, done in [*piped.items(), *shown.items()]:
        assert done.code == 0, (line, done)
        wide = [text for text in done.out.splitlines() if len(text) > COLUMNS]
        assert line.startswith(("config", "events")) or not wide, (line, wide)
    for line, words in for_people.items():
        said = " ".join(piped[line].out.split())
        assert not [word for word in words if word not in said], (line, words, piped[line])
    assert "NotHealthy" in shown[on_screen[0]].out
    (sick,) = (await space.status("sick"))["backends"]
    assert f"unhealthy {sick['since']}" in " ".join(piped[f"lb show {ns}/sick"].out.split())

    edited = await simulated(whole, space, pool)
    assert (edited.code, edited.err) == (0, "")
    assert f"{ns}/late" in edited.out
    assert "would get an address" in edited.out

    parsed = {line: machine[f"{line} --json"] for line in for_machines}
    listed = {one["name"]: one for one in parsed["lb list"].json if one["namespace"] == ns}
    assert listed["web"]["address"] == space.pooled(10)
    assert listed["web"]["ready"] is True
    assert (listed["sick"]["healthy"], listed["sick"]["backends"]) == (0, 1)
    assert listed["late"]["reason"] == "PoolExhausted"
    assert listed["checkout"]["provider"] == "in step"
    (lease,) = parsed[f"leases --owner {ns}/web"].json
    assert (lease["address"], lease["name"]) == (space.pooled(10), "web")
    holders = parsed[f"pool show {pool}"].json["holders"]
    assert {holder["name"] for holder in holders} == {"web", "sick", "shop"}
    explained = parsed[f"lb explain {ns}/web"].json
    assert [row["address"] for row in explained["standing"]["leases"]] == [space.pooled(10)]
    chain = explained["chain"]
    kinds = [entry["event"]["type"].partition(".")[0] for entry in chain]
    assert kinds[0] == "LoadBalancerSeen"
    assert {"LeaseGranted", "BackendsResolved", "Applied"} <= set(kinds)
    for line in ("pool list", "nrp status", "nrp diff", "config", f"lb show {ns}/web"):
        assert parsed[line].json is not None
    for text in parsed["events --last 20"].out.splitlines():
        assert json.loads(text)["subject"]  # a line for each event


WRONG = {
    "": (2, "Usage"),
    "nope": (2, "No such command 'nope'"),
    "lb list --nope": (2, "No such option: --nope"),
    "lb show": (2, "Missing argument"),
    "lb show a/b/c/d": (2, "write NAMESPACE/NAME"),
    "lb show Bad_Name": (2, "write NAMESPACE/NAME"),
    "lb explain a/*": (2, "write NAMESPACE/NAME"),
    "lb explain a/b --at noon": (2, "write a time like"),
    "lb explain a/b --at 2000-01-01": (1, "nothing is known of"),
    "lb show {ns}/nobody": (1, "no LoadBalancer {ns}/nobody is known"),
    "lb explain {ns}/nobody": (1, "nothing is known of {ns}/nobody"),
    "lb list -n nowhere": (0, "no load balancer is known"),
    "nrp explain nobody": (1, "nobody"),
    "pool show nope": (1, "no pool 'nope' is known"),
    "leases --at yesterday": (2, "write a time like"),
    "leases --address 300.1.2.3": (2, "write it like 192.0.2.5"),
    "events --subject foo": (2, "must begin with kube. or lb."),
    "events --subject kube..x": (2, "kube..x"),
    "events --last -1": (2, "--last"),
    "up --kubeconfig /nowhere": (2, "there is no such file"),
}


async def test_wrong_use_is_told_in_one_line(whole, space):
    """Exit code, and a message that names what is wrong and what would be right; no traceback."""
    commands = {line.format(ns=space.name): line for line in WRONG}

    done = await many(lbledger, whole.environment(), list(commands))

    for line, template in commands.items():
        code, words = WRONG[template]
        assert done[line].code == code, (line, done[line])
        assert words.format(ns=space.name) in done[line].out + done[line].err, (line, done[line])
        assert "Traceback" not in done[line].err, (line, done[line])
        if code and "Usage" not in done[line].out + done[line].err:
            assert len(done[line].err.strip().splitlines()) == 1, (line, done[line])


async def test_nothing_running_and_wrong_addresses(tmp_path):
    """Each command says what it could not reach, with exit code 1; a setting that can't be right is
    wrong use. No password shows."""
    port = free_port()
    nothing = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "LBLEDGER_NATS_URL": f"nats://me:hunter2@127.0.0.1:{port}",
        "LBLEDGER_DATABASE_URL": f"postgresql://me:hunter2@127.0.0.1:{port}/x",
    }
    by_bus = ["lb list", "lb show a/b", "lb explain a/b", "pool list", "events"]
    by_tables = ["leases", "pool show p", "nrp status", "migrate"]
    settings = {
        "LBLEDGER_NATS_URL=foo": "must start with nats://",
        "LBLEDGER_DATABASE_URL=mysql://x": "must start with postgresql://",
        "LBLEDGER_PROBER_PERIOD=5": "did you mean LBLEDGER_PROBER_PERIOD_S",
        "LBLEDGER_CONFIG=/nowhere.toml": "/nowhere.toml",
    }

    async def with_setting(item):
        name, _, value = item.partition("=")
        return await lbledger({**nothing, name: value}, "lb", "list")

    done, wrong, doctor = await gather(
        many(lbledger, nothing, by_bus + by_tables, at_once=9),
        gather(*(with_setting(item) for item in settings)),
        from_nothing(nothing, "doctor", "--json"),
    )

    for line, one in done.items():
        assert one.code == 1, (line, one)
        assert f"127.0.0.1:{port}" in one.err, (line, one)
        assert len(one.err.strip().splitlines()) == 1, (line, one)
    for (item, words), one in zip(settings.items(), wrong, strict=True):
        assert (one.code, words in one.err) == (2, True), (item, one)
    checks = {check["name"]: check["ok"] for check in doctor.json}
    assert (doctor.code, checks["NATS"], checks["Postgres"]) == (1, False, False)
    for one in [*done.values(), *wrong, doctor]:
        assert "hunter2" not in one.out + one.err
        assert "Traceback" not in one.err


async def test_what_was_and_who_had_it(whole, space):
    """`leases` answers for a moment of the past, and for one address through all its holders."""
    await space.pool(10, 10)
    await space.balancer("first")
    await space.becomes("first", "False", NO_BACKEND)
    (row,) = await whole.rows("select clock_timestamp() as at")
    await space.delete("first")
    await space.balancer("second")
    await space.becomes("second", "False", NO_BACKEND)
    env, at = whole.environment(), row["at"].isoformat()

    found = await many(
        lbledger,
        env,
        [
            f"leases --at {at} --address {space.pooled(10)} --json",
            f"leases --address {space.pooled(10)} --json",
            f"leases --address {space.pooled(10)}/32 --json",
            f"leases --owner {space.name}/first",
        ],
    )

    then, history, spelled, told = found.values()
    assert [lease["name"] for lease in then.json] == ["first"]
    assert [lease["name"] for lease in history.json] == ["first", "second"]
    assert history.json == spelled.json
    assert history.json[0]["release_reason"] == "owner-deleted"
    assert "owner-deleted" in told.out


async def test_events_are_followed_until_they_are_enough(whole, space):
    """`events --follow` shows what comes, ends with 0 on Ctrl-C, and a closed pipe is no error."""
    env = whole.environment()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "events", "--follow", "--last", "1"),
        *("--subject", f"kube.loadbalancers.{space.name}.>", "--json"),
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # As from a terminal: a test run in the background is told to ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    await space.pool()
    await space.balancer("before")
    await space.becomes("before", "False", NO_BACKEND)
    async with asyncio.timeout(90):
        await process.stdout.readline()  # it listens
        await space.balancer("after")
        while "after" not in (line := (await process.stdout.readline()).decode()):
            assert line
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")

    command = f"{sys.executable} -m services.cli events --last 0 | head -1"
    piped = await asyncio.create_subprocess_exec(
        *("bash", "-o", "pipefail", "-c", command),
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await piped.communicate()
    assert (piped.returncode, err) == (0, b"")
    assert len(out.splitlines()) == 1


async def test_doctor_finds_a_dead_letter(whole):
    """Exit code 1, and where to look."""
    await whole.rows(
        "insert into prober.dead_letter (stream, seq, subject, reason, payload)"
        " values ('KUBE', 1, 'kube.x', 'made by a test', '')"
    )
    try:
        done = await from_nothing(whole.environment(), "doctor")
    finally:
        await whole.rows("delete from prober.dead_letter where reason = 'made by a test'")

    assert done.code == 1
    assert "lbledger events --subject lb.dead.prober" in " ".join(done.out.split())
