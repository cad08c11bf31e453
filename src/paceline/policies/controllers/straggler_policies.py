"""Sync-Switch: stragglers are reported, evaded by ASP, or set aside."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from numbers import Integral
from typing import Any, ClassVar

from paceline.errors import PacelineWarning, UsageError
from paceline.policies.controllers.base import (
    Action,
    ChangeProtocol,
    Controller,
    Exclude,
    Note,
    Observation,
    Probe,
    Readmit,
    ReplaceWorker,
)
from paceline.policies.estimators.stragglers import StragglerDetector
from paceline.protocols.protocol import Phase, Protocol
from paceline.utils.argument_types import checked_types
from paceline.utils.spec_parser import short_repr
from paceline.utils.state_dict import restore, snapshot
from paceline.utils.validation import check_range


class StragglerWatch:
    """What is known of stragglers.

    Args:
        detector: finds them.
    """

    def __init__(self, detector: StragglerDetector) -> None:
        self.detector = detector
        self.since_s: dict[int, float] = {}  # straggler -> when it was found
        self.persistent: set[int] = set()  # those that were reported as such
        self.aside: dict[int, list[float]] = {}  # worker set aside -> seconds that its latest probes took
        self.home: Protocol | None = None  # the phase's own protocol

    def hear(self, moment: Observation) -> None:
        """Take in an arrival, or a probe."""
        assert moment.arrival is not None
        worker = moment.arrival.worker
        if worker in self.aside:
            self.aside[worker].append(moment.busy_s)
        else:
            self.detector.hear(worker, moment.busy_s, moment.live)

    def meet(self, workers: Collection[int], aside: Collection[int]) -> None:
        """Forget who has gone, or was set aside and takes part again.

        Args:
            workers: that take part.
            aside: that were set aside and are still there.
        """
        known = self.detector.known | self.since_s.keys() | self.aside.keys()
        as_they_were = (set(workers) - self.aside.keys()) | (set(aside) & self.aside.keys())
        for worker in known - as_they_were:
            self.detector.forget(worker)
            self.aside.pop(worker, None)
            self._is_none(worker)

    def take_back(self, worker: int) -> None:
        """Forget that a worker was set aside, and why."""
        del self.aside[worker]
        self._is_none(worker)

    def recovered(self) -> set[int]:
        """Return the stragglers that are none any longer, and forget that they were."""
        recovered = self.since_s.keys() - self.detector.stragglers - self.aside.keys()
        for worker in recovered:
            self._is_none(worker)
        return recovered

    def _is_none(self, worker: int) -> None:
        self.since_s.pop(worker, None)
        self.persistent.discard(worker)

    def state_dict(self) -> dict[str, Any]:
        """Return it as a checkpoint can hold it."""
        return {"detector": self.detector.state_dict(), **snapshot(self, _SAVED)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what was known."""
        self.detector.load_state_dict(state["detector"])
        restore(self, _SAVED, state)


_SAVED = ("since_s", "persistent", "aside", "home")


