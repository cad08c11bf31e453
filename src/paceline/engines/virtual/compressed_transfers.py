"""Compressed transfers of simulated workers: the rounding of what they receive and send, with error feedback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.compression.compressed_vectors import CompressedFormat
from paceline.core.wire import Code
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout, copy_checked


class CompressedTransfers:
    """Both ends of the connections of simulated workers to a server, or of their messages to each other.

    A worker receives its first version whole, and then differences to what it has. What a message leaves out is part of
    the next one.

    Args:
        code: code of the parameters.
        layout: layout of the model.
    """

    def __init__(self, code: Code, layout: FlatLayout) -> None:
        self._layout = layout
        self._formats = [CompressedFormat(code, each, loads_numba=True) for each in layout.shard_layouts]
        self._received: dict[int, tuple[int, FlatBuffers]] = {}  # version and vectors of each worker
        self._left_out: dict[int, FlatBuffers] = {}  # of each worker's messages

    def receive(self, worker: int, version: int, vectors: FlatBuffers) -> None:
        """Record that a worker receives a version, if it does not have it."""
        if worker not in self._received:
            received = self._layout.allocate()
            received.copy_(vectors)
        else:
            before, received = self._received[worker]
            if before != version:
                for wire, sent, held in zip(self._formats, vectors.shards, received.shards, strict=True):
                    wire.compress_difference(sent, held, wire.allocate(sent))
        self._received[worker] = (version, received)

    def received(self, worker: int) -> FlatBuffers:
        """Return the version that a worker has, as it has received it."""
        return self._received[worker][1]

    def send(self, worker: int, vectors: FlatBuffers, fragment: int | None = None) -> None:
        """Change vectors to what the receiver decodes.

        Args:
            worker: worker that sends them.
            vectors: vectors of the whole model.
            fragment: fragment that is sent; None for all.
        """
        if worker not in self._left_out:
            self._left_out[worker] = self._layout.allocate()
        fragments = range(len(self._formats)) if fragment is None else [fragment]
        for number in fragments:
            wire, sent = self._formats[number], vectors.shards[number]
            memory = wire.allocate(sent)
            wire.compress(sent, self._left_out[worker].shards[number], memory)
            wire.decompress(memory, sent)

    def forget(self, worker: int) -> None:
        """Forget a worker that is lost: another process comes in its place."""
        self._received.pop(worker, None)
        self._left_out.pop(worker, None)

    def state_dict(self) -> dict[str, Any]:
        """Return what each worker has, and what its messages have left out."""
        return {
            "received": {
                worker: (version, vectors.memory.clone()) for worker, (version, vectors) in self._received.items()
            },
            "left_out": {worker: vectors.memory.clone() for worker, vectors in self._left_out.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        received = {worker: (version, self._copy_of(saved)) for worker, (version, saved) in state["received"].items()}
        self._received = received
        self._left_out = {worker: self._copy_of(saved) for worker, saved in state["left_out"].items()}

    def _copy_of(self, saved: object) -> FlatBuffers:
        vectors = self._layout.allocate()
        copy_checked(vectors.memory, saved)
        return vectors


def transfers_of(code: Code | None, layout: FlatLayout) -> CompressedTransfers | None:
    """Return the transfers of a code, None for none."""
    return None if code is None else CompressedTransfers(code, layout)
