"""Targets on the metrics of an evaluation, such as ``nll<=1.4``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from math import isfinite, log
from typing import Any, Literal, NamedTuple

from paceline.core.events import Outcome
from paceline.errors import UsageError, did_you_mean

Comparison = Literal["<=", ">="]
MetricTarget = tuple[str, Comparison, float]

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}
_OUTCOMES = {"accuracy": Outcome.ACCURACY, "loss": Outcome.EVAL_LOSS}
_PLAIN_NAME = re.compile(r"[^\s,<>=]([^,<>=]*[^\s,<>=])?")


class Target(NamedTuple):
    """Bound that a metric of an evaluation must reach.

    Attributes:
        metric: name of the metric in the evaluation; "loss" for the evaluation loss.
        comparison: "<=" or ">=".
        value: bound.

    Example:
        >>> Target("nll", "<=", 1.4).is_met_by(1.3)
        True
    """

    metric: str
    comparison: Comparison
    value: float

    def __str__(self) -> str:
        """Return the target in the form of `--stop`."""
        name = "eval_loss" if self.metric == "loss" else self.metric
        return f"{name}{self.comparison}{self.value}"

    @property
    def outcome(self) -> Outcome:
        """Outcome of a run that reaches it."""
        return _OUTCOMES.get(self.metric, Outcome.METRIC)

    @property
    def description(self) -> str:
        """Short description for tables and sentences."""
        match self.metric, self.comparison:
            case "loss", "<=":
                return f"evaluated loss {self.value:g}"
            case "accuracy", ">=":
                return f"accuracy {self.value:g}"
        return f"{self.metric} {self.comparison} {self.value:g}"

    def is_met_by(self, value: float) -> bool:
        """Return whether a value reaches the bound; nan never does."""
        return _COMPARISONS[self.comparison](value, self.value)

    def reached(self, value: float, version: int) -> str:
        """Return the reason for ending the run at a version with this value."""
        if self.outcome is Outcome.ACCURACY:
            return f"accuracy {value:.4f} of version {version} reached the target {self.value:g}"
        name = "evaluated loss" if self.outcome is Outcome.EVAL_LOSS else self.metric
        return f"{name} {value:.6g} of version {version} reached the target {self.value:g}"

    def missing(self, known: Sequence[str]) -> str:
        """Return the error for an evaluation without this metric."""
        hint = did_you_mean(self.metric, known)
        return (
            f"stop {self}: the evaluation reports no metric {self.metric!r}{hint}; return it from step as "
            f"(loss, {{{self.metric!r}: ...}})"
        )

    def not_finite(self, version: int) -> str:
        """Return the error for a metric that is nan or infinite."""
        name = "the evaluation loss" if self.outcome is Outcome.EVAL_LOSS else self.metric
        return f"stop {self}: {name} of version {version} is not finite (nan or infinite), so it cannot be compared"


def targets(given: Any) -> Iterator[Target]:
    """Yield the targets of ``Stop(metric=...)``: one (name, comparison, value) or several of them.

    Raises:
        UsageError: given is something else.
    """
    if given is None:
        return
    if not isinstance(given, tuple | list) or not given:
        raise _expected(given)
    for each in [given] if isinstance(given[0], str) else given:
        if not isinstance(each, tuple | list) or len(each) != 3:
            raise _expected(each)
        yield _checked(*each)


def _checked(name: Any, comparison: Any, value: Any) -> Target:
    if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
        raise UsageError(f"stop metric {name!r}, expected the name of a metric, without any of , < > = in it")
    if comparison not in _COMPARISONS:
        raise UsageError(f"stop metric {name} {comparison!r} {value!r}, expected '<=' or '>=' between name and bound")
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        raise UsageError(f"stop metric {name}{comparison}{value!r}, expected a finite number as the bound")
    return Target(name, comparison, value)


def _expected(given: object) -> UsageError:
    return UsageError(f"stop metric = {given!r}, expected (name, comparison, bound), as ('nll', '<=', 1.4)")


def share_reached(first: float, now: float, bound: float) -> float:
    """Return the progress of a value from its first value to a bound, in [0, 1].

    Positive values are compared on a logarithmic scale, on which a loss falls most evenly.

    >>> share_reached(4.0, 2.0, 1.0), share_reached(0.5, 0.7, 0.9)
    (0.5, 0.57...)
    """
    if not all(map(isfinite, (first, now, bound))) or first == bound:
        return 0.0
    if min(first, now, bound) > 0:
        first, now, bound = log(first), log(now), log(bound)
    return min(1.0, max(0.0, (now - first) / (bound - first)))
