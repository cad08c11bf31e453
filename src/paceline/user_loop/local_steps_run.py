"""Attached run with local steps: the user's optimizer steps, and the server gets the change of several steps."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from paceline.user_loop.stepping_run import SteppingRun


class LocalStepsRun(SteppingRun):
    """Part of one rank in a run with a server, to which it hands in the change that its local steps make.

    Between two local steps of the same work the parameters stay with this rank; then they are those of the version that
    the protocol gives this rank next. Its arguments are those of `AttachedRun`.
    """

    @property
    def _position(self) -> int | None:
        """Steps of a scheduler that every rank has made at the version, and those of this rank since."""
        position = super()._position
        return position if position is None or self._task is None else position + self._task.step

    def _take_state(self, state: Mapping[str, Tensor]) -> None:
        """Leave the state to the optimizer of this rank; the server has another optimizer."""
