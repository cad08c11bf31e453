"""Compression of vectors on the wire, with error feedback: what a message leaves out is part of the next one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from paceline.core.wire import BLOCK, Code, IntegerCode, TopKCode
from paceline.server.flat_buffers import ALIGNMENT_BYTES, FlatBuffers, FlatLayout

TINY = 1e-30  # largest value of a block that is sent as zeros: the inverse of its scale would be too large


class Codec(ABC):
    """Lossy code of a chunk of float32 values. The rest that it leaves out is kept by its caller.

    Attributes:
        chunk: values that are compressed at a time, so that they stay in the cache.
    """

    chunk: ClassVar[int]

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """Return the bytes of a chunk of this number of values."""

    @abstractmethod
    def encode(self, values: Tensor, memory: Tensor, decoded: Tensor) -> None:
        """Write the code of a chunk, and what `decode` makes of it.

        Args:
            values: float32 [count], finite, count <= chunk.
            memory: uint8 [nbytes(count)].
            decoded: float32 [count].
        """

    @abstractmethod
    def decode(self, memory: Tensor, decoded: Tensor) -> None:
        """Decode a chunk into `decoded`, float32 [count]."""


class IntegerCodec(Codec):
    """Codec of `IntegerCode`: the scale of each block of 256 values, and the integers."""

    chunk = 1 << 18

    def __init__(self, code: IntegerCode) -> None:
        self.levels = code.levels

    def nbytes(self, count: int) -> int:
        """Return the bytes of the scales and of the integers."""
        blocks = -(-count // BLOCK)
        return blocks * (4 + BLOCK * (8 if self.levels > 7 else 4) // 8)

    def encode(self, values: Tensor, memory: Tensor, decoded: Tensor) -> None:
        """Write scales and integers."""
        scales, integers = self._parts(memory, len(values))
        blocks, rounded = _in_blocks(values), _in_blocks(decoded)
        torch.amax(torch.abs(blocks, out=rounded), 1, keepdim=True, out=scales)  # vector_norm takes ten times as long
        scales.masked_fill_(scales < TINY, 0.0).div_(self.levels)
        torch.mul(blocks, scales.reciprocal().masked_fill_(scales == 0, 0.0), out=rounded).round_()
        if self.levels > 7:
            integers.copy_(rounded)
        else:
            half = BLOCK // 2
            integers.copy_(torch.add(rounded[:, :half], rounded[:, half:], alpha=16).add_(8 + 16 * 8))
        rounded.mul_(scales)
        if len(values) % BLOCK:
            decoded.copy_(rounded.view(-1)[: len(values)])

    def decode(self, memory: Tensor, decoded: Tensor) -> None:
        """Multiply integers by their scales."""
        scales, integers = self._parts(memory, len(decoded))
        values = _in_blocks(decoded)
        if self.levels > 7:
            values.copy_(integers)
        else:
            values[:, : BLOCK // 2].copy_(integers & 15)
            values[:, BLOCK // 2 :].copy_(integers >> 4)
            values.sub_(8)
        values.mul_(scales)
        if len(decoded) % BLOCK:
            decoded.copy_(values.view(-1)[: len(decoded)])

    def _parts(self, memory: Tensor, count: int) -> tuple[Tensor, Tensor]:
        blocks = -(-count // BLOCK)
        scales = memory[: 4 * blocks].view(torch.float32).view(blocks, 1)
        integers = memory[4 * blocks : self.nbytes(count)].view(blocks, -1)
        return scales, integers.view(torch.int8) if self.levels > 7 else integers


class TopKCodec(Codec):
    """Codec of `TopKCode`: the largest values of a chunk and their positions."""

    chunk = 1 << 16  # positions have 16 bits

    def __init__(self, code: TopKCode) -> None:
        self.share = code.share

    def nbytes(self, count: int) -> int:
        """Return the bytes of the values and of their positions."""
        return 6 * self._kept(count)

    def encode(self, values: Tensor, memory: Tensor, decoded: Tensor) -> None:
        """Write the largest values and their positions."""
        largest, positions = self._parts(memory, len(values))
        at = values.abs().topk(len(largest), sorted=False).indices
        torch.index_select(values, 0, at, out=largest)
        positions.copy_(at - self.chunk // 2)
        decoded.zero_().index_copy_(0, at, largest)

    def decode(self, memory: Tensor, decoded: Tensor) -> None:
        """Write the values at their positions."""
        largest, positions = self._parts(memory, len(decoded))
        at = positions.long().add_(self.chunk // 2).clamp_(0, len(decoded) - 1)
        decoded.zero_().index_copy_(0, at, largest)

    def _parts(self, memory: Tensor, count: int) -> tuple[Tensor, Tensor]:
        kept = self._kept(count)
        return memory[: 4 * kept].view(torch.float32), memory[4 * kept : 6 * kept].view(torch.int16)

    def _kept(self, count: int) -> int:
        return ceil(self.share * count)


def make_codec(code: Code) -> Codec:
    """Return the codec of a code."""
    return IntegerCodec(code) if isinstance(code, IntegerCode) else TopKCodec(code)


class CompressedFormat:
    """Compressed vectors as bytes on the wire: gradients with error feedback, versions as differences.

    float32 parameters are compressed. Other parameters and all buffers are sent unchanged.

    Args:
        code: code of the parameters.
        layout: layout of the vectors.

    Attributes:
        nbytes: bytes on the wire.
        layout: as given.
    """

    def __init__(self, code: Code, layout: FlatLayout) -> None:
        self.layout = layout
        self._codec = make_codec(code)
        probe = FlatBuffers(layout, torch.empty(layout.nbytes, dtype=torch.uint8))
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
        """Write the code of vectors + error, and keep the rest in `error`."""
        scratch = torch.empty(self._codec.chunk)
        for values, rest, part in self._chunks(vectors, error, memory):
            rest.add_(values)
            decoded = scratch[: len(rest)]
            self._codec.encode(rest, part, decoded)
            rest.sub_(decoded)
        self._copy_others(vectors, memory, packs=True)

    def compress_difference(self, vectors: FlatBuffers, sent: FlatBuffers, memory: Tensor) -> None:
        """Write the code of vectors - sent, and add it to `sent`, which is then what the receiver has."""
        scratch = torch.empty(self._codec.chunk)
        for values, before, part in self._chunks(vectors, sent, memory):
            decoded = scratch[: len(before)]
            self._codec.encode(values - before, part, decoded)
            before.add_(decoded)
        self._copy_others(vectors, memory, packs=True)
        self._copy_others(sent, memory, packs=False)

    def decompress(self, memory: Tensor, vectors: FlatBuffers) -> None:
        """Decode a message into vectors."""
        for values, _, part in self._chunks(vectors, vectors, memory):
            self._codec.decode(part, values)
        self._copy_others(vectors, memory, packs=False)

    def add_difference(self, memory: Tensor, vectors: FlatBuffers) -> None:
        """Add a difference to the vectors that the receiver has."""
        scratch = torch.empty(self._codec.chunk)
        for values, _, part in self._chunks(vectors, vectors, memory):
            decoded = scratch[: len(values)]
            self._codec.decode(part, decoded)
            values.add_(decoded)
        self._copy_others(vectors, memory, packs=False)

    def _compressed_nbytes(self, count: int) -> int:
        whole, rest = divmod(count, self._codec.chunk)
        return whole * self._chunk_nbytes(self._codec.chunk) + (self._codec.nbytes(rest) if rest else 0)

    def _chunk_nbytes(self, count: int) -> int:
        return -(-self._codec.nbytes(count) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def _chunks(
        self, vectors: FlatBuffers, others: FlatBuffers, memory: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield each chunk of two vectors that is compressed, with its wire memory."""
        chunk = self._codec.chunk
        flats = zip(vectors.flat_parameters, others.flat_parameters, self._ranges, strict=False)
        for flat, other, whole in flats:
            if flat.dtype == torch.float32:
                start = whole.start
                for values, more in zip(flat.split(chunk), other.split(chunk), strict=True):
                    yield values, more, memory[start : start + self._codec.nbytes(len(values))]
                    start += self._chunk_nbytes(self._codec.chunk)

    def _copy_others(self, vectors: FlatBuffers, memory: Tensor, *, packs: bool) -> None:
        parameters = len(vectors.flat_parameters)
        for i, flat in enumerate([*vectors.flat_parameters, *vectors.flat_buffers]):
            if i >= parameters or flat.dtype != torch.float32:
                wire = memory[self._ranges[i]].view(flat.dtype)
                (wire if packs else flat).copy_(flat if packs else wire)


def _in_blocks(values: Tensor) -> Tensor:
    """Return the values as rows of 256, the last one filled with zeros."""
    rest = -len(values) % BLOCK
    return (torch.nn.functional.pad(values, (0, rest)) if rest else values).view(-1, BLOCK)
