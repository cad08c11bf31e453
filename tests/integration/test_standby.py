"""Runs whose rank 0 is killed, with a standby: ranks as threads."""

import re
import signal
import threading

import pytest
import torch

import paceline as pl
from end_when import FOREVER
from paceline.core.records import GradientArrived, RunResumed, UpdateMade, VersionEvaluated, WorkerJoined, WorkerLost
from paceline.engines import notice_watch
from paceline.engines.distributed.parameter_server.standby import Standby
from paceline.engines.distributed.parameter_server.standby_stream import StandbyStream
from paceline.engines.distributed.parameter_server.succession import Succession
from paceline.engines.signals import Signals
from paceline.recording.run_folder import SavedRun
from rank_threads import LIMIT_S, ranks, run
from ranks import flat
from selections import parametrize_few
from tiny_counting import BATCH, counting_job, times_applied
from tiny_jobs import batch_norm_net, dataset, largest_relative_difference, parameters_of, plain_loop, tiny_job
from waiting_jobs import waiting_for

STANDBY = {"standby": 1}


class KillRankZero(pl.callbacks.Callback):
    """Callback that kills rank 0 with an update."""

    def __init__(self, version):
        self.job = None
        self._version = version

    def on_update(self, update):
        if update.version == self._version and self.job is not None:
            process, self.job = self.job.processes[0], None
            process.die()


def run_to_takeover(job, n, version, torchrun=None, **settings):
    """Return what the standby returns, and each worker, of a run whose rank 0 dies with an update."""
    killing = KillRankZero(version)
    with ranks(n + 1, job, {**STANDBY, **(torchrun or {})}, callbacks=[killing], **settings) as started:
        killing.job = started
        started.start_all()
        started.join(0)
        ends = [started.end("standby"), *(started.end(rank) for rank in range(1, n + 1))]
        assert started.faults("die") == 1
    return ends


@parametrize_few("protocol", ["bsp", "k_sync(k=2)", "asp"], keep=1)
def test_the_standby_goes_on_when_rank_0_is_killed(protocol):
    ends = run_to_takeover(tiny_job(), 3, 10, protocol=protocol, stop="updates=30")
    [resumed] = ends[0].of(RunResumed)
    assert resumed.version in {9, 10}
    assert [update.version for update in ends[0].of(UpdateMade)] == list(range(1, 31))
    assert ends[0].reason == "30 updates made"
    for end in ends:
        assert torch.equal(flat(end.parameters), flat(ends[0].parameters))


def test_the_standby_skips_the_update_of_a_gradient_that_is_not_finite():
    job, faults = tiny_job(), [pl.Fault(worker=1, draw=3, kind="not_finite")]
    ends = run_to_takeover(job, 3, 10, {"faults": faults}, protocol="balanced(m=4, backups=false)", stop="updates=20")
    updates = ends[0].of(UpdateMade)
    [skipped] = [each.version for each in updates if not each.k]
    assert [each.version for each in updates] == list(range(1, 21))
    assert skipped < 10
    expected = parameters_of(plain_loop(job, 1, 3, 20, skipped={skipped}))
    for end in ends:
        assert largest_relative_difference(flat(end.parameters), expected) < 1e-12


@pytest.mark.slow
def test_the_standby_takes_over_before_the_first_update():
    class KillEarly(pl.callbacks.Callback):
        def on_record(self, record):
            super().on_record(record)
            process = job.processes[0]
            if isinstance(record, GradientArrived) and process.thread is threading.current_thread():
                process.die()

    with ranks(4, tiny_job(), STANDBY, protocol="bsp", stop="updates=20", callbacks=[KillEarly()]) as job:
        job.start_all()
        job.join(0)
        end = job.end("standby")
    assert (end.reason, [resumed.version for resumed in end.of(RunResumed)]) == ("20 updates made", [0])


def test_without_the_standby_a_run_that_has_not_begun_ends():
    torchrun = {**STANDBY, "start_timeout_s": 0.5}
    with ranks(4, tiny_job(), torchrun, protocol="bsp", stop="updates=20") as job:
        for rank in (0, 1):
            job.start(rank)
            job.started(rank)
        job.processes[0].kill()
        with pytest.raises(pl.RunError, match="rank 0"):
            job.end(1)


