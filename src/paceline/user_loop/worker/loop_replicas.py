"""Replicas of a rank whose gradients the user's loop computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from paceline.jobs.job import Job
from paceline.protocols.local_steps import LocalSteps
from paceline.user_loop.data.loop_data import UserLoop
from paceline.user_loop.worker.exchange import Exchange
from paceline.user_loop.worker.loop_gradients import LoopGradients
from paceline.user_loop.worker.loop_optimizer import LoopOptimizer, shared_parameters
from paceline.worker.local_steps import LocalStepsReplica
from paceline.worker.replica import Replica


class LoopReplicas:
    """Factory of replicas that wait for the user's loop, as a `ReplicaFactory`.

    Local steps are made in the loop, on the parameters of the user's model.

    Args:
        exchange: exchange with the loop.
        loop: parts of the loop.
        model: module of which each replica has a copy; None for the model of its job.
        is_summed_early: whether the sum of a gradient may begin before it is complete.
    """

    def __init__(
        self, exchange: Exchange, loop: UserLoop, model: nn.Module | None = None, *, is_summed_early: bool = False
    ) -> None:
        self._exchange = exchange
        self._loop = loop
        self._model = model
        self._is_summed_early = is_summed_early

    def __call__(
        self, job: Job, seed: int, n: int, *, local_steps: LocalSteps | None = None, **settings: Any
    ) -> Replica:
        """Return the replica of a rank."""
        is_shared = settings.get("group") is not None
        settings["source"] = LoopGradients(
            job.minibatches_ahead, self._exchange, is_shared=is_shared, is_summed_early=self._is_summed_early
        )
        if local_steps is None:
            own = job if self._model is None else replace(job, model=self._model)
            replica = Replica(own, seed, n, **settings)
        else:
            shared = shared_parameters(self._loop.model)
            optimizer = LoopOptimizer(self._loop.optimizer, self._exchange, keeps_options=True)
            stepping = replace(job, model=lambda: shared, optimizer=lambda parameters: optimizer)
            settings["device"] = next(shared.parameters()).device
            replica = LocalStepsReplica(job, seed, n, local_steps=local_steps, stepping=stepping, **settings)
        replica.kept = self._exchange.kept
        return replica
