"""What a worker exchanges with the server of one slice: its part of versions and of gradients."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from paceline.engines.distributed.transport.buckets import BucketSender, as_number
from paceline.engines.distributed.transport.connection import Connection
from paceline.engines.distributed.transport.messages import GradientStarted, RemoteTaskCancelled, RemoteTaskDone
from paceline.engines.distributed.transport.wire_format import WireBuffer, WireFormat
from paceline.server.flat_buffers import FlatBuffers, FlatLayout
from paceline.worker.replica import Replica


class ShardChannel:
    """A part of the version and of the gradient, and the line over which they come and go.

    Args:
        word: in which numbers they travel, a key of `wire.DTYPES`.
        layout: of the slice.
        version: of the slice.
        gradient: of the slice.

    Attributes:
        parameters: which of the model's trainable parameters the slice has.
        line: to its server.
    """

    line: Connection

    def __init__(self, word: str, layout: FlatLayout, version: FlatBuffers, gradient: FlatBuffers) -> None:
        wire = WireFormat(word, layout)
        self.parameters = layout.parameters
        self._arriving = WireBuffer(wire, version)
        self._leaving = WireBuffer(wire, gradient)
        self._departure = BucketSender(wire.pieces, wire.parameters, self._send_piece)
        # Over a slow link gloo's send writes for as long as the socket takes more, and would hold up a backward pass.
        self._sender = ThreadPoolExecutor(max_workers=1)
        self._sent: list[Future[None]] = []
        self._draw = 0
        self._busy_s = 0.0

    def use(self, line: Connection) -> None:
        """Let versions come over this line from now on."""
        self.line = line
        line.make_rooms([self._arriving.memory])

    def receive_version(self) -> None:
        """Wait for the part of a version that follows a message."""
        self.line.receive_pieces([0])
        self._arriving.unpack()

    def travelling(self) -> Tensor:
        """Return the part of the version as it is now, in the form in which it has come."""
        self._arriving.pack()
        return self._arriving.memory

    def close(self) -> None:
        """Wait for the thread that sends, when the line is at its end."""
        self._sender.shutdown()

    def begin(self, draw: int) -> None:
        """Get ready for another gradient."""
        self._draw = draw
        self._departure.begin()

    def accumulated(self, parameter: int, busy_s: float) -> None:
        """Take note that there is the gradient of a parameter, numbered in the model, and send what is complete."""
        self._busy_s = busy_s
        self._departure.accumulated(parameter - self.parameters.start)

    def pack_rest(self) -> None:
        """Get ready to go what of the gradient has not gone yet."""
        self._await_sender()
        self._rest, self._again = self._departure.rest()
        for number in [*self._rest, *self._again]:
            self._leaving.pack(number)

    def overflows(self, squared_norm: float) -> bool:
        """Return whether packing a finite gradient has made some number of it infinite."""
        return self._leaving.overflows(squared_norm)

    def hand_in(self, finished: RemoteTaskDone) -> None:
        """Send what has been packed."""
        ours = self._leaving.pieces
        finished = finished._replace(again=as_number(self._again))
        pieces = [(number, ours[number]) for number in self._rest]
        again = [ours[number] for number in sorted(self._again)]
        self.line.send(finished, again, pieces=pieces, will_be_answered=True)

    def abandon(self) -> None:
        """Say that there will be no more of this gradient."""
        self._await_sender()
        self.line.send(RemoteTaskCancelled(self._draw, as_number(self._departure.gone)), will_be_answered=True)

    def _send_piece(self, number: int) -> None:
        """Send a piece of a gradient before there is all of it."""
        if not self._departure.gone:
            self.line.send(GradientStarted(self._draw, self._busy_s))
        self._leaving.pack(number)
        self._sent.append(self._sender.submit(self.line.send_piece, number, self._leaving.pieces[number]))

    def _await_sender(self) -> None:
        for each in self._sent:
            each.result()
        self._sent.clear()


def strands(replica: Replica, word: str, version: FlatBuffers, gradient: FlatBuffers) -> list[ShardChannel]:
    """Return one for each slice of these vectors of a replica."""
    places = replica.layout.shard_ranges
    made = []
    for number, place in enumerate(places):
        part = FlatLayout(replica.model, len(places), only=number)
        made.append(
            ShardChannel(
                word, part, FlatBuffers(part, version.memory[place]), FlatBuffers(part, gradient.memory[place])
            )
        )
    return made
