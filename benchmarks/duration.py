"""Decision time of the duration estimator, against problem (17) solved by CVXPY and Clarabel.

A decision adds all samples that arrived during an update, then estimates T_k for all k. The samples are those of
Push & Wait with exponential round trips of mean 1 s. The quorums, also those of the history, are chosen in two ways:

- rate: the k with the largest k / T_k by the estimates themselves, as in B-DBW: few rows (h, .) have many samples.
- random: k drawn uniformly: all rows have few samples, and many constraints are active.

The peer solves the same problem (17) at the end of each round in two ways. Either the problem is built anew, as the
paper suggests, or it is built once with parameters, and CVXPY recomputes only what depends on them. The time to update
its sums is not counted.
"""

from __future__ import annotations

from heapq import heapify, heapreplace
from time import perf_counter
from typing import Any

import cvxpy as cp
import numpy as np
from numpy.typing import NDArray

from common import options, ratios, report, spread
from paceline.policies.estimators.dbw.update_time import UpdateTimeEstimator

BARS = {16: 50, 100: 80}
ALONE, GROWTH_FROM, GROWTH_BAR = 1000, 100, 40
CHOICES = ("rate", "random")
Sample = tuple[int, int, int, float]
Floats = NDArray[np.float64]


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--history", type=int, default=500, help="updates before the first round")
    parser.add_argument("--decisions", type=int, default=20, help="decisions of paceline per round")
    args = parser.parse_args()

    runs = {(choice, n): Run(n, choice) for choice in CHOICES for n in (*BARS, ALONE)}
    for run in runs.values():
        run.advance(args.history)
    ours: dict[tuple[str, int], list[float]] = {case: [] for case in runs}
    peers: dict[tuple[str, int], dict[str, list[float]]] = {case: {} for case in runs}
    for _ in range(args.rounds):
        for case, run in runs.items():
            ours[case].append(run.advance(args.decisions))
            if case[1] in BARS:
                for name, took_s in run.solve_with_peer().items():
                    peers[case].setdefault(name, []).append(took_s)

    results: dict[str, Any] = {}
    for (choice, n), ours_s in ours.items():
        row: dict[str, Any] = {"ours_s": spread(ours_s)}
        for name, peer_s in peers[choice, n].items():
            times = ratios(peer_s, ours_s)
            row[f"{name}_s"] = spread(peer_s)
            row[f"{name} to ours"] = {**times, "meets_bar": times["median"] >= BARS[n]}
        if n == ALONE:
            growth = ratios(ours_s, ours[choice, GROWTH_FROM])
            row[f"n={n} to n={GROWTH_FROM}"] = {**growth, "meets_bar": growth["median"] <= GROWTH_BAR}
        results[f"{choice}, n={n}"] = row
    bar = ", ".join(f"at least {bar} x at n={n}" for n, bar in BARS.items())
    bars = {"bar": f"{bar}; from n={GROWTH_FROM} to n={ALONE} at most {GROWTH_BAR} x"}
    report("duration", args, {**bars, **results}, "cvxpy", "clarabel")


class PushAndWait:
    """Updates of Push & Wait: a late worker finishes its gradient, then starts at the newest version."""

    def __init__(self, n: int, seed: int = 0) -> None:
        self.n = n
        self._rng = np.random.default_rng(seed)
        self._quorums = [n]
        self._begun_s = [0.0]
        self._arrived = [0]
        self._at_work = [(time_s, 0) for time_s in self._rng.exponential(size=n).tolist()]
        heapify(self._at_work)

    def update(self, k: int) -> list[Sample]:
        """Wait for k gradients of the newest version; return (version, h, i, t) of all that arrived in the meantime."""
        newest, idle, samples = len(self._begun_s) - 1, 0, []
        while idle < k:
            now_s, version = self._at_work[0]
            self._arrived[version] += 1
            samples.append((version, self._quorums[version], self._arrived[version], now_s - self._begun_s[version]))
            idle += version == newest
            restart_s = now_s + self._rng.exponential() if version < newest else np.inf
            heapreplace(self._at_work, (restart_s, newest))
        self._quorums.append(k)
        self._begun_s.append(now_s)
        self._arrived.append(0)
        busy = [work for work in self._at_work if work[0] < np.inf]
        self._at_work = busy + [(now_s + round_s, newest + 1) for round_s in self._rng.exponential(size=idle).tolist()]
        heapify(self._at_work)
        return samples


class Run:
    """History of updates, with the estimator and the peer."""

    def __init__(self, n: int, choice: str) -> None:
        self.n = n
        self._choice = choice
        self._cluster = PushAndWait(n)
        self._durations = UpdateTimeEstimator(n)
        self._rng = np.random.default_rng(1)
        self._k = n
        self._count = np.zeros((n, n))
        self._sum = np.zeros((n, n))
        self._problem = Problem(n)

    def advance(self, updates: int) -> float:
        """Make some updates, and return the mean time of the decision after each."""
        took_s = 0.0
        for _ in range(updates):
            samples = self._cluster.update(self._k)
            for _, h, i, t_s in samples:
                self._count[h - 1, i - 1] += 1
                self._sum[h - 1, i - 1] += t_s
            begun = perf_counter()
            for sample in samples:
                self._durations.add(*sample)
            times = self._durations.estimate().times
            took_s += perf_counter() - begun
            self._k = self._next_k(times)
        return took_s / updates

    def _next_k(self, times: Floats) -> int:
        if self._choice == "random":
            return int(self._rng.integers(1, self.n + 1))
        with np.errstate(divide="ignore"):
            return int(np.argmax(np.arange(1, self.n + 1) / times)) + 1

    def solve_with_peer(self) -> dict[str, float]:
        """Return the time of the peer; raise AssertionError if it finds another optimum."""
        means = np.divide(self._sum, self._count, out=np.zeros_like(self._sum), where=self._count > 0)
        took_s = {}
        for name, solve in {"anew": Problem.solve_anew, "parameters": Problem.solve}.items():
            begun = perf_counter()
            diagonal = solve(self._problem, self._count, means)
            took_s[name] = perf_counter() - begun
            seen = np.diag(self._count) > 0
            np.testing.assert_allclose(diagonal[seen], self._durations.estimate().times[seen], rtol=1e-3, atol=1e-3)
        return took_s


class Problem:
    """Problem (17) in CVXPY; its inputs are parameters."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.roots = cp.Parameter((n, n), nonneg=True)
        self.targets = cp.Parameter((n, n))
        self.x, self.problem = self._written(self.roots, self.targets)

    def _written(self, roots: Any, targets: Any) -> tuple[Any, Any]:
        x = cp.Variable((self.n, self.n))
        diagonal = cp.diag(x)
        constraints = [x[:, :-1] <= x[:, 1:], x[1:] <= x[:-1], diagonal[:-1] <= diagonal[1:]]
        return x, cp.Problem(cp.Minimize(cp.sum_squares(cp.multiply(roots, x) - targets)), constraints)

    def solve_anew(self, count: Floats, means: Floats) -> Floats:
        """Return the diagonal of the solution of a newly built problem."""
        roots = np.sqrt(count)
        x, problem = self._written(roots, roots * means)
        problem.solve(solver=cp.CLARABEL)
        return np.diag(x.value)

    def solve(self, count: Floats, means: Floats) -> Floats:
        """Return the diagonal of the solution for these parameters."""
        self.roots.value = np.sqrt(count)
        self.targets.value = self.roots.value * means
        self.problem.solve(solver=cp.CLARABEL)
        return np.diag(self.x.value)


if __name__ == "__main__":
    main()
