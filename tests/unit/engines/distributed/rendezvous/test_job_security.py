"""What the connections of a job are protected by: the given token, that of one host, or certificates of files."""

import queue
import subprocess
from contextlib import contextmanager

import pytest

import paceline as pl
from machine_speed import scaled
from paceline.clusters.job_token import make_token
from paceline.clusters.launch_env import LaunchEnv
from paceline.engines.distributed.rendezvous.job_security import JobSecurity
from paceline.engines.distributed.rendezvous.token_file import create_token, token_path
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.security import AuthenticationFailed
from paceline.engines.distributed.transport.transport import Transport
from selections import parametrize_few

TOKEN = "l3Q1x0b9vYk7Zr5TnW2mDfGhJpSaUeCi8oXq6wRtBzN"  # as make_token makes them


@pytest.fixture(autouse=True)
def runtime(monkeypatch, tmp_path):
    """Folder of this user for files of running programs."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def cluster(rank, token="", options=None, **variables):
    told = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **variables}
    ranks = LaunchEnv.from_environment({**told, "PACELINE_TOKEN": token})
    return pl.Torchrun(ranks=ranks, **(options or {}))


@contextmanager
def transport(security):
    made = Transport(security, "1", 5.0)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def listening(security):
    """Yield the address of a server with this security, and a queue with its connections."""
    accepted = queue.Queue()
    with transport(security) as server:
        listener = server.listen("127.0.0.1", 0, accepted.put, lambda reason: None)
        try:
            yield listener.address, accepted
        finally:
            listener.close()
            while not accepted.empty():
                accepted.get().close()


def connect(address, security):
    with transport(security) as client:
        client.connect(address).close()


def test_ranks_on_one_host_without_a_token_connect_by_that_of_rank_0():
    rank_0, rank_1, sidecar = (JobSecurity(each) for each in (cluster(0), cluster(1), cluster(0, PACELINE_SIDECAR="2")))
    for other in (rank_1, sidecar):
        with pytest.raises(ConnectionLost, match=r"there is no .*29500-\w+-0.token: rank 0 has not started yet"):
            other()
    with listening(rank_0) as (address, accepted):
        for other in (rank_1, sidecar):
            connect(address, other)
            accepted.get(timeout=scaled(5.0)).close()
        with pytest.raises(AuthenticationFailed):
            connect(address, JobSecurity(cluster(1, token=make_token())))
        with pytest.raises(AuthenticationFailed):
            connect(address, JobSecurity(cluster(1, token="run none")))  # nothing that can be guessed
    rank_0.close()
    assert not token_path(cluster(0).ranks).exists()
    rank_0.close()


@pytest.mark.slow
def test_a_rank_that_has_read_an_old_token_is_rejected_and_connects_with_the_new_one():
    create_token(cluster(0).ranks)  # left by a killed run
    rank_1 = JobSecurity(cluster(1))
    old = rank_1()
    rank_0 = JobSecurity(cluster(0))
    with listening(rank_0) as (address, accepted):
        with pytest.raises(AuthenticationFailed):
            connect(address, lambda: old)
        connect(address, rank_1)
        accepted.get(timeout=scaled(5.0)).close()


def test_rank_0_keeps_its_token_for_all_its_connections_and_removes_no_other_one():
    rank_0 = JobSecurity(cluster(0))
    assert rank_0() is rank_0()
    newer = create_token(cluster(0).ranks)
    rank_0.close()
    assert token_path(cluster(0).ranks).read_text() == newer


def test_a_token_that_cannot_be_removed_is_reported_and_fails_no_run(caplog):
    rank_0 = JobSecurity(cluster(0))
    rank_0()
    token_path(cluster(0).ranks).parent.chmod(0o755)
    rank_0.close()
    assert "the token of this job was not removed: " in caplog.text
    assert "has mode 755, expected 700" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "other", [{"MASTER_PORT": "29501"}, {"TORCHELASTIC_RUN_ID": "b"}, {"TORCHELASTIC_RESTART_COUNT": "1"}]
)
def test_two_runs_of_one_user_at_the_same_time_do_not_meet(other):
    one, another = JobSecurity(cluster(0)), JobSecurity(cluster(0, **other))
    with listening(one) as (address, accepted), listening(another) as (other_address, _):
        with pytest.raises(AuthenticationFailed):
            connect(other_address, JobSecurity(cluster(1)))
        with pytest.raises(AuthenticationFailed):
            connect(address, JobSecurity(cluster(1, **other)))
        connect(address, JobSecurity(cluster(1)))
        accepted.get(timeout=scaled(5.0)).close()


@pytest.mark.slow
def test_one_token_with_two_run_ids_makes_two_jobs():
    rank_0 = JobSecurity(cluster(0, TOKEN, TORCHELASTIC_RUN_ID="a"))
    with listening(rank_0) as (address, _), pytest.raises(AuthenticationFailed):
        connect(address, JobSecurity(cluster(1, TOKEN, TORCHELASTIC_RUN_ID="b")))


@parametrize_few(("encrypt", "description"), [(True, "TLS 1.3"), (False, "without encryption")], keep=1)
def test_a_given_token_needs_no_file(encrypt, description):
    securities = [JobSecurity(cluster(rank, TOKEN, {"encrypt": encrypt})) for rank in range(2)]
    assert [each().description for each in securities] == [description] * 2
    with listening(securities[0]) as (address, accepted):
        connect(address, securities[1])
        accepted.get(timeout=scaled(5.0)).close()
    assert not token_path(cluster(0).ranks).parent.exists()


WARNINGS = [
    (0, "secret", {}, ["PACELINE_TOKEN has about 28 bits, expected at least 128: paceline token makes one"]),
    (0, TOKEN, {}, []),
    (0, "", {}, []),
    (1, "secret", {}, []),
    (1, TOKEN, {"encrypt": False}, []),
    (0, TOKEN, {"encrypt": False}, ["encrypt=False: every process on the network path can read and change"]),
]


@parametrize_few(("rank", "token", "options", "warnings"), WARNINGS, keep=1)
def test_rank_0_warns_once(rank, token, options, warnings, caplog):
    security = JobSecurity(cluster(rank, token, options))
    security()
    security()
    assert len(caplog.messages) == len(warnings)
    for message, warning in zip(caplog.messages, warnings, strict=True):
        assert warning in message


def openssl(folder, *words):
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def organisations(tmp_path_factory):
    """Two organisations, each with a certificate authority and a certificate for a host."""
    made = []
    for name in ("one", "other"):
        folder = tmp_path_factory.mktemp(name)
        key = ["-newkey", "ed25519", "-noenc", "-subj"]
        openssl(folder, "req", "-x509", *key, f"/CN={name}", "-keyout", "ca.key", "-out", "ca.pem")
        openssl(folder, "req", *key, f"/CN=host of {name}", "-keyout", "key.pem", "-out", "host.csr")
        openssl(folder, "x509", "-req", "-in", "host.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-out", "cert.pem")
        openssl(folder, "pkey", "-in", "key.pem", "-aes256", "-passout", "pass:x", "-out", "locked.pem")
        (folder / "text.pem").write_text("no PEM")
        (folder / "bytes.pem").write_bytes(b"\xff\xfe")
        made.append(folder)
    return made


def files(folder, cert="cert.pem", key="key.pem", ca="ca.pem"):
    return {"tls_cert": folder / cert, "tls_key": folder / key, "tls_ca": folder / ca}


def test_certificates_of_an_organisation_serve_instead_of_the_token(organisations):
    rank_0, rank_1, stranger = (
        JobSecurity(cluster(rank, token, files(folder)))
        for rank, token, folder in [(0, "", organisations[0]), (1, "", organisations[0]), (1, TOKEN, organisations[1])]
    )
    with listening(rank_0) as (address, accepted):
        connect(address, rank_1)
        accepted.get(timeout=scaled(5.0)).close()
        for other in (stranger, JobSecurity(cluster(1, TOKEN))):
            with pytest.raises(ConnectionLost):
                connect(address, other)
        assert accepted.empty()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": "ca.key"}, "key values mismatch"),
        ({"key": "locked.pem"}, r"tls_key=.* has a passphrase, expected a key without one: type openssl pkey -in"),
        ({"cert": "text.pem"}, "give PEM files with a certificate, its private key and the certificate authority"),
        ({"ca": "text.pem"}, "give PEM files"),
        ({"ca": "bytes.pem"}, "give PEM files"),
        ({"key": "bytes.pem"}, "give PEM files"),
    ],
)
def test_invalid_files_are_refused(organisations, changes, message):
    with pytest.raises(pl.UsageError, match=message):
        JobSecurity(cluster(0, "", files(organisations[0], **changes)))()
