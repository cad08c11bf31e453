"""`paceline record`: its cost in a step of DDP, and whether it names the right straggler.

- `overhead`: one process, gloo, models of 40 and 300 parameter tensors; the probe is put in and taken out between any
  two steps, because two runs differ by more than the probe costs.
- `stragglers`: four ranks that sleep; one of them takes twice as long, in the data, forward or backward part, with and
  without batch normalization.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common import options, report, rounded, spread
from paceline.ddp_recording.layout import PARTS as STEP_PARTS
from paceline.ddp_recording.layout import SAMPLE_EVERY
from paceline.ddp_recording.recording import DDPRecording
from paceline.ddp_recording.waiting import excess_s, slow_ranks
from paceline.probe.gradient_sampler import GradientSampler
from paceline.probe.patches import StepProbe
from paceline.probe.rank_files import RankFiles

OVERHEAD_BARS_US = {40: 40.0, 300: 80.0}  # by number of parameter tensors
WARM_UP = 20
RANKS, SLOW_RANK = 4, 2
NAMED_BAR, EXCESS_BAR, EXCESS_BAR_S = 0.99, 0.05, 1e-3
SCRIPT = Path(__file__).with_name("record_ranks.py")
ANSWER = "answer: "
US = 1e6


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--steps", type=int, default=1000, help="steps with the probe, and without, in each round")
    parser.add_argument("--recorded-steps", type=int, default=120, help="steps of each recorded run")
    parser.add_argument("--part-s", type=float, default=1 / 30, help="seconds of each part of a step")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args()
    name = "record" if args.parts == list(PARTS) else "_".join(["record", *args.parts])
    report(name, args, {part: PARTS[part](args) for part in args.parts})


# --- overhead --------------------------------------------------------------------------------------------------------


def overhead(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for tensors, bar_us in OVERHEAD_BARS_US.items():
            found = [interleaved(tensors, args.steps, Path(folder, f"{tensors}-{i}")) for i in range(args.rounds)]
            added_us = spread([each["added_us"] for each in found])
            results[f"{tensors} tensors"] = {
                "bar": f"at most {bar_us:g} us",
                **{name: spread([each[name] for each in found]) for name in found[0]},
                "meets_bar": added_us["median"] <= bar_us,
            }
        dist.destroy_process_group()
    return results


def interleaved(tensors: int, steps: int, folder: Path) -> dict[str, float]:
    """Return what the probe adds to a step at the lowest decile, and what samples of the gradient add on average."""
    probe = StepProbe(RankFiles(folder, 0, SAMPLE_EVERY), GradientSampler(SAMPLE_EVERY))
    probe.install()
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(8, 8) for _ in range(tensors // 2))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(4, 8)
    for _ in range(WARM_UP):
        step(model, optimizer, x)
    probe.remove()
    plain_s: list[float] = []
    recorded_s: list[float] = []
    sampled_s: list[float] = []
    for index in range(steps):
        is_sampled = (WARM_UP + index) % SAMPLE_EVERY == 0
        plain_s.append(step(model, optimizer, x))
        probe.install()
        (sampled_s if is_sampled else recorded_s).append(step(model, optimizer, x))
        probe.remove()
    deciles = [np.quantile(each, 0.1) for each in (plain_s, recorded_s, sampled_s)]
    medians = [median(each) for each in (plain_s, recorded_s)]
    return {
        "plain_step_us": medians[0] * US,
        "added_us": float(deciles[1] - deciles[0]) * US,
        "added_us_at_the_median": (medians[1] - medians[0]) * US,
        "added_us_by_samples": float(deciles[2] - deciles[1]) / SAMPLE_EVERY * US,
    }


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    """Make one step of training, and return its seconds."""
    begun_s = perf_counter()
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    return perf_counter() - begun_s


# --- stragglers ------------------------------------------------------------------------------------------------------


def stragglers(args: argparse.Namespace) -> dict[str, Any]:
    results = {}
    for batch_norm in (False, True):
        for part in STEP_PARTS:
            settings = {"part": part, "part_s": args.part_s, "extra_s": len(STEP_PARTS) * args.part_s}
            settings |= {"batch_norm": batch_norm, "slow_rank": SLOW_RANK, "steps": args.recorded_steps}
            found = [recorded(settings) for _ in range(args.rounds)]
            name = f"{part}, {'with' if batch_norm else 'without'} batch normalization"
            results[name] = {
                "bar": f"named in {NAMED_BAR:.0%} of the steps, excess within {EXCESS_BAR:.0%} + 1 ms",
                **{key: spread([each[key] for each in found]) for key in found[0]},
                "meets_bar": all(meets_bar(each) for each in found),
            }
            print(f"{name}: {results[name]}", file=sys.stderr)
    return results


def recorded(settings: dict[str, Any]) -> dict[str, float]:
    """Record a run, and return what its recording says of the slow rank."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "recording")
        command = [sys.executable, "-m", "paceline", "record", "--out", str(out), "--", sys.executable, "-m"]
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), str(SCRIPT)]
        run = subprocess.run([*command, json.dumps(settings)], capture_output=True, text=True, check=True)
        recording = DDPRecording(out)
    true_s = true_excess_s(run.stdout)
    parts_s = {part: excess_s(recording.part_s(part))[SLOW_RANK].mean() for part in STEP_PARTS}
    return {
        "named_share": float(np.mean(slow_ranks(recording.work_s) == SLOW_RANK)),
        "right_part": float(max(parts_s, key=lambda part: parts_s[part]) == settings["part"]),
        "excess_s": rounded(float(excess_s(recording.work_s)[SLOW_RANK].mean())),
        "true_excess_s": rounded(true_s),
    }


def true_excess_s(output: str) -> float:
    """Return by how much the slow rank's sleeps were longer than the mean of the others'."""
    answers = [line.partition(ANSWER)[2] for line in output.splitlines() if ANSWER in line]
    taken_s: dict[int, float] = {rank: mean(steps_s[1:]) for rank, steps_s in map(json.loads, answers)}
    return taken_s.pop(SLOW_RANK) - median(taken_s.values())


def meets_bar(found: dict[str, float]) -> bool:
    error_s = abs(found["excess_s"] - found["true_excess_s"])
    is_near = error_s <= EXCESS_BAR * found["true_excess_s"] + EXCESS_BAR_S
    return found["named_share"] >= NAMED_BAR and bool(found["right_part"]) and is_near


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"overhead": overhead, "stragglers": stragglers}

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
