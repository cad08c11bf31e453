"""Job: model, loss, optimizer and data, and the settings of their use."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, Literal, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from paceline.errors import PacelineWarning, UsageError
from paceline.jobs.dataloader import LoaderParts, loader_parts
from paceline.jobs.metrics import Average
from paceline.jobs.model_checks import why_not_trained
from paceline.jobs.shared_memory import why_not_apart
from paceline.policies.learning_rate import LinearSchedule, LRScaling
from paceline.utils.argument_types import checked_types
from paceline.utils.representation import Representation, summarize_value
from paceline.utils.wording import counted


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require a gradient, tied ones once."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


Batch = Any
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

Metrics = Mapping[str, float | Tensor | Average]
Step = Callable[[nn.Module, Batch], "Tensor | tuple[Tensor, Metrics]"]


@runtime_checkable
class Samples(Protocol):
    """Protocol of map-style data that do not derive from torch's ``Dataset``."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: Any, /) -> Any:
        """Return a sample."""


@checked_types(
    batch_size=", such as batch_size=32",
    optimizer=" from the parameters to an optimizer, such as optimizer=partial(torch.optim.SGD, lr=0.1)",
    no_decay_on=", such as pl.jobs.BATCH_NORMS",
    schedule="; one of torch.optim.lr_scheduler is given as scheduler=",
)
@dataclass(frozen=True, kw_only=True, repr=False)
class Job(Representation):
    """Training job.

    Args:
        model: module, which is copied, or function that returns one.
        optimizer: function that returns a `torch.optim` optimizer, such as ``partial(torch.optim.SGD, lr=0.1)``. The
            name of its first argument selects what it receives: ``model`` the model, ``named_parameters`` the (name,
            parameter) pairs, any other name the parameters. Only parameters that require a gradient are passed.
        data: training data, map-style or iterable. Map-style data may have a method ``minibatch(indices)`` that returns
            a whole batch. Of a DataLoader, the job uses the data set, batch_size, collate_fn, num_workers,
            prefetch_factor and, with sampling="epoch", a custom sampler. Arguments of the job that differ from their
            defaults take precedence. A warning names the settings that are ignored.
        batch_size: samples in a worker's minibatch, >= 1; optional only if ``data`` is a DataLoader.
        loss: function ``loss(output, target)``, for data of (input, target) pairs.
        step: function ``step(model, batch) -> loss`` or ``(loss, metrics)``, for all other data; give loss or step.
            Metrics are used in evaluations: a number is averaged over samples, a `pl.jobs.Average` as it defines. A
            metric named "loss" replaces the evaluation loss.
        eval_data: evaluation data for the loss, ``accuracy`` and all other metrics; also a DataLoader. None for no
            evaluation.
        eval_batch_size: samples in a batch of the evaluation, >= 1; 0 for that of a DataLoader, or ``batch_size``.
        scheduler: function from the optimizer to a `torch.optim.lr_scheduler`, which is stepped by workload.
        schedule_unit: accepted work between two steps of the scheduler: a "gradient", an "epoch", an "update" of n
            gradients, where n is the number of workers at the start of the run, or a "sample", which is
            1 / batch_size of a gradient. So "update" is one step per update under BSP and all-reduce, and the same
            workload under every other protocol, for every quorum, also after workers are lost.
        schedule: schedule of learning rate and weight decay, instead of a scheduler; see `LinearSchedule`.
        no_decay_on: types of modules, such as `pl.jobs.BATCH_NORMS`, whose own parameters have no weight decay: they
            are passed to the optimizer in a parameter group with weight_decay=0.
        clip_norm: largest norm of the mean gradient, > 0; None for no clipping.
        lr_rule: "constant" or "proportional" to the gradients in an update as a share of the live workers, see
            `LRScaling`; or "noise", which follows the noise of the gradients and their staleness, see `NoiseRule`.
        lr_is: meaning of the optimizer's learning rate, "total" or "per_worker".
        lr_of: for lr_rule="noise", what the learning rate was tuned for: "bsp", or updates of this number of gradients.
        sampling: minibatches with "replacement", or every sample once per "epoch".
        sharding: data "shared" by all workers, or "partitioned" among them.
        on_drop: use of the minibatch of a dropped gradient, "requeue" or "discard".
        collate: function from a list of samples to a batch, None for torch's default.
        sampler: order of the samples of an epoch, for sampling="epoch" on shared data.
        weight: function from a batch to the number that its loss is a mean over, as its tokens that count, >= 0. The
            mean of an update weighs gradients by it, so that all tokens of an update count alike; None for the samples.
            A batch of weight 0 is not used.
        microbatches: parts in which a minibatch is computed, one after the other, >= 1.
        loader_workers: background processes, >= 0, that prepare minibatches ahead for each process that computes
            gradients; 0 prepares them in that process. They change the time of a run, not its results.
        prefetch: minibatches that each background process prepares ahead, >= 1.
        name: name of the job, for messages and folders.

    Raises:
        UsageError: an argument is missing, of the wrong kind, or contradicts another.

    Example:
        >>> from functools import partial
        >>> import torch
        >>> data = torch.utils.data.TensorDataset(torch.zeros(64, 2), torch.zeros(64, 1))
        >>> sgd, loss = partial(torch.optim.SGD, lr=0.1), torch.nn.functional.mse_loss
        >>> Job(model=torch.nn.Linear(2, 1), optimizer=sgd, data=data, batch_size=8, loss=loss).batch_size
        8
    """

    model: nn.Module | Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    data: Dataset[Any] | Samples | DataLoader[Any]
    batch_size: int = 0
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    step: Step | None = None
    eval_data: Dataset[Any] | Samples | DataLoader[Any] | None = None
    eval_batch_size: int = 0
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    schedule_unit: Literal["gradient", "epoch", "update", "sample"] = "gradient"
    schedule: LinearSchedule | None = None
    no_decay_on: Sequence[type[nn.Module]] = ()
    clip_norm: float | None = None
    lr_rule: Literal["constant", "proportional", "noise"] = "constant"
    lr_is: Literal["total", "per_worker"] = "total"
    lr_of: Literal["bsp"] | int = "bsp"
    sampling: Literal["replacement", "epoch"] = "replacement"
    sharding: Literal["shared", "partitioned"] = "shared"
    on_drop: Literal["requeue", "discard"] = "requeue"
    collate: Callable[[list[Any]], Batch] | None = None
    sampler: Sampler[int] | None = field(default=None, repr=False)
    weight: Callable[[Batch], float | Tensor] | None = None
    microbatches: int = 1
    loader_workers: int = 0
    prefetch: int = 2
    name: str = "job"

    def __post_init__(self) -> None:
        self._use_loaders()
        for count, least in _COUNTS.items():
            value = getattr(self, count)
            if value < least:
                optional = "; it is optional only if data is a DataLoader" if count == "batch_size" else ""
                raise self._error(f"{count} = {value!r}, expected a whole number >= {least}{optional}")
        if (self.loss is None) == (self.step is None):
            raise self._error("expected either loss=, for (input, target) pairs, or step= for anything else")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise self._error(f"clip_norm = {self.clip_norm!r}, expected a number > 0")
        if self.microbatches > self.batch_size:
            parts = f"{self.microbatches} microbatches of a minibatch of {self.batch_size}"
            raise self._error(f"{parts}; expected at most {self.batch_size}")
        if self.schedule is not None and self.scheduler is not None:
            raise self._error("give a schedule or a scheduler, not both")
        if self.is_iterable and self.sampling == "epoch":
            raise self._error("iterable data have no numbered samples; give sampling='replacement'")
        if self.is_iterable and self.sharding == "partitioned":
            raise self._error("iterable data are always split among the workers; give sharding='shared'")
        if self.sampler is not None and not self._orders_epochs:
            raise self._error(
                "a sampler orders epochs of shared data; give sampling='epoch' and sharding='shared' with it"
            )

    def _error(self, text: str) -> UsageError:
        return UsageError(f"job {self.name}: {text}")

    @property
    def _orders_epochs(self) -> bool:
        """Whether a sampler can order the data."""
        return (self.sampling, self.sharding) == ("epoch", "shared")

    def _use_loaders(self) -> None:
        """Replace a DataLoader by its parts, and warn of the settings that the job ignores."""
        if isinstance(self.data, DataLoader):
            parts = loader_parts(self.data, f"job {self.name}: data", self.sampling)
            self._use_parts("data", parts, "batch_size", sampler=self._sampler_of(parts))
        if isinstance(self.eval_data, DataLoader):
            parts = loader_parts(self.eval_data, f"job {self.name}: eval_data", None)
            if parts.sampler is not None:
                raise self._error(
                    f"eval_data is a DataLoader with a {type(parts.sampler).__name__}, but evaluation "
                    "reads every sample; give eval_data=torch.utils.data.Subset(dataset, indices)"
                )
            if parts.collate is not None and parts.collate != self.collate:
                raise self._error(
                    "eval_data is a DataLoader with another collate_fn than the training data; give "
                    "both the same collate_fn"
                )
            self._use_parts("eval_data", parts._replace(workers=0, prefetch=None), "eval_batch_size")

    def _use_parts(self, role: str, parts: LoaderParts, batch_size: str, sampler: Sampler[int] | None = None) -> None:
        values: dict[str, Any] = {batch_size: parts.batch_size, "collate": parts.collate, "sampler": sampler}
        values |= {"loader_workers": parts.workers, "prefetch": parts.prefetch}
        ignored = list(parts.ignored)
        for name, theirs in values.items():
            ours = getattr(self, name)
            if theirs in (None, _DEFAULTS[name]) or ours == theirs:
                continue
            if ours == _DEFAULTS[name]:
                object.__setattr__(self, name, theirs)
            else:
                ignored.append(f"its {name} {theirs} (the job's own {name}={ours} is used)")
        object.__setattr__(self, role, parts.data)
        if ignored:
            warnings.warn(
                f"job {self.name}: {role} is a DataLoader; the job ignores {', '.join(ignored)}",
                PacelineWarning,
                stacklevel=6,
            )

    def _sampler_of(self, parts: LoaderParts) -> Sampler[int] | None:
        if parts.sampler is None or self._orders_epochs:
            return parts.sampler
        raise self._error(
            f"data is a DataLoader with a {type(parts.sampler).__name__}, which orders epochs; give "
            "sampling='epoch' to use it, or data=loader.dataset and batch_size to ignore it"
        )

    def _facts(self) -> Mapping[str, object]:
        """Return the given arguments: a model by its size, data by their length, never their content."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        changed = {each.name: given[each.name] for each in fields(self) if each.default is not given[each.name]}
        first = {"name": self.name, "model": _describe_model(self.model)}
        return first | {name: _describe_data(value) for name, value in changed.items() if name not in first}

    @property
    def is_iterable(self) -> bool:
        """Whether the training data can only be read in sequence."""
        return isinstance(self.data, IterableDataset)

    @property
    def dataset(self) -> Dataset[Any]:
        """Training data."""
        assert not isinstance(self.data, DataLoader)  # replaced by its data set
        return cast("Dataset[Any]", self.data)  # or any `Samples`

    @property
    def eval_dataset(self) -> Dataset[Any] | None:
        """Evaluation data, None for no evaluation."""
        assert not isinstance(self.eval_data, DataLoader)  # replaced by its data set
        return cast("Dataset[Any] | None", self.eval_data)

    def gradients_per_schedule_step(self, per_epoch: float | None, workers: int) -> Fraction | None:
        """Return the accepted gradients between two steps of the scheduler, None if the data have no epochs.

        Args:
            per_epoch: gradients of one epoch, None for data without length.
            workers: workers at the start of the run, >= 1.
        """
        match self.schedule_unit:
            case "gradient":
                return Fraction(1)
            case "update":
                return Fraction(workers)
            case "sample":
                return Fraction(1, self.batch_size)
            case "epoch":
                return None if per_epoch is None else Fraction(per_epoch)

    @property
    def learning_rate(self) -> LRScaling:
        """Scaling of the learning rate by the number of gradients."""
        return LRScaling(self.lr_rule, self.lr_is)

    @property
    def minibatches_ahead(self) -> int:
        """Minibatches that the coordinator forecasts for each worker."""
        return 0

    def minibatches_per_epoch(self, shards: int = 1) -> int | None:
        """Return the number of whole minibatches in one pass over a shard, None for iterable data.

        The samples after the last whole minibatch are left out of the epoch; each epoch shuffles anew.
        """
        if self.is_iterable:
            return None
        samples = len(self.sampler) if self.sampler is not None else len(self.data)  # type: ignore[arg-type]
        if samples == 0:
            raise self._error("the data set is empty; give data with samples")
        per_shard = samples // shards // self.batch_size
        if per_shard == 0:
            of = f"one of {shards} shards of {counted(samples, 'sample')}" if shards > 1 else f"a data set of {samples}"
            raise self._error(f"{of} is smaller than a batch of {self.batch_size}; give a smaller batch_size")
        return per_shard

    def gradients_per_epoch(self, n: int) -> int | None:
        """Return the number of gradients in one epoch of n workers, None for iterable data."""
        shards = n if self.sharding == "partitioned" else 1
        per_shard = self.minibatches_per_epoch(shards)
        return per_shard and per_shard * shards

    def build_model(self, seed: int) -> nn.Module:
        """Return a new model, the same for the same seed."""
        if isinstance(self.model, nn.Module):
            self._check_apart(self.model)  # a copy has memory of its own
            model = copy.deepcopy(self.model)
        else:
            with torch.random.fork_rng(devices=[]):
                # Without CUDA, `torch.manual_seed` would record stack traces.
                (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(seed)
                model = self.model()
        if not isinstance(model, nn.Module):
            raise self._error(f"model() returned {type(model).__name__}, expected an nn.Module")
        self._check_model(model)
        self._check_apart(model)
        return model

    def _check_apart(self, model: nn.Module) -> None:
        if reason := why_not_apart(model):
            raise self._error(reason)

    def _check_model(self, model: nn.Module) -> None:
        if reason := why_not_trained(model):
            raise self._error(reason)
        if not trainable(model):
            raise self._error("the model has no parameters to train; expected at least one that requires a gradient")
        for path, module in model.named_modules():
            if getattr(module, "sparse", False) is True:
                raise self._error(
                    f"{path or type(module).__name__} makes sparse gradients, which do not fit in a flat vector; "
                    "build it with sparse=False"
                )

    def loss_of(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the mean loss of a batch, a scalar, and the metrics of the batch."""
        if self.step is not None:
            answer = self.step(model, batch)
            loss, metrics = answer if isinstance(answer, tuple) else (answer, {})
        else:
            assert self.loss is not None
            inputs, target = self._pair(batch)
            output = model(inputs)
            loss = self.loss(output, target)
            metrics = {} if model.training else _accuracy(output, target)
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise self._error(f"the loss is not a scalar (given {got}); reduce it with .mean()")
        return loss, metrics

    def _pair(self, batch: Batch) -> tuple[Any, Tensor]:
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return batch[0], batch[1]
        raise self._error(
            f"loss= needs batches of (input, target), given {type(batch).__name__}; give step= for other batches"
        )


def _describe_model(model: nn.Module | Callable[[], nn.Module]) -> str:
    if not isinstance(model, nn.Module):
        return summarize_value(model)
    return f"{type(model).__name__} of {sum(each.numel() for each in model.parameters()):,} parameters"


def _describe_data(value: object) -> object:
    if not isinstance(value, Dataset | Sampler):
        return value
    return f"{type(value).__name__} of {len(value):,}" if isinstance(value, Sized) else type(value).__name__


_COUNTS = {"batch_size": 1, "microbatches": 1, "eval_batch_size": 0, "loader_workers": 0, "prefetch": 1}
_DEFAULTS = {each.name: each.default for each in fields(Job)}


def _accuracy(output: Any, target: Tensor) -> Metrics:
    is_classification = (
        isinstance(output, Tensor) and output.ndim == 2 and target.ndim == 1 and not target.is_floating_point()
    )
    return {"accuracy": (output.argmax(dim=1) == target).float().mean()} if is_classification else {}
