"""Attached loops against the same loop under DistributedDataParallel (DDP), each rank a new process on loopback.

- `premium`: time of a step under BSP, all ranks at one speed.
- `straggler`: one rank at half speed, protocols that do not wait for it: updates, or minibatches, in a second.
- `start`: seconds from the start of the script to the end of the first step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import options, ratios, report, spread
from distributed_ranks import ANSWER
from user_loop_ranks import WARM_UP

RANKS = Path(__file__).with_name("user_loop_ranks.py")
PREMIUM_BAR, START_BAR_S = 1.03, 5.0
STRAGGLER_BARS = {"k_sync(k=3)": (1.8, "updates"), "k_batch_async(k=4)": (1.6, "minibatches")}
LIMIT_S = 120


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--compute-s", type=float, default=0.1)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=40, help="steps of each rank under DDP")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args()
    name = "user_loop" if args.parts == list(PARTS) else "_".join(["user_loop", *args.parts])
    report(name, args, {part: PARTS[part](args) for part in args.parts})


def premium(args: argparse.Namespace) -> dict[str, Any]:
    compute_s = [args.compute_s] * args.workers
    ours, ddp = [], []
    for _ in range(args.rounds):
        ours.append(1 / per_s(measure(args, "bsp", compute_s)[:1]))
        ddp.append(1 / per_s(measure(args, "", compute_s)[:1]))
    ratio = ratios(ours, ddp)
    return {
        "bar": f"at most {PREMIUM_BAR} x DDP's time of a step",
        "ours_s": spread(ours),
        "ddp_s": spread(ddp),
        "ratio": ratio,
        "meets_bar": ratio["median"] <= PREMIUM_BAR,
    }


def straggler(args: argparse.Namespace) -> dict[str, Any]:
    compute_s = [args.compute_s] * (args.workers - 1) + [2 * args.compute_s]
    measured: dict[str, list[list[dict[str, Any]]]] = {"": [], **{protocol: [] for protocol in STRAGGLER_BARS}}
    for _ in range(args.rounds):
        for protocol, rounds in measured.items():
            rounds.append(measure(args, protocol, compute_s))
    results = {}
    for protocol, (bar, what) in STRAGGLER_BARS.items():
        # Each fast rank makes one step for each update under K-sync, and every rank under DDP.
        counted = 1 if what == "updates" else args.workers
        ours, ddp = ([per_s(answers[:counted]) for answers in measured[name]] for name in (protocol, ""))
        ratio = ratios(ours, ddp)
        results[protocol] = {
            "bar": f"at least {bar} x DDP's {what} per second",
            "ours_per_s": spread(ours),
            "ddp_per_s": spread(ddp),
            "ratio": ratio,
            "meets_bar": ratio["median"] >= bar,
        }
    return results


def start(args: argparse.Namespace) -> dict[str, Any]:
    compute_s = [args.compute_s] * args.workers
    longer_s = []
    for _ in range(args.rounds):
        ours, ddp = (first_step_s(measure(args, protocol, compute_s)) for protocol in ("bsp", ""))
        longer_s.append(ours - ddp)
    longer = spread(longer_s)
    return {
        "bar": f"at most {START_BAR_S} s longer than DDP",
        "longer_s": longer,
        "meets_bar": longer["median"] <= START_BAR_S,
    }


PARTS = {"premium": premium, "straggler": straggler, "start": start}


def measure(args: argparse.Namespace, protocol: str, compute_s: list[float]) -> list[dict[str, Any]]:
    """Return the answer of each rank."""
    settings = {"protocol": protocol, "compute_s": compute_s, "steps": args.steps, "parameters": args.parameters}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.workers)]
    done = subprocess.run(
        [*command, str(RANKS), json.dumps(settings)], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    found = [line.partition(ANSWER)[2] for line in done.stdout.replace(ANSWER, "\n" + ANSWER).splitlines()]
    answers = sorted((json.loads(line) for line in found if line), key=lambda answer: answer["rank"])
    assert len(answers) == args.workers, done.stdout + done.stderr
    return answers


def per_s(answers: list[dict[str, Any]]) -> float:
    """Return the steps of these ranks in a second, without the first ones."""
    begun_s: float = max(answer["times_s"][WARM_UP] for answer in answers)
    times_s: list[float] = [each for answer in answers for each in answer["times_s"] if each > begun_s]
    return len(times_s) / (max(times_s) - begun_s)


def first_step_s(answers: list[dict[str, Any]]) -> float:
    first_s: float = max(answer["times_s"][0] - answer["begun_s"] for answer in answers)
    return first_s


if __name__ == "__main__":
    main()
