"""The distributed engine against DistributedDataParallel and bare gloo, each rank a new process on loopback.

- `move`: push and publish of parameters without an optimizer step, one worker, against gloo's send and recv.
- `overlap`: ResNet-18 on 32 x 32 images over a link of 1 Gbit/s between two network namespaces, one worker. Compares
  gradients sent in buckets during the backward pass with gradients sent as a whole after it. Needs root.
- `shards`: three workers and rank 0, each in a network namespace with a link of 200 Mbit/s, 4 MB of parameters without
  an optimizer step. Compares one shard server with two. Needs root.
- `premium`: four workers that sleep for their compute time, BSP, against DDP.
- `payout`: the same with one worker at half speed, protocols that do not wait for it.
- `kill`: one of the workers is killed.
- `join`: a killed worker's process is started again while the others continue.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from common import options, ratios, report, spread
from distributed_ranks import ANSWER
from namespaces import hosts

RANKS = Path(__file__).with_name("distributed_ranks.py")
MOVED = {"4 MB": (1_000_000, 150), "47 MB": (11_700_000, 40)}  # parameters, updates
OVERLAP_LINK = "1gbit"
SHARDS_LINK, SHARDS_RANKS, SHARDS_BAR = "200mbit", 4, 0.6
MOVE_BAR, PREMIUM_BAR, JOIN_BAR_S = 1.25, 1.10, 5.0
PAYOUT_BARS = {"k_sync(k=3)": 1.4, "k_batch_async(k=4)": 1.6}
WARM_UP = 5
DYING_UPDATE = 20
LIMIT_S = 180
Part = Callable[[argparse.Namespace], dict[str, Any]]


def main() -> None:
    report_parts("distributed", __doc__ or "", PARTS)


def report_parts(name: str, description: str, parts: Mapping[str, Part]) -> None:
    """Measure the parts that the command line names, and report them."""
    parser = options(description)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--compute-s", type=float, default=0.1)
    parser.add_argument("--updates", type=int, default=40, help="updates of each training")
    parser.add_argument("--plain", action="store_true", help="train without encryption")
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    args = parser.parse_args()
    name = name if args.parts == list(parts) else "_".join([name, *args.parts])
    name += "_plain" if args.plain else ""
    report(name, args, {part: parts[part](args) for part in args.parts})


# --- the parts -------------------------------------------------------------------------------------------------------


def move(args: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {"bar": f"at most {MOVE_BAR} x gloo's time"}
    for name, (parameters, updates) in MOVED.items():
        settings = {"parameters": parameters, "updates": updates}
        ours, gloo = [], []
        for _ in range(args.rounds):
            update_s, gradient_s = Job("move_ours", 2, settings).answers()
            ours.append(update_s - gradient_s)
            gloo.append(Job("move_by_gloo", 2, settings).answers()[0])
        ratio = ratios(ours, gloo)
        meets = ratio["median"] <= MOVE_BAR
        results[name] = {"ours_s": spread(ours), "gloo_s": spread(gloo), "ratio": ratio, "meets_bar": meets}
    return results


def overlap(args: argparse.Namespace) -> dict[str, Any]:
    measured: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with hosts(2) as made:
        made.shape(1, OVERLAP_LINK)
        for _ in range(args.rounds):
            for in_pieces in measured:
                settings = {"in_pieces": in_pieces, "updates": args.updates // 2, "address": made.address(0)}
                job = Job("train_resnet", 2, settings, made.names, made.address(0))
                update_s, gradient_s = job.answers()
                measured[in_pieces].append((update_s, gradient_s))
    pieces, whole = ([update_s for update_s, _ in measured[kind]] for kind in (True, False))
    return {
        "bar": "less time per update than with the whole gradient after the backward pass",
        "link": OVERLAP_LINK,
        "in_pieces_s": spread(pieces),
        "as_a_whole_s": spread(whole),
        "gradient_s": {
            "in_pieces": spread([s for _, s in measured[True]]),
            "as_a_whole": spread([s for _, s in measured[False]]),
        },
        "ratio": ratios(pieces, whole),
        "meets_bar": ratios(pieces, whole)["median"] < 1.0,
    }


def shards(args: argparse.Namespace) -> dict[str, Any]:
    measured: dict[int, list[float]] = {1: [], 2: []}
    with hosts(SHARDS_RANKS) as made:
        for host in range(SHARDS_RANKS):
            made.shape(host, SHARDS_LINK)
        for _ in range(args.rounds):
            for count in measured:
                settings = {
                    "parameters": 1_000_000,
                    "tensors": 8,
                    "updates": 6,
                    "torchrun": {"address": made.address(0), "shards": count},
                }
                job = Job("move_ours", SHARDS_RANKS, settings, made.names, made.address(0))
                measured[count].append(job.answers()[0])
    one, two = measured[1], measured[2]
    return {
        "bar": f"at most {SHARDS_BAR} x the time per update with one server",
        "link": SHARDS_LINK,
        "one_shard_s": spread(one),
        "two_shards_s": spread(two),
        "ratio": ratios(two, one),
        "meets_bar": ratios(two, one)["median"] <= SHARDS_BAR,
    }


def premium(args: argparse.Namespace) -> dict[str, Any]:
    compute_s = [args.compute_s] * args.workers
    ours, ddp = [], []
    for _ in range(args.rounds):
        ours.append(1 / rate(train_ours(args, compute_s, "bsp")["updates"]))
        ddp.append(1 / rate(train_ddp(args, compute_s)["updates"]))
    ratio = ratios(ours, ddp)
    return {
        "bar": f"at most {PREMIUM_BAR} x DDP's time per update",
        "ours_s": spread([args.workers * each for each in ours]),
        "ddp_s": spread([args.workers * each for each in ddp]),
        "ratio": ratio,
        "meets_bar": ratio["median"] <= PREMIUM_BAR,
    }


def payout(args: argparse.Namespace) -> dict[str, Any]:
    compute_s = [2 * args.compute_s] + [args.compute_s] * (args.workers - 1)
    measured: dict[str, list[float]] = {name: [] for name in ("ddp", *PAYOUT_BARS)}
    for _ in range(args.rounds):
        measured["ddp"].append(rate(train_ddp(args, compute_s)["updates"]))
        for protocol in PAYOUT_BARS:
            measured[protocol].append(rate(train_ours(args, compute_s, protocol)["updates"]))
    results: dict[str, Any] = {"ddp": {"minibatches_per_s": spread(measured["ddp"])}}
    for protocol, bar in PAYOUT_BARS.items():
        ratio = ratios(measured[protocol], measured["ddp"])
        results[protocol] = {
            "minibatches_per_s": spread(measured[protocol]),
            "ratio": ratio,
            "bar": f"at least {bar} x DDP's",
            "meets_bar": ratio["median"] >= bar,
        }
    return results


def kill(args: argparse.Namespace) -> dict[str, Any]:
    compute_s = [args.compute_s] * args.workers
    pauses, steps, silent, errors = [], [], [], []
    is_complete = True
    for _ in range(args.rounds):
        ours = train_ours(args, compute_s, "bsp", faults=[(1, DYING_UPDATE)])
        at_s = [moment for moment, _, _ in ours["updates"]]
        [lost_s] = ours["losses"]
        usual_s = typical(at_s)
        around_s = next(after - before for before, after in pairwise(at_s) if after > lost_s)
        steps.append(usual_s)
        pauses.append(around_s - usual_s)
        versions = [version for _, version, _ in ours["updates"]]
        is_complete &= versions == list(range(1, args.updates + 1))
        ddp = train_ddp(args, compute_s, faults=[(1, DYING_UPDATE)])
        silent.append(ddp["error_s"] - ddp["updates"][-1][0])
        errors.append(f"{len(ddp['updates'])} of {args.updates} updates, then {ddp['error']}")
    return {
        "bar": "no update lost, pause under one update's time in every round",
        "every_update_made": is_complete,
        "update_s": spread(steps),
        "pause_s": spread(pauses),
        "meets_bar": is_complete and all(pause < step for pause, step in zip(pauses, steps, strict=True)),
        "ddp": {"ends_after_s": spread(silent), "with": errors[-1]},
    }


def join(args: argparse.Namespace) -> dict[str, Any]:
    compute_s = [args.compute_s] * args.workers
    since_start, since_joined, longest = [], [], []
    for _ in range(args.rounds):
        settings = {
            "protocol": "bsp",
            "compute_s": compute_s,
            "faults": [(1, DYING_UPDATE)],
            "updates": DYING_UPDATE + round(12 / args.compute_s),
            "encrypt": not args.plain,
        }
        job = Job("train_ours", args.workers + 1, settings)
        begun_s = job.start_again(2)
        ours = job.answers()[0]
        [joined_s], [used_s] = ours["joins"], ours["used_after_join"]
        at_s = [moment for moment, _, _ in ours["updates"]]
        gaps_s = [after - before for before, after in pairwise(at_s) if after > begun_s and before < used_s]
        since_start.append(used_s - begun_s)
        since_joined.append(used_s - joined_s)
        longest.append(max(gaps_s) / typical(at_s))
    return {
        "bar": f"first gradient used within {JOIN_BAR_S} s of the process's start; no update takes twice as long",
        "from_start_of_process_s": spread(since_start),
        "from_joining_s": spread(since_joined),
        "longest_update_while_joining_in_usual_ones": spread(longest),
        "meets_bar": max(since_start) <= JOIN_BAR_S and max(longest) < 2.0,
    }


PARTS: dict[str, Part] = {
    "move": move,
    "overlap": overlap,
    "shards": shards,
    "premium": premium,
    "payout": payout,
    "kill": kill,
    "join": join,
}


# --- jobs of several processes ---------------------------------------------------------------------------------------


def train_ours(
    args: argparse.Namespace, compute_s: list[float], protocol: str, faults: list[tuple[int, int]] | None = None
) -> dict[str, Any]:
    settings = {
        "protocol": protocol,
        "compute_s": compute_s,
        "updates": args.updates,
        "faults": faults or [],
        "encrypt": not args.plain,
    }
    return dict(Job("train_ours", len(compute_s) + 1, settings).answers()[0])


def train_ddp(
    args: argparse.Namespace, compute_s: list[float], faults: list[tuple[int, int]] | None = None
) -> dict[str, Any]:
    settings = {"compute_s": compute_s, "updates": args.updates, "faults": faults or []}
    return dict(Job("train_ddp", len(compute_s), settings).answers()[0])


def rate(updates: list[tuple[float, int, int]]) -> float:
    """Return the minibatches applied per second after the warm-up."""
    timed = updates[WARM_UP:]
    return sum(k for _, _, k in timed[1:]) / (timed[-1][0] - timed[0][0])


def typical(at_s: list[float]) -> float:
    """Return the median of the seconds between two updates."""
    return median(after - before for before, after in pairwise(at_s[WARM_UP:]))


class Job:
    """The processes of a job, with the variables that torchrun would set.

    Args:
        contender: name of the contender that each process runs.
        world_size: number of processes, >= 1.
        settings: settings of the contender.
        namespaces: network namespace of each rank; None for that of this process.
        master: address of rank 0.
        script: program of every rank.
    """

    def __init__(
        self,
        contender: str,
        world_size: int,
        settings: dict[str, Any],
        namespaces: list[str] | None = None,
        master: str = "127.0.0.1",
        script: Path = RANKS,
    ) -> None:
        self._command = [sys.executable, str(script), contender, json.dumps(settings)]
        self._namespaces = namespaces
        self._environment = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(1 if namespaces else world_size),
            "MASTER_ADDR": master,
            "MASTER_PORT": str(free_port()),
            "PACELINE_TOKEN": "benchmark",
            "OMP_NUM_THREADS": "1",
        }
        self._processes = [self._start(rank) for rank in range(world_size)]

    def start_again(self, rank: int) -> float:
        """Start a rank again after it has ended; return the monotonic time of the start."""
        self._processes[rank].wait(LIMIT_S)
        begun_s = time.monotonic()
        self._processes.append(self._start(rank, IS_BACK="1"))
        return begun_s

    def start_more(self, rank: int) -> None:
        """Start a rank beyond the first ones."""
        self._processes.append(self._start(rank))

    def end(self, rank: int) -> None:
        """Send SIGTERM to a rank."""
        self._processes[rank].terminate()

    def answers(self, limit_s: float = LIMIT_S) -> list[Any]:
        """Wait until all ranks have ended, at most some seconds each, and return the answers of those that gave one."""
        try:
            said = [process.communicate(timeout=limit_s)[0] for process in self._processes]
        finally:
            for process in self._processes:
                process.kill()
                process.wait()
        lines = [line for text in said for line in text.splitlines() if line.startswith(ANSWER)]
        return [json.loads(line.removeprefix(ANSWER)) for line in lines]

    def _start(self, rank: int, **more: str) -> subprocess.Popen[str]:
        local = {"RANK": str(rank), "LOCAL_RANK": "0" if self._namespaces else str(rank)}
        environment = {**os.environ, **self._environment, **local, **more}
        there = ["ip", "netns", "exec", self._namespaces[rank]] if self._namespaces else []
        return subprocess.Popen([*there, *self._command], env=environment, stdout=subprocess.PIPE, text=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
