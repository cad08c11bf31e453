"""ResNet-18 on one GPU that four ranks share: attached loops against DistributedDataParallel (DDP, gloo).

`DEVICE=cpu` tries the script on a machine without a GPU. A protocol that is refused, or fails, is reported with its
last line, and the others are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from common import options, report, spread
from distributed_ranks import ANSWER

RANKS = Path(__file__).with_name("gpu_ranks.py")
WARM_UP = 5
DDP = ""
BSP, QUORUM, QUEUE = "bsp", "k_sync(k=3)", "balanced(m=4)"
LIMIT_S = 90
ROWS: dict[str, dict[str, Any]] = {
    "ddp": {"protocol": DDP},
    "bsp": {"protocol": BSP},
    "bsp, a server": {"protocol": BSP, "server": True},
    "bsp, a server, sent": {"protocol": BSP, "server": True, "share_memory": False},
    "bsp, a server, sent, TLS": {"protocol": BSP, "server": True, "share_memory": False, "encrypt": True},
    "ddp, one rank slow": {"protocol": DDP, "slow": True},
    "k_sync(k=3), one rank slow": {"protocol": QUORUM, "slow": True},
    "k_sync(k=3), a server, one rank slow": {"protocol": QUORUM, "server": True, "slow": True},
    "balanced(m=4), one rank slow": {"protocol": QUEUE, "slow": True},
    "ddp, bfloat16": {"protocol": DDP, "autocast": True},
    "bsp, bfloat16": {"protocol": BSP, "autocast": True},
}


def main() -> None:
    parser = options(__doc__ or "", rounds=2)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40, help="steps of each rank under DDP")
    parser.add_argument("--delay-s", type=float, default=0.1, help="seconds that the slow rank sleeps for each batch")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    args = parser.parse_args()
    measured: dict[str, list[float]] = {row: [] for row in args.rows}
    failures: dict[str, str] = {}
    for _ in range(args.rounds):
        for row, seconds in measured.items():
            if row in failures:
                continue
            try:
                seconds.append(seconds_per_update(args, ROWS[row]))
            except (AssertionError, subprocess.TimeoutExpired) as error:
                failures[row] = str(error)
            print(row, seconds, failures.get(row, ""), file=sys.stderr, flush=True)
    found: dict[str, Any] = {row: spread(seconds) for row, seconds in measured.items() if seconds}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    report("gpu", args, {"device": device, "seconds_per_update": found, "failures": failures})


def seconds_per_update(args: argparse.Namespace, row: dict[str, Any]) -> float:
    """Return the seconds of an update, as rank 0 sees it, without the first ones."""
    settings = {"steps": args.steps, "protocol": row["protocol"], "autocast": row.get("autocast", False)}
    settings["cluster"] = {name: row[name] for name in ("server", "share_memory", "encrypt") if name in row}
    settings["delay_s"] = args.delay_s if row.get("slow") else 0.0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [*command, str(RANKS), json.dumps(settings)], capture_output=True, text=True, timeout=LIMIT_S, env=environment
    )
    found = [line.partition(ANSWER)[2] for line in done.stdout.replace(ANSWER, "\n" + ANSWER).splitlines()]
    answers = [json.loads(line) for line in found if line]
    first = [answer["steps"] for answer in answers if answer["rank"] == 0]
    assert first, last_errors(done.stderr)
    (begin_s, begin), *_, (end_s, end) = [(at_s, update) for at_s, update in first[0] if update > WARM_UP]
    seconds: float = (end_s - begin_s) / (end - begin)
    return seconds


def last_errors(log: str) -> str:
    """Return the last line of each traceback that is not torchrun's own."""
    found = re.findall(r"^\w*(?:Error|Exception|Interrupt|Exit)\b.*", log, re.MULTILINE)
    return "; ".join(dict.fromkeys(found)) or log[-500:]


if __name__ == "__main__":
    main()
