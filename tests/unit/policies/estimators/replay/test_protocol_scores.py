from copy import deepcopy

import pytest

import paceline as pl
from paceline.catalogue.protocols import bsp
from paceline.policies.estimators.noise.staleness_price import Reference
from paceline.policies.estimators.replay.protocol_scores import Scoring

PROTOCOLS = [pl.k_sync(k=3), pl.asp(), pl.ssp(lead=2)]
TRIPS_S = [[1.0, 1.3, 0.9], [1.1, 0.8], [4.0], [1.0, 2.0]]


def test_scores_are_progress_per_second():
    scoring = Scoring([bsp(), pl.asp()], [[1.0], [4.0]])
    while not scoring.is_done:
        scoring.advance(50)
    waits, free = scoring.scores
    assert waits.gradients_per_s == pytest.approx(0.5)
    assert free.gradients_per_s == pytest.approx(1.25, rel=0.02)
    assert free.price > 1.0
    assert waits.staleness == 0.0
    assert free.staleness == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("stage", ["replay", "scanned"])
def test_scoring_goes_on_from_its_state_with_the_same_pieces(stage):
    ours = Scoring(PROTOCOLS, TRIPS_S, Reference.of_sgd(0.5, K=4))
    while not ours.is_done and not (ours.scores and ours.state_dict()[stage]):
        ours.advance(1)
    assert ours.state_dict()[stage]
    other = Scoring(PROTOCOLS, [])
    other.load_state_dict(deepcopy(ours.state_dict()))
    while not ours.is_done:
        ours.advance(100)
        other.advance(100)
        assert other.state_dict() == ours.state_dict()
    assert other.scores == ours.scores
