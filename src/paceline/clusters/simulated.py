"""Simulated cluster: n workers and a parameter server with modelled or recorded times."""

from array import array
from collections.abc import Sequence
from dataclasses import KW_ONLY, field
from functools import lru_cache
from numbers import Integral
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.clusters.devices import check_device
from paceline.clusters.faults import Fault, check_faults
from paceline.clusters.timing.distributions import Distribution, Exponential
from paceline.clusters.timing.lease_time import LeaseTime
from paceline.clusters.timing.network import Network, ServerTime
from paceline.clusters.timing.slowdowns import ALWAYS_NORMAL, Periodic, Slowdown, SlownessProfile, Transient
from paceline.clusters.timing.trace import Trace
from paceline.clusters.timing.trace_replay import FILL_IN, TraceReplay
from paceline.errors import UsageError
from paceline.protocols.local_steps import LocalSteps
from paceline.protocols.protocol import Plan
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.rng import stream
from paceline.utils.spec_parser import short_repr
from paceline.utils.validation import check_range
from paceline.utils.wording import counted

TILE = 64
RECENT_TILES = 4  # workers are rarely more than 256 draws apart; a larger distance only costs time


@checked_dataclass(frozen=True)
class Cluster:
    """Simulated cluster of n workers and one parameter server.

    ``round trip = pull_s + sample of timing / speed, times the slowness at that time + push_s``

    All workers compute with one model object. Its parameters and buffers are those of each worker's version, but other
    attributes, as a counter of forward passes, advance with every worker: keep such state in buffers.

    Args:
        n: number of workers, >= 1.
        timing: distribution of the seconds of one gradient computation, one for all workers or a list of n; or the
            `Trace` of n workers, whose recorded pulls and pushes, or sums, are added to those of the network.
        speed: divisor of the compute time, > 0, one for all workers or a list of n.
        slowdowns: scripted slowdowns of workers, once (`Slowdown`) or periodic (`Periodic`).
        transient: random slow periods of workers; None for none.
        network: seconds of a pull and a push.
        server: seconds that the parameter server is busy.
        leases: seconds of a part of a minibatch.
        device: device that computes the gradients, ``"cpu"`` or ``"cuda"``.
        faults: scripted faults.

    >>> cluster = Cluster(4, timing=Exponential(mean_s=1.0))
    >>> cluster.round_trips(seed=0).duration_s(worker=2, draw=1, start_s=0.0) > 0
    True

    Source: Xu et al., "Dynamic Backup Workers", 2020, Sect. 3.2 and 4 (random round-trip times).
    """

    n: int
    timing: Distribution | Sequence[Distribution] | Trace = field(default=Exponential(mean_s=1.0))
    _: KW_ONLY
    speed: float | Sequence[float] = 1.0
    slowdowns: Sequence[Slowdown | Periodic] = ()
    transient: Transient | None = None
    network: Network = field(default=Network())
    server: ServerTime = field(default=ServerTime())
    leases: LeaseTime = field(default=LeaseTime())
    device: str = "cpu"
    faults: Sequence[Fault] = ()

    def __post_init__(self) -> None:
        check_range("[1, inf)", Integral, n=self.n)
        for name in ("timing", "speed"):
            object.__setattr__(self, name, _one_or_n(name, getattr(self, name), self.n))
        object.__setattr__(self, "slowdowns", tuple(self.slowdowns))
        check_device(self.device)
        check_faults(self.faults, self.n)
        if self.device != "cpu" and self.network.wire != "float32":
            raise UsageError(
                f"wire={self.network.wire!r} is simulated on the CPU; omit device={self.device!r}, or give "
                "wire='float32'"
            )
        if isinstance(self.timing, Trace) and self.timing.workers != self.n:
            workers = self.timing.workers
            raise UsageError(
                f"{self.timing.source} has {counted(workers, 'worker')}, the cluster {self.n}: give {workers}"
            )
        for speed in self.speed if isinstance(self.speed, tuple) else (self.speed,):
            check_range("(0, inf)", speed=speed)
        for selection in [each.workers for each in (*self.slowdowns, self.transient) if each]:
            for worker in selection if isinstance(selection, tuple) else ():
                check_range(f"[0, {self.n})", Integral, workers=worker)

    def __str__(self) -> str:
        return short_repr(self)

    def distribution_of(self, worker: int) -> Distribution:
        """Return the distribution of a worker's compute times at speed 1; the timing must not be a trace."""
        assert not isinstance(self.timing, Trace)
        return self.timing[worker] if isinstance(self.timing, Sequence) else self.timing

    def speed_of(self, worker: int) -> float:
        """Return the divisor of a worker's compute times, > 0."""
        return self.speed[worker] if isinstance(self.speed, Sequence) else self.speed

    def slowness_of(self, worker: int, seed: int) -> SlownessProfile:
        """Return the slowness of a worker over virtual time."""
        transient, periods = self.transient, iter(ALWAYS_NORMAL)
        if transient and transient.affects(worker, self.n):
            periods = transient.periods(stream(seed, "transient straggler", worker))
        return SlownessProfile([each for each in self.slowdowns if each.affects(worker, self.n)], periods)

    def round_trips(self, seed: int, payload_bytes: float = 0) -> "RoundTrips":
        """Return the round-trip times of a run.

        Args:
            seed: seed of the run, >= 0; a sample depends only on (seed, worker, draw).
            payload_bytes: size of the parameters, and of a gradient, in bytes, >= 0.
        """
        if isinstance(self.timing, Trace):
            return ReplayedTrips(self, self.timing, seed, payload_bytes)
        return RoundTrips(self, seed, payload_bytes)

    def check_plan(self, plan: Plan) -> None:
        """Raise a UsageError for a plan that needs times that the trace does not have."""
        self._check_communication(plan)
        for phase in plan.phases:
            may_interrupt = any(controller.may_interrupt for controller in phase.controllers)
            if phase.protocol.on_update == "finish" and not may_interrupt:
                _check_certain(self.timing, f"{phase.protocol.name} never interrupts work, so it waits for its end")

    def _check_communication(self, plan: Plan) -> None:
        if not isinstance(self.timing, Trace) or self.network != Network():
            return
        if self.timing.has_server != (plan.allreduce is None) and not self.timing.sums_as_transfers:
            sent = ("the sums of a run without a server", "the pulls and pushes of a run with a server")
            raise UsageError(
                f"{self.timing.source} has the times of {sent[self.timing.has_server]}, but {plan} needs those of "
                f"{sent[plan.allreduce is None]}: give such a trace, a distribution such as exp(mean=1), or also a "
                'network (in a cluster file: timing = "trace:FILE" and [network])'
            )


