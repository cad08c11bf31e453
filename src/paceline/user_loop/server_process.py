"""Process of the server beside rank 0: `python -m paceline.user_loop.server_process` reads its run from standard input.

It runs no code of the user and holds none of the data. Rank 0 writes requests of one byte to its standard input, and
reads the replies from its standard output. The process ends when its standard input does, so with rank 0.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from torch import Tensor

from paceline.clusters.launch_env import LaunchEnv
from paceline.clusters.torchrun import Torchrun
from paceline.core.stop import Stop
from paceline.engines.distributed import THIS_PROCESS
from paceline.engines.signals import holding_sigterm
from paceline.errors import PacelineError, RunError
from paceline.run.plan_json import plan_of
from paceline.run.train import run_session
from paceline.user_loop.description import FirstTensors, ServerRun, make_job, recv_run, send_run
from paceline.user_loop.frames import read_tensors, write_tensors
from paceline.user_loop.optimizer_state import load_named_state, state_reader
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)
STOP_TIMEOUT_S = 20.0
STATE, LAST_STATE, INTERRUPT, END = b"s", b"l", b"i", b"e"  # requests of rank 0


class ServerProcess:
    """Server that rank 0 has started.

    Args:
        run: run of the server.
        first: tensors with which it begins.
    """

    def __init__(self, run: ServerRun, first: FirstTensors) -> None:
        # -P: a file of the working directory, as queue.py, hides no module of Python.
        command = [sys.executable, "-P", "-m", __name__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._requests, self._replies = self._process.stdin, self._process.stdout
        assert self._requests is not None
        send_run(self._requests, run, first)

    def check(self, timeout_s: float = 0.0) -> None:
        """Raise a RunError if the process fails within a time."""
        with suppress(subprocess.TimeoutExpired):
            if self._process.wait(timeout_s):
                raise self._ended()

    def state(self) -> dict[str, Tensor]:
        """Return the state of the optimizer, as of `named_state`.

        Raises:
            RunError: the process has ended.
        """
        return self._reply(STATE)

    def wait(self) -> dict[str, Tensor]:
        """Wait until the run has ended, and return the last state of the optimizer; the process ends.

        Raises:
            RunError: the process has failed.
        """
        state = self._reply(LAST_STATE)
        self.stop()
        return state

    def interrupt(self) -> None:
        """Ask the server to end the run."""
        self._request(INTERRUPT)

    def stop(self) -> None:
        """Interrupt the run, end the process, and kill it after a timeout."""
        assert self._requests is not None
        with suppress(BrokenPipeError):  # END, since a process that was forked meanwhile has the pipe open too
            os.write(self._requests.fileno(), END)
            self._requests.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _reply(self, request: bytes) -> dict[str, Tensor]:
        self._request(request)
        assert self._replies is not None
        try:
            return read_tensors(self._replies)
        except EOFError:
            raise self._ended() from None

    def _request(self, request: bytes) -> None:
        assert self._requests is not None
        try:
            os.write(self._requests.fileno(), request)  # not buffered, so that a signal handler may do it
        except BrokenPipeError:
            raise self._ended() from None

    def _ended(self) -> RunError:
        status = self._process.wait()
        return RunError(f"the server of the run ended with status {status}: see what it has written above")


class Requests(threading.Thread):
    """Thread that answers the requests of rank 0 until its end.

    Args:
        requests: standard input of the process.
        replies: pipe to rank 0.
        state: returns the state of the user's optimizer.
    """

    def __init__(self, requests: IO[bytes], replies: IO[bytes], state: Callable[[], dict[str, Tensor]]) -> None:
        super().__init__(name="paceline-requests", daemon=True)
        self._requests = requests
        self._replies = replies
        self._state = state
        self._lock = threading.Lock()
        self._has_ended = False  # the run
        self._is_waiting = False  # rank 0, for the last state

    def run(self) -> None:
        """Answer requests."""
        while (request := self._requests.read(1)) not in (b"", END):
            with self._lock:
                self._on_request(request)
        with self._lock:
            self._on_request(INTERRUPT)

    def end_run(self) -> None:
        """Answer the request for the last state, now or when it comes."""
        with self._lock:
            self._has_ended = True
            if self._is_waiting:
                self._reply()

    def _on_request(self, request: bytes) -> None:
        if request == STATE or (request == LAST_STATE and self._has_ended):
            self._reply()
        elif request == LAST_STATE:
            self._is_waiting = True
        elif not self._has_ended:
            os.kill(os.getpid(), signal.SIGTERM)

    def _reply(self) -> None:
        with suppress(BrokenPipeError):  # rank 0 has ended, and the end of the requests follows
            write_tensors(self._replies, self._state())


@holding_sigterm(acts_at_end=False)
def main(stream: IO[bytes], replies: IO[bytes]) -> int:
    """Serve the run that is described in a stream; return the exit status."""
    run, first = recv_run(stream)
    ranks = LaunchEnv(**{**run.ranks, "master": tuple(run.ranks["master"])})
    job = make_job(run.training, first.model)
    cluster = Torchrun(**run.cluster, ranks=ranks)
    config = run.options.config(job, plan_of(run.plan), cluster, Stop.parse(run.stop), THIS_PROCESS)
    try:
        session, folder, resumption, policy = run.options.open_session(config)
        load_named_state(session.server.optimizer, session.model, first.state)
        state = state_reader(session.server)
        if config.plan.local_steps is not None:
            state = dict  # the user's optimizer is on each rank
        requests = Requests(stream, replies, state)
        requests.start()
        run_session(session, folder, resumption, run.options.callbacks(), policy, has_loops=True)
    except PacelineError as error:
        LOG.error("the server: %s", error)
        return 1
    requests.end_run()
    requests.join()
    return 0


def _pipe_to_rank_0() -> IO[bytes]:
    """Return the standard output, to which nothing else is written from now on."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return replies


if __name__ == "__main__":
    status = main(sys.stdin.buffer, _pipe_to_rank_0())
    sys.stderr.flush()
    os._exit(status)  # the thread that waits for rank 0 holds the lock of standard input
