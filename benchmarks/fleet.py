"""Very many workers in simulation: seconds and memory at n = 100,000, and arrivals/s against SimPy at n = 1,000.

Times are processor seconds of one thread. All compute times are exponential(1); SimPy's are drawn in bulk beforehand.
All models count the staleness of every gradient. The SimPy model follows SimPy's documentation: workers and server are
processes, gradients go through a store, interrupts are SimPy's own. `simpy_lean` is a lower bound on the cost of SimPy:
workers call a function in place of the server, so an arrival is one event.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from functools import partial
from math import inf
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import perf_counter, process_time
from typing import Any

import numpy as np
import simpy

import paceline as pl
from common import options, ratios, report, rounded, spread
from paceline.coordinator.coordinator import Coordinator
from paceline.engines.virtual.timing import TimedWorkers
from paceline.protocols.plan_checks import checked_plan
from paceline.protocols.protocol import Protocol, as_plan

BAR = 50
SECONDS_BAR, GIB_BAR = 60, 2.0
FLEET, PEERS = 100_000, 1_000
NAMES = ("k_sync", "backup", "k_batch_sync", "k_async", "k_batch_async", "asp", "balanced")
AGAINST_SIMPY = {"k_sync": 1_000, "k_async": 1_000, "asp": 500_000}  # updates of paceline
SHARE_OF_SIMPY = 10  # factor by which its run is shorter, so that a round takes seconds


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--updates", type=int, default=1_000, help="updates of each protocol at n = 100,000, K = n / 2")
    parser.add_argument("--asp-updates", type=int, default=10_000_000)
    parser.add_argument("--balanced-updates", type=int, default=100, help="of its 8 microbatches a minibatch")
    parser.add_argument("--case", choices=NAMES, help="case to run alone, in this process")
    args = parser.parse_args()
    if args.case:
        updates = {"asp": args.asp_updates, "balanced": args.balanced_updates}.get(args.case, args.updates)
        print(json.dumps(large(args.case, updates)))
        return
    del args.case
    os.environ["OMP_NUM_THREADS"] = "1"
    report(
        "fleet",
        args,
        {
            "bars": {
                "n=100000": f"each under {SECONDS_BAR} s and {GIB_BAR} GiB on one core",
                "n=1000": f"at least {BAR} times the arrivals/s of SimPy, median of the ratios round by round",
            },
            f"n={FLEET}": {name: in_a_process(name, args) for name in NAMES},
            f"n={PEERS}": {name: against(name, updates, args.rounds) for name, updates in AGAINST_SIMPY.items()},
        },
        "simpy",
    )


# --- a large fleet ----------------------------------------------------------------------------------------


def in_a_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a case in a new process, and return its result with its memory."""
    sizes = ["--updates", str(args.updates), "--asp-updates", str(args.asp_updates)]
    sizes += ["--balanced-updates", str(args.balanced_updates)]
    command = [sys.executable, str(Path(__file__)), "--case", name, *sizes]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def large(name: str, updates: int) -> dict[str, Any]:
    cluster = pl.Cluster(FLEET, pl.timing.Exponential(mean_s=1.0))
    begun, begun_wall = process_time(), perf_counter()
    chosen = pl.balanced(m=8) if name == "balanced" else protocol(name, FLEET)
    simulated = pl.simulate(chosen, cluster, updates=updates)
    took_s, wall_s = process_time() - begun, perf_counter() - begun_wall
    peak_gib = getrusage(RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "updates": simulated.totals.updates,
        "arrivals": simulated.pushes,
        "processor_s": rounded(took_s),
        "wall_s": rounded(wall_s),
        "arrivals_per_s": rounded(simulated.pushes / took_s),
        "peak_gib": rounded(peak_gib),
        "seconds_per_update": simulated.seconds_per_update,
        "meets_bar": took_s < SECONDS_BAR and peak_gib < GIB_BAR,
    }


