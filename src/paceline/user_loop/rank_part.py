"""Part of a rank in a shared run: its configuration, its worker, and the server beside it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from paceline.core.stop import Stop
from paceline.engines.distributed import Host
from paceline.run.config import RunConfig
from paceline.user_loop.server.server_process import ServerProcess
from paceline.user_loop.step_policies import StepPolicy
from paceline.user_loop.worker.exchange import Exchange, LoopEnd
from paceline.user_loop.worker.loop_lifecycle import LoopLifecycle


class RankPart(ABC):
    """Part of one rank in a shared run.

    Attributes:
        steps: where the optimizer steps.
        ranks: ranks that the launcher has started, >= 1.
        exchange: exchange between the loop and the thread of the worker.
        lifecycle: begin and end of the part.
        host: process of the rank.
        has_standby: whether another process goes on with the run if rank 0 is lost.
        standby_folder: folder in which a standby beside this rank goes on with the run; None without one.
    """

    steps: StepPolicy
    ranks: int
    exchange: Exchange
    lifecycle: LoopLifecycle
    host: Host
    has_standby = False
    standby_folder: Path | None = None

    @abstractmethod
    def config(self, stop: Stop) -> RunConfig:
        """Return the configuration of this rank; model and optimizer are read now."""

    @abstractmethod
    def start_server(self, stop: Stop) -> ServerProcess | None:
        """Start the server, if it is beside this rank."""

    @abstractmethod
    def take_part(self, config: RunConfig) -> LoopEnd:
        """Take part in the run until its end, in the thread of the worker."""
