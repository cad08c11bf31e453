"""Process of the server beside rank 0, or of its standby: what rank 0 holds of it, and what it does.

It holds none of the data. Of the user's code it runs an optimizer that is not of torch, callbacks, and controllers
and compensators alone. Rank 0 writes requests of one byte to its standard input, and reads the replies and the end of
the run from its standard output. The process ends when its standard input does, so with rank 0.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import IO

from torch import Tensor

from paceline.clusters.launch_env import LaunchEnv
from paceline.clusters.torchrun import Torchrun
from paceline.core.events import Outcome
from paceline.core.stop import Stop
from paceline.engines.distributed import End, FollowedRunEnded, Host, WholeProcess, failed_end
from paceline.engines.signals import Signals, holding_sigterm, ignoring_ctrl_c
from paceline.errors import PacelineError, RunError, UsageError
from paceline.run.plan_json import plan_of
from paceline.run.session import Session
from paceline.run.train import run_session
from paceline.tensors import tensor_file
from paceline.user_loop.run_end import end_of
from paceline.user_loop.server.description import OwnCode, SentRun, make_job, recv_run, send_run
from paceline.user_loop.server.frames import frame, from_json, read_frame, to_json, write_frame
from paceline.user_loop.server.optimizer_state import state_reader, with_state
from paceline.user_loop.worker.optimizer_copy import copies_of_pickle
from paceline.utils.rank_logger import RankLogger
from paceline.worker.torch_utils import leave_out_compiler

LOG = RankLogger(__name__)
STOP_TIMEOUT_S = 20.0
# -P: a file of the working directory, as queue.py, hides no module of Python.
COMMAND = [sys.executable, "-P", "-m", "paceline.user_loop.server"]
STATE, LAST_STATE, END_RUN, END = b"s", b"l", b"r", b"e"  # requests of rank 0; a frame with the reason follows END_RUN
OF_STATE, OF_END = b"s", b"e"  # first frames of a reply, before its content


class ServerProcess:
    """Server that rank 0 has started.

    Args:
        sent: run of the server.

    Attributes:
        end: end of the run, None before it.
    """

    def __init__(self, sent: SentRun) -> None:
        with ignoring_ctrl_c():  # also in the process, which rank 0 asks to end its run
            self._process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.end: End | None = None
        self._requests = self._process.stdin
        self._replies = self._process.stdout
        assert self._requests is not None
        send_run(self._requests, sent)

    def check(self, timeout_s: float = 0.0) -> None:
        """Raise the error of the process if it fails within a time; else record the end of the run if it has come.

        Raises:
            UsageError: the run has failed, and the user has to change something.
            RunError: the run has failed, or the process was killed.
        """
        assert self._replies is not None
        if self.end is None:
            ready = select.poll()
            ready.register(self._replies)
            if ready.poll(timeout_s * 1000):
                self._read()
        if self.end is not None and self.end.has_failed:
            raise (UsageError if self.end.is_usage else RunError)(f"the coordinator: {self.end.reason}")

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
        self._close()
        return state

    def end_run(self, outcome: Outcome, reason: str) -> None:
        """Ask the server to end the run, unless it has ended."""
        self._request(END_RUN + frame(to_json((outcome, reason))))

    def stop(self, outcome: Outcome, reason: str) -> None:
        """End the run, unless it has ended, and the process."""
        self.end_run(outcome, reason)
        self._close()

    def abandon(self) -> None:
        """End the process at once, as the death of rank 0 does, so that its standby goes on with the run."""
        self._process.kill()
        self._process.wait()

    def _close(self) -> None:
        """End the process, and kill it after a timeout."""
        assert self._requests is not None
        self._request(END)  # a process that was forked meanwhile has the pipe open too
        with suppress(BrokenPipeError):
            self._requests.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _reply(self, request: bytes) -> dict[str, Tensor]:
        self._request(request)
        while (state := self._read()) is None:
            self.check()
        return state

    def _request(self, request: bytes) -> None:
        assert self._requests is not None
        with suppress(BrokenPipeError):  # the replies say why
            os.write(self._requests.fileno(), request)  # not buffered, so that a signal handler may do it

    def _read(self) -> dict[str, Tensor] | None:
        """Read a reply, and return the state in it; None if it is the end of the run, which is recorded."""
        assert self._replies is not None
        try:
            kind, content = read_frame(self._replies), read_frame(self._replies)
        except EOFError:
            raise RunError(f"the coordinator of the run ended with status {self._process.wait()}") from None
        if kind == OF_STATE:
            return tensor_file.from_bytes(content)
        self.end = from_json(content, End)
        return None


class RequestedEnd:
    """End of the run that rank 0 asks for, perhaps before the run begins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._signals: Signals | None = None
        self._end: tuple[Outcome, str] | None = None

    def make_signals(self, notice: str | None) -> Signals:
        """Return the record of the signals that this process gets, with the end that rank 0 has asked for."""
        with self._lock:
            self._signals = Signals(notice)
            if self._end is not None:
                self._signals.end_run(*self._end)
            return self._signals

    def end_run(self, outcome: Outcome, reason: str) -> None:
        """End the run from another thread."""
        with self._lock:
            self._end = self._end or (outcome, reason)
            if self._signals is not None:
                self._signals.end_run(outcome, reason)


