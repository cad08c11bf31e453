"""`advise` for DDP recordings: what waiting cost, who was slow, and what other protocols would give."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from math import nan
from pathlib import Path

import numpy as np

from paceline.catalogue.parser import parse_plan
from paceline.clusters.simulated import Cluster
from paceline.clusters.timing.trace import Trace
from paceline.ddp_recording.as_trace import trace_of
from paceline.ddp_recording.recording import DDPRecording
from paceline.ddp_recording.waiting import StragglerFacts, find_stragglers, time_shares
from paceline.errors import PacelineWarning, UsageError
from paceline.experiments.advise.advise import default_protocols
from paceline.experiments.advise.evidence import nearest_evidence
from paceline.experiments.advise.local_steps_prediction import predict_local_steps, without_local_steps
from paceline.experiments.advise.protocol_choice import choose, score, trips_of
from paceline.experiments.advise.recorded_noise import NoiseScale, noise_scale
from paceline.experiments.advise.recording_advice import DDPPrediction, RecordingAdvice
from paceline.experiments.advise.result import AutoChoice
from paceline.experiments.advise.shares_prediction import DEFAULT as BALANCED
from paceline.experiments.advise.shares_prediction import QUEUE, SharesPrediction, predict_queue, predict_shares
from paceline.policies.controllers.balance import Balance
from paceline.policies.noise_rule import NoiseRule
from paceline.protocols.protocol import Plan
from paceline.run.simulate import Simulated, simulate
from paceline.utils.argument_types import checked_types
from paceline.utils.validation import check_range

PARTS = 5  # of the recording, for the interval
LEAST_SAMPLES = 2 * PARTS
LEAST_UPDATES, MOST_UPDATES = 300, 2000  # simulated for each protocol
LARGEST_PHI = 1e6  # where noise hides the gradient
AS_RECORDED = "DDP as recorded"


@checked_types
def advise_recording(
    recording: str | Path | DDPRecording, *, protocols: Sequence[str] = (), price: float | None = None, seed: int = 0
) -> RecordingAdvice:
    """Explain the waiting in a recorded DDP run, and predict what other protocols would give.

    The seconds per update of each protocol are simulated with the recorded times. The seconds to the loss that the run
    reached follow from the recorded noise of the gradients, for the learning-rate rule "noise". The choice of `auto` by
    the same rule is in the ranking.

    `RecordingAdvice.local_steps` has the seconds per minibatch of all-reduce with H = 1, 2, 4 ... 256 local steps, as
    local SGD makes them. Local steps change the loss after equal samples, so they are not ranked.

    Args:
        recording: recording, or its folder, that ``paceline record`` has written.
        protocols: protocols to rank, or "auto" for its choice; those of the papers with K = 1, 2, 4 ... n, one that
            waits for no persistent straggler, and "auto", if none is given. One with local steps is ranked without
            them, and has its times with them in place of all-reduce.
        price: price of one worker-hour, >= 0; None to show no cost.
        seed: seed of the simulations, >= 0.

    Raises:
        UsageError: the folder has no complete recording, or a protocol is not known.
    """
    check_range("[0, inf)", price=0.0 if price is None else price)
    read = recording if isinstance(recording, DDPRecording) else DDPRecording(recording)
    stragglers = find_stragglers(read)
    noise = _noise(read)
    auto = _choice(read, noise, seed)
    names = _with_choice(protocols or [*_protocols(read, stragglers), "auto"], auto, read)
    balances = {name: balance for name in names if (balance := _balance(name)) is not None}
    wanted = without_local_steps(_plan(name) for name in names if name not in balances)
    ranking = [_predict(read, plan, (), seed) for plan in wanted.plans.values()]
    balanced = {name: _predict_balanced(read, balance, name, seed) for name, balance in balances.items()}
    ranking += [_as_ddp(read, each.protocol, each.seconds_per_update) for each in balanced.values()]
    dropped = _slow_node(read, stragglers)
    if dropped:
        ranking.append(_predict(read, _plan("bsp"), dropped, seed))
    cluster = Cluster(read.ranks, trace_of(read))
    local_steps = [
        predict_local_steps(_plan(name), cluster, more, seed=seed, payload_bytes=read.payload_bytes)
        for name, more in (wanted.local_steps or {"all_reduce": set()}).items()
    ]
    return RecordingAdvice(
        recording=read,
        shares=time_shares(read),
        stragglers=stragglers,
        ranking=sorted([_recorded(read), *ranking], key=_sort_key),
        noise=noise,
        auto=auto,
        price=price,
        evidence=None if read.is_coarse else nearest_evidence(trace_of(read)),
        local_steps=local_steps,
        balanced=_fastest(each for name, each in balanced.items() if not balances[name].queue),
        queue=_fastest(each for name, each in balanced.items() if balances[name].queue),
    )


def _predict_balanced(recording: DDPRecording, balance: Balance, name: str, seed: int) -> SharesPrediction:
    return predict_queue(recording, name, seed) if balance.queue else predict_shares(recording, balance, name)


def _fastest(predictions: Iterable[SharesPrediction]) -> SharesPrediction | None:
    return min(predictions, key=lambda each: each.seconds_per_update, default=None)


def _choice(recording: DDPRecording, noise: NoiseScale | None, seed: int) -> AutoChoice | None:
    """Return the choice of `auto` with the recorded times, and V / N as phi; None if too few gradients were sampled."""
    if noise is None:
        return None
    trips_s = _trips_s(trace_of(recording), seed)
    return choose(trips_s, min(noise.ratio, LARGEST_PHI), _rule(recording))


def _rule(recording: DDPRecording) -> NoiseRule:
    """Return the rule of DDP's updates; a recording has no rate, which does not matter here."""
    optimizer = recording.headers[0].optimizer
    if optimizer is None:
        return NoiseRule(K=recording.ranks, learning_rate=1.0)
    return NoiseRule(K=recording.ranks, learning_rate=1.0, momentum=optimizer.momentum, adaptive=optimizer.is_adaptive)


