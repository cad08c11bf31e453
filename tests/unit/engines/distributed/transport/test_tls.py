"""TLS: the certificate that follows from a token, its fields, and handshakes in memory with right and wrong ones."""

import socket
import ssl
from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from paceline.engines.distributed.transport.security import AuthenticationFailed
from paceline.engines.distributed.transport.tls import TLSSecurity, derive_identity

derive_again = derive_identity.__wrapped__  # without its cache
TOKENS = {("a token", ""), ("a token", "7"), ("a token7", "")}


@pytest.fixture(scope="module")
def identities():
    return {arguments: derive_identity(*arguments) for arguments in TOKENS}


def handshake(server, client):
    """Return both ends after the handshake; raise the first error of a side."""
    pair = socket.socketpair()
    sides = []
    for security, sock, is_server in zip((server, client), pair, (True, False), strict=True):
        sock.setblocking(False)
        wrapped = security.wrap(sock, is_server=is_server)
        sides.append((wrapped, security.authenticate(wrapped, is_server=is_server)))
    try:
        open_steps = [steps for _, steps in reversed(sides)]
        while open_steps:
            for steps in [*open_steps]:
                if next(steps, None) is None:
                    open_steps.remove(steps)
        return [sock for sock, _ in sides]
    except BaseException:
        for sock, _ in sides:
            sock.close()
        raise


def test_equal_arguments_give_equal_bytes_and_others_another_key(identities):
    assert derive_again("a token", "7") == identities["a token", "7"]
    assert len({identity.key for identity in identities.values()}) == len(TOKENS)
    assert len({identity.certificate for identity in identities.values()}) == len(TOKENS)


def test_the_certificate_never_expires_and_accepts_itself_only(identities):
    identity = identities["a token", ""]
    certificate = x509.load_pem_x509_certificate(identity.certificate)
    assert isinstance(certificate.public_key(), Ed25519PublicKey)
    assert certificate.not_valid_before_utc == datetime(2000, 1, 1, tzinfo=UTC)
    assert certificate.not_valid_after_utc == datetime(9999, 12, 31, tzinfo=UTC)
    certificate.verify_directly_issued_by(certificate)
    assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
    assert identity.accepted == identity.certificate


def test_one_token_is_tls_1_3_on_both_sides(identities):
    both = handshake(*[TLSSecurity(identities["a token", ""]) for _ in range(2)])
    for sock in both:
        assert sock._tls.version() == "TLSv1.3"
        assert ssl.DER_cert_to_PEM_cert(sock._tls.getpeercert(binary_form=True)).encode() == (
            identities["a token", ""].certificate
        )
        sock.close()


@pytest.mark.parametrize("other", sorted(TOKENS - {("a token", "")}), ids=str)
def test_another_token_or_run_id_is_refused_by_the_client_first(other, identities):
    with pytest.raises(AuthenticationFailed, match="not that of this job, as with another PACELINE_TOKEN"):
        handshake(TLSSecurity(identities[other]), TLSSecurity(identities["a token", ""]))


def test_a_server_refuses_a_client_that_accepts_it_but_has_another_certificate(identities):
    ours, theirs = identities["a token", ""], identities["a token", "7"]
    with pytest.raises(AuthenticationFailed, match="its certificate is not that of this job"):
        handshake(TLSSecurity(ours), TLSSecurity(theirs._replace(accepted=ours.certificate)))


def test_a_key_of_another_certificate_is_an_error_at_once(identities):
    ours, theirs = identities["a token", ""], identities["a token", "7"]
    with pytest.raises(ssl.SSLError, match=r"(?i)key values mismatch"):
        TLSSecurity(ours._replace(key=theirs.key))
