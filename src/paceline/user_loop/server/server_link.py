"""Link from the loop of a rank to the server: at rank 0 the process beside it, on the other ranks nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from paceline.core.events import Outcome
from paceline.engines.distributed import End
from paceline.errors import PacelineError
from paceline.user_loop.hooks.loop_signals import LoopSignals
from paceline.user_loop.server.server_process import ServerProcess
from paceline.user_loop.worker.exchange import LoopEnd


class LastState(NamedTuple):
    """What rank 0 gets from the server after the run.

    Attributes:
        end: end of the run.
        state: last state of the optimizer.
    """

    end: End
    state: dict[str, Tensor]


class ServerLink:
    """Link of one rank.

    Args:
        server: process of the server; None if it is not beside this rank.
    """

    def __init__(self, server: ServerProcess | None = None) -> None:
        self._server = server

    @property
    def is_here(self) -> bool:
        """Whether the server is beside this rank."""
        return self._server is not None

    @property
    def read_state(self) -> Callable[[], dict[str, Tensor]] | None:
        """Function that returns the state of the server's optimizer."""
        return None if self._server is None else self._server.state

    def check(self, timeout_s: float) -> None:
        """Raise the error of the server if it fails within a time."""
        if self._server is not None:
            self._server.check(timeout_s)

    def look(self, *, has_begun: bool) -> LoopEnd | PacelineError | None:
        """Return the failure of the server, or the end of a run in which this rank has not taken part.

        Args:
            has_begun: whether this rank has taken part, so that its worker receives the end.
        """
        if self._server is None:
            return None
        try:
            self._server.check()
        except PacelineError as error:
            return error
        end = self._server.end
        return None if end is None or has_begun else LoopEnd(None, end)

    def end_run(self, outcome: Outcome, reason: str) -> bool:
        """Ask the server to end the run; return whether it is beside this rank."""
        if self._server is not None:
            self._server.end_run(outcome, reason)
        return self.is_here

    def finish(self) -> LastState | None:
        """Wait until the run has ended for all ranks, and let the server go."""
        if self._server is None:
            return None
        signals = LoopSignals(lambda name: self.end_run(Outcome.INTERRUPTED, f"interrupted by {name}"))
        try:
            state = self._server.wait()
            assert self._server.end is not None
            return LastState(self._server.end, state)
        finally:
            self._server = None
            signals.close()

    def stop(self, outcome: Outcome, reason: str, *, has_standby: bool = False) -> None:
        """End the run for all ranks, and let the server go; its standby goes on with a run that has failed here."""
        server, self._server = self._server, None
        if server is None:
            return
        if has_standby and outcome is Outcome.FAILED:
            server.abandon()
        else:
            server.stop(outcome, reason)
