"""What carries out a run, as the functions that start, save and resume it see it."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import EndRun, Event
from paceline.engines.loop import Observer
from paceline.recording.metrics.network_counters import NetworkCounters


class Run(Protocol):
    """Loop of a run, or what has one and does more around it: a standby, or a rank without a server.

    Attributes:
        is_settled: whether the server has the newest version, so that the run can be saved.
        network: counts of the connections of this process.
    """

    is_settled: bool
    network: NetworkCounters

    @property
    def now(self) -> float:
        """Seconds since the run began."""

    def __enter__(self) -> Self:
        """Start what the run needs."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Release all resources of the run."""

    def resume_at(self, version: int, now: float) -> None:
        """Start from what the server holds as this version, at this time; call it before `__enter__`."""

    def prepare_checkpoint(self) -> bool:
        """Let the workers save the state that only they have; return whether the run may be saved now."""

    def run(self, coordinator: Coordinator, observe: Observer | None = None, first: Event | None = None) -> EndRun:
        """Run to the end and return the last command."""
