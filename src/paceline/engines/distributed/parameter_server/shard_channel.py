"""Channel of a worker to one shard server: the shard's part of versions and gradients."""

from __future__ import annotations

from torch import Tensor

from paceline.engines.distributed.transport.buckets import BucketSender
from paceline.engines.distributed.transport.connection import Connection
from paceline.engines.distributed.transport.task_messages import GradientStarted, RemoteTaskCancelled, RemoteTaskDone
from paceline.engines.distributed.transport.wire import WireBuffer
from paceline.engines.distributed.transport.wires import make_wire
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout
from paceline.worker.local_steps import LocalStepsReplica
from paceline.worker.replica import Replica


class ShardChannel:
    """One shard of the version and of the gradient, and the connection to its server.

    Args:
        wire: name of the wire; this and the last argument are those of `make_wire`.
        layout: layout of the shard.
        version: the shard's part of the version.
        gradient: the shard's part of the gradient.
        loads_numba: whether this process loads numba for a code.

    Attributes:
        parameters: range of the model's trainable parameters in the shard.
        connection: connection to the server.
    """

    connection: Connection

    def __init__(
        self, wire: str, layout: FlatLayout, version: FlatBuffers, gradient: FlatBuffers, *, loads_numba: bool
    ) -> None:
        self._wire = make_wire(wire, layout, loads_numba=loads_numba)
        self.parameters = layout.parameters
        self._version = WireBuffer(self._wire, version)
        self._gradient = WireBuffer(self._wire, gradient)
        self._buckets = BucketSender(self._wire.buckets, self._wire.parameters, self._send_bucket)
        self._draw = 0
        self._busy_s = 0.0

    def use(self, connection: Connection) -> None:
        """Receive versions over this connection from now on."""
        self.connection = connection
        connection.post_buckets(self._wire.receivers(self._version.memory, self._version.vectors))

    def unpack_version(self, *, is_difference: bool = False) -> None:
        """Convert the part of a version that has been received, or add it to the version before."""
        self._wire.unpack_version(self._version.memory, self._version.vectors, is_difference=is_difference)

    def packed_version(self) -> Tensor:
        """Return the part of the version as it is now, in the wire format; whole if that is a codec."""
        return self._wire.packed_version(self._version.memory, self._version.vectors)

    @property
    def left_out(self) -> FlatBuffers | None:
        """What the compressed gradients so far have left out; None without compression."""
        return self._gradient.left_out

    def begin(self, draw: int) -> None:
        """Start a new gradient."""
        self._draw = draw
        self._buckets.begin()

    def on_accumulated(self, parameter: int, busy_s: float) -> None:
        """Record the gradient of a parameter, by its number in the model, and send the buckets that are complete."""
        self._busy_s = busy_s
        self._buckets.on_accumulated(parameter - self.parameters.start)

    def pack_remaining(self, *, is_finite: bool) -> None:
        """Pack the buckets that have not been sent; a codec would keep what is not finite for the next gradient."""
        remaining, outdated = self._buckets.remaining()
        self._remaining = [*remaining, *sorted(outdated)]
        for number in self._remaining if is_finite else ():
            self._gradient.pack(number)

    def overflows(self, squared_norm: float) -> bool:
        """Return whether packing a finite gradient has made a number of it infinite."""
        return self._gradient.overflows(squared_norm)

    def send_remaining(self, done: RemoteTaskDone) -> None:
        """Send the packed buckets with the scalars of the gradient."""
        self.connection.send(done, [(number, self._gradient.buckets[number]) for number in self._remaining])

    def cancel(self) -> None:
        """Report that the rest of this gradient will not come."""
        self.connection.send(RemoteTaskCancelled(self._draw))

    def _send_bucket(self, number: int) -> None:
        """Send a bucket of a gradient that is not complete yet."""
        if not self._buckets.sent:
            self.connection.send(GradientStarted(self._draw, self._busy_s))
        self._gradient.pack(number)
        self.connection.send_bucket(number, self._gradient.buckets[number])


def shard_channels(replica: Replica, wire: str, version: FlatBuffers, gradient: FlatBuffers) -> list[ShardChannel]:
    """Return a channel for each shard of these vectors of a replica.

    Only a replica that makes local steps loads numba, for its optimizer.
    """
    ranges = replica.layout.shard_ranges
    channels = []
    for number, each in enumerate(ranges):
        layout = FlatLayout(replica.model, len(ranges), only=number)
        channels.append(
            ShardChannel(
                wire,
                layout,
                version=FlatBuffers(layout, version.memory[each]),
                gradient=FlatBuffers(layout, gradient.memory[each]),
                loads_numba=isinstance(replica, LocalStepsReplica),
            )
        )
    return channels
