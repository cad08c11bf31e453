"""Checkpoints of one worker of a server: which state it saves, and when."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint.worker_states import WorkerStates
from paceline.errors import RunError
from paceline.recording.validation import believed
from paceline.tensors.flat_buffers import FlatBuffers, copy_checked
from paceline.utils.rank_logger import RankLogger
from paceline.worker.local_steps import LocalStepsReplica
from paceline.worker.replica import Replica

LOG = RankLogger(__name__)
MOST_STARTS = 3  # the newest accepted draw of a worker is one of its last two


class WorkerCheckpoints:
    """Checkpoints of the state that only one worker of a server has, with what its loop keeps between tasks.

    The state after a draw has what the loop kept at the start of its next task: until then the loop may change it.

    Args:
        folder: folder of the run, as this process was given it; None for a run without one.
        worker: number of the worker, >= 0.
        replica: replica of the worker, whose optimizer makes local steps if there are any.
        left_out: what compressed gradients have left out so far; empty without compression.
    """

    def __init__(
        self, folder: str | Path | None, worker: int, replica: Replica, left_out: Sequence[FlatBuffers] = ()
    ) -> None:
        self._states = WorkerStates(folder, worker, "gradient")
        self._worker = worker
        self._replica = replica
        self._stepping = replica if isinstance(replica, LocalStepsReplica) else None
        self._left_out = left_out
        self._has_folder = folder is not None
        self._starts: deque[tuple[int, Mapping[str, Tensor]]] = deque(maxlen=MOST_STARTS)  # of the newest draws
        self._waiting: dict[int, dict[str, Any]] = {}  # states whose kept values are those at the start of a later task
        self._has_begun = False
        self._saved = 0
        self._draw = 0

    def before_task(self, draw: int) -> None:
        """Restore the state before the first task, or save that which belongs to the newest checkpoint of the run.

        The run is saved while the worker computes, and then accepts the state of its optimizer before that task.
        """
        self._take_kept()
        progress = self._replica.progress
        self._draw = draw
        if not self._has_begun:
            self._has_begun = True
            self._saved = progress.saved
            self._restore(progress.accepted)
        elif progress.saved > self._saved and self._has_state:
            self._saved = progress.saved
            self._save(progress.saved)

    def at_end(self) -> None:
        """Save the states of which the last checkpoint of the run may need one: its newest draw may not be accepted."""
        self._take_kept()
        if self._has_begun and self._has_state:
            for draw in sorted({self._replica.progress.accepted, self._draw} - {0}):
                self._save(draw)
        if self._waiting and self._replica.kept is not None:
            self._replica.kept.save = self._save_waiting

    @property
    def _has_state(self) -> bool:
        return self._has_folder and (self._stepping is not None or bool(self._left_out) or bool(self._starts))

    def _take_kept(self) -> None:
        """Take what the worker kept at the start of the newest task, and save the states that have waited for it."""
        kept = self._replica.kept
        if kept is not None and self._has_folder and (values := kept.take_start()):
            self._starts.append((self._draw, values))
            self._save_waiting(values, before=self._draw)

    def _save_waiting(self, values: Mapping[str, Tensor], before: int = sys.maxsize) -> None:
        for draw in [each for each in self._waiting if each < before]:
            self._states.save(draw, {**self._waiting.pop(draw), "kept": values})

    def _save(self, draw: int) -> None:
        parts: dict[str, Any] = {"left_out": [each.memory.clone() for each in self._left_out]}
        if self._stepping is not None:
            parts["optimizer"] = self._stepping.state_after(self._worker, draw)
            if parts["optimizer"] is None:
                return
        after = [values for start, values in self._starts if start > draw]
        if self._starts and not after:
            self._waiting[draw] = parts
        else:
            self._states.save(draw, {**parts, "kept": after[0] if after else {}})

    def _restore(self, accepted: int) -> None:
        saved = self._states.find(accepted)
        if saved is None:
            if accepted and self._has_state:
                LOG.warning("worker %d has no saved state of its own: it begins with a new one", self._worker)
            return
        if saved.position < accepted:
            LOG.warning(
                "worker %d continues from its state after gradient %d, but gradient %d was its last accepted one",
                self._worker,
                saved.position,
                accepted,
            )
        with believed(self._states.path, RunError):
            for ours, theirs in zip(self._left_out, saved.parts["left_out"], strict=True):
                copy_checked(ours.memory, theirs)
            if self._stepping is not None:
                self._stepping.begin_after(self._worker, saved.position, saved.parts["optimizer"])
            if self._replica.kept is not None:
                self._replica.kept.restore(saved.parts.get("kept", {}))
