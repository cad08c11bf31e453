"""What a server opens: one port, and a few threads whatever the number of workers."""

import threading
from collections import Counter

import psutil
import pytest

import paceline as pl
from attackers import security, serving, transport
from paceline.engines.distributed.transport import transport as transport_module
from paceline.engines.distributed.transport.task_messages import CancelTask
from selections import parametrize_few
from tcp_threads import ranks
from this_process import wait_until
from tiny_jobs import tiny_job


def ports():
    """Return the listening ports of this process."""
    found = psutil.Process().net_connections(kind="inet")
    return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN or each.type.name == "SOCK_DGRAM"}


class Look(pl.callbacks.Callback):
    """Callback that looks at what is open in the middle of a run."""

    def __init__(self):
        self.ports = set()
        self.threads = Counter()

    def on_update(self, update):
        if update.version == 5:
            self.ports = ports()
            self.threads = Counter(thread.name.split(" ")[0] for thread in threading.enumerate())


@pytest.fixture
def two_cores(monkeypatch):
    """Let a process read and write tensors in two threads."""
    monkeypatch.setattr(transport_module, "cores", lambda: 2)


@parametrize_few("shards", [2, 1], keep=1)
def test_a_run_listens_on_one_port_for_each_server(shards):
    before, look = ports(), Look()
    settings = {"protocol": "asp", "stop": "updates=20", "callbacks": [look]}
    with ranks(3, tiny_job(), {"shards": shards}, **settings) as job:
        job.start_workers()
        job.serve()
        opened = look.ports - before
        assert job.address[1] in opened
        assert len(opened) == shards


def test_threads_of_a_server_do_not_grow_with_its_connections(two_cores):
    protection = security(encrypt=True)
    counts = []
    with serving(protection) as server, transport(protection) as client:
        for workers in (2, 6, 20):
            while len(server.connections) < workers:
                client.connect(server.address).send(CancelTask(1))
                wait_until(lambda: len(server.connections) == len(client.connections))
            counts.append(threading.active_count())
    assert len(set(counts)) == 1
    assert counts[0] - threading.active_count() == 2 * (1 + 2)  # of each side: for messages, and for tensors


def test_a_transport_that_was_closed_connects_again(two_cores):
    protection = security(encrypt=False)
    with serving(protection) as server, transport(protection) as client:
        for _ in range(3):
            for _ in range(3):
                connection = client.connect(server.address)
                connection.send(CancelTask(1))
                connection.close()
            client.close()


@pytest.mark.slow
def test_threads_of_a_run_are_as_many_for_six_workers_as_for_two(two_cores):
    """Each rank is a thread here, and has one for messages and some for tensors, whatever the number of workers."""
    found = []
    for workers in (2, 6):
        look = Look()
        before = Counter(thread.name.split(" ")[0] for thread in threading.enumerate())
        settings = {"protocol": "asp", "stop": "updates=20", "callbacks": [look]}
        with ranks(workers + 1, tiny_job(), **settings) as job:
            job.start_workers()
            job.serve()
        opened = look.threads - before
        assert opened.pop("rank") == workers
        assert opened.pop("paceline-sockets") == 2 * workers + (1 + 2)
        found.append(opened)
    assert found[0] == found[1]
