"""Options of the optimizer's steps that the loops of workers set: rank 0 takes over the newest ones."""

from __future__ import annotations

from paceline.engines.distributed.transport.step_options import StepOptions
from paceline.engines.distributed.transport.task_messages import RemoteTaskDone
from paceline.server.optimizer import set_options
from paceline.server.parameter_server import ParameterServer


class LoopOptions:
    """Options of steps, from the loop that has made the most steps.

    Args:
        server: server that makes the steps.
    """

    def __init__(self, server: ParameterServer) -> None:
        self._server = server
        self._newest_draw = 0

    def take(self, done: RemoteTaskDone) -> str:
        """Set the options that came with a gradient, if there are some; return what is wrong, empty if nothing is."""
        try:
            options = StepOptions.decode(done.options, len(self._server.optimizer.param_groups))
        except ValueError as error:
            return str(error)
        if not options.learning_rates or done.draw < self._newest_draw:
            return ""
        self._newest_draw = done.draw
        if reason := set_options(self._server.optimizer, options.others):
            return reason
        self._server.set_learning_rates(options.learning_rates)
        return ""
