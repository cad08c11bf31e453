"""A worker's model: turns a version and a minibatch into a gradient."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from paceline.core.events import Minibatch
from paceline.core.stop import Stop
from paceline.errors import UsageError
from paceline.jobs.job import Batch, Job, trainable
from paceline.server.flat_buffers import FlatBuffers, FlatLayout, bind
from paceline.utils.rng import derived_seed
from paceline.utils.user_code import note_place
from paceline.worker.data_loader import MinibatchLoader, batch_len, part_of
from paceline.worker.evaluation import evaluate
from paceline.worker.gradient_variance import MicrobatchVariance, variance
from paceline.worker.minibatch_forecast import UpcomingMinibatch
from paceline.worker.parameter_guard import ParameterGuard
from paceline.worker.seeding import seeded
from paceline.worker.torch_utils import build_model, to_device

if TYPE_CHECKING:
    from paceline.worker.background_loader import BackgroundLoader


class PartialGradient(NamedTuple):
    """What was measured of the gradient of some samples.

    Attributes:
        loss: their mean.
        samples: how many they are.
        mean_square: mean over the samples of the squared norm of their microbatch's gradient.
        microbatches: in which they were computed; 0 where nothing is measured of each.
    """

    loss: float
    samples: int
    mean_square: float
    microbatches: int


class GradientGroup(Protocol):
    """Joins the gradients that the processes of one worker have computed.

    Attributes:
        place: of this process among them.
        size: how many they are.
    """

    place: int
    size: int

    @abstractmethod
    def add_up(self, gradient: FlatBuffers, part: PartialGradient) -> PartialGradient:
        """Make of the gradient of this process that of all of them, and return what was measured of the whole.

        Raises:
            Interrupted: the work is to be abandoned.
        """


class Interrupted(Exception):  # noqa: N818  # not an error: the coordinator asked for it
    """The work was abandoned."""


class GradientStats(NamedTuple):
    """Scalars of one gradient, as in `Arrival`."""

    loss: float
    samples: int
    squared_norm: float
    variance: float
    finite: bool
    compute_s: float


class Replica:
    """One model, its loader, and where it reads parameters from and writes gradients to.

    Args:
        job: what to compute.
        seed: of the run.
        n: workers of the run.
        device: where to compute. On the device of the version, the model reads the version itself and autograd
            writes into the gradient itself; elsewhere both are copied.
        check: called between layers, forward and backward, on the CPU, and between microbatches; it raises
            `Interrupted` when the work is to be abandoned.
        team: of processes that share each minibatch, if there are more than this one. What a layer or a data set
            draws at random differs between them, and so, by no more than that, from what one process draws. Their
            check is called between microbatches only, as often by each of them.
        debug: whether parameters that the job changes while it computes are noticed.
        accumulated: called in the last backward pass, if the gradient is written on the device where it is wanted, with
            the number of each parameter whose gradient autograd has added to: mostly once, and it is final then.
        slices: of the layout.
    """

    def __init__(
        self,
        job: Job,
        seed: int,
        n: int,
        *,
        device: torch.device | str = "cpu",
        check: Callable[[], None] | None = None,
        team: GradientGroup | None = None,
        debug: bool = False,
        accumulated: Callable[[int], None] | None = None,
        slices: int = 1,
    ) -> None:
        self.batch_size = job.batch_size
        self._job = job
        self._seed = seed
        self._device = torch.device(device)
        self._loader = _loader(job, seed, n)
        self._check = check
        self._team = team
        self._accumulated = accumulated
        self._is_telling = False
        self.model = build_model(job, seed).to(self._device)
        self.layout = FlatLayout(self.model, slices)
        self._guard = ParameterGuard.for_parameters(self.model) if debug else None
        self._parameters = trainable(self.model)
        self._buffers = list(self.model.buffers())
        self._own: dict[str, FlatBuffers] = {}
        for i, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(_noting(weakref.ref(self), i))
        self._spread = MicrobatchVariance(self._parameters) if job.microbatches > 1 else None
        if check is not None and team is None and self._device.type == "cpu":
            _check_between_layers(self.model, check)

    def gradient(
        self, worker: int, draw: int, minibatch: Minibatch | None, version: FlatBuffers, gradient: FlatBuffers
    ) -> GradientStats:
        """Compute the gradient of a minibatch at a version.

        Raises:
            Interrupted: the check said so; what stands in `gradient` is of no use.
        """
        place = () if self._team is None else (self._team.place,)
        with seeded(derived_seed(self._seed, "gradient", worker, draw, *place), self._device):
            try:
                batch = self._load(worker, draw, minibatch)
            except Exception as error:
                note_place(error, f"the data of job {self._job.name} failed for {_piece(worker, draw, minibatch)}")
                raise
            begun_s = perf_counter()
            ours = self._local("gradient", gradient)
            at = self._read(version)
            try:
                with self._guarded(worker, draw):
                    part = self._forward_backward(batch, ours, tells=ours is gradient)
            except Exception as error:
                if not isinstance(error, Interrupted):
                    note_place(error, f"job {self._job.name} failed for {_piece(worker, draw, minibatch)}")
                raise
            for change, buffer, before in zip(ours.buffers, self._buffers, at.buffers, strict=True):
                change.copy_(buffer)
                if change.dtype != torch.bool:
                    change.sub_(before)
            if self._team is not None:
                part = self._team.add_up(ours, part)
            squared_norm = sum(_norm(ours.parameters[i]) ** 2 for i in ours.written)
            if ours is not gradient:
                gradient.copy_(ours)
                torch.cuda.synchronize(self._device)
        spread = variance(part.mean_square, squared_norm, part.microbatches)
        finite = bool(np.isfinite(part.loss) and np.isfinite(squared_norm))
        return GradientStats(part.loss, part.samples, squared_norm, spread, finite, perf_counter() - begun_s)

    @property
    def prepares_ahead(self) -> bool:
        """Whether it helps to know which gradients are coming."""
        return not isinstance(self._loader, MinibatchLoader)

    def expect(self, coming: Iterable[UpcomingMinibatch]) -> None:
        """Note which gradients are known to come after the next one, in order."""
        if not isinstance(self._loader, MinibatchLoader):
            self._loader.expect(coming)

    def close(self) -> None:
        """End the processes that prepare minibatches, if there are some."""
        if not isinstance(self._loader, MinibatchLoader):
            self._loader.close()

    def evaluate(self, version: FlatBuffers) -> dict[str, float]:
        """Return the mean loss and the mean of every metric over the evaluation data at a version."""
        self._read(version)
        return evaluate(self._job, self.model, self._seed)

    def _load(self, worker: int, draw: int, minibatch: Minibatch | None) -> Batch | None:
        """Return the samples that this process computes; None if they are fewer than the team."""
        team = self._team
        if team is None:
            return self._loader.batch(worker, draw, minibatch)
        if not self._job.is_iterable:
            return self._loader.share(worker, draw, minibatch, team.place, team.size)
        with seeded(derived_seed(self._seed, "gradient", worker, draw), self._device):  # everybody reads the same
            whole = self._loader.batch(worker, draw, minibatch)
        mine = np.array_split(np.arange(batch_len(whole)), team.size)[team.place]
        return part_of(whole, mine[0], mine[-1] + 1) if len(mine) else None

    def _guarded(self, worker: int, draw: int) -> AbstractContextManager[None]:
        if self._guard is None:
            return nullcontext()
        return self._guard.unchanged(f"worker {worker}", f"while job {self._job.name} computed its draw {draw}")

    def _forward_backward(self, batch: Batch | None, gradient: FlatBuffers, tells: bool) -> PartialGradient:
        loss_sum = 0.0
        if self._spread is not None:
            self._spread.begin()
        size = 0 if batch is None else batch_len(batch)
        parts = list(_parts(batch, size, self._job.microbatches))
        with self._collecting(gradient):
            for number, (part, share) in enumerate(parts, 1):
                if self._check is not None:
                    self._check()
                if not share:
                    continue
                loss, _ = self._job.loss_of(self.model, to_device(part, self._device))
                self._check_loss(loss)
                with self._telling(tells and number == len(parts)):
                    (loss * share if share != 1.0 else loss).backward()
                if self._spread is not None:
                    self._spread.add(share)
                loss_sum += float(loss.detach()) * share
            self._check_written(gradient, is_idle=batch is None)
        if self._spread is None:
            return PartialGradient(loss_sum, size, mean_square=0.0, microbatches=0)
        return PartialGradient(loss_sum, size, self._spread.mean_square, self._spread.parts)

    @contextmanager
    def _collecting(self, gradient: FlatBuffers) -> Iterator[None]:
        """Collect what autograd computes in views of the gradient, and zeros where it computes nothing."""
        stale, gradient.written = gradient.written, set()
        self._gradient = gradient
        for parameter in self._parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for i in stale - gradient.written:  # one that is never used costs nothing
                gradient.parameters[i].zero_()

    def _note(self, i: int) -> None:
        """Take what autograd has added to, if this is the first time."""
        parameter, view, written = self._parameters[i], self._gradient.parameters[i], self._gradient.written
        if parameter.grad is not view:
            assert parameter.grad is not None
            self._check_gradient(parameter.grad, is_first=i not in written)
            view.copy_(parameter.grad)  # which costs less than zeros that autograd would add it to
            parameter.grad = view
            written.add(i)
        if self._is_telling and self._accumulated is not None:
            self._accumulated(i)

    def _check_gradient(self, gradient: Tensor, *, is_first: bool) -> None:
        if not is_first:
            raise UsageError(f"job {self._job.name}: step() replaced the gradients; leave zero_grad() out of it")
        if gradient.is_sparse:
            raise UsageError(
                f"job {self._job.name}: the model makes sparse gradients, which do not fit in a flat vector; "
                "use sparse=False"
            )

    def _check_loss(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise UsageError(
                f"job {self._job.name}: the loss has no gradient (requires_grad is False), so nothing would be "
                "trained; compute it from the model's output without .detach(), .item() or torch.no_grad()"
            )

    def _check_written(self, gradient: FlatBuffers, *, is_idle: bool) -> None:
        if not gradient.written and not is_idle:
            raise UsageError(
                f"job {self._job.name}: the loss does not depend on the model: after backward() none of its "
                f"{len(self._parameters)} trainable parameters has a gradient; compute the loss from the output of "
                "the model that step(model, batch) is given"
            )

    @contextmanager
    def _telling(self, tells: bool) -> Iterator[None]:
        self._is_telling = tells
        try:
            yield
        finally:
            self._is_telling = False

    def _read(self, version: FlatBuffers) -> FlatBuffers:
        """Bind the parameters to a version and copy its buffers, which every draw may change for itself."""
        ours = self._local("version", version)
        if ours is not version:
            ours.copy_(version)
        bind(self._parameters, ours.parameters)
        for buffer, value in zip(self._buffers, ours.buffers, strict=True):
            buffer.copy_(value)
        return ours

    def _local(self, use: str, vectors: FlatBuffers) -> FlatBuffers:
        if vectors.memory.device.type == self._device.type:
            return vectors
        if use not in self._own:
            self._own[use] = self.layout.allocate(self._device)
        return self._own[use]


def _loader(job: Job, seed: int, n: int) -> MinibatchLoader | BackgroundLoader:
    if not job.loader_workers:
        return MinibatchLoader(job, seed, n)
    from paceline.worker.background_loader import BackgroundLoader  # which imports the local engine

    return BackgroundLoader(job, seed, n)


def _noting(replica: weakref.ref[Replica], parameter: int) -> Callable[[Tensor], None]:
    """Return a hook that keeps nothing alive: autograd holds it where no garbage collector sees the cycle."""

    def note(_: Tensor) -> None:
        ours = replica()
        if ours is not None:
            ours._note(parameter)

    return note


def check_reported(job: Job, model: nn.Module, seed: int, stop: Stop) -> None:
    """Refuse a stop that waits for a metric that the first batch of the evaluation data has not.

    Raises:
        UsageError: such a metric is not reported.
    """
    if not stop.evaluated:
        return
    reported = evaluate(job, model, seed, batches=1)
    for target in stop.evaluated:
        if target.metric not in reported:
            raise UsageError(f"job {job.name}: {target.missing(list(reported))}")


def _piece(worker: int, draw: int, minibatch: Minibatch | None) -> str:
    """Return which piece of work it is, in words."""
    if minibatch is None:
        return f"worker {worker}, draw {draw}"
    shard = f" of shard {minibatch.shard}" if minibatch.shard else ""
    if minibatch.number is None:
        return f"worker {worker}, draw {draw}{shard}"
    return f"worker {worker}, draw {draw}, minibatch {minibatch.number} of epoch {minibatch.epoch}{shard}"


def _parts(batch: Batch | None, size: int, count: int) -> Iterator[tuple[Batch, float]]:
    """Split a batch into parts of nearly equal size, each with its share; one that is left empty has none."""
    if batch is None or count == 1:
        for _ in range(count):
            yield batch, float(batch is not None)
        return
    ends = [size * i // count for i in range(count + 1)]
    for start, end in pairwise(ends):
        yield part_of(batch, start, end), (end - start) / max(size, 1)


def _norm(flat: Tensor) -> float:
    low_precision = flat.dtype in {torch.float16, torch.bfloat16}
    return float(torch.linalg.vector_norm(flat, dtype=torch.float32 if low_precision else None))


def _check_between_layers(model: nn.Module, check: Callable[[], None]) -> None:
    def before_forward(module: nn.Module, inputs: object) -> None:
        check()

    def after_forward(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(before_backward)

    def before_backward(gradient: Tensor) -> None:
        check()

    for module in model.modules():
        if not any(module.children()):
            module.register_forward_pre_hook(before_forward)
            module.register_forward_hook(after_forward)
