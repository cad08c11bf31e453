"""`auto` on real processes: seconds to a loss against statics with a tuned rate, and the time of its decisions.

Softmax regression on the digits, on worker processes that sleep for 50 ms before each gradient, worker 0 for four times
as long. The learning rate of BSP is tuned, and is all that `auto` is given. Each static has the best of that rate and
its halves. The loss is that of all training samples, evaluated in another process. The share of the decisions is
measured in these runs, which take a few seconds, and in runs of 30 s.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from statistics import median

import torch

import paceline as pl
from common import Stopwatch, options, ratios, report, spread
from paceline.coordinator.controller_group import ControllerGroup
from paceline.policies.controllers.auto import Auto
from paceline.policies.noise_rule import NoiseTracker

STATICS = ("bsp", "k_sync(k=3)", "k_sync(k=2)", "pull(k=1)", "k_batch_async(k=4)", "asp")
BSP_RATES = (16.0, 8.0, 4.0, 2.0, 1.0)
HALVES = 4
SLEEP_S = 0.05
LONG_S = 30.0
TIME_BAR, ARRIVAL_BAR_S, SHARE_BAR = 1.10, 1e-3, 0.01


def main() -> None:
    """Measure and print."""
    parser = options(__doc__ or "")
    parser.add_argument("--n", type=int, default=4, help="number of worker processes")
    parser.add_argument("--loss", type=float, default=0.12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    watch, ahead = Stopwatch(), Stopwatch()
    for kind, name in ((Auto, "decide"), (NoiseTracker, "accept"), (NoiseTracker, "make"), (NoiseTracker, "finish")):
        watch.time(kind, name)
    ahead.time(ControllerGroup, "prepare")  # while workers compute; the call in `decide` then finds nothing to do
    rates = {"bsp": min(BSP_RATES, key=lambda lr: seconds("bsp", lr, "constant", 0, args))}
    for plan in STATICS[1:]:
        grid = [rates["bsp"] / 2**half for half in range(HALVES)]
        rates[plan] = min(grid, key=partial(seconds_at, plan, args=args))
    best = min(STATICS, key=lambda plan: seconds(plan, rates[plan], "constant", 0, args))
    times_s: dict[str, list[float]] = {"auto": [], best: [], "bsp": []}
    shares, longest_s = [], []
    for seed in range(args.rounds):
        for plan in times_s:
            watch.calls_s.clear()
            ahead.calls_s.clear()
            rate, rule = (rates["bsp"], "noise") if plan == "auto" else (rates[plan], "constant")
            times_s[plan].append(seconds(plan, rate, rule, seed, args))
            if plan == "auto":
                shares.append((watch.s + ahead.s) / times_s[plan][-1])
                longest_s.append(sorted(watch.calls_s)[int(0.99 * len(watch.calls_s))])
    long_shares = []
    for seed in range(args.rounds):
        watch.calls_s.clear()
        ahead.calls_s.clear()
        run("auto", rates["bsp"], "noise", seed, args.n, pl.Stop(seconds=LONG_S))
        long_shares.append((watch.s + ahead.s) / LONG_S)
    ratio, share, longest = ratios(times_s["auto"], times_s[best]), spread(shares), spread(longest_s)
    report(
        "auto_local",
        args,
        {
            "rates": rates,
            "best_static": best,
            "seconds_to_loss": {plan: spread(times) for plan, times in times_s.items()},
            "auto_over_best_static": {**ratio, "bar": TIME_BAR, "meets_bar": ratio["median"] <= TIME_BAR},
            "auto_over_bsp": ratios(times_s["auto"], times_s["bsp"]),
            "share_of_wall_time": {**share, "bar": SHARE_BAR, "meets_bar": median(shares) <= SHARE_BAR},
            f"share_of_wall_time_of_{LONG_S:.0f}_s": {
                **spread(long_shares),
                "bar": SHARE_BAR,
                "meets_bar": median(long_shares) <= SHARE_BAR,
            },
            "call_s_of_which_1_percent_are_longer": {
                **longest,
                "bar": ARRIVAL_BAR_S,
                "meets_bar": median(longest_s) <= ARRIVAL_BAR_S,
            },
        },
    )


def seconds_at(plan: str, lr: float, args: argparse.Namespace) -> float:
    """Return the time of a protocol at a learning rate."""
    return seconds(plan, lr, "constant", 0, args)


def seconds(plan: str, lr: float, rule: str, seed: int, args: argparse.Namespace) -> float:
    """Return the time of the version that reached the target loss; inf if none did."""
    result = run(plan, lr, rule, seed, args.n, pl.Stop(eval_loss=args.loss, seconds=60))
    return result.time_s if result.stopped_by == "eval_loss" else float("inf")


def run(plan: str, lr: float, rule: str, seed: int, n: int, stop: pl.Stop) -> pl.results.Result:
    """Train the digits on worker processes, worker 0 four times as slow."""
    digits = pl.jobs.digits(lr=lr)
    sleeps = pl.Cluster(n, pl.timing.Uniform(0.98 * SLEEP_S, 1.02 * SLEEP_S), speed=[0.25] + [1.0] * (n - 1))
    return pl.train(
        replace(digits, eval_data=digits.data, lr_rule=rule),  # type: ignore[arg-type]  # a text, checked there
        protocol=plan,
        cluster=pl.LocalCluster(n, slowness=sleeps),
        stop=stop,
        evaluate_every="gradients=4",
        seed=seed,
        progress=False,
    )


if __name__ == "__main__":
    main()
