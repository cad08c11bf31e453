"""What becomes of the ranks of `paceline run` when their processes end, as lists of events and actions."""

import signal
from math import inf

import pytest

from paceline.clusters.launch_env import BOUND, ENDED, STANDBY, SURVIVES
from paceline.clusters.launch_supervisor import (
    LATE_S,
    UNREACHABLE_S,
    KillRank,
    LaunchSupervisor,
    PassSignal,
)
from paceline.clusters.rank_restarts import LONGEST_PAUSE_S, WORK_S, EndRank, MakeRank

ALL = [MakeRank(rank) for rank in range(3)]
KILLED = -signal.SIGKILL


def started(max_restarts=-1, ranks=(0, 1, 2)):
    """Return a supervisor whose ranks were started at the time 0."""
    supervisor = LaunchSupervisor(ranks, max_restarts)
    assert supervisor.begin(0.0) == [MakeRank(rank) for rank in ranks]
    return supervisor


def end_all(supervisor, statuses, now=100.0):
    """Let ranks end by themselves, and return the status of the launcher."""
    for rank, status in statuses.items():
        assert supervisor.status is None
        assert supervisor.on_exit(rank, status, now) == []
    return supervisor.status


def lose(supervisor, rank, status, now):
    """Let a rank be lost, and start it again; return the pause."""
    assert supervisor.on_exit(rank, status, now) == []
    due_s = supervisor.wake_s
    assert supervisor.on_time(due_s - 0.01) == []
    assert supervisor.on_time(due_s) == [MakeRank(rank)]
    return due_s - now


def test_a_run_whose_ranks_end_well_ends_well():
    assert end_all(started(), {1: 0, 0: 0, 2: 0}) == 0


def test_a_rank_that_is_lost_is_started_again_alone():
    supervisor = started()
    lose(supervisor, 2, KILLED, 5.0)
    assert end_all(supervisor, {0: 0, 1: 0, 2: 0}) == 0


def test_the_pause_doubles_with_each_loss_and_a_minute_of_work_resets_it():
    supervisor, now, pauses = started(), 0.0, []
    for work_s in [1.0] * 8 + [WORK_S]:
        now += work_s
        pauses.append(lose(supervisor, 1, KILLED, now))
        now += pauses[-1]
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S, 1])


def test_ranks_have_pauses_of_their_own():
    supervisor = started()
    assert lose(supervisor, 1, KILLED, 1.0) == lose(supervisor, 2, KILLED, 3.0) == 1.0


def test_when_rank_0_is_lost_all_are_started_again_once_all_have_ended():
    supervisor = started()
    assert supervisor.on_exit(0, KILLED, 5.0) == [EndRank(0), EndRank(1), EndRank(2)]
    for rank in (2, 0):
        assert supervisor.on_ended(rank, 5.5) == []
        assert supervisor.on_time(9.0) == []
    assert supervisor.on_ended(1, 9.0) == []
    assert supervisor.on_time(9.0) == ALL
    assert end_all(supervisor, {0: 0, 1: 0, 2: 0}) == 0


def test_all_are_started_again_after_the_pause_of_rank_0():
    supervisor = started()
    supervisor.on_exit(0, KILLED, 5.0)
    for rank in range(3):
        supervisor.on_ended(rank, 5.0)
    assert supervisor.wake_s == 6.0
    assert supervisor.on_time(6.0) == ALL


def test_a_rank_that_waits_or_has_ended_is_started_again_with_rank_0():
    supervisor = started()
    supervisor.on_exit(1, KILLED, 4.0)
    supervisor.on_exit(2, 0, 4.5)
    assert supervisor.on_exit(0, KILLED, 4.9) == [EndRank(0), EndRank(1), EndRank(2)]
    assert supervisor.on_time(5.0) == []  # rank 1 was due alone
    for rank in range(3):
        supervisor.on_ended(rank, 7.0)
    assert supervisor.on_time(7.0) == ALL


def lose_bound(supervisor, rank, status, now):
    """Let a rank be lost without which the others cannot go on, and start all again; return the time of that."""
    assert supervisor.on_exit(rank, status, now, [BOUND]) == [EndRank(0), EndRank(1), EndRank(2)]
    for each in range(3):
        assert supervisor.on_ended(each, now) == []
    due_s = supervisor.wake_s
    assert supervisor.on_time(due_s) == ALL
    return due_s


