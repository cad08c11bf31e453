"""`advise`: rank protocols by the predicted time to the progress of a recorded run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import isinf, nan
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from paceline.catalogue.parser import parse_plan
from paceline.clusters.parser import parse_cluster
from paceline.clusters.simulated import Cluster
from paceline.clusters.timing.trace import Trace
from paceline.errors import PacelineWarning, UsageError
from paceline.experiments.advise.evidence import nearest_evidence
from paceline.experiments.advise.local_steps_prediction import predict_local_steps, without_local_steps
from paceline.experiments.advise.observed_run import Needs, ObservedRun, observed_run
from paceline.experiments.advise.protocol_choice import choose, score, trips_of
from paceline.experiments.advise.result import PARTS, Advice, AutoChoice, Prediction
from paceline.protocols.protocol import Phase, Plan, Protocol, as_plan
from paceline.recording.run_folder import SavedRun
from paceline.recording.script_runs import SCRIPT
from paceline.recording.validation import believed
from paceline.run.simulate import simulate
from paceline.shares.gain import Gain
from paceline.utils.argument_types import checked_types

UPDATES = 300  # simulated for each protocol
FLOAT32_BYTES = 4


@checked_types
def advise(
    run: str | Path | SavedRun | Trace,
    *,
    protocols: Sequence[str | Protocol | Phase] = (),
    cluster: str | Cluster | None = None,
    seed: int = 0,
) -> Advice:
    """Rank protocols by the predicted time in which they lower the loss as much as a recorded run.

    The seconds per update of each protocol are simulated with the round trips of the run. The number of updates follows
    from the gradients of the run (``policies.estimators.noise.convergence``): fewer or staler gradients per update have
    a higher noise floor. If the learning rate followed the rule "noise", protocols are ranked by progress per second,
    S = Lambda / (K d + phi), with the phi and d of the run. The advice also has the choice of `auto`, by the same S,
    and the comparison with DDP on the cluster that is nearest to the recorded one.

    Local steps change the loss after equal samples, so they are not ranked. `Advice.local_steps` has the seconds per
    minibatch with H = 1, 2, 4 ... 256 local steps, and the smallest H with 90 % of the largest speed-up.

    Args:
        run: folder of a run with lr_rule="noise"; or of one recorded with ``measure_steps=True``, with at least two
            gradients per update or with microbatches, because the noise of single gradients cannot be measured. Or a
            trace, or its file, which has times only.
        protocols: protocols to rank, with constant knobs, or "auto" for its choice; those of the papers with
            K = 1, 2, 4 ... n if none is given. One with local steps, as "bsp + local_steps(H=16)", is ranked without
            them, and its times with them are in `Advice.local_steps`.
        cluster: simulated cluster whose times replace those of the run.
        seed: seed of the simulations, >= 0.

    Raises:
        UsageError: the run lacks the data that are needed; the message says how to record them.
    """
    with believed(getattr(run, "path", run)):
        trace, recorded, payload_bytes, gain = _read(run)
    given = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    if given is not None and not isinstance(given, Cluster):
        raise UsageError(f"{cluster!r} runs in real time; give a simulated cluster, for example '16*exp(mean=1)'")
    if given is not None:
        _check_means(given)
    n = given.n if given else trace.workers
    fifths = (None, *range(PARTS)) if recorded else (None,)
    times = {fifth: given or Cluster(n, replace(_without(trace, fifth), censored="km")) for fifth in fifths}
    trips_s = trips_of(times[None], seed, payload_bytes or 0) if recorded else []
    auto = choose(trips_s, recorded.final_phi, recorded.rule) if recorded else None
    wanted = without_local_steps(_plan(each, auto) for each in protocols or default_protocols(n))
    predictions: dict[str, list[Prediction]] = {}
    for name, plan in wanted.plans.items():
        timed = {fifth: _timed(plan, cluster, seed, payload_bytes or 0) for fifth, cluster in times.items()}
        if recorded:
            price = score(plan.phases[0].protocol, trips_s, recorded.rule).price
            timed = {fifth: _predicted(each, recorded, n, price, fifth) for fifth, each in timed.items()}
        predictions[name] = list(timed.values())
    ranked = _ranked(predictions, recorded, auto)
    local_steps = [
        predict_local_steps(wanted.plans[name], times[None], more, seed=seed, payload_bytes=payload_bytes)
        for name, more in (wanted.local_steps or {ranked.best.protocol: set()}).items()
    ]
    evidence = None if given else nearest_evidence(trace)
    return replace(ranked, evidence=evidence, local_steps=local_steps, gain=gain)


class _Read(NamedTuple):
    """Times, gradients and bytes of the parameters of a run, and the gain by shares; None for what it has not."""

    trace: Trace
    recorded: ObservedRun | None = None
    payload_bytes: float | None = None
    gain: Gain | None = None


def _read(run: str | Path | SavedRun | Trace) -> _Read:
    if isinstance(run, Trace):
        return _Read(run)
    if not isinstance(run, SavedRun) and os.path.isfile(run):
        return _Read(Trace.from_csv(run))
    saved = run if isinstance(run, SavedRun) else SavedRun(run)
    payload_bytes = FLOAT32_BYTES * saved.configuration["parameters"]
    if SCRIPT in saved.configuration:  # which has times only
        trace = replace(Trace.of(saved.history, source=str(saved.path)), sums_as_transfers=True)
        return _Read(trace=trace, recorded=None, payload_bytes=payload_bytes, gain=Gain.of(saved.history))
    return _Read(Trace.of(saved.history, source=str(saved.path)), observed_run(saved), payload_bytes)


def default_protocols(n: int) -> list[str]:
    """Return the texts of the protocols of the papers, with K = 1, 2, 4 ... n."""
    ks = sorted({*(2**i for i in range(n.bit_length()) if 2**i <= n), n})
    families = ("k_sync", "k_batch_sync", "k_async", "k_batch_async")
    some = [f"{family}(k={k})" for family in families for k in ks if k < n or "batch" in family]
    return ["bsp", "asp", *(text for text in some if text not in ("k_async(k=1)", "k_batch_async(k=1)"))]


def _check_means(cluster: Cluster) -> None:
    if isinstance(cluster.timing, Trace):
        return
    for distribution in map(cluster.distribution_of, range(cluster.n)):
        if isinf(distribution.expectation_s):
            raise UsageError(
                f"{distribution} has an infinite mean, which cannot be simulated; give one with a finite mean"
            )


def _without(trace: Trace, part: int | None) -> Trace:
    """Return a trace without the given fifth of each worker's rows; the whole trace for None."""
    if part is None:
        return trace
    kept = []
    for _, own in groupby(trace.rows, key=attrgetter("worker")):
        rows = list(own)
        first, after = (round(i * len(rows) / PARTS) for i in (part, part + 1))
        kept += rows[:first] + rows[after:] if len(rows) > PARTS else rows
    return replace(trace, rows=kept)


