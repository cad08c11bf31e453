"""Local steps over two sites of two workers, of which only the link between the sites is slow.

- `equal`: seconds to the final validation loss of DistributedDataParallel (gloo) plus 0.03, against DDP. The peer is
  DiLoCo of torchft with the same steps and outer optimizer. It is no dependency of paceline, and is left out where it
  is not installed.
- `straggler`: one worker at half speed. Local steps that do not wait for it, against DiLoCo that waits: samples per
  second, and seconds to DiLoCo's final validation loss plus 0.03.

A character-level GPT of a million parameters. Every worker is a process on a host of its own, which is a network
namespace. The link between the sites has 100 Mbit/s and 25 ms each way; all others are fast. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from common import options, ratios, report, spread
from distributed import Job
from namespaces import hosts, why_there_are_none

RANKS = Path(__file__).with_name("two_sites_ranks.py")

# Written down before the first measurement, from the searches of papers/diloco. The batch has 8 samples.
LINK, DELAY_S = "100mbit", 0.025  # between the sites, in each direction
H = 16
OUTER = "nesterov(lr=0.7, momentum=0.3)"
TORCHFT_OUTER = {"lr": 0.7, "momentum": 0.3, "nesterov": True}  # the same
LR = 1e-3  # of AdamW
SITES = (2, 2)  # workers; rank 0, with the server and worker 0, is at the first site
COMPUTE_S = 0.25  # of a gradient, of which a worker sleeps 0.2 s: four workers share two cores
SLOW_SPEED = [1.0, 1.0, 1.0, 0.5]  # the slow worker is not at the server's site
MARGIN = 0.03
WAITS = f"bsp + local_steps(H={H}, outer='{OUTER}')"
EQUAL = (f"local_sgd(H={H}, outer='{OUTER}')", WAITS)
EQUAL_BAR = 0.75  # share of the ratio (t_C + t_AR) / (t_C + t_AR / H)
STRAGGLER_BARS = {
    f"k_sync(k=3) + local_steps(H={H}, outer='{OUTER}')": 1.2,
    f"bsp + local_steps(seconds={H * COMPUTE_S:g}, outer='{OUTER}')": 1.35,
}
DDP_EVALUATED_EVERY = 16  # minibatches: about as often as a version of local steps, in seconds
MOST_TIMES = 2  # minibatches of a contender at most, relative to those of the run that sets the target
LIMIT_S = 1800


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--updates", type=int, default=192, help="minibatches of each worker, a multiple of 16")
    parser.add_argument("--repeats", type=int, default=20, help="repeats of the measurement of t_C and t_AR")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args()
    if reason := why_there_are_none():
        sys.exit(f"Linux, root, and ip and tc (iproute2) are needed: {reason}.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # runs the clean-up of the namespaces
    name = "two_sites" if args.parts == list(PARTS) else "_".join(["two_sites", *args.parts])
    report(name, args, {part: PARTS[part](args) for part in args.parts})


# --- the parts -------------------------------------------------------------------------------------------------------


def equal(args: argparse.Namespace) -> dict[str, Any]:
    speed = [1.0] * sum(SITES)
    computing, summing, ddp = [], [], []
    peer: list[Training] = []
    ours: dict[str, list[Training]] = {protocol: [] for protocol in EQUAL}
    for seed in range(args.rounds):
        settings = {"seed": seed, "speed": speed, "compute_s": COMPUTE_S, "lr": LR}
        parts, _ = run("measure_parts", {**settings, "repeats": args.repeats})
        computing.append(max(each["compute_s"] for each in parts))
        summing.append(max(each["sum_s"] for each in parts))
        minibatches = args.updates * sum(SITES)
        settings |= {"minibatches": minibatches, "evaluate_every": DDP_EVALUATED_EVERY}
        ddp.append(Training("train_ddp", settings))
        settings |= {"minibatches": MOST_TIMES * minibatches, "evaluate_every": H * sum(SITES)}
        if find_spec("torchft") is not None:
            peer.append(Training("train_torchft", {**settings, "H": H, "outer": TORCHFT_OUTER}))
        for protocol, trainings in ours.items():
            trainings.append(Training("train_ours", {**settings, "protocol": protocol, "loss": ddp[-1].target}))
    bars = [EQUAL_BAR * (c_s + ar_s) / (c_s + ar_s / H) for c_s, ar_s in zip(computing, summing, strict=True)]
    return {
        "bar": f"at least {EQUAL_BAR} x (t_C + t_AR) / (t_C + t_AR / H)",
        "t_C_s": spread(computing),
        "t_AR_s": spread(summing),
        "bar_ratio": spread(bars),
        "ddp": summary(ddp, ddp),
        **({"torchft_diloco": against(peer, ddp, median(bars))} if peer else {}),
        **{protocol: against(trainings, ddp, median(bars)) for protocol, trainings in ours.items()},
    }


def straggler(args: argparse.Namespace) -> dict[str, Any]:
    waits: list[Training] = []
    ours: dict[str, list[Training]] = {protocol: [] for protocol in STRAGGLER_BARS}
    for seed in range(args.rounds):
        minibatches = args.updates * sum(SITES)
        settings = {"seed": seed, "speed": SLOW_SPEED, "compute_s": COMPUTE_S, "lr": LR}
        settings |= {"evaluate_every": H * sum(SITES)}
        waits.append(Training("train_ours", {**settings, "protocol": WAITS, "minibatches": minibatches, "loss": None}))
        settings["minibatches"] = MOST_TIMES * minibatches
        for protocol, trainings in ours.items():
            trainings.append(Training("train_ours", {**settings, "protocol": protocol, "loss": waits[-1].target}))
    return {
        WAITS: summary(waits, waits),
        **{protocol: against(ours[protocol], waits, bar) for protocol, bar in STRAGGLER_BARS.items()},
    }


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"equal": equal, "straggler": straggler}


# --- trainings -------------------------------------------------------------------------------------------------------


class Training:
    """One training on the two sites.

    Args:
        contender: name of the contender in two_sites_ranks.py.
        settings: settings of the contender.

    Attributes:
        samples_per_s: samples of the updates after the first one, per second.
        link_mb: megabytes that crossed the link between the sites, in both directions together.
    """

    def __init__(self, contender: str, settings: dict[str, Any]) -> None:
        answers, link_bytes = run(contender, settings)
        self._losses: list[tuple[float, float]] = answers[0]["losses"]
        self.samples_per_s: float = answers[0]["samples_per_s"]
        self.link_mb = link_bytes / 1e6

    @property
    def target(self) -> float:
        """Final validation loss plus the margin."""
        return self._losses[-1][1] + MARGIN

    def seconds_to(self, target: float) -> float:
        """Return the seconds to the first version with at most this loss; inf if there is none."""
        return next((at_s for at_s, loss in self._losses if loss <= target), inf)


def run(contender: str, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Return the answer of each rank, and the bytes that crossed the link between the sites."""
    with hosts(*SITES) as made:
        made.join_sites(LINK, DELAY_S)
        answers = Job(contender, sum(SITES), settings, made.names, made.address(0), RANKS).answers(LIMIT_S)
        assert len(answers) == sum(SITES), f"a rank of {contender} failed; its error is above"
        return answers, made.bytes_between_sites()


