"""Abortable collectives: sums and broadcasts that end for all processes when one of them leaves."""

from __future__ import annotations

import hmac
import threading
import time
from contextlib import suppress
from datetime import timedelta
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.gloo import (
    CONNECT_TIMEOUT_S,
    NO_TIMEOUT,
    disconnect_pair,
    dist,
    post_probe,
    raising_connection_lost,
)
from paceline.engines.distributed.transport.group_store import GroupStore
from paceline.engines.distributed.transport.transport import Transport

GPU_POLL_S = 0.0005
ABORT_POLL_S = 0.05  # longest time until a waiting thread notices that the group was aborted
PROBE_INTERVAL_S = 5.0  # between checks that all processes are still connected
PROOF_BYTES = 32
PROOF_TIMEOUTS = 10  # other processes may still be connecting
CLOSE_TIMEOUT_S = 1.0  # a gloo thread that has not ended by then never will


class PendingCollective(NamedTuple):
    """Collective operation in progress.

    Attributes:
        work: handle of torch.
        on_gpu: whether NCCL carries it out.
        begun_s: start on the monotonic clock, in seconds.
    """

    work: Any
    on_gpu: bool
    begun_s: float


class AbortableGroup:
    """Process group, on gloo and perhaps NCCL too, in which all processes call the same collectives in the same order.

    gloo does not report the end of a connection to a process that has received or sent part of a message: its thread
    waits on, and so does the destruction of the group. So a process that waits here also polls the connections, and
    a group is destroyed in a thread of its own.

    Args:
        rank: rank of this process, from 0.
        size: number of processes.
        threads: gloo threads that carry out the operations.

    Attributes:
        is_aborted: whether no operation can be started or awaited any more.
        is_complete: whether all operations have been started, so that other processes may leave.
    """

    def __init__(self, rank: int, size: int, threads: int = 1) -> None:
        self._rank = rank
        self._size = size
        self._threads = threads
        self._peers = [peer for peer in range(size) if peer != rank]
        self._store: GroupStore | None = None
        self._name = ""
        self._gloo: Any = None
        self._nccl: Any = None
        self._closing = threading.Lock()
        self._probed_s = 0.0
        self.is_aborted = False
        self.is_complete = False

    def connect(
        self,
        transport: Transport,
        store: GroupStore,
        host: str,
        key: str,
        *,
        timeout_s: float = CONNECT_TIMEOUT_S,
        name: str = "",
    ) -> None:
        """Connect all processes of the group, and check that each of them has the key.

        gloo does not authenticate its sockets: a stranger that finds one could take the place of a process.

        Args:
            transport: transport of this process.
            store: store of the group.
            host: address of this host, which the other processes can reach.
            key: secret of the group.
            timeout_s: longest wait for each action of another process, in seconds.
            name: name of the group among those with the same store.

        Raises:
            RuntimeError: a process did not connect.
            ConnectionLost: a process has left or does not have the key, or this process has aborted the group.
        """
        self._store = store
        self._name = name
        self._check()
        own = dist.PrefixStore(name, store) if name else store
        self._gloo = transport.group(own, self._rank, self._size, host, timeout_s=timeout_s, threads=self._threads)
        if self.is_aborted:  # before there was a connection that `abort` could close
            self.abort()
        self._check()
        self._authenticate_peers(key, timedelta(seconds=PROOF_TIMEOUTS * timeout_s))

    def connect_gpus(self) -> None:
        """Use NCCL for tensors on GPUs, of which each process has a different one.

        Raises:
            RuntimeError: NCCL cannot connect.
        """
        store = dist.PrefixStore(f"{self._name} nccl", self._store)
        self._nccl = dist.ProcessGroupNCCL(store, self._rank, self._size, dist.ProcessGroupNCCL.Options())

    def _authenticate_peers(self, key: str, timeout: timedelta) -> None:
        """Prove to all processes that this one has the key, and check their proofs."""
        ours, expected = (torch.zeros(self._size, PROOF_BYTES, dtype=torch.uint8) for _ in range(2))
        for peer in range(self._size):
            ours[peer] = _proof(key, self._rank, peer)
            expected[peer] = _proof(key, peer, self._rank)
        if not torch.equal(self.all_to_all(ours, timeout), expected):
            self.abort()
            raise ConnectionLost("a process in the group does not have its key")

    def all_reduce(self, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> PendingCollective:
        """Start to replace the tensors of all processes by their sum, or by the result of another operation.

        Raises:
            ConnectionLost: a process has left.
        """
        self._check()
        options = dist.AllreduceOptions()
        options.timeout = NO_TIMEOUT
        options.reduceOp = operation
        on_gpu = self._nccl is not None and tensor.is_cuda
        with raising_connection_lost():
            work = (self._nccl if on_gpu else self._gloo).allreduce([tensor], options)
        return PendingCollective(work, on_gpu, time.monotonic())

    def all_gather(self, message: Tensor) -> tuple[Tensor, PendingCollective]:
        """Start to send a tensor, which is on no GPU, to all others; return the rows that arrive, and the operation.

        Args:
            message: uint8 [nbytes], of the same size at every process.

        Raises:
            ConnectionLost: a process has left.
        """
        self._check()
        options = dist.distributed_c10d.AllgatherOptions()
        options.timeout = NO_TIMEOUT
        rows = message.new_empty(self._size, len(message))
        with raising_connection_lost():
            work = self._gloo.allgather([list(rows)], [message], options)
        return rows, PendingCollective(work, False, time.monotonic())

    def broadcast(self, tensor: Tensor, root: int = 0) -> PendingCollective:
        """Start to copy the tensor of one rank of the group, which is on no GPU, to all others.

        Raises:
            ConnectionLost: a process has left.
        """
        self._check()
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.timeout = NO_TIMEOUT
        with raising_connection_lost():
            return PendingCollective(self._gloo.broadcast([tensor], options), False, time.monotonic())

    def all_to_all(self, rows: Tensor, timeout: timedelta) -> Tensor:
        """Send row j to process j and return the rows that arrive, within a time limit.

        Raises:
            ConnectionLost: a process has left, or is too slow.
        """
        self._check()
        options = dist.AllToAllOptions()
        options.timeout = timeout
        received = rows.new_zeros(rows.shape)
        with raising_connection_lost():
            self._gloo.alltoall_base(received, rows, [], [], options).wait(timeout)
        return received

    def wait(self, pending: list[PendingCollective], timeout_s: float = inf) -> bool:
        """Wait for operations; return whether all are complete before the timeout.

        Raises:
            ConnectionLost: a process has left.
        """
        deadline_s = time.monotonic() + timeout_s
        return all(self._wait_for(each, deadline_s) for each in pending)

    def abort_locally(self) -> None:
        """End all waiting in this process; the peers do not notice. Thread-safe."""
        self.is_aborted = True
        if self._store is not None:
            self._store.abort()

    def abort(self) -> None:
        """End all waiting here now, and at the peers a moment later. Thread-safe; does not block."""
        self.abort_locally()
        threading.Thread(target=self._disconnect, daemon=True).start()

    def _disconnect(self) -> None:
        with self._closing:
            if self._nccl is not None:
                with suppress(RuntimeError):
                    self._nccl.abort()
            if self._gloo is not None:
                for peer in self._peers:
                    disconnect_pair(self._gloo, peer)

    def close(self) -> None:
        """Destroy the group; the tensors of its operations may not be in use any more."""
        if self.is_aborted:
            self._disconnect()
        with self._closing:
            groups = [self._nccl, self._gloo]
            self._nccl = self._gloo = None
        destroying = threading.Thread(target=groups.clear, daemon=True)  # gloo waits for its threads here
        destroying.start()
        destroying.join(CLOSE_TIMEOUT_S)

    def _check(self) -> None:
        if self.is_aborted:
            raise ConnectionLost("the group was aborted")

    def _wait_for(self, pending: PendingCollective, deadline_s: float) -> bool:
        while not pending.work.is_completed():
            self._check()
            now_s = time.monotonic()
            if now_s > max(pending.begun_s, self._probed_s) + PROBE_INTERVAL_S:
                self._probe()
                self._probed_s = now_s
            if now_s > deadline_s:
                return False
            _poll(pending, min(ABORT_POLL_S, max(0.001, deadline_s - now_s)))
        with raising_connection_lost():
            pending.work.wait(NO_TIMEOUT)  # returns at once: it raises errors, and makes the stream wait for NCCL
        return True

    def _probe(self) -> None:
        """Check that all processes are still connected: gloo refuses a receive from one that is not."""
        with raising_connection_lost():
            for peer in [] if self.is_complete else self._peers:
                post_probe(self._gloo, peer)


def _proof(key: str, sender: int, receiver: int) -> Tensor:
    digest = hmac.digest(key.encode(), f"{sender} to {receiver}".encode(), "sha256")
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def _poll(pending: PendingCollective, for_s: float) -> None:
    if pending.on_gpu:
        time.sleep(GPU_POLL_S)  # waiting for NCCL's work would only queue it on the stream
        return
    with suppress(RuntimeError):  # `_wait_for` raises it
        pending.work.wait(timedelta(seconds=for_s))


class CompletionTimer:
    """Measures when the last of some operations was complete.

    gloo reports that in a thread of its own. NCCL reports only that its work is queued on the GPU, so for its
    operations the end of the process's wait counts.

    Args:
        pending: result of `ElasticGroup.begin_sum`; an empty sum is complete at once.
    """

    def __init__(self, pending: list[PendingCollective]) -> None:
        self._lock = threading.Lock()
        self._left = len(pending)
        self._last_s = time.monotonic()
        for each in pending:
            if not each.on_gpu:
                each.work.get_future().add_done_callback(self._on_done)

    def completed_s(self, waited_s: float) -> float:
        """Return the completion time on the monotonic clock; if unknown, the given end of the process's wait."""
        with self._lock:
            return waited_s if self._left else min(waited_s, self._last_s)

    def _on_done(self, future: Any) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._left -= 1
            self._last_s = now_s
