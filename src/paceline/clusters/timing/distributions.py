"""Distributions of compute times, sampled by their quantile functions (inverse CDF).

Each sample uses one uniform number. So the d-th draw of a worker does not depend on how draws are grouped, and two
distributions with the same random stream are coupled: their samples have the same order.
"""

import csv
from collections.abc import Callable, Mapping
from math import exp, inf, isclose
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError, did_you_mean
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.files import ContentError, open_table
from paceline.utils.spec_parser import bind, parse_call
from paceline.utils.validation import check_range

Array = NDArray[np.float64]


@runtime_checkable
class Distribution(Protocol):
    """Distribution of the seconds of one gradient computation; draws are independent."""

    @property
    def expectation_s(self) -> float:
        """Mean in seconds, > 0; may be inf."""

    def quantile(self, u: Array) -> Array:
        """Return the quantiles in seconds for probabilities u in [0, 1)."""


@checked_dataclass(frozen=True)
class Deterministic:
    """Constant time of ``value_s`` seconds.

    Args:
        value_s: seconds, > 0.
    """

    value_s: float

    def __post_init__(self) -> None:
        check_range("(0, inf)", value_s=self.value_s)

    @property
    def expectation_s(self) -> float:
        """Mean in seconds."""
        return self.value_s

    def quantile(self, u: Array) -> Array:
        """Return ``value_s`` for each u in [0, 1)."""
        return np.full_like(u, self.value_s)


@checked_dataclass(frozen=True)
class Uniform:
    """Uniform distribution: ``low_s + (high_s - low_s) * u``.

    Args:
        low_s: lower bound in seconds, >= 0.
        high_s: upper bound in seconds, > low_s.
    """

    low_s: float
    high_s: float

    def __post_init__(self) -> None:
        check_range("[0, inf)", low_s=self.low_s)
        check_range(f"({self.low_s}, inf)", high_s=self.high_s)

    @property
    def expectation_s(self) -> float:
        """Mean in seconds."""
        return (self.low_s + self.high_s) / 2

    def quantile(self, u: Array) -> Array:
        """Return ``low_s + (high_s - low_s) * u``."""
        return self.low_s + (self.high_s - self.low_s) * u


@checked_dataclass(frozen=True)
class Exponential:
    """Exponential distribution: ``-mean_s * log(1 - u)``.

    Args:
        mean_s: mean in seconds, > 0.

    >>> Exponential(mean_s=2.0).quantile(np.array([0.0, 0.5]))
    array([0.        , 1.38629436])
    """

    mean_s: float

    def __post_init__(self) -> None:
        check_range("(0, inf)", mean_s=self.mean_s)

    @property
    def expectation_s(self) -> float:
        """Mean in seconds."""
        return self.mean_s

    def quantile(self, u: Array) -> Array:
        """Return ``-mean_s * log(1 - u)``."""
        return -self.mean_s * np.log1p(-u)


@checked_dataclass(frozen=True)
class ShiftedExponential:
    """Shifted exponential distribution: ``shift_s - mean_s * log(1 - u)``.

    Args:
        shift_s: constant part in seconds, >= 0.
        mean_s: mean of the exponential part alone in seconds, > 0; the mean of the sum is ``expectation_s``.

    >>> ShiftedExponential(shift_s=0.3, mean_s=0.7).expectation_s
    1.0

    Source: Xu et al., "Dynamic Backup Workers", 2020, Sect. 4.1: ``1 - alpha + alpha * Exp(1)`` is
    ``ShiftedExponential(shift_s=1 - alpha, mean_s=alpha)``.
    """

    shift_s: float
    mean_s: float

    def __post_init__(self) -> None:
        check_range("[0, inf)", shift_s=self.shift_s)
        check_range("(0, inf)", mean_s=self.mean_s)

    @property
    def expectation_s(self) -> float:
        """Mean of the sum in seconds."""
        return self.shift_s + self.mean_s

    def quantile(self, u: Array) -> Array:
        """Return ``shift_s - mean_s * log(1 - u)``."""
        return self.shift_s - self.mean_s * np.log1p(-u)


