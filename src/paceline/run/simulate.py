"""`simulate`: simulation of the timing of a protocol on a cluster, without gradients."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from numbers import Integral

from paceline.catalogue.parser import parse_plan
from paceline.clusters.parser import parse_cluster
from paceline.clusters.simulated import Cluster
from paceline.clusters.timing.network import ServerTime
from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.failure_detector import FailureDetector
from paceline.core.events import Outcome
from paceline.core.stop import Stop
from paceline.engines.virtual.allreduce_timing import TimedAllReduce
from paceline.engines.virtual.simulated_workers import SimulatedWorkers
from paceline.engines.virtual.timing import TimedWorkers
from paceline.engines.virtual.vectorized.accounting import VectorizedAccounting
from paceline.engines.virtual.vectorized.selection import vectorized_simulation
from paceline.errors import RunError, UsageError
from paceline.protocols.plan_checks import checked_plan
from paceline.protocols.protocol import Phase, Plan, Protocol, as_plan
from paceline.recording.history import Totals
from paceline.utils.argument_types import checked_types
from paceline.utils.representation import Representation
from paceline.utils.validation import check_range
from paceline.utils.wording import counted


@dataclass(frozen=True, repr=False, kw_only=True)
class Simulated(Representation):
    """Result of a simulation of the timing.

    Attributes:
        time_s: virtual time in seconds.
        totals: counts of updates and gradients; one gradient counts as one sample.
        workers: number of workers in the cluster.
        wasted_s: worker-seconds of tasks that were interrupted or whose gradient was dropped.
        pulls: number of times that parameters were sent to a worker, once per task, interrupted tasks included.
        pushes: number of gradients received, dropped ones included.
        payload_bytes: bytes on the wire of the parameters, and of a gradient.
        server: service times of the server.
    """

    time_s: float
    totals: Totals
    workers: int
    wasted_s: float
    pulls: int
    pushes: int
    payload_bytes: float
    server: ServerTime

    def _facts(self) -> Mapping[str, object]:
        totals = self.totals
        counts = {"updates": totals.updates, "mean_k": totals.mean_k, "mean_staleness": totals.mean_staleness}
        times = {"time_s": self.time_s, "seconds_per_update": self.seconds_per_update}
        return {"workers": self.workers, **times, **counts, "dropped": totals.dropped, "wasted_s": self.wasted_s}

    @property
    def seconds_per_update(self) -> float:
        """Virtual seconds per update."""
        return self.time_s / self.totals.updates if self.totals.updates else nan

    @property
    def idle_s(self) -> float:
        """Worker-seconds spent waiting for work."""
        return self.totals.idle_share * self.workers * self.time_s

    @property
    def bytes_down(self) -> float:
        """Bytes that the server sends in pulls of the parameters."""
        return self.pulls * self.payload_bytes

    @property
    def bytes_up(self) -> float:
        """Bytes that the server receives in pushes of gradients."""
        return self.pushes * self.payload_bytes

    def server_busy(self, server: ServerTime | None = None) -> float:
        """Return the utilization of the server: seconds of service per second.

        ``(updates * update_s + pushes * gradient_s) / time_s``

        Args:
            server: service times; those of the cluster if not given, which the simulation includes, so that the result
                is at most 1. For other service times a result above 1 means that the server is the bottleneck.
        """
        server = server or self.server
        return (self.totals.updates * server.update_s + self.pushes * server.gradient_s) / self.time_s

    def link_busy(self, bytes_per_s: float) -> float:
        """Return the utilization of the server's link: seconds of traffic per second in the busier direction.

        ``max(bytes_up, bytes_down) / bytes_per_s / time_s``; above 1 the link is the bottleneck. The simulation does
        not include this limit: each worker has a link of its own without congestion.

        Args:
            bytes_per_s: bandwidth of the link in bytes per second and direction, > 0.

        Example:
            >>> import paceline as pl
            >>> simulated = pl.simulate("asp", "100*deterministic(value=1)", updates=10_000, payload_bytes=40e6)
            >>> round(simulated.link_busy(bytes_per_s=1.25e9), 1)  # 10 Gbit/s for 100 workers and 10 M parameters
            3.2
        """
        check_range("(0, inf]", bytes_per_s=bytes_per_s)
        return max(self.bytes_up, self.bytes_down) / bytes_per_s / self.time_s


@checked_types
def simulate(
    protocol: str | Protocol | Phase | Plan,
    cluster: str | Cluster,
    *,
    updates: int,
    seed: int = 0,
    payload_bytes: float = 0,
    worker_timeout_s: float | None = None,
) -> Simulated:
    """Simulate the timing of a protocol on a cluster, without gradients.

    One protocol without faults is simulated for all workers at once (``paceline.engines.virtual.vectorized``), any
    other plan event by event; both give equal results. A worker is lost only by a scripted fault or by
    ``worker_timeout_s``, so the result does not depend on the unit of time.

    Args:
        protocol: protocol, phase or plan, or its text, as for `train`.
        cluster: simulated cluster, or its text.
        updates: number of updates, >= 1.
        seed: seed of the simulated times, >= 0.
        payload_bytes: size of the parameters, and of a gradient, in bytes, >= 0, for the network of the cluster.
        worker_timeout_s: seconds without an answer after which a worker is lost, > 0; no timeout if not given.

    Example:
        >>> import paceline as pl
        >>> simulated = pl.simulate(pl.asp(), pl.Cluster(4, pl.timing.Deterministic(1.0)), updates=100)
        >>> simulated.time_s, simulated.totals.used
        (25.0, 100)
    """
    check_range("[1, inf)", Integral, updates=updates)
    check_range("[0, inf)", Integral, seed=seed)
    check_range("[0, inf)", payload_bytes=payload_bytes)
    plan = parse_plan(protocol) if isinstance(protocol, str) else as_plan(protocol)
    simulated = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    if not isinstance(simulated, Cluster):
        raise UsageError(f"{cluster!r} runs in real time; give a simulated cluster such as '4*exp(mean=1)'")
    plan = checked_plan(plan, simulated.n, total=None, per_epoch=None, updates=updates)
    simulated.check_plan(plan)
    _check_times_suffice(plan)
    if worker_timeout_s is None:
        vectorized = vectorized_simulation(plan, simulated, seed=seed, payload_bytes=payload_bytes)
        if vectorized is not None:
            vectorized.run(updates)
            return _result(vectorized.accounting, simulated, payload_bytes)
    return _simulate_by_events(
        plan,
        simulated,
        Stop(updates=updates),
        seed=seed,
        payload_bytes=payload_bytes,
        failure_detector=FailureDetector(worker_timeout_s),
    )


def _simulate_by_events(
    plan: Plan,
    cluster: Cluster,
    stop: Stop,
    seed: int,
    payload_bytes: float,
    failure_detector: FailureDetector | None = None,
) -> Simulated:
    coordinator = Coordinator(plan, workers=cluster.n, stop=stop, failure_detector=failure_detector)
    if plan.allreduce:
        workers: SimulatedWorkers = TimedAllReduce(cluster, seed, plan.allreduce, payload_bytes)
    else:
        workers = TimedWorkers(cluster, seed, payload_bytes, plan.local_steps)
    with workers.loop() as loop, _collector_paused():
        end = loop.run(coordinator)
    if end.outcome is Outcome.INTERRUPTED:
        raise KeyboardInterrupt
    if end.outcome.is_failure:
        raise RunError(f"after {coordinator.version} of {counted(stop.updates or 0, 'update')}: {end.reason}")
    return _result(workers, cluster, payload_bytes)


def _result(done: SimulatedWorkers | VectorizedAccounting, cluster: Cluster, payload_bytes: float) -> Simulated:
    return Simulated(
        time_s=done.now,
        totals=done.totals(),
        workers=cluster.n,
        wasted_s=done.wasted_s,
        pulls=done.pulls,
        pushes=done.pushes,
        payload_bytes=cluster.network.sent_bytes(payload_bytes),
        server=cluster.server,
    )


def _check_times_suffice(plan: Plan) -> None:
    for phase in plan.phases:
        for controller in phase.controllers:
            if controller.reads != "times":
                raise UsageError(
                    f"{phase} needs losses and gradients, which a simulation of the timing does not have; "
                    "use pl.train, or a protocol that needs only times, for example pl.b_dbw()"
                )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector: a simulation makes no cycles, and each search visits all objects of torch."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
