"""A coordinator from what `run.json` says, so that a run that is replayed goes by the rules that it went by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.failure_detector import FailureDetector
from paceline.coordinator.minibatch_sampler import MinibatchSampler
from paceline.core.duration import Duration
from paceline.core.stop import Stop
from paceline.policies.learning_rate import LRScaling, ScheduleCurve
from paceline.protocols.protocol import Plan
from paceline.run.plan_json import failure_detector_of


def make_coordinator(
    plan: Plan, stop: Stop, rules: Mapping[str, Any], failure_detector: FailureDetector | None = None
) -> Coordinator:
    """Return the coordinator that goes by these rules.

    Args:
        plan: already checked.
        stop: when to end.
        rules: workers, per_epoch, minibatches, learning_rate, schedule, worker_timeout_s,
            derives_timeout, evaluate_every and measure_steps.
        failure_detector: timeout on silent workers in place of that of the rules.
    """
    every = rules["evaluate_every"]
    schedule = rules.get("schedule")  # runs did not say before
    return Coordinator(
        plan,
        workers=rules["workers"],
        stop=stop,
        per_epoch=rules["per_epoch"],
        minibatches=_minibatches(rules["minibatches"], stop) if rules["minibatches"] else None,
        learning_rate=LRScaling(**rules["learning_rate"]),
        schedule=ScheduleCurve(**schedule) if schedule else None,
        failure_detector=failure_detector or failure_detector_of(rules),
        evaluate_every=Duration(**every) if every else None,
        measure_steps=rules.get("measure_steps", False),  # nor this
    )


def _minibatches(dealing: Mapping[str, Any], stop: Stop) -> MinibatchSampler:
    per_run = (stop.epochs or 0) * (dealing["per_epoch"] or 0)
    whole = int(per_run) if per_run and float(per_run).is_integer() else None
    return MinibatchSampler(**dealing, per_run=whole)
