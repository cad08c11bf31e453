"""Runs whose ranks change: more workers join and leave, and a standby takes over from rank 0, on loopback.

- `grow`: four more workers join, and leave again on SIGTERM.
- `standby`: a standby follows rank 0, which is killed in half of the runs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import ratios, spread
from distributed import DYING_UPDATE, LIMIT_S, Job, Part, rate, report_parts, typical

RANKS = Path(__file__).with_name("membership_ranks.py")
GROW_BAR = 1.0  # updates that a worker waits at most
STANDBY_BAR, TAKEOVER_BAR_S = 1.03, 5.0
STANDBYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "standby": {"standby": 1},
    "standby_sync": {"standby": 1, "standby_sync": True},
}
LOST_BARS = {"standby": 1, "standby_sync": 0}  # updates


def main() -> None:
    report_parts("membership", __doc__ or "", PARTS)


def grow(args: argparse.Namespace) -> dict[str, Any]:
    epochs, most = 3, 2 * args.workers
    longest, sizes, applied = [], [], []
    for _ in range(args.rounds):
        with TemporaryDirectory() as folder:
            settings = {
                "compute_s": args.compute_s,
                "max_workers": most,
                "samples": 4 * 60 * args.workers,
                "epochs": epochs,
                "updates": args.updates // 2,
                "encrypt": not args.plain,
                "folder": folder,
            }
            job = Job("train_growing", args.workers + 1, settings, script=RANKS)
            late = range(args.workers + 1, most + 1)
            await_file(Path(folder, "grow"))
            for rank in late:
                job.start_more(rank)
            await_file(Path(folder, "shrink"))
            for rank in late:
                job.end(rank)
            ours = next(answer for answer in job.answers() if answer is not None)
        longest.append(max(ours["waits_s"]) / typical([moment for moment, _, _ in ours["updates"]]))
        sizes.append(sorted({k for _, _, k in ours["updates"]}))
        applied.append(ours["applied"])
    is_once = all(each == [epochs] for each in applied)
    return {
        "bar": "no worker waits longer than an update; every sample once an epoch",
        "longest_wait_in_updates": spread(longest),
        "gradients_of_an_update": sizes,
        "every_sample_once": is_once,
        "meets_bar": is_once and max(longest) <= GROW_BAR,
    }


def standby(args: argparse.Namespace) -> dict[str, Any]:
    update_s: dict[str, list[float]] = {name: [] for name in STANDBYS}
    lost: dict[str, list[int]] = {name: [] for name in LOST_BARS}
    pause_s: dict[str, list[float]] = {name: [] for name in LOST_BARS}
    for _ in range(args.rounds):
        for name in STANDBYS:
            update_s[name].append(1 / rate(train_followed(args, name)["updates"]))
        for name in LOST_BARS:
            missing, next_s = take_over(args, name)
            lost[name].append(missing)
            pause_s[name].append(next_s)
    results: dict[str, Any] = {"alone": {"update_s": spread([args.workers * each for each in update_s["alone"]])}}
    for name, most in LOST_BARS.items():
        ratio = ratios(update_s[name], update_s["alone"])
        results[name] = {
            "bar": f"at most {STANDBY_BAR} x the time per update alone; at most {most} updates lost; next update in "
            f"{TAKEOVER_BAR_S} s",
            "ratio": ratio,
            "lost_updates": lost[name],
            "next_update_s": spread(pause_s[name]),
            "meets_bar": ratio["median"] <= STANDBY_BAR
            and max(lost[name]) <= most
            and max(pause_s[name]) <= TAKEOVER_BAR_S,
        }
    return results


PARTS: dict[str, Part] = {"grow": grow, "standby": standby}


def train_followed(args: argparse.Namespace, name: str) -> dict[str, Any]:
    return dict(followed_job(args, name).answers()[0])


def take_over(args: argparse.Namespace, name: str) -> tuple[int, float]:
    """Return the updates that are lost when rank 0 is killed, and the seconds until the next update."""
    with TemporaryDirectory() as folder:
        followed_job(args, name, dies_at=DYING_UPDATE, folder=folder).answers()
        killed_s = float(Path(folder, "killed_s").read_text())
        clock = json.loads(Path(folder, "clock.json").read_text())
    return DYING_UPDATE - clock["resumed"][0], clock["updates"][0][0] - killed_s


def followed_job(args: argparse.Namespace, name: str, **more: Any) -> Job:
    """Start a job whose rank 0 is followed by a standby of this name."""
    settings = {
        "protocol": "bsp",
        "compute_s": [args.compute_s] * args.workers,
        "updates": args.updates,
        "encrypt": not args.plain,
        "torchrun": STANDBYS[name],
    }
    return Job("train_followed", args.workers + 1, settings | more, script=RANKS)


def await_file(path: Path) -> None:
    """Wait for a file."""
    deadline_s = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path} has not come")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
