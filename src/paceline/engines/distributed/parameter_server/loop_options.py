"""Options of the optimizer's steps that the loops of workers set: rank 0 takes over the newest ones."""

from __future__ import annotations

from paceline.engines.distributed.transport.step_options import StepOptions
from paceline.engines.distributed.transport.task_messages import RemoteTaskDone
from paceline.server.optimizer import set_learning_rates, set_options
from paceline.server.parameter_server import ParameterServer


class LoopOptions:
    """Options of steps, from the loop that has made the most steps.

    Args:
        server: server whose steps they are, or at a run without a server the one that is its coordinator's.

    Attributes:
        newest: newest ones, encoded; empty where loops set none.
    """

    def __init__(self, server: ParameterServer) -> None:
        self._server = server
        self._newest_draw = 0
        self.newest = b""

    def take(self, done: RemoteTaskDone) -> str:
        """Set the options that came with a gradient, if there are some; return what is wrong, empty if nothing is."""
        if done.draw < self._newest_draw:
            return ""
        try:
            has_set = set_step_options(self._server, done.options)
        except ValueError as error:
            return str(error)
        if has_set:
            self._newest_draw = done.draw
            self.newest = done.options
        return ""


def set_step_options(server: ParameterServer, content: bytes) -> bool:
    """Set the options of a server's next step, unless they are empty; return whether they were set.

    Args:
        server: server that makes the step.
        content: options, as `StepOptions` encodes them.

    Raises:
        ValueError: they are none, or not of this server's optimizer.
    """
    options = StepOptions.decode(content, len(server.optimizer.param_groups))
    if not options.learning_rates:
        return False
    if reason := set_options(server.optimizer, options.others):
        raise ValueError(reason)
    set_learning_rates(server.optimizer, options.learning_rates)
    return True