def _trips_s(trace: Trace, seed: int) -> list[list[float]]:
    return trips_of(Cluster(trace.workers, trace), seed)


def _with_choice(names: Sequence[str], auto: AutoChoice | None, recording: DDPRecording) -> list[str]:
    """Return the names with the choice of `auto` in its place, or without it."""
    if auto is None and list(names) == ["auto"]:
        raise UsageError(
            f"{recording.path} has {len(recording.gradient_samples)} samples of gradients, and auto needs at least "
            f"{LEAST_SAMPLES}; record a longer run, or with sample=10"
        )
    chosen = [auto.protocol if auto is not None and name == "auto" else name for name in names]
    return [name for name in dict.fromkeys(chosen) if name != "auto"]


def _protocols(recording: DDPRecording, stragglers: Sequence[StragglerFacts]) -> list[str]:
    """Return shares by speed, the protocols of the papers, and the one that waits for no persistent straggler."""
    n, slow = recording.ranks, max(1, sum(each.is_persistent for each in stragglers))
    shares = [] if recording.is_coarse else [BALANCED, QUEUE]  # of times that are those of DDP's passes
    return list(dict.fromkeys([*shares, *default_protocols(n), f"k_sync(k={max(1, n - slow)})"]))


def _balance(name: str) -> Balance | None:
    """Return the settings of shares by speed; None for another protocol."""
    plan = parse_plan(name)
    controllers = plan.phases[0].controllers
    first = controllers[0] if len(plan.phases) == len(controllers) == 1 else None
    return first if isinstance(first, Balance) else None


def _sort_key(prediction: DDPPrediction) -> float:
    return prediction.seconds_per_update if np.isnan(prediction.seconds) else prediction.seconds


def _noise(recording: DDPRecording, part: int | None = None) -> NoiseScale | None:
    """Return the noise of one fifth of the sampled steps, or of all; None without enough samples."""
    samples = recording.gradient_samples
    if len(samples) < LEAST_SAMPLES:
        return None
    chosen = range(len(samples)) if part is None else np.array_split(np.arange(len(samples)), PARTS)[part]
    return noise_scale([samples[i] for i in chosen], recording.ranks)


