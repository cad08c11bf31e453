"""Rank: what one process of a distributed run needs to take part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.clusters.torchrun import Torchrun
from paceline.engines.distributed.host import Host
from paceline.engines.distributed.rendezvous.job_security import JobSecurity
from paceline.engines.distributed.transport.transport import Transport
from paceline.jobs.job import Job
from paceline.protocols.protocol import Plan
from paceline.worker.task_runner import device_of


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Settings of a run, as one of its processes needs them.

    Args:
        job: job to train.
        cluster: launch settings of this process.
        seed: seed of the run, >= 0.
        plan: protocol of each phase.
        per_epoch: gradients per epoch; None for data without a length.
        make_job_spec: returns, given the model, the settings that must be equal on all processes.
        host: process in which the rank runs.
        folder: folder of the run, as this process was given it; None for a run without one.
    """

    job: Job
    cluster: Torchrun
    seed: int
    plan: Plan
    per_epoch: float | None
    make_job_spec: Callable[[nn.Module], dict[str, Any]]
    host: Host
    folder: str | Path | None = None

    @cached_property
    def device(self) -> torch.device:
        """Device on which this process computes.

        Raises:
            UsageError: this machine has no such device.
        """
        return self.host.device or torch.device(device_of(self.cluster.device, self.cluster.ranks.local_rank))

    @cached_property
    def security(self) -> JobSecurity:
        """Handshake of connections to the other ranks."""
        return JobSecurity(self.cluster)

    @cached_property
    def transport(self) -> Transport:
        """Transport to the other ranks."""
        return self.host.make_transport(self.cluster, self.security)

    def close(self) -> None:
        """Release what connects this process to the other ranks; all connections have been closed."""
        self.transport.close()
        self.security.close()