def protocol(name: str, n: int) -> Protocol:
    factory: Callable[..., Protocol] = getattr(pl, name)
    return factory() if name == "asp" else factory(k=n // 2)


# --- against SimPy ----------------------------------------------------------------------------------------


def against(name: str, updates: int, rounds: int) -> dict[str, Any]:
    chosen, cluster = protocol(name, PEERS), pl.Cluster(PEERS, pl.timing.Exponential(mean_s=1.0))
    few = max(1, updates // SHARE_OF_SIMPY)
    ours, events, simpys, leans = [], [], [], []
    for seed in range(rounds):
        ours.append(rate(partial(by_fleet, chosen, cluster, updates, seed)))
        events.append(rate(partial(by_events, chosen, cluster, few, seed)))
        simpys.append(rate(Model(chosen, PEERS, few, seed).run))
        leans.append(rate(LeanModel(chosen, PEERS, few, seed).run))
    ratio = ratios(ours, simpys)
    return {
        "unit": "arrivals per processor second",
        "ours": spread(ours),
        "simpy": spread(simpys),
        "simpy_lean": spread(leans),
        "coordinator": spread(events),
        "ours_to_simpy": {**ratio, "meets_bar": ratio["median"] >= BAR},
        "ours_to_simpy_lean": ratios(ours, leans),
        "ours_to_coordinator": ratios(ours, events),
        "simpy_seconds_per_update_to_ours": rounded(agreement(chosen, cluster, updates // SHARE_OF_SIMPY)),
    }


def rate(run: Callable[[], int]) -> float:
    gc.collect()
    begun = process_time()
    arrivals = run()
    return arrivals / (process_time() - begun)


def by_fleet(chosen: Protocol, cluster: pl.Cluster, updates: int, seed: int) -> int:
    return pl.simulate(chosen, cluster, updates=updates, seed=seed).pushes


def by_events(chosen: Protocol, cluster: pl.Cluster, updates: int, seed: int) -> int:
    plan = checked_plan(as_plan(chosen), cluster.n, total=None, per_epoch=None)
    engine = TimedWorkers(cluster, seed)
    with engine.loop() as loop:
        loop.run(Coordinator(plan, workers=cluster.n, stop=pl.Stop(updates=updates)))
    return engine.pushes


def agreement(chosen: Protocol, cluster: pl.Cluster, updates: int) -> float:
    """Return the ratio of the seconds per update of the two models, which checks that they agree."""
    model = Model(chosen, cluster.n, updates, seed=0)
    model.run()
    return float(model.env.now) / pl.simulate(chosen, cluster, updates=updates).time_s


Steps = Generator[simpy.Event, Any, None]


class Model:
    """K-sync, K-async and ASP in SimPy: workers, and a server that reads gradients from a store and replies."""

    def __init__(self, chosen: Protocol, n: int, updates: int, seed: int) -> None:
        assert isinstance(chosen.quorum, int)
        assert chosen.max_staleness == inf or chosen.on_update == "interrupt"
        self.env = simpy.Environment()
        self.version = 0
        self.arrivals = 0
        self.staleness: Counter[int] = Counter()
        self._quorum = chosen.quorum
        self._waits = chosen.refill == "update"
        self._interrupts = chosen.on_update == "interrupt"
        self._updates = updates
        self._held = 0
        self._next_s = exponentials(seed).__next__
        self._published = self.env.event()
        self._end = self.env.event()
        self._at_work: set[int] = set()
        self._begin_service()
        self._workers = [self.env.process(self._work(worker)) for worker in range(n)]

    def run(self) -> int:
        self.env.run(until=self._end)
        return self.arrivals

    def _begin_service(self) -> None:
        self._inbox = simpy.Store(self.env)
        self.env.process(self._serve())

    def _serve(self) -> Steps:
        while True:
            version, reply = yield self._inbox.get()
            is_open = self._arrive(version)
            if is_open and self._waits:
                self._published.callbacks.append(partial(_succeed, reply))
            else:
                reply.succeed()

    def _hand_in(self, version: int) -> Steps:
        reply = self.env.event()
        self._inbox.put((version, reply))
        yield reply

    def _work(self, worker: int) -> Steps:
        while True:
            version = self.version
            if self._interrupts:
                self._at_work.add(worker)
                try:
                    yield self.env.timeout(self._next_s())
                except simpy.Interrupt:
                    continue
                self._at_work.discard(worker)
            else:
                yield self.env.timeout(self._next_s())
            yield from self._hand_in(version)

    def _arrive(self, version: int) -> bool:
        """Add a gradient, and return whether the update is still open."""
        self.arrivals += 1
        self.staleness[self.version - version] += 1
        self._held += 1
        if self._held < self._quorum:
            return True
        self._held = 0
        self.version += 1
        if self.version == self._updates:
            self._end.succeed()
        if self._interrupts:
            for late in self._at_work:
                self._workers[late].interrupt()
        if self._waits:
            published, self._published = self._published, self.env.event()
            published.succeed()
        return False


class LeanModel(Model):
    """The same model without process and store of the server: a worker calls it, which saves three of four events."""

    def _begin_service(self) -> None:
        """Do nothing: there is no server process."""

    def _hand_in(self, version: int) -> Steps:
        if self._arrive(version) and self._waits:
            yield self._published


def exponentials(seed: int) -> Iterator[float]:
    generator = np.random.default_rng(seed)
    while True:
        yield from generator.exponential(size=10_000).tolist()


def _succeed(reply: simpy.Event, _published: simpy.Event) -> None:
    reply.succeed()


if __name__ == "__main__":
    main()
