"""Cost of compensating a stale gradient, against adding one vector of that size to another."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import paceline as pl
from common import options, ratios, report, spread, timed
from paceline.policies.compensation.base import apply_compensators
from paceline.policies.compensation.delay import DCS3GD
from paceline.tensors.compiled_arithmetic import stale_arithmetic
from paceline.tensors.stale_vectors import StaleVectors

BARS = {
    "staleness_lr": 1.5,
    "staleness_weight": 0.1,
    "dc_asgd, constant": 2.0,
    "dc_asgd, adaptive": 5.0,
    "dc_s3gd": 3.5,
    "staleness_lr and dc_asgd, constant": 2.5,
}


def main() -> None:
    parser = options(__doc__ or "", rounds=11)
    parser.add_argument("--parameters", type=int, default=11_700_000)
    parser.add_argument("--repeats", type=int, default=5, help="repetitions timed together in a round")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    # Small, so that a gradient stays finite after many corrections.
    gradient, now, then, total = (1e-3 * torch.randn(args.parameters) for _ in range(4))
    squared_norm = float(gradient.norm()) ** 2
    seconds: dict[str, list[float]] = {}
    for i in range(args.rounds + 1):
        for name, compensators in cases().items():
            memory: dict[str, list[Tensor]] = {}
            compensate(compensators, gradient, now, then, squared_norm, memory)  # allocates its memory
            act = partial(compensate, compensators, gradient, now, then, squared_norm, memory)
            ours, addition = timed(act, args.repeats), timed(partial(total.add_, now), args.repeats)
            if i > 0:
                seconds.setdefault(name, []).append(ours)
                seconds.setdefault(f"{name}: addition", []).append(addition)
    results: dict[str, object] = {"bar": f"at most {BARS} times one addition, median of the ratios round by round"}
    for name in cases():
        ratio = ratios(seconds[name], seconds[f"{name}: addition"])
        results[name] = {"s": spread(seconds[name]), "ratio": {**ratio, "meets_bar": ratio["median"] <= BARS[name]}}
    report("compensation", args, results)


def cases() -> dict[str, tuple[pl.plans.Compensator, ...]]:
    return {
        "staleness_lr": (pl.staleness_lr(C=1e-9),),
        "staleness_weight": (pl.staleness_weight(),),
        "dc_asgd, constant": (pl.dc_asgd(lambda0=0.04),),
        "dc_asgd, adaptive": (pl.dc_asgd(lambda0=2, m=0.95),),
        "dc_s3gd": (DCS3GD(),),
        "staleness_lr and dc_asgd, constant": pl.plans.chain(pl.staleness_lr(C=1e-9), pl.dc_asgd(lambda0=0.04)),
    }


def compensate(
    compensators: tuple[pl.plans.Compensator, ...],
    gradient: Tensor,
    now: Tensor,
    then: Tensor,
    squared_norm: float,
    memory: dict[str, list[Tensor]],
) -> None:
    delayed = StaleVectors(
        staleness=3,
        learning_rate=0.1,
        squared_norm=squared_norm,
        gradient=[gradient],
        now=[now],
        then=[then],
        arithmetic=stale_arithmetic([now]),
    )
    apply_compensators(compensators, delayed, lambda _: memory)


if __name__ == "__main__":
    main()
