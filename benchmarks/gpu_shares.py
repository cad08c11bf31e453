"""Shares of an unchanged DDP script on one GPU that four ranks share: torchrun's time over that of `paceline run`.

`DEVICE=cpu` tries the script on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from common import options, report
from shares import compared, measured

SCRIPT = Path(__file__).resolve().with_name("gpu_shares_script.py")
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
            rounds[name].append(measured([*command, str(SCRIPT), *args.given])["seconds"])
            print(name, rounds[name][-1], file=sys.stderr, flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    seconds = {part: [[each[part] for each in rounds[name]] for name in launchers] for part in BARS}
    parts = {part: compared(before_s, after_s, BARS[part]) for part, (before_s, after_s) in seconds.items()}
    report("gpu_shares", args, {"device": device, **parts})


if __name__ == "__main__":
    main()
