"""Wire format: the dtype in which parameters and gradients are sent; both ends compute in the job's own dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from paceline.engines.distributed.transport.buckets import Bucket, make_buckets
from paceline.engines.distributed.transport.wire import VersionMessages, Wire
from paceline.tensors.flat_buffers import ALIGNMENT_BYTES, FlatBuffers, FlatLayout
from paceline.tensors.version_store import VersionStore

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "float16": torch.float16}


class WireFormat(Wire):
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

    def remainder(self) -> None:
        """Return None: rounding leaves nothing for a later message."""

    def pack(
        self, vectors: FlatBuffers, memory: Tensor, bucket: Bucket | None = None, left_out: FlatBuffers | None = None
    ) -> None:
        """Convert vectors, or one bucket of them, to wire memory."""
        for flat, target in self._pairs(vectors, memory, bucket):
            target.copy_(flat)

    def unpack(self, memory: Tensor, vectors: FlatBuffers, bucket: Bucket | None = None) -> None:
        """Convert wire memory, or one bucket of it, to vectors."""
        for flat, source in self._pairs(vectors, memory, bucket):
            flat.copy_(source)

    def overflows(self, memory: Tensor, squared_norm: float) -> bool:
        """Return whether rounding has made a number of a finite gradient, given its squared norm, infinite."""
        # No number exceeds the norm, so most gradients are not read again.
        if not self.is_rounding or squared_norm <= torch.finfo(self._rounded_to).max ** 2:
            return False
        numbers = [
            each.of(memory).view(dtype)
            for each, dtype in zip(self._ranges, self._dtypes, strict=True)
            if dtype == self._rounded_to
        ]
        return any(not bool(torch.isfinite(each).all()) for each in numbers)

    def messages_of(self, versions: VersionStore) -> VersionMessages:
        """Return whole versions."""
        return _WholeVersions(self, versions)

    def receivers(self, memory: Tensor, vectors: FlatBuffers) -> list[Tensor]:
        """Return the wire memory."""
        return [memory]

    def unpack_version(self, memory: Tensor, vectors: FlatBuffers, *, is_difference: bool) -> None:
        """Convert a version that has been received."""
        self.unpack(memory, vectors)

    def packed_version(self, memory: Tensor, vectors: FlatBuffers) -> Tensor:
        """Return the wire memory of a version."""
        self.pack(vectors, memory)
        return memory

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


class _WholeVersions(VersionMessages):
    """Whole versions, each of which is packed once.

    Args:
        wire: wire format.
        versions: versions.
    """

    def __init__(self, wire: WireFormat, versions: VersionStore) -> None:
        self._wire = wire
        self._versions = versions
        self._packed: dict[int, Tensor] = {}

    def packed(self, version: int) -> Tensor:
        """Return the wire memory of a version that is in use."""
        vectors = self._versions[version]
        if not self._wire.is_rounding:
            return vectors.memory
        if version not in self._packed:
            past = [each for each in self._packed if each not in self._versions]
            memory = self._packed.pop(past[0]) if past else self._wire.allocate(vectors)
            self._wire.pack(vectors, memory)
            self._packed[version] = memory
        return self._packed[version]

    def message(self, peer_id: int, version: int) -> tuple[list[tuple[int, Tensor]], bool]:
        """Return the bucket of a version."""
        return [(0, self.packed(version))], False

    def held_by(self, peer_id: int, version: int) -> Tensor:
        """Return the wire memory of a version, the same for all processes."""
        return self.packed(version)

    def forget(self, peer_id: int) -> None:
        """Forget nothing: no message depends on an earlier one."""
