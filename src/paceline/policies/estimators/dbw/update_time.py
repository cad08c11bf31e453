"""Update-time estimation of DBW: the expected seconds of an update with a constant quorum k.

t_{h,i} is the time from a new version to the i-th gradient of that version. h is the quorum of the update before, and
so the number of workers that start at once. The means of t_{h,i} satisfy order relations (DBW, Sect. 3.2). The
estimates are their least-squares fit to all samples, problem (17) of the paper:

    minimize    sum over the samples y of each cell (h, k) of (y - x_{h,k})^2
    subject to  x_{h,k} <= x_{h,k+1},   x_{h+1,k} <= x_{h,k},   x_{k,k} <= x_{k+1,k+1}.

**Structure.** Let L_h be the part k < h of row h, U_h the part k > h, and D the diagonal. The constraints lead from
L_h to L_{h-1} and finally to D, from D to U_h, from there to U_{h-1}, and never back. So with the levels

    L_n < ... < L_2 < D < U_{n-1} < ... < U_1

they state that x does not decrease with the level or with the column k. `isotonic` fits this two-dimensional order
over the cells that have samples. The estimate of T_k = E[t_{k,k}] is x_{k,k}. If (k, k) has no samples, every value
between the cells that it dominates and those that dominate it is optimal. Which value of this interval
[lower_k, upper_k] to take is a separate rule.

Xu, Neglia, Sebastianelli: "Dynamic Backup Workers for Parallel Machine Learning", 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np

from paceline.errors import UsageError
from paceline.policies.estimators.dbw.isotonic import Floats, IsotonicFit
from paceline.utils.validation import check_optional_range, check_range

Unobserved = Literal["lower", "mid", "upper"]
Cell = tuple[int, int]  # (h, i)
Sample = tuple[int, float]  # (version, t_s)

LARGEST_WEIGHT, LEAST_WEIGHT = 2.0**32, 2.0**-8


@dataclass(frozen=True)
class UpdateTimeSamples:
    """Estimated seconds of an update with a quorum of 1 to n; none of the three arrays decreases.

    Attributes:
        lower: smallest optimal x_{k,k} [n]; 0 if no sample bounds it, because times are not negative.
        upper: largest optimal x_{k,k} [n], equal to `lower` where (k, k) has samples; inf if no sample bounds it.
        times: chosen value between the two [n], always finite.
    """

    lower: Floats
    upper: Floats
    times: Floats


class UpdateTimeEstimator:
    """Estimator of E[t_{k,k}] for all k from samples of t_{h,i}, by problem (17), exact and incremental.

    Args:
        n: number of workers, >= 1.
        unobserved: value where problem (17) leaves an interval. ``"lower"`` is optimistic: a quorum without samples
            looks fast, and one update with it corrects that. ``"mid"`` is the middle. ``"upper"`` is pessimistic: at
            first all quorums look as slow as k = n, and a rule that takes the best rate stays there. Without an upper
            end, both take the lower one, or the time of a smaller quorum if that is longer.
        window: number of newest versions whose samples count, >= 1; None for all.
        forgetting: weight of a sample of version v is forgetting^(newest version - v), in (0, 1]. Weights stop
            shrinking between 2^-8 and 2^-40 of a new sample's, so that an unused quorum keeps its estimate.

    Differs from the paper: the value in the interval follows a rule (an interior-point solver ends anywhere in it), and
    old samples can be dropped or discounted. With the whole history the estimate follows changes of the cluster too
    slowly.

    Example:
        >>> durations = UpdateTimeEstimator(n=3)
        >>> for i, t_s in enumerate([1.0, 2.0, 4.0], start=1):
        ...     durations.add(version=0, h=3, i=i, t_s=t_s)
        >>> estimate = durations.estimate()
        >>> estimate.lower.tolist(), estimate.upper.tolist()
        ([1.0, 2.0, 4.0], [4.0, 4.0, 4.0])
    """

    def __init__(
        self, n: int, unobserved: Unobserved = "lower", window: int | None = None, forgetting: float = 1.0
    ) -> None:
        check_range("[1, inf)", Integral, n=n)
        check_range("(0, 1]", forgetting=forgetting)
        if unobserved not in get_args(Unobserved):
            raise UsageError(f"unobserved = {unobserved!r}, expected one of {', '.join(get_args(Unobserved))}")
        check_optional_range("[1, inf)", Integral, window=window)
        self.n = n
        self.unobserved = unobserved
        self.window = window
        self.forgetting = forgetting
        self._newest = 0
        self._unit = 0  # version whose samples have weight 1
        self._fit = IsotonicFit(n)
        # With a window only: the samples of each cell, the cells of each version, and the cells to refresh.
        self._samples: dict[Cell, list[Sample]] = {}
        self._cells_of: dict[int, list[Cell]] = {}
        self._outdated: set[Cell] = set()

    def add(self, version: int, h: int, i: int, t_s: float) -> None:
        """Add a sample: the i-th gradient of a version arrived t_s seconds after the version was made.

        Args:
            version: version of the gradient, >= 0, in any order, because gradients arrive late.
            h: quorum of the update that made the version, 1 to n; n for the first version, where all workers start.
            i: rank among the gradients of the version, 1 to n.
            t_s: seconds, >= 0 and finite.

        Raises:
            UsageError: a rank or the time is out of its range.
        """
        n = self.n
        if not (1 <= h <= n and 1 <= i <= n and 0 <= t_s < inf):
            raise UsageError(f"sample h={h!r}, i={i!r}, t_s={t_s!r}; expected ranks from 1 to {n} and finite t_s >= 0")
        if version > self._newest:
            self._advance(version)
        if self.window is None:
            level, column = self._place(h, i)
            self._fit.add(level, column, 1.0 if self.forgetting == 1 else self._weight(version), t_s)
        elif version > self._newest - self.window:
            self._keep((h, i), version, t_s)

    def estimate(self) -> UpdateTimeSamples:
        """Return the solution of problem (17) on the diagonal, for all samples."""
        self._refresh()
        self._fit.solve()
        diagonal = self.n - 1
        lower = np.maximum(self._fit.below(diagonal), 0.0)
        upper = self._fit.above(diagonal)
        if self.unobserved == "lower":
            return UpdateTimeSamples(lower, upper, lower)
        wished = upper if self.unobserved == "upper" else lower + (upper - lower) / 2
        return UpdateTimeSamples(lower, upper, np.maximum.accumulate(np.where(upper < inf, wished, lower)))

    def fitted(self) -> dict[Cell, float]:
        """Return the solution of problem (17) for the cells with samples: seconds by (h, i)."""
        self.estimate()
        return {self._ranks(level, column): value for (level, column), value in self._fit.values().items()}

    def resize(self, n: int) -> None:
        """Change the number of workers to n, >= 1, and keep the samples of the remaining ranks.

        Samples with h > n count for h = n, because then all workers start at once. Samples with i > n are dropped.
        """
        if n < 1:
            raise UsageError(f"n = {n!r}, expected at least one worker")
        cells = [(self._ranks(cell.level, cell.column), cell.weight, cell.mean) for cell in self._fit.cells()]
        samples, self._samples = self._samples, {}
        self._cells_of = {}
        self._outdated = set()
        self.n = n
        self._fit = IsotonicFit(n)
        for (h, i), weight, mean in cells:
            if i <= n and self.window is None:
                level, column = self._place(min(h, n), i)
                self._fit.add(level, column, weight, mean)
        for (h, i), of_cell in samples.items():
            for version, t_s in of_cell if i <= n else []:
                self._keep((min(h, n), i), version, t_s)

    def state_dict(self) -> dict[str, Any]:
        """Return the samples and the fit, as numbers, tuples, lists and dicts."""
        self._refresh()
        return {
            "n": self.n,
            "newest": self._newest,
            "unit": self._unit,
            "samples": list(self._samples.items()),
            "fit": self._fit.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state; the options of this estimator are kept."""
        self.n = state["n"]
        self._newest = state["newest"]
        self._unit = state["unit"]
        self._samples = {}
        self._cells_of = {}
        for cell, of_cell in state["samples"]:
            for version, t_s in of_cell:
                self._keep(cell, version, t_s)
        self._outdated = set()
        self._fit = IsotonicFit(self.n)
        self._fit.load_state_dict(state["fit"])

    def _place(self, h: int, i: int) -> tuple[int, int]:
        """Return the level and the column of a cell, both from 0."""
        if i < h:
            return self.n - h, i - 1
        return (self.n - 1 if i == h else 2 * self.n - 1 - h), i - 1

    def _ranks(self, level: int, column: int) -> Cell:
        """Return the cell (h, i) at a level and a column."""
        if level == self.n - 1:
            return column + 1, column + 1
        return (self.n - level if level < self.n else 2 * self.n - 1 - level), column + 1

    def _weight(self, version: int) -> float:
        """Return the weight of a sample; newer ones weigh more, relative to the unit version."""
        age = self._unit - version
        return max(self.forgetting**age, LEAST_WEIGHT) if age > 0 else 1 / self.forgetting**-age

    def _advance(self, version: int) -> None:
        """Set the newest version, and drop the samples that leave the window."""
        self._newest = version
        shrinking = self.forgetting ** (version - self._unit)
        if shrinking < 1 / LARGEST_WEIGHT:
            self._fit.scale(shrinking, LEAST_WEIGHT)
            self._unit = version
        if self.window is not None:
            oldest = version - self.window + 1
            for old in [each for each in self._cells_of if each < oldest]:
                for cell in self._cells_of.pop(old):
                    self._samples[cell] = [sample for sample in self._samples[cell] if sample[0] >= oldest]
                    self._outdated.add(cell)

    def _keep(self, cell: Cell, version: int, t_s: float) -> None:
        self._samples.setdefault(cell, []).append((version, t_s))
        self._cells_of.setdefault(version, []).append(cell)
        self._outdated.add(cell)

    def _refresh(self) -> None:
        """Update the cells of the fit whose samples in the window have changed."""
        for cell in self._outdated:
            level, column = self._place(*cell)
            weight = mean = 0.0
            for version, t_s in self._samples[cell]:
                weight += self._weight(version)
                mean += (t_s - mean) * (self._weight(version) / weight)
            self._fit.replace(level, column, weight, mean)
            if not weight:
                del self._samples[cell]
        self._outdated.clear()
