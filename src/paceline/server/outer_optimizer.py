"""Outer optimizer of a server whose workers make local steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from paceline.jobs.job import Job
from paceline.policies.outer_optimizer import OuterSGD
from paceline.protocols.local_steps import LocalSteps


def server_job(job: Job, local_steps: LocalSteps | None) -> Job:
    """Return the job as its server trains it: with the outer optimizer, if workers make local steps.

    The schedule of the learning rate and the clipping are those of the local steps.
    """
    if local_steps is None:
        return job
    assert isinstance(local_steps.outer, OuterSGD)
    optimizer = _factory(local_steps.outer)
    return replace(job, optimizer=optimizer, scheduler=None, clip_norm=None, no_decay_on=())


def _factory(outer: OuterSGD) -> Callable[[Iterable[Tensor]], torch.optim.Optimizer]:
    return partial(torch.optim.SGD, lr=outer.lr, momentum=outer.momentum, nesterov=outer.nesterov and outer.momentum > 0)
