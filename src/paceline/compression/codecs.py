"""Codecs of vectors: lossy codes of chunks, in operations of torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from math import ceil
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from paceline.core.wire import BLOCK, Code, IntegerCode, TopKCode

TINY = 1e-30  # largest value of a block that is sent as zeros: the inverse of its scale would be too large


class Chunk(NamedTuple):
    """Part of one or two vectors that is compressed at a time.

    Attributes:
        vectors: the vectors, float32 [count], of which the last one is changed.
        memory: wire memory, uint8.
    """

    vectors: Sequence[Tensor]
    memory: Tensor


class Codec(ABC):
    """Lossy code of chunks of float32 values, which are finite: a caller checks gradients before.

    Attributes:
        chunk: values that are compressed at a time, so that they stay in the cache.
    """

    chunk: ClassVar[int]

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """Return the bytes of a chunk of this number of values."""

    def compress(self, chunks: Iterable[Chunk]) -> None:
        """Write the code of values + error, and keep the rest in the error."""
        scratch = torch.empty(self.chunk)
        for (values, error), memory in chunks:
            error.add_(values)
            decoded = scratch[: len(error)]
            self.encode(error, memory, decoded)
            error.sub_(decoded)

    def compress_difference(self, chunks: Iterable[Chunk]) -> None:
        """Write the code of values - sent, and add what is decoded to what was sent."""
        scratch = torch.empty(self.chunk)
        for (values, sent), memory in chunks:
            decoded = scratch[: len(sent)]
            self.encode(values - sent, memory, decoded)
            sent.add_(decoded)

    def decompress(self, chunks: Iterable[Chunk]) -> None:
        """Decode chunks into their values."""
        for (values,), memory in chunks:
            self.decode(memory, values)

    def add_difference(self, chunks: Iterable[Chunk]) -> None:
        """Add what is decoded to the values."""
        scratch = torch.empty(self.chunk)
        for (values,), memory in chunks:
            decoded = scratch[: len(values)]
            self.decode(memory, decoded)
            values.add_(decoded)

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

    chunk = 1 << 18  # stays in the cache between the operations on it

    def __init__(self, code: IntegerCode) -> None:
        self.levels = code.levels

    def nbytes(self, count: int) -> int:
        """Return the bytes of the scales and of the integers."""
        blocks = -(-count // BLOCK)
        return blocks * (4 + BLOCK * (8 if self.levels > 7 else 4) // 8)

    def encode(self, values: Tensor, memory: Tensor, decoded: Tensor) -> None:
        """Write scales and integers."""
        scales, integers = self.parts(memory, len(values))
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
        scales, integers = self.parts(memory, len(decoded))
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

    def parts(self, memory: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return scales [blocks, 1] and integers [blocks, bytes of a block] of a chunk."""
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
        positions.copy_(at - self.chunk // 2)  # they fit into an int16, which has a sign
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
    """Return the codec of a code, in operations of torch."""
    return IntegerCodec(code) if isinstance(code, IntegerCode) else TopKCodec(code)


def _in_blocks(values: Tensor) -> Tensor:
    """Return the values as rows of 256, the last one filled with zeros."""
    rest = -len(values) % BLOCK
    return (torch.nn.functional.pad(values, (0, rest)) if rest else values).view(-1, BLOCK)