@checked_dataclass(frozen=True)
class Pareto:
    """Pareto distribution (type I), with a heavy tail: ``scale_s * (1 - u) ** (-1 / shape)``.

    Args:
        scale_s: smallest value in seconds, > 0.
        shape: tail index, > 0; the mean is infinite if it is 1 or less.

    Source: Dutta et al., "Slow and Stale Gradients Can Win the Race", AISTATS 2018, Fig. 5: Pareto(2, 1).
    """

    scale_s: float
    shape: float

    def __post_init__(self) -> None:
        check_range("(0, inf)", scale_s=self.scale_s, shape=self.shape)

    @property
    def expectation_s(self) -> float:
        """Mean in seconds; inf if shape <= 1."""
        return self.scale_s * self.shape / (self.shape - 1) if self.shape > 1 else inf

    def quantile(self, u: Array) -> Array:
        """Return ``scale_s * (1 - u) ** (-1 / shape)``."""
        return self.scale_s * (1 - u) ** (-1 / self.shape)


@checked_dataclass(frozen=True)
class LogNormal:
    """Log-normal distribution: ``median_s * exp(sigma * z)``, where z is the standard normal quantile of u.

    Args:
        median_s: median in seconds, > 0.
        sigma: standard deviation of the logarithm, > 0.
    """

    median_s: float
    sigma: float

    def __post_init__(self) -> None:
        check_range("(0, inf)", median_s=self.median_s, sigma=self.sigma)

    @property
    def expectation_s(self) -> float:
        """Mean in seconds, ``median_s * exp(sigma**2 / 2)``."""
        return self.median_s * exp(self.sigma**2 / 2)

    def quantile(self, u: Array) -> Array:
        """Return ``median_s * exp(sigma * z)``."""
        from scipy.special import ndtri  # here, because it is slow to import

        return np.asarray(self.median_s * np.exp(self.sigma * ndtri(u)))


@checked_dataclass(frozen=True)
class Gamma:
    """Gamma distribution; for a whole shape, the sum of ``shape`` exponential stages.

    Args:
        shape: shape, > 0; 1 is the exponential, larger shapes vary less.
        mean_s: mean in seconds, > 0.
    """

    shape: float
    mean_s: float

    def __post_init__(self) -> None:
        check_range("(0, inf)", shape=self.shape, mean_s=self.mean_s)

    @property
    def expectation_s(self) -> float:
        """Mean in seconds."""
        return self.mean_s

    def quantile(self, u: Array) -> Array:
        """Return ``mean_s / shape`` times the quantile of the standard gamma distribution."""
        from scipy.special import gammaincinv

        return np.asarray(self.mean_s / self.shape * gammaincinv(self.shape, u))


