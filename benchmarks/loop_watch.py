"""Cost of the look of an attached loop at its objects: processor time per step, 100 convolutions with batch norm.

- `step`: in steps after the first 10, of which each 100th compares elements of the parameters.
- `first steps`: in the first 10, of which each compares them.
- `debug`: with `debug=true`, which compares them in every step.
"""

from __future__ import annotations

import copy
from time import process_time
from typing import Any

import torch
from torch import nn

from common import options, report, spread
from paceline.user_loop.hooks.loop_watch import LoopWatch
from paceline.worker.write_watch import FIRST_STEPS, PERIOD

STEP_S = 0.02
BAR_US = 200.0  # 1 % of a step


def main() -> None:
    parser = options(__doc__ or "", rounds=11)
    parser.add_argument("--layers", type=int, default=100, help="convolutions, with three parameters each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = network(args.layers)
    tensors = len(list(model.parameters()))
    steps = {"step": (FIRST_STEPS, 5 * PERIOD, False), "first steps": (0, FIRST_STEPS, False), "debug": (0, 20, True)}
    results: dict[str, Any] = {"tensors": tensors, "bar": f"step: at most {BAR_US:g} us, 1 % of {STEP_S * 1e3:g} ms"}
    for name, given in steps.items():
        results[name] = spread([cost_us(model, *given) for _ in range(args.rounds)])
    results["meets_bar"] = results["step"]["median"] <= BAR_US
    report("loop_watch", args, results)


def network(layers: int) -> nn.Module:
    """Return blocks of two convolutions, each with batch norm."""
    pairs = [(nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8)) for _ in range(layers)]
    return nn.Sequential(
        *(nn.Sequential(*first, *second) for first, second in zip(pairs[::2], pairs[1::2], strict=True))
    )


def cost_us(model: nn.Module, before: int, steps: int, debug: bool) -> float:
    """Return the microseconds of processor time of a step, without the copy of the version, which it makes anyway."""
    watch = LoopWatch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    watch.start(debug=debug)
    watch.load(copy.deepcopy(model))
    assert watch._writes is not None
    for _ in range(before):
        watch.look()
        watch._writes.mark()
    begun_s = process_time()
    for _ in range(steps):
        watch.look()
        watch._writes.mark()
    return (process_time() - begun_s) / steps * 1e6


if __name__ == "__main__":
    main()