def summary(trainings: Sequence[Training], reference: Sequence[Training]) -> dict[str, Any]:
    """Return speed, seconds to the targets of the reference runs, and bytes of some trainings."""
    reached_s = [ours.seconds_to(its.target) for ours, its in zip(trainings, reference, strict=True)]
    return {
        "target_loss": spread([each.target for each in reference]),
        "seconds_to_target": spread(reached_s),
        "samples_per_s": spread([each.samples_per_s for each in trainings]),
        "link_mb": spread([each.link_mb for each in trainings]),
    }


def against(trainings: Sequence[Training], reference: Sequence[Training], bar: float) -> dict[str, Any]:
    """Return the summary of some trainings, and how many times as fast as the reference runs they are.

    Args:
        trainings: trainings of a contender.
        reference: reference run of each round.
        bar: smallest ratio.
    """
    found = summary(trainings, reference)
    theirs = summary(reference, reference)
    of_seconds = ratios(theirs["seconds_to_target"]["rounds"], found["seconds_to_target"]["rounds"])
    of_samples = ratios(found["samples_per_s"]["rounds"], theirs["samples_per_s"]["rounds"])
    return {
        **found,
        "bar": f"at least {bar:.3g} x",
        "speed_to_target": {**of_seconds, "meets_bar": of_seconds["median"] >= bar},
        "speed_in_samples": {**of_samples, "meets_bar": of_samples["median"] >= bar},
    }


if __name__ == "__main__":
    main()
