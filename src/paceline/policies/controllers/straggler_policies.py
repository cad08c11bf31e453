"""Straggler policies of Sync-Switch: report stragglers, change to ASP, or exclude them."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from math import inf
from numbers import Integral
from typing import ClassVar

from paceline.errors import PacelineWarning, UsageError
from paceline.policies.controllers import base as control
from paceline.policies.estimators.speeds.stragglers import StragglerDetector
from paceline.protocols.protocol import Phase, Protocol
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.spec_parser import short_repr
from paceline.utils.state_dict import Stateful
from paceline.utils.validation import check_range
from paceline.utils.wording import listed


class StragglerTracker(Stateful):
    """State of a straggler policy: the detector, the known stragglers and the excluded workers.

    Args:
        detector: detector of stragglers.
    """

    _saved = ("since_s", "persistent", "excluded", "home")
    _parts = ("detector",)

    def __init__(self, detector: StragglerDetector) -> None:
        self.detector = detector
        self.since_s: dict[int, float] = {}  # straggler -> time of detection
        self.persistent: set[int] = set()  # stragglers that were reported as persistent
        self.excluded: dict[int, list[float]] = {}  # excluded worker -> seconds of its latest probes
        self.home: Protocol | None = None  # protocol of the phase

    def observe(self, observation: control.Observation) -> None:
        """Add an arrival or a probe."""
        assert observation.arrival is not None
        worker = observation.arrival.worker
        if worker in self.excluded:
            self.excluded[worker].append(observation.busy_s)
        else:
            self.detector.observe(worker, observation.busy_s, observation.live)

    def update_membership(self, workers: Collection[int], excluded: Collection[int]) -> None:
        """Reset each worker that has left, or that is excluded in only one of the two views.

        Args:
            workers: ids of the workers that take part.
            excluded: ids of the connected workers that are excluded.
        """
        known = self.detector.known | self.since_s.keys() | self.excluded.keys()
        unchanged = (set(workers) - self.excluded.keys()) | (set(excluded) & self.excluded.keys())
        for worker in known - unchanged:
            self.detector.remove(worker)
            self.excluded.pop(worker, None)
            self._clear(worker)

    def readmit(self, worker: int) -> None:
        """Remove a worker from the excluded workers and from the stragglers."""
        del self.excluded[worker]
        self._clear(worker)

    def pop_recovered(self) -> set[int]:
        """Remove the workers that are no longer stragglers, and return them."""
        recovered = self.since_s.keys() - self.detector.stragglers - self.excluded.keys()
        for worker in recovered:
            self._clear(worker)
        return recovered

    def _clear(self, worker: int) -> None:
        self.since_s.pop(worker, None)
        self.persistent.discard(worker)


@checked_dataclass(frozen=True, repr=False, kw_only=True)
class Stragglers(control.StatefulController[StragglerTracker]):
    """Straggler log: reports the workers that become stragglers or recover, under any protocol.

    A worker that stays a straggler for long is reported as persistent, and replaced where the engine can start
    workers (``respawn``).

    Args:
        window: length of a window in rounds of n arrivals, >= 1.
        consecutive: number of slow windows in a row that make a straggler, >= 1.
        min_gap: smallest relative gap to the mean throughput, in [0, 1).
        sliding: whether a window begins at every round, so that windows overlap.
        persistent_s: seconds after which a straggler is persistent, > 0; inf for never.
        own_past: whether a worker is also compared with its own past.

    Source: Li et al. (Sync-Switch) 2021, Sect. IV-B2; see ``StragglerDetector``. The paper's detector is
    ``sliding=True, min_gap=0, own_past=False``. The default of 100 s is the paper's assumption for the time to
    provision another server.
    """

    window: int = 2
    consecutive: int = 2
    min_gap: float = 0.2
    sliding: bool = False
    persistent_s: float = 100.0
    own_past: bool = True

    name: ClassVar[str] = "stragglers"

    def __post_init__(self) -> None:
        check_range("[1, inf)", Integral, window=self.window, consecutive=self.consecutive)
        check_range("[0, 1)", min_gap=self.min_gap)
        check_range("(0, inf]", persistent_s=self.persistent_s)

    def __repr__(self) -> str:
        return short_repr(self, self.name).removesuffix("()")

    def added_to(self, phase: Phase) -> Phase:
        """Return the phase with this policy added.

        Raises:
            UsageError: the phase has a straggler policy already.
        """
        if any(isinstance(controller, Stragglers) for controller in phase.controllers):
            raise UsageError(
                f"{phase} + {self}: the phase has a straggler policy already; "
                "give only one of stragglers, greedy and elastic"
            )
        return super().added_to(phase)

    def begin(self, n: int) -> StragglerTracker:
        """Return the initial state: no stragglers."""
        detector = StragglerDetector(self.window, self.consecutive, self.min_gap, self.sliding, self.own_past)
        return StragglerTracker(detector)

    def decide(
        self, state: StragglerTracker, observation: control.Observation
    ) -> tuple[StragglerTracker, Sequence[control.Action]]:
        """Record every arrival, and act when an update opens, so that the open update is not affected."""
        if observation.trigger == "arrival":
            state.observe(observation)
        if observation.trigger == "open":
            state.update_membership(observation.workers, observation.excluded)
            report, actions = self._report(state, observation), self._act(state, observation)
            return state, [*report, *actions, *self._replace(state, observation)]
        return state, self._end(state) if observation.trigger == "end" else []

    def _report(self, state: StragglerTracker, observation: control.Observation) -> list[control.Action]:
        actions: list[control.Action] = [
            control.Note("recovered", f"worker {worker}: no longer a straggler", worker)
            for worker in sorted(state.pop_recovered())
        ]
        for worker in sorted(state.detector.stragglers - state.since_s.keys()):
            state.since_s[worker] = observation.now
            actions.append(control.Note("straggler", f"worker {worker}: {_slowness(state, worker)}", worker))
        return actions

    def _replace(self, state: StragglerTracker, observation: control.Observation) -> list[control.Action]:
        actions: list[control.Action] = []
        for worker, since_s in state.since_s.items():
            slow_s = observation.now - since_s
            if worker not in state.persistent and slow_s >= self.persistent_s:
                state.persistent.add(worker)
                actions += [
                    control.Note("persistent", f"worker {worker}: slow for {slow_s:.3g} s", worker),
                    control.ReplaceWorker(worker),
                ]
        return actions

    def _act(self, state: StragglerTracker, observation: control.Observation) -> list[control.Action]:
        """Return the actions on stragglers when an update opens."""
        return []

    def _end(self, state: StragglerTracker) -> list[control.Action]:
        """Return the actions at the end of the phase."""
        return []


@checked_dataclass(frozen=True, repr=False, kw_only=True)
class Greedy(Stragglers):
    """Greedy straggler policy: trains asynchronously while there is a straggler.

    The updates made meanwhile do not count towards the end of the phase, so that the phase keeps its share of updates
    under its own protocol.

    Args:
        window: length of a window in rounds of n arrivals, >= 1.
        consecutive: number of slow windows in a row that make a straggler, >= 1.
        min_gap: smallest relative gap to the mean throughput, in [0, 1).
        sliding: whether a window begins at every round, so that windows overlap.
        persistent_s: seconds after which a straggler is persistent, > 0; inf for never.
        own_past: whether a worker is also compared with its own past.
        to: protocol while there is a straggler; asp if not given.

    Source: Li et al. (Sync-Switch) 2021, Sect. IV-B2, who report that it lowers accuracy.
    """

    to: Protocol = field(default=Protocol(quorum=1, max_staleness=inf, refill="arrival", name="asp"))

    name: ClassVar[str] = "greedy"

    @property
    def takes_stale(self) -> bool:
        """Whether the protocol during stragglers accepts stale gradients."""
        return self.to.max_staleness > 0

    def check(self, protocol: Protocol, n: int) -> None:
        """Refuse a phase that already has the protocol to change to."""
        if protocol == self.to:
            raise UsageError(f"{protocol} + greedy: the phase runs {protocol} already; give a synchronous one, as bsp")

    def _act(self, state: StragglerTracker, observation: control.Observation) -> list[control.Action]:
        if state.home is None:
            state.home = observation.protocol
        is_away = observation.protocol == self.to
        if state.since_s and not is_away:
            return [
                control.ChangeProtocol(self.to, f"{listed('worker', sorted(state.since_s))} fell behind", counts=False)
            ]
        if is_away and not state.since_s:
            return [control.ChangeProtocol(state.home, "all stragglers have recovered")]
        return []


@checked_dataclass(frozen=True, repr=False, kw_only=True)
class Elastic(Stragglers):
    """Elastic straggler policy: excludes stragglers until they have recovered or the phase ends.

    Batch and learning rate follow the number of workers, if the learning rate is per worker. An excluded worker
    computes probes: minibatches whose gradients are not used. It is readmitted after a window of probes at normal
    throughput.

    n workers, the slowest with throughput S_min, deliver about n S_min gradients per second to synchronous updates.
    The policy excludes the number of stragglers, slowest first, that maximises this for the others. It may be none,
    and is never all workers. With ``until_switch`` it excludes every straggler, without probes, until the phase ends.

    Args:
        window: length of a window in rounds of n arrivals, >= 1.
        consecutive: number of slow windows in a row that make a straggler, >= 1.
        min_gap: smallest relative gap to the mean throughput, in [0, 1).
        sliding: whether a window begins at every round, so that windows overlap.
        persistent_s: seconds after which a straggler is persistent, > 0; inf for never.
        own_past: whether a worker is also compared with its own past.
        until_switch: whether every straggler is excluded until the phase ends, as in the paper.

    Source: Li et al. (Sync-Switch) 2021, Sect. IV-B2.

    Differs from the paper: without ``until_switch`` only those stragglers are excluded whose absence raises the
    throughput, and only until they have recovered.
    """

    until_switch: bool = False

    name: ClassVar[str] = "elastic"

    def check(self, protocol: Protocol, n: int) -> None:
        """Warn if there is only one worker, or if the protocol waits for none."""
        if n == 1:
            warnings.warn("elastic: the only worker is never excluded", PacelineWarning, stacklevel=2)
        if protocol.quorum != "all" and protocol.refill == "arrival" and protocol.max_lead == inf:
            warnings.warn(
                f"{protocol} + elastic: {protocol} does not wait for stragglers, so excluding them only loses their "
                "gradients; use stragglers to report them",
                PacelineWarning,
                stacklevel=2,
            )

    def _act(self, state: StragglerTracker, observation: control.Observation) -> list[control.Action]:
        actions = [] if self.until_switch else [self._probe(state, worker) for worker in list(state.excluded)]
        stragglers = state.detector.stragglers & set(observation.workers)
        slowest = sorted(stragglers) if self.until_switch else _best_exclusion(stragglers, state.detector.throughput)
        actions += [control.Exclude(worker, _slowness(state, worker)) for worker in slowest]
        for worker in slowest:
            state.detector.clear(worker)
            state.excluded[worker] = []
        return actions

    def _probe(self, state: StragglerTracker, worker: int) -> control.Action:
        probes_s = state.excluded[worker]
        if len(probes_s) < self.window:
            return control.Probe(worker)
        throughput = len(probes_s) / max(sum(probes_s), 1e-12)
        if state.detector.is_slow_beside(throughput):
            probes_s.clear()
            return control.Probe(worker)
        state.readmit(worker)
        return control.Readmit(worker, f"{throughput:.3g} gradients/s in a window of probes")

    def _end(self, state: StragglerTracker) -> list[control.Action]:
        return [control.Readmit(worker, "the phase ends") for worker in state.excluded]


def _best_exclusion(stragglers: Collection[int], throughput: Mapping[int, float]) -> list[int]:
    """Return the stragglers to exclude, possibly none, for the most gradients per second of the other workers.

    Example:
        >>> _best_exclusion({0}, {0: 0.6, 1: 1.0, 2: 1.0}), _best_exclusion({0}, {0: 0.7, 1: 1.0, 2: 1.0})
        ([0], [])
        >>> _best_exclusion({0, 1}, {0: 0.2, 1: 0.77, 2: 1.0, 3: 1.0})
        [0]
    """
    slowest_first = sorted(
        (each for each in stragglers if each in throughput), key=lambda each: (throughput[each], each)
    )

    def gradients_per_s(excluded: int) -> float:
        left = throughput.keys() - slowest_first[:excluded]
        return len(left) * min((throughput[each] for each in left), default=0.0)

    best = max(range(len(slowest_first) + 1), key=lambda excluded: (gradients_per_s(excluded), excluded))
    return sorted(slowest_first[:best])


def _slowness(state: StragglerTracker, worker: int) -> str:
    throughput = state.detector.throughput
    others = [each for other, each in throughput.items() if other != worker]
    mean = sum(others) / len(others) if others else 0.0
    return f"{throughput.get(worker, 0.0):.3g} gradients/s, the others {mean:.3g}"
