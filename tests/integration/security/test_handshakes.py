"""Handshakes that must fail: replayed, reflected, relayed, of another run, or with another certificate."""

import socket
import ssl
import threading
import time
from contextlib import suppress

import pytest

from attackers import (
    LIMIT_S,
    VERSION,
    Authority,
    client_hello,
    is_closed_within,
    relaying,
    security,
    serving,
    stranger_context,
    transport,
)
from paceline.engines.distributed.transport import transport as transport_module
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.security import (
    NONCE_BYTES,
    PROOF_BYTES,
    AuthenticationFailed,
    Preamble,
)
from paceline.engines.distributed.transport.task_messages import CancelTask
from paceline.engines.distributed.transport.tls import Identity, TLSSecurity, derive_identity
from paceline.recording.metrics.network_counters import RejectionCause
from ranks import TOKEN
from selections import parametrize_few
from this_process import wait_until

REJECTED = "rejected a connection from 127.0.0.1: "


def connect(server, protection, address=None):
    """Connect as a process of the job and send a message."""
    with transport(protection) as client:
        client.connect(address or server.address).send(CancelTask(7))
        wait_until(lambda: server.connections)
        assert server.connections[-1].recv(LIMIT_S) == CancelTask(7)


@pytest.mark.parametrize("encrypt", [True, False], ids=["TLS", "plain"])
def test_a_recorded_handshake_is_refused(encrypt, caplog):
    protection = security(encrypt=encrypt)
    with serving(protection) as server, relaying(server.address) as relay:
        connect(server, protection, relay.address)  # a relay may watch, and that is all
        assert len(server.connections) == 1
        with server.dial(relay.recorded[0]) as control, server.dial(relay.recorded[1]) as data:
            assert all(is_closed_within(sock, 1.0) for sock in (control, data))
        assert len(server.connections) == 1
    assert REJECTED in caplog.text


def test_the_proof_of_the_server_is_no_proof_of_a_client(caplog):
    """Reflection: the attacker sends back what the server sends, also that of a second connection."""
    with serving(security(encrypt=False)) as server:
        with server.dial(bytes(NONCE_BYTES)) as one, server.dial() as other:
            other.sendall(read(one, NONCE_BYTES))
            own = read(one, PROOF_BYTES)
            read(other, NONCE_BYTES)
            for sock, proof in ((one, own), (other, read(other, PROOF_BYTES))):
                sock.sendall(proof + Preamble.of(VERSION, "").encode())
                assert is_closed_within(sock, LIMIT_S)
        assert not server.connections
        assert server.counters.rejected[RejectionCause.AUTHENTICATION] == 2
    assert f"{REJECTED}it does not have the token of this job" in caplog.text


def read(sock, nbytes):
    content = b""
    while len(content) < nbytes:
        more = sock.recv(nbytes - len(content))
        assert more
        content += more
    return content


@pytest.mark.parametrize("server_encrypts", [True, False])
def test_a_process_that_encrypts_and_one_that_does_not_never_meet(server_encrypts):
    with serving(security(encrypt=server_encrypts)) as server:
        with pytest.raises(ConnectionLost):
            connect(server, security(encrypt=not server_encrypts))
        assert not server.connections


@pytest.mark.parametrize("encrypt", [True, False], ids=["TLS", "plain"])
@pytest.mark.parametrize("other", [{"token": TOKEN + "."}, {"run_id": "7"}], ids=["token", "run"])
def test_another_token_and_another_run_are_refused_by_both_sides(encrypt, other, caplog):
    ours, theirs = security(encrypt=encrypt), security(encrypt=encrypt, **other)
    with serving(ours) as server:
        with pytest.raises(ConnectionLost, match=r"^127.0.0.1:\d+ (is not of this job|does not answer)"):
            connect(server, theirs)
        assert not server.connections
        wait_until(lambda: server.counters.rejected[RejectionCause.AUTHENTICATION] == 1)
    assert REJECTED in caplog.text


