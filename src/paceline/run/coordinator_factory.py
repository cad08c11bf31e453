"""Coordinator of a run from its plan and the rules in `run.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.failure_detector import FailureDetector, RoundTripFailureDetector
from paceline.coordinator.minibatch_sampler import MinibatchSampler
from paceline.coordinator.settings import CoordinatorSettings
from paceline.core.duration import Duration
from paceline.core.stop import Stop
from paceline.policies.learning_rate import LRScaling, ScheduleCurve
from paceline.policies.noise_rule import NoiseRule
from paceline.protocols.protocol import Plan


def make_coordinator(
    plan: Plan, stop: Stop, rules: Mapping[str, Any], failure_detector: FailureDetector | None = None
) -> Coordinator:
    """Return the coordinator of a run.

    Args:
        plan: phases of protocols, already checked.
        stop: conditions that end the run.
        rules: entries of `run.json`: workers, per_epoch, minibatches, learning_rate, noise, schedule, batch_size,
            worker_timeout_s, derives_timeout, evaluate_every and measure_steps.
        failure_detector: timeout on silent workers; None for the one in the rules.
    """
    every = rules["evaluate_every"]
    schedule = rules["schedule"]
    return Coordinator(
        plan,
        workers=rules["workers"],
        stop=stop,
        settings=CoordinatorSettings(
            per_epoch=rules["per_epoch"],
            learning_rate=LRScaling(**rules["learning_rate"]),
            noise=NoiseRule(**rules["noise"]) if rules.get("noise") else None,
            schedule=ScheduleCurve(**schedule) if schedule else None,
            evaluate_every=Duration(**every) if every else None,
            batch_size=rules.get("batch_size"),  # missing in early runs
            measure_steps=rules["measure_steps"],
        ),
        minibatches=_minibatches(rules["minibatches"], stop) if rules["minibatches"] else None,
        failure_detector=failure_detector or _failure_detector(rules),
    )


def _minibatches(dealing: Mapping[str, Any], stop: Stop) -> MinibatchSampler:
    per_run = (stop.epochs or 0) * (dealing["per_epoch"] or 0)
    whole = int(per_run) if per_run and float(per_run).is_integer() else None
    return MinibatchSampler(**dealing, per_run=whole)


def _failure_detector(rules: Mapping[str, Any]) -> FailureDetector:
    return RoundTripFailureDetector() if rules["derives_timeout"] else FailureDetector(rules["worker_timeout_s"])
