"""Averages of evaluation metrics over batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, nan
from typing import SupportsFloat

from paceline.errors import UsageError
from paceline.utils.argument_types import checked_types


@checked_types
@dataclass(frozen=True)
class Average:
    """Metric of one batch as a sum and a count; the evaluation reports the sum of sums over the sum of counts.

    metric = transform(sum of totals / sum of counts), over all batches of the evaluation data.

    `Job.step` returns an `Average` for a metric that is not a mean over samples:

    - by sum and count, for a mean over tokens: ``Average(nll_sum, tokens)``
    - by batch, with equal weights: ``Average(value)``
    - by sample: a plain number, the mean over the batch's samples, needs no `Average`.

    Args:
        total: sum over the batch, a number or scalar tensor.
        count: number of terms in the sum, a number or scalar tensor >= 0.
        transform: function of the mean over all batches, such as `math.exp` for a perplexity; None for the mean itself.

    Example:
        Perplexity is the exponential of the mean over tokens, not a mean of the batches' perplexities:

        >>> from math import exp, log
        >>> averages = Averages("demo")
        >>> averages.add({"perplexity": Average(3 * log(2.0), 3, exp)}, samples=1)  # 3 tokens of probability 1/2
        >>> averages.add({"perplexity": Average(1 * log(8.0), 1, exp)}, samples=1)  # 1 token of probability 1/8
        >>> round(averages.means()["perplexity"], 6) == round(exp((3 * log(2.0) + log(8.0)) / 4), 6)
        True
    """

    total: SupportsFloat
    count: SupportsFloat = 1
    transform: Callable[[float], float] | None = None


class Averages:
    """Running averages of all metrics of an evaluation, in float64.

    Args:
        job: name of the job, for errors.

    Raises:
        UsageError: by `add`, the name of a metric is not text, or its value is not a number.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._averages: dict[str, Average] = {}

    def add(self, metrics: Mapping[str, SupportsFloat | Average], samples: int) -> None:
        """Add the metrics of a batch; a plain number is weighted by the samples of the batch."""
        for name, value in metrics.items():
            if not isinstance(name, str):
                raise UsageError(f"job {self._job}: a metric is named {name!r}; expected text, such as 'accuracy'")
            given = value if isinstance(value, Average) else Average(self._number(name, value) * samples, samples)
            before = self._averages.get(name, Average(0.0, 0.0))
            total = float(before.total) + self._number(name, given.total)
            count = float(before.count) + self._number(name, given.count)
            self._averages[name] = Average(total, count, given.transform)

    def means(self) -> dict[str, float]:
        """Return the means; nan for a count of 0."""
        return {name: self._mean(name, average) for name, average in self._averages.items()}

    def _mean(self, name: str, average: Average) -> float:
        mean = float(average.total) / float(average.count) if average.count else nan
        if average.transform is None:
            return mean
        try:
            return self._number(name, average.transform(mean))
        except OverflowError:  # math.exp of an untrained model's loss
            return inf

    def _number(self, name: str, value: SupportsFloat) -> float:
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            shape = getattr(value, "shape", None)
            given = type(value).__name__ if shape is None else f"a {type(value).__name__} of shape {list(shape)}"
            raise UsageError(
                f"job {self._job}: metric {name!r} is {given}; expected a number, a scalar tensor or a pl.jobs.Average"
            ) from None
