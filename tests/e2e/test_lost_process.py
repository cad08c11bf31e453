"""Processes that are killed or stopped: the seconds until the other side of their connection notices."""

import os
import queue
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager

import pytest
import torch

from machine_speed import scaled
from paceline.engines.distributed.transport.task_messages import UpdateDone
from paceline.engines.distributed.transport.tls import TLSSecurity, derive_identity
from paceline.engines.distributed.transport.transport import Transport

LIMIT_S = scaled(60)
HEARTBEAT_TIMEOUT_S = 2.0
NBYTES = 1 << 28  # takes longer than the test
PEER = """
import sys, threading, torch
from paceline.engines.distributed.transport.task_messages import UpdateDone
from paceline.engines.distributed.transport.tls import TLSSecurity, derive_identity
from paceline.engines.distributed.transport.transport import Transport
port, timeout_s, nbytes = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
connection = Transport(lambda: TLSSecurity(derive_identity("tests")), "1", timeout_s).connect(("127.0.0.1", port))
connection.send(UpdateDone(1))
if nbytes:
    connection.send(UpdateDone(2), [(0, torch.zeros(nbytes, dtype=torch.uint8))])
threading.Event().wait()
"""


class Server:
    """Side of this process, and what has arrived there.

    Attributes:
        ends: times and reasons of the end.
    """

    def __init__(self, connection):
        self.connection = connection
        self.messages = queue.SimpleQueue()
        self.ends = queue.SimpleQueue()
        connection.listen(lambda message, at_s, contents_s: self.messages.put(message), self.on_end)

    def on_end(self, reason):
        self.ends.put((time.monotonic(), reason))


@contextmanager
def peer(state):
    """Yield a process that is idle or sends a bucket, and this side of its connection."""
    accepted = queue.SimpleQueue()
    with closing(Transport(lambda: TLSSecurity(derive_identity("tests")), "1", HEARTBEAT_TIMEOUT_S)) as transport:
        listener = transport.listen("127.0.0.1", 0, accepted.put, accepted.put)
        nbytes = NBYTES if state == "sending" else 0
        command = [sys.executable, "-c", PEER, str(listener.address[1]), str(HEARTBEAT_TIMEOUT_S), str(nbytes)]
        with subprocess.Popen(command) as process:
            try:
                server = Server(accepted.get(timeout=LIMIT_S))
                assert server.messages.get(timeout=LIMIT_S) == UpdateDone(1)
                yield process, server
            finally:
                process.kill()
                server.connection.close()
                listener.close()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("state", ["idle", "sending", "sending into memory"])
def test_a_killed_process_is_noticed_within_half_a_second(state):
    with peer(state.split()[0]) as (process, server):
        if state == "sending into memory":
            server.connection.post_buckets([torch.zeros(NBYTES, dtype=torch.uint8)])
        process.kill()
        process.wait(LIMIT_S)  # on a busy machine it ends late
        dead_s = time.monotonic()
        ended_s, reason = server.ends.get(timeout=LIMIT_S)
        assert ended_s - dead_s < 0.5
        assert "closed" in reason or "reset" in reason
        assert server.messages.empty()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("state", ["idle", "sending"])
def test_a_stopped_process_is_noticed_within_the_timeout_and_a_second(state):
    with peer(state) as (process, server):
        stopped_s = time.monotonic()
        os.kill(process.pid, signal.SIGSTOP)
        ended_s, reason = server.ends.get(timeout=LIMIT_S)
        assert HEARTBEAT_TIMEOUT_S - 0.5 < ended_s - stopped_s < HEARTBEAT_TIMEOUT_S + 1
        assert reason == f"silent for {HEARTBEAT_TIMEOUT_S:g} s"
