"""Periodic checkpoints of a run."""

from __future__ import annotations

import time
from math import inf
from typing import Any, NamedTuple

from paceline.checkpoint.store import LATEST, Checkpoints
from paceline.core.duration import Duration
from paceline.engines.loop import RunLoop
from paceline.engines.run import Run
from paceline.errors import RunError, UsageError
from paceline.recording.event_log import Prefix
from paceline.recording.recorder import Recorder
from paceline.recording.run_folder import CHECKPOINTS, RunFolder, versions
from paceline.run.session import Session
from paceline.tensors.finite import count_not_finite
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)


class CheckpointPolicy(NamedTuple):
    """Interval and number of checkpoints.

    Attributes:
        every: interval between two checkpoints in updates, gradients or seconds of real time.
        keep: number of checkpoints kept, >= 1.
    """

    every: Duration = Duration("seconds", 60)
    keep: int = 3


class Checkpointer:
    """Periodic writer of the whole state of a run.

    Args:
        session: owner of the coordinator and the server.
        engine: engine of the run.
        recorder: recorder of the run, whose counts are saved too.
        folder: folder of the run.
        policy: interval and number of checkpoints.
    """

    def __init__(
        self,
        session: Session,
        engine: Run,
        recorder: Recorder,
        folder: RunFolder,
        policy: CheckpointPolicy,
    ) -> None:
        self._parts: dict[str, Any] = {
            "coordinator": session.coordinator,
            "server": session.server,
            "recorder": recorder,
        }
        if isinstance(engine, RunLoop) and engine.is_simulated:
            self._parts["engine"] = engine
        self._coordinator = session.coordinator
        self._configuration = {**session.configuration, "versions": versions()}
        self._engine = engine
        self._folder = folder
        self._every = policy.every
        self._checkpoints = Checkpoints(folder.path / CHECKPOINTS, policy.keep)
        is_new = session.coordinator.version == 0
        self._due_at = -inf if is_new else self._position()  # when the last checkpoint was due
        self._is_due = False  # whether a checkpoint is saved as soon as the engine allows it
        self._version = -1 if is_new else session.coordinator.version
        self._awaits_first = is_new  # the first update, which creates the state of the optimizer
        self._is_saved = False  # whether the current state is saved
        self._has_warned = False
        self._infinite = count_not_finite(session.model.state_dict().values())  # as of an attention mask

    def after(self) -> None:
        """Save at the beginning, after the first update, and at the first update after each interval.

        Real ranks without a server save it one update later, because each of them must save what only it has. The
        state is not saved while the engine is unsettled, as between the sums of `local_sgd` on real ranks.
        """
        self._is_saved = False
        if self._coordinator.awaits_step or self._coordinator.version == self._version:
            return  # an update is incomplete until its step is measured
        self._version = self._coordinator.version
        position = self._position()
        if position - self._due_at >= self._every.amount:
            self._due_at = position
            self._is_due = True
        if (self._is_due or self._awaits_first) and self._engine.prepare_checkpoint() and self._engine.is_settled:
            self._is_due = False
            self._awaits_first = self._version == 0
            self.save()

    def at_end(self) -> None:
        """Save the final state, unless it is saved already."""
        if not self._is_saved:
            self.save()

    def save(self) -> None:
        """Save the state of the run with the length and the digest of its log, if its parameters are finite.

        Raises:
            RunError: the state cannot be written, or only to another folder because the folder of the run is gone.
        """
        version = self._coordinator.version
        state = {name: part.state_dict() for name, part in self._parts.items()}
        if count_not_finite(state["server"]["model"].values()) > self._infinite:
            self._warn_not_finite()
            return
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

    def _warn_not_finite(self) -> None:
        """Warn once that the state is not saved, and say how to resume before it."""
        newest = self._checkpoints.newest
        if newest is not None and not self._has_warned:
            self._has_warned = True
            LOG.warning(
                "the parameters of update %d are not finite, so they are not saved; resume=%s continues from %s. For "
                "an older checkpoint, write its name first: echo NAME > %s",
                self._coordinator.version,
                self._folder.path,
                newest.name,
                newest.parent / LATEST,
            )

    def _position(self) -> float:
        return self._every.position(self._coordinator.version, self._coordinator.workload, time.monotonic())


def covered(log: Prefix) -> dict[str, Any]:
    """Return the length and the digest of the log in the form of a checkpoint."""
    return {"log_bytes": log.size_bytes, "log_digest": log.digest.hexdigest()}
