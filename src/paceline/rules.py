"""A coordinator from what `run.json` says, so that a run that is replayed goes by the rules that it went by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.catalogue import ADDITIONS
from paceline.checkpoint.state import Json, decode, encode
from paceline.compensation.base import Compensator
from paceline.controllers.adasync import AdaSync
from paceline.controllers.b_dbw import BDBW
from paceline.controllers.base import Controller
from paceline.controllers.dbw import DBW
from paceline.controllers.idle_workers import IdleWorkers
from paceline.controllers.quorum import FixedQuorum
from paceline.coordinator import Coordinator
from paceline.errors import UsageError
from paceline.extent import Extent
from paceline.learning_rate import LearningRate
from paceline.minibatches import Minibatches
from paceline.momentum_limit import KEEP, Momentum
from paceline.patience import DerivedPatience, Patience
from paceline.protocols import Phase, Plan
from paceline.reduction import Reduction
from paceline.schedule import Curve
from paceline.stop import Stop
from paceline.text import bind, parse_call


def make_coordinator(plan: Plan, stop: Stop, rules: Mapping[str, Any], patience: Patience | None = None) -> Coordinator:
    """Return the coordinator that goes by these rules.

    Args:
        plan: already checked.
        stop: when to end.
        rules: workers, per_epoch, minibatches, learning_rate, schedule, worker_timeout_s,
            derives_timeout, evaluate_every and measure_steps.
        patience: timeout on silent workers in place of that of the rules.
    """
    every = rules["evaluate_every"]
    schedule = rules.get("schedule")  # runs did not say before
    return Coordinator(
        plan,
        workers=rules["workers"],
        stop=stop,
        per_epoch=rules["per_epoch"],
        minibatches=_minibatches(rules["minibatches"], stop) if rules["minibatches"] else None,
        learning_rate=LearningRate(**rules["learning_rate"]),
        schedule=Curve(**schedule) if schedule else None,
        patience=patience or patience_of(rules),
        evaluate_every=Extent(**every) if every else None,
        measure_steps=rules.get("measure_steps", False),  # nor this
    )


def patience_of(rules: Mapping[str, Any]) -> Patience:
    """Return the timeout on silent workers as the rules give it."""
    return DerivedPatience() if rules.get("derives_timeout") else Patience(rules["worker_timeout_s"])


def _minibatches(dealing: Mapping[str, Any], stop: Stop) -> Minibatches:
    per_run = (stop.epochs or 0) * (dealing["per_epoch"] or 0)
    whole = int(per_run) if per_run and float(per_run).is_integer() else None
    return Minibatches(**dealing, per_run=whole)


def plan_as_json(plan: Plan) -> Json:
    """Return a plan as JSON can hold it; of the controllers, how they show themselves."""
    phases = [
        {
            "protocol": phase.protocol,
            "end": [phase.end.unit, phase.end.amount] if phase.end else None,
            "controllers": [repr(controller) for controller in phase.controllers],
            "name": phase.name,
            "compensators": [repr(compensator) for compensator in phase.compensators],
            "momentum": phase.momentum.rule,
            "reduction": _reduction_as_json(phase.reduction),
        }
        for phase in plan.phases
    ]
    return encode(phases, {})


def plan_of(phases: Sequence[Json]) -> Plan:
    """Return the plan that `plan_as_json` made this of.

    Raises:
        UsageError: it had a controller or a compensator that is not paceline's own, and of which JSON holds a name
            only.
    """
    return Plan(
        tuple(
            Phase(
                phase["protocol"],
                tuple(_controller(text) for text in phase["controllers"]),
                Extent(*phase["end"]) if phase["end"] else None,
                phase.get("name", ""),  # plans had none before
                tuple(_compensator(text) for text in phase.get("compensators", ())),  # nor these
                Momentum(phase.get("momentum", KEEP.rule)),  # nor this
                _reduction(phase.get("reduction")),  # nor this
            )
            for phase in decode(list(phases), {})
        )
    )


def _reduction_as_json(reduction: Reduction | None) -> dict[str, Any] | None:
    if reduction is None:
        return None
    return {**vars(reduction), "correction": repr(reduction.correction) if reduction.correction else None}


def _reduction(given: Mapping[str, Any] | None) -> Reduction | None:
    if given is None:
        return None
    correction = given["correction"]
    return Reduction(**{**given, "correction": _compensator(correction) if correction else None})


def _compensator(text: str) -> Compensator:
    made = _made_again("compensator", text, ADDITIONS)
    assert isinstance(made, Compensator)
    return made


def _controller(text: str) -> Controller[Any]:
    made = _made_again("controller", text, {**_CONTROLLERS, **ADDITIONS})
    assert isinstance(made, Controller)
    return made


def _made_again(part: str, text: str, factories: Mapping[str, Callable[..., object]]) -> object:
    try:
        return bind(parse_call(text), factories)
    except UsageError:
        raise _cannot_make_again(part, text) from None


def _cannot_make_again(part: str, text: str) -> UsageError:
    return UsageError(
        f"the plan has a {part} that its text cannot make again ({text}); give the plan: pl.replay(run, protocol=...)"
    )


_CONTROLLERS: dict[str, Callable[..., Controller[Any]]] = {
    kind.__name__: kind for kind in (AdaSync, BDBW, DBW, FixedQuorum, IdleWorkers)
}
