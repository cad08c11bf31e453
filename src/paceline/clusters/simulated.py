"""Who computes: a simulated cluster with its times, or worker processes on this machine."""

from array import array
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from numbers import Integral
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.clusters.devices import check_device
from paceline.clusters.faults import Fault, check_faults
from paceline.clusters.timing import (
    Distribution,
    Exponential,
    Network,
    Periodic,
    ServerTime,
    Slowdown,
    SlownessProfile,
    Trace,
    Transient,
)
from paceline.clusters.timing.slowdowns import ALWAYS_NORMAL
from paceline.clusters.timing.trace_replay import FILL_IN, TraceReplay
from paceline.errors import UsageError
from paceline.protocols.protocol import Plan
from paceline.utils.argument_types import checked_types
from paceline.utils.rng import stream
from paceline.utils.spec_parser import short_repr
from paceline.utils.validation import check_range
from paceline.utils.wording import counted

TILE = 64
RECENT_TILES = 4  # workers are seldom further apart than 256 draws; if they are, it only costs time


@checked_types
@dataclass(frozen=True)
class Cluster:
    """n simulated workers and one parameter server.

    ``round trip = pull_s + draw of timing / speed, slowed down by the scenario + push_s``

    Args:
        n: Workers, >= 1.
        timing: Law of the seconds that one gradient takes to compute; one for all workers or a list of n. Or the
            `Trace` of n workers, whose recorded pulls and pushes, or sums, are added to the network's.
        speed: The compute time is divided by it, > 0; one for all workers or a list of n.
        slowdowns: Workers that are slower from some moment on (`Slowdown`), or again and again (`Periodic`).
        transient: Workers that are slower now and then, at random.
        network: Cost of a pull and a push.
        server: Seconds the parameter server is busy.
        device: Where the gradients are really computed, ``"cpu"`` or ``"cuda"``.
        faults: Failures by script.

    >>> cluster = Cluster(4, timing=Exponential(mean_s=1.0))
    >>> cluster.round_trips(seed=0).duration_s(worker=2, draw=1, start_s=0.0) > 0
    True

    Source: Xu et al., "Dynamic Backup Workers", 2020, Sect. 3.2 and 4 (round-trip times drawn from a law).
    """

    n: int
    timing: Distribution | Sequence[Distribution] | Trace = field(default=Exponential(mean_s=1.0))
    _: KW_ONLY
    speed: float | Sequence[float] = 1.0
    slowdowns: Sequence[Slowdown | Periodic] = ()
    transient: Transient | None = None
    network: Network = field(default=Network())
    server: ServerTime = field(default=ServerTime())
    device: str = "cpu"
    faults: Sequence[Fault] = ()

    def __post_init__(self) -> None:
        check_range("[1, inf)", Integral, n=self.n)
        for name in ("timing", "speed"):
            object.__setattr__(self, name, _one_or_n(name, getattr(self, name), self.n))
        object.__setattr__(self, "slowdowns", tuple(self.slowdowns))
        check_device(self.device)
        check_faults(self.faults, self.n)
        _check_timing(self.timing, self.n)
        for speed in _each(self.speed):
            check_range("(0, inf)", speed=speed)
        for selection in [each.workers for each in (*self.slowdowns, self.transient) if each]:
            for worker in selection if isinstance(selection, tuple) else ():
                check_range(f"[0, {self.n})", Integral, workers=worker)

    def __str__(self) -> str:
        return short_repr(self)

    def law_of(self, worker: int) -> Distribution:
        """Return the law of the worker's compute times at speed 1; a trace is no law."""
        assert not isinstance(self.timing, Trace)
        return self.timing[worker] if isinstance(self.timing, Sequence) else self.timing

    def speed_of(self, worker: int) -> float:
        """Return the factor by which the worker's compute times are divided."""
        return self.speed[worker] if isinstance(self.speed, Sequence) else self.speed

    def timeline_of(self, worker: int, seed: int) -> SlownessProfile:
        """Return the worker's slowness over virtual time."""
        transient, periods = self.transient, iter(ALWAYS_NORMAL)
        if transient and transient.affects(worker, self.n):
            periods = transient.periods(stream(seed, "transient straggler", worker))
        return SlownessProfile([each for each in self.slowdowns if each.affects(worker, self.n)], periods)

    def round_trips(self, seed: int, payload_bytes: float = 0) -> "RoundTrips":
        """Return the round-trip times of a run.

        Args:
            seed: The run's seed; a draw depends on (seed, worker, draw) and nothing else.
            payload_bytes: Size of the parameters, and of a gradient, >= 0.
        """
        if isinstance(self.timing, Trace):
            return ReplayedTrips(self, self.timing, seed, payload_bytes)
        return RoundTrips(self, seed, payload_bytes)

    def check_plan(self, plan: Plan) -> None:
        """Refuse a plan that waits for work of which the trace does not tell the end, or for what it has not seen."""
        self._check_communication(plan)
        for phase in plan.phases:
            if phase.protocol.on_update == "finish":
                _check_certain(self.timing, f"{phase.protocol.name} never interrupts, so it waits for them")

    def _check_communication(self, plan: Plan) -> None:
        if not isinstance(self.timing, Trace) or self.network != Network():
            return
        if self.timing.has_server != (plan.reduction is None):
            sent = ("the sums of a run without a server", "the pulls and pushes of one with a server")
            raise UsageError(
                f"{self.timing.source} tells the times of {sent[self.timing.has_server]}, and {plan} takes those of "
                f"{sent[plan.reduction is None]}: give such a trace, a law such as exp(mean=1), or a network beside "
                '(in a cluster file: timing = "trace:FILE" and [network])'
            )


