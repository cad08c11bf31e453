"""What becomes of the ranks of `pl.Ray` when their processes start, die or fail, as lists of events and actions."""

import logging

import pytest

import paceline as pl
from paceline.clusters.launch_env import LaunchEnv
from paceline.clusters.rank_restarts import EndRank, MakeRank
from paceline.clusters.rank_supervisor import (
    GRACE_S,
    InterruptRank0,
    RankFailure,
    RankSupervisor,
    StartCondition,
    TrainRank,
)

SIZE = 3
WORKER = {"CPU": 2, "GPU": 1}
ALL = [MakeRank(rank) for rank in range(SIZE)]
LATE = (3, 4)
DEFAULTS = {"max_restarts": -1, "folder": "/runs/a", "may_spread": False, "falls_together": False}


def started(late=0, least=SIZE, start_timeout_s=60.0, **changes):
    """Return a supervisor whose first ranks have been made but are not there."""
    resources = [{"CPU": 1}, *[WORKER] * (SIZE - 1 + late)]
    condition = StartCondition(SIZE, least, start_timeout_s)
    supervisor = RankSupervisor(resources, "a token", condition, **{**DEFAULTS, **changes})
    assert supervisor.begin(0.0) == ALL
    return supervisor


def training(**changes):
    """Return a supervisor whose ranks train on one host."""
    supervisor = started(**changes)
    make_all(supervisor, "10.0.0.1")
    return supervisor


def growing(**changes):
    """Return a supervisor whose first ranks train on one host, and whose late ranks are not there."""
    return training(late=len(LATE), **changes)


def make_all(supervisor, host, port=4000):
    """Let the first ranks be there, and return what follows from the last one."""
    first = [supervisor.on_made(rank, host, port + rank) for rank in (2, 0)]
    assert first == [[], []]
    return supervisor.on_made(1, host, port + 1)


def failure_of(error):
    try:
        raise error
    except Exception as raised:
        return RankFailure.of(raised)


def environments(actions):
    assert all(isinstance(action, TrainRank) for action in actions)
    return {action.rank: action.environment for action in actions}


