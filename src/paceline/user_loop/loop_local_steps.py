"""Local steps in the user's loop, by the user's optimizer: its replica, and the process of such a rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.core.events import Minibatch
from paceline.errors import UsageError
from paceline.jobs.job import Job, trainable
from paceline.protocols.local_steps import LocalSteps
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.user_loop.loop_data import UserLoop
from paceline.user_loop.loop_optimizer import LoopOptimizer, check_steps, shared_parameters
from paceline.user_loop.loop_replica import Exchange, LoopHost, LoopReplica
from paceline.worker.local_steps import LocalStepsReplica
from paceline.worker.minibatch_forecast import UpcomingMinibatch
from paceline.worker.replica import GradientStats, Replica


class LocalStepsOptimizer(LoopOptimizer):
    """Optimizer of the user that makes local steps; its options are always those of the loop.

    Args:
        optimizer: optimizer of the user.
        exchange: exchange with the loop.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the user's optimizer, without the options."""
        groups = self.param_groups
        self._of_the_user.load_state_dict(state_dict)
        self._of_the_user.param_groups = groups  # the same objects, because the loop may hold them


class LoopLocalStepsReplica(LocalStepsReplica, LoopReplica):
    """Replica whose local steps are made in the user's loop.

    A step that the loop skips is left out of the work.
    """

    _left_out = 0  # samples of the steps that the loop has skipped in this work

    def gradient(
        self, worker: int, draw: int, minibatch: Minibatch | None, version: FlatBuffers, gradient: FlatBuffers
    ) -> GradientStats:
        """Wait for the local steps of a draw.

        Raises:
            Interrupted: the task is cancelled, or the loop pauses or has ended.
        """
        self._left_out = 0
        stats = super().gradient(worker, draw, minibatch, version, gradient)
        self.learning_rates = self.options = ()  # of the local steps: the server has another optimizer
        return stats if stats.samples else stats._replace(samples=self._left_out, finite=False, skipped=True)

    def _step(self, worker: int, draw: int, minibatch: Minibatch | None, steps: int) -> GradientStats:
        assert minibatch is not None
        self._local_step = steps
        last = min(minibatch.length, steps + 1 + self._job.minibatches_ahead)
        following = [minibatch.after(number)._replace(length=1) for number in range(steps + 1, last)]
        self._known = tuple(UpcomingMinibatch(worker, draw, each) for each in following)
        stats = super()._step(worker, draw, minibatch, steps)
        if not stats.skipped:
            return stats
        self._left_out += stats.samples
        return stats._replace(loss=0.0, samples=0, finite=True)


class LocalStepsHost(LoopHost):
    """Process of a rank whose loop makes local steps.

    Args:
        exchange: exchange with the loop.
        loop: parts of the loop.
    """

    def __init__(self, exchange: Exchange, loop: UserLoop) -> None:
        super().__init__(exchange)
        self._loop = loop

    def replica(
        self, job: Job, seed: int, n: int, *, local_steps: LocalSteps | None = None, **settings: Any
    ) -> Replica:
        """Return the replica that waits for the user's loop; it steps the parameters of the user's model."""
        assert local_steps is not None
        shared = shared_parameters(self._loop.model)
        optimizer = LocalStepsOptimizer(self._loop.optimizer, self._exchange)
        stepping = replace(job, model=lambda: shared, optimizer=lambda parameters: optimizer)
        settings["device"] = next(shared.parameters()).device
        return LoopLocalStepsReplica(
            job, seed, n, exchange=self._exchange, local_steps=local_steps, stepping=stepping, **settings
        )


def check_local_steps(loop: UserLoop) -> None:
    """Check that a loop can make local steps.

    Raises:
        UsageError: the optimizer needs more than a gradient or holds parameters of another model, or the model is on
            several devices.
    """
    check_steps(loop)
    devices = sorted({str(parameter.device) for parameter in trainable(loop.model)})
    if len(devices) > 1:
        raise UsageError(
            f"the model is on {' and '.join(devices)}, but local steps need it on one device: move it to one, or omit "
            "local_steps"
        )
