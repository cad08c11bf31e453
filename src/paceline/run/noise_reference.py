"""Reference of the learning-rate rule "noise": what the optimizer of a job was tuned for."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from paceline.errors import PacelineWarning, UsageError
from paceline.jobs.job import Job, trainable
from paceline.policies.noise_rule import NoiseRule
from paceline.protocols.protocol import Plan
from paceline.server.optimizer import make_optimizer
from paceline.utils.validation import check_range
from paceline.utils.wording import counted

ADAPTIVE = (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)  # AdamW is an Adam


def reference_of(job: Job, model: nn.Module, plan: Plan, n: int) -> NoiseRule:
    """Return the reference of a job with lr_rule="noise" on n workers.

    Raises:
        UsageError: the rule does not know this optimizer, or the plan has a compensator that the rule replaces.
    """
    optimizer = make_optimizer(job, trainable(model), model)
    kind = type(optimizer).__name__
    adaptive = isinstance(optimizer, (*ADAPTIVE, torch.optim.AdamW))
    if not adaptive and type(optimizer) is not torch.optim.SGD:
        raise UsageError(
            f"job {job.name}: lr_rule='noise' does not know how the steps of {kind} grow with the learning rate; give "
            "SGD, Adam or AdamW, or lr_rule='constant'"
        )
    if adaptive:
        _check_compensators(job, plan, kind)
    groups = optimizer.param_groups
    rate = max(float(group["lr"]) for group in groups)
    momentum = max(float(group["betas"][0] if adaptive else group["momentum"]) for group in groups)
    return NoiseRule(K=_gradients(job, n), learning_rate=rate, momentum=momentum, adaptive=adaptive)


def _gradients(job: Job, n: int) -> int:
    """Return the gradients of an update that the rate was tuned for."""
    if job.lr_of == "bsp":
        return n
    check_range("[1, inf)", lr_of=job.lr_of)
    if job.lr_of > n:
        warnings.warn(
            f"job {job.name}: lr_of={job.lr_of}, but there are {counted(n, 'worker')}: the learning rate is taken as "
            f"tuned for updates of {job.lr_of} gradients, each of a minibatch of {job.batch_size}",
            PacelineWarning,
            stacklevel=2,
        )
    return job.lr_of


def _check_compensators(job: Job, plan: Plan, kind: str) -> None:
    for phase in plan.phases:
        for compensator in phase.compensators:
            if compensator.kind == "scale":
                raise UsageError(
                    f"{phase}: {compensator.name} only scales gradients, by which {kind} divides again, and "
                    f"lr_rule='noise' of job {job.name} lowers the rate for staleness already; leave one of them out"
                )