def _plan(given: str | Protocol | Phase, auto: AutoChoice | None) -> Plan:
    if given == "auto" and auto is not None:
        given = auto.protocol
    plan = parse_plan(given) if isinstance(given, str) else as_plan(given)
    phase = plan.phases[0]
    if len(plan.phases) > 1 or phase.controllers or phase.compensators:
        raise UsageError(
            f"{plan} has phases, controllers or compensators; give protocols with constant knobs, as k_sync(k=4)"
        )
    if plan.allreduce is not None and plan.allreduce.overlaps:
        raise UsageError(
            f"the workers of {plan} take steps of their own, so its number of updates cannot be predicted; give "
            "protocols with common steps, as all_reduce or k_sync(k=4)"
        )
    return plan


def _timed(plan: Plan, cluster: Cluster, seed: int, payload_bytes: float) -> Prediction:
    """Return the prediction of times only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PacelineWarning)  # a trace may repeat
        simulated = simulate(plan, cluster, updates=UPDATES, seed=seed, payload_bytes=payload_bytes)
    k, staleness, update_s = simulated.totals.mean_k, simulated.totals.mean_staleness, simulated.seconds_per_update
    return Prediction(
        protocol=str(plan),
        seconds_per_update=update_s,
        gradients_per_s=k / update_s,
        staleness=staleness,
        updates=nan,
        seconds=nan,
        low_s=nan,
        high_s=nan,
        wins=0,
    )


def _predicted(timed: Prediction, recorded: ObservedRun, n: int, price: float, fifth: int | None) -> Prediction:
    """Return a prediction with the number of updates, from every fifth update of the run or from all."""
    k = timed.gradients_per_s * timed.seconds_per_update
    needs = Needs(k=k, staleness=timed.staleness, price=price, rate_scale=recorded.rate.scale(max(1, round(k)), n))
    updates = recorded.updates_needed(needs, fifth)
    seconds = timed.seconds_per_update * updates
    return timed._replace(
        updates=updates,
        seconds=seconds,
        low_s=seconds,
        high_s=seconds,
        price=price,
        progress_per_s=timed.gradients_per_s * recorded.rule.progress(k, recorded.phi, price),
    )


def _ranked(
    predictions: Mapping[str, Sequence[Prediction]], recorded: ObservedRun | None, auto: AutoChoice | None
) -> Advice:
    if recorded is None:
        only = [whole for [whole] in predictions.values()]
        return Advice(ranking=sorted(only, key=attrgetter("seconds_per_update")), seen=None)
    winners = [min(predictions, key=lambda name: predictions[name][i].seconds) for i in range(1, PARTS + 1)]
    ranking = []
    for name, (whole, *parts) in predictions.items():
        seconds = [each.seconds for each in parts]
        ranking.append(whole._replace(low_s=min(seconds), high_s=max(seconds), wins=winners.count(name)))
    return Advice(ranking=sorted(ranking, key=attrgetter("seconds")), seen=recorded.seen(), auto=auto)
