"""Rank: what one process of a distributed run needs to take part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.clusters.torchrun import Torchrun
from paceline.core.events import Outcome
from paceline.engines.distributed.rendezvous.job_security import JobSecurity
from paceline.engines.distributed.rendezvous.sidecar import CommandSidecar, Sidecar
from paceline.engines.distributed.transport.transport import Transport
from paceline.engines.signals import Signals, leaving_on_sigterm
from paceline.jobs.job import Job
from paceline.protocols.protocol import Plan
from paceline.worker.local_steps import make_replica
from paceline.worker.replica import Replica
from paceline.worker.task_runner import FAULT_ACTIONS


class HostProcess:
    """Process of the operating system in which a rank runs; tests replace it by a thread.

    Attributes:
        has_served: whether the process has taken part in an earlier run.
        interruption: why the process leaves a run without a server, like the name of a signal; empty if it stays.
        outcome: outcome of the run if the process ends it by leaving.
        fault_actions: what a scripted fault does, by its kind.
    """

    has_served = False
    interruption = ""
    outcome = Outcome.INTERRUPTED
    fault_actions: Mapping[str, Callable[[], None]] = FAULT_ACTIONS

    def transport(self, cluster: Torchrun, security: JobSecurity) -> Transport:
        """Return the transport to the other ranks."""
        return Transport(security, version("paceline"), cluster.heartbeat_timeout_s)

    def signals(self, notice: str | None) -> Signals:
        """Return the record of the signals that this process gets; the argument is that of `Signals`."""
        return Signals(notice)

    def start_sidecar(self, worker: int, server: tuple[str, int] | None = None) -> Sidecar:
        """Start a process of the same command, which is the worker of this number, of the server at an address."""
        return CommandSidecar(worker, server)

    def replica(self, job: Job, seed: int, n: int, **settings: Any) -> Replica:
        """Return the replica that computes gradients; the arguments are those of `make_replica`."""
        return make_replica(job, seed, n, **settings)

    def set_num_threads(self, count: int) -> None:
        """Set the number of threads that torch uses."""
        torch.set_num_threads(count)

    def on_joined(self, pause: Callable[[str], None], resume: Callable[[], None]) -> None:
        """Receive the functions by which the worker of this process pauses its part in a run."""

    def leaving_on_sigterm(self, leave: Callable[[str], None]) -> AbstractContextManager[None]:
        """Call a function with the name of the signal at the first SIGTERM."""
        return leaving_on_sigterm(partial(leave, "SIGTERM"))


THIS_PROCESS = HostProcess()


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
        process: process in which the rank runs.
        folder: folder of the run, as this process was given it; None for a run without one.
    """

    job: Job
    cluster: Torchrun
    seed: int
    plan: Plan
    per_epoch: float | None
    make_job_spec: Callable[[nn.Module], dict[str, Any]]
    process: HostProcess = THIS_PROCESS
    folder: str | Path | None = None

    @cached_property
    def security(self) -> JobSecurity:
        """Handshake of connections to the other ranks."""
        return JobSecurity(self.cluster)

    @cached_property
    def transport(self) -> Transport:
        """Transport to the other ranks."""
        return self.process.transport(self.cluster, self.security)

    def close(self) -> None:
        """Release what connects this process to the other ranks; all connections have been closed."""
        self.transport.close()
        self.security.close()
