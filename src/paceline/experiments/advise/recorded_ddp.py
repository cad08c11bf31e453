"""`advise` for DDP recordings: what waiting cost, who was slow, and what other protocols would give."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
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
from paceline.experiments.advise.recorded_noise import STALENESS_PRICES, NoiseScale, noise_scale
from paceline.experiments.advise.recording_advice import DDPPrediction, RecordingAdvice
from paceline.run.simulate import Simulated, simulate
from paceline.utils.argument_types import checked_types
from paceline.utils.validation import check_range

PARTS = 5  # of the recording, for the interval
LEAST_SAMPLES = 2 * PARTS
LEAST_UPDATES, MOST_UPDATES = 300, 2000  # simulated for each protocol
AS_RECORDED = "DDP as recorded"


@checked_types
def advise_recording(
    recording: str | Path | DDPRecording, *, protocols: Sequence[str] = (), price: float | None = None, seed: int = 0
) -> RecordingAdvice:
    """Explain the waiting in a recorded DDP run, and predict what other protocols would give.

    The seconds per update of each protocol are simulated with the recorded times. The seconds to the loss that the run
    reached follow from the recorded noise of the gradients.

    Args:
        recording: recording, or its folder, that ``paceline record`` has written.
        protocols: protocols to rank; those of the papers with K = 1, 2, 4 ... n, and one that waits for no
            persistent straggler, if none is given.
        price: price of one worker-hour, >= 0; None to show no cost.
        seed: seed of the simulations, >= 0.

    Raises:
        UsageError: the folder has no complete recording, or a protocol is not known.
    """
    check_range("[0, inf)", price=0.0 if price is None else price)
    read = recording if isinstance(recording, DDPRecording) else DDPRecording(recording)
    stragglers = find_stragglers(read)
    names = list(protocols) or _protocols(read.ranks, stragglers)
    ranking = [_predict(read, name, (), seed) for name in names]
    dropped = _slow_node(read, stragglers)
    if dropped:
        ranking.append(_predict(read, "bsp", dropped, seed))
    return RecordingAdvice(
        recording=read,
        shares=time_shares(read),
        stragglers=stragglers,
        ranking=sorted([_recorded(read), *ranking], key=_sort_key),
        noise=_noise(read),
        price=price,
    )


def _protocols(n: int, stragglers: Sequence[StragglerFacts]) -> list[str]:
    """Return the protocols of the papers, and the one that waits for no persistent straggler."""
    slow = max(1, sum(each.is_persistent for each in stragglers))
    return list(dict.fromkeys([*default_protocols(n), f"k_sync(k={max(1, n - slow)})"]))


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
    update_s = float(recording.step_s.mean())
    seconds = update_s * recording.steps
    n = recording.ranks
    ring_bytes = 2 * (n - 1) / n * recording.payload_bytes
    has_noise = len(recording.gradient_samples) >= LEAST_SAMPLES
    spread = (seconds, seconds, seconds) if has_noise else (nan, nan, nan)
    return DDPPrediction(AS_RECORDED, update_s, n / update_s, 0.0, 8 * ring_bytes / update_s, *spread)


def _predict(recording: DDPRecording, name: str, dropped: Sequence[int], seed: int) -> DDPPrediction:
    plan = parse_plan(name)
    if len(plan.phases) > 1 or plan.phases[0].controllers or plan.phases[0].compensators:
        raise UsageError(f"{name} has phases, controllers or compensators; give constant knobs, as k_sync(k=4)")
    trace = trace_of(recording, without=dropped)
    updates = min(max(recording.steps, LEAST_UPDATES), MOST_UPDATES)
    whole = _simulate(name, trace, updates, recording.payload_bytes, seed)
    link_bytes_per_s = max(whole.bytes_up, whole.bytes_down) / whole.time_s
    label = f"{name} without {_ranks(dropped)}" if dropped else name
    k, staleness, update_s = whole.totals.mean_k, whole.totals.mean_staleness, whole.seconds_per_update
    facts = (label, update_s, k / update_s, staleness, 8 * link_bytes_per_s)
    noise = _noise(recording)
    if noise is None:
        return DDPPrediction(*facts, nan, nan, nan)
    seconds = recording.steps * noise.relative_updates(k, staleness) * update_s
    parts = [each for part in range(PARTS) for each in _part_seconds(recording, name, trace, part, seed)]
    return DDPPrediction(*facts, seconds, min(parts), max(parts))


def _part_seconds(recording: DDPRecording, name: str, trace: Trace, part: int, seed: int) -> Iterator[float]:
    """Yield the seconds by the noise of one fifth and the times of the others, for each price of staleness."""
    noise = _noise(recording, part)
    assert noise is not None
    borders = [round(i * recording.steps / PARTS) for i in (part, part + 1)]
    rows = [row for row in trace.rows if not borders[0] < row.draw <= borders[1]]
    others = Trace(rows, has_server=False, sums_as_transfers=True, source=trace.source)
    simulated = _simulate(name, others, LEAST_UPDATES, 0, seed)
    for staleness_price in STALENESS_PRICES:
        updates = noise.relative_updates(simulated.totals.mean_k, simulated.totals.mean_staleness, staleness_price)
        yield recording.steps * updates * simulated.seconds_per_update


def _simulate(name: str, trace: Trace, updates: int, payload_bytes: int, seed: int) -> Simulated:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PacelineWarning)  # a trace may repeat
        return simulate(name, Cluster(trace.workers, trace), updates=updates, seed=seed, payload_bytes=payload_bytes)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
