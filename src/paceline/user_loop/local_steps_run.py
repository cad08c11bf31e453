"""Attached run with local steps: the user's optimizer steps, and the server gets the change of several steps."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping

from torch import Tensor, nn

from paceline.errors import RunError
from paceline.user_loop.stepping_run import SteppingRun


class LocalStepsRun(SteppingRun):
    """Part of one rank in a run with a server, to which it hands in the change that its local steps make.

    Between two local steps of the same work the parameters stay with this rank; then they are those of the version that
    the protocol gives this rank next. Its arguments are those of `AttachedRun`.
    """

    def _position(self) -> int | None:
        """Return the steps of a scheduler that every rank has made at the version, and those of this rank since."""
        position = super()._position()
        return position if position is None or self._task is None else position + self._task.step

    def _share_state(self) -> None:
        """Keep the state at this rank; the worker restores it before each work, so that the loop may not load one."""
        loop, ours = threading.get_ident(), weakref.ref(self)

        def on_load(*_: object) -> None:
            run = ours()
            if run is not None and not run.over and threading.get_ident() == loop:
                raise RunError(
                    "optimizer.load_state_dict() during the run, whose next work begins with the state after the last "
                    "accepted one: load it before the first batch of run.loader"
                )

        self._hooks.callback(self._optimizer.register_load_state_dict_pre_hook(on_load).remove)

    def _take_state(self, state: Mapping[str, Tensor]) -> None:
        """Leave the state to the optimizer of this rank; the server has another optimizer."""

    def _load(self, model: nn.Module) -> None:
        """Load a version; the last one is on the CPU, and is copied to the device of the user's model."""
        if self.over:
            self._watch.load(model)
        else:
            super()._load(model)
