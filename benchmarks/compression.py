"""Cost of compressing and decompressing a gradient with error feedback, against a copy of it.

The time that the saved bytes take at 1 Gbit/s is the gain of one message.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from common import options, ratios, report, spread, timed
from paceline.engines.distributed.transport.wire_format import WireBuffer, make_format
from paceline.server.flat_buffers import FlatLayout

BAR_COPIES, BAR_OF_SAVED = 8.0, 0.25
BYTES_PER_S = 125e6
WIRES = ("int8", "int4", "top_k(share=0.01)")


def main() -> None:
    parser = options(__doc__ or "", rounds=11)
    parser.add_argument("--width", type=int, default=3_425, help="width of a square layer; 3,425 has 47 MB")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    layout = FlatLayout(nn.Linear(args.width, args.width))
    gradient, copy, received = (layout.allocate() for _ in range(3))
    gradient.flat_parameters[0].normal_()
    results: dict[str, object] = {
        "bars": f"at most {BAR_COPIES:g} copies, and {BAR_OF_SAVED:g} of the time of the saved bytes at 1 Gbit/s"
    }
    for name in WIRES:
        wire = make_format(name, layout)
        sender, receiver = WireBuffer(wire, gradient), WireBuffer(wire, received)
        receiver.memory = sender.memory
        acts = (partial(copy.copy_, gradient), sender.pack, receiver.unpack)
        rounds = [[timed(act) for act in acts] for _ in range(args.rounds + 1)]
        copies, packs, unpacks = zip(*rounds[1:], strict=True)
        both = [pack + unpack for pack, unpack in zip(packs, unpacks, strict=True)]
        saved_s = (layout.nbytes - wire.nbytes) / BYTES_PER_S
        results[name] = {
            "bytes": {"vector": layout.nbytes, "wire": wire.nbytes},
            "copy_s": spread(copies),
            "pack_s": spread(packs),
            "unpack_s": spread(unpacks),
            "copies": ratios(both, copies),
            "of_saved": spread([each / saved_s for each in both]),
        }
    report("compression", args, results)


if __name__ == "__main__":
    main()
