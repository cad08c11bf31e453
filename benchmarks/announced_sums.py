"""Protocols without a server against DistributedDataParallel: each rank a process that sleeps for its compute time.

- `even`: no rank is slow, 1 M parameters, also with a server (without encryption).
- `even_large`: the same with 11.7 M parameters.
- `half`, `quarter`: one of four ranks at half or at a quarter of the speed.
- `simulated`: a simulation from the times of a `bsp` run of the same ranks, against the ranks, at four sets of speeds.
- `lengths`: equal ranks and samples of log-normal length, with time and weight by tokens.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import torch

import paceline as pl
from common import ratios, spread
from distributed import WARM_UP, Job, rate, report_parts
from distributed_ranks import tokens

BATCH_SIZE = 16
WIDTHS = {"1 M": 500, "11.7 M": 1710}
SUMS: dict[str, Any] = {"server": False}
WITH_SERVER: dict[str, Any] = {"worker_at_server": True}
EVEN_BARS = {"bsp": 1.03, "balanced(m=8)": 1.08}
EVEN_BAR_WITH_SERVER, EVEN_LARGE_BAR = 1.10, 1.08
HALF_BARS = {"balanced(m=16)": 1.55, "k_sync(k=3)": 1.85}
QUARTER_BARS = {"balanced(m=16)": 2.8}
LENGTHS_BAR, PIECES = 0.9, 8
SPEEDS = {"even": (1, 1, 1, 1), "half": (0.5, 1, 1, 1), "quarter": (0.25, 1, 1, 1), "ladder": (0.4, 0.6, 0.8, 1)}
SIMULATED_BAR = 0.05
SLOW_COMPUTE_S = 0.4  # of a fast rank, where one is slow
Contender = tuple[str, dict[str, Any], float | None]  # protocol, arguments of the cluster, and bar


def main() -> None:
    parts = {"even": even, "even_large": even_large, "half": half, "quarter": quarter}
    parts |= {"simulated": simulated, "lengths": lengths}
    report_parts("announced_sums", __doc__ or "", parts)


def even(args: argparse.Namespace) -> dict[str, Any]:
    contenders: dict[str, Contender] = {
        f"{name} without a server": (name, SUMS, bar) for name, bar in EVEN_BARS.items()
    }
    contenders["balanced(m=8) with a server, plain"] = ("balanced(m=8)", WITH_SERVER, EVEN_BAR_WITH_SERVER)
    return _times(args, WIDTHS["1 M"], contenders)


def even_large(args: argparse.Namespace) -> dict[str, Any]:
    contenders: dict[str, Contender] = {
        "bsp without a server": ("bsp", SUMS, EVEN_LARGE_BAR),
        "bsp with a server, plain": ("bsp", WITH_SERVER, None),
    }
    return _times(args, WIDTHS["11.7 M"], contenders)


def half(args: argparse.Namespace) -> dict[str, Any]:
    return _speeds(args, 2.0, HALF_BARS)


def quarter(args: argparse.Namespace) -> dict[str, Any]:
    return _speeds(args, 4.0, QUARTER_BARS)


def simulated(args: argparse.Namespace) -> dict[str, Any]:
    """Return the simulated seconds per update over those of the ranks, with times recorded on a `bsp` run of them."""
    results: dict[str, Any] = {"bar": f"within {SIMULATED_BAR:.0%} of the ranks' time"}
    protocol = f"balanced(m={PIECES})"
    for name, speeds in SPEEDS.items():
        compute_s = [SLOW_COMPUTE_S / each for each in speeds]
        ratio = []
        for round_ in range(args.rounds):
            bsp = _job(args, compute_s, "bsp", SUMS, WIDTHS["1 M"]).answers()[0]
            real_s = _update_s(args, compute_s, protocol, SUMS, WIDTHS["1 M"])
            cluster = _recorded(bsp, compute_s)
            found = pl.simulate(protocol, cluster, updates=args.updates, seed=round_)
            first = pl.simulate(protocol, cluster, updates=WARM_UP + 1, seed=round_)
            ours_s = (found.time_s - first.time_s) / (args.updates - WARM_UP - 1)
            ratio.append(ours_s / real_s)
        measured = spread(ratio)
        results[name] = {"ratio": measured, "meets_bar": abs(measured["median"] - 1) <= SIMULATED_BAR}
    return results


def _recorded(bsp: dict[str, Any], compute_s: list[float]) -> pl.Cluster:
    """Return a simulated cluster with the times of a `bsp` run: what is not sleep is the cost of a lease."""
    by_worker: list[list[float]] = [[] for _ in compute_s]
    for worker, measured_s in bsp["computed"]:
        by_worker[worker].append(measured_s)
    cost_s = min(median(each) - slept_s for each, slept_s in zip(by_worker, compute_s, strict=True))
    update_s = _seconds_of(bsp) - max(map(median, by_worker))
    return pl.Cluster(
        len(compute_s),
        [pl.timing.Empirical(tuple(each)) for each in by_worker],
        server=pl.timing.ServerTime(update_s=update_s),
        leases=pl.timing.LeaseTime(cost_s=max(0.0, cost_s)),
    )


def lengths(args: argparse.Namespace) -> dict[str, Any]:
    """Return the updates per second over those of DDP, and over the bound of list scheduling."""
    of_samples = tokens()
    token_s = SLOW_COMPUTE_S / (BATCH_SIZE * float(of_samples.mean()))
    settings = {"token_s": token_s, "updates": args.updates, "batch_size": BATCH_SIZE}
    ours: dict[str, Any] = {**settings, "protocol": f"balanced(m={PIECES})"}
    ddp_s, ours_s = [], []
    for _ in range(args.rounds):
        ddp_s.append(_seconds(Job("train_ddp", args.workers, settings)))
        ours_s.append(_seconds(Job("train_lengths", args.workers, ours)))
    drawn = of_samples[torch.randint(64, (10_000, args.workers * PIECES, BATCH_SIZE // PIECES))].sum(2) * token_s
    bound_s = float((drawn.sum(1) / args.workers + drawn.max(1).values).mean())
    over_bound = spread([bound_s / each for each in ours_s])
    return {
        "ddp_s": spread(ddp_s),
        ours["protocol"]: {"update_s": spread(ours_s), "faster": ratios(ddp_s, ours_s)},
        "bound_s": bound_s,
        "over_bound": over_bound,
        "bar": f"at least {LENGTHS_BAR} of the updates per second of the bound",
        "meets_bar": over_bound["median"] >= LENGTHS_BAR,
    }


def _times(args: argparse.Namespace, width: int, contenders: dict[str, Contender]) -> dict[str, Any]:
    """Return the seconds per update of each contender, and of another run of DDP, over those of DDP."""
    compute_s = [args.compute_s] * args.workers
    ddp_s: list[float] = []
    ours_s: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.rounds):
        ddp_s.append(_ddp_update_s(args, compute_s, width))
        for name, (protocol, torchrun, _) in contenders.items():
            ours_s[name].append(_update_s(args, compute_s, protocol, torchrun, width))
    ddp_s.append(_ddp_update_s(args, compute_s, width))
    results: dict[str, Any] = {"ddp_s": spread(ddp_s), "ddp_over_ddp": ratios(ddp_s[1:], ddp_s[:-1])}
    for name, (_, _, bar) in contenders.items():
        ratio = ratios(ours_s[name], ddp_s[:-1])
        results[name] = {"update_s": spread(ours_s[name]), "ratio": ratio}
        if bar is not None:
            results[name] |= {"bar": f"at most {bar} x DDP's time", "meets_bar": ratio["median"] <= bar}
    return results


def _speeds(args: argparse.Namespace, slowness: float, bars: dict[str, float]) -> dict[str, Any]:
    """Return the updates per second of each protocol over those of DDP, with one slow rank."""
    compute_s = [SLOW_COMPUTE_S * slowness, *[SLOW_COMPUTE_S] * (args.workers - 1)]
    width = WIDTHS["1 M"]
    ddp_s: list[float] = []
    ours_s: dict[str, list[float]] = {name: [] for name in bars}
    for _ in range(args.rounds):
        ddp_s.append(_ddp_update_s(args, compute_s, width))
        for name in bars:
            ours_s[name].append(_update_s(args, compute_s, name, SUMS, width))
    results: dict[str, Any] = {"ddp_s": spread(ddp_s)}
    for name, bar in bars.items():
        ratio = ratios(ddp_s, ours_s[name])
        results[name] = {"update_s": spread(ours_s[name]), "faster": ratio}
        results[name] |= {"bar": f"at least {bar} x DDP's updates per second", "meets_bar": ratio["median"] >= bar}
    return results


def _update_s(
    args: argparse.Namespace, compute_s: list[float], protocol: str, torchrun: dict[str, Any], width: int
) -> float:
    return _seconds(_job(args, compute_s, protocol, torchrun, width))


def _job(args: argparse.Namespace, compute_s: list[float], protocol: str, torchrun: dict[str, Any], width: int) -> Job:
    settings = {
        "protocol": protocol,
        "compute_s": compute_s,
        "updates": args.updates,
        "faults": [],
        "encrypt": not torchrun.get("worker_at_server", False),
        "torchrun": torchrun,
        "width": width,
        "batch_size": BATCH_SIZE,
    }
    return Job("train_ours", len(compute_s), settings)


def _ddp_update_s(args: argparse.Namespace, compute_s: list[float], width: int) -> float:
    settings = {"compute_s": compute_s, "updates": args.updates, "width": width, "batch_size": BATCH_SIZE}
    return _seconds(Job("train_ddp", len(compute_s), settings))


def _seconds(job: Job) -> float:
    """Return the seconds per update at rank 0 after the warm-up."""
    return _seconds_of(job.answers()[0])


def _seconds_of(answer: dict[str, Any]) -> float:
    return 1 / rate([(at_s, version, 1) for at_s, version, _ in answer["updates"]])


if __name__ == "__main__":
    main()
