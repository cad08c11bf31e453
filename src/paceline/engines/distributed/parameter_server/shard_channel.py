"""Channel of a worker to one shard server: the shard's part of versions and gradients."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from paceline.engines.distributed.transport.buckets import BucketSender, to_bitmask
from paceline.engines.distributed.transport.connection import Connection
from paceline.engines.distributed.transport.task_messages import GradientStarted, RemoteTaskCancelled, RemoteTaskDone
from paceline.engines.distributed.transport.wire_format import WireBuffer, WireFormat
from paceline.server.flat_buffers import FlatBuffers, FlatLayout
from paceline.worker.replica import Replica


class ShardChannel:
    """One shard of the version and of the gradient, and the connection to its server.

    Args:
        dtype: dtype on the wire, a key of `wire_format.DTYPES`.
        layout: layout of the shard.
        version: the shard's part of the version.
        gradient: the shard's part of the gradient.

    Attributes:
        parameters: range of the model's trainable parameters in the shard.
        connection: connection to the server.
    """

    connection: Connection

    def __init__(self, dtype: str, layout: FlatLayout, version: FlatBuffers, gradient: FlatBuffers) -> None:
        wire = WireFormat(dtype, layout)
        self.parameters = layout.parameters
        self._version = WireBuffer(wire, version)
        self._gradient = WireBuffer(wire, gradient)
        self._buckets = BucketSender(wire.buckets, wire.parameters, self._send_bucket)
        # gloo's send blocks while a slow link accepts more data, which would delay the backward pass.
        self._sender = ThreadPoolExecutor(max_workers=1)
        self._sent: list[Future[None]] = []
        self._draw = 0
        self._busy_s = 0.0

    def use(self, connection: Connection) -> None:
        """Receive versions over this connection from now on."""
        self.connection = connection
        connection.post_buckets([self._version.memory])

    def recv_version(self) -> None:
        """Wait for the part of a version that follows a message."""
        self.connection.recv_buckets([0])
        self._version.unpack()

    def packed_version(self) -> Tensor:
        """Return the part of the version as it is now, in the wire format."""
        self._version.pack()
        return self._version.memory

    def close(self) -> None:
        """Wait for the sending thread; the connection is closed by then."""
        self._sender.shutdown()

    def begin(self, draw: int) -> None:
        """Start a new gradient."""
        self._draw = draw
        self._buckets.begin()

    def on_accumulated(self, parameter: int, busy_s: float) -> None:
        """Record the gradient of a parameter, by its number in the model, and send the buckets that are complete."""
        self._busy_s = busy_s
        self._buckets.on_accumulated(parameter - self.parameters.start)

    def pack_remaining(self) -> None:
        """Pack the buckets that have not been sent."""
        self._await_sender()
        self._remaining, self._resent = self._buckets.remaining()
        for number in [*self._remaining, *self._resent]:
            self._gradient.pack(number)

    def overflows(self, squared_norm: float) -> bool:
        """Return whether packing a finite gradient has made a number of it infinite."""
        return self._gradient.overflows(squared_norm)

    def send_remaining(self, done: RemoteTaskDone) -> None:
        """Send the packed buckets with the scalars of the gradient."""
        ours = self._gradient.buckets
        done = done._replace(resent=to_bitmask(self._resent))
        buckets = [(number, ours[number]) for number in self._remaining]
        resent = [ours[number] for number in sorted(self._resent)]
        self.connection.send(done, resent, buckets=buckets, will_be_answered=True)

    def cancel(self) -> None:
        """Report that the rest of this gradient will not come."""
        self._await_sender()
        self.connection.send(RemoteTaskCancelled(self._draw, to_bitmask(self._buckets.sent)), will_be_answered=True)

    def _send_bucket(self, number: int) -> None:
        """Send a bucket of a gradient that is not complete yet."""
        if not self._buckets.sent:
            self.connection.send(GradientStarted(self._draw, self._busy_s))
        self._gradient.pack(number)
        self._sent.append(self._sender.submit(self.connection.send_bucket, number, self._gradient.buckets[number]))

    def _await_sender(self) -> None:
        for each in self._sent:
            each.result()
        self._sent.clear()


def shard_channels(replica: Replica, dtype: str, version: FlatBuffers, gradient: FlatBuffers) -> list[ShardChannel]:
    """Return a channel for each shard of these vectors of a replica."""
    ranges = replica.layout.shard_ranges
    channels = []
    for number, each in enumerate(ranges):
        layout = FlatLayout(replica.model, len(ranges), only=number)
        parts = (FlatBuffers(layout, vectors.memory[each]) for vectors in (version, gradient))
        channels.append(ShardChannel(dtype, layout, *parts))
    return channels
