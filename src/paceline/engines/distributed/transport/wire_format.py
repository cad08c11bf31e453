"""Wire format: the dtype in which parameters and gradients are sent; both ends compute in the job's own dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from paceline.compression.compressed_vectors import CompressedFormat
from paceline.core.wire import Code, parse_wire
from paceline.engines.distributed.transport.buckets import Bucket, make_buckets
from paceline.tensors.flat_buffers import ALIGNMENT_BYTES, FlatBuffers, FlatLayout

WHOLE = 1  # number of the bucket of a whole version, for a process that has none to add a difference to
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}


class WireFormat:
    """Conversion of vectors to the bytes on the wire, and back.

    Parameters of float32, and their gradients, are rounded to the nearest number of the wire's dtype, ties to even:
    by at most 2^-9 of a value in bf16. In float16 the error is at most 2^-12 of a value from 6.1e-5 to 65504, or 3e-8
    of a smaller one; a larger value becomes infinite. Other dtypes are sent unchanged, and so are all buffers: they are
    few bytes, and may be counters.

    Args:
        dtype: key of `DTYPES`.
        layout: layout of the vectors.

    Attributes:
        is_rounding: whether any value is rounded; else a vector's own memory is sent.
        nbytes: bytes on the wire.
        buckets: buckets of a gradient, in the order in which a backward pass usually completes them.
        parameters: range of each parameter on the wire.

    >>> layout = FlatLayout(torch.nn.Linear(1000, 1000))
    >>> layout.nbytes, WireFormat("bf16", layout).nbytes
    (4004032, 2002048)
    """

    def __init__(self, dtype: str, layout: FlatLayout) -> None:
        self._rounded_to = DTYPES[dtype]
        probe = FlatBuffers(layout, torch.empty(layout.nbytes, dtype=torch.uint8))
        flats = [*probe.flat_parameters, *probe.flat_buffers]
        self._dtypes = [self._wire_dtype(flat) for flat in probe.flat_parameters]
        self._dtypes += [flat.dtype for flat in probe.flat_buffers]
        self.is_rounding = self._dtypes != [flat.dtype for flat in flats]
        self._ranges = _aligned(
            [flat.numel() * dtype.itemsize for flat, dtype in zip(flats, self._dtypes, strict=True)]
        )
        self.nbytes = self._ranges[-1].stop
        self.buckets = make_buckets(self._ranges[len(probe.flat_parameters) - 1].stop, self.nbytes)
        self.parameters = self._parameters(probe)

    def allocate(self, vectors: FlatBuffers) -> Tensor:
        """Return wire memory for vectors, uint8 [nbytes]: their own memory if nothing is rounded."""
        return torch.zeros(self.nbytes, dtype=torch.uint8) if self.is_rounding else vectors.memory

    def pack(self, vectors: FlatBuffers, memory: Tensor, bucket: Bucket | None = None) -> None:
        """Convert vectors, or one bucket of them, to wire memory."""
        for flat, target in self._pairs(vectors, memory, bucket):
            target.copy_(flat)

    def unpack(self, memory: Tensor, vectors: FlatBuffers, bucket: Bucket | None = None) -> None:
        """Convert wire memory, or one bucket of it, to vectors."""
        for flat, source in self._pairs(vectors, memory, bucket):
            flat.copy_(source)

    def overflows(self, memory: Tensor, squared_norm: float) -> bool:
        """Return whether rounding has made a number of a finite gradient, given its squared norm, infinite."""
        if not self.is_rounding or squared_norm <= torch.finfo(self._rounded_to).max ** 2:
            return False
        numbers = [
            each.of(memory).view(dtype)
            for each, dtype in zip(self._ranges, self._dtypes, strict=True)
            if dtype == self._rounded_to
        ]
        return any(not bool(torch.isfinite(each).all()) for each in numbers)

    def _wire_dtype(self, parameter: Tensor) -> torch.dtype:
        return self._rounded_to if parameter.dtype == torch.float32 else parameter.dtype

    def _parameters(self, probe: FlatBuffers) -> list[Bucket]:
        starts = {flat.dtype: each.start for flat, each in zip(probe.flat_parameters, self._ranges, strict=False)}
        ranges = []
        for view in probe.parameters:
            start = starts[view.dtype]
            ranges.append(Bucket(start, start + view.numel() * self._wire_dtype(view).itemsize))
            starts[view.dtype] = ranges[-1].stop
        return ranges

    def _pairs(self, vectors: FlatBuffers, memory: Tensor, bucket: Bucket | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each flat vector's part in a bucket, with the part's wire memory; nothing if both are the same."""
        if not self.is_rounding:
            return
        flats = [*vectors.flat_parameters, *vectors.flat_buffers]
        for flat, whole, dtype in zip(flats, self._ranges, self._dtypes, strict=True):
            part = whole.intersection(bucket or whole)
            if part.nbytes > 0:
                numbers = flat[(part.start - whole.start) // dtype.itemsize :][: part.nbytes // dtype.itemsize]
                yield numbers, part.of(memory).view(dtype)[: numbers.numel()]


def _aligned(sizes: list[int]) -> list[Bucket]:
    starts = accumulate((-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes), initial=0)
    return [Bucket(*ends) for ends in pairwise(starts)]


class CompressedWire(CompressedFormat):
    """Compressed vectors in one bucket, because a code needs whole blocks.

    Args:
        code: code of the parameters; this and the next arguments are those of `CompressedFormat`.
        layout: layout of the vectors.
        loads_numba: whether this process loads numba.

    Attributes:
        buckets: that bucket.
        parameters: range of each parameter on the wire: that bucket.
    """

    def __init__(self, code: Code, layout: FlatLayout, *, loads_numba: bool = False) -> None:
        super().__init__(code, layout, loads_numba=loads_numba)
        self.buckets = [Bucket(0, self.nbytes)]
        self.parameters = self.buckets * len(layout.parameters)


AnyFormat = WireFormat | CompressedWire


def make_format(wire: str, layout: FlatLayout, *, loads_numba: bool = False) -> AnyFormat:
    """Return a format on the wire.

    Args:
        wire: a dtype, or a code such as "int8".
        layout: layout of the vectors.
        loads_numba: whether this process loads numba for a code, as in `CompressedFormat`.
    """
    code = parse_wire(wire)
    return WireFormat(wire, layout) if code is None else CompressedWire(code, layout, loads_numba=loads_numba)


class WireBuffer:
    """Vectors at one end of a connection, and their wire memory.

    Args:
        wire: wire format.
        vectors: vectors at this end.

    Attributes:
        vectors: as given.
        memory: wire memory, uint8 [nbytes].
        buckets: views of the wire memory, one for each bucket.
    """

    def __init__(self, wire: AnyFormat, vectors: FlatBuffers) -> None:
        self._wire = wire
        self.vectors = vectors
        self.memory = wire.allocate(vectors)
        self.buckets = [bucket.of(self.memory) for bucket in wire.buckets]

    def pack(self, number: int | None = None) -> None:
        """Convert the vectors, or one bucket of them, before they are sent; a codec keeps the rest for next time."""
        if isinstance(self._wire, CompressedWire):
            self._wire.compress(self.vectors, self.left_out, self.memory)
        else:
            self._wire.pack(self.vectors, self.memory, None if number is None else self._wire.buckets[number])

    def unpack(self, number: int | None = None) -> None:
        """Convert the vectors, or one bucket of them, after they have been received."""
        if isinstance(self._wire, CompressedWire):
            self._wire.decompress(self.memory, self.vectors)
        else:
            self._wire.unpack(self.memory, self.vectors, None if number is None else self._wire.buckets[number])

    def overflows(self, squared_norm: float) -> bool:
        """Return whether packing a finite gradient has made a number of it infinite."""
        return isinstance(self._wire, WireFormat) and self._wire.overflows(self.memory, squared_norm)

    @cached_property
    def left_out(self) -> FlatBuffers:
        """What the messages of a codec have left out so far."""
        assert isinstance(self._wire, CompressedWire)
        return self._wire.layout.allocate()
