"""In which numbers parameters and gradients travel; both ends keep them in the job's own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from paceline.engines.distributed.transport.buckets import Bucket, cut
from paceline.server.flat_buffers import ALIGNMENT_BYTES, FlatBuffers, FlatLayout

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}


class WireFormat:
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
        pieces: in which a gradient travels, in the order in which it is likely to be finished.
        parameters: where in what travels each of them is.

    >>> layout = FlatLayout(torch.nn.Linear(1000, 1000))
    >>> layout.nbytes, WireFormat("bf16", layout).nbytes
    (4004032, 2002048)
    """

    def __init__(self, word: str, layout: FlatLayout) -> None:
        self._rounded_to = DTYPES[word]
        probe = FlatBuffers(layout, torch.empty(layout.nbytes, dtype=torch.uint8))
        flats = [*probe.flat_parameters, *probe.flat_buffers]
        self._dtypes = [self._travels_as(flat) for flat in probe.flat_parameters]
        self._dtypes += [flat.dtype for flat in probe.flat_buffers]
        self.is_rounding = self._dtypes != [flat.dtype for flat in flats]
        self._places = _placed([flat.numel() * dtype.itemsize for flat, dtype in zip(flats, self._dtypes, strict=True)])
        self.nbytes = self._places[-1].stop
        self.pieces = cut(self._places[len(probe.flat_parameters) - 1].stop, self.nbytes)
        self.parameters = self._parameters(probe)

    def room(self, vectors: FlatBuffers) -> Tensor:
        """Return memory for what travels of vectors, uint8 [nbytes]: their own if that will do."""
        return torch.zeros(self.nbytes, dtype=torch.uint8) if self.is_rounding else vectors.memory

    def pack(self, vectors: FlatBuffers, travelling: Tensor, piece: Bucket | None = None) -> None:
        """Write vectors, or a piece of them, as they travel."""
        for flat, place in self._pairs(vectors, travelling, piece):
            place.copy_(flat)

    def unpack(self, travelling: Tensor, vectors: FlatBuffers, piece: Bucket | None = None) -> None:
        """Write what has travelled, or a piece of it, into vectors."""
        for flat, place in self._pairs(vectors, travelling, piece):
            flat.copy_(place)

    def overflows(self, travelling: Tensor, squared_norm: float) -> bool:
        """Return whether some number of a finite gradient, given its squared norm, has become infinite."""
        if not self.is_rounding or squared_norm <= torch.finfo(self._rounded_to).max ** 2:
            return False
        numbers = [
            place.of(travelling).view(dtype)
            for place, dtype in zip(self._places, self._dtypes, strict=True)
            if dtype == self._rounded_to
        ]
        return any(not bool(torch.isfinite(each).all()) for each in numbers)

    def _travels_as(self, parameter: Tensor) -> torch.dtype:
        return self._rounded_to if parameter.dtype == torch.float32 else parameter.dtype

    def _parameters(self, probe: FlatBuffers) -> list[Bucket]:
        starts = {flat.dtype: place.start for flat, place in zip(probe.flat_parameters, self._places, strict=False)}
        places = []
        for view in probe.parameters:
            start = starts[view.dtype]
            places.append(Bucket(start, start + view.numel() * self._travels_as(view).itemsize))
            starts[view.dtype] = places[-1].stop
        return places

    def _pairs(self, vectors: FlatBuffers, travelling: Tensor, piece: Bucket | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what of each flat vector is in a piece, with where it is there; none where they are the same."""
        if not self.is_rounding:
            return
        flats = [*vectors.flat_parameters, *vectors.flat_buffers]
        for flat, place, dtype in zip(flats, self._places, self._dtypes, strict=True):
            common = place.common(piece or place)
            if common.nbytes > 0:
                numbers = flat[(common.start - place.start) // dtype.itemsize :][: common.nbytes // dtype.itemsize]
                yield numbers, common.of(travelling).view(dtype)[: numbers.numel()]


def _placed(sizes: list[int]) -> list[Bucket]:
    starts = accumulate((-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes), initial=0)
    return [Bucket(*ends) for ends in pairwise(starts)]


class WireBuffer:
    """Vectors at one end of a line, and what of them comes or goes over it.

    Args:
        wire: in which numbers.
        vectors: at this end.

    Attributes:
        vectors: as given.
        memory: uint8 [bytes on the wire].
        pieces: of it, as they travel if not all at once.
    """

    def __init__(self, wire: WireFormat, vectors: FlatBuffers) -> None:
        self._wire = wire
        self.vectors = vectors
        self.memory = wire.room(vectors)
        self.pieces = [piece.of(self.memory) for piece in wire.pieces]

    def pack(self, number: int | None = None) -> None:
        """Get the vectors, or a piece of them, ready to go."""
        self._wire.pack(self.vectors, self.memory, None if number is None else self._wire.pieces[number])

    def unpack(self, number: int | None = None) -> None:
        """Read the vectors, or a piece of them, that have come."""
        self._wire.unpack(self.memory, self.vectors, None if number is None else self._wire.pieces[number])

    def overflows(self, squared_norm: float) -> bool:
        """Return whether packing a finite gradient has made some number of it infinite."""
        return self._wire.overflows(self.memory, squared_norm)
