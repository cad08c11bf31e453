"""Model replica of a worker: computes the gradient of a minibatch at a version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from math import isfinite
from time import perf_counter

import torch
from torch import Tensor

from paceline.core.bounds import Option
from paceline.core.events import Measured, Minibatch
from paceline.errors import UsageError
from paceline.jobs.job import Job, trainable
from paceline.server.zero_gradients import shortened
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout, bind
from paceline.tensors.squared_norms import squared_norm, sum_of_norms
from paceline.utils.rng import derived_seed
from paceline.utils.user_code import at_place
from paceline.worker.buffer_watch import BufferWatch
from paceline.worker.evaluation import evaluate
from paceline.worker.gradient_source import (
    GradientGroup,
    GradientSource,
    JobGradients,
    OnReady,
    check_between_layers,
)
from paceline.worker.gradient_variance import variance
from paceline.worker.kept_values import KeptValues
from paceline.worker.minibatch_forecast import UpcomingMinibatch
from paceline.worker.parameter_guard import ParameterGuard, unwritten
from paceline.worker.seeding import seeded
from paceline.worker.task_progress import TaskProgress
from paceline.worker.torch_utils import build_model
from paceline.worker.write_watch import WriteWatch


class Replica:
    """Model replica with its data loader.

    On the device of the version, the parameters are bound to the version itself and autograd writes into the gradient
    itself; on another device both are copied.

    Args:
        job: job to compute.
        seed: seed of the run, >= 0.
        n: workers of the run, >= 1.
        device: device of the model.
        group: processes that share each minibatch, None for this process alone. Layers and data sets draw other random
            numbers in each process, so results differ from those of one process by that alone.
        debug: whether to raise if the job changes parameters while it computes.
        shards: shards of the layout, >= 1.
        source: source of the gradients, None for the job.

    Attributes:
        device: as given.
        on_gradient_ready: called in the last backward pass with the index of each parameter after autograd has added
            to its gradient, mostly once; only if the gradient is written on the device of the model. None for no call.
        learning_rates: learning rate of each parameter group for the step of the last gradient; empty where the server
            sets them.
        options: other options of each parameter group, likewise.
        progress: progress of the run, where its engine sends it.
        is_bound_to_server: whether the versions are those of a server, which the job must not change.
        is_leaving: whether the worker leaves the run after this gradient, so that local steps end with the current one.
        kept: what the worker keeps between tasks; None for nothing.
    """

    def __init__(
        self,
        job: Job,
        seed: int,
        n: int,
        *,
        device: torch.device | str = "cpu",
        group: GradientGroup | None = None,
        debug: bool = False,
        shards: int = 1,
        source: GradientSource | None = None,
    ) -> None:
        self.batch_size = job.batch_size
        self.on_gradient_ready: OnReady | None = None
        self.learning_rates: tuple[float, ...] = ()
        self.options: tuple[dict[str, Option], ...] = ()
        self.progress = TaskProgress()
        self.is_bound_to_server = False
        self.is_leaving = False
        self.kept: KeptValues | None = None
        self._job = job
        self._seed = seed
        self.device = torch.device(device)
        self._group = group
        self.model = build_model(job, seed).to(self.device)
        self._source = source or JobGradients(job, self.model, seed, n, device=self.device, group=group)
        self.layout = FlatLayout(self.model, shards)
        self._guard = ParameterGuard.for_parameters(self.model) if debug else None
        self._parameters = trainable(self.model)
        named = dict(self.model.named_parameters())
        self._not_trained = {name: each for name, each in named.items() if not each.requires_grad}
        self._writes = WriteWatch({name: each for name, each in named.items() if each.requires_grad})
        self._frozen = WriteWatch(self._not_trained)
        self._buffers = BufferWatch(self.model)
        self._own: dict[str, FlatBuffers] = {}

    def set_check(self, check: Callable[[], None]) -> None:
        """Let a function interrupt tasks, unless a group shares the minibatches, which has a check of its own.

        Args:
            check: function that raises `Interrupted` if the task is cancelled; called between microbatches and, on the
                CPU, between layers, forward and backward.
        """
        self._source.set_check(check)
        if self.device.type == "cpu":
            check_between_layers(self.model, check)

    def gradient(
        self, worker: int, draw: int, minibatch: Minibatch | None, version: FlatBuffers, gradient: FlatBuffers
    ) -> Measured:
        """Compute the gradient of a minibatch at a version.

        Raises:
            Interrupted: the task is cancelled; the content of `gradient` is undefined.
        """
        if self._group is not None:
            self._group.begin(draw, minibatch, version)
        place = str(UpcomingMinibatch(worker, draw, minibatch))
        seed = self._random_seed(worker, draw, minibatch)
        with seeded(seed, self.device):
            with at_place(f"the data of job {self._job.name} failed for {place}"):
                batch = self._source.load(worker, draw, minibatch)
            start_s = perf_counter()
            own = self._local("gradient", gradient)
            base = self._read(version)
            since = f"while job {self._job.name} computed draw {draw}"
            with at_place(f"job {self._job.name} failed for {place}"), self._unchanged(f"worker {worker}", since):
                # Buckets leave from `gradient`, which is complete only after the copy below (decision 0009).
                on_ready = self.on_gradient_ready if own is gradient else None
                part = self._source.compute(self.model, batch, own, self.progress, on_ready)
                self._check_trained()
            self._buffers.write_changes(own, base)
            if self._group is not None:
                part = self._group.all_reduce(own, part)
            norm = _squared_norm(own, part.squared_norms)
            if self._group is not None:
                norm = self._group.whole_norm(norm)
            if own is not gradient:
                gradient.copy_(own)
                torch.cuda.synchronize(self.device)  # the copy does not wait for the GPU
        spread = variance(part.mean_square, norm, part.microbatches)
        self.learning_rates = part.learning_rates
        self.options = part.options
        is_finite = isfinite(norm) and (isfinite(part.loss) or not part.is_loss_known)
        return Measured(
            loss=part.loss,
            samples=part.samples,
            squared_norm=norm,
            variance=spread,
            finite=is_finite and not part.skipped,
            compute_s=perf_counter() - start_s,
            skipped=part.skipped,
            minibatches=part.minibatches,
            overflowed=part.overflowed,
            weight=part.weight,
            step_place=part.step_place,
        )

    @property
    def prefetches(self) -> bool:
        """Whether `prefetch` has an effect."""
        return self._source.prefetches

    def prefetch(self, known: Iterable[UpcomingMinibatch]) -> None:
        """Set the minibatches that are known to follow the next one, in order."""
        self._source.prefetch(known)

    def close(self) -> None:
        """End the background processes that prepare minibatches."""
        self._source.close()

    def evaluate(self, version: FlatBuffers) -> dict[str, float]:
        """Return the mean loss and the mean of every metric over the evaluation data at a version."""
        self._read(version)
        with self._unchanged("the evaluator", f"while job {self._job.name} was evaluated"):
            return evaluate(self._job, self.model, self._seed)

    def _random_seed(self, worker: int, draw: int, minibatch: Minibatch | None) -> int:
        """Return the seed of the random numbers of a task.

        For a lease it is that of its first sample, so that both copies have the same gradient, whatever worker computes
        them, and a whole minibatch has that of BSP.
        """
        begin = 0
        if minibatch is not None and minibatch.slices:
            first = minibatch.slices[0]
            worker, draw, begin = first.worker, first.draw, first.begin
        if self._group is not None:
            seed = derived_seed(self._seed, "gradient", worker, draw, self._group.local_rank)
        else:
            seed = derived_seed(self._seed, "gradient", worker, draw)
        return derived_seed(seed, "lease", begin) if begin else seed

    def _unchanged(self, who: str, when: str) -> AbstractContextManager[None]:
        """Return a context in which the job must not change parameters."""
        if self._guard is not None:
            return self._guard.unchanged(who, when)
        return unwritten(self._writes if self.is_bound_to_server else None, self._frozen, who, when)

    def _check_trained(self) -> None:
        if begun := [name for name, each in self._not_trained.items() if each.requires_grad]:
            raise UsageError(
                f"{shortened(begun)} began to require a gradient, but a run trains the parameters that required one "
                "when the model was made: call requires_grad_() there, or train a second run from this one's model"
            )

    def _read(self, version: FlatBuffers) -> FlatBuffers:
        """Bind the parameters to a version and copy its buffers, which each draw may change."""
        own = self._local("version", version)
        if own is not version:
            own.copy_(version)
        bind(self._parameters, own.parameters)
        with torch.no_grad():  # a job may have assigned a buffer that it has computed
            for buffer, value in zip(self._buffers.current(), own.buffers, strict=True):
                buffer.copy_(value)
        return own

    def _local(self, use: str, flat: FlatBuffers) -> FlatBuffers:
        """Return these flat buffers, or own ones on the device of the model."""
        if flat.memory.device.type == self.device.type:
            return flat
        if use not in self._own:
            self._own[use] = self.layout.allocate(self.device)
        return self._own[use]


def _squared_norm(gradient: FlatBuffers, known: Mapping[int, Tensor]) -> float:
    """Return the squared norm of a gradient, whose memory is read but for the parameters with a known one."""
    views = gradient.parameters
    return sum_of_norms([known[i] if i in known else squared_norm(views[i]) for i in gradient.written])