@pytest.mark.slow
def test_a_worker_that_starts_after_the_takeover_finds_the_standby():
    has_joined = threading.Event()

    class Restarting(pl.callbacks.Callback):
        def on_update(self, update):
            process = job.processes[0]
            if update.version == 10 and process.thread is threading.current_thread():
                job.processes[1].kill()
                process.die()
            if update.version == 15:
                job.start(1)

        def on_record(self, record):
            super().on_record(record)
            if isinstance(record, WorkerJoined):
                has_joined.set()

    train = waiting_for(has_joined, tiny_job(), gradients=30)
    torchrun = {**STANDBY, "standby_address": "127.0.0.1:29777"}
    with ranks(4, train, torchrun, protocol="asp", stop="updates=60", callbacks=[Restarting()]) as job:
        job.start_all()
        job.join(0)
        end = job.end("standby")
    assert end.reason == "60 updates made"
    assert [record.worker for record in end.of(WorkerJoined)] == [0]


@pytest.mark.slow
def test_rank_0_leaves_the_run_to_its_standby_on_a_spot_notice(tmp_path, monkeypatch):
    place, is_noticed, on_notice = tmp_path / "preempt", threading.Event(), Signals._on_notice

    def tell(signals, notice):
        on_notice(signals, notice)
        is_noticed.set()

    class Watching(pl.callbacks.Callback):
        def on_update(self, update):
            if update.version == 5:
                place.touch()
                assert is_noticed.wait(LIMIT_S)

    monkeypatch.setattr(Signals, "_on_notice", tell)
    monkeypatch.setattr(notice_watch, "POLL_S", 0.02)
    samples, epochs = 12 * BATCH, 4
    train = counting_job(samples)
    settings = {"protocol": "asp", "stop": f"epochs={epochs}", "callbacks": [Watching()]}
    with ranks(4, train, STANDBY, **settings) as job:
        job.start(0, torchrun={"notice": str(place)})
        job.start_workers()
        with pytest.raises(SystemExit) as left:
            job.end(0)
        end = job.end("standby")
    assert left.value.code == 128 + signal.SIGTERM
    assert (end.stopped_by, [resumed.version for resumed in end.of(RunResumed)]) == ("epochs", [5])
    model = train.model()
    model.load_state_dict(end.parameters)
    assert times_applied(model) == [epochs] * samples


@pytest.mark.slow
def test_a_synchronous_standby_lacks_no_update():
    for version in (1, 7):
        [end, *_] = run_to_takeover(tiny_job(), 3, version, {"standby_sync": True}, protocol="asp", stop="updates=20")
        assert [resumed.version for resumed in end.of(RunResumed)] == [version]


@parametrize_few("protocol", ["bsp", "k_async(k=2)"], keep=1)
def test_every_sample_is_used_once_an_epoch_though_rank_0_is_killed(protocol):
    samples, epochs = 12 * BATCH, 4
    train = counting_job(samples)
    [end, *_] = run_to_takeover(train, 3, 5, protocol=protocol, stop=f"epochs={epochs}")
    model = train.model()
    model.load_state_dict(end.parameters)
    assert times_applied(model) == [epochs] * samples


@pytest.mark.parametrize(
    "settings",
    [
        {"protocol": "dbw", "measure_steps": True},
        pytest.param({"protocol": "bsp + local_steps(H=2, outer=nesterov)"}, marks=pytest.mark.slow),
        pytest.param({"protocol": "bsp@updates=5 >> asp"}, marks=pytest.mark.slow),
    ],
)
def test_the_standby_has_the_state_of_every_part(settings, tmp_path):
    ends = run_to_takeover(tiny_job(), 3, 10, {"wire": "int8"}, stop="updates=25", out=tmp_path / "run", **settings)
    assert ends[0].reason == "25 updates made"
    assert pl.replay(tmp_path / "run-standby").is_same
    assert SavedRun(tmp_path / "run").configuration["has_standby"] is True
    assert SavedRun(tmp_path / "run-standby").configuration["has_standby"] is False