@checked_dataclass(frozen=True)
class HyperExponential:
    """Hyperexponential distribution: a mixture of exponentials, with a branch chosen at each draw.

    ``P(time > x) = sum_i probabilities[i] * exp(-x / means_s[i])``

    Args:
        means_s: mean of each branch in seconds, > 0.
        probabilities: probability of each branch, in (0, 1], with sum 1.

    >>> HyperExponential(means_s=(1.0, 11.0), probabilities=(0.9, 0.1)).expectation_s
    2.0
    """

    means_s: tuple[float, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("means_s", "probabilities"):
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        for mean_s in self.means_s:
            check_range("(0, inf)", means_s=mean_s)
        for probability in self.probabilities:
            check_range("(0, 1]", probabilities=probability)
        if len(self.means_s) != len(self.probabilities) or not isclose(sum(self.probabilities), 1):
            expected = f"{len(self.means_s)} numbers with sum 1, one for each mean"
            raise UsageError(f"probabilities={self.probabilities}, expected {expected}")

    @property
    def expectation_s(self) -> float:
        """Mean in seconds."""
        return sum(p * mean_s for p, mean_s in zip(self.probabilities, self.means_s, strict=True))

    def quantile(self, u: Array) -> Array:
        """Solve ``P(time > x) = 1 - u`` for x."""
        # log P(time > x) is convex and decreasing, so Newton's method from 0 never overshoots.
        means_s, probabilities = np.array(self.means_s), np.array(self.probabilities)
        target, x, step = np.log1p(-u), np.zeros_like(u), np.full_like(u, inf)
        while np.any(step > 1e-13 * means_s.max()):
            branches = probabilities * np.exp(-x[..., None] / means_s)
            survival = branches.sum(-1)
            step = (np.log(survival) - target) * survival / (branches / means_s).sum(-1)
            x = x + np.maximum(step, 0)  # a negative step is rounding
        return x


@checked_dataclass(frozen=True)
class Empirical:
    """Empirical distribution of measured times, all equally probable.

    Args:
        values_s: measured times in seconds, > 0, at least one; stored sorted.

    >>> Empirical(values_s=(3.0, 1.0)).quantile(np.array([0.0, 0.49, 0.5]))
    array([1., 1., 3.])
    """

    values_s: tuple[float, ...]

    def __post_init__(self) -> None:
        values_s = _numbers("values_s", self.values_s)
        for value_s in values_s:
            check_range("(0, inf)", values_s=value_s)
        object.__setattr__(self, "values_s", tuple(sorted(values_s)))

    @classmethod
    def from_csv(cls, path: str | Path, column: str) -> "Empirical":
        """Read the values from a column of a CSV file with a header line.

        Raises:
            UsageError: the file cannot be read, has no such column, or has a value that is not a number > 0.
        """
        try:
            with open_table(path) as file:
                rows = csv.DictReader(file)
                if column not in (rows.fieldnames or ()):
                    raise UsageError(f"{path} has no column {column!r}{did_you_mean(column, rows.fieldnames or ())}")
                return cls(tuple(_seconds(row[column], f"{path}, line {rows.line_num}") for row in rows))
        except (OSError, ContentError, csv.Error) as error:
            raise UsageError(f"cannot read the measured times: {error}") from error

    @property
    def expectation_s(self) -> float:
        """Mean in seconds."""
        return sum(self.values_s) / len(self.values_s)

    def quantile(self, u: Array) -> Array:
        """Return the value of rank ``floor(u * len(values_s))``, counted from 0."""
        ranks = (u * len(self.values_s)).astype(np.intp)
        # The tuple is indexed directly, because an array of a long trace would be built at every call.
        return np.array([self.values_s[rank] for rank in ranks.flat]).reshape(u.shape)


def _numbers(name: str, given: object) -> tuple[float, ...]:
    if not isinstance(given, (list, tuple)) or not given:
        raise UsageError(f"{name}={given!r} is not a list of at least one number: type for example {name}=[1.0, 2.0]")
    return tuple(given)


def _seconds(cell: str | None, where: str) -> float:
    try:
        value_s = float(cell or "")
        check_range("(0, inf)", value_s=value_s)
    except ValueError as error:
        raise UsageError(f"{where}: {cell!r} is not a number of seconds in (0, inf)") from error
    return value_s


DISTRIBUTIONS: Mapping[str, Callable[..., Distribution]] = {
    "deterministic": Deterministic,
    "uniform": Uniform,
    "exp": Exponential,
    "shifted_exp": ShiftedExponential,
    "pareto": Pareto,
    "lognormal": LogNormal,
    "gamma": Gamma,
    "hyper_exp": HyperExponential,
    "empirical": Empirical.from_csv,
}

# The quantile of one probability does not depend on the others in the array; the vectorized simulation evaluates other
# distributions row by row, as `RoundTrips` does.
ELEMENTWISE = (Deterministic, Empirical, Exponential, Gamma, LogNormal, Pareto, ShiftedExponential, Uniform)


def parse_distribution(text: str) -> Distribution:
    """Parse a distribution as typed on the command line; the suffix ``_s`` of a knob is optional.

    >>> parse_distribution("shifted_exp(shift=0.3, mean=0.7)")
    ShiftedExponential(shift_s=0.3, mean_s=0.7)
    """
    return bind(parse_call(text, "exp(mean=1)"), DISTRIBUTIONS)