def _slow_node(recording: DDPRecording, stragglers: Sequence[StragglerFacts]) -> tuple[int, ...]:
    """Return the ranks on the host of the most expensive straggler; the rank alone if the others are all there too."""
    if not stragglers or recording.ranks < 3:
        return ()
    slow = stragglers[0]
    node = tuple(header.rank for header in recording.headers if header.host == slow.host)
    return node if len(node) < recording.ranks - 1 else (slow.rank,)


def _recorded(recording: DDPRecording) -> DDPPrediction:
    return _as_ddp(recording, AS_RECORDED, float(recording.step_s.mean()))


def _as_ddp(recording: DDPRecording, name: str, update_s: float) -> DDPPrediction:
    """Return the prediction for updates of DDP that take so many seconds."""
    n = recording.ranks
    ring_bytes = 2 * (n - 1) / n * recording.payload_bytes
    has_noise = len(recording.gradient_samples) >= LEAST_SAMPLES
    to_loss_s = update_s * recording.steps if has_noise else nan
    return DDPPrediction(
        protocol=name,
        seconds_per_update=update_s,
        gradients_per_s=n / update_s,
        staleness=0.0,
        link_bits_per_s=8 * ring_bytes / update_s,
        seconds=to_loss_s,
        low_s=to_loss_s,
        high_s=to_loss_s,
    )


def _plan(name: str) -> Plan:
    plan = parse_plan(name)
    if len(plan.phases) > 1 or plan.phases[0].controllers or plan.phases[0].compensators:
        raise UsageError(f"{name} has phases, controllers or compensators; give constant knobs, as k_sync(k=4)")
    return plan


def _predict(recording: DDPRecording, plan: Plan, dropped: Sequence[int], seed: int) -> DDPPrediction:
    trace = trace_of(recording, without=dropped)
    updates = min(max(recording.steps, LEAST_UPDATES), MOST_UPDATES)
    whole = _simulate(plan, trace, updates, recording.payload_bytes, seed)
    link_bytes_per_s = max(whole.bytes_up, whole.bytes_down) / whole.time_s
    label = f"{plan} without {_ranks(dropped)}" if dropped else str(plan)
    k, staleness, update_s = whole.totals.mean_k, whole.totals.mean_staleness, whole.seconds_per_update
    prediction = DDPPrediction(
        protocol=label,
        seconds_per_update=update_s,
        gradients_per_s=k / update_s,
        staleness=staleness,
        link_bits_per_s=8 * link_bytes_per_s,
        seconds=nan,
        low_s=nan,
        high_s=nan,
    )
    noise = _noise(recording)
    if noise is None:
        return prediction
    price = score(plan.phases[0].protocol, _trips_s(trace, seed), _rule(recording)).price
    seconds = recording.steps * noise.relative_updates(k, price) * update_s
    parts = [_part_seconds(recording, plan, trace, part, seed) for part in range(PARTS)]
    return prediction._replace(seconds=seconds, low_s=min(parts), high_s=max(parts))


def _part_seconds(recording: DDPRecording, plan: Plan, trace: Trace, part: int, seed: int) -> float:
    """Return the seconds by the noise of one fifth and the times of the others."""
    noise = _noise(recording, part)
    assert noise is not None
    borders = [round(i * recording.steps / PARTS) for i in (part, part + 1)]
    rows = [row for row in trace.rows if not borders[0] < row.draw <= borders[1]]
    others = Trace(rows, has_server=False, sums_as_transfers=True, source=trace.source)
    simulated = _simulate(plan, others, LEAST_UPDATES, 0, seed)
    price = score(plan.phases[0].protocol, _trips_s(others, seed), _rule(recording)).price
    return recording.steps * noise.relative_updates(simulated.totals.mean_k, price) * simulated.seconds_per_update


def _simulate(plan: Plan, trace: Trace, updates: int, payload_bytes: int, seed: int) -> Simulated:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PacelineWarning)  # a trace may repeat
        return simulate(plan, Cluster(trace.workers, trace), updates=updates, seed=seed, payload_bytes=payload_bytes)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
