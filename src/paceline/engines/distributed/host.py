"""Host of a rank: what the process can do in which the rank runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Protocol

import torch

from paceline.clusters.torchrun import Torchrun
from paceline.core.events import Outcome
from paceline.engines.distributed.rendezvous.job_security import JobSecurity
from paceline.engines.distributed.rendezvous.sidecar import CommandSidecar, Sidecar
from paceline.engines.distributed.transport.transport import Transport
from paceline.engines.signals import Signals, leaving_on_sigterm
from paceline.server.parameter_server import ParameterServer
from paceline.worker.local_steps import ReplicaFactory, make_replica
from paceline.worker.task_runner import FAULT_ACTIONS


class Lifecycle(ABC):
    """Begin and end of the part that a process takes in a run.

    Attributes:
        has_taken_part: whether the process has taken part in an earlier run.
        interruption: why the process leaves a run without a server, like the name of a signal; empty if it stays.
        outcome: outcome of the run if the process ends it by leaving.
        fault_actions: what a scripted fault does, by its kind.
    """

    has_taken_part = False
    interruption = ""
    outcome = Outcome.INTERRUPTED
    fault_actions: Mapping[str, Callable[[], None]] = FAULT_ACTIONS

    @abstractmethod
    def signals(self, notice: str | None) -> Signals:
        """Return the record of the signals that this process gets; the argument is that of `Signals`."""

    @abstractmethod
    def set_num_threads(self, count: int) -> None:
        """Set the number of threads that torch uses, if they are all for this rank."""

    @abstractmethod
    def on_joined(self, pause: Callable[[str], None], resume: Callable[[], None]) -> None:
        """Receive the functions by which the worker of this process pauses its part in a run."""

    @abstractmethod
    def on_server(self, server: ParameterServer) -> None:
        """Receive the server of this rank, which steps its optimizer, in a run without a server for all."""

    @abstractmethod
    def leaving_on_sigterm(self, leave: Callable[[str], None]) -> AbstractContextManager[None]:
        """Return a block in which a function is called with the name of the signal at the first SIGTERM."""


class WholeProcess(Lifecycle):
    """Process that does nothing but take part in the run.

    Args:
        make_signals: returns the record of the signals, given the argument of `Signals`.
    """

    def __init__(self, make_signals: Callable[[str | None], Signals] = Signals) -> None:
        self._make_signals = make_signals

    def signals(self, notice: str | None) -> Signals:
        """Return the record of the signals that this process gets."""
        return self._make_signals(notice)

    def set_num_threads(self, count: int) -> None:
        """Set the number of threads that torch uses."""
        torch.set_num_threads(count)

    def on_joined(self, pause: Callable[[str], None], resume: Callable[[], None]) -> None:
        """Do nothing: only a loop of the user pauses."""

    def on_server(self, server: ParameterServer) -> None:
        """Do nothing: only a loop of the user asks for its state."""

    def leaving_on_sigterm(self, leave: Callable[[str], None]) -> AbstractContextManager[None]:
        """Return a block in which a function is called with the name of the signal at the first SIGTERM."""
        return leaving_on_sigterm(partial(leave, "SIGTERM"))


class SidecarStarter(Protocol):
    """Starter of processes beside a rank."""

    def __call__(self, worker: int, server: tuple[str, int] | None = None) -> Sidecar:
        """Start a process, which is the worker of this number, of the server at an address."""


def make_transport(cluster: Torchrun, security: JobSecurity) -> Transport:
    """Return the transport over TCP to the other ranks."""
    return Transport(security, version("paceline"), cluster.heartbeat_timeout_s)


@dataclass(frozen=True, kw_only=True)
class Host:
    """Process of the operating system in which a rank runs; tests replace it by a thread.

    Attributes:
        lifecycle: begin and end of its part in a run.
        make_replica: makes the replica that computes gradients.
        start_sidecar: starts processes beside the rank.
        make_transport: makes the transport to the other ranks.
        make_optimizer: makes the optimizer of a server in this process, in place of the job's; None for that.
        device: device on which the process computes; None for that of the cluster.
    """

    lifecycle: Lifecycle
    make_replica: ReplicaFactory = make_replica
    start_sidecar: SidecarStarter = CommandSidecar
    make_transport: Callable[[Torchrun, JobSecurity], Transport] = make_transport
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    device: torch.device | None = None


THIS_PROCESS = Host(lifecycle=WholeProcess())
