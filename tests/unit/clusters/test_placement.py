"""Launch variables of ranks whose launcher sets none."""

import pytest

import paceline as pl
from paceline.clusters.launch_env import LaunchEnv
from paceline.clusters.placement import Placement


def launched(placement, rank):
    return LaunchEnv.from_environment(placement.environment(rank))


def test_ranks_on_one_host_meet_on_the_loopback_interface():
    for rank in range(3):
        ranks = launched(Placement(hosts=("10.0.0.1",) * 3, port=4711), rank)
        assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size) == (rank, 3, rank, 3)
        assert ranks.master == ("127.0.0.1", 4711)


def test_ranks_on_two_hosts_meet_at_the_host_of_rank_0():
    placement = Placement(hosts=("10.0.0.2", "10.0.0.1", "10.0.0.2"), port=4711)
    found = [launched(placement, rank) for rank in range(3)]
    assert [(each.local_rank, each.local_world_size) for each in found] == [(0, 2), (0, 1), (1, 2)]
    assert {each.master for each in found} == {("10.0.0.2", 4711)}


def test_a_rank_that_moves_keeps_its_number_and_counts_no_restart():
    moved = Placement(hosts=("10.0.0.1", "10.0.0.2"), port=4711).replaced({1: "10.0.0.3"})
    assert moved.hosts == ("10.0.0.1", "10.0.0.3")
    assert launched(moved, 1).restarts == 0


def test_a_second_rank_0_listens_on_the_same_port_and_resumes():
    again = Placement(hosts=("10.0.0.1", "10.0.0.2"), port=4711).replaced({0: "10.0.0.3"})
    assert launched(again, 1).master == ("10.0.0.3", 4711)
    assert launched(again, 0).restarts == 1


def test_a_standby_is_refused_where_no_command_can_be_run_again(started):
    started(RANK="0", PACELINE_SPAWN_SIDECARS="1", TORCHELASTIC_RUN_ID=None)
    with pytest.raises(pl.UsageError, match="standby=1, but the command of the processes cannot be run again"):
        pl.train(pl.jobs.digits(), protocol="bsp", cluster=pl.Torchrun(standby=1), stop="updates=1")