@pytest.mark.slow
def test_evaluations_go_on():
    job = tiny_job(model=batch_norm_net, eval_data=dataset(20))
    [end, *_] = run_to_takeover(job, 2, 8, protocol="bsp", stop="updates=16", evaluate_every="updates=4")
    evaluated = [record.version for record in end.of(VersionEvaluated)]
    assert evaluated[0] == 4
    assert evaluated[-1] == 16
    assert {8, 12} & {*evaluated}


def test_a_run_that_ends_leaves_no_folder_of_its_standby(tmp_path):
    with ranks(3, tiny_job(), STANDBY, protocol="bsp", stop="updates=10", out=tmp_path / "run") as job:
        job.start_all()
        assert job.end(0).reason == "10 updates made"
        with pytest.raises(SystemExit):
            job.end("standby")
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_a_folder_of_another_standby_is_kept(tmp_path):
    (tmp_path / "run-standby").mkdir()
    torchrun = {**STANDBY, "start_timeout_s": 1.0}
    with ranks(3, tiny_job(), torchrun, protocol="bsp", stop="updates=10", out=tmp_path / "run") as job:
        job.start_all()
        with pytest.raises(pl.RunError, match="the standby did not join within start_timeout_s=1: check its log"):
            job.end(0)
        with pytest.raises(pl.UsageError, match=r"run-standby exists already, .*: resume that run, or remove"):
            job.end("standby")
    assert (tmp_path / "run-standby").exists()


@pytest.mark.slow
def test_a_resumed_run_has_a_standby_too(tmp_path):
    folder = tmp_path / "run"
    run(3, tiny_job(), protocol="bsp", stop="updates=10", out=folder)
    settings = {"protocol": "bsp", "stop": "updates=30", "resume": folder}
    [end, *_] = run_to_takeover(tiny_job(), 2, 15, **settings)
    assert [update.version for update in end.of(UpdateMade)] == list(range(1, 31))
    assert [resumed.version for resumed in end.of(RunResumed)] in ([10, 14], [10, 15])
    assert pl.replay(tmp_path / "run-standby").is_same


@pytest.mark.slow
def test_a_worker_that_has_lost_rank_0_alone_comes_back_to_it():
    has_joined = threading.Event()

    class Disconnect(pl.callbacks.Callback):
        def on_record(self, record):
            super().on_record(record)
            if isinstance(record, WorkerJoined):
                has_joined.set()

        def on_update(self, update):
            if update.version == 5:
                job.processes[2].disconnect()

    train = waiting_for(has_joined, tiny_job(), gradients=30)
    with ranks(4, train, STANDBY, protocol="asp", stop="updates=60", callbacks=[Disconnect()]) as job:
        job.start_all()
        end = job.end(0)
    assert [record.worker for record in end.of(WorkerLost)] == [1]
    assert [record.worker for record in end.of(WorkerJoined)] == [1]


def test_the_run_goes_on_without_a_standby(caplog):
    class KillStandby(pl.callbacks.Callback):
        def on_update(self, update):
            if update.version == 5:
                job.processes["standby"].kill()

    with ranks(3, tiny_job(), STANDBY, protocol="bsp", stop="updates=20", callbacks=[KillStandby()]) as job:
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


@pytest.mark.slow
def test_a_standby_told_to_leave_as_it_takes_over_saves_the_run(tmp_path, monkeypatch):
    events_of = Standby._events_of

    def read_after_sigterm(standby, message):
        if isinstance(message, Exception):  # rank 0 is lost
            standby._leave("SIGTERM")
        return events_of(standby, message)

    monkeypatch.setattr(Standby, "_events_of", read_after_sigterm)
    killing = KillRankZero(10)
    settings = {"protocol": "bsp", "stop": FOREVER, "callbacks": [killing], "out": tmp_path / "run"}
    with ranks(4, tiny_job(), {**STANDBY, "start_timeout_s": 1.0}, **settings) as job:
        killing.job = job
        job.start_all()
        job.join(0)
        end = job.end("standby")
        for rank in (1, 2, 3):  # one that comes too late finds no server
            job.join(rank)
    assert end.reason == "interrupted by SIGTERM"
    [resumed] = end.of(RunResumed)
    assert resumed.version in {9, 10}
    assert [*(tmp_path / "run-standby" / "checkpoints").iterdir()]


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
