"""Loops that a thread loads: when they are there, and what a failure becomes."""

import threading
from contextlib import suppress

import pytest
import torch

from machine_speed import scaled
from paceline.tensors import compiled_loops, mean_loops
from paceline.tensors.compiled_loops import when_loaded
from paceline.tensors.mean_loops import move_mean
from this_process import wait_until


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch):
    monkeypatch.setattr(compiled_loops, "_loads", {})


def test_a_function_is_called_once_for_its_arguments_in_a_thread():
    calls, may_end = [], threading.Event()

    def load(*arguments):
        assert may_end.wait(scaled(20.0))
        calls.append((arguments, threading.current_thread()))
        return arguments

    assert [when_loaded(load, 1), when_loaded(load, 2), when_loaded(load, 1)] == [None] * 3
    may_end.set()
    for number in (1, 2):
        wait_until(lambda: when_loaded(load, number))  # noqa: B023  # before the next one
        assert when_loaded(load, number) == (number,)
    assert sorted(arguments for arguments, _ in calls) == [(1,), (2,)]
    assert threading.current_thread() not in [thread for _, thread in calls]


def test_an_error_is_raised_where_the_loops_are_asked_for():
    def load():
        raise OSError("a damaged cache")

    with suppress(OSError):  # the thread may be faster
        when_loaded(load)
    wait_until(lambda: compiled_loops._loads[load, ()].done())
    with pytest.raises(OSError, match="a damaged cache"):
        when_loaded(load)


def test_torch_serves_until_they_are_loaded(monkeypatch):
    asked = []
    monkeypatch.setattr(mean_loops, "LEAST", 1)
    monkeypatch.setattr(mean_loops, "when_loaded", lambda load, dtype: asked.append(dtype))
    mean = torch.zeros(10)
    move_mean(mean, [torch.ones(10)], [0.5])
    assert mean.eq(0.5).all()
    assert asked == [torch.float32]
