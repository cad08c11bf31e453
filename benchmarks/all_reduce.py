"""Serverless protocols against DistributedDataParallel and bare gloo: two ranks with a shaped link between them.

- `overlap`: ranks that sleep for most of their compute time. Compares the seconds of an iteration with those of
  computing alone and of summing alone.
- `lag`: four ranks whose messages are delayed, so that a sum takes 1.8 gradients. Compares the seconds of an iteration
  of `dc_s3gd(lag=2)` with max(t_C, t_AR / 2).
- `ddp`: ResNet-18, iterations/s against DDP.
- `unshaped`: the same without a limit on the link: overhead of an iteration beyond computing, and the final losses,
  which do not depend on the link.
- `memory`: memory of a rank beyond its model and optimizer.

The links join network namespaces, which needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from all_reduce_ranks import ANSWER
from common import options, ratios, report, rounded, spread
from namespaces import JUMBO_MTU_BYTES, Hosts, hosts

RANKS = Path(__file__).with_name("all_reduce_ranks.py")
SUM_GRADIENTS, LAG_BAR = 1.8, 1.15  # t_AR / t_C in lag
LAYERS_OF_LAG = (1, 100)  # so few parameters that the delays alone make a sum long
LAYERS = {"250 k": (1, 500), "1 M": (4, 500)}  # by number of parameters: number of layers and their width
MBIT_PER_S = {"20 ms": 425.0, "80 ms": 104.5, "150 ms": 55.5}  # link rate at which the sum of a layer takes this long
LARGE_LAYERS = (50, 1000)
OVERLAP_BAR, BLOCKING_BAR, DDP_BAR, MEMORY_BAR = 1.10, 0.95, 0.9, 5.0
WARM_UP = 2
LIMIT_S = 300
Step = tuple[str, dict[str, Any]]


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--compute-s", type=float, default=0.1, help="seconds of sleep per gradient in overlap")
    parser.add_argument("--iterations", type=int, default=10, help="timed iterations of each training in overlap")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank for ResNet-18")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of ResNet-18")
    parser.add_argument("--mbit-per-s", type=float, nargs="+", default=[200.0, 400.0], help="rates of the link in ddp")
    parser.add_argument("--timed", type=int, default=8, help="timed iterations of each training in ddp")
    parser.add_argument("--updates", type=int, default=25, help="updates of each training in unshaped")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # runs the clean-up of the namespaces
    name = "all_reduce" if args.parts == list(PARTS) else "_".join(["all_reduce", *args.parts])
    report(name, args, {part: PARTS[part](args) for part in args.parts})


# --- the parts -------------------------------------------------------------------------------------------------------


def overlap(args: argparse.Namespace) -> dict[str, Any]:
    bars = f"dc_s3gd at most {OVERLAP_BAR} x max(t_C, t_AR), all_reduce at least {BLOCKING_BAR} x (t_C + t_AR)"
    return {"bars": bars, **{size: _overlap_of(args, layers) for size, layers in LAYERS.items()}}


def lag(args: argparse.Namespace) -> dict[str, Any]:
    """Compare lags where the delay of messages makes a sum as long as 1.8 gradients.

    A ring of n ranks sends 2 (n - 1) messages one after the other. gloo needs two ways for each, and each way passes
    two delayed links.
    """
    ranks = 4
    delay_s = SUM_GRADIENTS * args.compute_s / (2 * (ranks - 1)) / 4
    settings = {"layers": LAYERS_OF_LAG, "compute_s": args.compute_s, "warm_up": 4, "iterations": 4 * args.iterations}
    steps: list[Step] = [
        ("sum_alone", settings),
        *(("train_ours", {**settings, "protocol": protocol}) for protocol in ("dc_s3gd(lag=2)", "dc_s3gd")),
    ]
    rounds = [[each["s"] for each in run(steps, ranks, delay_s)] for _ in range(args.rounds)]
    alone, two, one = zip(*rounds, strict=True)
    ratio = ratios(two, [max(args.compute_s, each / 2) for each in alone])
    return {
        "bar": f"dc_s3gd(lag=2) at most {LAG_BAR} x max(t_C, t_AR / 2)",
        "delay_s_of_a_link": delay_s,
        "sum_alone_s": spread(alone),
        "lag_2_s": spread(two),
        "lag_1_s": spread(one),
        "lag_2_ratio": ratio,
        "lag_1_ratio": ratios(one, [max(args.compute_s, each) for each in alone]),
        "meets_bar": ratio["median"] <= LAG_BAR,
    }


def _overlap_of(args: argparse.Namespace, layers: tuple[int, int]) -> dict[str, Any]:
    series = {"warm_up": 3, "iterations": args.iterations}
    steps: list[Step] = []
    for mbit_per_s in MBIT_PER_S.values():
        rate = mbit_per_s * layers[0]
        settings = {"layers": layers, "compute_s": args.compute_s, "mbit_per_s": rate, **series}
        steps += [
            ("sum_alone", settings),
            ("compute_alone", settings),
            ("train_ours", {**settings, "protocol": "dc_s3gd"}),
            ("train_ours", {**settings, "protocol": "all_reduce"}),
        ]
    rounds = [run(steps) for _ in range(args.rounds)]
    results: dict[str, Any] = {}
    for place, name in enumerate(MBIT_PER_S):
        measured = [answers[4 * place : 4 * place + 4] for answers in rounds]
        results[name] = _overlap([[each["s"] for each in answers] for answers in measured], args.compute_s)
    return results


def _overlap(measured: list[list[float]], compute_s: float) -> dict[str, Any]:
    alone, computing, ours, blocking = zip(*measured, strict=True)
    hidden = ratios(ours, [max(compute_s, each) for each in alone])
    in_series = ratios(blocking, [compute_s + each for each in alone])
    return {
        "sum_alone_s": spread(alone),
        "compute_alone_s": spread(computing),
        "dc_s3gd_s": spread(ours),
        "all_reduce_s": spread(blocking),
        "dc_s3gd_ratio": hidden,
        "all_reduce_ratio": in_series,
        "dc_s3gd_ratio_to_measured": ratios(ours, [max(both) for both in zip(alone, computing, strict=True)]),
        "all_reduce_ratio_to_measured": ratios(blocking, [sum(both) for both in zip(alone, computing, strict=True)]),
        "meets_bar": hidden["median"] <= OVERLAP_BAR and in_series["median"] >= BLOCKING_BAR,
    }


def ddp(args: argparse.Namespace) -> dict[str, Any]:
    return {
        f"{rate:g} Mbit/s": _against_ddp([_train_both(args, seed, rate, args.timed) for seed in range(args.rounds)])
        for rate in args.mbit_per_s
    }


def unshaped(args: argparse.Namespace) -> dict[str, Any]:
    measured = [_train_both(args, seed, None, args.updates - WARM_UP) for seed in range(args.rounds)]
    theirs, ours = ([answers[place]["loss"] for answers in measured] for place in (2, 3))
    return {**_against_ddp(measured), "final_loss": _final_loss(theirs, ours)}


def _train_both(args: argparse.Namespace, seed: int, mbit_per_s: float | None, timed: int) -> list[dict[str, Any]]:
    """Return the answers of a sum alone, computing alone, DDP and ours; the two trainings alternate in order."""
    settings = {"batch_size": args.batch_size, "lr": args.lr, "seed": seed, "mbit_per_s": mbit_per_s}
    settings |= {"warm_up": WARM_UP, "iterations": timed, "probes": True}
    few = {**settings, "iterations": 4}
    trainings: list[Step] = [("train_ddp", settings), ("train_ours", {**settings, "protocol": "dc_s3gd"})]
    order = 1 if seed % 2 == 0 else -1
    alone, computing, *trained = run([("sum_alone", few), ("compute_alone", few), *trainings[::order]])
    return [alone, computing, *trained[::order]]


def _against_ddp(measured: list[list[dict[str, Any]]]) -> dict[str, Any]:
    alone, computing, theirs, ours = ([each["s"] for each in contender] for contender in zip(*measured, strict=True))
    longer = [max(both) for both in zip(alone, computing, strict=True)]
    share = ratios(longer, ours)
    return {
        "bar": f"at least {DDP_BAR} x (DDP's time / max(t_C, t_AR)) times DDP's iterations/s",
        "sum_alone_s": spread(alone),
        "compute_alone_s": spread(computing),
        "ddp_s": spread(theirs),
        "dc_s3gd_s": spread(ours),
        "speedup": ratios(theirs, ours),
        "speedup_if_all_were_hidden": ratios(theirs, longer),
        "share_of_it": share,
        "meets_bar": share["median"] >= DDP_BAR,
        "beyond_computing_s": {"ddp": _beyond(theirs, computing), "dc_s3gd": _beyond(ours, computing)},
        "dc_s3gd_says_it_waited_s": spread([each[3]["waited_s"] for each in measured]),
        "dc_s3gd_says_it_computed_s": spread([each[3]["compute_s"] for each in measured]),
    }


def _beyond(took_s: list[float], compute_s: list[float]) -> dict[str, Any]:
    return spread([took - computed for took, computed in zip(took_s, compute_s, strict=True)])


def _final_loss(theirs: list[float], ours: list[float]) -> dict[str, Any]:
    """Compare losses on a fixed probe; equal seeds give both the same initial parameters."""
    noise = stdev(theirs + ours) if len(ours) > 1 else 0.0
    return {
        "bar": "mean at most that of DDP and the range of its seeds",
        "ddp": spread(theirs),
        "dc_s3gd": spread(ours),
        "standard_deviation": rounded(noise),
        "meets_bar": mean(ours) - mean(theirs) <= max(theirs) - min(theirs),
    }


def memory(args: argparse.Namespace) -> dict[str, Any]:
    settings = {"layers": LARGE_LAYERS, "compute_s": 0.0, "protocol": "dc_s3gd"}
    settings |= {"warm_up": 3, "iterations": 4, "measures_memory": True}
    [plain] = run([("hold_model", settings)], ranks=1)
    both = run_all([("train_and_measure", settings)])
    parameters = plain["parameters_bytes"]

    def beyond(resident_bytes: float) -> float:
        return float((resident_bytes - plain["peak_bytes"]) / parameters)

    first, second = (answers[0] for answers in both)
    return {
        "bar": f"at most {MEMORY_BAR} x the parameters beyond a process with model and momentum",
        "parameters_bytes": parameters,
        "model_and_momentum_resident_bytes": plain["peak_bytes"],
        "while_training": beyond(first["peak_bytes"]),
        "until_third_update": beyond(first["peak_before_bytes"]),
        "at_the_end": beyond(first["peak_after_bytes"]),
        "rank_1_in_all": beyond(second["peak_after_bytes"]),
        "tensors_beyond": first["tensors_bytes"] / parameters - 2.0,
    }


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "overlap": overlap,
    "lag": lag,
    "ddp": ddp,
    "unshaped": unshaped,
    "memory": memory,
}


# --- the ranks -------------------------------------------------------------------------------------------------------


def run(steps: list[Step], ranks: int = 2, delay_s: float = 0.0) -> list[dict[str, Any]]:
    """Run the steps one after another in new ranks, and return the answers of rank 0."""
    return run_all(steps, ranks, delay_s)[0]


def run_all(steps: list[Step], ranks: int = 2, delay_s: float = 0.0) -> list[list[dict[str, Any]]]:
    """Return the answers of all ranks, each on a host whose link delays messages in each direction."""
    with hosts(ranks, mtu_bytes=JUMBO_MTU_BYTES) as made:
        for host in range(ranks if delay_s else 0):
            made.delay(host, delay_s)
        processes = [_start(made, rank, ranks, steps) for rank in range(ranks)]
        try:
            said = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    lines = [line for text in said for line in text.splitlines() if line.startswith(ANSWER)]
    return [json.loads(line.removeprefix(ANSWER)) for line in lines]


def _start(made: Hosts, rank: int, world_size: int, steps: list[Step]) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": made.address(0),
        "PACELINE_TOKEN": "benchmark",
        "OMP_NUM_THREADS": "1",
    }
    return made.run(made.names[rank], [sys.executable, str(RANKS), json.dumps(steps)], env=environment)


if __name__ == "__main__":
    main()
