"""Shares of an unchanged DDP or FSDP2 script under `paceline run`, against the same script under torchrun.

Four ranks sleep in proportion to their samples. Each part alternates torchrun and `paceline run`, and gives the
ratio of their seconds per update; 20 updates come before. One part is the processor time that the patches cost.
The last ones compare the gain that `paceline advise` predicts from a recording with the measured one. One part needs
transformers, whose sampler balances lengths under torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import options, report, spread
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
    "... two processes of the loader": ([*EACH_15, "--processes", "2"], 0.0),
    "jitter": (["--pattern", "jitter"], 1 / 1.03),
    "lengths": (["--lengths"], 2.0),
    "lengths, torchrun with transformers' sampler": (["--lengths"], 0.0),
}
ONLY_TORCHRUN = {"lengths, torchrun with transformers' sampler": ["--rebalance"]}
PROCESSOR = "processor time"  # of 2,000 updates of a small model
SMALL = ["--pattern", "even", "--seconds", "0", "--parameters", "1e5", "--updates", "2000"]
PROCESSOR_BAR_MS = 0.5  # an update
PREDICTED = {
    "predicted, even": PARTS["even, 1 M"][0],
    "predicted, one at half": PARTS["one at half"][0],
    "predicted, one at a quarter": PARTS["one at a quarter"][0],
    "predicted, another one each 15 updates": EACH_15,
}
PREDICTED_BAR = 0.07  # largest relative difference of the gains


def main() -> None:
    parser = options(__doc__ or "", rounds=5)
    names = [*PARTS, PROCESSOR, *PREDICTED]
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--updates", type=int, default=100)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name in args.parts:
        if name == PROCESSOR:
            results[name] = processor_time(args.rounds)
        elif name in PREDICTED:
            results[name] = prediction(name, args)
        else:
            results[name] = speed(name, args)
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    report("shares_predicted" if set(args.parts) <= set(PREDICTED) else "shares", args, results)


def speed(name: str, args: argparse.Namespace) -> dict[str, Any]:
    given, bar = PARTS[name]
    given = [*given, "--updates", str(args.updates)]
    pairs = [pair(given, "seconds", ONLY_TORCHRUN.get(name, [])) for _ in range(args.rounds)]
    ratio = spread([one / other for one, other in pairs])
    return {
        "torchrun_s": spread([one for one, _ in pairs]),
        "paceline_s": spread([other for _, other in pairs]),
        "ratio": ratio,
        "bar": round(bar, 3),
        "meets_bar": ratio["median"] >= bar,
    }


def processor_time(rounds: int) -> dict[str, Any]:
    cost_ms = spread([1000 * (other - one) for one, other in (pair(SMALL, "processor_s") for _ in range(rounds))])
    return {"cost_ms": cost_ms, "bar_ms": PROCESSOR_BAR_MS, "meets_bar": cost_ms["median"] <= PROCESSOR_BAR_MS}


def prediction(name: str, args: argparse.Namespace) -> dict[str, Any]:
    rounds = [gains([*PREDICTED[name], "--updates", str(args.updates)]) for _ in range(args.rounds)]
    ratio = spread([predicted / found for predicted, found in rounds])
    return {
        "predicted": spread([predicted for predicted, _ in rounds]),
        "measured": spread([found for _, found in rounds]),
        "ratio": ratio,
        "bar": PREDICTED_BAR,
        "meets_bar": abs(ratio["median"] - 1) <= PREDICTED_BAR,
    }


def gains(given: list[str]) -> tuple[float, float]:
    """Return the gain that is predicted from a recording under torchrun, and the measured one."""
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "recording"
        record = [sys.executable, "-m", "paceline", "record", "--out", str(recording), "--"]
        before_s = measured([*record, *TORCHRUN, str(SCRIPT), *given])["seconds"]
        balanced = advise_recording(recording, protocols=[PIECES]).balanced
    assert balanced is not None
    return balanced.gain, before_s / measured([*PACELINE, str(SCRIPT), *given])["seconds"]


def pair(given: list[str], quantity: str, of_torchrun: Sequence[str] = ()) -> tuple[float, float]:
    """Return a quantity of an update under torchrun, perhaps with further options, and under `paceline run`."""
    one = measured([*TORCHRUN, str(SCRIPT), *given, *of_torchrun])[quantity]
    return one, measured([*PACELINE, str(SCRIPT), *given])[quantity]


def measured(command: list[str]) -> dict[str, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:  # of the run
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if '{"seconds"' in line]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr}")
    found: dict[str, float] = json.loads(lines[0])
    return found


if __name__ == "__main__":
    main()
