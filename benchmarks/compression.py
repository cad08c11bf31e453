"""Cost of compressing and decompressing a gradient with error feedback, against a copy of it.

The time that the saved bytes take at 1 Gbit/s is the gain of one message. Operations of torch code the integers, or
compiled loops of numba. A version is sent as a difference to what the receiver has, which the server keeps too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from common import options, ratios, report, spread, timed
from paceline.compression.compressed_vectors import CompressedFormat
from paceline.core.wire import int4, int8, top_k
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout

BAR_COPIES, BAR_OF_SAVED = 8.0, 0.25
BYTES_PER_S = 125e6
CASES = {  # code, and whether compiled loops are used
    "int8": (int8(), False),
    "int8, loops": (int8(), True),
    "int4": (int4(), False),
    "int4, loops": (int4(), True),
    "top_k(share=0.01)": (top_k(0.01), False),
}


def main() -> None:
    parser = options(__doc__ or "", rounds=11)
    parser.add_argument("--width", type=int, default=3_425, help="width of a square layer; 3,425 has 47 MB")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    layout = FlatLayout(nn.Linear(args.width, args.width))
    gradient = layout.allocate()
    gradient.flat_parameters[0].normal_()
    formats = {name: CompressedFormat(code, layout, loads_numba=loops) for name, (code, loops) in CASES.items()}
    acts = {name: acts_of(wire, gradient) for name, wire in formats.items()}
    seconds: dict[str, list[list[float]]] = {name: [] for name in CASES}
    for i in range(args.rounds + 1):
        for name, each in acts.items():
            each_s = [timed(act) for act in each]
            if i > 0:  # the first messages write every page
                seconds[name].append(each_s)
    results: dict[str, object] = {
        "bars": f"at most {BAR_COPIES:g} copies, and {BAR_OF_SAVED:g} of the time of the saved bytes at 1 Gbit/s"
    }
    for name, wire in formats.items():
        copies, packs, unpacks, differences, additions = map(list, zip(*seconds[name], strict=True))
        both = list(map(sum, zip(packs, unpacks, strict=True)))
        saved_s = (layout.nbytes - wire.nbytes) / BYTES_PER_S
        results[name] = {
            "bytes": {"vector": layout.nbytes, "wire": wire.nbytes},
            "copy_s": spread(copies),
            "pack_s": spread(packs),
            "unpack_s": spread(unpacks),
            "copies": ratios(both, copies),
            "copies_of_difference": ratios(list(map(sum, zip(differences, additions, strict=True))), copies),
            "of_saved": spread([each / saved_s for each in both]),
        }
    report("compression", args, results, "numba")


def acts_of(wire: CompressedFormat, gradient: FlatBuffers) -> list[Callable[[], None]]:
    """Return a copy, both ends of a gradient's message, and both ends of a version's difference."""
    copy, left_out, decoded, sent, received = (wire.layout.allocate() for _ in range(5))
    message, difference = wire.allocate(gradient), wire.allocate(gradient)
    return [
        partial(copy.copy_, gradient),
        partial(wire.compress, gradient, left_out, message),
        partial(wire.decompress, message, decoded),
        partial(wire.compress_difference, gradient, sent, difference),
        partial(wire.add_difference, difference, received),
    ]


if __name__ == "__main__":
    main()