def test_ranks_begin_when_all_are_there():
    found = environments(make_all(started(), "10.0.0.1"))
    assert list(found) == [0, 1, 2]
    for rank, environment in found.items():
        assert environment["RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == "3"
        assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("127.0.0.1", "4000")
        assert environment["PACELINE_TOKEN"] == "a token"
        assert environment["PACELINE_SPAWN_SIDECARS"] == "1"
        assert environment["TORCHELASTIC_RESTART_COUNT"] == "0"


def test_ranks_that_may_move_to_another_host_do_not_meet_on_the_loopback_interface():
    found = environments(make_all(started(may_spread=True), "10.0.0.1"))
    assert {environment["MASTER_ADDR"] for environment in found.values()} == {"10.0.0.1"}


def test_a_worker_that_dies_is_made_again_alone_under_its_rank():
    supervisor = training()
    assert supervisor.on_lost(2, "its node is gone", 10.0) == [MakeRank(2)]
    (found,) = environments(supervisor.on_made(2, "10.0.0.2", 5000)).values()
    assert (found["RANK"], found["MASTER_PORT"], found["TORCHELASTIC_RESTART_COUNT"]) == ("2", "4000", "0")


def test_when_rank_0_dies_all_are_made_again_and_the_run_is_resumed(caplog):
    supervisor = training()
    assert supervisor.on_lost(0, "killed", 10.0) == ALL
    assert "rank 0 is gone: killed; all ranks are made again, and the run goes on from its last" in caplog.text
    found = environments(make_all(supervisor, "10.0.0.2", port=6000))
    assert {each["TORCHELASTIC_RESTART_COUNT"] for each in found.values()} == {"1"}
    assert {each["MASTER_PORT"] for each in found.values()} == {"6000"}


def test_without_a_folder_the_log_says_that_the_run_begins_anew(caplog):
    training(folder="").on_lost(0, "killed", 10.0)
    assert "the run begins anew: give out= to have checkpoints" in caplog.text


def test_ranks_that_cannot_go_on_without_each_other_are_all_made_again():
    assert training(falls_together=True).on_lost(2, "killed", 10.0) == ALL


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_rank_that_dies_before_the_run_begins_is_made_again_alone(rank):
    supervisor = started()
    supervisor.on_made(rank, "10.0.0.1", 4000)
    assert supervisor.on_lost(rank, "killed", 1.0) == [MakeRank(rank)]
    make_all(supervisor, "10.0.0.1")


def test_each_rank_is_made_again_max_restarts_times(caplog):
    supervisor = training(max_restarts=1)
    for rank in (1, 2):
        assert supervisor.on_lost(rank, "killed", 1.0) == [MakeRank(rank)]
        supervisor.on_made(rank, "10.0.0.1", 4000)
    assert supervisor.on_lost(1, "killed", 2.0) == []
    assert "rank 1 is gone, after max_restarts=1: killed" in caplog.text


@pytest.mark.parametrize(("rank", "changes"), [(0, {}), (1, {"falls_together": True})])
def test_the_run_fails_if_a_rank_that_it_needs_is_not_made_again(rank, changes):
    expected = (
        rf"rank {rank} is gone: killed; give pl.Ray a max_restarts above 0, and train again with resume='/runs/a'"
    )
    with pytest.raises(pl.RunError, match=expected):
        training(max_restarts=0, **changes).on_lost(rank, "killed", 1.0)


def test_the_run_fails_if_a_rank_dies_before_it_begins_and_is_not_made_again():
    with pytest.raises(pl.RunError, match="rank 2 is gone: killed"):
        started(max_restarts=0).on_lost(2, "killed", 1.0)


def test_an_exception_in_a_worker_ends_the_run_when_rank_0_has_saved_it():
    supervisor = training()
    assert supervisor.on_failed(2, failure_of(ValueError("no such class")), 5.0) == [InterruptRank0()]
    assert supervisor.on_failed(1, failure_of(ValueError("another")), 5.1) == []
    expected = r"rank 2 failed: ValueError: no such class; correct the code, and train again with resume='/runs/a'"
    with pytest.raises(pl.RunError, match=expected) as raised:
        supervisor.on_ended("interrupted by SIGTERM", 6.0, is_interrupted=True)
    assert "raise error\nValueError: no such class" in str(raised.value.__cause__)


def test_an_exception_in_a_worker_is_raised_also_if_rank_0_dies_before_it_has_saved_the_run():
    supervisor = training()
    supervisor.on_failed(2, failure_of(ValueError("no such class")), 5.0)
    with pytest.raises(pl.RunError, match="rank 2 failed: ValueError"):
        supervisor.on_lost(0, "killed", 6.0)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (pl.UsageError("runs/a exists already"), pl.UsageError, r"^runs/a exists already$"),
        (KeyError("x"), pl.RunError, r"^rank 0 failed: KeyError: 'x'; correct the code"),
    ],
)
def test_an_exception_in_rank_0_is_raised_at_once(error, kind, message):
    with pytest.raises(kind, match=message):
        training().on_failed(0, failure_of(error), 5.0)


def test_an_exception_before_the_run_begins_is_raised_at_once():
    with pytest.raises(pl.RunError, match="rank 1 failed: ModuleNotFoundError: No module named 'mine'"):
        started().on_failed(1, failure_of(ModuleNotFoundError("No module named 'mine'")), 5.0)


def test_a_worker_that_loses_rank_0_is_made_again_if_rank_0_is_still_there():
    supervisor = training()
    assert supervisor.on_failed(1, failure_of(pl.RunError("rank 0 is gone")), 5.0) == []
    assert supervisor.on_time(5.0 + GRACE_S) == []
    assert supervisor.on_time(5.1 + GRACE_S) == [MakeRank(1)]


def test_errors_that_follow_from_the_death_of_rank_0_have_no_effect():
    supervisor = training(max_restarts=1)
    supervisor.on_failed(1, failure_of(pl.RunError("rank 0 is gone")), 5.0)
    assert supervisor.on_lost(0, "killed", 6.0) == ALL
    assert supervisor.on_time(7.0 + GRACE_S) == []
    make_all(supervisor, "10.0.0.1")
    assert supervisor.on_lost(1, "killed", 20.0) == [MakeRank(1)]


