"""When a run is saved, and what of it."""

from __future__ import annotations

import time
from math import inf
from typing import Any, NamedTuple

from paceline.checkpoint.store import Checkpoints
from paceline.core.duration import Duration
from paceline.engines.base import Engine
from paceline.engines.virtual.timing import TimingEngine
from paceline.errors import RunError, UsageError
from paceline.recording.event_log import Prefix
from paceline.recording.recorder import Recorder
from paceline.recording.run_folder import CHECKPOINTS, RunFolder, versions
from paceline.run.session import Session


class CheckpointPolicy(NamedTuple):
    """How a run is saved.

    Attributes:
        every: updates or gradients, or seconds of real time, between two checkpoints.
        keep: how many are kept.
    """

    every: Duration
    keep: int


class Checkpointer:
    """Saves the whole state of a run, now and then.

    Args:
        session: with the coordinator and the server.
        engine: that runs it.
        recorder: with its counts.
        folder: of the run.
        habit: when, and how many are kept.
    """

    def __init__(
        self, session: Session, engine: Engine, recorder: Recorder, folder: RunFolder, habit: CheckpointPolicy
    ) -> None:
        self._parts: dict[str, Any] = {
            "coordinator": session.coordinator,
            "server": session.server,
            "recorder": recorder,
        }
        if isinstance(engine, TimingEngine):
            self._parts["engine"] = engine
        self._coordinator = session.coordinator
        self._configuration = {**session.configuration, "versions": versions()}
        self._engine = engine
        self._folder = folder
        self._every = habit.every
        self._checkpoints = Checkpoints(folder.path / CHECKPOINTS, habit.keep)
        is_new = session.coordinator.version == 0
        self._saved_at = -inf if is_new else self._position()
        self._version = -1 if is_new else session.coordinator.version
        self._is_saved = False  # as it is now

    def after(self) -> None:
        """Save at the beginning, after the first update, and when an update has been made and it is time to.

        An engine that is not settled is not saved: of `local_sgd` on real ranks there is nothing to save between sums.
        """
        self._is_saved = False
        if self._coordinator.awaits_step or not self._engine.is_settled:
            return  # until it has been told, the update is not over
        if self._coordinator.version != self._version:
            is_first = self._version == 0
            self._version = self._coordinator.version
            is_due = self._position() - self._saved_at >= self._every.amount
            if is_due:
                self._saved_at = self._position()
            if is_due or is_first:  # the first update shows what the optimizer remembers
                self.save()

    def at_end(self) -> None:
        """Save, unless the last event has led to it already."""
        if not self._is_saved:
            self.save()

    def save(self) -> None:
        """Save what the run is now, and how long its log is, with a digest.

        Raises:
            RunError: it cannot be saved, or only to another folder, since that of the run is gone.
        """
        version = self._coordinator.version
        state = {name: part.state_dict() for name, part in self._parts.items()}
        state["configuration"] = self._configuration
        state["now"] = self._engine.now
        if self._folder.is_gone:
            self._folder.rescue(lambda path, log: Checkpoints(path / CHECKPOINTS).save(version, state | covered(log)))
            raise self._folder.gone_error(version)
        try:
            self._checkpoints.save(version, state | covered(self._folder.settle()))
        except UsageError as error:
            if version == 0:
                raise
            raise RunError(f"the run cannot be saved: {error}") from error
        self._is_saved = True

    def _position(self) -> float:
        return self._every.position(self._coordinator.version, self._coordinator.workload, time.monotonic())


def covered(log: Prefix) -> dict[str, Any]:
    """Return the length and the digest of the log, as a checkpoint has them."""
    return {"log_bytes": log.size_bytes, "log_digest": log.digest.hexdigest()}
