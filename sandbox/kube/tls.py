"""A certificate for loopback: `kubectl` sends its token over TLS only.

One self-signed certificate is its own authority. With a folder it is kept there, so that a
restart does not turn away clients that hold the old kubeconfig.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
import tempfile
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path

_LIFE = timedelta(days=365)


class Certificate:
    """A certificate with its key, in PEM."""

    def __init__(self, certificate: bytes, key: bytes) -> None:
        self.certificate = certificate
        self._key = key

    @classmethod
    def kept_in(cls, folder: Path | None) -> Certificate:
        """The certificate of a folder, made if there is none or it is about to run out."""
        if folder is None:
            return cls(*_of_this_process())
        path = folder / "tls.pem"
        if path.exists() and datetime.now(UTC).timestamp() - path.stat().st_mtime < (
            _LIFE.total_seconds() / 2
        ):
            certificate, _, key = path.read_bytes().partition(b"\n\n")
            return cls(certificate + b"\n", key)
        made = cls(*_made())
        folder.mkdir(parents=True, exist_ok=True)
        write_private(path, made.certificate.rstrip() + b"\n\n" + made._key)
        return made

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # The ssl module reads keys from files only.
        with tempfile.NamedTemporaryFile() as file:
            file.write(self.certificate + self._key)
            file.flush()
            context.load_cert_chain(file.name)
        return context


def write_private(path: Path, content: bytes) -> None:
    """Replace a file that only its owner may read."""
    draft = path.with_name(path.name + ".new")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    draft.replace(path)


@lru_cache(maxsize=1)
def _of_this_process() -> tuple[bytes, bytes]:
    return _made()


def _made() -> tuple[bytes, bytes]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "lbledger sandbox")])
    hosts: list[x509.GeneralName] = [
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        x509.IPAddress(ipaddress.ip_address("::1")),
        x509.DNSName("localhost"),
    ]
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + _LIFE)
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    return (
        certificate.public_bytes(pem),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain),
    )
