"""`auto`: the protocol with the largest progress per second, chosen again while training runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, replace
from functools import partial
from math import exp, log
from typing import Any, ClassVar, Literal

from paceline.policies.controllers.auto_candidates import balanced, default_candidates, named
from paceline.policies.controllers.base import Action, ChangeProtocol, Note, Observation, StatefulController
from paceline.policies.controllers.stale_trial import StaleTrial
from paceline.policies.estimators.noise.critical_batch import NoiseEstimate
from paceline.policies.estimators.noise.staleness_price import Reference
from paceline.policies.estimators.replay.lease_trips import LeaseTrips
from paceline.policies.estimators.replay.protocol_scores import Score, Scoring
from paceline.policies.estimators.replay.trip_history import Trip, TripHistory
from paceline.policies.noise_rule import NoiseRule, NoiseScaling
from paceline.protocols.protocol import Phase, Plan, Protocol
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.state_dict import Stateful
from paceline.utils.validation import check_range

FIRST_DECISION = 24  # gradients
LEAST_GRADIENTS, MOST_GRADIENTS = 64, 800  # between two decisions
RANKED_EVERY = 16  # gradients after which the scores are compared again, with the phi of then
LEAST_GAIN = 0.05  # of log S
# Below 1 ms, since the arrival waits for it where the engine has not done it meanwhile.
WORK = 500  # of the scoring for each arrival and each opening, in replayed round trips
# In pieces of 500, a choice waited for 20 arrivals or more.
URGENT_WORK = 2000  # the same, before the first choice and after a change of the round trips
SHOWN = 3
BSP = Protocol(quorum="all", max_staleness=0, refill="update", name="bsp")


class AutoState(Stateful):
    """State of `Auto`: round trips, those of the leases in progress, the scoring in progress, and the latest scores.

    Args:
        pieces: pieces of a minibatch; 0 where minibatches are whole.
    """

    _saved = ("has_begun", "first_at", "due_at", "ranked_at", "is_urgent", "work_due")
    _parts = ("trips", "trial", "leases")
    _defaults: ClassVar[Mapping[str, Any]] = {"leases": None}  # missing in early runs

    def __init__(self, pieces: int = 0) -> None:
        self.trips = TripHistory()
        self.leases = LeaseTrips(pieces or 1)
        self.trial = StaleTrial()
        self.scoring: Scoring | None = None
        self.candidates: tuple[Protocol, ...] = ()  # of the scoring
        self.scored: dict[Protocol, Score] = {}  # by the latest complete scoring
        self.ranked_at = 0  # workload at which these were compared
        self.has_begun = False
        self.first_at = self.due_at = FIRST_DECISION  # workload of the first choice, and of the next one
        self.is_urgent = True  # until a scoring is complete and no other one is due
        self.work_due: list[int] = []  # pieces of the scoring before the next arrival

    def hasten(self, workload: int) -> None:
        """Choose as soon as possible, but not before the first choice."""
        self.due_at = max(self.first_at, min(self.due_at, workload))
        self.is_urgent = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        scoring = self.scoring.state_dict() if self.scoring is not None else None
        scored = [(protocol, tuple(score)) for protocol, score in self.scored.items()]
        return {**super().state_dict(), "scoring": scoring, "candidates": list(self.candidates), "scored": scored}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        super().load_state_dict(state)
        self.candidates = tuple(state["candidates"])
        self.scored = {protocol: Score(*score) for protocol, score in state["scored"]}
        self.scoring = None
        if state["scoring"] is not None:
            self.scoring = Scoring(self.candidates, state["scoring"]["trips_s"])
            self.scoring.load_state_dict(state["scoring"])


@checked_dataclass(frozen=True, repr=False)
class Auto(StatefulController[AutoState]):
    """Automatic protocol: changes to the protocol with the largest progress per second.

        S = Lambda / (K d + phi)

    with Lambda accepted gradients per second and K gradients per update, from a replay of each candidate over the
    latest round trips of each worker; d the price of staleness of that replay (`largest_stable_step`), and phi the
    critical number of gradients of an update (`CriticalBatch`). With an adaptive optimizer
    S = Lambda / sqrt((K d + phi) (K d + B)), see ``Score.progress_per_s``, and d is that of updates with its momentum.
    The rule "noise" sets the learning rate.

    The protocol is chosen after 24 gradients, then after another half of the workload, at least 64 and at most 800
    gradients. It is also chosen when the round trips of a worker change, and when a protocol without a score may be
    chosen. In between the latest scores are compared again with the present phi, every 16 gradients. The protocol
    changes if log S grows by more than 0.05 and the gain until the next choice is larger than the price of the switch.
    The candidates are replayed in small pieces, one for each arrival and opening, and larger ones while the choice is
    urgent: before the first one, and after a change of the round trips. Engines replay a piece while they wait for the
    arrival. When the loss has risen, or has not fallen yet, only protocols without stale gradients are candidates.

    The run begins with balanced(m=8): its parameters are those of BSP, and it waits for no worker longer than for a
    piece of a minibatch. Where minibatches stay whole, it begins with pull(k=K), K the gradients of an update that the
    learning rate was tuned for: its rate is the given one, it never waits for the slowest worker, and every round trip
    is seen to its end.

    Args:
        candidates: protocols, of which the run begins with the first; if empty, those of `default_candidates`, and the
            balanced protocol.
        price_of_switch_s: seconds of training that a change of the protocol costs, >= 0.
        m: pieces of a minibatch under the balanced protocol, of which a queue is in the plan; 0 for none.
        fresh: whether stale gradients are left out of the candidates of `default_candidates`.
    """

    candidates: tuple[Protocol, ...] = ()
    price_of_switch_s: float = 0.0
    _: KW_ONLY
    m: int = 0
    fresh: bool = False

    reads: ClassVar[Literal["noise"]] = "noise"
    reads_work: ClassVar[bool] = True
    may_interrupt: ClassVar[bool] = True
    fresh_form: ClassVar[str] = "auto(fresh=true)"

    def __post_init__(self) -> None:
        check_range("[0, inf)", price_of_switch_s=self.price_of_switch_s, m=self.m)

    @property
    def takes_stale(self) -> bool:
        """Whether a candidate accepts stale gradients."""
        return not self.fresh if not self.candidates else any(each.max_staleness for each in self.candidates)

    def with_whole_minibatches(self) -> Auto:
        """Return the same without balanced protocols."""
        whole = tuple(each for each in self.candidates if each.refill != "share")
        return replace(self, candidates=whole or (self.candidates and (BSP,)), m=0)

    def check(self, protocol: Protocol, n: int) -> None:
        """Check that n workers can run every candidate."""
        for candidate in self.candidates:
            candidate.check_workers(n)

    def begin(self, n: int) -> AutoState:
        """Return the initial state: no round trips."""
        return AutoState(self.m)

    def prepare(self, state: AutoState) -> AutoState:
        """Replay the pieces of the candidates that are due before the next arrival."""
        if state.scoring is not None:
            for work in state.work_due:
                state.scoring.advance(work)
        state.work_due = []
        return state

    def decide(self, state: AutoState, observation: Observation) -> tuple[AutoState, Sequence[Action]]:
        """Record every round trip, and choose at the arrival before which the last candidate was replayed."""
        if observation.trigger not in ("arrival", "open"):
            return state, []
        actions = self._decide(state, observation)
        for action in actions:
            if isinstance(action, ChangeProtocol):
                state.trial.follow(observation.protocol, action.protocol)
        if state.scoring is not None:
            state.work_due.append(URGENT_WORK if state.is_urgent else WORK)
        return state, actions

    def _decide(self, state: AutoState, observation: Observation) -> Sequence[Action]:
        if observation.trigger == "arrival":
            self.prepare(state)
            if self._observe(state, observation):
                return self._take_back(state, observation)
        elif not state.has_begun:
            return self._begin_run(state, observation)
        for worker, trip in self._ended(state, observation):
            if state.trips.add(worker, trip):
                state.hasten(observation.workload)
        if observation.trigger == "arrival" and state.scoring is not None and state.scoring.is_done:
            state.scored = dict(zip(state.candidates, state.scoring.scores, strict=True))
            state.scoring = None
            state.is_urgent = observation.workload >= state.due_at
            return self._choose(state, observation, state.scored)
        if state.scoring is None and self._is_due(state, observation):
            self._begin_scoring(state, observation)
        return self._choose_again(state, observation)

    def _begin_run(self, state: AutoState, observation: Observation) -> list[Action]:
        state.has_begun = True
        state.first_at = state.due_at = observation.workload + FIRST_DECISION
        rate = observation.learning_rate
        if not isinstance(rate, NoiseScaling):
            return []
        first = self.candidates[0] if self.candidates else balanced(self.m) if self.m else named("pull", rate.rule.K)
        return [ChangeProtocol(first, "until round trips and losses are known")]

    def _observe(self, state: AutoState, observation: Observation) -> bool:
        """Add an arrival; return whether the loss has risen under the stale protocol in force."""
        arrival = observation.arrival
        assert arrival is not None
        if _is_lease(observation, observation.share):
            state.leases.add(arrival.worker, observation.share, observation.trip_s)
        elif state.trips.add(arrival.worker, Trip(observation.trip_s)):
            state.hasten(observation.workload)
        if observation.has_risen:
            state.trial.leave_out(observation.workload)
            state.hasten(observation.workload)
        return observation.accepted and state.trial.accept(arrival.measured.loss, observation.protocol)

    def _ended(self, state: AutoState, observation: Observation) -> list[tuple[int, Trip]]:
        """Return the round trips that the opening of an update has ended: cancelled ones, and those of its leases."""
        trips = []
        for work in observation.interrupted:
            of_update = work.version == observation.version - 1  # not cancelled when the queue began
            if of_update and _is_lease(observation, work.share):
                state.leases.add_cancelled(work.worker, work.share, work.elapsed_s)
            else:
                trips.append((work.worker, Trip(work.elapsed_s, censored=True)))
        if observation.trigger == "open":
            trips += state.leases.end_update(observation.now)
            if observation.protocol.refill == "share":
                state.leases.begin_update(observation.now)
        return trips

    def _take_back(self, state: AutoState, observation: Observation) -> list[Action]:
        before = state.trial.before
        assert before is not None
        state.trial.take_back(observation.workload)
        state.hasten(observation.workload)
        reason = f"the loss has risen under {observation.protocol.name}, which is taken back"
        return [ChangeProtocol(before, f"{reason}; fresh gradients only until {state.trial.fresh_until} gradients")]

    def _is_due(self, state: AutoState, observation: Observation) -> bool:
        if observation.noise is None or not observation.workers:
            return False
        return observation.workload >= state.due_at

    def _begin_scoring(self, state: AutoState, observation: Observation) -> None:
        elapsed_s = {work.worker: work.elapsed_s / work.share for work in observation.in_flight}
        state.candidates = self._allowed(state, observation)
        table = state.trips.table(sorted(observation.workers), elapsed_s)
        state.scoring = Scoring(state.candidates, table, _reference(_rule(observation)), state.leases.leases)
        interval = min(max(LEAST_GRADIENTS, observation.workload // 2), MOST_GRADIENTS)
        state.due_at = observation.workload + interval

    def _allowed(self, state: AutoState, observation: Observation) -> tuple[Protocol, ...]:
        """Return the candidates that may be chosen now: those in reach of the live workers, bsp if there is none.

        While stale gradients are to be avoided, only fresh ones remain, if there are any.
        """
        n = len(observation.workers)
        reachable = [
            candidate
            for candidate in dict.fromkeys((observation.protocol, *(self.candidates or self._defaults(n))))
            if candidate.quorum == "all" or candidate.refill == "arrival" or candidate.quorum <= n
        ]
        fresh = [candidate for candidate in reachable if candidate.max_staleness == 0]
        return tuple((_why_fresh(state, observation) and fresh) or reachable or [BSP])

    def _defaults(self, n: int) -> tuple[Protocol, ...]:
        all_of_them = (*([balanced(self.m)] if self.m else []), *default_candidates(n))
        return tuple(each for each in all_of_them if not (self.fresh and each.max_staleness))

    def _choose_again(self, state: AutoState, observation: Observation) -> list[Action]:
        """Return a change of the protocol by the latest scores and the present phi, if any."""
        if not observation.workers or observation.workload < state.ranked_at + RANKED_EVERY:
            return []
        allowed = set(self._allowed(state, observation))
        if state.scoring is None and state.scored and not allowed <= state.scored.keys():
            state.hasten(observation.workload)
        scored = {protocol: score for protocol, score in state.scored.items() if protocol in allowed}
        if observation.protocol not in scored:
            return []
        return [each for each in self._choose(state, observation, scored) if isinstance(each, ChangeProtocol)]

    def _choose(
        self, state: AutoState, observation: Observation, scored: Mapping[Protocol, Score]
    ) -> list[ChangeProtocol | Note]:
        assert observation.noise is not None
        state.ranked_at = observation.workload
        scored = _within_trial(scored, state.trial, observation.protocol)
        progress = partial(_progress_per_s, rule=_rule(observation), noise=observation.noise)
        order = sorted(scored, key=lambda protocol: -progress(scored[protocol]))
        ranked, now = [scored[protocol] for protocol in order], scored.get(observation.protocol)
        best = ranked[0]
        numbers = _numbers(ranked, now, progress, observation.noise)
        is_fresh = all(protocol.max_staleness == 0 for protocol in scored)
        shown = f"{_shown(ranked, progress, observation.noise)}{_why_fresh(state, observation) if is_fresh else ''}"
        if now is None:
            reason = f"{observation.protocol.name} is no candidate now; {shown}"
        else:
            gain = log(progress(best) / progress(now))
            if against := self._against(state, observation, best, gain):
                return [Note("auto", f"{now.protocol} stays: {against}; {shown}", numbers=numbers)]
            reason = f"{exp(gain):.3g} x the progress of {now.protocol}; {shown}"
        if now is not None and order[0].refill == "share" and observation.trigger != "open":
            # A queue begins with an update; a protocol that may not go on is left at once.
            state.ranked_at = observation.workload - RANKED_EVERY
            return []
        price = None if _rule(observation).adaptive else best.price
        return [ChangeProtocol(order[0], reason, price=price, numbers=numbers)]

    def _against(self, state: AutoState, observation: Observation, best: Score, gain: float) -> str:
        """Return the reason against a change to the best protocol; empty if it pays."""
        if gain <= LEAST_GAIN:
            return f"no protocol makes {exp(LEAST_GAIN):.2f} x its progress"
        won_s = max(state.due_at - observation.workload, 0) / best.gradients_per_s * (exp(gain) - 1.0)
        if won_s < self.price_of_switch_s:
            return f"{best.protocol} would win {won_s:.3g} s until the next choice, less than the price of the switch"
        return ""


def _within_trial(scored: Mapping[Protocol, Score], trial: StaleTrial, now: Protocol) -> dict[Protocol, Score]:
    """Return the protocols that are not too stale for the trial, the least stale one, and the one in force."""
    stalenesses = [score.staleness for score in scored.values() if score.staleness]
    largest = max(trial.largest_staleness, min(stalenesses, default=0.0))
    return {each: score for each, score in scored.items() if score.staleness <= largest or each == now}


def _is_lease(observation: Observation, share: float) -> bool:
    """Return whether work of a share of a minibatch is one of the leases of an update."""
    return observation.protocol.refill == "share" or share != 1.0


def _rule(observation: Observation) -> NoiseRule:
    assert isinstance(observation.learning_rate, NoiseScaling)
    return observation.learning_rate.rule


def _reference(rule: NoiseRule) -> Reference:
    """Return the updates that candidates are compared with; those of an adaptive optimizer have its momentum."""
    return Reference(rule.momentum) if rule.adaptive else rule.reference


def _why_fresh(state: AutoState, observation: Observation) -> str:
    """Return the reason why only protocols without stale gradients are candidates, to be appended; empty for none."""
    if observation.workload < state.trial.fresh_until:
        return "; fresh gradients only, because the loss has risen"
    if observation.noise is not None and not observation.noise.has_fallen:
        return "; fresh gradients only, because the loss has not fallen yet"
    return ""


def _progress_per_s(score: Score, rule: NoiseRule, noise: NoiseEstimate) -> float:
    return score.gradients_per_s * rule.progress(score.k, noise.phi, score.price, noise.noise_scale)


def _numbers(
    ranked: Sequence[Score], now: Score | None, progress: Callable[[Score], float], noise: NoiseEstimate
) -> dict[str, float]:
    """Return S of the best protocols and of the one in force, phi, and B if it is known."""
    shown = [*ranked[:SHOWN], *([now] if now is not None and now not in ranked[:SHOWN] else [])]
    known = {"phi": noise.phi} if noise.noise_scale is None else {"phi": noise.phi, "B": noise.noise_scale}
    return {**{score.protocol: progress(score) for score in shown}, **known}


def _shown(ranked: Sequence[Score], progress: Callable[[Score], float], noise: NoiseEstimate) -> str:
    best = [
        f"{each.protocol} {progress(each):.3g}/s "
        f"({each.gradients_per_s:.3g} gradients/s, K d = {each.k * each.price:.3g})"
        for each in ranked[:SHOWN]
    ]
    scale = "" if noise.noise_scale is None else f", B {noise.noise_scale:.3g}"
    return f"phi {noise.phi:.3g}{scale}; {'; '.join(best)}"


def with_whole_minibatches(plan: Plan) -> Plan:
    """Return a plan in which `auto` leaves minibatches whole; other protocols stay as they are.

    >>> from paceline.catalogue.parser import parse_plan
    >>> plan = with_whole_minibatches(parse_plan("auto"))
    >>> plan.sets_shares, plan.phases[0].controllers
    (False, (Auto(),))
    """
    return replace(plan, phases=tuple(map(_with_whole_minibatches, plan.phases)))


def _with_whole_minibatches(phase: Phase) -> Phase:
    if not any(isinstance(each, Auto) for each in phase.controllers):
        return phase
    kept = [each for each in phase.controllers if not each.sets_shares]
    controllers = tuple(each.with_whole_minibatches() if isinstance(each, Auto) else each for each in kept)
    return replace(phase, protocol=replace(phase.protocol, refill="update"), controllers=controllers)


def chooses_shares(plan: Plan) -> bool:
    """Return whether only `auto` cuts minibatches in a plan, so that they may stay whole.

    >>> from paceline.catalogue.parser import parse_plan
    >>> [chooses_shares(parse_plan(each)) for each in ("auto", "balanced(m=8)", "bsp")]
    [True, False, False]
    """
    return plan.sets_shares and not with_whole_minibatches(plan).sets_shares
