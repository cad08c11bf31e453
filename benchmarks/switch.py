"""Cost of a protocol switch on the local engine: its time against that of an update, and the dropped gradients.

Four worker processes, 11.7 M parameters, real gradients; the plan goes from BSP to ASP and back several times. The time
of an event runs until its commands are carried out and every worker that may start has a task. The time of a switch is
compared with the time between two updates of BSP, and with the time of the event of such an update.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from common import options, report, spread
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import Apply, Command, Decision, Event
from paceline.core.records import DecisionMade, UpdateMade, WorkerJoined, WorkerLost
from paceline.recording.recorder import Recorder

WORKERS = 4
WIDTHS = (784, 3000, 3000, 110, 10)
SYNCHRONOUS = "every live worker has contributed"


@dataclass
class Answer:
    """Commands of an event, and the time that they took."""

    took_s: float
    updates: int
    protocols: list[str]


class Answers:
    """Timer of all events of a run, from the coordinator until the commands are carried out."""

    def __init__(self) -> None:
        self.all: list[Answer] = []
        own_handle, own_observe = Coordinator.handle, Recorder.observe

        def handle(coordinator: Coordinator, event: Event) -> list[Command]:
            self._begun = perf_counter()
            return own_handle(coordinator, event)

        def observe(recorder: Recorder, now: float, event: Event | None, commands: Sequence[Command]) -> None:
            if event is not None:
                self._take(perf_counter() - self._begun, commands)
            own_observe(recorder, now, event, commands)

        for kind, method in ((Coordinator, handle), (Recorder, observe)):
            setattr(kind, method.__name__, method)

    def _take(self, took_s: float, commands: Sequence[Command]) -> None:
        updates = sum(isinstance(command, Apply) for command in commands)
        switches = [each for each in commands if isinstance(each, Decision) and each.kind == "protocol"]
        self.all.append(Answer(took_s, updates, [each.reason.partition(":")[0] for each in switches]))


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--switches", type=int, default=6, help="switches of each kind per round (default 6)")
    args = parser.parse_args()
    answers = Answers()
    to_asp, to_bsp, extra, lost, too_old, restarted = [], [], [], 0, 0, 0
    for seed in range(args.rounds):
        answers.all.clear()
        result = pl.train(
            make_job(), protocol=plan(args.switches), cluster=pl.LocalCluster(WORKERS), stop=stop(args), seed=seed
        )
        update_s = seconds_per_update(result.history)
        plain_s = median(each.took_s for each in answers.all if each.updates and not each.protocols)
        switch_s = {
            name: median(each.took_s for each in answers.all if each.protocols == [name]) for name in ("asp", "bsp")
        }
        to_asp.append(switch_s["asp"] / update_s)
        to_bsp.append(switch_s["bsp"] / update_s)
        extra.append((switch_s["asp"] - plain_s) / update_s)
        lost += result.history.totals.dropped - dropped_by_design(result.history)
        too_old += dropped_by_design(result.history)
        restarted += len(result.history.of(WorkerLost)) + len(result.history.of(WorkerJoined))
    report(
        "switch",
        args,
        {
            "bar": "a switch under the time of one update; no process restarted, no gradient lost",
            "to_asp_of_an_update": {**spread(to_asp), "meets_bar": max(to_asp) < 1},
            "to_bsp_of_an_update": {**spread(to_bsp), "meets_bar": max(to_bsp) < 1},
            "to_asp_beyond_what_any_update_takes": spread(extra),
            "processes_restarted": restarted,
            "gradients_lost": lost,
            "gradients_in_flight_too_old_for_bsp_per_switch_to_it": too_old / (args.rounds * args.switches),
        },
    )


def plan(switches: int) -> str:
    """Return a plan that alternates 4 updates of BSP and 16 of ASP."""
    parts = [f"{name}@updates={20 * i + end}" for i in range(switches) for name, end in (("bsp", 4), ("asp", 20))]
    return " >> ".join([*parts, "bsp"])


def stop(args: argparse.Namespace) -> str:
    return f"updates={20 * args.switches + 4}"


def seconds_per_update(history: pl.results.History) -> float:
    """Return the median time between two synchronous updates without a switch."""
    updates = history.of(UpdateMade)
    switches_s = [record.now_s for record in history.of(DecisionMade) if record.kind == "protocol"]
    return median(
        float(after.now_s - before.now_s)
        for before, after in pairwise(updates)
        if before.reason == after.reason == SYNCHRONOUS and before.now_s not in switches_s
    )


def dropped_by_design(history: pl.results.History) -> int:
    """Return the gradients in flight at a switch from ASP to BSP, which are too old for BSP."""
    return sum(not record.used and record.reason == "too stale" for record in history.of(pl.callbacks.GradientArrived))


def make_job() -> pl.Job:
    """Return a job of 11.7 million parameters."""
    layers: list[nn.Module] = []
    for before, after in pairwise(WIDTHS):
        layers += [nn.Linear(before, after), nn.ReLU()]
    data = TensorDataset(torch.randn(512, WIDTHS[0]), torch.randint(WIDTHS[-1], (512,)))
    return pl.Job(
        model=nn.Sequential(*layers[:-1]),
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.001, momentum=0.9),
        data=data,
        batch_size=32,
        name="large",
    )


if __name__ == "__main__":
    main()
