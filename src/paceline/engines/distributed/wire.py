"""In which numbers parameters and gradients travel; both ends keep them in the job's own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from paceline.vectors import ALIGNMENT_BYTES, Layout, Vectors

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}


class Wire:
    """Turns vectors into the bytes that travel, and back.

    Parameters of float32, or their gradient, are rounded to the nearest number of the wire's type, ties to even:
    by at most 2^-9 of a value in bf16, and in float16 by 2^-12 of one from 6.1e-5 to 65504, or by 3e-8 of a smaller
    one, while a larger one becomes infinite. What has another type goes as it is, and so do all buffers: they are
    few bytes, and may count.

    Args:
        word: a key of `DTYPES`.
        layout: of the vectors.

    Attributes:
        is_rounding: whether anything is rounded; else a vector's own memory travels.
        nbytes: that travel.

    >>> layout = Layout(torch.nn.Linear(1000, 1000))
    >>> layout.nbytes, Wire("bf16", layout).nbytes
    (4004032, 2002048)
    """

    def __init__(self, word: str, layout: Layout) -> None:
        self._dtype = DTYPES[word]
        probe = Vectors(layout, torch.empty(layout.nbytes, dtype=torch.uint8))
        self._rounded = [self._is_rounded(flat) for flat in probe.flat_parameters] + [False] * len(probe.flat_buffers)
        self.is_rounding = any(self._rounded)
        self._slices = self._places([*probe.flat_parameters, *probe.flat_buffers])
        self.nbytes = self._slices[-1].stop if self.is_rounding else layout.nbytes

    def room(self, vectors: Vectors) -> Tensor:
        """Return memory for what travels of vectors, uint8 [nbytes]: their own if that will do."""
        return torch.zeros(self.nbytes, dtype=torch.uint8) if self.is_rounding else vectors.memory

    def pack(self, vectors: Vectors, travelling: Tensor) -> None:
        """Write vectors as they travel."""
        for flat, piece in self._pairs(vectors, travelling):
            piece.copy_(flat)

    def unpack(self, travelling: Tensor, vectors: Vectors) -> None:
        """Write what has travelled into vectors."""
        for flat, piece in self._pairs(vectors, travelling):
            flat.copy_(piece)

    def overflows(self, travelling: Tensor, squared_norm: float) -> bool:
        """Return whether some number of a finite gradient, given its squared norm, has become infinite."""
        if not self.is_rounding or squared_norm <= torch.finfo(self._dtype).max ** 2:
            return False
        pieces = [
            travelling[place].view(self._dtype)
            for place, rounds in zip(self._slices, self._rounded, strict=True)
            if rounds
        ]
        return any(not bool(torch.isfinite(piece).all()) for piece in pieces)

    def _is_rounded(self, flat: Tensor) -> bool:
        return flat.dtype == torch.float32 and self._dtype != torch.float32

    def _places(self, flats: list[Tensor]) -> list[slice]:
        sizes = [
            flat.numel() * (self._dtype if is_rounded else flat.dtype).itemsize
            for flat, is_rounded in zip(flats, self._rounded, strict=True)
        ]
        starts = accumulate((-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes), initial=0)
        return [slice(start, end) for start, end in pairwise(starts)]

    def _pairs(self, vectors: Vectors, travelling: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every flat vector with its place in what travels; none where they are the same."""
        if not self.is_rounding:
            return
        flats = [*vectors.flat_parameters, *vectors.flat_buffers]
        for flat, place, is_rounded in zip(flats, self._slices, self._rounded, strict=True):
            dtype = self._dtype if is_rounded else flat.dtype
            yield flat, travelling[place].view(dtype)[: flat.numel()]


class Travelling:
    """Vectors at one end of a line, and what of them comes or goes over it.

    Args:
        wire: in which numbers.
        vectors: at this end.

    Attributes:
        memory: uint8 [bytes on the wire].
    """

    def __init__(self, wire: Wire, vectors: Vectors) -> None:
        self._wire = wire
        self._vectors = vectors
        self.memory = wire.room(vectors)

    def pack(self) -> None:
        """Get the vectors ready to go."""
        self._wire.pack(self._vectors, self.memory)

    def unpack(self) -> None:
        """Read the vectors that have come."""
        self._wire.unpack(self.memory, self._vectors)

    def overflows(self, squared_norm: float) -> bool:
        """Return whether packing a finite gradient has made some number of it infinite."""
        return self._wire.overflows(self.memory, squared_norm)
