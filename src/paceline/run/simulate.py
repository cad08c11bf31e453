"""`simulate`: how long a protocol takes on a cluster, without any gradient."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan

from paceline.catalogue.parser import parse_plan
from paceline.clusters.parser import parse_cluster
from paceline.clusters.simulated import Cluster
from paceline.clusters.timing import ServerTime
from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.failure_detector import FailureDetector
from paceline.core.events import Outcome
from paceline.core.stop import Stop
from paceline.engines.virtual.allreduce_timing import AllReduceTiming
from paceline.engines.virtual.timing import TimingEngine
from paceline.engines.virtual.vectorized.selection import vectorized_simulation
from paceline.errors import RunError, UsageError
from paceline.protocols.protocol import Phase, Plan, Protocol, as_plan
from paceline.recording.history import Totals
from paceline.utils.argument_types import checked_types
from paceline.utils.representation import Representation
from paceline.utils.validation import check_range
from paceline.utils.wording import counted


@dataclass(frozen=True, repr=False)
class Simulated(Representation):
    """What a simulation of the timing alone has brought.

    Attributes:
        time_s: virtual seconds.
        totals: counts; samples stand for gradients here.
        workers: of the cluster.
        wasted_s: worker-seconds of work whose gradient was dropped or that was interrupted.
        pulls: parameters sent to workers: once for each piece of work, that which is interrupted included.
        pushes: gradients received, dropped ones included; interrupted work pushes nothing.
        payload_bytes: of each of them.
        server: the cluster's.
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
        """What the server sent: pulls of the parameters."""
        return self.pulls * self.payload_bytes

    @property
    def bytes_up(self) -> float:
        """What the server received: pushes of gradients."""
        return self.pushes * self.payload_bytes

    def server_busy(self, server: ServerTime | None = None) -> float:
        """Return the seconds of service that this traffic asks of the server, per second.

        ``(updates * update_s + pushes * gradient_s) / time_s``

        Args:
            server: its times; the cluster's if not given, which the simulation has waited for already: they give a
                share of time. Those of another server may ask for more than 1, and then it would be the bottleneck.
        """
        server = server or self.server
        return (self.totals.updates * server.update_s + self.pushes * server.gradient_s) / self.time_s

    def link_busy(self, bytes_per_s: float) -> float:
        """Return the seconds of traffic in the busier direction of the server's own link, per second.

        ``max(bytes_up, bytes_down) / bytes_per_s / time_s``; above 1 the link is the bottleneck. A simulation does
        not wait for it: its network has a link for each worker and is never congested.

        Args:
            bytes_per_s: of the link, each way at once, > 0.

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
    """Simulate the timing of a protocol on a cluster, without any gradient.

    Many workers under one protocol are simulated all at once, see `paceline.engines.virtual.vectorized`; the others
    event by event. Both give the same. A worker is lost by a scripted fault or by `worker_timeout_s`, and for no other
    reason, so that the result does not depend on the unit of time.

    Args:
        protocol: as for `train`.
        cluster: a simulated one.
        updates: to make, >= 1.
        seed: of the simulated times.
        payload_bytes: size of the parameters, and of a gradient, for the cluster's network.
        worker_timeout_s: silence after which a worker is declared lost, in seconds, > 0; no timeout if not given.

    Example:
        >>> import paceline as pl
        >>> simulated = pl.simulate(pl.asp(), pl.Cluster(4, pl.Deterministic(1.0)), updates=100)
        >>> simulated.time_s, simulated.totals.used
        (25.0, 100)
    """
    plan = parse_plan(protocol) if isinstance(protocol, str) else as_plan(protocol)
    simulated = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    if not isinstance(simulated, Cluster):
        raise UsageError(f"{cluster!r} runs in real time; give a simulated cluster such as '4*exp(mean=1)'")
    plan = plan.checked(simulated.n, total=None, per_epoch=None, updates=updates)
    simulated.check_plan(plan)
    _refuse_gradients(plan)
    stop = Stop(updates=updates)
    failure_detector = FailureDetector(worker_timeout_s)
    fleet = (
        vectorized_simulation(plan, simulated, seed=seed, payload_bytes=payload_bytes)
        if worker_timeout_s is None
        else None
    )
    if fleet is None:
        return _simulate_by_events(plan, simulated, stop, seed, payload_bytes, failure_detector)
    fleet.run(updates)
    tally = fleet.accounting
    return Simulated(
        tally.now,
        tally.totals(),
        simulated.n,
        tally.wasted_s,
        tally.pulls,
        tally.pushes,
        payload_bytes,
        simulated.server,
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
    timing = (
        AllReduceTiming(cluster, seed, plan.reduction, payload_bytes)
        if plan.reduction
        else TimingEngine(cluster, seed, payload_bytes)
    )
    with timing as engine, _collector_paused():
        end = engine.run(coordinator)
    if end.outcome is Outcome.INTERRUPTED:
        raise KeyboardInterrupt
    if end.outcome.is_failure:
        raise RunError(f"after {coordinator.version} of {counted(stop.updates or 0, 'update')}: {end.reason}")
    return Simulated(
        engine.now,
        engine.totals(),
        cluster.n,
        engine.wasted_s,
        engine.pulls,
        engine.pushes,
        payload_bytes,
        cluster.server,
    )


def _refuse_gradients(plan: Plan) -> None:
    for phase in plan.phases:
        for controller in phase.controllers:
            if controller.reads != "times":
                raise UsageError(
                    f"{phase} goes by losses and gradients, which a simulation of the timing alone does not have; "
                    "use pl.train, or a protocol that goes by times only, as pl.b_dbw()"
                )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Spare a simulation the search for cycles: it makes none, and torch's objects are many to go through."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
