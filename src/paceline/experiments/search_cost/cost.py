"""`search_costs`: cost of a search for the switch point, and its probability of success."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import comb, inf, sqrt
from numbers import Integral
from statistics import fmean

import numpy as np

from paceline.errors import UsageError
from paceline.experiments.search_cost.recorded_runs import percent
from paceline.experiments.search_cost.recorded_search import RecordedSearch, Rung
from paceline.utils.rng import stream
from paceline.utils.validation import check_range

USUAL_RUNS = 5  # R of the paper


@dataclass(frozen=True)
class SearchSetting:
    """Number of runs of a search.

    Attributes:
        bsp_runs: number of runs of BSP alone, whose mean accuracy is the target, >= 0; 0 for a recurring job with a
            known target.
        candidate_runs: number of runs of each switch point, >= 1.
    """

    bsp_runs: int
    candidate_runs: int

    def __post_init__(self) -> None:
        check_range("[0, inf)", Integral, bsp_runs=self.bsp_runs)
        check_range("[1, inf)", Integral, candidate_runs=self.candidate_runs)

    def __str__(self) -> str:
        return f"({'No' if self.bsp_runs else 'Yes'}, {self.bsp_runs}, {self.candidate_runs})"

    @classmethod
    def parse(cls, text: str) -> SearchSetting:
        """Read ``5+3``, five runs of BSP and three of each candidate; ``0+3`` for a recurring job."""
        bsp, _, candidates = text.partition("+")
        try:
            runs = int(bsp), int(candidates)
        except ValueError:
            raise UsageError(
                f"{text!r} is not a search setting; type BSP runs + candidate runs, as 5+3, or 0+3 for a recurring job"
            ) from None
        return cls(*runs)


@dataclass(frozen=True, kw_only=True)
class SearchCost:
    """Cost and success of one search setting.

    Attributes:
        setting: number of runs of the search.
        cost: mean time of the search, in runs of BSP.
        amortised: number of recurrences of the job after which the switch has saved the cost; inf if it saves nothing.
        effective: number of runs of BSP and of correctly accepted switch points, divided by the cost.
        success: probability that the search finds the right switch point.
        found: probability of each result, by share of BSP, from 1 (no switch) down the ladder.
        draws: number of simulated searches; 0 if all draws were enumerated.
        cost_error: standard error of the cost; 0 if exact.
        success_error: standard error of the success; 0 if exact.
    """

    setting: SearchSetting
    cost: float
    amortised: float
    effective: float
    success: float
    found: dict[float, float]
    draws: int = 0
    cost_error: float = 0.0
    success_error: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Counting:
    """Options for the enumeration or simulation of draws of recorded runs.

    Args:
        take_all: whether a setting may have more runs than were recorded; the recorded ones then stand for them.
        exact_up_to: largest number of comparisons of a target with a draw of a rung for which all draws of a setting
            are enumerated, >= 0; with more, searches are simulated.
        draws: number of simulated searches, >= 1.
        seed: seed of the simulation, >= 0.
    """

    take_all: bool = False
    exact_up_to: int = 1_000_000
    draws: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("[0, inf)", Integral, exact_up_to=self.exact_up_to, seed=self.seed)
        check_range("[1, inf)", Integral, draws=self.draws)

    def taken(self, rung: Rung, asked: int) -> int:
        """Return the number of recorded runs of a rung that are drawn.

        Raises:
            UsageError: fewer runs were recorded than the setting has.
        """
        recorded = len(rung.accuracies)
        if rung.stands_alone:
            return min(asked, 1)
        if asked > recorded and not self.take_all:
            raise UsageError(
                f"the setting has {asked} runs at {percent(rung.fraction)}, but only {recorded} are recorded; "
                "give fewer, or use all recorded runs with take_all=True"
            )
        return min(asked, recorded)


def search_costs(
    search: RecordedSearch, settings: Sequence[SearchSetting] | None = None, counting: Counting | None = None
) -> list[SearchCost]:
    """Return the cost of each search setting, and the probability that it finds the right switch point.

    Runs are drawn from the recorded ones without replacement. With B runs of BSP and R of each rung, t_i
    the mean time of rung i over that of BSP, and P_i the probability that exactly the first i of m rungs are accepted,

        cost = B + R sum_i P_i (t_1 + ... + t_min(i+1, m)),    amortised = cost / (1 - t_right),
        effective = (B + right R) / cost,                      success = P_right.

    The cost is the mean over all courses of a search, while the effective runs are those of the right course. A search
    is charged with R runs of a rung also if fewer recorded ones stand for them.

    Args:
        search: search over recorded runs.
        settings: search settings; if None, (n, n) from 5 down, (1, n), and (0, n), as far as there are runs.
        counting: options for enumeration or simulation.

    Raises:
        UsageError: a setting has more runs than were recorded.

    Example:
        >>> from paceline.experiments.search_cost.recorded_search import Rung
        >>> bsp = Rung(fraction=1.0, accuracies=(0.9, 0.92), time_s=100.0)
        >>> half = Rung(fraction=0.5, accuracies=(0.91, 0.89), time_s=60.0)
        >>> search = RecordedSearch(bsp=bsp, ladder=(half,))
        >>> [cost] = search_costs(search, [SearchSetting(0, 1)])
        >>> cost.cost, cost.success
        (0.6, 0.5)

    Source: Li et al. (Sync-Switch), ICDCS 2021, Sect. VI-C1, Tables II and IV. Differs: the paper simulates each
    setting 1,000 times; here all draws are enumerated unless there are too many.
    """
    counting = counting or Counting()
    return [_search_cost(search, each, counting) for each in settings or usual_settings(search, counting)]


def usual_settings(search: RecordedSearch, counting: Counting) -> list[SearchSetting]:
    """Return the settings of the tables of the paper, as far as there are recorded runs."""
    rungs = [rung for rung in search.ladder if not rung.stands_alone]
    fewest = USUAL_RUNS if counting.take_all else min([USUAL_RUNS, *(len(rung.accuracies) for rung in rungs)])
    most = range(fewest, 0, -1)
    same = [(n, n) for n in most if n <= len(search.bsp.accuracies) or counting.take_all]
    pairs = dict.fromkeys([*same, *((1, n) for n in most), *((0, n) for n in most)])
    return [SearchSetting(*pair) for pair in pairs]


def _search_cost(search: RecordedSearch, setting: SearchSetting, counting: Counting) -> SearchCost:
    drawn = [counting.taken(search.bsp, setting.bsp_runs)]
    drawn += [counting.taken(rung, setting.candidate_runs) for rung in search.ladder]
    rungs = (search.bsp, *search.ladder)
    targets, *draws_of_rungs = (comb(len(rung.accuracies), k) for rung, k in zip(rungs, drawn, strict=True))
    is_exact = targets * sum(draws_of_rungs) <= counting.exact_up_to
    ends = _counted(search, drawn) if is_exact else _simulated(search, setting, drawn, counting)
    costs = [search.cost(setting.bsp_runs, setting.candidate_runs, accepted) for accepted in range(len(rungs))]
    cost = sum(map(float.__mul__, ends, costs))
    saved = 1 - search.found.time_s / search.bsp.time_s
    # Rounding may leave the difference below 0.
    variance = max(0.0, sum(p * each**2 for p, each in zip(ends, costs, strict=True)) - cost**2)
    success, draws = ends[search.right], 0 if is_exact else counting.draws
    return SearchCost(
        setting=setting,
        cost=cost,
        amortised=cost / saved if saved > 0 else inf,
        effective=(setting.bsp_runs + search.right * setting.candidate_runs) / cost,
        success=success,
        found={rung.fraction: p for rung, p in zip(rungs, ends, strict=True)},
        draws=draws,
        cost_error=sqrt(variance / draws) if draws else 0.0,
        success_error=sqrt(success * (1 - success) / draws) if draws else 0.0,
    )


def _counted(search: RecordedSearch, drawn: Sequence[int]) -> list[float]:
    """Return the probability that exactly the first 0, 1, ... rungs are accepted, by enumeration of all draws.

    The rungs are independent, given the target.
    """
    targets = Counter([search.known_target]) if drawn[0] == 0 else _means(search.bsp.accuracies, drawn[0])
    rungs = [_means(rung.accuracies, k) for rung, k in zip(search.ladder, drawn[1:], strict=True)]
    ends = [Fraction(0)] * (len(rungs) + 1)
    for target, ways in targets.items():
        reached = Fraction(ways, targets.total())
        for index, means in enumerate(rungs):
            accepted = sum(ways for mean, ways in means.items() if search.accepts(mean, target))
            passed = reached * Fraction(accepted, means.total())
            ends[index] += reached - passed
            reached = passed
        ends[-1] += reached
    return [float(p) for p in ends]


def _means(accuracies: Sequence[float], k: int) -> Counter[float]:
    """Return the number of draws of k, without replacement, by their mean."""
    return Counter(fmean(draw) for draw in combinations(accuracies, k))


def _simulated(search: RecordedSearch, setting: SearchSetting, drawn: Sequence[int], counting: Counting) -> list[float]:
    """Return the same probabilities by simulation."""
    random = stream(counting.seed, "search cost", setting.bsp_runs, setting.candidate_runs)

    def means(rung: Rung, k: int) -> Iterator[float]:
        shuffled = random.permuted(np.tile(rung.accuracies, (counting.draws, 1)), axis=1)
        return iter(shuffled[:, :k].mean(axis=1).tolist())

    targets = means(search.bsp, drawn[0]) if drawn[0] else iter([search.known_target] * counting.draws)
    tried = [means(rung, k) for rung, k in zip(search.ladder, drawn[1:], strict=True)]
    counts = [0] * (len(tried) + 1)
    for target, *of_rungs in zip(*[targets, *tried], strict=True):
        fails = (index for index, mean in enumerate(of_rungs) if not search.accepts(mean, target))
        counts[next(fails, len(tried))] += 1
    return [count / counting.draws for count in counts]
