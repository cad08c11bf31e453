"""Plans as JSON data, for `run.json` and for the comparison of two runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from paceline.checkpoint.codec import Json, decode, encode
from paceline.core.duration import Duration
from paceline.errors import UsageError
from paceline.policies.compensation.base import Compensator, compensators_of
from paceline.policies.compensation.delay import DCASGD, DCS3GD
from paceline.policies.compensation.step_scale import StalenessLR, StalenessWeight
from paceline.policies.controllers.adasync import AdaSync
from paceline.policies.controllers.auto import Auto
from paceline.policies.controllers.balance import Balance
from paceline.policies.controllers.base import Controller, controllers_of
from paceline.policies.controllers.dbw import BDBW, DBW
from paceline.policies.controllers.dynamic_lead import DynamicLead
from paceline.policies.controllers.fixed_quorum import FixedQuorum, ScheduledQuorum
from paceline.policies.controllers.grace import Grace
from paceline.policies.controllers.idle_workers import IdleWorkers
from paceline.policies.controllers.patient import Patient
from paceline.policies.controllers.restart_after import RestartAfter
from paceline.policies.controllers.straggler_policies import Elastic, Greedy, Stragglers
from paceline.protocols.allreduce import AllReduceConfig
from paceline.protocols.local_steps import LocalSteps
from paceline.protocols.momentum import Momentum
from paceline.protocols.outer_optimizer import DelayedNesterov, OuterOptimizer, OuterSGD
from paceline.protocols.protocol import Phase, Plan, Protocol

Part = Controller[Any] | Compensator | OuterOptimizer

# Names in `run.json`: a class may be renamed, its name here may not.
_KINDS: Mapping[str, type[Part]] = {
    "AdaSync": AdaSync,
    "Auto": Auto,
    "BDBW": BDBW,
    "DBW": DBW,
    "balance": Balance,
    "DynamicLead": DynamicLead,
    "FixedQuorum": FixedQuorum,
    "IdleWorkers": IdleWorkers,
    "Patient": Patient,
    "ScheduledQuorum": ScheduledQuorum,
    "dc_asgd": DCASGD,
    "delayed_nesterov": DelayedNesterov,
    "dc_s3gd": DCS3GD,
    "elastic": Elastic,
    "grace": Grace,
    "greedy": Greedy,
    "outer_sgd": OuterSGD,
    "restart_after": RestartAfter,
    "staleness_lr": StalenessLR,
    "staleness_weight": StalenessWeight,
    "stragglers": Stragglers,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def plan_as_json(plan: Plan) -> Json:
    """Return a plan as JSON: a list of phases, every part of which is a mapping of its knobs."""
    return encode([_phase_as_data(phase) for phase in plan.phases], {})


def plan_of(phases: Sequence[Json]) -> Plan:
    """Return the plan of such JSON.

    Raises:
        UsageError: the plan has a controller or a compensator that is not part of paceline.
    """
    return Plan(tuple(_phase(phase) for phase in decode(list(phases), {})))


def with_defaults(phases: Sequence[Json]) -> Json:
    """Return such JSON with each knob that it lacks at its default, since earlier versions have fewer knobs."""
    return encode([_with_defaults(phase) for phase in decode(list(phases), {})], {})


def _with_defaults(data: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return _phase_as_data(_phase(data))
    except (TypeError, UsageError):
        return data  # it has a part of the user, or a knob that is gone


def _phase_as_data(phase: Phase) -> dict[str, Any]:
    return {
        "protocol": _knobs(phase.protocol),
        "controllers": [_part_as_data(each) for each in controllers_of(phase)],
        "compensators": [_part_as_data(each) for each in compensators_of(phase)],
        "momentum": _knobs(phase.momentum),
        "allreduce": _with_parts(phase.allreduce, "correction", "outer") if phase.allreduce is not None else None,
        "end": _knobs(phase.end) if phase.end is not None else None,
        "name": phase.name,
        **({"local_steps": _with_parts(phase.local_steps, "outer")} if phase.local_steps is not None else {}),
    }


def _phase(data: Mapping[str, Any]) -> Phase:
    return Phase(
        Protocol(**data["protocol"]),
        controllers=tuple(_part(each) for each in data["controllers"]),  # type: ignore[misc]  # checked by Phase
        end=Duration(**data["end"]) if data["end"] is not None else None,
        name=data["name"],
        compensators=tuple(_part(each) for each in data["compensators"]),  # type: ignore[misc]  # checked by Phase
        momentum=Momentum(**data["momentum"]),
        allreduce=AllReduceConfig(**_parts(data["allreduce"])) if data["allreduce"] is not None else None,
        local_steps=LocalSteps(**_parts(data["local_steps"])) if "local_steps" in data else None,
    )


def _with_parts(whole: AllReduceConfig | LocalSteps, *names: str) -> dict[str, Any]:
    """Return the knobs as plain data; those of these names are parts with knobs of their own."""
    parts = {name: getattr(whole, name) for name in names}
    return {**_knobs(whole), **{name: part and _part_as_data(part) for name, part in parts.items()}}


def _parts(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _part(each) if isinstance(each, Mapping) else each for name, each in data.items()}


def _part_as_data(part: Part) -> dict[str, Any]:
    return {"name": _NAMES.get(type(part)) or type(part).__qualname__, **_knobs(part)}


def _part(data: Mapping[str, Any]) -> Part:
    """Return a controller or a compensator.

    Raises:
        UsageError: it is not part of paceline, or a knob is a function, of which JSON has only the name.
    """
    knobs = dict(data)
    name = knobs.pop("name")
    try:
        return _KINDS[name](**knobs)
    except (KeyError, TypeError, UsageError):
        raise UsageError(
            f"the plan has a part that cannot be made from run.json ({name}); give the plan: "
            "pl.replay(run, protocol=...)"
        ) from None


def _knobs(part: object) -> dict[str, Any]:
    names = [field.name for field in fields(part) if field.init] if is_dataclass(part) else list(vars(part))
    return {name: _plain(getattr(part, name)) for name in names}


def _plain(value: Any) -> Any:
    """Return a knob as plain data; of a function or an object, its name, the same in every process."""
    if value is None or isinstance(value, bool | int | float | str | Protocol):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(_plain(each) for each in value)
    return getattr(value, "__qualname__", None) or repr(value)
