"""Prediction of the time per minibatch with local steps, by simulation of recorded times."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from paceline.catalogue.serverless import all_reduce, local_sgd
from paceline.clusters.simulated import Cluster
from paceline.errors import PacelineWarning, UsageError
from paceline.experiments.advise.local_steps_advice import LocalStepsAdvice, LocalStepsTime
from paceline.protocols.local_steps import LocalSteps
from paceline.protocols.protocol import Plan, as_plan
from paceline.run.simulate import simulate

MOST_H = 256
MINIBATCHES = 512  # simulated for each worker and H
LEAST_TRIPS = 32  # simulated for each worker, of any H


class Wanted(NamedTuple):
    """Protocols without local steps, and the local steps that were wanted with them.

    Attributes:
        plans: protocols to rank, by their text.
        local_steps: numbers H by the text of their protocol.
    """

    plans: dict[str, Plan]
    local_steps: dict[str, set[int]]


def without_local_steps(given: Iterable[Plan]) -> Wanted:
    """Return the protocols without their local steps; that of local SGD is all-reduce.

    Raises:
        UsageError: the number of local steps is not fixed.

    >>> from paceline.catalogue.parser import parse_plan
    >>> without_local_steps([parse_plan("asp"), parse_plan("bsp + local_steps(H=6)")]).local_steps
    {'bsp': {6}}
    """
    wanted = Wanted({}, {})
    for plan in given:
        base, H = _split(plan)
        wanted.plans[str(base)] = base
        if H is not None:
            wanted.local_steps.setdefault(str(base), set()).add(H)
    return wanted


def _split(plan: Plan) -> tuple[Plan, int | None]:
    [phase] = plan.phases
    if phase.allreduce is not None and phase.allreduce.sums == "updates" and not phase.allreduce.overlaps:
        return as_plan(all_reduce()), phase.allreduce.period
    if phase.local_steps is None:
        return plan, None
    if phase.local_steps.seconds is not None:
        raise UsageError(f"{plan} has no fixed number of local steps to predict; give one, as local_steps(H=16)")
    return as_plan(replace(phase, local_steps=None)), phase.local_steps.most


def predict_local_steps(
    plan: Plan, cluster: Cluster, more: Collection[int] = (), *, seed: int, payload_bytes: float | None
) -> LocalStepsAdvice:
    """Predict the time per minibatch of a protocol for H = 1, 2, 4 ... 256 local steps.

    Args:
        plan: one protocol with constant knobs and without local steps.
        cluster: recorded or simulated times.
        more: further numbers H, each >= 1.
        seed: seed of the simulations, >= 0.
        payload_bytes: bytes of the parameters, and of a gradient; None if unknown.
    """
    Hs = sorted({*(2**i for i in range(MOST_H.bit_length())), *more})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PacelineWarning)  # a trace may repeat
        times = [_time(plan, H, cluster, seed, payload_bytes or 0) for H in Hs]
        share = _transfer_share(plan, cluster, seed, payload_bytes or 0)
    return LocalStepsAdvice(protocol=str(plan), times=times, transfer_share=share, payload_bytes=payload_bytes)


def _time(base: Plan, H: int, cluster: Cluster, seed: int, payload_bytes: float) -> LocalStepsTime:
    plan, n = _with_local_steps(base, H), cluster.n
    trips = max(LEAST_TRIPS, MINIBATCHES // H)
    if plan.allreduce is not None:  # its update has one minibatch of each worker
        simulated = simulate(plan, cluster, updates=trips * H, seed=seed, payload_bytes=payload_bytes)
        minibatches = simulated.totals.used
        vectors = 2 * (n - 1) / n / H
    else:
        updates = ceil(trips * n / _tasks_per_update(plan, n))
        simulated = simulate(plan, cluster, updates=updates, seed=seed, payload_bytes=payload_bytes)
        minibatches = simulated.totals.used * H
        vectors = (simulated.pulls + simulated.pushes) / minibatches
    return LocalStepsTime(
        H=H, protocol=str(plan), seconds_per_minibatch=simulated.time_s / minibatches, vectors_per_minibatch=vectors
    )


def _with_local_steps(base: Plan, H: int) -> Plan:
    if H == 1:
        return base
    return as_plan(local_sgd(H) if base.allreduce is not None else base.phases[0] + LocalSteps(H))


def _tasks_per_update(plan: Plan, n: int) -> int:
    """Return about how many tasks end with an update."""
    protocol = plan.phases[0].protocol
    k = n if protocol.quorum == "all" else protocol.quorum
    return k if protocol.max_staleness else max(k, n)


def _transfer_share(plan: Plan, cluster: Cluster, seed: int, payload_bytes: float) -> float:
    """Return the share of transfers in the first round trips of each worker."""
    trips = cluster.round_trips(seed, payload_bytes)
    total_s = transfers_s = 0.0
    for worker in range(cluster.n):
        now_s = 0.0
        for draw in range(1, MINIBATCHES + 1):
            pull_s, compute_s, push_s = trips.times(worker, draw, now_s)
            transfer_s = pull_s + push_s
            if plan.allreduce is not None:
                sum_s = cluster.network.all_reduce_s(cluster.n, payload_bytes)
                transfer_s = sum_s + trips.sum_s(worker, draw, now_s)
            now_s += compute_s + transfer_s
            transfers_s += transfer_s
        total_s += now_s
    return transfers_s / total_s
