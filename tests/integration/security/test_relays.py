"""Relays between rank 0 and a worker, and a store of torchrun that an attacker writes."""

import socket
import struct
import threading
from contextlib import contextmanager, suppress

import pytest
from torch import distributed as dist

import paceline as pl
from attackers import LIMIT_S, relaying, security, serving
from end_when import EndWhen
from paceline.core.records import GradientArrived
from paceline.engines.distributed.rendezvous import rendezvous
from paceline.worker.torch_utils import build_model
from ranks import free_port, lost, used_by
from selections import parametrize_few
from tcp_threads import ranks
from tiny_jobs import tiny_job

NAME = "a job that nobody may read of"
SETTINGS = {"protocol": "asp", "stop": "updates=20", "seed": 1}


def secrets_of(end):
    """Return bytes of a run that a relay must not see: of parameters, losses, gradients' norms, and names."""
    initial = [each.detach().numpy().tobytes() for each in build_model(tiny_job(), 1).parameters()]
    final = [each.numpy().tobytes() for each in end.parameters.values()]
    arrived = end.of(GradientArrived)
    numbers = [struct.pack("!d", each) for record in arrived for each in (record.loss, record.squared_norm) if each]
    return {
        "parameters": [each[:32] for each in [*initial, *final]],
        "losses": numbers,
        "names": [NAME.encode(), b"batch_size", b"Hello", b"RemoteTaskDone", b"cross_entropy"],
    }


def found(secrets, content):
    """Return the kinds of secrets of which something is in the content."""
    return [kind for kind, values in secrets.items() if any(value in content for value in values)]


@parametrize_few("encrypt", [True, False], ids=["TLS", "plain"], keep=1)
def test_a_relay_reads_nothing_of_the_job(encrypt):
    with ranks(3, tiny_job(name=NAME), {"encrypt": encrypt}, **SETTINGS) as job, relaying(job.address) as relay:
        job.relays = {1: relay.address[1], 2: relay.address[1]}
        job.start_workers()
        end = job.serve()
    assert end.stopped_by == "updates"
    secrets = secrets_of(end)
    assert all(secrets.values())
    seen = b"".join(map(bytes, relay.seen))
    assert len(seen) > 10_000
    assert found(secrets, seen) == ([] if encrypt else ["parameters", "losses", "names"])


def test_a_gradient_that_a_relay_changes_is_never_accepted():
    """The relay inverts one bit of what the worker sends, from the first gradient on."""
    passed = 0

    def change(content):
        nonlocal passed
        passed += len(content)
        return content if passed < 8000 else bytes([*content[:-1], content[-1] ^ 1])

    seen = EndWhen(lambda seen: seen.lost and seen.updates >= 20)
    settings = {**SETTINGS, "stop": "seconds=20", "callbacks": [seen]}
    with ranks(3, tiny_job(), **settings) as job, relaying(job.address, change) as relay:
        job.relays = {1: relay.address[1]}
        job.start_workers()
        end = job.serve()
        with pytest.raises(pl.RunError, match="rank 0 is gone"):
            job.end(1)
    assert passed >= 8000
    [(worker, reason)] = lost(end)
    assert worker == 0
    assert "bad record mac" in reason.lower().replace("_", " ")
    assert used_by(end, 1) >= 10


# --- torchrun's store, which every process can write -----------------------------------------------------------------


@contextmanager
def torchruns_store(job):
    """Yield the store of torchrun's agents, at which all ranks of a job look for rank 0."""
    store = dist.TCPStore("127.0.0.1", free_port(), None, True, wait_for_workers=False)
    job.variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    yield store


class Trap:
    """Attacker to whom a worker is led: it records what comes, and answers with something.

    Attributes:
        seen: bytes that have come.
        count: number of connections.
    """

    def __init__(self, answer):
        self._answer = answer
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._sock.getsockname()[1]}"
        self.seen = b""
        self.has_come = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        with suppress(OSError):
            while True:
                sock, _ = self._sock.accept()
                with sock:
                    sock.settimeout(LIMIT_S)
                    self.seen += sock.recv(1 << 16)
                    sock.sendall(self._answer)
                    self.has_come.set()

    def close(self):
        self._sock.close()


@parametrize_few("encrypt", [True, False], ids=["TLS", "plain"], keep=1)
def test_a_worker_that_is_led_away_shows_nothing_and_finds_rank_0_later(encrypt, caplog):
    with ranks(2, tiny_job(name=NAME), {"encrypt": encrypt}, **SETTINGS) as job, torchruns_store(job) as store:
        trap = Trap(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(64))
        store.set(rendezvous.ADDRESS, trap.address)
        job.start(1)
        assert trap.has_come.wait(LIMIT_S)
        end = job.serve()  # rank 0 writes its own address
        assert job.end(1).stopped_by == "updates"
        trap.close()
    assert end.stopped_by == "updates"
    assert f"rank 0 is not there yet: {trap.address} is not of this job" in caplog.text
    assert found(secrets_of(end), trap.seen) == []
    assert len(trap.seen) < 10_000


def test_a_worker_ends_with_the_address_of_an_attacker_who_stays(monkeypatch):
    monkeypatch.setattr(rendezvous, "OTHER_SERVER_S", 0.3)
    guessed = security(encrypt=True, token="a guess")
    with ranks(2, tiny_job(), **SETTINGS) as job, torchruns_store(job) as store, serving(guessed) as impostor:
        address = "{}:{}".format(*impostor.address)
        store.set(rendezvous.ADDRESS, address)
        job.start(1)
        with pytest.raises(pl.UsageError, match=f"{address} is not of this job"):
            job.end(1)
        assert not impostor.connections


@parametrize_few("value", [b"\xff\xfe", b"127.0.0.1:99999", b"a\0b:80"], keep=1)
def test_nonsense_in_the_store_ends_no_worker(value):
    with ranks(2, tiny_job(), **SETTINGS) as job, torchruns_store(job) as store:
        store.set(rendezvous.ADDRESS, value)
        looked = threading.Event()
        address = rendezvous._AddressLookup.address

        def look(lookup):
            found = address(lookup)
            looked.set()
            if lookup._cluster.ranks.rank == 1:
                job.processes[1].end_start()
            return found

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(rendezvous._AddressLookup, "address", look)
            job.start(1)
            assert looked.wait(LIMIT_S)
            assert job.serve().stopped_by == "updates"
            assert job.end(1).stopped_by == "updates"
