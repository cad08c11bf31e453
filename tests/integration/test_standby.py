"""Runs whose rank 0 is killed, with a standby: ranks as threads."""

import signal
import threading
from random import Random

import pytest
import torch

import paceline as pl
from end_when import FOREVER
from paceline.core.records import GradientArrived, RunResumed, UpdateMade, VersionEvaluated, WorkerJoined, WorkerLost
from paceline.engines import notice_watch
from paceline.engines.distributed.announced_sums.update_follower import Closed, UpdateFollower
from paceline.engines.distributed.standby.standby import Standby
from paceline.engines.signals import Signals
from paceline.recording.run_folder import SavedRun
from rank_threads import LIMIT_S, ranks, run
from ranks import flat
from selections import parametrize_few
from tiny_counting import BATCH, counting_job, times_applied
from tiny_jobs import batch_norm_net, dataset, largest_relative_difference, parameters_of, plain_loop, tiny_job
from waiting_jobs import waiting_for

STANDBY = {"standby": 1}
NO_SERVER = {"server": False}
with_and_without_a_server = pytest.mark.parametrize("torchrun", [{}, NO_SERVER], ids=["server", "no server"])


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


# Under `k_async` several updates may be announced that no rank has made.
@parametrize_few(
    ("protocol", "lacks"), [("bsp", 1), ("k_sync(k=2)", 1), ("balanced(m=4)", 1), ("k_async(k=2)", 4)], keep=1
)
def test_without_a_server_the_standby_goes_on_with_the_versions_of_the_ranks(protocol, lacks):
    ends = run_to_takeover(tiny_job(), 3, 10, NO_SERVER, protocol=protocol, stop="updates=30")
    [resumed] = ends[0].of(RunResumed)
    assert 10 - lacks <= resumed.version <= 10
    assert [update.version for update in ends[0].of(UpdateMade)] == list(range(1, 31))
    for end in ends:
        assert end is None or torch.equal(flat(end.parameters), flat(ends[0].parameters))


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
@with_and_without_a_server
def test_the_standby_takes_over_before_the_first_update(torchrun):
    class KillEarly(pl.callbacks.Callback):
        def on_record(self, record):
            super().on_record(record)
            process = job.processes[0]
            if isinstance(record, GradientArrived) and process.thread is threading.current_thread():
                process.die()

    settings = {"protocol": "bsp", "stop": "updates=20", "callbacks": [KillEarly()]}
    with ranks(4, tiny_job(), {**STANDBY, **torchrun}, **settings) as job:
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
@pytest.mark.parametrize(("protocol", "torchrun"), [("asp", {}), ("bsp", NO_SERVER)])
def test_rank_0_leaves_the_run_to_its_standby_on_a_spot_notice(protocol, torchrun, tmp_path, monkeypatch):
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
    settings = {"protocol": protocol, "stop": f"epochs={epochs}", "callbacks": [Watching()]}
    with ranks(4, train, {**STANDBY, **torchrun}, **settings) as job:
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


@parametrize_few(
    ("protocol", "torchrun"),
    [
        ("bsp", {}),
        ("k_async(k=2)", NO_SERVER),
        ("k_async(k=2)", {}),
        ("balanced(m=2)", NO_SERVER),
        ("k_sync(k=2)", NO_SERVER),
    ],
    keep=2,
)
def test_every_sample_is_used_once_an_epoch_though_rank_0_is_killed(protocol, torchrun):
    samples, epochs = 12 * BATCH, 4
    train = counting_job(samples)
    [end, *_] = run_to_takeover(train, 3, 5, torchrun, protocol=protocol, stop=f"epochs={epochs}")
    model = train.model()
    model.load_state_dict(end.parameters)
    assert times_applied(model) == [epochs] * samples


@pytest.mark.parametrize(
    "settings",
    [
        {"protocol": "dbw", "measure_steps": True},
        {"protocol": "dbw", "measure_steps": True, "torchrun": NO_SERVER},
        {"protocol": "balanced(m=4)@updates=9 >> k_sync(k=2)", "torchrun": NO_SERVER},
        pytest.param({"protocol": "bsp + local_steps(H=2, outer=nesterov)"}, marks=pytest.mark.slow),
        pytest.param({"protocol": "bsp@updates=5 >> asp"}, marks=pytest.mark.slow),
    ],
)
def test_the_standby_has_the_state_of_every_part(settings, tmp_path):
    settings = {"torchrun": {"wire": "int8"}, **settings}
    ends = run_to_takeover(tiny_job(), 3, 10, stop="updates=25", out=tmp_path / "run", **settings)
    assert ends[0].reason == "25 updates made"
    assert pl.replay(tmp_path / "run-standby").is_same
    assert SavedRun(tmp_path / "run").configuration["has_standby"] is True
    assert SavedRun(tmp_path / "run-standby").configuration["has_standby"] is False


