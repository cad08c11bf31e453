"""Sums of compressed vectors: each rank receives the messages of all ranks, and adds what they decode to."""

from __future__ import annotations

import torch

from paceline.compression.compressed_vectors import CompressedFormat
from paceline.core.wire import Code
from paceline.engines.distributed.allreduce.base import GroupMembership
from paceline.engines.distributed.transport.process_group import PendingCollective
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout
from paceline.worker.allreduce.vectors import add_payload


class CompressedSum:
    """Sum of one fragment, as messages that are gathered at every rank.

    All ranks decode the same messages in the same order, so their sums are equal to the last bit. What a message leaves
    out is part of the next one of this rank. A rank receives n - 1 messages, where an uncompressed sum over n ranks
    takes 2 (n - 1) / n vectors in each direction: a code of a quarter of the bytes pays up to 8 ranks.

    Args:
        code: code of the parameters; buffers are sent unchanged.
        layout: layout of the fragment.

    Attributes:
        left_out: what the messages so far have left out.
    """

    def __init__(self, code: Code, layout: FlatLayout) -> None:
        self._format = CompressedFormat(code, layout, loads_numba=True)  # each rank steps an optimizer (decision 0027)
        self.left_out = layout.allocate()
        self._decoded = layout.allocate()

    def begin(self, payload: FlatBuffers, membership: GroupMembership) -> tuple[torch.Tensor, list[PendingCollective]]:
        """Begin to exchange messages; return their memory, uint8 [ranks, nbytes], and the operations to wait for."""
        message = self._format.allocate(payload)
        self._format.compress(payload, self.left_out, message)
        return membership.begin_gather(message)

    def finish(self, messages: torch.Tensor, total: FlatBuffers) -> None:
        """Write the sum of the messages."""
        for number, message in enumerate(messages):
            self._format.decompress(message, self._decoded)
            add_payload(total, self._decoded, is_first=number == 0)
