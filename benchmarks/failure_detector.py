"""False alarms of the timeout on silent workers, and its delay for a worker that stops.

Round trips of healthy workers are drawn one after another. A round trip that takes as long as the timeout derived from
the earlier ones is a false alarm. It is observed all the same, as the late return of a lost worker is. Many short
streams show the rule with few observations, a few long ones show its limit. The earlier rule is 20 x the longest round
trip. The median is 1 s, so the minimum of 10 s does not matter, and losses are rare in comparison. Of heterogeneous
workers the last one is 20 x slower than the others.

In further rows workers are lost at a given rate, and their median round trip is 10 s. The timeout then follows the
hazard of loss: it is shorter, and there are more false alarms.

The bars for log-normal round trips: at most one false alarm in a million gradients at sigma = 1, counted from the first
one, and at most one in 100 losses at sigma = 1.16. A worker that stops is detected after at most 300 x the median round
trip once 50 were observed.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log
from time import process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common import options, report, rounded, spread
from paceline.policies.estimators.timeouts.round_trip_timeout import MOST_SIGMA, RoundTripTimeout

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Floats]

MEDIAN_S = 1.0
WORKERS, EARLY, SLOW = 4, 50, 20.0
MOST_ALARMS, MOST_MEDIANS, MOST_ALARMS_PER_LOSS = 1e-6, 300, 0.01
LOSSES_PER_HOUR, LOSSY_MEDIAN_S = (1, 10, 100), 10.0

DISTRIBUTIONS: dict[str, Draw] = {  # with median 1
    "log-normal, sigma 0.5": lambda rng, size: np.exp(0.5 * rng.standard_normal(size)),
    "log-normal, sigma 1": lambda rng, size: np.exp(rng.standard_normal(size)),
    "log-normal, sigma 1.5": lambda rng, size: np.exp(1.5 * rng.standard_normal(size)),
    "exponential": lambda rng, size: rng.exponential(1 / log(2), size),
    "Pareto(2.5)": lambda rng, size: (1 + rng.pareto(2.5, size)) * 2 ** (-1 / 2.5),
    "Pareto(1.1)": lambda rng, size: (1 + rng.pareto(1.1, size)) * 2 ** (-1 / 1.1),
}


class LongestTimeout:
    """Earlier rule: 20 x the longest round trip."""

    def __init__(self) -> None:
        self._longest_s = 0.0

    def of(self, worker: int) -> float:
        return 20 * self._longest_s or np.inf

    def observe(self, worker: int, round_trip_s: float) -> None:
        self._longest_s = max(self._longest_s, round_trip_s)


RULES: dict[str, Callable[[], Any]] = {"medians": RoundTripTimeout, "longest": LongestTimeout}


def main() -> None:
    parser = options(__doc__ or "", rounds=1)
    parser.add_argument("--gradients", type=int, default=1_000_000, help="gradients per law and kind of stream")
    args = parser.parse_args()

    rows = {}
    for seed, (name, draw) in enumerate(DISTRIBUTIONS.items()):
        for workers in ("alike", "one slow"):
            rows[f"{name}, workers {workers}"] = measure(draw, workers == "one slow", args.gradients, seed)
    lossy = {
        f"{rate} losses an hour": measure_with_losses(rate / 3600, args.gradients, rate) for rate in LOSSES_PER_HOUR
    }
    ours = rows["log-normal, sigma 1, workers alike"]["medians"]
    longest = max(row["medians"]["found after, medians"]["max"] for row in rows.values())  # once 50 were observed
    report(
        "failure_detector",
        args,
        {
            "bar": f"log-normal, sigma 1: at most {MOST_ALARMS:g} false alarms a gradient; {MOST_MEDIANS} medians",
            "false alarms": {key: ours[key] for key in ("early", "settled")},
            "found after at most, medians": longest,
            "false alarms per loss at most": max(row["false alarms per loss"] for row in lossy.values()),
            "meets_bar": ours["early"] + ours["settled"] <= MOST_ALARMS * args.gradients
            and longest <= MOST_MEDIANS
            and all(row["false alarms per loss"] <= MOST_ALARMS_PER_LOSS for row in lossy.values()),
            "microseconds of a round trip observed": spread([cost(args.gradients // 10) for _ in range(5)]),
            **rows,
            **lossy,
        },
    )


def measure(draw: Draw, has_slow_one: bool, gradients: int, seed: int) -> dict[str, Any]:
    """Count the false alarms of both rules on the same round trips."""
    rng = np.random.default_rng(seed)
    slowness = np.where(np.arange(gradients) % WORKERS == WORKERS - 1, SLOW if has_slow_one else 1.0, 1.0)
    round_trips_s = (MEDIAN_S * slowness * draw(rng, gradients)).tolist()
    result: dict[str, Any] = {"gradients": gradients}
    for name, rule in RULES.items():
        alarms, found = {}, []
        for when, length in (("early", EARLY), ("settled", gradients // 10)):
            alarms[when] = 0
            for begin in range(0, gradients, length):
                stream, timeout = round_trips_s[begin : begin + length], rule()
                alarms[when] += count(timeout, stream)
                found.append(timeout.of(0) / observed_median_s(stream))
        result[name] = {
            **alarms,
            "found after, medians": {"max": rounded(max(found)), "median": rounded(np.median(found))},
        }
    return result


def measure_with_losses(hazard: float, gradients: int, seed: int) -> dict[str, Any]:
    """Count the false alarms of workers that are lost at a rate per second, with the largest sigma of the rule."""
    rng, timeout = np.random.default_rng(seed), RoundTripTimeout()
    round_trips_s = (LOSSY_MEDIAN_S * np.exp(MOST_SIGMA * rng.standard_normal(gradients))).tolist()
    losses = rng.poisson(hazard * np.array(round_trips_s)).tolist()
    alarms = 0
    for number, (round_trip_s, times_lost) in enumerate(zip(round_trips_s, losses, strict=True)):
        worker = number % WORKERS
        alarms += round_trip_s >= timeout.of(worker)
        timeout.observe(worker, round_trip_s)
        for _ in range(times_lost):
            timeout.hazards.add_loss(worker)
    return {
        "losses": sum(losses),
        "false alarms": alarms,
        "false alarms per loss": rounded(alarms / sum(losses)),
        "found after, medians": rounded(timeout.of(0) / LOSSY_MEDIAN_S),
    }


def observed_median_s(stream: list[float]) -> float:
    """Return the larger of two medians: of all latest round trips, and of those of the first worker."""
    return max(float(np.median(stream[-101:])), float(np.median(stream[::WORKERS][-21:])))


def count(timeout: Any, round_trips_s: list[float]) -> int:
    """Return the number of round trips that reach the timeout."""
    alarms = 0
    for number, round_trip_s in enumerate(round_trips_s):
        worker = number % WORKERS
        alarms += round_trip_s >= timeout.of(worker)
        timeout.observe(worker, round_trip_s)
    return alarms


def cost(gradients: int) -> float:
    """Return the processor time of an observation in microseconds."""
    round_trips_s = np.random.default_rng(0).lognormal(size=gradients).tolist()
    timeout, begun = RoundTripTimeout(), process_time()
    for number, round_trip_s in enumerate(round_trips_s):
        timeout.observe(number % WORKERS, round_trip_s)
    return (process_time() - begun) / gradients * 1e6


if __name__ == "__main__":
    main()