@pytest.mark.slow
@with_and_without_a_server
def test_evaluations_go_on(torchrun):
    job = tiny_job(model=batch_norm_net, eval_data=dataset(20))
    [end, *_] = run_to_takeover(job, 2, 8, torchrun, protocol="bsp", stop="updates=64", evaluate_every="updates=4")
    evaluated = [record.version for record in end.of(VersionEvaluated)]
    assert evaluated[0] == 4
    assert evaluated[-1] == 64
    assert {*evaluated}.intersection(range(8, 64))  # one is left out while another is under way


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
@with_and_without_a_server
def test_a_resumed_run_has_a_standby_too(torchrun, tmp_path):
    folder = tmp_path / "run"
    run(3, tiny_job(), torchrun, protocol="bsp", stop="updates=10", out=folder)
    settings = {"protocol": "bsp", "stop": "updates=30", "resume": folder}
    [end, *_] = run_to_takeover(tiny_job(), 2, 15, torchrun, **settings)
    assert [update.version for update in end.of(UpdateMade)] == list(range(1, 31))
    assert [resumed.version for resumed in end.of(RunResumed)] in ([10, 14], [10, 15])
    assert pl.replay(tmp_path / "run-standby").is_same


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "torchrun"), [("asp", {}), ("k_async(k=2)", NO_SERVER)])
def test_a_worker_that_has_lost_rank_0_alone_comes_back_to_it(protocol, torchrun):
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
    settings = {"protocol": protocol, "stop": "updates=60", "callbacks": [Disconnect()]}
    with ranks(4, train, {**STANDBY, **torchrun}, **settings) as job:
        job.start_all()
        end = job.end(0)
    number = 1 if not torchrun else 2
    assert [record.worker for record in end.of(WorkerLost)] == [number]
    assert [record.worker for record in end.of(WorkerJoined)] == [number]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 27))])
def test_deaths_of_the_coordinator_in_a_sum_cost_no_sample(seed, monkeypatch):
    """In half of the scripts a rank dies with it."""
    random, fired, can_sum = Random(seed), [], UpdateFollower._can_sum
    protocol = random.choice(["bsp", "balanced(m=2)", "k_sync(k=2)", "k_async(k=2)", "pull(k=5)"])
    number, is_after, others = random.randint(1, 9), random.random() < 0.5, random.choice([[], [2]])

    def killing(follower, gradients):
        summed = can_sum(follower, gradients) if is_after else None
        if follower._made + 1 == number and not fired:
            fired.append(number)
            for each in (0, *others):
                made.processes[each].kill()
        return summed if is_after else can_sum(follower, gradients)

    monkeypatch.setattr(UpdateFollower, "_can_sum", killing)
    samples, epochs = 24 * BATCH, 4
    train = counting_job(samples)
    slow = {"slowness": pl.Cluster(4, timing=pl.timing.Exponential(0.005))}
    with ranks(4, train, {**STANDBY, **NO_SERVER, **slow}, protocol=protocol, stop=f"epochs={epochs}") as made:
        made.start_all()
        made.join(0)
        end = made.end("standby")
        ends = [end, *(made.end(each) for each in {1, 2, 3}.difference(others))]
    assert fired
    model = train.model()
    model.load_state_dict(end.parameters)
    assert times_applied(model) == [epochs] * samples
    assert len({tuple(flat(each.parameters).tolist()) for each in ends}) == 1, "all ranks have the same bits"


def test_the_run_goes_on_with_the_newest_version_that_a_rank_has(monkeypatch):
    """Rank 0 dies when all workers but worker 0 have made update 5."""
    fired, others, on_sum = [], threading.Semaphore(0), UpdateFollower._on_sum

    def dying(follower, gradients, announced):
        if announced.number == 5 and follower._parameters._worker == 0 and not fired:
            fired.append(True)
            assert all(others.acquire(timeout=LIMIT_S) for _ in range(3))
            made.processes[0].kill()
            raise Closed
        on_sum(follower, gradients, announced)
        if announced.number == 5:
            others.release()

    monkeypatch.setattr(UpdateFollower, "_on_sum", dying)
    with ranks(4, tiny_job(), {**STANDBY, **NO_SERVER}, protocol="bsp", stop="updates=10") as made:
        made.start_all()
        made.join(0)
        ends = [made.end(each) for each in ("standby", 1, 2, 3)]
    assert fired
    assert [resumed.version for resumed in ends[0].of(RunResumed)] == [5]
    assert [update.version for update in ends[0].of(UpdateMade)] == list(range(1, 11))
    assert len({tuple(flat(each.parameters).tolist()) for each in ends}) == 1, "all ranks have the same bits"


@pytest.mark.slow
@with_and_without_a_server
def test_a_standby_told_to_leave_as_it_takes_over_saves_the_run(torchrun, tmp_path, monkeypatch):
    events_of = Standby._events_of

    def read_after_sigterm(standby, message):
        if isinstance(message, Exception):  # rank 0 is lost
            standby._leave("SIGTERM")
        return events_of(standby, message)

    monkeypatch.setattr(Standby, "_events_of", read_after_sigterm)
    killing = KillRankZero(10)
    settings = {"protocol": "bsp", "stop": FOREVER, "callbacks": [killing], "out": tmp_path / "run"}
    with ranks(4, tiny_job(), {**STANDBY, **torchrun, "start_timeout_s": 1.0}, **settings) as job:
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
