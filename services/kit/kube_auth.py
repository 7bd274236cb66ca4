"""Who we are towards the Kubernetes API: host, TLS and the Authorization header.

kubernetes_asyncio reads kubeconfigs, service accounts and exec plugins; nothing else of it is used
(its import costs 2 s and 112 MB, so only a process that talks to the API server comes here).

Credentials are read anew while the process runs: when a file they came from changed (looked at
before each request, which costs microseconds), each minute where a token file is used, shortly
before an exec plugin's token ends, and at once when the server answers 401. So a rotated token
needs no restart. Neither the token nor a key is ever part of a repr, a log line or an error.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog
from kubernetes_asyncio.client import Configuration
from kubernetes_asyncio.config import kube_config
from kubernetes_asyncio.config.config_exception import ConfigException
from kubernetes_asyncio.config.incluster_config import InClusterConfigLoader

from services.kit.kube_errors import CredentialsError

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
RETRY_S: Final = 1.0  # an exec plugin that hands out tokens past their end is not run in a loop
REREAD_S: Final = 60.0  # a token file is read this often even when its mtime stands still
EXPIRY_MARGIN_S: Final = 60.0

log = structlog.get_logger()


@dataclass(frozen=True)
class Access:
    """What one request needs."""

    host: str
    authorization: str | None = field(repr=False)
    tls: ssl.SSLContext | None = field(repr=False)
    tls_server_name: str | None
    proxy: str | None = field(repr=False)  # may hold a password

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": self.authorization} if self.authorization else {}


class Credentials:
    """One source of credentials, and the newest access that it gave."""

    def __init__(
        self,
        kubeconfig: str | None = None,
        context: str | None = None,
        *,
        service_account: Path = SERVICE_ACCOUNT,
    ) -> None:
        self._service_account = service_account
        self._context = context
        self._kubeconfig = kubeconfig or os.environ.get("KUBECONFIG") or self._home_config()
        self._files: tuple[str, ...] = ()
        self._seen: dict[str, int] = {}
        self._token_from_file = False
        self._expires: datetime.datetime | None = None
        self._access: Access | None = None
        self._tls_key: tuple[Any, ...] = ()
        self._read_at = self._failed_at = -REREAD_S
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"Credentials({self.source})"

    @property
    def source(self) -> str:
        return self._kubeconfig or f"service account in {self._service_account}"

    async def access(self) -> Access:
        """The access to use now; raises CredentialsError when there is none."""
        if self._access is not None and not self._outdated():
            return self._access
        async with self._lock:
            if self._access is None or self._outdated():
                try:
                    await self._read()
                except CredentialsError as error:
                    if self._access is None:
                        raise
                    # A file that is being replaced; what we have may still do.
                    self._failed_at = time.monotonic()
                    log.warning("kube.credentials.unreadable", source=self.source, why=str(error))
            assert self._access is not None
            return self._access

    async def renew(self, refused: Access) -> Access:
        """After a 401 to `refused`: read everything anew, unless somebody just did."""
        async with self._lock:
            if self._access is refused or self._access is None:
                await self._read()
            assert self._access is not None
            return self._access

    def _outdated(self) -> bool:
        now = time.monotonic()
        if now - self._failed_at < RETRY_S:
            return False
        if self._expires is not None:
            left = self._expires - datetime.datetime.now(datetime.UTC)
            if left.total_seconds() < EXPIRY_MARGIN_S and now - self._read_at > RETRY_S:
                return True
        if self._token_from_file and now - self._read_at >= REREAD_S:
            return True
        return _mtimes(self._files) != self._seen

    async def _read(self) -> None:
        before = _mtimes(self._files)
        configuration = type.__call__(Configuration)  # not a copy of the process-wide default
        try:
            if self._kubeconfig:
                await self._read_kubeconfig(configuration)
            else:
                self._read_service_account(configuration)
            tls = self._tls(configuration)
        except CredentialsError:
            raise
        except (ConfigException, OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            raise CredentialsError(f"{self.source}: {error}") from error
        except Exception as error:  # yaml errors, and whatever an exec plugin brings
            raise CredentialsError(f"{self.source}: {type(error).__name__}: {error}") from error
        # A token file that ends with a newline would make an illegal header.
        token = str(configuration.api_key.get("BearerToken") or "").strip()
        if not token and self._token_from_file:
            raise CredentialsError(f"{self.source}: the token file is empty")
        if not token and configuration.username:
            token = str(configuration.get_basic_auth_token())
        self._access = Access(
            host=str(configuration.host).rstrip("/"),
            authorization=token or None,
            tls=tls,
            tls_server_name=configuration.tls_server_name or None,
            proxy=configuration.proxy or None,
        )
        # From before the reading: a change that came in between is then seen at the next request.
        self._seen = _mtimes(self._files) | {f: t for f, t in before.items() if f in self._files}
        self._read_at = time.monotonic()

    async def _read_kubeconfig(self, configuration: Any) -> None:
        paths = [os.path.expanduser(p) for p in str(self._kubeconfig).split(os.pathsep) if p]
        if not any(os.path.isfile(path) for path in paths):
            raise CredentialsError(f"kubeconfig {self._kubeconfig}: no such file")
        loader = await kube_config.load_kube_config(
            config_file=self._kubeconfig,
            context=self._context,
            client_configuration=configuration,
            persist_config=False,
        )
        # The loader keeps the chosen user to itself; its token file is what rotates.
        user: Any = getattr(loader, "_user", None)
        token_file = user.safe_get("tokenFile") if user is not None else None
        self._token_from_file = bool(token_file)
        self._expires = getattr(loader, "exec_plugin_expiry", None)
        beside = os.path.dirname(getattr(user, "path", None) or paths[0])
        found = [configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file]
        if token_file:
            found.append(os.path.normpath(os.path.join(beside, token_file)))
        self._files = (*paths, *(f for f in found if f))

    def _read_service_account(self, configuration: Any) -> None:
        token, authority = self._service_account / "token", self._service_account / "ca.crt"
        InClusterConfigLoader(
            token_filename=str(token), cert_filename=str(authority), try_refresh_token=False
        ).load_and_set(configuration)
        self._token_from_file = True
        self._files = (str(token), str(authority))

    def _tls(self, configuration: Any) -> ssl.SSLContext | None:
        """A context is made anew only when a file behind it changed: that costs milliseconds."""
        if not str(configuration.host).startswith("https:"):
            return None
        files = (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
        key = (configuration.verify_ssl, files, _mtimes(f for f in files if f))
        if self._access is not None and self._access.tls is not None and key == self._tls_key:
            return self._access.tls
        context = ssl.create_default_context(cafile=configuration.ssl_ca_cert or None)
        if configuration.cert_file:
            context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
        if not configuration.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        self._tls_key = key
        return context

    @staticmethod
    def _home_config() -> str | None:
        """kubectl's default, unless the pod's own service account is to be used."""
        path = Path.home() / ".kube" / "config"
        in_cluster = bool(os.environ.get("KUBERNETES_SERVICE_HOST"))
        return str(path) if not in_cluster and path.is_file() else None


def _mtimes(paths: Any) -> dict[str, int]:
    """Change stamps; inode and size count too, since two writes may share a timestamp."""
    stamps: dict[str, int] = {}
    for path in paths:
        try:
            stat = os.stat(path)
        except OSError:
            stamps[path] = -1
        else:
            stamps[path] = hash((stat.st_mtime_ns, stat.st_ino, stat.st_size))
    return stamps
