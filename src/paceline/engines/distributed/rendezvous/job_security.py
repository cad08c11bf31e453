"""Handshake of a job's connections: by certificates of an organisation, the given token, or the token of one host."""

from __future__ import annotations

import ssl
from functools import lru_cache

from paceline.clusters.job_token import describe_weakness
from paceline.clusters.torchrun import Torchrun
from paceline.engines.distributed.rendezvous.token_file import create_token, read_token, remove_token, token_path
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.security import Security, TokenSecurity
from paceline.engines.distributed.transport.tls import Identity, TLSSecurity, derive_identity, load_identity
from paceline.errors import UsageError
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)
NOT_ENCRYPTED = "encrypt=False: every process on the network path can read and change parameters and gradients"


class JobSecurity:
    """Source of the handshake of new connections of this process.

    Without certificates and without a given token, rank 0 writes a token for the processes of this user on this host.
    Every other process reads it again for each connection, because the file may be that of an earlier run. A process
    other than rank 0 connects to rank 0 before it listens, so that it listens with a token that rank 0 has accepted.

    Args:
        cluster: launch settings of this process.
    """

    def __init__(self, cluster: Torchrun) -> None:
        self._cluster = cluster
        self._own_token = ""  # token that this process has written
        self._has_warned = not cluster.is_server

    def __call__(self) -> Security:
        """Return the handshake of the next connection.

        Raises:
            ConnectionLost: rank 0 has not written the token of this host yet.
            UsageError: a certificate or the key is invalid, or the token of this host cannot be written or read safely.
        """
        cluster = self._cluster
        if cluster.tls_cert is not None:
            certificate, key, ca = map(str, (cluster.tls_cert, cluster.tls_key, cluster.tls_ca))
            return _tls_of_files(certificate, key, ca, cluster.ranks.run_id)
        self._warn()
        return _security(self._token(), cluster.ranks.run_id, encrypt=cluster.encrypt)

    def close(self) -> None:
        """Remove the token that this process has written."""
        token, self._own_token = self._own_token, ""
        if not token:
            return
        try:
            remove_token(self._cluster.ranks, token)
        except UsageError as error:  # the run itself has ended well
            LOG.warning("the token of this job was not removed: %s", error)

    def _token(self) -> str:
        ranks = self._cluster.ranks
        if ranks.token:
            return ranks.token
        if self._cluster.is_server:
            self._own_token = self._own_token or create_token(ranks)
            return self._own_token
        token = read_token(ranks)
        if token is None:
            raise ConnectionLost(
                f"there is no {token_path(ranks)}: rank 0 has not started yet, or it is a process of another user or "
                "container, which needs PACELINE_TOKEN"
            )
        return token

    def _warn(self) -> None:
        """Warn once, on rank 0 only, of a token that is easy to guess and of connections without encryption."""
        if self._has_warned:
            return
        self._has_warned = True
        weakness = describe_weakness(self._cluster.ranks.token) if self._cluster.ranks.token else ""
        for text in (weakness, "" if self._cluster.encrypt else NOT_ENCRYPTED):
            if text:
                LOG.warning("%s", text)


@lru_cache(maxsize=4)
def _security(token: str, run_id: str, *, encrypt: bool) -> Security:
    return TLSSecurity(derive_identity(token, run_id)) if encrypt else TokenSecurity(token, run_id)


@lru_cache(maxsize=4)
def _tls_of_files(certificate: str, key: str, ca: str, run_id: str) -> Security:
    """Return TLS with these files.

    Raises:
        UsageError: a file is invalid.
    """
    files = f"tls_cert={certificate!r}, tls_key={key!r}, tls_ca={ca!r}"
    try:
        identity = load_identity(certificate, key, ca)
        _check_key(identity, key)
        return TLSSecurity(identity, run_id)
    except OSError as error:  # also that of OpenSSL
        reason = error.reason if isinstance(error, ssl.SSLError) and error.reason else error.strerror or str(error)
        raise UsageError(
            f"{files}: {reason.lower().replace('_', ' ')}; give PEM files with a certificate, its private key and the "
            "certificate authority"
        ) from None
    except ValueError as error:
        raise UsageError(f"{files}: {error}; give PEM files") from None


def _check_key(identity: Identity, path: str) -> None:
    """Check that the key can be read without a passphrase, for which OpenSSL would ask on the terminal.

    Raises:
        UsageError: the key is encrypted.
    """
    if b"ENCRYPTED" in identity.key:
        raise UsageError(f"tls_key={path!r} has a passphrase, expected a key without one: type openssl pkey -in {path}")