# --- certificates --------------------------------------------------------------------------------------------------


AUTHORITY = Authority()


def tls_of(authority, run_id=""):
    return TLSSecurity(Identity(*authority.issue("host"), authority.certificate), run_id)


def test_certificates_of_one_authority_connect():
    with serving(tls_of(AUTHORITY)) as server:
        connect(server, tls_of(AUTHORITY))
        assert len(server.connections) == 1


@parametrize_few(
    ("issuer", "age_days"),
    [(Authority("another organisation"), 1), (Authority(), 1), (AUTHORITY, 30), (AUTHORITY, -1)],
    ids=["another name", "another key", "expired", "of tomorrow"],
    keep=1,
)
def test_other_certificates_are_refused_by_the_client_and_by_the_server(issuer, age_days, tmp_path, caplog):
    invalid = Identity(*issuer.issue("host", age_days), AUTHORITY.certificate)
    with serving(TLSSecurity(invalid)) as impostor:
        with pytest.raises(AuthenticationFailed, match=r"its certificate is not that of this job"):
            connect(impostor, tls_of(AUTHORITY))
        assert not impostor.connections
    with serving(tls_of(AUTHORITY)) as server:
        with server.dial() as sock:
            assert is_refused(stranger_context(invalid, tmp_path), sock)
        with pytest.raises(ConnectionLost, match=r"^127.0.0.1:\d+ (is not of this job|does not answer)") as raised:
            connect(server, TLSSecurity(invalid))
        assert "protocol" not in str(raised.value)  # as OpenSSL calls this end
        assert not server.connections
    assert f"{REJECTED}its certificate is not that of this job" in caplog.text


def is_refused(context, sock):
    """Return whether a server refuses a client that accepts every server."""
    with context.wrap_socket(sock) as encrypted:  # TLS 1.3: the client is through before the server has checked it
        try:
            encrypted.sendall(Preamble.of(VERSION, "").encode())
            return encrypted.recv(1) == b""
        except (ssl.SSLError, ConnectionError):
            return True


def test_a_client_without_a_certificate_is_refused(caplog):
    with serving(security(encrypt=True)) as server:
        with server.dial() as sock:
            assert is_refused(stranger_context(), sock)
        assert not server.connections
    assert f"{REJECTED}peer did not return a certificate" in caplog.text


def test_a_certificate_with_the_name_and_number_of_the_jobs_own_is_refused(tmp_path):
    forged = derive_identity("a guess")  # equal but for the key
    with serving(security(encrypt=True)) as server:
        with server.dial() as sock:
            assert is_refused(stranger_context(forged, tmp_path), sock)
        with server.dial() as sock:  # the right certificate, which every client sees, without its key
            stolen = forged._replace(certificate=derive_identity(TOKEN).certificate)
            with pytest.raises(ssl.SSLError, match=r"(?i)key values mismatch"):
                stranger_context(stolen, tmp_path)
        assert not server.connections


def test_tls_1_2_is_refused(tmp_path, caplog):
    context = stranger_context(derive_identity(TOKEN), tmp_path)  # even with the key of the job
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with serving(security(encrypt=True)) as server:
        with server.dial() as sock, pytest.raises(ssl.SSLError):
            context.wrap_socket(sock)
        assert not server.connections
    assert f"{REJECTED}unsupported protocol" in caplog.text


def test_a_session_is_never_resumed(tmp_path):
    context = stranger_context(derive_identity(TOKEN), tmp_path)
    with serving(security(encrypt=True)) as server, server.dial() as sock, context.wrap_socket(sock) as encrypted:
        preamble = Preamble.of(VERSION, "").encode()
        encrypted.sendall(preamble)
        encrypted.settimeout(0.1)
        with suppress(TimeoutError):
            encrypted.recv(1)  # a ticket would come before the answer
        with server.dial() as other, context.wrap_socket(other, session=encrypted.session) as again:
            assert not again.session_reused
            assert encrypted.session is None or not encrypted.session.has_ticket