@pytest.mark.parametrize("rank", range(3))
def test_ranks_in_a_process_group_are_all_started_again_whichever_is_lost(rank, caplog):
    supervisor = started()
    assert lose_bound(supervisor, rank, KILLED, 5.0) == 6.0
    assert f"rank {rank} was killed by SIGKILL: all ranks of this host are started again in 1 s, from" in caplog.text
    assert lose_bound(supervisor, (rank + 1) % 3, KILLED, 7.0) == 9.0  # a loss of one is a loss of all
    assert end_all(supervisor, {0: 0, 1: 0, 2: 0}) == 0


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_that_others_survive_is_started_again_alone(rank, caplog):
    supervisor = started()
    assert supervisor.on_exit(rank, KILLED, 5.0, [BOUND, SURVIVES]) == []
    assert f"rank {rank} was killed by SIGKILL; it is started again in 1 s" in caplog.text
    assert supervisor.on_time(6.0) == [MakeRank(rank)]
    assert end_all(supervisor, {0: 0, 1: 0, 2: 0}) == 0


@pytest.mark.parametrize("rank", range(3))
def test_a_run_ends_with_those_that_are_left(rank):
    supervisor = started(max_restarts=0)
    assert supervisor.on_exit(rank, KILLED, 5.0, [BOUND, SURVIVES]) == []
    assert end_all(supervisor, {other: 0 for other in range(3) if other != rank}) == 0


def test_a_rank_that_waits_is_not_started_again_after_the_others_have_ended():
    supervisor = started()
    assert supervisor.on_exit(0, KILLED, 5.0, [BOUND, SURVIVES]) == []
    assert end_all(supervisor, {1: 0, 2: 0}) == 0


def test_ranks_that_can_survive_no_more_are_all_started_again():
    supervisor = started(max_restarts=1)
    assert supervisor.on_exit(1, KILLED, 5.0, [BOUND, SURVIVES]) == []
    lose_bound(supervisor, 2, 1, 5.5)


def test_a_rank_that_stays_stopped_is_ended_if_others_survive_it(caplog):
    supervisor = started()
    assert supervisor.on_stopped([1], 5.0, 7.0) == []
    assert supervisor.wake_s == 12.0
    assert supervisor.on_stopped([], 9.0, 7.0) == []  # it goes on
    assert supervisor.wake_s == inf
    assert supervisor.on_stopped([1, 2], 20.0, 7.0) == []
    assert supervisor.on_stopped([1, 2], 30.0, inf) == []
    assert supervisor.wake_s == 40.0  # by then the others may be able to go on without them
    assert supervisor.on_stopped([1], 40.0, 300.0) == []  # updates take long
    assert supervisor.on_stopped([1], 320.0, 300.0) == [KillRank(1)]
    assert "rank 1 was stopped for 300 s, and is ended" in caplog.text


def test_a_rank_that_fails_each_time_is_left_out(caplog):
    supervisor = started()
    now = 5.0
    for _ in range(2):
        assert supervisor.on_exit(1, 1, now, [BOUND, SURVIVES]) == []
        now = supervisor.wake_s
        assert supervisor.on_time(now) == [MakeRank(1)]
    assert supervisor.on_exit(1, 1, now + 1.0, [BOUND, SURVIVES]) == []
    assert "the others go on without it" in caplog.text
    assert end_all(supervisor, {0: 0, 2: 0}) == 0


def test_a_script_whose_ranks_fail_in_turn_is_started_again_as_often_as_one_whose_rank_fails(caplog):
    supervisor = started()
    now = lose_bound(supervisor, 2, 1, 1.0)
    now = lose_bound(supervisor, 1, 1, now + 1.0)
    assert supervisor.on_exit(2, 1, now + 1.0, [BOUND]) == [EndRank(0), EndRank(1)]
    assert "rank 2 ended with status 1, after 3 failures in a row" in caplog.text


@pytest.mark.parametrize("second", [1, 2])
def test_the_restarts_of_bound_ranks_are_counted_together(second, caplog):
    supervisor = started(max_restarts=1)
    now = lose_bound(supervisor, 1, KILLED, 100.0)
    assert supervisor.on_exit(second, KILLED, now + 100.0, [BOUND]) == [
        EndRank(rank) for rank in range(3) if rank != second
    ]
    assert f"rank {second} was killed by SIGKILL, after --max-restarts 1: the run ends" in caplog.text


def test_a_standby_goes_on_without_rank_0(caplog):
    supervisor = started()
    assert supervisor.on_exit(0, KILLED, 5.0, [STANDBY]) == []
    assert "rank 0 was killed by SIGKILL; its standby goes on" in caplog.text
    lose(supervisor, 1, KILLED, 6.0)
    assert end_all(supervisor, {1: 0, 2: 0}) == 0