@checked_types
@dataclass(frozen=True, repr=False)
class Stragglers(Controller[StragglerWatch]):
    """Puts on record who becomes a straggler and who recovers, under any protocol.

    Who has been one for long is reported as persistent, and replaced where workers are started again (`respawn`).

    Args:
        window: rounds of n arrivals, >= 1.
        consecutive: slow windows in a row that make a straggler, >= 1.
        min_gap: how much slower than the others, at least, in [0, 1).
        sliding: whether windows overlap.
        persistent_s: seconds after which a straggler is persistent, > 0; inf for never.

    Source: Li et al. (Sync-Switch) 2021, Sect. IV-B2; see `StragglerDetector`. The 100 s are what they assume to be the
    time to provision another server.
    """

    window: int = 2
    consecutive: int = 2
    min_gap: float = 0.2
    sliding: bool = False
    persistent_s: float = 100.0

    name: ClassVar[str] = "stragglers"

    def __post_init__(self) -> None:
        check_range("[1, inf)", Integral, window=self.window, consecutive=self.consecutive)
        check_range("[0, 1)", min_gap=self.min_gap)
        check_range("(0, inf]", persistent_s=self.persistent_s)

    def __repr__(self) -> str:
        return short_repr(self, self.name).removesuffix("()")

    def added_to(self, phase: Phase) -> Phase:
        """Return the phase under this policy, if it has no other one."""
        if any(isinstance(controller, Stragglers) for controller in phase.controllers):
            raise UsageError(
                f"{phase} + {self}: somebody looks after stragglers already; "
                "expected one of stragglers, greedy and elastic"
            )
        return super().added_to(phase)

    def begin(self, n: int) -> StragglerWatch:
        """Know nobody yet."""
        return StragglerWatch(StragglerDetector(self.window, self.consecutive, self.min_gap, self.sliding))

    def decide(self, state: StragglerWatch, moment: Observation) -> tuple[StragglerWatch, Sequence[Action]]:
        """Listen to arrivals, and act when an update opens: what is under way is not disturbed."""
        if moment.asked == "arrival":
            state.hear(moment)
        if moment.asked == "open":
            state.meet(moment.workers, moment.aside)
            return state, [*self._report(state, moment), *self._act(state, moment), *self._replace(state, moment)]
        return state, self._leave(state) if moment.asked == "end" else []

    def _report(self, state: StragglerWatch, moment: Observation) -> list[Action]:
        actions: list[Action] = [
            Note("recovered", f"worker {worker}: as fast as it should be", worker)
            for worker in sorted(state.recovered())
        ]
        for worker in sorted(state.detector.stragglers - state.since_s.keys()):
            state.since_s[worker] = moment.now
            actions.append(Note("straggler", f"worker {worker}: {_slowness(state, worker)}", worker))
        return actions

    def _replace(self, state: StragglerWatch, moment: Observation) -> list[Action]:
        actions: list[Action] = []
        for worker, since_s in state.since_s.items():
            slow_s = moment.now - since_s
            if worker not in state.persistent and slow_s >= self.persistent_s:
                state.persistent.add(worker)
                actions += [
                    Note("persistent", f"worker {worker}: slow for {slow_s:.3g} s", worker),
                    ReplaceWorker(worker),
                ]
        return actions

    def _act(self, state: StragglerWatch, moment: Observation) -> list[Action]:
        """Do something about stragglers when an update opens."""
        return []

    def _leave(self, state: StragglerWatch) -> list[Action]:
        """Make good for the next phase."""
        return []

    def state_dict(self, state: StragglerWatch) -> dict[str, Any]:
        """Return what is known."""
        return state.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> StragglerWatch:
        """Go on with what was known."""
        state = self.begin(1)
        state.load_state_dict(saved)
        return state


@checked_types
@dataclass(frozen=True, repr=False)
class Greedy(Stragglers):
    """Goes on asynchronously while there is a straggler, and comes back when there is none.

    What is made meanwhile does not count towards the end of the phase, so that the share of the phase's own protocol is
    fulfilled all the same.

    Args:
        window: as of `Stragglers`, like all but the last one.
        to: the protocol that does not mind stragglers.

    Source: Li et al. (Sync-Switch) 2021, Sect. IV-B2, who find that it costs accuracy.
    """

    to: Protocol = field(default=Protocol(1, inf, "arrival", name="asp"))

    name: ClassVar[str] = "greedy"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.to, Protocol):
            raise UsageError(f"greedy: to = {self.to!r}, expected a protocol, as pl.asp()")

    def check(self, protocol: Protocol, n: int) -> None:
        """Refuse the protocol that it would change to."""
        if protocol == self.to:
            raise UsageError(f"{protocol} + greedy: there is nothing to change; expected a protocol that waits, as bsp")

    def _act(self, state: StragglerWatch, moment: Observation) -> list[Action]:
        if state.home is None:
            state.home = moment.protocol
        is_away = moment.protocol == self.to
        if state.since_s and not is_away:
            return [ChangeProtocol(self.to, f"{_named(state.since_s)} fell behind", counts=False)]
        if is_away and not state.since_s:
            return [ChangeProtocol(state.home, "no straggler is left")]
        return []


