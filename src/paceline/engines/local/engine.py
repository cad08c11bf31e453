"""Runs worker processes on this machine and reports what they do."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import selectors
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from heapq import heappop, heappush
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Self

import torch

from paceline.cluster import LocalCluster, cores
from paceline.engines.base import Engine
from paceline.engines.local import worker as processes
from paceline.engines.local.memory import SharedMemory, SharedVectors
from paceline.engines.local.messages import (
    Abandoned,
    Evaluation,
    Failed,
    Finished,
    Measurement,
    Nudge,
    Ready,
    Work,
)
from paceline.engines.local.parcel import Parcel
from paceline.engines.stale import compensated
from paceline.engines.versions import Versions
from paceline.errors import RunError, UsageError
from paceline.events import (
    Accept,
    Apply,
    Arrival,
    Compute,
    Evaluate,
    Evaluated,
    Event,
    Interrupt,
    Joined,
    Lost,
    Outcome,
    Quit,
    Replace,
    Timer,
    Wake,
)
from paceline.job import Job
from paceline.server import ParameterServer
from paceline.vectors import Layout

NO_MAIN_GUARD = 97  # exit status of a process whose script trains while it is being imported
RESPAWNS_WITHOUT_A_GRADIENT = 3
GRACE_S = 2.0


class _Peer:
    """A process of the run, with the work that it has, and the work that waits until it has abandoned that."""

    def __init__(self, process: ForkServerProcess, connection: Connection) -> None:
        self.process = process
        self.connection = connection
        self.is_ready = False  # built its model, and is not known to be dead
        self.is_replaced = False  # was told to end, for another one to take its place
        self.working: Compute | None = None
        self.waiting: Compute | None = None

    def send(self, message: Work | Evaluation | Nudge | None) -> None:
        """Send, or notice later, when the end of the pipe is read, that the process is gone."""
        with suppress(OSError):
            self.connection.send(message)


class LocalEngine(Engine):
    """One process a worker, and one that evaluates, on memory that they share.

    A worker writes its gradient only between being given work and handing it in; the server reads it only
    between that and giving work again. A version is written before it is handed out, and its place is used
    again only when every process has said that it is done with it.

    Args:
        job: what to train.
        cluster: how many workers, on what, and how slow.
        seed: of the run.
        server: owns the parameters.
        layout: of the model.
    """

    def __init__(self, job: Job, cluster: LocalCluster, seed: int, server: ParameterServer, layout: Layout) -> None:
        super().__init__()
        self._job = job
        self._cluster = cluster
        self._seed = seed
        self._server = server
        self._layout = layout
        n = cluster.n
        # Each worker may hold what it computes on, what it has not yet said to have abandoned, and what a gradient
        # was computed at that the coordinator has yet to hear of.
        self._memory = SharedMemory(layout, workers=n, places=3 * n + 4)
        self._places = iter(range(3 * n + 4))
        self._versions = Versions(self._new_place)
        self._gradients = [self._memory.gradient(layout, worker) for worker in range(n)]
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([processes.__name__])
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, _Peer] = {}
        self._evaluator: _Peer | None = None
        self._respawns = [0] * n
        self._gone_for_good: set[int] = set()
        self._parcel: Parcel | None = None
        self._events: deque[Event] = deque()
        self._read_by: dict[tuple[int, int], int] = {}  # version of a finished gradient, by worker and draw
        self._timers: list[float] = []
        self._first_version = 0
        self._begun = 0.0
        self._threads = torch.get_num_threads()

    def __enter__(self) -> Self:
        """Start every process and wait until all are ready."""
        try:
            self._server.publish(self._versions.publish(self._first_version))
            self._parcel = self._pack()
            for worker in range(self._cluster.n):
                self._workers[worker] = self._start(worker)
            if self._job.eval_data is not None:
                self._evaluator = self._start(self._cluster.n)
            for peer in self._peers():
                self._await_ready(peer)
        except BaseException:
            self._close()
            raise
        super().__enter__()
        self._selector.register(self.signals.reader, selectors.EVENT_READ)
        self._begun = time.monotonic() - self.now
        return self

    def go_on_from(self, version: int, now: float) -> None:
        """Begin at this time with what the server holds as this version."""
        self._first_version = version
        self.now = now

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """End every process."""
        torch.set_num_threads(self._threads)
        self._close()
        super().__exit__(kind, error, where)

    # --- commands -----------------------------------------------------------------------------------------

    def compute(self, command: Compute) -> None:
        """Send the worker to the version's place."""
        self._server.let_go()  # of its gradient too: it will write the next one there
        peer = self._workers[command.worker]
        if not peer.is_ready:
            return  # its loss is among the events that the coordinator has yet to hear of
        self._versions.hold(command.version)
        if peer.working is None:
            self._send(peer, command)
        else:
            peer.waiting = command  # a worker that is slow to notice interrupts must not pile up versions

    def interrupt(self, command: Interrupt) -> None:
        """Raise the worker's flag, which it looks at between layers, and wake it if it sleeps."""
        peer = self._workers[command.worker]
        if not peer.is_ready:
            return
        if peer.waiting is not None:
            self._versions.release(peer.waiting.version)
            peer.waiting = None
        else:
            self._memory.interrupt(command.worker, command.draw)
            peer.send(Nudge())

    def replace(self, command: Replace) -> None:
        """End a worker's process, if another one will start in its place."""
        peer = self._workers[command.worker]
        if self._cluster.respawn and peer.is_ready:
            peer.is_replaced = True
            peer.process.kill()

    def accept(self, command: Accept) -> None:
        """Take the gradient where the worker left it."""
        self._server.take(self._gradients[command.worker], command.samples, command.step_scale)

    def apply(self, command: Apply) -> None:
        """Make the update and publish it in a place that nobody reads."""
        self._use_idle_cores()
        step = self._server.apply(command)
        self._server.publish(self._versions.publish(command.version))
        self.now = self._elapsed_s()
        self.tell_step(command, step)

    def evaluate(self, command: Evaluate) -> None:
        """Send the version to the process that evaluates."""
        assert self._evaluator is not None
        version = self._versions.hold(command.version)
        assert isinstance(version, SharedVectors)
        self._evaluator.send(Evaluation(command.version, version.place))

    def wake(self, command: Wake) -> None:
        """Send a timer at that moment."""
        heappush(self._timers, command.at_s)

    # --- events -------------------------------------------------------------------------------------------

    def next_event(self) -> Event:
        """Wait for a process, a timer or a signal."""
        while not self._events:
            self._wait()
        event = self._events.popleft()
        self.now = self._elapsed_s()  # one after another, also those that came while an update was made
        event = event._replace(now=self.now)
        return self._compensated(event) if isinstance(event, Arrival) else event

    def _compensated(self, arrival: Arrival) -> Arrival:
        version = self._read_by.pop((arrival.worker, arrival.draw), None)
        if version is None:
            return arrival
        then, gradient = self._versions[version], self._gradients[arrival.worker]
        arrival = compensated(arrival, self._coordinator, self._server, version, then, gradient)
        self._versions.release(version)
        return arrival

    def _wait(self) -> None:
        ready = self._selector.select(timeout=0)
        is_due = bool(self._timers) and self._timers[0] <= self._elapsed_s()
        if not ready and not is_due:
            self._use_idle_cores()
            self._server.add()  # while there is nothing else to do
            ready = self._selector.select(max(0.0, self._timers[0] - self._elapsed_s()) if self._timers else None)
        for key, _ in ready:
            if key.fileobj == self.signals.reader:
                self._events.append(self.quit_by_signal())
            else:
                self._read(key.data)
        if is_due:  # after what was heard before: nobody is silent while the server is busy
            heappop(self._timers)
            self._events.append(Timer(self._elapsed_s()))

    def _send(self, peer: _Peer, command: Compute) -> None:
        version = self._versions[command.version]
        assert isinstance(version, SharedVectors)
        peer.working = command
        peer.send(Work(command.draw, version.place, command.minibatch, self._elapsed_s(), time.monotonic()))

    def _read(self, worker: int) -> None:
        peer = self._evaluator if worker == self._cluster.n else self._workers[worker]
        assert peer is not None
        try:
            reply = peer.connection.recv()
        except (EOFError, OSError):
            self._gone(worker, peer)
            return
        now = self._elapsed_s()
        match reply:
            case Finished():
                self._respawns[worker] = 0
                self._events.append(self._arrival(now, worker, reply))
                if peer.waiting is None:  # else it has crossed its interrupt, and is not wanted
                    self._keep_read(worker, peer)
                self._next(peer)
            case Abandoned():
                self._next(peer)
            case Ready():
                peer.is_ready = True
                self._events.append(Joined(now, worker))
            case Measurement():
                self._versions.release(reply.version)
                self._events.append(Evaluated(now, reply.version, reply.metrics))
            case Failed():
                if reply.is_usage:
                    raise UsageError(reply.message)
                if worker == self._cluster.n:
                    print(reply.details, file=sys.stderr)
                    raise RunError(f"the evaluation failed: {reply.message}")
                print(f"worker {worker} failed:\n{reply.details}", file=sys.stderr)

    def _arrival(self, now: float, worker: int, reply: Finished) -> Arrival:
        measured = reply.measured
        return Arrival(
            now=now,
            worker=worker,
            draw=reply.draw,
            loss=measured.loss,
            samples=measured.samples,
            squared_norm=measured.squared_norm,
            finite=measured.finite,
            pull_s=reply.pull_s,
            compute_s=measured.compute_s,
            push_s=now + self._begun - reply.sent_s,  # not beyond the moment of the arrival
            variance=measured.variance,
        )

    def _gone(self, worker: int, peer: _Peer) -> None:
        reason = self._bury(peer)
        peer.is_ready = False
        if worker == self._cluster.n:
            raise RunError(f"the process that evaluates ended: {reason}")
        for command in (peer.working, peer.waiting):
            if command is not None:
                self._versions.release(command.version)
        peer.working = peer.waiting = None
        self._events.append(Lost(self._elapsed_s(), worker, reason))
        if self._cluster.respawn and self._respawns[worker] < RESPAWNS_WITHOUT_A_GRADIENT:
            self._respawns[worker] += 1
            self._workers[worker] = self._start(worker)
            return
        self._gone_for_good.add(worker)
        if len(self._gone_for_good) == self._cluster.n:
            self._events.append(Quit(self._elapsed_s(), Outcome.NO_WORKERS, "every worker process is gone"))

    def _keep_read(self, worker: int, peer: _Peer) -> None:
        """Hold the version of a finished gradient until the coordinator has heard of it."""
        assert peer.working is not None
        self._versions.hold(peer.working.version)
        self._read_by[worker, peer.working.draw] = peer.working.version

    def _next(self, peer: _Peer) -> None:
        """Release the version that the worker has left behind, and send it what has waited for that."""
        assert peer.working is not None
        self._versions.release(peer.working.version)
        waiting, peer.working, peer.waiting = peer.waiting, None, None
        if waiting is not None:
            self._send(peer, waiting)

    def _use_idle_cores(self) -> None:
        """Let the server compute on the cores that no worker uses: threads on a busy core only wait for each other."""
        busy = sum(peer.working is not None for peer in self._workers.values()) * self._cluster.worker_threads
        torch.set_num_threads(max(1, cores() - busy))

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begun

    # --- processes ----------------------------------------------------------------------------------------

    def _peers(self) -> list[_Peer]:
        return [*self._workers.values(), *([self._evaluator] if self._evaluator else [])]

    def _new_place(self) -> SharedVectors:
        return self._memory.version(self._layout, next(self._places))

    def _pack(self) -> Parcel:
        try:
            return Parcel(self._job)
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            raise UsageError(
                f"job {self._job.name} cannot be sent to worker processes ({error}); define its functions and "
                "classes at the top of a module, and use functools.partial instead of lambda"
            ) from error

    def _start(self, worker: int) -> _Peer:
        ours, theirs = self._context.Pipe()
        target = processes.evaluate if worker == self._cluster.n else processes.work
        assert self._parcel is not None
        assignment = processes.Assignment(self._parcel, self._cluster, self._seed, worker, self._memory, theirs)
        process = self._context.Process(target=target, args=(assignment,), daemon=True)
        process.start()
        theirs.close()
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return _Peer(process, ours)

    def _await_ready(self, peer: _Peer) -> None:
        try:
            reply = peer.connection.recv()
        except (EOFError, OSError):
            reason = self._bury(peer)
            if peer.process.exitcode == NO_MAIN_GUARD:
                raise UsageError(
                    "this script trains while it is imported, and every worker process imports it; put the "
                    "call under if __name__ == '__main__':"
                ) from None
            raise RunError(f"a worker process ended while it started: {reason}") from None
        if isinstance(reply, Failed):
            if reply.is_usage:
                raise UsageError(reply.message)
            print(reply.details, file=sys.stderr)
            raise RunError(f"a worker process failed while it started: {reply.message}")
        peer.is_ready = True

    def _bury(self, peer: _Peer) -> str:
        """Take the remains of a process away and say how it ended."""
        self._selector.unregister(peer.connection)
        peer.connection.close()
        peer.process.join(GRACE_S)
        code = peer.process.exitcode
        if peer.is_replaced:
            return "replaced by another one"
        if code is None:
            peer.process.kill()
            return "its pipe closed"
        if code < 0:
            hint = ", out of memory or kill -9" if -code == signal.SIGKILL else ""
            return f"killed by {signal.Signals(-code).name}{hint}"
        return f"ended with status {code}"

    def _close(self) -> None:
        for worker, peer in self._workers.items():
            self._memory.interrupt(worker, sys.maxsize)
            peer.send(None)
        if self._evaluator is not None:
            self._evaluator.process.kill()
        deadline = time.monotonic() + GRACE_S
        for peer in self._peers():
            peer.process.join(max(0.0, deadline - time.monotonic()))
            if peer.process.is_alive():
                peer.process.kill()
                peer.process.join()
            peer.connection.close()
        self._selector.close()
        self._memory.close()
        if self._parcel is not None:
            self._parcel.close()


def refuse_while_importing() -> None:
    """End this process if it is a worker that is only importing the user's script."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(NO_MAIN_GUARD)
