"""What the jobs share: picking a model by name, an optimizer, and the advice in errors about files."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from torch import nn, optim

from paceline.checks import check
from paceline.errors import UsageError, did_you_mean

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
    check("(0, inf)", lr=lr)
    check("[0, 1)", momentum=momentum)
    return partial(optim.SGD, lr=lr, momentum=momentum, weight_decay=weight_decay)


@contextmanager
def fetch_advice(name: str, folder: Path) -> Iterator[None]:
    """Add what to type to any error in the files of data set ``name`` in ``folder``."""
    try:
        yield
    except UsageError as error:
        advice = f"run 'paceline data fetch {name} --to {folder}' or give folder=PATH"
        raise UsageError(f"{error}; {advice}") from error
