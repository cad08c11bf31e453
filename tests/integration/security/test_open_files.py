"""Thousands of idle connections at rank 0, which may open few files: the run goes on."""

import resource
import socket
from functools import partial
from itertools import pairwise

import pytest

import paceline as pl
from attackers import LIMIT_S, dial, security, serving, transport
from paceline.core.records import GradientArrived
from paceline.engines.distributed.transport import listener
from paceline.engines.distributed.transport.task_messages import CancelTask
from ranks import lost, ranks
from this_process import wait_until
from tiny_jobs import tiny_job

FILES, STRANGERS = 1024, 4000


def limit_files(count):
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


@pytest.fixture
def strangers():
    """Sockets that are closed afterwards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < STRANGERS + 100:
        pytest.skip(f"this process may open {hard} files only")
    made = []
    yield made
    for sock in made:
        sock.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("content", [b"", b"\x16\x03\x01"], ids=["silent", "half a handshake"])
def test_4000_idle_connections_and_1024_files(content, strangers):
    settings = {"protocol": "asp", "stop": "seconds=8"}
    slow = {"slowness": pl.Cluster(2, timing=pl.timing.Deterministic(0.02))}
    with ranks(3, tiny_job(), slow, **settings) as job:
        job.start(0, prepare=partial(limit_files, FILES))
        for rank in (1, 2):
            job.start(rank)
        job.await_training()
        address = "127.0.0.1", job._port
        strangers += [dial(address, content) for _ in range(STRANGERS)]
        job.processes[2].kill()
        job.start(2)  # a worker that joins among them
        ends = [job.end(rank) for rank in (0, 1, 2)]
    assert [end.stopped_by for end in ends] == ["seconds"] * 3
    assert [worker for worker, _ in lost(ends[0])] == [1]
    arrived = [record.now_s for record in ends[0].of(GradientArrived) if record.worker == 0]
    assert max(after - before for before, after in pairwise(arrived)) < 1.0
    assert {record.worker for record in ends[0].of(GradientArrived) if record.now_s > arrived[-1] - 0.5} == {0, 1}


def test_without_a_file_to_spare_the_server_says_so_and_goes_on(caplog):
    """This process may open no further file: its connection goes on, and a new one succeeds afterwards."""
    protection = security(encrypt=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving(protection) as server, transport(protection) as client, transport(protection) as other:
        connection = client.connect(server.address)
        wait_until(lambda: server.connections)  # the server notes it a moment later
        waiting = socket.socket()
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (waiting.fileno() + 1, hard))
            waiting.connect(server.address)
            wait_until(lambda: "a connection could not be accepted" in caplog.text)
            connection.send(CancelTask(1))
            assert server.connections[0].recv(LIMIT_S) == CancelTask(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            waiting.close()
        assert other.connect(server.address)
    assert "(Too many open files); the server tries again" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(("files", "sockets"), [(128, 16), (1024, 128), (1 << 20, 128)])
def test_the_budget_of_sockets_depends_on_the_limit_of_files(files, sockets, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))
    assert listener._max_candidates() == sockets
