"""Checkpoints of one rank without a server: the state that only this rank has, at the versions that rank 0 saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.checkpoint.worker_states import WorkerStates
from paceline.engines.distributed.allreduce.sum_queue import SumQueue
from paceline.engines.distributed.rank import Rank
from paceline.engines.distributed.transport.sum_messages import StepReport
from paceline.errors import RunError
from paceline.recording.validation import believed
from paceline.tensors.flat_buffers import copy_checked
from paceline.utils.rank_logger import RankLogger
from paceline.worker.allreduce.base import AllReduceAlgorithm

LOG = RankLogger(__name__)


class RankCheckpoints:
    """Checkpoints of the state that only one rank has: of its own optimizer, and what compressed sums have left out.

    Rank 0 decides when the run is saved. It asks with its next report, so that all ranks save their state after the
    same update.

    Args:
        rank: settings of this process.
        algorithm: optimizer and parameters of this rank.
        sums: sums of this rank.

    Attributes:
        is_asked: whether the next report of rank 0 asks all ranks to save.
    """

    def __init__(self, rank: Rank, algorithm: AllReduceAlgorithm, sums: SumQueue) -> None:
        self._states = WorkerStates(rank.folder, rank.cluster.worker, "update")
        self._worker = rank.cluster.worker
        self._algorithm = algorithm
        self._left_out = sums.left_out
        self._has_state = rank.folder is not None and (algorithm.own_state() is not None or bool(self._left_out))
        self._saves_next = False
        self._saved_version = 0
        self.is_asked = False

    def prepare(self, version: int) -> bool:
        """Return whether the own state of this version is saved, if any; else ask all ranks to save a later one."""
        if not self._has_state or version == self._saved_version:
            return True
        self.is_asked = True
        return False

    def on_reports(self, reports: Mapping[int, StepReport]) -> None:
        """Record whether rank 0 has asked."""
        if reports[0].saves:
            self._saves_next = True
            self.is_asked = False

    def after_update(self, version: int) -> None:
        """Save the state after an update whose sums are complete, if rank 0 has asked."""
        if self._saves_next:
            self._saves_next = False
            self._save(version)

    def at_end(self, version: int) -> None:
        """Save the last state."""
        if self._has_state and version:
            self._save(version)

    def restore(self, version: int) -> Mapping[Any, Any] | None:
        """Restore what was left out, and return the state of the optimizer; None if there is none of this version."""
        self._saved_version = version
        saved = self._states.find(version)
        if saved is None or saved.position != version:
            if version and self._has_state:
                LOG.warning(
                    "worker %d has no saved state of update %d: it begins with that of rank 0", self._worker, version
                )
            return None
        with believed(self._states.path, RunError):
            for ours, theirs in zip(self._left_out, saved.parts["left_out"], strict=True):
                copy_checked(ours.memory, theirs)
            own: Mapping[Any, Any] | None = saved.parts["optimizer"]
        return own

    def _save(self, version: int) -> None:
        left_out = [each.memory for each in self._left_out]
        self._states.save(version, {"optimizer": self._algorithm.own_state(), "left_out": left_out})
        self._saved_version = version
