"""Return of a rank: when it has been lost, and when it tells its own loss."""

import pytest
from torch.distributed import HashStore

from paceline.clusters.launch_env import SURVIVES, UNFIT
from paceline.shares.survival.rejoining import RETURNING, goes_on_without, takes_turn
from paceline.shares.survival.roll import LOST, Event, tell, told

RANK, RANKS = 2, 4


@pytest.fixture
def store():
    """Return the store of a run whose ranks go on without a lost one."""
    store = HashStore()
    assert not goes_on_without(store, RANK, RANKS, "first")
    store.set(SURVIVES, "1")
    return store


def test_a_process_of_a_rank_that_lives_is_none_that_comes_back(store):
    assert not goes_on_without(store, RANK, RANKS, "first")
    assert told(store, RANKS) == []


def test_a_rank_whose_loss_is_told_comes_back(store):
    tell(store, Event(LOST, RANK), RANKS)
    assert goes_on_without(store, RANK, RANKS, "first")
    assert told(store, RANKS) == [Event(LOST, RANK)]


def test_a_rank_of_another_launcher_tells_its_own_loss(store):
    assert goes_on_without(store, RANK, RANKS, "second")
    assert told(store, RANKS) == [Event(LOST, RANK)]


def test_it_does_not_where_the_others_cannot_go_on(store):
    store.set(UNFIT, "its model is sharded")
    assert not goes_on_without(store, RANK, RANKS, "second")
    assert told(store, RANKS) == []


def test_one_rank_comes_back_at_a_time(store):
    assert takes_turn(store, 2)
    assert not takes_turn(store, 3)
    assert takes_turn(store, 2)
    store.delete_key(RETURNING)
    assert takes_turn(store, 3)
    assert not takes_turn(store, 2)
