"""Lifecycle of a rank in whose process the user's loop has the main thread and the worker another one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from paceline.core.events import CTRL_C, Outcome
from paceline.engines.distributed import Lifecycle
from paceline.engines.signals import Signals
from paceline.server.parameter_server import ParameterServer
from paceline.user_loop.server.optimizer_state import state_reader


class LoopLifecycle(Lifecycle):
    """Lifecycle of a rank with a loop of the user, which handles signals and pauses.

    Args:
        has_server: whether a server adds the gradients, so that a rank can leave its run alone.

    Attributes:
        pause: asks the server to go on without this rank, given the reason.
        resume: asks the server for the next task.
        read_state: returns the state of the optimizer that this rank steps, as of `named_state`.
    """

    def __init__(self, *, has_server: bool) -> None:
        self._has_server = has_server
        self._leave: Callable[[str], None] | None = None
        self.pause: Callable[[str], None] = lambda reason: None
        self.resume: Callable[[], None] = lambda: None
        self.read_state: Callable[[], dict[str, Tensor]] = dict

    def signals(self, notice: str | None) -> Signals:
        """Return the record of the signals that reach this process beside those of its loop."""
        return Signals(notice)

    def set_num_threads(self, count: int) -> None:
        """Leave the number of threads to the user."""

    def on_joined(self, pause: Callable[[str], None], resume: Callable[[], None]) -> None:
        """Keep the functions for the pauses of the loop."""
        self.pause = pause
        self.resume = resume

    def on_server(self, server: ParameterServer) -> None:
        """Keep the function that reads its state."""
        self.read_state = state_reader(server)

    def leaving_on_sigterm(self, leave: Callable[[str], None]) -> AbstractContextManager[None]:
        """Keep the function for `leave`; the main thread handles signals."""
        self._leave = leave
        return nullcontext()

    def leave(self, reason: str, outcome: Outcome = Outcome.INTERRUPTED) -> bool:
        """Ask the worker to leave the run after the gradient under way; return False before it takes part.

        Without a server it leaves with the next sum; unless the run is elastic, it ends on all ranks.

        Args:
            reason: reason for leaving.
            outcome: outcome of a run that ends when any of its ranks leaves.
        """
        if not self._has_server:
            self.outcome = outcome
            self.interruption = reason
            return True
        if self._leave is not None and reason != CTRL_C:  # at which rank 0 ends the run of all ranks
            self._leave(reason)
        return self._leave is not None