def test_an_error_of_rank_0_that_follows_from_the_death_of_another_rank_has_no_effect():
    supervisor = training(falls_together=True)
    assert supervisor.on_failed(0, failure_of(pl.RunError("rank 2 is gone")), 5.0) == []
    assert supervisor.on_lost(2, "killed", 6.0) == ALL


def test_an_error_of_rank_0_without_a_death_ends_the_run():
    supervisor = training()
    assert supervisor.on_failed(0, failure_of(pl.RunError("the disk is full")), 5.0) == []
    with pytest.raises(pl.RunError, match=r"^the disk is full$"):
        supervisor.on_time(5.1 + GRACE_S)


def test_the_exception_of_a_worker_is_raised_rather_than_the_error_of_rank_0_that_follows():
    supervisor = training()
    supervisor.on_failed(0, failure_of(pl.RunError("worker 1 failed while it started")), 5.0)
    with pytest.raises(pl.RunError, match="rank 2 failed: ValueError: no such class"):
        supervisor.on_failed(2, failure_of(ValueError("no such class")), 5.5)


def test_on_request_rank_0_saves_the_run_and_nothing_is_made_again():
    supervisor = training()
    assert supervisor.stop() == [InterruptRank0()]
    assert supervisor.stop() == []
    assert supervisor.on_lost(2, "killed", 5.0) == []
    assert supervisor.on_ended("interrupted by SIGTERM", 6.0, is_interrupted=True) == []


def test_a_request_ends_the_actors_at_once_if_there_is_no_run_to_save():
    with pytest.raises(KeyboardInterrupt):
        started().stop()
    supervisor = training()
    supervisor.stop()
    with pytest.raises(KeyboardInterrupt):
        supervisor.on_lost(0, "killed", 5.0)


def test_when_the_machine_of_rank_0_is_taken_away_the_run_goes_on():
    assert training().on_ended("interrupted by SIGTERM", 5.0, is_interrupted=True) == ALL
    assert training(max_restarts=0).on_ended("interrupted by SIGTERM", 5.0, is_interrupted=True) == []


def test_ranks_that_train_have_no_timeout():
    assert training().on_time(1e6) == []


def test_the_result_of_rank_0_is_that_of_the_run():
    assert training().on_ended("20 updates made", 5.0, is_interrupted=False) == []


def test_ranks_that_ray_cannot_make_are_named():
    supervisor = started()
    supervisor.on_made(0, "10.0.0.1", 4000)
    assert supervisor.on_time(60.0) == []
    with pytest.raises(pl.RunError, match=r"made ranks 1 and 2 \(.*\) within start_timeout_s=60: ray status"):
        supervisor.on_time(60.1)


def test_every_30_s_the_log_names_the_ranks_that_are_missing_and_their_resources(caplog):
    supervisor = started(start_timeout_s=300.0)
    for now, warnings in ((29.9, 0), (30.0, 1), (59.9, 1), (60.0, 2)):
        assert supervisor.on_time(now) == []
        assert len(caplog.messages) == warnings
    supervisor.on_made(0, "10.0.0.1", 4000)
    supervisor.on_made(2, "10.0.0.1", 4002)
    supervisor.on_time(90.0)
    both = "rank 0 (resources {'CPU': 1}) and ranks 1 and 2 (resources {'CPU': 2, 'GPU': 1})"
    assert caplog.messages[0] == (
        f"Ray has not made {both} for 30 s: ray status shows what is free; the run waits for start_timeout_s=300"
    )
    assert "Ray has not made rank 1 (resources {'CPU': 2, 'GPU': 1}) for 90 s" in caplog.messages[2]
    environments(supervisor.on_made(1, "10.0.0.1", 4001))
    assert supervisor.on_time(500.0) == []
    assert len(caplog.messages) == 3


def test_a_run_begins_without_missing_ranks_if_the_others_are_enough():
    supervisor = started(least=2)
    for rank in (0, 2):
        assert supervisor.on_made(rank, "10.0.0.1", 4000) == []
    found = environments(supervisor.on_time(60.1))
    assert {rank: environment["LOCAL_WORLD_SIZE"] for rank, environment in found.items()} == {0: "2", 2: "2"}
    late = environments(supervisor.on_made(1, "10.0.0.2", 4001))[1]
    assert (late["LOCAL_RANK"], late["MASTER_ADDR"]) == ("0", found[0]["MASTER_ADDR"])
    assert found[0]["MASTER_ADDR"] == "10.0.0.1"  # which another host can reach


