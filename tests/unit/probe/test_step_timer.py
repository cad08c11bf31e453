"""Parts of a step from the marks of a rank."""

import pytest

from paceline.probe.step_timer import StepTimer


@pytest.fixture
def rows():
    return []


@pytest.fixture
def timer(rows):
    timer = StepTimer(rows.append)
    step(timer, 0)
    rows.clear()
    return timer


def step(timer, start, *, forward=10, backward=20, tail=5):
    timer.forward_began(start)
    timer.backward_began(start + forward)
    timer.graph_done(start + forward + backward)
    timer.backward_ended(start + forward + backward + tail, is_synced=True)


def test_the_parts_of_a_step_add_up_to_it(timer, rows):
    step(timer, 50)
    assert rows == [(1, 35, 15, 10, 20, 0, 5)]


def test_the_time_of_a_collective_is_taken_off_the_part_in_which_it_ran(timer, rows):
    timer.forward_began(50)
    timer.collective_took(4)  # broadcast of buffers, inside of the forward pass
    timer.backward_began(60)
    timer.graph_done(80)
    timer.backward_ended(85, is_synced=True)
    timer.collective_took(3)  # all-reduce of the loss, after the step
    timer.forward_began(100)
    timer.backward_began(110)
    timer.graph_done(130)
    timer.backward_ended(135, is_synced=True)
    assert rows == [(1, 35, 15, 6, 20, 4, 5), (2, 85, 12, 10, 20, 3, 5)]


def test_backward_passes_without_sums_are_work_of_the_step(timer, rows):
    timer.forward_began(40)
    timer.backward_began(50)
    timer.backward_ended(70, is_synced=False)
    step(timer, 80)
    assert rows == [(1, 35, 5 + 10, 10 + 10, 20 + 20, 0, 5)]


def test_two_forward_passes_before_a_backward_pass_are_one_part(timer, rows):
    timer.forward_began(40)
    step(timer, 50)
    assert rows == [(1, 35, 5, 20, 20, 0, 5)]


def test_without_a_mark_of_the_forward_pass_its_time_is_data(timer, rows):
    timer.backward_began(60)
    timer.graph_done(80)
    timer.backward_ended(85, is_synced=True)
    assert rows == [(1, 35, 25, 0, 20, 0, 5)]


def test_a_step_whose_graph_had_no_end_is_counted_without_a_row(timer, rows):
    timer.backward_began(60)
    timer.backward_ended(85, is_synced=True)
    step(timer, 90)
    assert [row[0] for row in rows] == [2]
    assert rows[0][1] == 85


def test_time_of_the_probe_itself_is_left_out(timer, rows):
    timer.skip(10)
    step(timer, 60)
    assert rows == [(1, 45, 15, 10, 20, 0, 5)]


def test_sums_that_end_inside_of_the_graph_are_waiting(timer, rows):
    timer.forward_began(50)
    timer.backward_began(60)
    timer.sums_took(7)
    timer.graph_done(80)
    timer.backward_ended(85, is_synced=True)
    assert rows == [(1, 35, 15, 10, 13, 0, 12)]
