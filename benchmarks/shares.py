"""Shares of an unchanged DDP or FSDP2 script under `paceline run`, against the same script under torchrun.

Four ranks sleep in proportion to their samples. Each part alternates torchrun and `paceline run`, and gives the
ratio of their seconds per update; 20 updates come before. Some parts also record the script under torchrun, and compare
the gain that `paceline advise` predicts with the measured one. One part is the processor time that the patches cost,
and one needs transformers, whose sampler balances lengths under torchrun. Each part has a result of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import options, ratios, report, spread
from paceline import advise_recording

SCRIPT = Path(__file__).resolve().with_name("shares_script.py")
LIMIT_S = 300
QUARTER = ["--pattern", "slow", "--slow", "4", "--seconds", "0.4"]
HALF = ["--pattern", "slow", "--slow", "2", "--seconds", "0.4"]
LARGE = ["--batch", "32"]
PIECES = "balanced(m=16, leases=1)"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
PACELINE = [sys.executable, "-m", "paceline", "run", "--nproc-per-node", "4", "--protocol", PIECES]
EACH_15 = ["--pattern", "moving", "--slow", "3"]
# Bars: torchrun's time over that of paceline, at least; below 1 for the parts in which no rank is slow.
PARTS: dict[str, tuple[list[str], float]] = {
    "even, 1 M": (["--pattern", "even"], 1 / 1.03),
    "even, 11.7 M": (["--pattern", "even", "--parameters", "1.17e7"], 1 / 1.05),
    "even, FSDP2": (["--pattern", "even", "--fsdp", "--seconds", "0.2"], 1 / 1.03),
    "one at half": ([*HALF, *LARGE], 1.55),
    "one at a quarter": ([*QUARTER, *LARGE], 2.85),
    "one at half, FSDP2": ([*HALF, *LARGE, "--fsdp"], 1.40),
    "one at a quarter, FSDP2": ([*QUARTER, *LARGE, "--fsdp"], 2.4),
    "another one each 15 updates": (EACH_15, 1.45),
    "another one each 15 updates, two processes of the loader": ([*EACH_15, "--processes", "2"], 0.0),
    "jitter": (["--pattern", "jitter"], 1 / 1.03),
    "lengths": (["--lengths"], 2.0),
    "lengths, torchrun with transformers' sampler": (["--lengths"], 0.0),
}
ONLY_TORCHRUN = {"lengths, torchrun with transformers' sampler": ["--rebalance"]}
PROCESSOR = "processor time"  # of 2,000 updates of a small model
SMALL = ["--pattern", "even", "--seconds", "0", "--parameters", "1e5", "--updates", "2000"]
PROCESSOR_BAR_MS = 0.5  # an update
RECORDED = ["--updates", "40"]  # after 20 others: each rank is the slow one once where it changes
PREDICTED = ("even, 1 M", "one at half", "one at a quarter", "another one each 15 updates")
TORCH_ABORTS = "terminate called without an active exception"  # torch, as a rank ends that has written its result
PREDICTED_BAR = 0.07  # largest relative difference of the gains


def main() -> None:
    parser = options(__doc__ or "", rounds=5)
    names = [*PARTS, PROCESSOR]
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--updates", type=int, default=100)
    args = parser.parse_args()
    for name in args.parts:
        results = processor_time(args.rounds) if name == PROCESSOR else speed(name, args)
        report("_".join(["shares", *re.findall(r"\w+", name)]), args, {name: results})


def speed(name: str, args: argparse.Namespace) -> dict[str, Any]:
    given, bar = PARTS[name]
    given = [*given, "--updates", str(args.updates)]
    pairs, predicted = [], []
    for _ in range(args.rounds):
        pairs.append(pair(given, "seconds", ONLY_TORCHRUN.get(name, [])))
        if name in PREDICTED:
            predicted.append(predicted_gain(given))
        print(name, pairs[-1], predicted[-1:], file=sys.stderr, flush=True)
    before_s, after_s = zip(*pairs, strict=True)
    found = compared(before_s, after_s, bar)
    return found | (prediction(predicted, found["ratio"]["rounds"]) if predicted else {})


def compared(before_s: Sequence[float], after_s: Sequence[float], bar: float) -> dict[str, Any]:
    """Return seconds per update under torchrun and under `paceline run`, and their ratio."""
    ratio = ratios(before_s, after_s)
    return {
        "torchrun_s": spread(before_s),
        "paceline_s": spread(after_s),
        "ratio": ratio,
        "bar": round(bar, 3),
        "meets_bar": ratio["median"] >= bar,
    }


def prediction(predicted: list[float], measured: list[float]) -> dict[str, Any]:
    """Return predicted gains, and their ratios to the measured ones."""
    ratio = ratios(predicted, measured)
    return {
        "predicted": spread(predicted),
        "predicted_to_measured": ratio,
        "predicted_bar": PREDICTED_BAR,
        "meets_predicted_bar": abs(ratio["median"] - 1) <= PREDICTED_BAR,
    }


def processor_time(rounds: int) -> dict[str, Any]:
    cost_ms = spread([1000 * (other - one) for one, other in (pair(SMALL, "processor_s") for _ in range(rounds))])
    return {"cost_ms": cost_ms, "bar_ms": PROCESSOR_BAR_MS, "meets_bar": cost_ms["median"] <= PROCESSOR_BAR_MS}


def predicted_gain(given: list[str]) -> float:
    """Return the gain that is predicted from a recording under torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "recording"
        record = [sys.executable, "-m", "paceline", "record", "--out", str(recording), "--"]
        measured([*record, *TORCHRUN, str(SCRIPT), *given, *RECORDED])
        balanced = advise_recording(recording, protocols=[PIECES]).balanced
    assert balanced is not None
    return balanced.gain


def pair(given: list[str], quantity: str, of_torchrun: Sequence[str] = ()) -> tuple[float, float]:
    """Return a quantity of an update under torchrun, perhaps with further options, and under `paceline run`."""
    one: float = measured([*TORCHRUN, str(SCRIPT), *given, *of_torchrun])[quantity]
    return one, measured([*PACELINE, str(SCRIPT), *given])[quantity]


def measured(command: list[str]) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:  # of the run
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if '{"seconds"' in line]
    if not lines or (done.returncode and TORCH_ABORTS not in done.stderr):
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(lines[0])
    return found


if __name__ == "__main__":
    main()
