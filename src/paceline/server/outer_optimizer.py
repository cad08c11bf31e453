"""Outer optimizer of a server whose workers make local steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from paceline.jobs.job import Job
from paceline.policies.outer_optimizer import OuterSGD
from paceline.protocols.local_steps import LocalSteps


def server_job(job: Job, local_steps: LocalSteps | None) -> Job:
    """Return the job as its server trains it: with the outer optimizer, if workers make local steps.

    The schedule of the learning rate and the clipping are those of the local steps.
    """
    if local_steps is None:
        return job
    outer = local_steps.outer or OuterSGD(lr=1.0)
    has_nesterov = outer.nesterov and outer.momentum > 0
    optimizer = partial(torch.optim.SGD, lr=outer.lr, momentum=outer.momentum, nesterov=has_nesterov)
    return replace(job, optimizer=optimizer, scheduler=None, clip_norm=None, no_decay_on=())
