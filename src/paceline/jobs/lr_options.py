"""How learning rate and weight decay follow quorum and workload: the same knobs for all of paceline's own jobs."""

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
from torch.optim.lr_scheduler import LambdaLR

from paceline.errors import UsageError, did_you_mean
from paceline.jobs.job import BATCH_NORMS, Job
from paceline.policies.learning_rate import LinearSchedule, LRScaling
from paceline.utils.argument_types import checked_types
from paceline.utils.spec_parser import bind, parse_call
from paceline.utils.validation import check_range

MakeModel = Callable[[], nn.Module]


def choose_model(name: str, models: Mapping[str, MakeModel]) -> MakeModel:
    """Return the model called ``name``.

    Raises:
        UsageError: there is no such model; the text names the nearest one.
    """
    typed = str(name)  # the command line reads a word of digits as a number
    if typed not in models:
        raise UsageError(f"this job has no model '{typed}'{did_you_mean(typed, models)}")
    return models[typed]


def sgd(lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> partial[optim.SGD]:
    """Return stochastic gradient descent, to be given the parameters.

    Raises:
        UsageError: ``lr`` is not > 0, or ``momentum`` is not in [0, 1).
    """
    check_range("(0, inf)", lr=lr)
    check_range("[0, 1)", momentum=momentum)
    return partial(optim.SGD, lr=lr, momentum=momentum, weight_decay=weight_decay)


@contextmanager
def fetch_advice(name: str, folder: Path) -> Iterator[None]:
    """Add what to type to any error in the files of data set ``name`` in ``folder``."""
    try:
        yield
    except UsageError as error:
        advice = f"run 'paceline data fetch {name} --to {folder}' or give folder=PATH"
        raise UsageError(f"{error}; {advice}") from error


SCHEDULES = {"linear": LinearSchedule}


@checked_types(decay_at=", gradients in brackets, as [32000, 48000]")
def scheduled(
    job: Job,
    *,
    lr_rule: Literal["constant", "proportional"] = "constant",
    lr_is: Literal["total", "per_worker"] = "total",
    decay_at: Sequence[int] = (),
    decay_by: float = 0.1,
    schedule: str | LinearSchedule | None = None,
    decay_norms: bool = True,
) -> Job:
    """Return the job with a learning rate that follows the quorum, and one or the other schedule by workload.

    Args:
        job: which is left as it is.
        lr_rule: "constant" or "proportional" to the gradients in an update; see `LRScaling`.
        lr_is: whether the optimizer's rate is the "total" one or "per_worker".
        decay_at: gradients (minibatches that were used) after which the rate is multiplied by ``decay_by``, each time
            anew; rising.
        decay_by: factor, in (0, 1].
        schedule: `LinearSchedule`, also as typed: "linear", or "linear(warm_up_until='epochs=15')" with its knobs.
        decay_norms: whether the parameters of batch normalization get weight decay as the others do.

    Raises:
        UsageError: the gradients are no rising whole numbers, or a knob is out of its range.

    Example:
        >>> import paceline as pl
        >>> job = pl.jobs.scheduled(pl.jobs.digits(momentum=0.9), lr_rule="proportional", lr_is="per_worker")
        >>> job.learning_rate.scale(k=4, n=8)
        4.0

    Source: Li et al. (Sync-Switch), ICDCS 2021, Sect. IV-C and VI-A, where they are proportional, per_worker and
    [32000, 48000] of 64,000 minibatches. Rigazzi (DC-S3GD), 2019, Sect. IV-A, where they are proportional, per_worker,
    linear, and without decay of norms.
    """
    check_range("(0, 1]", decay_by=decay_by)
    LRScaling(lr_rule, lr_is)  # which refuses other words
    at = _milestones(decay_at)
    decay = partial(LambdaLR, lr_lambda=partial(decayed, at=at, by=decay_by)) if at else job.scheduler
    return replace(
        job,
        lr_rule=lr_rule,
        lr_is=lr_is,
        scheduler=decay,
        schedule_unit="gradient" if at else job.schedule_unit,
        schedule=_schedule(schedule) if schedule is not None else job.schedule,
        no_decay_on=job.no_decay_on if decay_norms else BATCH_NORMS,
    )


def decayed(gradients: int, at: Sequence[int], by: float) -> float:
    """Return the factor on the learning rate after so many gradients.

    >>> [f"{decayed(gradients, at=(32_000, 48_000), by=0.1):.2f}" for gradients in (31_999, 32_000, 48_000)]
    ['1.00', '0.10', '0.01']
    """
    return float(by ** sum(gradients >= each for each in at))


def with_training_knobs(make: Callable[..., Job]) -> Callable[..., Job]:
    """Return what makes the same jobs and takes the knobs of `scheduled` besides."""
    knobs = {
        name: knob for name, knob in signature(scheduled).parameters.items() if knob.kind is Parameter.KEYWORD_ONLY
    }

    @wraps(make)
    def made(**settings: Any) -> Job:
        beside = {name: settings.pop(name) for name in knobs if name in settings}
        job = make(**settings)
        return scheduled(job, **beside) if beside else job

    own = signature(make)
    made.__signature__ = own.replace(parameters=[*own.parameters.values(), *knobs.values()])  # type: ignore[attr-defined]
    return made


def _schedule(given: str | LinearSchedule) -> LinearSchedule:
    return bind(parse_call(given), SCHEDULES) if isinstance(given, str) else given


def _milestones(given: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(given, list | tuple):
        raise UsageError(f"decay_at={given!r}, expected gradients in brackets, as [32000, 48000]")
    for each in given:
        check_range("[1, inf)", Integral, decay_at=each)
    if any(after <= before for before, after in pairwise(given)):
        raise UsageError(f"decay_at={list(given)} does not rise; give the gradients in rising order")
    return tuple(given)
