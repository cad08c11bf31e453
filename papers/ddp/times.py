"""Simulated times of a contender under a pattern, with measured times of network and server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import paceline as pl
from paceline.catalogue.parser import parse_plan
from paceline.coordinator.coordinator import Coordinator
from paceline.core import events
from paceline.core.stop import Stop
from paceline.engines.virtual.allreduce_timing import TimedAllReduce
from paceline.engines.virtual.simulated_workers import SimulatedWorkers
from paceline.engines.virtual.timing import TimedWorkers
from papers.ddp.patterns import PATTERNS, Death, Pattern
from papers.ddp.settings import (
    CONTENDERS,
    DDP,
    GRADIENT_S_PER_BYTE,
    JOBS,
    LEASE_S,
    LINES,
    SUMS,
    UPDATE_S_PER_BYTE,
    Contender,
)


def cluster_of(job: str, n: int, pattern: Pattern, contender: Contender, seed: int) -> pl.Cluster:
    """Return the simulated cluster on which a contender runs.

    Args:
        job: name of the job, for its payload.
        n: number of workers, of which the contender may remove the slow one.
        pattern: pattern of slowness.
        contender: contender; without a server its network is that of sums.
        seed: seed of the run, on which the time of a death depends.
    """
    payload_bytes = JOBS[job].payload_bytes
    network = replace(SUMS, latency_s=SUMS.latency_s + contender.more_s / (2 * (n - 1)))  # a sum has so many latencies
    server, leases = pl.timing.ServerTime(), pl.timing.LeaseTime()
    sum_s = SUMS.all_reduce_s(n, payload_bytes)
    if contender.has_server:
        network = LINES
        server = pl.timing.ServerTime(UPDATE_S_PER_BYTE * payload_bytes, GRADIENT_S_PER_BYTE * payload_bytes)
    elif contender.has_queue:
        network, server = pl.timing.Network(), pl.timing.ServerTime(update_s=sum_s)
        leases = pl.timing.LeaseTime(cost_s=LEASE_S)
    elif not parse_plan(contender.plan(n)).allreduce:  # half of a sum as a pull, half as a push
        network = pl.timing.Network(latency_s=sum_s / 2)
    faults = (death_of(job, n, seed).fault(n),) if pattern.dies and contender.kind != "torch" else ()
    return pattern.cluster(
        n, without_slow=contender.without_slow, network=network, server=server, leases=leases, faults=faults
    )


def death_of(job: str, n: int, seed: int) -> Death:
    """Return the death of a worker in the run of a seed."""
    updates = JOBS[job].gradients[n] // n
    return Death(_simulated_s("all_reduce", job, PATTERNS["none"], n, DDP, updates, seed), updates)


def seconds_at(job: str, n: int, pattern: Pattern, name: str, updates: int, seed: int) -> float:
    """Return the virtual time of an update of a contender whose parameters do not depend on times.

    Args:
        job: name of the job.
        n: number of workers of the cluster.
        pattern: pattern of slowness.
        name: name of the contender.
        updates: number of updates, >= 1.
        seed: seed of the times.
    """
    contender, steady = CONTENDERS[name], replace(pattern, dies=False)
    live = n - contender.without_slow
    first = min(updates, round(contender.averages_after * JOBS[job].gradients[n] / live))
    seconds = _simulated_s("all_reduce", job, steady, n, name, first, seed) if first else 0.0
    if updates > first:
        seconds += _simulated_s(contender.plan(live), job, steady, n, name, updates - first, seed)
    if pattern.dies and not contender.without_slow:
        death = death_of(job, n, seed)
        seconds += death.ddp_lost_s if updates > death.updates // 2 else 0.0
    return seconds


def slow_share_of(job: str, n: int, pattern: Pattern, name: str, seed: int) -> float:
    """Return the share of the samples that the slow worker computes under a contender whose parameters are untimed."""
    contender = CONTENDERS[name]
    if contender.without_slow:
        return 0.0
    if not parse_plan(contender.plan(n)).sets_shares:
        return 1 / n
    shares, of_work = [0.0] * n, [1.0] * n
    timed, coordinator = _parts(contender.plan(n), job, pattern, n, name, seed)

    def observe(now: float, event: events.Event | None, commands: Sequence[events.Command]) -> None:
        for command in commands:
            if isinstance(command, events.Compute):
                of_work[command.worker] = command.minibatch.share if command.minibatch is not None else 1.0
            elif isinstance(command, events.Accept):
                shares[command.worker] += of_work[command.worker]

    with timed.loop() as loop:
        loop.run(coordinator, observe)
    return shares[-1] / sum(shares)


def update_times_s(timed: SimulatedWorkers, coordinator: Coordinator) -> list[float]:
    """Simulate a run and return the virtual time of each update."""
    times_s: list[float] = []

    def observe(now: float, event: events.Event | None, commands: Sequence[events.Command]) -> None:
        times_s.extend(timed.now for command in commands if isinstance(command, events.Apply))

    with timed.loop() as loop:
        loop.run(coordinator, observe)
    return times_s


def _simulated_s(plan: str, job: str, pattern: Pattern, n: int, name: str, updates: int, seed: int) -> float:
    """Return the virtual time of an update; one simulation of a whole run has the times of all its updates."""
    return _update_times_s(plan, job, pattern, n, name, seed)[updates - 1]


@lru_cache(maxsize=10_000)
def _update_times_s(plan: str, job: str, pattern: Pattern, n: int, name: str, seed: int) -> list[float]:
    return update_times_s(*_parts(plan, job, pattern, n, name, seed))


def _parts(plan: str, job: str, pattern: Pattern, n: int, name: str, seed: int) -> tuple[SimulatedWorkers, Coordinator]:
    """Return workers and coordinator of a whole run."""
    cluster = cluster_of(job, n, pattern, CONTENDERS[name], seed)
    parsed, payload_bytes = parse_plan(plan), JOBS[job].payload_bytes
    stop = Stop(updates=-(-JOBS[job].gradients[n] // cluster.n))
    timed = (
        TimedAllReduce(cluster, seed, parsed.allreduce, payload_bytes)
        if parsed.allreduce is not None
        else TimedWorkers(cluster, seed, payload_bytes)
    )
    return timed, Coordinator(parsed, workers=cluster.n, stop=stop)
