"""Callback: the extension point that gets each record of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.records import DecisionMade, GradientArrived, Record, RunEnded, UpdateMade, VersionEvaluated
from paceline.recording.history import Totals
from paceline.recording.metrics.network_counters import NetworkCounters

KEPT = "; the run stopped, and the files written before are kept"  # advice where a callback cannot write a file


@dataclass(frozen=True)
class RunInfo:
    """Run that callbacks belong to.

    Attributes:
        configuration: configuration of the run, as in ``run.json``.
        totals: counts of the records so far.
        network: bytes and rejected connections of this process; zero without connections.
    """

    configuration: Mapping[str, Any]
    totals: Totals
    network: NetworkCounters


class Callback:
    """Base class of callbacks; override the methods of the records you need.

    An exception in a callback stops the run and reaches the caller.
    """

    def on_start(self, run: RunInfo) -> None:
        """Prepare for a run, before its workers start."""

    def on_record(self, record: Record) -> None:
        """Process any record; by default, call the method below for its type."""
        match record:
            case UpdateMade():
                self.on_update(record)
            case GradientArrived():
                self.on_arrival(record)
            case VersionEvaluated():
                self.on_evaluate(record)
            case DecisionMade(kind="protocol"):
                self.on_switch(record)
            case RunEnded():
                self.on_end(record)

    def on_resume(self, history: Iterable[Record]) -> None:
        """Process the earlier records of a resumed run."""

    def on_update(self, update: UpdateMade) -> None:
        """Process an update."""

    def on_arrival(self, arrival: GradientArrived) -> None:
        """Process a gradient that arrived, used or dropped."""

    def on_evaluate(self, evaluation: VersionEvaluated) -> None:
        """Process an evaluation."""

    def on_switch(self, decision: DecisionMade) -> None:
        """Process a switch of the protocol."""

    def on_end(self, end: RunEnded) -> None:
        """Process the end of the run."""

    def close(self) -> None:
        """Release what `on_start` has opened; called after the run, also after a failure."""


class Memory(Callback):
    """Callback that keeps all records in memory."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def on_record(self, record: Record) -> None:
        """Keep a record."""
        self.records.append(record)
