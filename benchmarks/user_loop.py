"""Attached loops against the same loop under DistributedDataParallel (DDP), each rank a new process on loopback.

- `premium`: time of a step under BSP, all ranks at one speed.
- `all_reduce`: the same under all_reduce, without a server.
- `sums`: the same under BSP, without a server.
- `bookkeeping`: processor time of a rank for a step beyond that of DDP, without a server, of 1,000 parameters.
- `straggler`: one rank at half speed, protocols that do not wait for it: updates, or minibatches, in a second.
- `sums_straggler`: the same without a server.
- `takeover`: rank 0 is killed and has a standby, without a server: updates lost, and seconds to the next update.
- `start`: seconds from the start of the script to the end of the first step.
- `predictions`: seconds per update as `advise` predicts them from a recording of the DDP loop, against attached runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import paceline as pl
from common import options, ratios, report, spread
from distributed_ranks import ANSWER
from paceline.core.records import RunResumed, UpdateMade
from paceline.ddp_recording.recording import WARM_UP as LEFT_OUT
from paceline.recording.event_log import read_records
from paceline.recording.run_folder import EVENTS
from user_loop_ranks import WARM_UP

RANKS = Path(__file__).with_name("user_loop_ranks.py")
PREMIUM_BAR, START_BAR_S, BOOKKEEPING_BAR_S = 1.03, 1.5, 5e-4
DYING_STEP, LOST_BAR, NEXT_UPDATE_BAR_S = 20, 1, 5.0
Bars = Mapping[str, tuple[float, str]]
STRAGGLER_BARS: Bars = MappingProxyType({"k_sync(k=3)": (1.8, "updates"), "k_batch_async(k=4)": (1.6, "minibatches")})
SUMS_BARS: Bars = MappingProxyType({"k_sync(k=3)": (1.8, "updates")})
PREDICTION_BAR = 0.05
PREDICTED = ("bsp", "k_sync(k=3)", "k_batch_async(k=4)")
LAYERS = 20  # of the predictions, between which an interrupt takes effect
PATTERNS = ("persistent", "random", "transient")
PREDICTION_PARAMETERS = 10_000  # a server's transfers are not in a recording of DDP
LIMIT_S = 120


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--compute-s", type=float, default=0.1)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=40, help="steps of each rank under DDP")
    parser.add_argument("--shards", type=int, default=1, help="servers of an attached run with a server")
    parser.add_argument("--plain", action="store_true", help="train without encryption")
    parser.add_argument("--sent", action="store_true", help="send what ranks of one host would share")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args()
    name = "user_loop" if args.parts == list(PARTS) else "_".join(["user_loop", *args.parts])
    name += "_plain" * args.plain + "_sent" * args.sent
    report(name, args, {part: PARTS[part](args) for part in args.parts})


def premium(args: argparse.Namespace, protocol: str = "bsp", *, server: bool = True) -> dict[str, Any]:
    compute_s = [args.compute_s] * args.workers
    ours, ddp = [], []
    for _ in range(args.rounds):
        more = {"server": server, "shards": args.shards}
        ours.append(1 / per_s(measure(args, protocol, compute_s, more)[:1]))
        ddp.append(1 / per_s(measure(args, "", compute_s)[:1]))
    ratio = ratios(ours, ddp)
    return {
        "bar": f"at most {PREMIUM_BAR} x DDP's time of a step",
        "ours_s": spread(ours),
        "ddp_s": spread(ddp),
        "ratio": ratio,
        "meets_bar": ratio["median"] <= PREMIUM_BAR,
    }


def bookkeeping(args: argparse.Namespace) -> dict[str, Any]:
    small = argparse.Namespace(**{**vars(args), "parameters": 1_000, "steps": 1_000})
    spent_s: dict[str, list[float]] = {"bsp": [], "": []}
    for _ in range(args.rounds):
        for protocol, rounds in spent_s.items():  # of both, the same loop and a sum of as many numbers
            answers = measure(small, protocol, [0.005] * args.workers, {"server": False})
            rounds.append(median(each["more_processor_s"] for each in answers))
    more = spread([ours - ddp for ours, ddp in zip(spent_s["bsp"], spent_s[""], strict=True)])
    return {
        "bar": f"at most {BOOKKEEPING_BAR_S} s of processor time more than DDP",
        "beyond_the_loop_s": spread(spent_s["bsp"]),
        "ddp_beyond_the_loop_s": spread(spent_s[""]),
        "more_processor_s": more,
        "meets_bar": more["median"] <= BOOKKEEPING_BAR_S,
    }


def straggler(args: argparse.Namespace, bars: Bars = STRAGGLER_BARS, *, server: bool = True) -> dict[str, Any]:
    compute_s = [args.compute_s] * (args.workers - 1) + [2 * args.compute_s]
    measured: dict[str, list[list[dict[str, Any]]]] = {"": [], **{protocol: [] for protocol in bars}}
    for _ in range(args.rounds):
        for protocol, rounds in measured.items():
            rounds.append(measure(args, protocol, compute_s, {"server": server}))
    results = {}
    for protocol, (bar, what) in bars.items():
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


def takeover(args: argparse.Namespace) -> dict[str, Any]:
    lost, next_s = [], []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            out = f"{folder}/run"
            more = {"server": None, "standby": 1, "dying_step": DYING_STEP, "out": out}
            command = [sys.executable, "-m", "paceline", "run", "--nproc-per-node", str(args.workers)]
            done = launch(args, "bsp", [args.compute_s] * args.workers, more, command)
            made = [each.version for each in read_records(Path(out, EVENTS)) if isinstance(each, UpdateMade)]
            records = list(read_records(Path(f"{out}-standby", EVENTS)))
        [resumed] = [each for each in records if isinstance(each, RunResumed)]
        lost.append(made[-1] - resumed.version)
        # The clock of the run stands still meanwhile.
        next_s.append(max(b - a for each in answers_of(done) for a, b in pairwise(each["times_s"])))
    return {
        "bar": f"at most {LOST_BAR} update lost, the next one after {NEXT_UPDATE_BAR_S} s",
        "updates_lost": spread(lost),
        "next_update_s": spread(next_s),
        "meets_bar": max(lost) <= LOST_BAR and median(next_s) <= NEXT_UPDATE_BAR_S,
    }


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


def predictions(args: argparse.Namespace) -> dict[str, Any]:
    results = {}
    for pattern in PATTERNS:
        usual_s = [args.compute_s] * args.workers
        if pattern == "persistent":
            usual_s[-1] *= 2
        found = [predict(args, pattern, usual_s) for _ in range(args.rounds)]
        for protocol in PREDICTED:
            ours, predicted = ([each[protocol][i] for each in found] for i in (0, 1))
            ratio = ratios(predicted, ours)
            results[f"{pattern}, {protocol}"] = {
                "bar": f"within {PREDICTION_BAR:.0%} of the attached run",
                "attached_s": spread(ours),
                "predicted_s": spread(predicted),
                "ratio": ratio,
                "meets_bar": abs(ratio["median"] - 1) <= PREDICTION_BAR,
            }
    return results


def predict(args: argparse.Namespace, pattern: str, usual_s: list[float]) -> dict[str, tuple[float, float]]:
    """Return the seconds per update of each protocol, measured and predicted."""
    small = argparse.Namespace(**{**vars(args), "parameters": PREDICTION_PARAMETERS})
    with tempfile.TemporaryDirectory() as folder:
        record = [sys.executable, "-m", "paceline", "record", "--out", f"{folder}/ddp", "--"]
        measure(small, "", usual_s, {"pattern": pattern, "layers": LAYERS}, before=record)
        advice = pl.advise_recording(f"{folder}/ddp", protocols=PREDICTED)
        predicted_s = {each.protocol: each.seconds_per_update for each in advice.ranking}
        found = {}
        for number, protocol in enumerate(PREDICTED):
            out = f"{folder}/{number}"
            measure(small, protocol, usual_s, {"pattern": pattern, "layers": LAYERS, "out": out})
            updates = [each for each in read_records(Path(out, EVENTS)) if isinstance(each, UpdateMade)]
            updates = updates[LEFT_OUT - 1 :]  # as the recording
            attached_s = (updates[-1].now_s - updates[0].now_s) / (len(updates) - 1)
            found[protocol] = attached_s, predicted_s[protocol]
    return found


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "premium": premium,
    "all_reduce": partial(premium, protocol="all_reduce"),
    "sums": partial(premium, server=False),
    "bookkeeping": bookkeeping,
    "straggler": straggler,
    "sums_straggler": partial(straggler, bars=SUMS_BARS, server=False),
    "takeover": takeover,
    "start": start,
    "predictions": predictions,
}


def measure(
    args: argparse.Namespace,
    protocol: str,
    compute_s: list[float],
    more: Mapping[str, object] = MappingProxyType({}),
    before: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return the answer of each rank, given more settings of the ranks and the beginning of the command."""
    command = [*before, sys.executable, "-m", "torch.distributed.run"]
    command += ["--standalone", "--nproc-per-node", str(args.workers)]
    done = launch(args, protocol, compute_s, more, command)
    answers = answers_of(done)
    assert len(answers) == args.workers, done.stdout + done.stderr
    return answers


def launch(
    args: argparse.Namespace,
    protocol: str,
    compute_s: list[float],
    more: Mapping[str, object],
    command: Sequence[str],
) -> subprocess.CompletedProcess[str]:
    """Run the ranks by a command, and return what they have written."""
    settings = {"protocol": protocol, "compute_s": compute_s, "steps": args.steps, "parameters": args.parameters}
    settings |= {"encrypt": not args.plain, "share_memory": not args.sent, **more}
    return subprocess.run([*command, str(RANKS), json.dumps(settings)], capture_output=True, text=True, timeout=LIMIT_S)


def answers_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Return the answers of ranks that have ended well, in their order."""
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line.partition(ANSWER)[2] for line in done.stdout.replace(ANSWER, "\n" + ANSWER).splitlines()]
    return sorted((json.loads(line) for line in found if line), key=lambda answer: answer["rank"])


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
