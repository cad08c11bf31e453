"""Model replica of a worker: computes the gradient of a minibatch at a version."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.core.bounds import Count, CountOrNone, Option, Seconds
from paceline.core.events import Compute, Minibatch
from paceline.errors import UsageError
from paceline.jobs.job import Batch, Job, trainable
from paceline.server.zero_gradients import shortened
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout, bind
from paceline.tensors.squared_norms import squared_norm, sum_of_norms
from paceline.utils.rng import derived_seed
from paceline.utils.user_code import at_place
from paceline.worker.buffer_watch import BufferWatch
from paceline.worker.data_loader import MinibatchLoader, batch_len, part_of
from paceline.worker.evaluation import evaluate
from paceline.worker.gradient_variance import MicrobatchVariance, variance
from paceline.worker.gradient_writer import GradientWriter
from paceline.worker.kept_values import KeptValues
from paceline.worker.minibatch_forecast import UpcomingMinibatch
from paceline.worker.parameter_guard import ParameterGuard, unwritten
from paceline.worker.seeding import seeded
from paceline.worker.torch_utils import build_model, to_device
from paceline.worker.write_watch import WriteWatch

if TYPE_CHECKING:
    from paceline.worker.background_loader import BackgroundLoader


class PartialGradient(NamedTuple):
    """Statistics of the gradient of some samples.

    Attributes:
        loss: mean loss of the samples.
        samples: number of samples, >= 0.
        mean_square: mean over the samples of the squared norm of their microbatch's gradient, >= 0.
        microbatches: number of microbatches; 0 if their gradients are not measured.
        squared_norms: squared norm of each parameter's gradient that is known, by index.
    """

    loss: float
    samples: int
    mean_square: float
    microbatches: int
    squared_norms: Mapping[int, Tensor] = MappingProxyType({})


class GradientGroup(Protocol):
    """Process group that shares each minibatch of one worker.

    Attributes:
        local_rank: rank of this process in the group, 0 <= local_rank < size.
        size: number of processes, >= 2.
    """

    local_rank: int
    size: int

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


class Interrupted(Exception):  # noqa: N818  # not an error: the coordinator has cancelled the task
    """The task is cancelled."""


class GradientStats(NamedTuple):
    """Scalars of one gradient, as in `Arrival`."""

    loss: float
    samples: CountOrNone
    squared_norm: float
    variance: float
    finite: bool
    compute_s: Seconds
    skipped: bool = False
    minibatches: Count = 1


class TaskProgress(NamedTuple):
    """Progress of the run at the start of a task.

    Attributes:
        update: updates made so far, >= 0.
        workload: gradients applied so far, >= 0.
        last: what became of the previous gradient of this worker: "used", "late", "interrupted", "skipped" because its
            loop skipped the step, or "not finite"; empty for the first task.
        staleness: staleness of that gradient in versions; 0 if it was not used.
        accepted: newest accepted draw of this worker; 0 for none.
        saved: newest accepted draw of this worker in the newest checkpoint of the run; 0 for none.
    """

    update: int = 0
    workload: int = 0
    last: str = ""
    staleness: int = 0
    accepted: int = 0
    saved: int = 0

    @classmethod
    def of(cls, command: Compute, last: str = "", staleness: int = 0, saved: int = 0) -> TaskProgress:
        """Return the progress at the start of this task."""
        return cls(
            update=command.version,
            workload=command.workload,
            last=last,
            staleness=staleness,
            accepted=command.accepted,
            saved=saved,
        )


class Replica:
    """Model replica with its data loader.

    On the device of the version, the parameters are bound to the version itself and autograd writes into the gradient
    itself; on another device both are copied.

    Args:
        job: job to compute.
        seed: seed of the run, >= 0.
        n: workers of the run, >= 1.
        device: device of the model.
        check: function that raises `Interrupted` if the task is cancelled; called between layers, forward and
            backward, on the CPU, and between microbatches. A group's own check replaces it.
        group: processes that share each minibatch, None for this process alone. Layers and data sets draw other random
            numbers in each process, so results differ from those of one process by that alone.
        debug: whether to raise if the job changes parameters while it computes.
        shards: shards of the layout, >= 1.

    Attributes:
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
        check: Callable[[], None] | None = None,
        group: GradientGroup | None = None,
        debug: bool = False,
        shards: int = 1,
    ) -> None:
        self.batch_size = job.batch_size
        self.on_gradient_ready: Callable[[int], None] | None = None
        self.learning_rates: tuple[float, ...] = ()
        self.options: tuple[dict[str, Option], ...] = ()
        self.progress = TaskProgress()
        self.is_bound_to_server = False
        self.is_leaving = False
        self.kept: KeptValues | None = None
        self._job = job
        self._seed = seed
        self._device = torch.device(device)
        self._loader = _loader(job, seed, n)
        self._check = check if group is None else group.check
        self._group = group
        self.model = build_model(job, seed).to(self._device)
        self.layout = FlatLayout(self.model, shards)
        self._guard = ParameterGuard.for_parameters(self.model) if debug else None
        self._parameters = trainable(self.model)
        named = dict(self.model.named_parameters())
        self._not_trained = {name: each for name, each in named.items() if not each.requires_grad}
        self._writes = WriteWatch({name: each for name, each in named.items() if each.requires_grad})
        self._frozen = WriteWatch(self._not_trained)
        self._buffers = BufferWatch(self.model)
        self._own: dict[str, FlatBuffers] = {}
        self._writer = GradientWriter(job.name, self._parameters)
        self._variance = MicrobatchVariance(self._parameters) if job.microbatches > 1 else None
        if check is not None and group is None and self._device.type == "cpu":
            check_between_layers(self.model, check)

    def gradient(
        self, worker: int, draw: int, minibatch: Minibatch | None, version: FlatBuffers, gradient: FlatBuffers
    ) -> GradientStats:
        """Compute the gradient of a minibatch at a version.

        Raises:
            Interrupted: the task is cancelled; the content of `gradient` is undefined.
        """
        place = str(UpcomingMinibatch(worker, draw, minibatch))
        seed = derived_seed(self._seed, "gradient", worker, draw)
        if self._group is not None:
            seed = derived_seed(self._seed, "gradient", worker, draw, self._group.local_rank)
        with seeded(seed, self._device):
            with at_place(f"the data of job {self._job.name} failed for {place}"):
                batch = self._load(worker, draw, minibatch)
            start_s = perf_counter()
            own = self._local("gradient", gradient)
            base = self._read(version)
            since = f"while job {self._job.name} computed draw {draw}"
            with at_place(f"job {self._job.name} failed for {place}"), self._unchanged(f"worker {worker}", since):
                part = self._forward_backward(batch, own, notifies=own is gradient)
                self._check_trained()
            self._buffers.write_changes(own, base)
            if self._group is not None:
                part = self._group.all_reduce(own, part)
            norm = _squared_norm(own, part.squared_norms)
            if own is not gradient:
                gradient.copy_(own)
                torch.cuda.synchronize(self._device)
        spread = variance(part.mean_square, norm, part.microbatches)
        finite = bool(np.isfinite(part.loss) and np.isfinite(norm))
        return GradientStats(
            loss=part.loss,
            samples=part.samples,
            squared_norm=norm,
            variance=spread,
            finite=finite,
            compute_s=perf_counter() - start_s,
        )

    @property
    def prefetches(self) -> bool:
        """Whether `prefetch` has an effect."""
        return not isinstance(self._loader, MinibatchLoader)

    def prefetch(self, known: Iterable[UpcomingMinibatch]) -> None:
        """Set the minibatches that are known to follow the next one, in order."""
        if not isinstance(self._loader, MinibatchLoader):
            self._loader.prefetch(known)

    def close(self) -> None:
        """End the background processes that prepare minibatches."""
        if not isinstance(self._loader, MinibatchLoader):
            self._loader.close()

    def evaluate(self, version: FlatBuffers) -> dict[str, float]:
        """Return the mean loss and the mean of every metric over the evaluation data at a version."""
        self._read(version)
        with self._unchanged("the evaluator", f"while job {self._job.name} was evaluated"):
            return evaluate(self._job, self.model, self._seed)

    def _unchanged(self, who: str, when: str) -> AbstractContextManager[None]:
        """Return a context in which the job must not change parameters."""
        if self._guard is not None:
            return self._guard.unchanged(who, when)
        return unwritten(self._writes if self.is_bound_to_server else None, self._frozen, who, when)

    def _load(self, worker: int, draw: int, minibatch: Minibatch | None) -> Batch | None:
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

    def _forward_backward(self, batch: Batch | None, gradient: FlatBuffers, *, notifies: bool) -> PartialGradient:
        loss_sum = 0.0
        if self._variance is not None:
            self._variance.begin()
        size = 0 if batch is None else batch_len(batch)
        parts = list(_parts(batch, size, self._job.microbatches))
        is_final = self._group is None and len(parts) == 1 and self._device.type == "cpu"
        with self._writer.writing(gradient, measures=is_final) as squared_norms:
            for number, (part, share) in enumerate(parts, 1):
                if self._check is not None:
                    self._check()
                if not share:
                    continue
                loss, _ = self._job.loss_of(self.model, to_device(part, self._device))
                self._check_loss(loss)
                self._writer.on_ready = self.on_gradient_ready if notifies and number == len(parts) else None
                (loss * share if share != 1.0 else loss).backward()
                if self._variance is not None:
                    self._variance.add(share)
                loss_sum += float(loss.detach()) * share
            if batch is not None:
                self._writer.check_written()
        if self._variance is None:
            return PartialGradient(
                loss=loss_sum, samples=size, mean_square=0.0, microbatches=0, squared_norms=squared_norms
            )
        return PartialGradient(
            loss=loss_sum, samples=size, mean_square=self._variance.mean_square, microbatches=self._variance.parts
        )

    def _check_trained(self) -> None:
        if begun := [name for name, each in self._not_trained.items() if each.requires_grad]:
            raise UsageError(
                f"{shortened(begun)} began to require a gradient, but a run trains the parameters that required one "
                "when the model was made: call requires_grad_() there, or train a second run from this one's model"
            )

    def _check_loss(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise UsageError(
                f"job {self._job.name}: the loss has no gradient (requires_grad is False), so nothing would be "
                "trained; compute it from the model's output without .detach(), .item() or torch.no_grad()"
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
        if flat.memory.device.type == self._device.type:
            return flat
        if use not in self._own:
            self._own[use] = self.layout.allocate(self._device)
        return self._own[use]


def _squared_norm(gradient: FlatBuffers, known: Mapping[int, Tensor]) -> float:
    """Return the squared norm of a gradient, whose memory is read but for the parameters with a known one."""
    views = gradient.parameters
    return sum_of_norms([known[i] if i in known else squared_norm(views[i]) for i in gradient.written])


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