@checked_types
@dataclass(frozen=True, repr=False)
class Elastic(Stragglers):
    """Sets stragglers aside until they have recovered or the phase ends, and goes on without them.

    Batch and learning rate follow the number of workers, if the learning rate is per worker. A worker that is set aside
    is given one minibatch after another all the same, whose gradients nobody waits for and nobody uses: probes. When it
    delivers a window of them as fast as it should, it is taken back.

    With n workers, of which the slowest has throughput S_min, updates of all bring about n S_min gradients a second. So
    many stragglers are set aside, the slowest first, as make this largest for those that are left: perhaps none, and
    never all workers.

    Source: Li et al. (Sync-Switch) 2021, Sect. IV-B2, who set them aside whatever it brings, until the switch.
    """

    name: ClassVar[str] = "elastic"

    def check(self, protocol: Protocol, n: int) -> None:
        """Warn where nobody can be set aside, and where nothing is won by it."""
        if n == 1:
            warnings.warn("elastic: the only worker is never set aside", PacelineWarning, stacklevel=2)
        if protocol.quorum != "all" and protocol.refill == "arrival" and protocol.max_lead == inf:
            warnings.warn(
                f"{protocol} + elastic: {protocol} waits for nobody, so it only loses the gradients of those that are "
                "set aside; stragglers puts them on record",
                PacelineWarning,
                stacklevel=2,
            )

    def _act(self, state: StragglerWatch, moment: Observation) -> list[Action]:
        actions = [self._look_after(state, worker) for worker in list(state.aside)]
        stragglers = state.detector.stragglers & set(moment.workers)
        left_out = _better_without(stragglers, state.detector.throughput)
        actions += [Exclude(worker, _slowness(state, worker)) for worker in left_out]
        for worker in left_out:
            state.detector.excuse(worker)
            state.aside[worker] = []
        return actions

    def _look_after(self, state: StragglerWatch, worker: int) -> Action:
        probes_s = state.aside[worker]
        if len(probes_s) < self.window:
            return Probe(worker)
        throughput = len(probes_s) / max(sum(probes_s), 1e-12)
        if state.detector.is_slow_beside(throughput):
            probes_s.clear()
            return Probe(worker)
        state.take_back(worker)
        return Readmit(worker, f"{throughput:.3g} gradients/s in a window of probes")

    def _leave(self, state: StragglerWatch) -> list[Action]:
        return [Readmit(worker, "the phase ends") for worker in state.aside]


def _better_without(stragglers: Collection[int], throughput: Mapping[int, float]) -> list[int]:
    """Return those of the stragglers, if any, without whom updates of all the others bring most gradients a second.

    Example:
        >>> _better_without({0}, {0: 0.6, 1: 1.0, 2: 1.0}), _better_without({0}, {0: 0.7, 1: 1.0, 2: 1.0})
        ([0], [])
        >>> _better_without({0, 1}, {0: 0.2, 1: 0.77, 2: 1.0, 3: 1.0})
        [0]
    """
    slowest_first = sorted(
        (each for each in stragglers if each in throughput), key=lambda each: (throughput[each], each)
    )

    def gradients_per_s(left_out: int) -> float:
        left = throughput.keys() - slowest_first[:left_out]
        return len(left) * min((throughput[each] for each in left), default=0.0)

    best = max(range(len(slowest_first) + 1), key=lambda left_out: (gradients_per_s(left_out), left_out))
    return sorted(slowest_first[:best])


def _slowness(state: StragglerWatch, worker: int) -> str:
    throughput = state.detector.throughput
    others = [each for other, each in throughput.items() if other != worker]
    mean = sum(others) / len(others) if others else 0.0
    return f"{throughput.get(worker, 0.0):.3g} gradients/s, the others {mean:.3g}"


def _named(workers: Collection[int]) -> str:
    numbers = ", ".join(map(str, sorted(workers)))
    return f"worker{'s' if len(workers) > 1 else ''} {numbers}"
