"""A coordinator from what `run.json` says, so that a run that is replayed goes by the rules that it went by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.catalogue.modifiers import ADDITIONS
from paceline.checkpoint.codec import Json, decode, encode
from paceline.coordinator.failure_detector import FailureDetector, RoundTripFailureDetector
from paceline.core.duration import Duration
from paceline.errors import UsageError
from paceline.policies.compensation.base import Compensator
from paceline.policies.controllers.adasync import AdaSync
from paceline.policies.controllers.base import Controller
from paceline.policies.controllers.dbw import BDBW, DBW
from paceline.policies.controllers.fixed_quorum import FixedQuorum
from paceline.policies.controllers.idle_workers import IdleWorkers
from paceline.protocols.allreduce import AllReduceConfig
from paceline.protocols.momentum import KEEP, Momentum
from paceline.protocols.protocol import Phase, Plan
from paceline.utils.spec_parser import bind, parse_call


def failure_detector_of(rules: Mapping[str, Any]) -> FailureDetector:
    """Return the timeout on silent workers as the rules give it."""
    return RoundTripFailureDetector() if rules.get("derives_timeout") else FailureDetector(rules["worker_timeout_s"])


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
                Duration(*phase["end"]) if phase["end"] else None,
                phase.get("name", ""),  # plans had none before
                tuple(_compensator(text) for text in phase.get("compensators", ())),  # nor these
                Momentum(phase.get("momentum", KEEP.rule)),  # nor this
                _reduction(phase.get("reduction")),  # nor this
            )
            for phase in decode(list(phases), {})
        )
    )


def _reduction_as_json(reduction: AllReduceConfig | None) -> dict[str, Any] | None:
    if reduction is None:
        return None
    return {**vars(reduction), "correction": repr(reduction.correction) if reduction.correction else None}


def _reduction(given: Mapping[str, Any] | None) -> AllReduceConfig | None:
    if given is None:
        return None
    correction = given["correction"]
    return AllReduceConfig(**{**given, "correction": _compensator(correction) if correction else None})


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
