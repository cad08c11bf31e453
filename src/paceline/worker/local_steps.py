"""Model replica that makes local steps: it hands in the change of its parameters as a pseudo-gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from math import nan
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch

from paceline.core.events import Accept, Apply, Measured, Minibatch
from paceline.jobs.job import Job
from paceline.protocols.local_steps import LocalSteps
from paceline.server.optimizer import load_checked
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatBuffers, is_a_mean, write_difference
from paceline.tensors.squared_norms import squared_norm_of
from paceline.worker.minibatch_forecast import UpcomingMinibatch
from paceline.worker.replica import Replica
from paceline.worker.torch_utils import build_model

STEP = Apply(version=0, gradients=(Accept(worker=0, draw=0, staleness=0, samples=1),), lr_scale=1.0, reason="")


class _States(NamedTuple):
    """States of the optimizer of one worker.

    Attributes:
        draw: draw of the worker's newest work.
        before: state before that work.
        after: state after it; None if the work was not completed.
        accepted: draw after which the optimizer had the state before; 0 for none.
    """

    draw: int
    before: Mapping[str, Any]
    after: Mapping[str, Any] | None
    accepted: int = 0


class LocalStepsReplica(Replica):
    """Model replica whose gradient is the change that local steps make.

    With w_0 the version and U the step of the job's optimizer,

        w_j = U(w_{j-1}, gradient of minibatch j at w_{j-1}),   gradient = w_0 - w_H

    The state of the optimizer is that after the worker's newest accepted work: what became of later work depends on the
    times of other workers, and must change nothing. Step j has the learning rate of the schedule after
    w + (j - 1) n gradients, with w the workload of the version, or that of an earlier step if it was further.

    Args:
        job: job to compute.
        seed: seed of the run, >= 0.
        n: workers of the run, >= 1.
        local_steps: number of steps, or time for them.
        stepping: job with the model and the optimizer of the steps; None for the same job.
        settings: further arguments, as of `Replica`.

    Attributes:
        steps: number of steps of the next gradient; None to take those that fit by the clock.
        before_step: called before each step with its number in the draw, from 1, and the number of its minibatch.
    """

    def __init__(
        self, job: Job, seed: int, n: int, *, local_steps: LocalSteps, stepping: Job | None = None, **settings: Any
    ) -> None:
        super().__init__(job, seed, n, **settings)
        self.steps: int | None = None
        self.before_step: Callable[[int, int], None] = lambda step, number: None
        self._local_steps = local_steps
        self._n = n
        stepping = stepping or job
        model = build_model(stepping, seed).to(self.device)
        self._optimizer = ParameterServer(stepping, model, self.layout, job.gradients_per_epoch(n), workers=n)
        self._initial = self._optimizer_state()
        self._is_watched = False
        self._states: dict[int, _States] = {}
        self._step_gradient = self.layout.allocate(self.device)

    def gradient(
        self, worker: int, draw: int, minibatch: Minibatch | None, version: FlatBuffers, gradient: FlatBuffers
    ) -> Measured:
        """Make the local steps of a draw, and return their mean loss.

        Raises:
            Interrupted: the task is cancelled; the content of `gradient` is undefined.
        """
        start_s = perf_counter()
        if worker == 0 and not self._is_watched:  # one process is enough
            self._optimizer.watch_gradients()
            self._is_watched = True
        before = self._accepted_state(worker)
        states = self._states[worker] = _States(draw, before, after=None, accepted=self.progress.accepted)
        self._load_optimizer_state(before)
        self._optimizer.state.copy_(version)
        most = self._local_steps.most if minibatch is None else minibatch.length
        most = most if self.steps is None else self.steps
        steps, losses, samples, left_out, is_finite = 0, 0.0, 0, 0, True
        while steps < most and is_finite and (not steps or self._takes_another(steps, perf_counter() - start_s)):
            step = self._step(worker, draw, minibatch, steps)
            steps += 1
            if step.skipped:  # it is left out of the work
                left_out += step.samples
                continue
            losses += step.loss * step.samples
            samples += step.samples
            is_finite = step.finite
        self._write_change(version, gradient)
        self._states[worker] = states._replace(after=self._optimizer_state())
        is_skipped = not samples and left_out > 0
        self.learning_rates = self.options = ()  # of the local steps: the server has another optimizer
        return Measured(
            loss=losses / max(samples, 1),
            samples=samples or left_out,
            squared_norm=squared_norm_of(gradient.flat_parameters),
            variance=nan,
            finite=is_finite and not is_skipped,
            compute_s=perf_counter() - start_s,
            skipped=is_skipped,
            minibatches=steps,
        )

    def prefetch(self, known: Iterable[UpcomingMinibatch]) -> None:
        """Do nothing: the source knows the minibatches of a work from its first step on."""

    def forget(self, worker: int) -> None:
        """Discard the optimizer state of a worker that was lost."""
        self._states.pop(worker, None)

    def state_after(self, worker: int, draw: int) -> Mapping[str, Any] | None:
        """Return the optimizer state of a worker after a draw, the newest one or the one accepted before; else None."""
        states = self._states.get(worker)
        if states is None or draw not in (states.draw, states.accepted):
            return None
        return states.after if draw == states.draw else states.before

    def begin_after(self, worker: int, draw: int, state: Mapping[str, Any]) -> None:
        """Let a worker begin with the optimizer state after a draw."""
        self._states[worker] = _States(draw, before=state, after=state, accepted=draw)

    def state_dict(self) -> dict[int, Any]:
        """Return the optimizer states of all workers."""
        return {worker: states._asdict() for worker, states in self._states.items()}

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Restore such states."""
        self._states = {worker: _States(**states) for worker, states in state.items()}

    def _step(self, worker: int, draw: int, minibatch: Minibatch | None, steps: int) -> Measured:
        number = self._local_steps.first_number(draw) + steps
        self.before_step(steps + 1, number)
        self._source.begin_local_step(worker, draw, minibatch, steps)
        self._optimizer.scheduler.advance_to(self.progress.workload + steps * self._n)
        one = None if minibatch is None else minibatch.after(steps)._replace(length=1)
        stats = super().gradient(worker, number, one, self._optimizer.state, self._step_gradient)
        if stats.finite:
            self._optimizer.enqueue(self._step_gradient, weight=1)
            self._optimizer.step(STEP)
        return stats

    def _takes_another(self, steps: int, elapsed_s: float) -> bool:
        if self.is_leaving:
            return False
        return self.steps is not None or self._local_steps.takes_another(steps, elapsed_s)

    def _write_change(self, version: FlatBuffers, gradient: FlatBuffers) -> None:
        """Write version - parameters, and the changes of the buffers."""
        change, local = self._step_gradient, self._optimizer.state
        change.copy_(version)
        change.written = set(range(len(change.parameters)))
        for start, end in zip(change.flat_parameters, local.flat_parameters, strict=True):
            write_difference(start, end, out=start)
        for start, end in zip(change.flat_buffers, local.flat_buffers, strict=True):
            if is_a_mean(start):
                write_difference(start, end, out=start)
                start.neg_()
            else:
                start.copy_(end)
        gradient.copy_(change)
        if change.memory.is_cuda:  # the copy does not wait for the GPU
            torch.cuda.synchronize(self.device)

    def _accepted_state(self, worker: int) -> Mapping[str, Any]:
        """Return the optimizer state after the worker's newest accepted work."""
        states = self._states.get(worker)
        if states is None:
            return self._initial
        if states.after is not None and states.draw == self.progress.accepted:
            return states.after
        return states.before

    def _optimizer_state(self) -> Mapping[str, Any]:
        server = self._optimizer
        # A copy, because the next step changes the tensors of a state in place.
        return deepcopy({"optimizer": server.optimizer.state_dict(), "scheduler": server.scheduler.state_dict()})

    def _load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        load_checked(self._optimizer.optimizer, deepcopy(state["optimizer"]))  # it keeps the tensors
        self._optimizer.scheduler.load_state_dict(state["scheduler"])


class ReplicaFactory(Protocol):
    """Factory of the replica of a process."""

    def __call__(
        self, job: Job, seed: int, n: int, *, local_steps: LocalSteps | None = None, **settings: Any
    ) -> Replica:
        """Return the replica of a job, with local steps if there are any; other arguments are those of `Replica`."""


def make_replica(job: Job, seed: int, n: int, *, local_steps: LocalSteps | None = None, **settings: Any) -> Replica:
    """Return the replica of a job, with local steps if there are any; other arguments are those of `Replica`."""
    if local_steps is None:
        return Replica(job, seed, n, **settings)
    return LocalStepsReplica(job, seed, n, local_steps=local_steps, **settings)