def test_runs_with_certificates_of_one_authority_do_not_mix(caplog):
    with serving(tls_of(AUTHORITY, run_id="1")) as server:
        with pytest.raises(AuthenticationFailed, match="it belongs to another run of torchrun"):
            connect(server, tls_of(AUTHORITY, run_id="2"))
        assert not server.connections
        assert not server.rejections  # so the run of this server goes on
        connect(server, tls_of(AUTHORITY, run_id="1"))
    assert f"{REJECTED}it belongs to another run of torchrun" in caplog.text


def test_long_versions_are_compared(caplog):
    protection = security(encrypt=True)
    long = "0.2.0.dev20261123+" + "local.part." * 10
    with serving(protection, long) as server:
        with transport(protection, long) as client:
            client.connect(server.address)
        with transport(protection, "0.2.0") as client, pytest.raises(ValueError, match=r"runs paceline 0\.2\.0\.dev"):
            client.connect(server.address)
        wait_until(lambda: server.rejections)
    assert "a process at 127.0.0.1 runs paceline 0.2.0, this one 0.2.0.dev" in server.rejections[0]


# --- streams without end, and a process that connects to an attacker -----------------------------------------------


ENDLESS = {
    "zeros": bytes(1 << 12),
    "change of cipher": b"\x14\x03\x03\x00\x01\x01" * 1000,
    "hello request": b"\x16\x03\x03\x40\x00" + bytes(1 << 14),  # which OpenSSL skips in a loop of its own
    "warnings": b"\x15\x03\x03\x00\x02\x01\x00" * 1000,
    "empty records": b"\x16\x03\x03\x00\x00" * 1000,
}


@pytest.mark.parametrize("encrypt", [True, False], ids=["TLS", "plain"])
@pytest.mark.parametrize("first", [b"", client_hello()], ids=["", "after a ClientHello"])
@pytest.mark.parametrize("kind", ENDLESS)
def test_a_client_that_sends_without_end_delays_no_other(encrypt, first, kind):
    protection = security(encrypt=encrypt)
    with serving(protection) as server, server.dial(first) as sock:
        sending = threading.Thread(target=flood, args=(sock, ENDLESS[kind]), daemon=True)
        sending.start()
        connect(server, protection)
        sending.join(LIMIT_S)
        assert not sending.is_alive()  # the server has closed the socket


def flood(sock, content, pause_s=0.0):
    try:
        while True:
            sock.sendall(content)
            time.sleep(pause_s)
    except OSError:
        pass


def answering(content, pause_s=0.0):
    """Return the address of a server that sends this to its client without end, with pauses."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer():
        with listening:
            sock, _ = listening.accept()
            with sock:
                flood(sock, content, pause_s)

    threading.Thread(target=answer, daemon=True).start()
    return listening.getsockname()


@pytest.mark.parametrize("encrypt", [True, False], ids=["TLS", "plain"])
@pytest.mark.parametrize("kind", ENDLESS)
def test_a_server_that_sends_without_end_is_left(encrypt, kind, monkeypatch):
    monkeypatch.setattr(transport_module, "HANDSHAKE_S", 0.3)
    with transport(security(encrypt=encrypt)) as client, pytest.raises(ConnectionLost, match=r"127.0.0.1"):
        client.connect(answering(ENDLESS[kind]))


@pytest.mark.parametrize("encrypt", [True, False], ids=["TLS", "plain"])
def test_a_server_that_sends_a_few_bytes_now_and_then_is_left(encrypt, monkeypatch):
    monkeypatch.setattr(transport_module, "HANDSHAKE_S", 0.1)
    with transport(security(encrypt=encrypt)) as client, pytest.raises(ConnectionLost, match="does not answer"):
        client.connect(answering(b"\x16\x03\x03\x40\x00", pause_s=0.01))  # a record of 16 KB begins
