"""Shares of an unchanged DDP script on one GPU that four ranks share: torchrun's time over that of `paceline run`.

`DEVICE=cpu` tries the script on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from common import options, report, spread

SCRIPT = Path(__file__).resolve().with_name("gpu_shares_script.py")
LIMIT_S = 120
BARS = {"even": 1 / 1.03, "slow": 1.8}


def main() -> None:
    parser = options(__doc__ or "", rounds=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--given", nargs=argparse.REMAINDER, default=[], help="options of the script, the last ones")
    args = parser.parse_args()
    ranks = ["--nproc-per-node", str(args.ranks)]
    launchers = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", *ranks],
        "paceline": [sys.executable, "-m", "paceline", "run", *ranks],
    }
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in launchers}
    for _ in range(args.rounds):
        for name, command in launchers.items():
            rounds[name].append(seconds_per_update([*command, str(SCRIPT), *args.given]))
            print(name, rounds[name][-1], file=sys.stderr, flush=True)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        **{part: compared(rounds, part, bar) for part, bar in BARS.items()},
    }
    report("gpu_shares", args, results)


def compared(rounds: dict[str, list[dict[str, float]]], part: str, bar: float) -> dict[str, Any]:
    """Return the seconds per update of both launchers in a part, and their ratio."""
    before_s, after_s = ([each[part] for each in rounds[name]] for name in ("torchrun", "paceline"))
    ratio = spread([one / other for one, other in zip(before_s, after_s, strict=True)])
    return {
        "torchrun_s": spread(before_s),
        "paceline_s": spread(after_s),
        "ratio": ratio,
        "bar": round(bar, 3),
        "meets_bar": ratio["median"] >= bar,
    }


def seconds_per_update(command: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:  # of the run
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if '{"seconds"' in line]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr}")
    found: dict[str, float] = json.loads(lines[0])["seconds"]
    return found


if __name__ == "__main__":
    main()