class RoundTrip(NamedTuple):
    """Parts of one round trip, in seconds, >= 0."""

    pull_s: float
    compute_s: float
    push_s: float

    @property
    def total_s(self) -> float:
        """Seconds from the start of the pull to the arrival of the gradient."""
        return self.pull_s + self.push_s + self.compute_s


class RoundTrips:
    """Round-trip times of one run, for any draw of any worker; fastest for draws in order.

    Attributes:
        is_certain: whether the length of every round trip is known.
    """

    is_certain = True

    def __init__(self, cluster: Cluster, seed: int, payload_bytes: float = 0) -> None:
        check_range("[0, inf)", payload_bytes=payload_bytes)
        self._cluster = cluster
        self._seed = seed
        self._pull_s = cluster.network.pull_s(payload_bytes)
        self._push_s = cluster.network.push_s(payload_bytes)
        self._network_s = self._pull_s + self._push_s
        self._leases = cluster.leases
        self._steady = not cluster.slowdowns and cluster.transient is None
        self._profiles: dict[int, SlownessProfile] = {}
        self._first_draws = [1] * cluster.n
        self._rows = [array("d")] * cluster.n
        tiles = -(-cluster.n // TILE)
        self._tile = lru_cache(RECENT_TILES * tiles)(self._uniforms)

    def times(self, worker: int, draw: int, start_s: float, share: float = 1.0) -> RoundTrip:
        """Return the parts of a round trip.

        Args:
            worker: number of the worker, >= 0.
            draw: number of its draw, >= 1.
            start_s: virtual second at which it starts.
            share: samples over those of a whole minibatch.
        """
        compute_s = self._leases.seconds(self._work_s(worker, draw), share)
        if not self._steady:
            compute_s = self._slowness(worker).duration_s(compute_s, start_s + self._pull_s)
        return RoundTrip(self._pull_s, compute_s, self._push_s)

    def duration_s(self, worker: int, draw: int, start_s: float, share: float = 1.0) -> float:
        """Return the seconds of these `times`, optimised because the simulator calls it for every event."""
        if not self._steady:
            return self.times(worker, draw, start_s, share).total_s
        offset = draw - self._first_draws[worker]
        row = self._rows[worker]
        work_s = row[offset] if 0 <= offset < len(row) else self._load(worker, draw)
        return self._network_s + self._leases.seconds(work_s, share)

    def local_steps(
        self, worker: int, draw: int, start_s: float, local_steps: LocalSteps, most: int
    ) -> tuple[RoundTrip, int]:
        """Return the parts of a round trip with at most this number of local steps, and the number of steps."""
        number = local_steps.first_number(draw)
        pull_s, compute_s, push_s = self.times(worker, number, start_s)
        steps = 1
        while steps < most and local_steps.takes_another(steps, compute_s):
            compute_s += self.times(worker, number + steps, start_s + compute_s).compute_s
            steps += 1
        return RoundTrip(pull_s, compute_s, push_s), steps

    def sum_s(self, worker: int, draw: int, start_s: float) -> float:
        """Return the recorded seconds of the sum of this gradient, without the network; 0 without a trace."""
        return 0.0

    def confirm(self, worker: int, draw: int, start_s: float) -> None:
        """Raise a RunError if the end of this round trip is not known."""

    def _work_s(self, worker: int, draw: int) -> float:
        offset = draw - self._first_draws[worker]
        row = self._rows[worker]
        if 0 <= offset < len(row):
            return row[offset]
        return self._load(worker, draw)

    def _load(self, worker: int, draw: int) -> float:
        """Load the worker's row of 64 draws that contains the draw, and return the time of the draw."""
        check_range("[1, inf)", Integral, draw=draw)
        tile, position = divmod(draw - 1, TILE)
        u = self._tile(worker // TILE, tile)[worker % TILE]
        times_s = self._cluster.distribution_of(worker).quantile(u) / self._cluster.speed_of(worker)
        self._first_draws[worker] = tile * TILE + 1
        self._rows[worker] = array("d", times_s.tobytes())
        return self._rows[worker][position]

    def _uniforms(self, workers: int, draws: int) -> NDArray[np.float64]:
        """Return the uniforms of a tile of 64 workers by 64 draws, because creating a stream is expensive."""
        return stream(self._seed, "compute time", workers, draws).random((TILE, TILE))

    def _slowness(self, worker: int) -> SlownessProfile:
        if worker not in self._profiles:
            self._profiles[worker] = self._cluster.slowness_of(worker, self._seed)
        return self._profiles[worker]


class ReplayedTrips(RoundTrips):
    """Round-trip times of a trace, with the speed, the slowdowns and the network of a cluster."""

    def __init__(self, cluster: Cluster, trace: Trace, seed: int, payload_bytes: float = 0) -> None:
        super().__init__(cluster, seed, payload_bytes)
        self._replay = TraceReplay(trace, seed)
        self.is_certain = trace.is_certain

    def times(self, worker: int, draw: int, start_s: float, share: float = 1.0) -> RoundTrip:
        """Return the parts of a round trip, as `RoundTrips.times`."""
        pull_s, compute_s, push_s = self._replay.parts_s(worker, draw, start_s)
        pull_s += self._pull_s
        compute_s = self._leases.seconds(compute_s / self._cluster.speed_of(worker), share)
        if not self._steady:
            compute_s = self._slowness(worker).duration_s(compute_s, start_s + pull_s)
        return RoundTrip(pull_s, compute_s, push_s + self._push_s)

    def duration_s(self, worker: int, draw: int, start_s: float, share: float = 1.0) -> float:
        """Return the seconds of these `times`."""
        return self.times(worker, draw, start_s, share).total_s

    def sum_s(self, worker: int, draw: int, start_s: float) -> float:
        """Return the recorded seconds of the sum of this gradient, without the network."""
        return self._replay.sum_s(worker, draw, start_s)

    def confirm(self, worker: int, draw: int, start_s: float) -> None:
        """Raise a RunError if this round trip was censored, because its end is not known."""
        self._replay.confirm(worker, draw, start_s)


def _check_certain(timing: object, why: str) -> None:
    if isinstance(timing, Trace) and not timing.is_certain:
        rows = f"{timing.censored_rows} of {counted(len(timing.rows), 'row')} of {timing.source} are censored"
        raise UsageError(f"{rows}: the end of that work is unknown, but {why}: {FILL_IN}")


def check_no_censored_sleep(slowness: Cluster | None) -> None:
    """Raise a UsageError for injected slowness from a trace with unknown times."""
    if slowness is not None:
        _check_certain(slowness.timing, "worker processes must sleep for a known time")


def _one_or_n(name: str, given: object, n: int) -> object:
    if not isinstance(given, (list, tuple)):
        return given
    if len(given) != n:
        raise UsageError(
            f"{name} lists {counted(len(given), 'value')} for {counted(n, 'worker')}: give one for all, or {n}"
        )
    return tuple(given)
