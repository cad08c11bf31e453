"""Runs with a standby that lose it, or most of their workers: ranks as threads."""

import re
import signal
import threading

import pytest

import paceline as pl
from end_when import FOREVER
from paceline.engines.distributed.standby.standby_stream import StandbyStream
from paceline.engines.distributed.standby.succession import Succession
from rank_threads import ranks
from selections import parametrize_few
from tiny_jobs import tiny_job
from waiting_jobs import waiting_for

STANDBY = {"standby": 1}


@pytest.mark.parametrize("torchrun", [{}, {"server": False}], ids=["server", "no server"])
def test_the_run_goes_on_without_a_standby(torchrun, caplog):
    class KillStandby(pl.callbacks.Callback):
        def on_update(self, update):
            if update.version == 5:
                job.processes["standby"].kill()

    settings = {"protocol": "bsp", "stop": "updates=20", "callbacks": [KillStandby()]}
    with ranks(3, tiny_job(), {**STANDBY, **torchrun}, **settings) as job:
        job.start_all()
        assert job.end(0).reason == "20 updates made"
    assert "the standby is lost, and the run goes on without one" in caplog.text


@parametrize_few(("standby_at", "workers_at"), [(5, 10), (5, 5)], keep=1)
def test_rank_0_ends_if_the_standby_and_most_workers_are_gone(standby_at, workers_at, monkeypatch):
    # The workers are killed before they have answered that they will not join the standby.
    monkeypatch.setattr(StandbyStream, "forget", lambda stream, process: None)

    class KillMost(pl.callbacks.Callback):
        def on_update(self, update):
            if update.version == workers_at:
                job.processes[1].kill()
                job.processes[2].kill()
            if update.version == standby_at:
                job.processes["standby"].kill()

    has_ended = threading.Event()
    train = waiting_for(has_ended, tiny_job(), gradients=20)  # or the last worker would train for as long as it takes
    with ranks(4, train, STANDBY, protocol="asp", stop=FOREVER, callbacks=[KillMost()]) as job:
        job.start_all()
        with pytest.raises(pl.RunError, match="the standby and 2 of 3 workers cannot be reached: they may go on"):
            job.end(0)
        has_ended.set()


@pytest.mark.slow
def test_a_standby_leaves_with_its_rank_and_the_run_goes_on_though_most_workers_are_lost(tmp_path, caplog):
    class LoseMost(pl.callbacks.Callback):
        def on_update(self, update):
            if update.version == 5:
                job.processes[3].leave("SIGTERM")  # the rank that has started the standby
                job.processes[1].kill()

    has_left = threading.Event()
    train = waiting_for(has_left, tiny_job(), gradients=20)
    settings = {"protocol": "asp", "stop": "updates=40", "callbacks": [LoseMost()], "out": tmp_path / "run"}
    with ranks(4, train, STANDBY, **settings) as job:
        job.start_all()
        for process in (3, "standby"):
            job.join(process)
            assert job.processes[process].answer.code == 128 + signal.SIGTERM
        has_left.set()
        assert job.end(0).reason == "40 updates made"
    assert "the standby leaves the run, which goes on without one: SIGTERM" in caplog.text
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_too_few_workers_do_not_make_the_standby_a_server():
    class KillMost(pl.callbacks.Callback):
        def on_update(self, update):
            if update.version == 5:
                for each in (1, 2, 0):
                    job.processes[each].kill()

    torchrun = {**STANDBY, "start_timeout_s": 1.0}
    with ranks(4, tiny_job(), torchrun, protocol="asp", stop=FOREVER, callbacks=[KillMost()]) as job:
        job.start_all()
        job.join(0)
        with pytest.raises(pl.RunError, match=r"1 more workers of rank 0 did not join within start_timeout_s=1"):
            job.end("standby")


def test_two_sides_that_do_not_reach_each_other_are_not_two_runs(tmp_path):
    """Two of three workers go to the standby, and processes with their numbers come to rank 0."""

    class Split(pl.callbacks.Callback):
        def on_update(self, update):
            if update.version == 5 and job.processes[0].thread is threading.current_thread():
                for moved in ("standby", 1, 2):
                    job.processes[moved].disconnect()
                for number in (1, 2):
                    job.start(number)

    settings = {"protocol": "asp", "stop": "updates=400", "out": tmp_path / "run", "callbacks": [Split()]}
    with ranks(4, tiny_job(), {**STANDBY, "start_timeout_s": 2.0}, **settings) as job:
        job.start_all()
        ends = [outcome_of(job, each) for each in (0, "standby")]
    errors = [str(end) for end in ends if isinstance(end, pl.RunError)]
    assert errors, "both sides have trained to the end"
    for error in errors:
        assert re.search("so it ends; its newest checkpoint is in|more workers of rank 0", error)


def test_a_standby_counts_processes_and_not_numbers_of_workers():
    succession = Succession()
    succession.known_processes = ("a", "b", "c")
    others = {"another with the number of b", "another with the number of c"}
    assert succession.lacks({"a", *others}) == "1 more workers of rank 0"
    assert succession.lacks({"a", "c"}) == ""


def outcome_of(job, name):
    """Return the result of a process, or the error with which it has ended."""
    try:
        return job.end(name)
    except pl.RunError as error:
        return error
