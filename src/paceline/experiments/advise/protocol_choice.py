"""Choice that `auto` would have made with given round trips and a given phi."""

from __future__ import annotations

import warnings
from itertools import repeat

from paceline.clusters.simulated import Cluster
from paceline.errors import PacelineWarning
from paceline.experiments.advise.result import AutoChoice
from paceline.policies.controllers.auto_candidates import default_candidates
from paceline.policies.estimators.noise.staleness_price import price_of
from paceline.policies.estimators.replay.protocol_replay import ProtocolReplay
from paceline.policies.estimators.replay.protocol_scores import Score, score_of, steady
from paceline.policies.noise_rule import NoiseRule
from paceline.protocols.protocol import Protocol

TRIPS = 100  # of each worker
GRADIENTS, GRADIENTS_OF_WORKER = 400, 24  # replayed for each protocol


def trips_of(cluster: Cluster, seed: int, payload_bytes: float = 0) -> list[list[float]]:
    """Return the first round trips of each worker of a cluster, in seconds, for work without breaks."""
    trips = cluster.round_trips(seed, payload_bytes)
    table: list[list[float]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PacelineWarning)  # a trace may repeat
        for worker in range(cluster.n):
            now, own = 0.0, []
            for draw in range(1, TRIPS + 1):
                own.append(trips.duration_s(worker, draw, now))
                now += own[-1]
            table.append(own)
    return table


def score(protocol: Protocol, trips_s: list[list[float]], rule: NoiseRule) -> Score:
    """Return the score of a protocol on these round trips.

    Args:
        protocol: protocol.
        trips_s: round trips of each worker, in seconds.
        rule: learning-rate rule of the run, with the momentum.
    """
    replay = ProtocolReplay(protocol, trips_s).run(max(GRADIENTS, GRADIENTS_OF_WORKER * len(trips_s)))
    return score_of(protocol.name, replay, rule.with_momentum(price_of(steady(replay), rule.reference)))


def choose(trips_s: list[list[float]], phi: float, rule: NoiseRule) -> AutoChoice:
    """Return the candidate of `auto` with the largest progress per second.

    >>> choose([[1.0], [1.0], [1.0], [9.0]], phi=1.0, rule=NoiseRule(K=4, learning_rate=0.1)).protocol
    'k_sync(k=3)'
    """

    def progress_per_s(score: Score) -> float:
        return score.gradients_per_s * rule.progress(score.k, phi, score.price)

    best = max(map(score, default_candidates(len(trips_s)), repeat(trips_s), repeat(rule)), key=progress_per_s)
    return AutoChoice(
        protocol=best.protocol,
        gradients_per_s=best.gradients_per_s,
        k=best.k,
        price=best.price,
        phi=phi,
        progress_per_s=progress_per_s(best),
    )
