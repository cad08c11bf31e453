"""Events per second of the timing simulation, and of the coordinator alone. An event is an arrival.

Times are processor seconds of this process, which has one thread: other processes on the machine affect them only
through caches and clock rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import process_time

import paceline as pl
from common import options, report, spread
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import Arrival, Command, Event
from paceline.engines.virtual.timing import TimedWorkers
from paceline.protocols.plan_checks import checked_plan
from paceline.protocols.protocol import Protocol, as_plan

BAR = 150_000
LARGE_BAR = 0.5
SMALL, LARGE = 16, 10_000
PROTOCOLS: dict[str, Callable[[], Protocol]] = {"asp": pl.asp, "bsp": pl.bsp}


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--events", type=int, default=300_000)
    args = parser.parse_args()

    cases = [(name, n) for name in PROTOCOLS for n in (SMALL, LARGE)]
    recorded = {case: arrivals(*case, args.events) for case in cases}
    simulated: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    replayed: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        for name, n in cases:
            simulated[name, n].append(simulate(name, n, args.events))
            replayed[name, n].append(replay(name, n, recorded[name, n], args.events))

    results = {}
    for name in PROTOCOLS:
        small, large = spread(simulated[name, SMALL]), spread(simulated[name, LARGE])
        share = spread([b / a for a, b in zip(simulated[name, SMALL], simulated[name, LARGE], strict=True)])
        results[name] = {
            f"simulate, n={SMALL}": {**small, "meets_bar": small["median"] >= BAR},
            f"simulate, n={LARGE}": large,
            f"n={LARGE} to n={SMALL}": {**share, "meets_bar": share["median"] >= LARGE_BAR},
            f"coordinator alone, n={SMALL}": spread(replayed[name, SMALL]),
            f"coordinator alone, n={LARGE}": spread(replayed[name, LARGE]),
        }
    report(
        "coordinator",
        args,
        {
            "bar": f"simulate at n={SMALL}: at least {BAR} events/s; at n={LARGE}: at least {LARGE_BAR} of that",
            "unit": "events per processor second",
            **results,
        },
    )


def updates_for(name: str, n: int, events: int) -> int:
    """Return the number of updates that use about this many arrivals."""
    return events if name == "asp" else max(1, events // n)


def simulate(name: str, n: int, events: int) -> float:
    cluster = pl.Cluster(n, pl.timing.Exponential(mean_s=1.0))
    begun = process_time()
    totals = pl.simulate(PROTOCOLS[name](), cluster, updates=updates_for(name, n, events)).totals
    return (totals.used + totals.dropped) / (process_time() - begun)


def make_coordinator(name: str, n: int, events: int) -> Coordinator:
    plan = checked_plan(as_plan(PROTOCOLS[name]()), n, total=None, per_epoch=None)
    return Coordinator(plan, workers=n, stop=pl.Stop(updates=updates_for(name, n, events)))


def arrivals(name: str, n: int, events: int) -> list[Event]:
    """Return all events of a simulation."""
    seen: list[Event] = []

    def observe(now: float, event: Event | None, commands: Sequence[Command]) -> None:
        if event is not None:
            seen.append(event)

    timed = TimedWorkers(pl.Cluster(n, pl.timing.Exponential(mean_s=1.0)), seed=0)
    timed.loop().run(make_coordinator(name, n, events), observe)
    return seen


def replay(name: str, n: int, recorded: list[Event], events: int) -> float:
    """Pass recorded events to a new coordinator, without a heap, draws or an engine for its commands."""
    coordinator = make_coordinator(name, n, events)
    coordinator.begin()
    begun = process_time()
    for event in recorded:
        coordinator.handle(event)
    took_s = process_time() - begun
    assert coordinator.stopped
    return sum(type(event) is Arrival for event in recorded) / took_s


if __name__ == "__main__":
    main()
