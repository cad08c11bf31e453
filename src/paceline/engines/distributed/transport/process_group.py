"""Sums and broadcasts among processes, which end for all of them when one of them leaves."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta
from math import inf
from typing import Any, NamedTuple

from torch import Tensor

from paceline.engines.distributed.transport.connection import (
    CONNECT_TIMEOUT,
    FOREVER,
    ConnectionLost,
    dist,
    end_pair,
    expect_nothing,
    gloo,
    saying_when_broken,
)

LOOK_AGAIN_S = 0.0005  # at a GPU
NOTICE_S = 0.05  # until whoever waits sees that the group has been left
PROBE_S = 5.0  # between looks whether everybody is still connected
STUCK_S = 1.0  # after which a thread of gloo's that has not ended never will


class PendingCollective(NamedTuple):
    """What is under way.

    Attributes:
        work: torch's.
        on_gpu: whether NCCL does it.
        at_s: when it was begun, on the monotonic clock.
    """

    work: Any
    on_gpu: bool
    at_s: float


class AbortableGroup:
    """A process group, or two, in which everybody does the same in the same order.

    Of the end of a connection gloo tells nobody who has received or sent a part of a message: its thread waits on, and
    so does whoever takes the group apart. So those who wait here look for themselves, and a group is taken apart in a
    thread of its own.

    Args:
        place: of this process, from 0.
        size: processes.
        threads: of gloo's, which work on what is begun.

    Attributes:
        is_broken: whether nothing can be begun or waited for any more.
        is_over: whether the others may leave, one after another: everything has been begun, and comes to its end.
    """

    def __init__(self, place: int, size: int, threads: int = 1) -> None:
        self._place = place
        self._size = size
        self._threads = threads
        self._others = [other for other in range(size) if other != place]
        self._gloo: Any = None
        self._nccl: Any = None
        self._leaving = threading.Lock()
        self._probed_s = 0.0
        self.is_broken = False
        self.is_over = False

    def connect(self, store: Any, device: Any, timeout: timedelta = CONNECT_TIMEOUT) -> None:
        """Meet the others.

        Args:
            store: where only they are.
            device: of gloo, on the address of this host.
            timeout: of each thing that another process has to do for it.

        Raises:
            RuntimeError: somebody did not come.
            Broken: this process has left meanwhile.
        """
        self._check()
        self._gloo = gloo(store, self._place, self._size, device, timeout=timeout, threads=self._threads)
        if self.is_broken:
            self.break_off()
        self._check()

    def connect_gpus(self, store: Any) -> None:
        """Let NCCL do what is done to vectors on GPUs, of which each process has a different one.

        Raises:
            RuntimeError: it cannot.
        """
        self._nccl = dist.ProcessGroupNCCL(store, self._place, self._size, dist.ProcessGroupNCCL.Options())

    def all_reduce(self, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> PendingCollective:
        """Begin to make of everybody's tensor their sum, or what else the operation makes of them.

        Raises:
            Broken: somebody has left.
        """
        self._check()
        options = dist.AllreduceOptions()
        options.timeout = FOREVER
        options.reduceOp = operation
        on_gpu = self._nccl is not None and tensor.is_cuda
        with saying_when_broken():
            work = (self._nccl if on_gpu else self._gloo).allreduce([tensor], options)
        return PendingCollective(work, on_gpu, time.monotonic())

    def broadcast(self, tensor: Tensor) -> PendingCollective:
        """Begin to make the first process's tensor, which is on no GPU, everybody's.

        Raises:
            Broken: somebody has left.
        """
        self._check()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = FOREVER
        with saying_when_broken():
            return PendingCollective(self._gloo.broadcast([tensor], options), False, time.monotonic())

    def exchange(self, ours: Tensor, timeout: timedelta) -> Tensor:
        """Send each process its row, and return those that came from each, within some time.

        Raises:
            Broken: somebody has left, or is too slow.
        """
        self._check()
        options = dist.AllToAllOptions()
        options.timeout = timeout
        theirs = ours.new_zeros(ours.shape)
        with saying_when_broken():
            self._gloo.alltoall_base(theirs, ours, [], [], options).wait(timeout)
        return theirs

    def wait(self, begun: list[PendingCollective], timeout_s: float = inf) -> bool:
        """Wait until everything that was begun is there; return whether it is.

        Raises:
            Broken: somebody has left.
        """
        deadline_s = time.monotonic() + timeout_s
        return all(self._wait_for(each, deadline_s) for each in begun)

    def give_up(self) -> None:
        """Let nobody wait here any more, and the others hear nothing of it; from any thread."""
        self.is_broken = True

    def break_off(self) -> None:
        """Leave, so that whoever waits here or at another process hears of it at once; from any thread."""
        self.is_broken = True
        with self._leaving:
            if self._nccl is not None:
                with suppress(RuntimeError):
                    self._nccl.abort()
            if self._gloo is not None:
                for other in self._others:
                    end_pair(self._gloo, other)

    def let_go(self) -> None:
        """Take the group apart, when nothing is done any more to what was to be summed."""
        with self._leaving:
            groups = [self._nccl, self._gloo]
            self._nccl = self._gloo = None
        taking_apart = threading.Thread(target=groups.clear, daemon=True)  # where gloo waits for its threads
        taking_apart.start()
        taking_apart.join(STUCK_S)

    def _check(self) -> None:
        if self.is_broken:
            raise ConnectionLost("somebody has left")

    def _wait_for(self, begun: PendingCollective, deadline_s: float) -> bool:
        while not begun.work.is_completed():
            self._check()
            now_s = time.monotonic()
            if now_s > max(begun.at_s, self._probed_s) + PROBE_S:
                self._probe()
                self._probed_s = now_s
            if now_s > deadline_s:
                return False
            _look(begun, min(NOTICE_S, max(0.001, deadline_s - now_s)))
        with saying_when_broken():
            begun.work.wait(FOREVER)  # which it has been: what has gone wrong is told, and a stream waits for NCCL's
        return True

    def _probe(self) -> None:
        """See whether everybody is still connected: gloo refuses to expect something from who is not."""
        with saying_when_broken():
            for other in [] if self.is_over else self._others:
                expect_nothing(self._gloo, other)


def _look(begun: PendingCollective, for_s: float) -> None:
    if begun.on_gpu:
        time.sleep(LOOK_AGAIN_S)  # its wait is one for a GPU that nobody wakes
        return
    with suppress(RuntimeError):  # whatever it is, the work tells it again
        begun.work.wait(timedelta(seconds=for_s))


class CompletionTimer:
    """Notes when the last of some sums was there.

    gloo says so in a thread of its own. NCCL says only that its work is in the queue of the GPU, so of its sums nothing
    is known but when the process had waited for them.

    Args:
        begun: what `Ring.begin_sum` has returned; of nothing the sum is there at once.
    """

    def __init__(self, begun: list[PendingCollective]) -> None:
        self._lock = threading.Lock()
        self._left = len(begun)
        self._last_s = time.monotonic()
        for each in begun:
            if not each.on_gpu:
                each.work.get_future().add_done_callback(self._note)

    def at_s(self, waited_s: float) -> float:
        """Return the moment on the monotonic clock; where it is not known, the one when they had been waited for."""
        with self._lock:
            return waited_s if self._left else min(waited_s, self._last_s)

    def _note(self, future: Any) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._left -= 1
            self._last_s = now_s