@pytest.mark.parametrize("status", [0, 130])
def test_after_a_takeover_the_run_ends_with_the_first_rank_that_ends(status):
    supervisor = started()
    supervisor.on_exit(0, KILLED, 5.0, [STANDBY])
    lose(supervisor, 1, KILLED, 6.0)  # the new one may look for a run that is over
    assert supervisor.on_exit(2, status, 8.0) == []
    assert supervisor.wake_s == 8.0 + LATE_S
    assert supervisor.on_time(8.0 + LATE_S) == [EndRank(1)]
    supervisor.on_ended(1, 20.0)
    assert supervisor.status == status


def test_after_a_takeover_no_rank_is_started_again_for_a_run_that_is_over():
    supervisor = started()
    supervisor.on_exit(0, KILLED, 5.0, [STANDBY])
    assert supervisor.on_exit(1, KILLED, 6.0) == []
    assert end_all(supervisor, {2: 0}, now=6.5) == 0


@pytest.mark.parametrize("status", [0, 130])
def test_without_rank_0_the_status_is_that_of_the_ranks_of_this_host(status):
    assert end_all(started(ranks=(3, 4)), {3: 0, 4: status}) == status


@pytest.mark.parametrize("told", [[ENDED], [ENDED, STANDBY]])
def test_rank_0_is_not_started_again_after_the_end_of_the_run(told, caplog):
    supervisor = started()
    assert supervisor.on_exit(0, 1, 500.0, told) == [EndRank(1), EndRank(2)]
    assert "rank 0 ended with status 1 after the end of the run; it is not started again" in caplog.text
    for rank in (1, 2):
        supervisor.on_ended(rank, 501.0)
    assert supervisor.status == 1


def test_a_rank_waits_a_minute_for_the_launcher_on_the_host_of_rank_0(caplog):
    supervisor = started(ranks=(3, 4))
    supervisor.on_exit(3, 1, 0.0)
    for now in range(1, int(UNREACHABLE_S) + 1):
        assert supervisor.on_time(float(now)) == [MakeRank(3)]
        ended = supervisor.on_unreachable(3, float(now))
        assert ended == ([EndRank(4)] if now == UNREACHABLE_S else [])
    assert "rank 3 ended with status 1, and the launcher on the host of rank 0 does not answer" in caplog.text
    supervisor.on_ended(4, UNREACHABLE_S)
    assert supervisor.status == 1


def test_the_others_go_on_without_a_rank_that_was_killed_too_often(caplog):
    supervisor = started(max_restarts=1)
    lose(supervisor, 1, KILLED, 5.0)
    assert supervisor.on_exit(1, KILLED, 8.0) == []
    assert "rank 1 was killed by SIGKILL, after --max-restarts 1: the others go on without it" in caplog.text
    assert end_all(supervisor, {0: 0, 2: 0}) == 0


def test_a_host_whose_ranks_are_all_gone_ends_with_their_status():
    supervisor = started(max_restarts=0, ranks=(3, 4))
    assert end_all(supervisor, {3: KILLED, 4: KILLED}) == 137


def test_a_launcher_ends_when_rank_0_was_lost_too_often(caplog):
    supervisor = started(max_restarts=0)
    assert supervisor.on_exit(0, KILLED, 5.0) == [EndRank(1), EndRank(2)]
    assert "rank 0 was killed by SIGKILL, after --max-restarts 0: the run ends" in caplog.text
    for rank in (1, 2):
        assert supervisor.status is None
        supervisor.on_ended(rank, 6.0)
    assert supervisor.status == 137


@pytest.mark.parametrize("max_restarts", [0, -1])
def test_a_script_that_fails_at_its_start_ends_the_launcher_with_its_status(max_restarts, caplog):
    supervisor, now = started(max_restarts), 1.0
    for _ in range(2 if max_restarts else 0):
        lose(supervisor, 1, 3, now)
        now = 10.0
    assert supervisor.on_exit(1, 3, now) == [EndRank(0), EndRank(2)]
    assert "rank 1 ended with status 3, after " in caplog.text
    for rank in (0, 2):
        supervisor.on_ended(rank, now)
    assert supervisor.status == 3


def test_the_others_go_on_without_a_rank_that_fails_at_each_start_after_they_have_worked(caplog):
    supervisor, now = started(), WORK_S
    for _ in range(3):
        now += lose(supervisor, 1, 3, now)
    assert supervisor.on_exit(1, 3, now) == []
    assert "rank 1 ended with status 3, after 3 failures in a row, each within 60 s of its start" in caplog.text
    assert end_all(supervisor, {0: 0, 2: 0}) == 0


def test_a_loss_by_a_signal_between_two_failures_is_none_of_a_row():
    supervisor = started()
    for now, status in enumerate([3, 3, KILLED] * 3):
        lose(supervisor, 1, status, float(now))


