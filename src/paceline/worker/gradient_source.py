"""Source of the gradients of a replica: its job, or another one, as the loop of a user in another thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import nan
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.core.bounds import Option
from paceline.core.events import Minibatch
from paceline.core.gradient import StepPlace
from paceline.errors import UsageError
from paceline.jobs.job import Batch, Job, trainable
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.utils.rng import derived_seed
from paceline.worker.batch_weight import weight_of
from paceline.worker.data_loader import MinibatchLoader, batch_len, part_of
from paceline.worker.gradient_variance import MicrobatchVariance
from paceline.worker.gradient_writer import GradientWriter
from paceline.worker.minibatch_forecast import UpcomingMinibatch
from paceline.worker.seeding import seeded
from paceline.worker.task_progress import TaskProgress
from paceline.worker.torch_utils import to_device

if TYPE_CHECKING:
    from paceline.worker.background_loader import BackgroundLoader


class OnReady(Protocol):
    """Callback with each gradient that is complete while others are computed."""

    def __call__(self, parameter: int, gradient: Tensor | None = None) -> Tensor | None:
        """Take the gradient of a parameter, and return its squared norm if it need not be in the memory of the task.

        Args:
            parameter: index of the parameter.
            gradient: the gradient, which is not changed any more; None if it is in the memory of the task.
        """


class PartialGradient(NamedTuple):
    """Statistics of the gradient of some samples.

    Attributes:
        loss: mean loss of the samples; nan if it is not known.
        samples: number of samples, >= 0.
        mean_square: mean over the samples of the squared norm of their microbatch's gradient, >= 0.
        microbatches: number of microbatches; 0 if their gradients are not measured.
        squared_norms: squared norm of each parameter's gradient that is known, by index.
        is_loss_known: whether the source knows the loss.
        skipped: whether the source has left out the step, so that there is no gradient.
        overflowed: whether it did so because the gradient was not finite.
        learning_rates: learning rate of each parameter group for the step; empty where the server sets them.
        options: other options of each parameter group, likewise.
        weight: what the gradient counts in the mean of an update, > 0; None for its samples.
        minibatches: 0 if the samples are those of an earlier task, else 1.
        step_place: place of its step in a loop with several optimizers; None in another one.
    """

    loss: float
    samples: int
    mean_square: float = 0.0
    microbatches: int = 0
    squared_norms: Mapping[int, Tensor] = MappingProxyType({})
    is_loss_known: bool = True
    skipped: bool = False
    overflowed: bool = False
    learning_rates: tuple[float, ...] = ()
    options: tuple[dict[str, Option], ...] = ()
    weight: float | None = None
    minibatches: int = 1
    step_place: StepPlace | None = None


class Interrupted(Exception):  # noqa: N818  # not an error: the coordinator has cancelled the task
    """The task is cancelled."""


class GradientSource(ABC):
    """Source of the gradients of one replica."""

    @property
    @abstractmethod
    def prefetches(self) -> bool:
        """Whether minibatches are prepared ahead, in other processes."""

    @abstractmethod
    def prefetch(self, known: Iterable[UpcomingMinibatch]) -> None:
        """Note the minibatches that are known to follow the next one, in order."""

    @abstractmethod
    def set_check(self, check: Callable[[], None]) -> None:
        """Call a function while gradients are computed, which raises `Interrupted` if the task is cancelled."""

    @abstractmethod
    def begin_local_step(self, worker: int, draw: int, minibatch: Minibatch | None, steps: int) -> None:
        """Note that the next gradient is that of a local step.

        Args:
            worker: number of the worker, >= 0.
            draw: number of the work, >= 1.
            minibatch: minibatches of the whole work, None if the worker samples them.
            steps: steps of the work so far, >= 0.
        """

    @abstractmethod
    def load(self, worker: int, draw: int, minibatch: Minibatch | None) -> Batch | None:
        """Return the samples of a minibatch; None if this process has none of them."""

    @abstractmethod
    def compute(
        self,
        model: nn.Module,
        batch: Batch | None,
        gradient: FlatBuffers,
        progress: TaskProgress,
        on_ready: OnReady | None,
    ) -> PartialGradient:
        """Write the gradient of samples, and return its statistics.

        Args:
            model: model with the parameters and buffers of the version; buffers are changed in place.
            batch: what `load` has returned.
            gradient: memory of the gradient.
            progress: progress of the run.
            on_ready: called with each gradient that is complete; None for no call.

        Raises:
            Interrupted: the task is cancelled.
        """

    @abstractmethod
    def close(self) -> None:
        """End the processes that prepare minibatches."""


class GradientGroup(Protocol):
    """Process group that shares each minibatch of one worker.

    Attributes:
        local_rank: rank of this process in the group, 0 <= local_rank < size.
        size: number of processes, >= 2.
    """

    local_rank: int
    size: int

    @abstractmethod
    def begin(self, draw: int, minibatch: Minibatch | None, version: FlatBuffers) -> None:
        """Note that this process begins a gradient at a version; the first process tells the others."""

    @abstractmethod
    def check(self) -> None:
        """Agree with the other processes on whether the task is cancelled; all call it equally often.

        Raises:
            Interrupted: the task is cancelled.
        """

    @abstractmethod
    def all_reduce(self, gradient: FlatBuffers, part: PartialGradient) -> PartialGradient:
        """Replace the gradient of this process by that of the whole minibatch, and return its statistics.

        Raises:
            Interrupted: the task is cancelled.
        """

    @abstractmethod
    def whole_norm(self, norm: float) -> float:
        """Return the squared norm of the whole gradient, given that of what this process has of it."""


class JobGradients(GradientSource):
    """Gradients of the loss of a job, by backward passes in this thread.

    Args:
        job: job to compute.
        model: model of the replica, whose parameters get hooks.
        seed: seed of the run, >= 0.
        n: workers of the run, >= 1.
        device: device of the model.
        group: processes that share each minibatch, None for this process alone.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        seed: int,
        n: int,
        *,
        device: torch.device,
        group: GradientGroup | None,
    ) -> None:
        self._job = job
        self._seed = seed
        self._device = device
        self._check = None if group is None else group.check
        self._group = group
        self._loader = _loader(job, seed, n)
        parameters = trainable(model)
        self._writer = GradientWriter(job.name, parameters)
        self._variance = MicrobatchVariance(parameters) if job.microbatches > 1 else None

    @property
    def prefetches(self) -> bool:
        """Whether minibatches are prepared ahead, in other processes."""
        return not isinstance(self._loader, MinibatchLoader)

    def prefetch(self, known: Iterable[UpcomingMinibatch]) -> None:
        """Set the minibatches that are known to follow the next one, in order."""
        if not isinstance(self._loader, MinibatchLoader):
            self._loader.prefetch(known)

    def set_check(self, check: Callable[[], None]) -> None:
        """Call a function between microbatches."""
        self._check = check

    def begin_local_step(self, worker: int, draw: int, minibatch: Minibatch | None, steps: int) -> None:
        """Do nothing: the loader's own forecast is exact for the steps of a work."""

    def load(self, worker: int, draw: int, minibatch: Minibatch | None) -> Batch | None:
        """Return the samples of this process; None if there are fewer samples than processes."""
        group = self._group
        if group is None:
            return self._loader.batch(worker, draw, minibatch)
        if not self._job.is_iterable:
            return self._loader.share(worker, draw, minibatch, group.local_rank, group.size)
        with seeded(derived_seed(self._seed, "gradient", worker, draw), self._device):  # the same batch in each process
            whole = self._loader.batch(worker, draw, minibatch)
        share = np.array_split(np.arange(batch_len(whole)), group.size)[group.local_rank]
        return part_of(whole, share[0], share[-1] + 1) if len(share) else None

    def compute(
        self,
        model: nn.Module,
        batch: Batch | None,
        gradient: FlatBuffers,
        progress: TaskProgress,
        on_ready: OnReady | None,
    ) -> PartialGradient:
        """Compute the gradient of samples, microbatch by microbatch.

        Raises:
            Interrupted: the task is cancelled.
            UsageError: the loss has no gradient.
        """
        loss_sum = 0.0
        if self._variance is not None:
            self._variance.begin()
        size = 0 if batch is None else batch_len(batch)
        parts = list(_parts(batch, size, self._job.microbatches))
        weight = None
        if self._job.weight is not None:
            parts, weight = self._weighed(parts)
            if not weight:
                return PartialGradient(nan, size, is_loss_known=False, skipped=True)
        is_final = self._group is None and len(parts) == 1 and self._device.type == "cpu"
        with self._writer.writing(gradient, measures=is_final) as squared_norms:
            for number, (part, share) in enumerate(parts, 1):
                if self._check is not None:
                    self._check()
                if not share:
                    continue
                loss, _ = self._job.loss_of(model, to_device(part, self._device))
                self._check_loss(loss)
                # A bucket may leave when no further microbatch adds to it (decision 0009).
                self._writer.on_ready = on_ready if number == len(parts) else None
                (loss * share if share != 1.0 else loss).backward()
                if self._variance is not None:
                    self._variance.add(share)
                loss_sum += float(loss.detach()) * share
            if batch is not None:
                self._writer.check_written()
        if self._variance is None:
            return PartialGradient(loss_sum, size, squared_norms=squared_norms, weight=weight)
        return PartialGradient(loss_sum, size, self._variance.mean_square, self._variance.parts, weight=weight)

    def close(self) -> None:
        """End the background processes that prepare minibatches."""
        if not isinstance(self._loader, MinibatchLoader):
            self._loader.close()

    def _weighed(self, parts: Sequence[tuple[Batch, float]]) -> tuple[list[tuple[Batch, float]], float]:
        """Return parts of a batch with their shares by the weights of the job, and the sum of these weights."""
        weights = [weight_of(self._job, part, 0) if share else 0.0 for part, share in parts]
        whole = sum(weights)
        shares = [weight / (whole or 1.0) for weight in weights]
        return [(part, share) for (part, _), share in zip(parts, shares, strict=True)], whole

    def _check_loss(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise UsageError(
                f"job {self._job.name}: the loss has no gradient (requires_grad is False), so nothing would be "
                "trained; compute it from the model's output without .detach(), .item() or torch.no_grad()"
            )


def _loader(job: Job, seed: int, n: int) -> MinibatchLoader | BackgroundLoader:
    if not job.loader_workers:
        return MinibatchLoader(job, seed, n)
    from paceline.worker.background_loader import BackgroundLoader  # imports multiprocessing only if it is used

    return BackgroundLoader(job, seed, n)


def _parts(batch: Batch | None, size: int, count: int) -> Iterator[tuple[Batch, float]]:
    """Split a batch into parts of nearly equal size, each with its share of the samples; an empty part has share 0."""
    if batch is None or count == 1:
        for _ in range(count):
            yield batch, float(batch is not None)
        return
    ends = [size * i // count for i in range(count + 1)]
    for start, end in pairwise(ends):
        yield part_of(batch, start, end), (end - start) / max(size, 1)


def check_between_layers(model: nn.Module, check: Callable[[], None]) -> list[RemovableHandle]:
    """Call a function between the layers of a model, forward and backward; return the hooks that do."""

    def before_forward(module: nn.Module, inputs: object) -> None:
        check()

    def after_forward(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(before_backward)

    def before_backward(gradient: Tensor) -> None:
        check()

    innermost = [module for module in model.modules() if not any(module.children())]
    before = [module.register_forward_pre_hook(before_forward) for module in innermost]
    return before + [module.register_forward_hook(after_forward) for module in innermost]
