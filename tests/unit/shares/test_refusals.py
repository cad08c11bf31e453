"""Ranks that train without a model that is taken over."""

import pytest

from paceline.errors import UsageError
from paceline.shares import refusals
from paceline.shares.refusals import MOST_PASSES, OtherTraining


@pytest.fixture
def ranks(monkeypatch):
    def of(count):
        monkeypatch.setattr(refusals.dist, "is_initialized", lambda: count > 0)
        monkeypatch.setattr(refusals.dist, "get_world_size", lambda: count)
        monkeypatch.setattr(refusals, "OWN_TRAINING", ("no.such.module",))

    return of


def test_ranks_that_train_without_a_model_of_several_ranks_are_refused(ranks):
    ranks(2)
    training = OtherTraining()
    for _ in range(MOST_PASSES):
        training.backward_began()
    with pytest.raises(UsageError, match="2 ranks train without DistributedDataParallel or fully_shard"):
        training.backward_began()


@pytest.mark.parametrize("count", [0, 1])
def test_a_process_that_trains_alone_is_not(ranks, count):
    ranks(count)
    training = OtherTraining()
    for _ in range(2 * MOST_PASSES):
        training.backward_began()


def test_attached_loops_are_not(ranks, monkeypatch):
    ranks(2)
    monkeypatch.setattr(refusals, "OWN_TRAINING", (__name__,))
    training = OtherTraining()
    for _ in range(2 * MOST_PASSES):
        training.backward_began()