def test_the_log_names_a_rank_that_is_made_again(caplog):
    with caplog.at_level(logging.WARNING):
        training().on_lost(1, "its node is gone", 5.0)
    assert "rank 1 is made again: its node is gone" in caplog.text


def test_late_ranks_are_made_when_the_first_ones_train(caplog):
    with caplog.at_level(logging.INFO):
        actions = make_all(started(late=len(LATE)), "10.0.0.1")
    assert actions[SIZE:] == [MakeRank(rank) for rank in LATE]
    found = environments(actions[:SIZE])
    assert list(found) == [0, 1, 2]
    assert {each["WORLD_SIZE"] for each in found.values()} == {"3"}
    assert {each["MASTER_ADDR"] for each in found.values()} == {"10.0.0.1"}
    assert caplog.messages == [
        "the run begins; ranks 3 and 4 (resources {'CPU': 2, 'GPU': 1}) may join when Ray has resources"
    ]


@pytest.mark.parametrize("host", ["10.0.0.1", "10.0.0.2"])
def test_a_late_rank_joins_with_the_world_size_of_the_first_ones(host):
    supervisor = growing()
    for rank in reversed(LATE):
        (found,) = environments(supervisor.on_made(rank, host, 5000)).values()
        assert found["RANK"] == str(rank)
        assert (found["WORLD_SIZE"], found["MASTER_ADDR"], found["MASTER_PORT"]) == ("3", "10.0.0.1", "4000")
        assert LaunchEnv.from_environment(found).token == "a token"


def test_the_run_does_not_wait_for_late_ranks(caplog):
    assert growing(start_timeout_s=60.0).on_time(1e6) == []
    assert caplog.messages == []
    assert growing().stop() == [InterruptRank0()]
    assert growing().on_ended("20 updates made", 5.0, is_interrupted=False) == []


def test_the_run_begins_without_missing_ranks_although_late_ones_may_join():
    supervisor = started(late=len(LATE), least=2)
    for rank in (0, 2):
        supervisor.on_made(rank, "10.0.0.1", 4000)
    *trained, third, fourth = supervisor.on_time(60.1)
    assert list(environments(trained)) == [0, 2]
    assert [third, fourth] == [MakeRank(rank) for rank in LATE]


def test_late_ranks_are_not_among_those_that_are_missing():
    with pytest.raises(pl.RunError, match=r"made rank 0 \(.*\) and ranks 1 and 2 \(.*\) within"):
        started(late=len(LATE)).on_time(60.1)


def test_a_late_rank_is_made_again_alone_max_restarts_times(caplog):
    supervisor = growing(max_restarts=1)
    supervisor.on_made(4, "10.0.0.2", 5000)
    assert supervisor.on_lost(4, "its node is gone", 10.0) == [MakeRank(4)]
    assert list(environments(supervisor.on_made(4, "10.0.0.3", 5000))) == [4]
    assert supervisor.on_lost(4, "its node is gone", 20.0) == []
    assert "rank 4 is gone, after max_restarts=1: its node is gone" in caplog.text


@pytest.mark.parametrize("there", [(), LATE])
def test_when_rank_0_dies_late_ranks_end_and_are_made_again_after_the_first_ones(there):
    supervisor = growing()
    for rank in there:
        supervisor.on_made(rank, "10.0.0.2", 5000)
    assert supervisor.on_lost(0, "killed", 10.0) == [*(EndRank(rank) for rank in LATE), *ALL]
    actions = make_all(supervisor, "10.0.0.1")
    assert list(environments(actions[:SIZE])) == [0, 1, 2]
    assert actions[SIZE:] == [MakeRank(rank) for rank in LATE]
    (found,) = environments(supervisor.on_made(3, "10.0.0.2", 5000)).values()
    assert found["TORCHELASTIC_RESTART_COUNT"] == "1"