class RoundTrip(NamedTuple):
    """One round trip, in seconds."""

    pull_s: float
    compute_s: float
    push_s: float

    @property
    def total_s(self) -> float:
        """From being given a version to the gradient's arrival."""
        return self.pull_s + self.push_s + self.compute_s


class RoundTrips:
    """Round-trip times of one run: any draw of any worker, fast where a worker's draws are asked in order.

    Attributes:
        is_certain: whether it is known of every round trip how long it takes.
    """

    is_certain = True

    def __init__(self, cluster: Cluster, seed: int, payload_bytes: float = 0) -> None:
        check_range("[0, inf)", payload_bytes=payload_bytes)
        self._cluster = cluster
        self._seed = seed
        self._pull_s = cluster.network.pull_s(payload_bytes)
        self._push_s = cluster.network.push_s(payload_bytes)
        self._network_s = self._pull_s + self._push_s
        self._steady = not cluster.slowdowns and cluster.transient is None
        self._timelines: dict[int, SlownessProfile] = {}
        self._first_draws = [1] * cluster.n
        self._rows = [array("d")] * cluster.n
        tiles = -(-cluster.n // TILE)
        self._tile = lru_cache(RECENT_TILES * tiles)(self._uniforms)

    def times(self, worker: int, draw: int, start_s: float) -> RoundTrip:
        """Return the parts of a round trip begun at virtual second ``start_s``; draws count from 1."""
        compute_s = self._work_s(worker, draw)
        if not self._steady:
            compute_s = self._timeline(worker).duration_s(compute_s, start_s + self._pull_s)
        return RoundTrip(self._pull_s, compute_s, self._push_s)

    def duration_s(self, worker: int, draw: int, start_s: float) -> float:
        """Return ``times(worker, draw, start_s).total_s``, fast: the simulator asks once for every event."""
        if not self._steady:
            return self.times(worker, draw, start_s).total_s
        offset = draw - self._first_draws[worker]
        row = self._rows[worker]
        return self._network_s + (row[offset] if 0 <= offset < len(row) else self._load(worker, draw))

    def sum_s(self, worker: int, draw: int, start_s: float) -> float:
        """Return the recorded seconds of the sum of this gradient, without the network's; a law knows of none."""
        return 0.0

    def confirm(self, worker: int, draw: int, start_s: float) -> None:
        """Raise a RunError if this round trip is not known to have ended when its time is over."""

    def _work_s(self, worker: int, draw: int) -> float:
        offset = draw - self._first_draws[worker]
        row = self._rows[worker]
        if 0 <= offset < len(row):
            return row[offset]
        return self._load(worker, draw)

    def _load(self, worker: int, draw: int) -> float:
        """Make the worker's row the one that holds the draw: 1-64, 65-128, ..."""
        check_range("[1, inf)", Integral, draw=draw)
        tile, position = divmod(draw - 1, TILE)
        u = self._tile(worker // TILE, tile)[worker % TILE]
        times_s = self._cluster.law_of(worker).quantile(u) / self._cluster.speed_of(worker)
        self._first_draws[worker] = tile * TILE + 1
        self._rows[worker] = array("d", times_s.tobytes())
        return self._rows[worker][position]

    def _uniforms(self, workers: int, draws: int) -> NDArray[np.float64]:
        """Return the uniforms of a tile of 64 workers by 64 draws: a stream costs much more than its numbers."""
        return stream(self._seed, "compute time", workers, draws).random((TILE, TILE))

    def _timeline(self, worker: int) -> SlownessProfile:
        if worker not in self._timelines:
            self._timelines[worker] = self._cluster.timeline_of(worker, self._seed)
        return self._timelines[worker]


class ReplayedTrips(RoundTrips):
    """Round-trip times of a trace, under the speed, the scenario and the network of a cluster."""

    def __init__(self, cluster: Cluster, trace: Trace, seed: int, payload_bytes: float = 0) -> None:
        super().__init__(cluster, seed, payload_bytes)
        self._replay = TraceReplay(trace, seed)
        self.is_certain = trace.is_certain

    def times(self, worker: int, draw: int, start_s: float) -> RoundTrip:
        """Return the parts of a round trip begun at virtual second ``start_s``; draws count from 1."""
        pull_s, compute_s, push_s = self._replay.parts_s(worker, draw, start_s)
        pull_s += self._pull_s
        compute_s /= self._cluster.speed_of(worker)
        if not self._steady:
            compute_s = self._timeline(worker).duration_s(compute_s, start_s + pull_s)
        return RoundTrip(pull_s, compute_s, push_s + self._push_s)

    def duration_s(self, worker: int, draw: int, start_s: float) -> float:
        """Return ``times(worker, draw, start_s).total_s``."""
        return self.times(worker, draw, start_s).total_s

    def sum_s(self, worker: int, draw: int, start_s: float) -> float:
        """Return the recorded seconds of the sum of this gradient, without the network's."""
        return self._replay.sum_s(worker, draw, start_s)

    def confirm(self, worker: int, draw: int, start_s: float) -> None:
        """Raise a RunError if this round trip was censored: beyond this moment nothing is known of it."""
        self._replay.confirm(worker, draw, start_s)


def _check_timing(timing: object, n: int) -> None:
    if isinstance(timing, Trace) and timing.workers != n:
        raise UsageError(
            f"{timing.source} has {counted(timing.workers, 'worker')}, the cluster {n}: type {timing.workers}"
        )


def _check_certain(timing: object, why: str) -> None:
    if isinstance(timing, Trace) and not timing.is_certain:
        rows = f"{timing.censored_rows} of {counted(len(timing.rows), 'row')} of {timing.source} are censored"
        raise UsageError(f"{rows}, nobody knows how long that work takes, and {why}: {FILL_IN}")


def check_no_censored_sleep(slowness: Cluster | None) -> None:
    """Refuse slowness of which a trace does not tell the length."""
    if slowness is not None:
        _check_certain(slowness.timing, "worker processes have to sleep for some time")


def _each(given: object) -> tuple[object, ...]:
    return given if isinstance(given, tuple) else (given,)


def _one_or_n(name: str, given: object, n: int) -> object:
    if not isinstance(given, (list, tuple)):
        return given
    if len(given) != n:
        raise UsageError(
            f"{name} lists {counted(len(given), 'value')} for {counted(n, 'worker')}: type one for all, or {n}"
        )
    return tuple(given)
