"""Codec of integers in compiled loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.compression.codecs import Chunk, Codec, IntegerCodec, make_codec
from paceline.core.wire import BLOCK, Code, IntegerCode
from paceline.tensors.compiled_loops import LEAST, TRIED, in_threads, loops_for
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)


def fastest_codec(code: Code, longest: int, *, loads_numba: bool) -> Codec:
    """Return the fastest codec of a code; all have the same bits.

    Args:
        code: code.
        longest: length of the longest vector of float32, on the CPU.
        loads_numba: whether this process loads numba, if it is installed.
    """
    has_loops = loads_numba and longest >= LEAST and isinstance(code, IntegerCode)
    return (_compiled_codec(code) if has_loops else None) or make_codec(code)


@cache
def _compiled_codec(code: IntegerCode) -> CompiledIntegerCodec | None:
    if loops_for(torch.float32) is None:
        return None
    from paceline.compression import compiled_integers

    codec = CompiledIntegerCodec(code, compiled_integers)
    if not all(map(torch.equal, _tried(codec), _tried(IntegerCodec(code)))):
        LOG.warning("the compiled loops of numba differ from torch for integers up to %d: torch is used", code.levels)
        return None
    return codec


def _tried(codec: IntegerCodec) -> list[Tensor]:
    """Return what two messages make of vectors that are the same for each call."""
    random = torch.Generator().manual_seed(0)
    first, second, error, sent, decoded, received = (torch.randn(TRIED, generator=random) for _ in range(6))
    messages = [torch.zeros(codec.nbytes(TRIED), dtype=torch.uint8) for _ in range(2)]
    codec.compress([Chunk((first, error), messages[0])])
    codec.compress_difference([Chunk((second, sent), messages[1])])
    codec.decompress([Chunk((decoded,), messages[0])])
    codec.add_difference([Chunk((received,), messages[1])])
    return [*messages, error, sent, decoded, received]


class CompiledIntegerCodec(IntegerCodec):
    """Codec of `IntegerCode` in compiled loops, one pass over memory for each operation.

    Args:
        code: code.
        loops: compiled loops.
    """

    def __init__(self, code: IntegerCode, loops: Any) -> None:
        super().__init__(code)
        self._loops = loops

    def compress(self, chunks: Iterable[Chunk]) -> None:
        """Write the code of values + error, and keep the rest in the error."""
        in_threads(partial(self._write, self._loops.compress), chunks)

    def compress_difference(self, chunks: Iterable[Chunk]) -> None:
        """Write the code of values - sent, and add what is decoded to what was sent."""
        in_threads(partial(self._write, self._loops.compress_difference), chunks)

    def decompress(self, chunks: Iterable[Chunk]) -> None:
        """Decode chunks into their values."""
        in_threads(partial(self._read, self._loops.decompress), chunks)

    def add_difference(self, chunks: Iterable[Chunk]) -> None:
        """Add what is decoded to the values."""
        in_threads(partial(self._read, self._loops.add_difference), chunks)

    def _write(self, loop: Callable[..., None], chunk: Chunk) -> None:
        scales, wire, integers = self._arrays(chunk)
        _on_blocks(loop, chunk.vectors, scales, integers, np.float32(self.levels))
        if wire is not integers:
            self._loops.pack_pairs(integers, wire)

    def _read(self, loop: Callable[..., None], chunk: Chunk) -> None:
        scales, wire, integers = self._arrays(chunk)
        if wire is not integers:
            self._loops.unpack_pairs(wire, integers)
        _on_blocks(loop, chunk.vectors, scales, integers)

    def _arrays(self, chunk: Chunk) -> tuple[Any, Any, Any]:
        """Return scales and integers on the wire, and the integers as int8: the same memory unless they are pairs."""
        scales, integers = (part.view(-1).numpy() for part in self.parts(chunk.memory, len(chunk.vectors[0])))
        return scales, integers, integers if integers.dtype == np.int8 else np.empty(2 * len(integers), np.int8)


def _on_blocks(loop: Callable[..., None], vectors: Sequence[Tensor], scales: Any, integers: Any, *numbers: Any) -> None:
    """Call a loop for the whole blocks of vectors, and for the last block, filled with zeros."""
    rest = len(vectors[0]) % BLOCK
    blocks, whole = len(vectors[0]) // BLOCK, len(vectors[0]) - rest
    first = [each[:whole].numpy() for each in vectors]
    loop(*[*first, scales[:blocks], integers[:whole], *numbers])
    if rest:
        filled = [nn.functional.pad(each[whole:], (0, BLOCK - rest)) for each in vectors]
        last = [each.numpy() for each in filled]
        loop(*[*last, scales[blocks:], integers[whole:], *numbers])
        vectors[-1][whole:] = filled[-1][:rest]  # the only one that the loop changes
