"""Choice of a wire by its name."""

from __future__ import annotations

from paceline.core.wire import parse_wire
from paceline.engines.distributed.transport.compressed_wire import CompressedWire
from paceline.engines.distributed.transport.wire import Wire
from paceline.engines.distributed.transport.wire_format import WireFormat
from paceline.tensors.flat_buffers import FlatLayout


def make_wire(name: str, layout: FlatLayout, *, loads_numba: bool = False) -> Wire:
    """Return a wire.

    Args:
        name: a dtype, or a code such as "int8".
        layout: layout of the vectors.
        loads_numba: whether this process loads numba for a code, as in `CompressedFormat`.
    """
    code = parse_wire(name)
    return WireFormat(name, layout) if code is None else CompressedWire(code, layout, loads_numba=loads_numba)
