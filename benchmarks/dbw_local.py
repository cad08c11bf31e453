"""DBW on real processes against every static k: seconds to the same loss, seed by seed.

Softmax regression on the digits, on worker processes that sleep for a shifted-exponential time before each gradient.
The target is the loss on all training samples, evaluated in another process. Static k run with a learning rate
proportional to k, as in the paper. They also run with DBW's own learning rate, without a bar.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import mean
from typing import Literal

import torch

import paceline as pl
from common import options, report, spread

BAR = 1.05
Rule = Literal["constant", "proportional"]


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--n", type=int, default=4, help="number of worker processes")
    parser.add_argument("--shift-s", type=float, default=0.03)
    parser.add_argument("--mean-s", type=float, default=0.07, help="mean of the exponential part of a compute time")
    parser.add_argument("--loss", type=float, default=0.5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ks = range(1, args.n + 1)
    contenders: dict[str, tuple[str, Rule]] = {
        "dbw": ("dbw", "constant"),
        **{f"k={k}, proportional": (f"backup(k={k})", "proportional") for k in ks},
        **{f"k={k}, same rate": (f"backup(k={k})", "constant") for k in ks},
    }
    times_s: dict[str, list[float]] = {name: [] for name in contenders}
    for seed in range(args.rounds):
        for name, (protocol, lr_rule) in contenders.items():
            times_s[name].append(seconds(protocol, lr_rule, seed, args))
    static = [name for name in contenders if name.endswith("proportional")]
    best = min(static, key=lambda name: mean(times_s[name]))
    ratio = mean(times_s["dbw"]) / mean(times_s[best])
    report(
        "dbw_local",
        args,
        {
            "bar": f"DBW's mean time at most {BAR} x that of the best static k with a proportional rate",
            "seconds_to_loss": {name: {"mean": mean(times), **spread(times)} for name, times in times_s.items()},
            "best_static": best,
            "ratio": {
                "of_means": ratio,
                "by_seed": [ours / theirs for ours, theirs in zip(times_s["dbw"], times_s[best], strict=True)],
                "meets_bar": ratio <= BAR,
            },
        },
    )


def seconds(protocol: str, lr_rule: Rule, seed: int, args: argparse.Namespace) -> float:
    """Return the time of the version that reached the target loss."""
    digits = pl.jobs.digits()
    sleeps = pl.Cluster(args.n, pl.timing.ShiftedExponential(shift_s=args.shift_s, mean_s=args.mean_s))
    result = pl.train(
        replace(digits, eval_data=digits.data, lr_rule=lr_rule),
        protocol=protocol,
        cluster=pl.LocalCluster(args.n, slowness=sleeps),
        stop=pl.Stop(eval_loss=args.loss, updates=3000),
        evaluate_every="updates=1",
        seed=seed,
    )
    if result.stopped_by != "eval_loss":
        raise SystemExit(f"{protocol} with seed {seed} did not reach the loss: {result.reason}")
    return result.time_s


if __name__ == "__main__":
    main()
