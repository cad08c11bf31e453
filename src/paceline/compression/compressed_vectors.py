"""Compression of vectors on the wire, with error feedback: what a message leaves out is part of the next one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.compression.codecs import Chunk
from paceline.compression.compiled_codec import fastest_codec
from paceline.core.wire import Code
from paceline.tensors.flat_buffers import ALIGNMENT_BYTES, FlatBuffers, FlatLayout


class CompressedFormat:
    """Compressed vectors as bytes on the wire: gradients with error feedback, versions as differences.

    float32 parameters are compressed. Other parameters and all buffers are sent unchanged.

    Args:
        code: code of the parameters.
        layout: layout of the vectors.
        loads_numba: whether this process loads numba, if it is installed. That takes 0.5 s and 130 MiB. A process that
            steps an optimizer does so anyway; a worker of a server does not need it. Messages have the same bytes.

    Attributes:
        nbytes: bytes on the wire.
        layout: as given.
    """

    def __init__(self, code: Code, layout: FlatLayout, *, loads_numba: bool = False) -> None:
        self.layout = layout
        probe = FlatBuffers(layout, torch.empty(layout.nbytes, dtype=torch.uint8))
        longest = max(len(flat) if flat.dtype == torch.float32 else 0 for flat in probe.flat_parameters)
        self._codec = fastest_codec(code, longest, loads_numba=loads_numba)
        self._ranges: list[slice] = []
        start = 0
        for flat in [*probe.flat_parameters, *probe.flat_buffers]:
            is_compressed = flat.dtype == torch.float32 and len(self._ranges) < len(probe.flat_parameters)
            nbytes = self._compressed_nbytes(flat.numel()) if is_compressed else flat.nbytes
            self._ranges.append(slice(start, start + nbytes))
            start += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.nbytes = start

    def allocate(self, vectors: FlatBuffers) -> Tensor:
        """Return wire memory, uint8 [nbytes]."""
        return torch.zeros(self.nbytes, dtype=torch.uint8)

    def compress(self, vectors: FlatBuffers, error: FlatBuffers, memory: Tensor) -> None:
        """Write the code of vectors + error, which are finite, and keep the rest in `error`."""
        self._codec.compress(self._chunks(memory, vectors, error))
        self._copy_others(vectors, memory, packs=True)

    def compress_difference(self, vectors: FlatBuffers, sent: FlatBuffers, memory: Tensor) -> None:
        """Write the code of vectors - sent, finite, and add it to `sent`, which is then what the receiver has."""
        self._codec.compress_difference(self._chunks(memory, vectors, sent))
        self._copy_others(vectors, memory, packs=True)
        self._copy_others(sent, memory, packs=False)

    def decompress(self, memory: Tensor, vectors: FlatBuffers) -> None:
        """Decode a message into vectors."""
        self._codec.decompress(self._chunks(memory, vectors))
        self._copy_others(vectors, memory, packs=False)

    def add_difference(self, memory: Tensor, vectors: FlatBuffers) -> None:
        """Add a difference to the vectors that the receiver has."""
        self._codec.add_difference(self._chunks(memory, vectors))
        self._copy_others(vectors, memory, packs=False)

    def _compressed_nbytes(self, count: int) -> int:
        whole, rest = divmod(count, self._codec.chunk)
        return whole * self._chunk_nbytes(self._codec.chunk) + (self._codec.nbytes(rest) if rest else 0)

    def _chunk_nbytes(self, count: int) -> int:
        return -(-self._codec.nbytes(count) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def _chunks(self, memory: Tensor, *vectors: FlatBuffers) -> Iterator[Chunk]:
        """Yield each chunk of the vectors that is compressed, with its wire memory."""
        of_each_dtype = zip(*(each.flat_parameters for each in vectors), strict=True)
        for whole, flats in zip(self._ranges, of_each_dtype, strict=False):
            if flats[0].dtype == torch.float32:
                start = whole.start
                for parts in zip(*(flat.split(self._codec.chunk) for flat in flats), strict=True):
                    yield Chunk(parts, memory[start : start + self._codec.nbytes(len(parts[0]))])
                    start += self._chunk_nbytes(self._codec.chunk)

    def _copy_others(self, vectors: FlatBuffers, memory: Tensor, *, packs: bool) -> None:
        parameters = len(vectors.flat_parameters)
        for i, flat in enumerate([*vectors.flat_parameters, *vectors.flat_buffers]):
            if i >= parameters or flat.dtype != torch.float32:
                wire = memory[self._ranges[i]].view(flat.dtype)
                (wire if packs else flat).copy_(flat if packs else wire)
