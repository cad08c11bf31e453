"""Tensors of a worker of a parameter server: it receives versions, and sends its gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from paceline.core.events import Measured
from paceline.engines.distributed.parameter_server.host_memory import OfferedMemory, map_offered
from paceline.engines.distributed.parameter_server.shard_channel import ShardChannel, shard_channels
from paceline.engines.distributed.rendezvous.session import ClientSession
from paceline.engines.distributed.transport.memory_messages import MemoryMapped, MemoryOffered
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.task_messages import (
    RemoteEvaluateTask,
    RemoteTask,
    RemoteTaskDone,
)
from paceline.engines.distributed.worker_tensors import Start, WorkerTensors
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.worker.parameter_guard import check_version
from paceline.worker.replica import Replica
from paceline.worker.task_runner import pin


class ServerTensors(WorkerTensors):
    """Versions and gradients of a worker, over a channel to the server of each shard.

    Args:
        replica: replica of the worker.
        wire: format of the parameters on the network.
        is_pinned: whether a GPU reads and writes the memory.
    """

    sends_early = True

    def __init__(self, replica: Replica, wire: str, *, is_pinned: bool) -> None:
        self._layout = replica.layout
        self._is_pinned = is_pinned
        self._pinned: set[int] = set()  # addresses of memory that is shared
        self._version = self._layout.allocate()
        self.gradient = self._own_gradient = self._layout.allocate()
        self._shared: OfferedMemory | None = None  # with the server
        self._channels = shard_channels(replica, wire, self._version, self.gradient)
        self.left_out = [channel.left_out for channel in self._channels if channel.left_out is not None]
        self._channel_of = [channel for channel in self._channels for _ in channel.parameters]  # by parameter
        self._received: dict[
            ShardChannel, RemoteTask | RemoteEvaluateTask
        ] = {}  # parts of the next task, until all have arrived
        if is_pinned:
            pin(self._version)
            pin(self.gradient)

    def use(self, sessions: Sequence[ClientSession], start: Start, fail: Callable[[Exception], None]) -> None:
        """Use connections from now on."""
        self._start = start
        self._received = {}
        for channel, session in zip(self._channels, sessions, strict=True):
            channel.use(session.connection)
        for channel, session in zip(self._channels[1:], sessions[1:], strict=True):
            # Rank 0 reports the loss of another server.
            session.listen(partial(self._on_task, channel), lambda error: None)

    def disconnect(self) -> int:
        """Return -1: versions come from the server."""
        self._shared = None
        self._pinned.clear()  # other memory may get the same addresses
        return -1

    def on_message(self, message: Message) -> bool:
        """Take the part of a task that comes from rank 0: the main thread does not read the previous version now."""
        is_task = isinstance(message, RemoteTask | RemoteEvaluateTask)
        if is_task:
            self._on_task(self._channels[0], message)
        if isinstance(message, MemoryOffered):
            self._map(message)
        return is_task or isinstance(message, MemoryOffered)

    def _pin_once(self, vectors: FlatBuffers) -> None:
        """Lock the pages of shared memory, if a GPU reads and writes it and they are not locked yet."""
        if self._is_pinned and vectors.memory.data_ptr() not in self._pinned:
            self._pinned.add(vectors.memory.data_ptr())
            pin(vectors)

    def _map(self, offer: MemoryOffered) -> None:
        """Map the memory of the server, if it is one of this host; else tensors are sent as before."""
        self._shared = map_offered(offer, self._layout)
        if self._shared is not None:
            self._pin_once(self._shared.gradient)
        self._channels[0].connection.send(MemoryMapped(self._shared is not None))

    def begin(self, draw: int) -> None:
        """Begin a gradient."""
        for channel in self._channels:
            channel.begin(draw)

    def on_accumulated(self, parameter: int, busy_s: float, gradient: Tensor | None = None) -> None:
        """Send the parts of the gradient that are complete with this parameter."""
        if self.gradient is not self._own_gradient:
            return
        self._channel_of[parameter].on_accumulated(parameter, busy_s)

    def end(self, measured: Measured, done: Callable[[Measured], RemoteTaskDone], *, is_needed: bool) -> None:
        """Send the remaining buckets of the gradient, and its scalars; only these if the gradient is unneeded."""
        is_sent = is_needed and self.gradient is self._own_gradient
        if is_sent:
            for channel in self._channels:
                channel.pack_remaining(is_finite=measured.finite)
            overflows = any(channel.overflows(measured.squared_norm) for channel in self._channels)
            measured = measured._replace(finite=measured.finite and not overflows)
        message = done(measured)
        for channel in self._channels:
            if is_sent:
                channel.send_remaining(message)
            else:
                channel.connection.send(message)

    def cancel(self, draw: int) -> None:
        """Tell every server that the rest of a gradient will not come."""
        for channel in self._channels:
            channel.cancel()

    def check(self, checksum: int | None, who: str, at: str) -> None:
        """Compare the version with the server's, in debug mode."""
        if checksum is not None:
            check_version(self._channels[0].packed_version(), checksum, who, at)

    def close(self, *, has_failed: bool) -> None:
        """Do nothing: the connections are closed by their sessions."""

    def _on_task(self, channel: ShardChannel, task: Message) -> None:
        """Handle one shard's part of a task; the part that arrives last starts the task."""
        assert isinstance(task, RemoteTask | RemoteEvaluateTask)
        slot = task.slot if isinstance(task, RemoteTask) else -1
        if isinstance(task, RemoteEvaluateTask):
            channel.unpack_version()
        elif task.sends_version and slot < 0:
            channel.unpack_version(is_difference=task.is_difference)
        self._received[channel] = task
        if len(self._received) < len(self._channels):
            return
        received, self._received = self._received, {}
        complete = received[self._channels[0]]  # only rank 0 fills in all fields
        assert all(each.version == complete.version for each in received.values()), (
            received
        )  # no server is ahead of another
        if slot < 0:
            self.gradient = self._own_gradient
            version = self._version
        else:
            assert self._shared is not None
            self.gradient = self._shared.gradient
            version = self._shared.version(slot)
            self._pin_once(version)
        self._start(complete, version, time.monotonic())
