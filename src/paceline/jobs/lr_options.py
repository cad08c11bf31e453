"""Learning-rate and weight-decay options of the built-in jobs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from inspect import Parameter, signature
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

from torch import nn, optim
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from paceline.errors import UsageError, did_you_mean
from paceline.jobs.job import BATCH_NORMS, Job
from paceline.policies.learning_rate import LinearSchedule, LRScaling
from paceline.utils.argument_types import checked_types
from paceline.utils.spec_parser import bind, parse_call
from paceline.utils.validation import check_range

MakeModel = Callable[[], nn.Module]


def choose_model(name: str, models: Mapping[str, MakeModel]) -> MakeModel:
    """Return the model of this name.

    Raises:
        UsageError: there is no such model; the message names the nearest one.
    """
    typed = str(name)  # the command line parses a word of digits as a number
    if typed not in models:
        raise UsageError(f"this job has no model '{typed}'{did_you_mean(typed, models)}")
    return models[typed]


def sgd(lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> partial[optim.SGD]:
    """Return a factory of SGD that takes the parameters.

    Raises:
        UsageError: ``lr`` is not > 0, or ``momentum`` is not in [0, 1).
    """
    check_range("(0, inf)", lr=lr)
    check_range("[0, 1)", momentum=momentum)
    return partial(optim.SGD, lr=lr, momentum=momentum, weight_decay=weight_decay)


def classification(
    *,
    name: str,
    model: MakeModel,
    optimizer: partial[optim.SGD],
    train: Dataset[Any],
    test: Dataset[Any],
    batch_size: int,
) -> Job:
    """Return a job that trains a classifier by cross-entropy, and evaluates it on the test data."""
    return Job(
        name=name,
        model=model,
        optimizer=optimizer,
        data=train,
        batch_size=batch_size,
        loss=cross_entropy,
        eval_data=test,
    )


@contextmanager
def fetch_advice(name: str, folder: Path) -> Iterator[None]:
    """Add the command that downloads the data set ``name`` to errors of its files in ``folder``."""
    try:
        yield
    except UsageError as error:
        advice = f"run 'paceline data fetch {name} --to {folder}' or give folder=PATH"
        raise UsageError(f"{error}; {advice}") from error


SCHEDULES = {"linear": LinearSchedule}


@checked_types(decay_at=", gradients in brackets, such as [32000, 48000]")
def scheduled(
    job: Job,
    *,
    lr_rule: Literal["constant", "proportional", "noise"] = "constant",
    lr_is: Literal["total", "per_worker"] = "total",
    lr_of: Literal["bsp"] | int = "bsp",
    decay_at: Sequence[int] = (),
    decay_by: float = 0.1,
    schedule: str | LinearSchedule | None = None,
    decay_norms: bool = True,
) -> Job:
    """Return a copy of a job with learning-rate scaling by quorum, and a schedule by workload.

    Args:
        job: job to copy.
        lr_rule: "constant" or "proportional" to the gradients in an update as a share of the live workers, or "noise";
            see `LRScaling`.
        lr_is: meaning of the optimizer's learning rate, "total" or "per_worker".
        lr_of: for lr_rule="noise", what the learning rate was tuned for: "bsp", or updates of this number of gradients.
        decay_at: numbers of used gradients after which the learning rate is multiplied by ``decay_by``, rising, >= 1.
        decay_by: factor, in (0, 1].
        schedule: `LinearSchedule`, or its text: "linear", "linear(warm_up_until='epochs=15')".
        decay_norms: whether weight decay applies to the parameters of batch normalization.

    Raises:
        UsageError: ``decay_at`` does not rise or has other values than whole numbers, or an option is out of its range.

    Example:
        >>> import paceline as pl
        >>> job = pl.jobs.scheduled(pl.jobs.digits(momentum=0.9), lr_rule="proportional", lr_is="per_worker")
        >>> job.learning_rate.scale(k=4, n=8)
        4.0

    Source: Li et al. (Sync-Switch), ICDCS 2021, Sect. IV-C and VI-A: proportional, per_worker, and [32000, 48000]
    of 64,000 minibatches. Rigazzi (DC-S3GD), 2019, Sect. IV-A: proportional, per_worker, linear, and no decay of norms.
    """
    if isinstance(schedule, str):
        schedule = bind(parse_call(schedule, "linear(warm_up_until='epochs=2')"), SCHEDULES)
    check_range("(0, 1]", decay_by=decay_by)
    LRScaling(lr_rule, lr_is)  # raises for other words
    at = _milestones(decay_at)
    decay = partial(LambdaLR, lr_lambda=partial(decayed, at=at, by=decay_by)) if at else job.scheduler
    return replace(
        job,
        lr_rule=lr_rule,
        lr_is=lr_is,
        lr_of=lr_of,
        scheduler=decay,
        schedule_unit="gradient" if at else job.schedule_unit,
        schedule=schedule or job.schedule,
        no_decay_on=job.no_decay_on if decay_norms else BATCH_NORMS,
    )


def decayed(gradients: int, at: Sequence[int], by: float) -> float:
    """Return the factor on the learning rate after this number of gradients.

    >>> [f"{decayed(gradients, at=(32_000, 48_000), by=0.1):.2f}" for gradients in (31_999, 32_000, 48_000)]
    ['1.00', '0.10', '0.01']
    """
    return float(by ** sum(gradients >= each for each in at))


def with_training_options(make: Callable[..., Job]) -> Callable[..., Job]:
    """Return a factory of the same jobs that also takes the options of `scheduled`."""
    options = {
        name: each for name, each in signature(scheduled).parameters.items() if each.kind is Parameter.KEYWORD_ONLY
    }

    @wraps(make)
    def made(**settings: Any) -> Job:
        given = {name: settings.pop(name) for name in options if name in settings}
        job = make(**settings)
        return scheduled(job, **given) if given else job

    own = signature(make)
    made.__signature__ = own.replace(parameters=[*own.parameters.values(), *options.values()])  # type: ignore[attr-defined]
    return made


def _milestones(given: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(given, list | tuple):
        raise UsageError(f"decay_at={given!r}, expected gradients in brackets, such as [32000, 48000]")
    for each in given:
        check_range("[1, inf)", Integral, decay_at=each)
    if any(after <= before for before, after in pairwise(given)):
        raise UsageError(f"decay_at={list(given)} does not rise: give the gradients in rising order")
    return tuple(given)
