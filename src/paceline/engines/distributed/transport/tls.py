"""TLS 1.3 with mutual authentication, by a shared token or by certificates of an organisation."""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from paceline.engines.distributed.transport.security import Security, Steps, derive_key
from paceline.engines.distributed.transport.stream import StreamSocket
from paceline.engines.distributed.transport.tls_socket import TLSSocket

PURPOSE = b"paceline connection 1"
# Fixed, because every process must derive the same certificate.
FIRST_DAY, LAST_DAY = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "paceline")])


class Identity(NamedTuple):
    """Private key and certificate of a process, and the certificates that it accepts, in PEM."""

    key: bytes
    certificate: bytes
    accepted: bytes


@lru_cache(maxsize=4)
def derive_identity(token: str, run_id: str = "") -> Identity:
    """Return the key and the self-signed certificate that all processes of a job derive from its token.

    ``key = Ed25519(scrypt(token, salt = purpose, run_id))``. Each side accepts this very certificate only, so a process
    without the token completes no handshake. Equal arguments give equal bytes.

    Args:
        token: secret of the job.
        run_id: id of the run under torchrun, so that two runs with one token do not meet; empty without one.

    >>> derive_identity("a secret") == derive_identity("a secret")
    True
    >>> derive_identity("a secret") == derive_identity("a secret", run_id="7")
    False
    """
    key = Ed25519PrivateKey.from_private_bytes(derive_key(token, run_id, PURPOSE))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(NAME)
        .issuer_name(NAME)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(FIRST_DAY)
        .not_valid_after(LAST_DAY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)  # Ed25519 has its own hash
        .public_bytes(Encoding.PEM)
    )
    return Identity(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), certificate, certificate)


def load_identity(certificate: str, key: str, ca: str) -> Identity:
    """Return the key and the certificate in these files, and the certificate authority whose certificates are accepted.

    Raises:
        OSError: a file cannot be read.
    """
    return Identity(Path(key).read_bytes(), Path(certificate).read_bytes(), Path(ca).read_bytes())


class TLSSecurity(Security):
    """TLS 1.3 with a certificate on both sides.

    Args:
        identity: key, certificate and accepted certificates of this process.
        run_id: id of the run under torchrun; empty without one.

    Raises:
        ssl.SSLError: the key or a certificate is invalid, or they do not belong to each other.
    """

    description = "TLS 1.3"

    def __init__(self, identity: Identity, run_id: str = "") -> None:
        self.run_id = run_id
        self._client = _context(identity, ssl.PROTOCOL_TLS_CLIENT)
        self._server = _context(identity, ssl.PROTOCOL_TLS_SERVER)
        self._server.num_tickets = 0  # a session is never resumed

    def wrap(self, sock: StreamSocket, *, is_server: bool) -> TLSSocket:
        """Return the encrypted socket."""
        return TLSSocket(sock, self._server if is_server else self._client, is_server=is_server)

    def authenticate(self, sock: StreamSocket, *, is_server: bool) -> Steps[None]:
        """Complete the handshake of TLS."""
        assert isinstance(sock, TLSSocket)
        return sock.authenticate()


def _context(identity: Identity, protocol: ssl._SSLMethod) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate proves that a process belongs to the job, whatever its address
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=identity.accepted.decode())
    with _private_file(identity.key + b"\n" + identity.certificate) as path:
        context.load_cert_chain(path)
    return context


@contextmanager
def _private_file(content: bytes) -> Iterator[str]:
    """Write a file that only this user can read, because OpenSSL loads keys from files."""
    descriptor, path = tempfile.mkstemp()
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        yield path
    finally:
        os.unlink(path)
