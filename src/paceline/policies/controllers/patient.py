"""`patient`: closes each update when waiting for another gradient stops paying."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import inf
from typing import ClassVar, Literal

from paceline.errors import PacelineWarning, UsageError
from paceline.policies.controllers.base import Action, CallAgainAt, CloseUpdate, Observation, StatefulController
from paceline.policies.estimators.arrivals.arrival_hazards import ArrivalHazards
from paceline.policies.estimators.arrivals.update_closing import GainPerSecond, best_wait, largest_gain_per_s
from paceline.policies.estimators.noise.critical_batch import FIRST_PHI
from paceline.protocols.protocol import Protocol
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.state_dict import Stateful
from paceline.utils.validation import check_range

HORIZONS = [0.01 * 3000.0 ** (i / 63) for i in range(64)]  # from 0.01 to 30 mean round trips


class PatientState(Stateful):
    """State of `Patient`: hazards of arrivals, gain per second, and the next timer."""

    _saved = ("version", "opened_s", "due_s", "fresh")
    _parts = ("hazards", "rate")

    def __init__(self) -> None:
        self.hazards = ArrivalHazards()
        self.rate = GainPerSecond()
        self.version = -1  # of the open update; -1 before the first one
        self.opened_s = 0.0
        self.fresh: list[float] = []  # expected arrivals of an update from its beginning, within each horizon
        self.due_s = inf  # time of the timer in force; an earlier timer was set before an arrival


@checked_dataclass(frozen=True, repr=False)
class Patient(StatefulController[PatientState]):
    """Patient quorum: closes an update as soon as no further wait pays.

    With m gradients held, the update is closed unless for some horizon h

        g(m + A(h)) - g(m) > S h,    g(m) = m / (m + phi).

    A(h) is the expected number of arrivals within h seconds, from the round trips of each worker (``ArrivalHazards``).
    S is the gain per second of the latest updates (``GainPerSecond``), but at most max_h g(A(h)) / h with A from the
    beginning of an update, so that the rule follows a cluster that has become slower. phi is the critical number of
    gradients of an update (`CriticalBatch`). The controller decides at each arrival, and after the best horizon if
    nothing arrives before.

    The first update waits for every worker. Every update is closed at the latest when each worker has contributed. The
    learning rate follows by the rule "noise".

    A constant K is as good if the times of workers are independent. The gain comes from slowness that lasts: an update
    waits for all while all are fast, and for the fast ones while others are slow. In ``benchmarks/patient.py`` it is
    large where a fast worker's times vary little.

    Args:
        phi: critical number of gradients, > 0; None for the estimate of the learning-rate rule, and n / 8 before that.

    Source: none; as a rule of optimal stopping it is that of Charnov, "Optimal foraging, the marginal value theorem",
    1976.
    """

    phi: float | None = None

    reads: ClassVar[Literal["noise"]] = "noise"
    reads_work: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.phi is not None:
            check_range("(0, inf)", phi=self.phi)

    def check(self, protocol: Protocol, n: int) -> None:
        """Check that gradients are fresh, and warn if there is a single worker."""
        if protocol.max_staleness > 0:
            raise UsageError(
                f"{protocol.name}: patient needs fresh gradients, max_staleness 0, not {protocol.max_staleness}; "
                "give for example pl.patient(base='k_sync')"
            )
        if n == 1:
            warnings.warn("patient has no effect with one worker: this is plain SGD", PacelineWarning, stacklevel=2)

    def begin(self, n: int) -> PatientState:
        """Return the initial state: no round trips."""
        return PatientState()

    def decide(self, state: PatientState, observation: Observation) -> tuple[PatientState, Sequence[Action]]:
        """Record round trips and updates, and wait or close at each arrival and timer."""
        if observation.trigger == "open":
            self._open(state, observation)
            return state, []
        if observation.trigger == "arrival" and observation.arrival is not None and observation.trip_s > 0:
            state.hazards.add(observation.arrival.worker, observation.trip_s, arrived=True)
        is_due = observation.trigger == "arrival" or (observation.trigger == "timer" and observation.now >= state.due_s)
        if not is_due or not observation.held or not state.hazards.mean_trip_s:
            return state, []
        return state, self._wait_or_close(state, observation)

    def _open(self, state: PatientState, observation: Observation) -> None:
        for work in observation.interrupted:
            state.hazards.add(work.worker, work.elapsed_s, arrived=False)
        if 0 <= state.version < observation.version:
            state.rate.add(observation.update_size, observation.opened_s - state.opened_s)
            state.hazards.fit(observation.workers)
            state.fresh = self._fresh(state, observation)
        state.version = observation.version
        state.opened_s = observation.opened_s
        state.due_s = inf

    def _fresh(self, state: PatientState, observation: Observation) -> list[float]:
        """Return the expected arrivals within each horizon if all workers begin now and each delivers at most once."""
        if observation.protocol.refill == "arrival" or not (observation.workers and state.hazards.mean_trip_s):
            return []
        elapsed_s = [0.0] * len(observation.workers)
        found: list[float] = state.hazards.arrivals(observation.workers, elapsed_s, _horizons_s(state)).tolist()
        return found

    def _wait_or_close(self, state: PatientState, observation: Observation) -> list[Action]:
        oldest = observation.version - observation.protocol.max_staleness
        work = {each.worker: each.elapsed_s for each in observation.in_flight if each.version >= oldest}
        if observation.protocol.refill == "arrival" and observation.arrival is not None:
            work[observation.arrival.worker] = 0.0  # it begins anew
        known = [worker for worker in work if state.hazards.knows(worker)]  # not those that have joined meanwhile
        if not known:
            return []
        horizons_s = _horizons_s(state)
        arrivals = state.hazards.arrivals(known, [work[worker] for worker in known], horizons_s)
        phi = self._phi(observation)
        gain_per_s = state.rate.value(phi)
        if state.fresh:
            gain_per_s = min(gain_per_s, largest_gain_per_s(phi, horizons_s, state.fresh))
        wait = best_wait(observation.held, phi, gain_per_s, horizons_s, arrivals)
        if wait.horizon_s:
            state.due_s = observation.now + wait.horizon_s
            return [CallAgainAt(state.due_s)]
        state.due_s = inf
        reason = f"waiting would gain {wait.gain_per_s:.3g}/s, less than the {gain_per_s:.3g}/s of the run"
        return [CloseUpdate(f"{reason}; phi {phi:.3g}")]

    def _phi(self, observation: Observation) -> float:
        if self.phi is not None:
            return self.phi
        return observation.noise.phi if observation.noise is not None else max(observation.live, 1) * FIRST_PHI


def _horizons_s(state: PatientState) -> list[float]:
    return [each * state.hazards.mean_trip_s for each in HORIZONS]