def test_a_wrong_command_is_not_started_again(caplog):
    supervisor = started()
    assert supervisor.on_exit(2, 2, 1.0) == [EndRank(0), EndRank(1)]
    assert "rank 2 ended with status 2, as a wrong command does; it is not started again" in caplog.text
    for rank in (0, 1):
        supervisor.on_ended(rank, 2.0)
    assert supervisor.status == 2


@pytest.mark.parametrize("status", [130, 143])
def test_an_interrupted_run_is_not_started_again(status):
    supervisor = started()
    assert supervisor.on_exit(0, status, 5.0) == []
    assert supervisor.on_exit(1, 0, 6.0) == []
    assert supervisor.on_time(5.0 + LATE_S) == [EndRank(2)]
    supervisor.on_ended(2, 16.0)
    assert supervisor.status == status


def test_a_worker_that_has_left_on_sigterm_is_started_again():
    lose(started(), 1, 143, 5.0)


def test_no_rank_is_started_again_after_the_end_of_rank_0():
    supervisor = started()
    supervisor.on_exit(1, KILLED, 5.0)
    supervisor.on_exit(0, 0, 5.5)
    assert supervisor.on_time(6.0) == []
    supervisor.on_exit(2, 0, 7.0)
    assert supervisor.status == 0


def test_a_rank_that_fails_after_the_end_of_rank_0_is_a_failure_of_the_launcher():
    assert end_all(started(), {0: 0, 1: 4, 2: 0}) == 4


def test_a_rank_that_was_started_again_as_the_run_ended_is_ended_and_its_status_does_not_count():
    supervisor = started()
    lose(supervisor, 1, KILLED, 5.0)
    lose(supervisor, 2, KILLED, 5.0)
    supervisor.on_exit(0, 0, 10.0)
    supervisor.on_exit(2, 1, 11.0)  # it has not found rank 0
    assert supervisor.on_time(10.0 + LATE_S) == [EndRank(1)]
    supervisor.on_ended(1, 21.0)
    assert supervisor.status == 0


def test_ranks_may_go_on_after_the_end_of_rank_0():
    supervisor = started()
    supervisor.on_exit(0, 0, 10.0)
    assert supervisor.on_time(1000.0) == []
    assert supervisor.status is None


@pytest.mark.parametrize(("number", "passed"), [("SIGINT", "SIGINT"), ("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGTERM")])
def test_the_first_signal_is_passed_on_and_the_second_kills(number, passed):
    number, passed = signal.Signals[number], signal.Signals[passed]
    supervisor = started()
    supervisor.on_exit(1, KILLED, 4.0)
    assert supervisor.on_signal(number, 4.5) == [PassSignal(0, passed), PassSignal(2, passed)]
    assert supervisor.on_time(1000.0) == []  # rank 1 is not started again, and the others have the time they need
    assert supervisor.on_signal(number, 1001.0) == [KillRank(0), KillRank(2)]
    assert end_all(supervisor, {0: KILLED, 2: KILLED}) == 128 + number


@pytest.mark.parametrize("numbers", [("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGTERM")])
def test_signals_that_a_program_sends_at_once_are_one(numbers):
    first, second = (signal.Signals[name] for name in numbers)
    supervisor = started()
    assert len(supervisor.on_signal(first, 5.0)) == 3
    assert supervisor.on_signal(second, 5.1) == []
    assert supervisor.on_signal(second, 6.1) == [KillRank(0), KillRank(1), KillRank(2)]


def test_two_ctrl_c_are_two_signals():
    supervisor = started()
    supervisor.on_signal(signal.SIGINT, 5.0)
    assert supervisor.on_signal(signal.SIGINT, 5.1) == [KillRank(0), KillRank(1), KillRank(2)]


@pytest.mark.parametrize(("statuses", "expected"), [({0: 130, 1: 143}, 130), ({0: 0, 1: 0}, 0), ({0: -2, 1: -2}, 130)])
def test_after_a_signal_the_status_is_that_of_rank_0(statuses, expected):
    supervisor = started(ranks=(0, 1))
    supervisor.on_signal(signal.SIGINT, 5.0)
    assert end_all(supervisor, statuses) == expected


def test_a_signal_while_ranks_end_for_a_restart_ends_the_launcher():
    supervisor = started(ranks=(0, 1))
    supervisor.on_exit(0, KILLED, 5.0)
    assert supervisor.on_signal(signal.SIGTERM, 5.1) == []
    for rank in (0, 1):
        supervisor.on_ended(rank, 6.0)
    assert supervisor.on_time(1000.0) == []
    assert supervisor.status == 143


def test_a_signal_while_all_ranks_wait_ends_the_launcher():
    supervisor = started(ranks=(1,))
    supervisor.on_exit(1, KILLED, 5.0)
    assert supervisor.on_signal(signal.SIGINT, 5.1) == []
    assert supervisor.status == 130
