"""Seconds of an iteration in simulated time, by eq. (13) to (15), and by a literal recursion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

import paceline as pl
from papers.dc_s3gd.settings import BLOCKING, COMPENSATED, COMPUTE_S, ITERATIONS, STRAGGLERS
from papers.store import Line, rounded
from papers.tasks import Task, Where

Array = NDArray[np.float64]
PLAYED = 10_000  # rounds


# -- eq. (13) to (15) --------------------------------------------------------------------------------------------------


def predicted_s(protocol: str, compute_s: float, all_reduce_s: float, there_and_back_s: float) -> float:
    """Return the seconds in which each of N identical workers computes a gradient and receives the result.

    Args:
        compute_s: t_C, seconds of a gradient.
        all_reduce_s: t_ARed, seconds of an all-reduce.
        there_and_back_s: t_W2PS, seconds from the worker to a parameter server and back.

    >>> [predicted_s(protocol, 1.0, 0.5, 0.6) for protocol in ("all_reduce", "dc_s3gd", "asp")]
    [1.5, 1.0, 1.6]
    """
    return {
        BLOCKING: compute_s + all_reduce_s,  # eq. (13)
        COMPENSATED: max(compute_s, all_reduce_s),  # eq. (14)
        "asp": compute_s + there_and_back_s,  # eq. (15)
        "bsp": compute_s + there_and_back_s,
        "local_sgd(H=4)": compute_s + all_reduce_s / 4,
    }[protocol]


@dataclass(frozen=True)
class Iteration:
    """Task: one protocol, for every N and t_ARed."""

    protocol: str

    def asked(self) -> Line:
        """Return the fields as plain JSON."""
        return {
            "figure": "iterations",
            "series": self.protocol,
            "workers": list(ITERATIONS.workers),
            "compute_s": COMPUTE_S,
            "all_reduce_s": list(ITERATIONS.all_reduce_s),
            "payload_bytes": ITERATIONS.payload_bytes,
            "rounds": ITERATIONS.rounds,
        }

    def carry_out(self, where: Where) -> Line:
        """Return the seconds of an iteration for every N, and within it for every t_ARed."""
        cells = [self._cell(n, each_s, where) for n, each_s in product(ITERATIONS.workers, ITERATIONS.all_reduce_s)]
        predicted, simulated, on_one_link = zip(*cells, strict=True)
        return {
            "predicted_s": rounded(predicted),
            "simulated_s": rounded(simulated),
            "on_one_link_s": rounded(on_one_link),
        }

    def _cell(self, n: int, all_reduce_s: float, where: Where) -> tuple[float, float, float]:
        payload_bytes = ITERATIONS.payload_bytes
        bytes_per_s = 2 * (n - 1) / n * payload_bytes / all_reduce_s
        network = pl.timing.Network(up_bytes_per_s=bytes_per_s, down_bytes_per_s=bytes_per_s)
        there_and_back_s = network.push_s(payload_bytes) + network.pull_s(payload_bytes)
        simulated = pl.simulate(
            self.protocol,
            pl.Cluster(n, pl.timing.Deterministic(COMPUTE_S), network=network),
            updates=(where.updates or ITERATIONS.rounds) * (n if self.protocol == "asp" else 1),
            payload_bytes=payload_bytes,
        )
        iteration_s = simulated.time_s * n / simulated.totals.used
        has_server = self.protocol in {"asp", "bsp"}
        busy = simulated.link_busy(bytes_per_s) if has_server else 0.0
        predicted = predicted_s(self.protocol, COMPUTE_S, all_reduce_s, there_and_back_s)
        return predicted, iteration_s, iteration_s * max(1.0, busy)


# -- stragglers --------------------------------------------------------------------------------------------------------


def played_s(protocol: str, compute_s: Array) -> float:
    """Return the seconds of an iteration without communication time, given those of each gradient, ``[rounds, n]``.

    With dc_s3gd a worker continues at h_i = max(f_i, e), where f_i is the end of its gradient and e the end of the
    previous iteration. The iteration ends when the last worker continues.
    """
    free_s, ended_s = np.zeros(compute_s.shape[1]), 0.0
    for row in compute_s:
        free_s = np.maximum(free_s + row, ended_s)
        ended_s = float(free_s.max())
        if protocol == BLOCKING:
            free_s[:] = ended_s
    return ended_s / len(compute_s)


@dataclass(frozen=True)
class Waiting:
    """Task: one protocol on one cluster, for every N."""

    cluster: str
    protocol: str
    seed: int

    def asked(self) -> Line:
        """Return the fields as plain JSON."""
        return {
            "figure": "stragglers",
            "law": self.cluster,
            "cluster": str(STRAGGLERS.clusters[self.cluster]),
            "series": self.protocol,
            "workers": list(STRAGGLERS.workers),
            "rounds": STRAGGLERS.rounds,
            "seed": self.seed,
        }

    def carry_out(self, where: Where) -> Line:
        """Return the seconds per N used gradients, and their staleness, for every N."""
        runs = [self._simulated(n, where) for n in STRAGGLERS.workers]
        return {
            "seconds": rounded(run.time_s * run.workers / run.totals.used for run in runs),
            "played_s": rounded(self._played_s(n) for n in STRAGGLERS.workers),
            "staleness": rounded(run.totals.mean_staleness for run in runs),
        }

    def _simulated(self, n: int, where: Where) -> pl.results.Simulated:
        k = 3 * n // 4
        protocol = self.protocol.format(most=k)
        gradients = k if protocol.startswith("k_sync") else 1 if protocol in {"asp", "ssp(lead=1)"} else n
        updates = (where.updates or STRAGGLERS.rounds) * n // gradients
        cluster = replace(STRAGGLERS.clusters[self.cluster], n=n)
        return pl.simulate(protocol, cluster, updates=updates, seed=self.seed)

    def _played_s(self, n: int) -> float:
        """Return the seconds without paceline, nan if unknown."""
        cluster = STRAGGLERS.clusters[self.cluster]
        if cluster.slowdowns or self.protocol not in {BLOCKING, COMPENSATED}:
            return float("nan")
        draws = np.random.default_rng(self.seed).random((PLAYED, n))
        return played_s(self.protocol, cluster.distribution_of(0).quantile(draws))


def _iterations(seeds: int | None) -> Iterator[Task]:
    """Yield the tasks; nothing is random in them."""
    for protocol in ITERATIONS.protocols:
        yield Iteration(protocol)


def _stragglers(seeds: int | None) -> Iterator[Task]:
    for seed, cluster, protocol in product(range(seeds or STRAGGLERS.seeds), STRAGGLERS.clusters, STRAGGLERS.protocols):
        yield Waiting(cluster, protocol, seed)


TIMES: Mapping[str, Callable[[int | None], Iterator[Task]]] = {"iterations": _iterations, "stragglers": _stragglers}


def times(figure: str, seeds: int | None) -> Iterator[Task]:
    """Yield the tasks of a figure."""
    return TIMES[figure](seeds)