class Requests(threading.Thread):
    """Thread that answers the requests of rank 0 until its end.

    Args:
        requests: standard input of the process.
        replies: pipe to rank 0.
        end_run: ends the run, given its outcome and the reason.
        state: returns the state of the user's optimizer.
        has_successor: whether another process goes on with the run when this one ends.

    Attributes:
        state: the same.
    """

    def __init__(
        self,
        requests: IO[bytes],
        replies: IO[bytes],
        end_run: Callable[[Outcome, str], None],
        state: Callable[[], dict[str, Tensor]],
        *,
        has_successor: bool,
    ) -> None:
        super().__init__(name="paceline-requests", daemon=True)
        self._has_successor = has_successor
        self.state = state
        self._requests = requests
        self._replies = replies
        self._end_run = end_run
        self._lock = threading.Lock()  # two threads write replies
        self._has_ended = False  # the run
        self._is_waiting = False  # rank 0, for the last state

    def run(self) -> None:
        """Answer requests."""
        while (request := self._requests.read(1)) not in (b"", END):
            if request == END_RUN:
                outcome, reason = from_json(read_frame(self._requests), tuple[Outcome, str])
                self._end_run(outcome, reason)
            else:
                with self._lock:
                    self._on_request(request)
        if request != END and self._has_successor:
            os._exit(1)
        if request != END:
            self._end_run(Outcome.FAILED, "rank 0 is gone: its process ended within the run")

    def on_end(self, end: End) -> None:
        """Report the end of the run, and answer the request for the last state, now or when it comes."""
        with self._lock:
            self._has_ended = True
            self._write(OF_END, to_json(end))
            if self._is_waiting:
                self._write(OF_STATE, tensor_file.to_bytes(self.state()))

    def _on_request(self, request: bytes) -> None:
        if request == STATE or self._has_ended:
            self._write(OF_STATE, tensor_file.to_bytes(self.state()))
        else:
            self._is_waiting = True

    def _write(self, kind: bytes, content: bytes) -> None:
        with suppress(BrokenPipeError):  # rank 0 has ended, and the end of the requests follows
            write_frame(self._replies, kind)
            write_frame(self._replies, content)


@holding_sigterm(acts_at_end=False)
def main(stream: IO[bytes], replies: IO[bytes]) -> int:
    """Serve the run that is described in a stream; return the exit status."""
    leave_out_compiler()
    sent = recv_run(stream)
    requested = RequestedEnd()
    has_successor = bool(sent.run.cluster["standby"])  # that of the standby is the end of its rank
    requests = Requests(stream, replies, requested.end_run, lambda: sent.first.state, has_successor=has_successor)
    requests.start()
    is_standby = sent.run.ranks["sidecar"] is not None
    try:
        host = Host(lifecycle=WholeProcess(requested.make_signals))
        end = serve(sent, host, requests)
    except FollowedRunEnded as ended:
        return int(ended.code or 0)
    except Exception as error:
        if not isinstance(error, PacelineError):
            LOG.exception("the server of the run has failed")
        requests.on_end(failed_end(error))
        return 1
    if not is_standby:  # for whose end its rank waits
        requests.on_end(end)
        requests.join()
    return 0


def serve(sent: SentRun, host: Host, requests: Requests) -> End:
    """Serve a run to its end.

    Raises:
        SystemExit: this is a standby, and the run has ended without it.
    """
    run, first, _, own = sent
    plan, callbacks = OwnCode.of(own)
    ranks = LaunchEnv(**{**run.ranks, "master": tuple(run.ranks["master"])})
    job = make_job(run.training, first.model)
    if run.training.groups:  # else the optimizer is on each rank
        make_optimizer = copies_of_pickle(sent.optimizer) if sent.optimizer else job.optimizer
        host = replace(host, make_optimizer=with_state(make_optimizer, first.state))
    cluster = Torchrun(**run.cluster, ranks=ranks)
    config = run.options.config(job, plan or plan_of(run.plan), cluster, Stop.parse(run.stop))
    callbacks = (*callbacks, *run.options.callbacks())
    if cluster.is_standby:
        result = run.options.stand_by(config, host, callbacks)
        return End(result.stopped_by, result.reason, result.time_s)
    session, folder, resumption, policy = run.options.open_session(config, host)
    if config.plan.local_steps is None:  # else the user's optimizer is on each rank
        requests.state = state_reader(session.server)
        if cluster.shards > 1:
            _share_state(session)
            session.shards.gathers_optimizer = True
    return end_of(session, run_session(session, folder, resumption, callbacks, policy, has_loops=True))


def _share_state(session: Session) -> None:
    """Let the servers of the other shards begin with the state of the first one, which has all of it before a run."""
    server = session.server
    tensors = {name: each.detach() for name, each in [*server.model.named_parameters(), *server.model.named_buffers()]}
    session.shards.load({**server.shard_state(), "model": tensors, "optimizer": server.optimizer.state_dict()})
