"""Failures of workers of this machine, scripted by (worker, draw); each test asserts that its fault fired."""

import multiprocessing
import os
from collections import Counter

import psutil
import pytest
import torch
from torch import nn

import paceline as pl
from end_when import EndWhen
from paceline.core.records import DecisionMade, GradientArrived, UpdateMade, WorkerJoined, WorkerLost, WorkInterrupted
from paceline.engines.local import worker_process as processes
from paceline.engines.local import workers
from paceline.experiments.comparison import FailedRunsError
from paceline.processes.shared_memory import SharedMemory
from paceline.processes.shared_pickle import SharedPickle
from paceline.recording.event_log import read_records
from paceline.tensors.flat_buffers import FlatLayout
from selections import parametrize_few
from tiny_controllers import Replacing
from tiny_jobs import batch_norm_net, tiny_job


def run(protocol, faults=(), n=3, updates=30, respawn=False, **settings):
    cluster = pl.LocalCluster(n, faults=faults, respawn=respawn, slowness=settings.pop("slowness", None))
    job = settings.pop("job", tiny_job())
    return pl.train(job, protocol=protocol, cluster=cluster, stop=pl.Stop(updates=updates), seed=1, **settings)


def lost(result):
    return [(record.worker, record.reason) for record in result.history.of(WorkerLost)]


def used_by(result, worker):
    return sum(record.used and record.worker == worker for record in result.history.of(GradientArrived))


class EnoughSeenError(Exception):
    """Ends a run whose stop may come before what the test waits for."""


class SurvivorsGoOn(pl.callbacks.Callback):
    """Ends the run when the worker 0 has contributed more than a lost one and 20 updates were made without it."""

    def __init__(self):
        self.lost = []
        self.used = Counter()
        self.updates_since = 0

    def on_record(self, record):
        match record:
            case WorkerLost():
                self.lost.append((record.worker, record.reason))
            case GradientArrived(used=True):
                self.used[record.worker] += 1
            case UpdateMade() if self.lost:
                self.updates_since += 1
        if self.updates_since >= 20 and self.used[0] > self.used[self.lost[0][0]]:
            raise EnoughSeenError


@parametrize_few(
    ("protocol", "draw"), [(pl.bsp(), 5), (pl.k_sync(k=2), 1), (pl.asp(), 5), (pl.ssp(lead=2), 5)], ids=str, keep=1
)
def test_training_continues_without_a_killed_worker(protocol, draw):
    seen = SurvivorsGoOn()
    with pytest.raises(EnoughSeenError):  # no number of updates makes sure that a worker of asp reaches its fault
        run(protocol, [pl.Fault(worker=1, draw=draw, kind="die")], updates=1_000_000, callbacks=[seen])
    assert seen.lost == [(1, "killed by SIGKILL, out of memory or kill -9")]
    assert seen.used[1] == draw - 1


def fork_server():
    """Return the process that forks the workers of this one."""
    return next(
        each for each in psutil.Process().children() if "multiprocessing.forkserver" in " ".join(each.cmdline())
    )


class KillsForkServer(pl.callbacks.Callback):
    """Kills the process that forks workers when the first update has been made."""

    def on_update(self, update):
        if update.version == 1:
            fork_server().kill()


@pytest.mark.slow
def test_a_run_continues_without_its_fork_server():
    result = run(
        pl.bsp(),
        [pl.Fault(worker=1, draw=4, kind="die")],
        n=2,
        updates=10,
        respawn=False,
        callbacks=[KillsForkServer()],
    )
    assert result.stopped_by == "updates"
    [(worker, reason)] = lost(result)
    assert worker == 1
    assert reason.startswith("ended with unknown status: the process that forks the workers")


@pytest.mark.slow
def test_a_fork_server_killed_while_workers_start_is_a_one_line_error(tmp_path, monkeypatch):
    assert run(pl.bsp(), updates=1).stopped_by == "updates"  # there is one
    first = fork_server()
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # it is multiprocessing that collects its status
    (tmp_path / "dies_when_imported.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(processes, "__name__", "dies_when_imported")
    with pytest.raises(pl.RunError, match=r"^cannot start a worker process: .*forkserver\) was killed[^\n]*$"):
        run(pl.bsp(), updates=1)
    (tmp_path / "dies_when_imported.py").write_text(
        "import os, signal; os.kill(os.getppid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGINT)"
    )
    assert run(pl.bsp(), updates=1).reason == "interrupted by Ctrl-C"  # which a terminal sends to both
    monkeypatch.undo()
    assert run(pl.bsp(), updates=1).stopped_by == "updates"


@pytest.mark.slow
def test_the_traceback_of_a_failed_worker_is_logged_as_an_error(caplog):
    result = run(pl.bsp(), [pl.Fault(worker=2, draw=3, kind="raise")])
    assert [worker for worker, _ in lost(result)] == [2]
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]  # it failed and is lost
    assert "RuntimeError: scripted fault at draw 3" in caplog.messages[0]


@pytest.mark.processes
def test_respawn_restarts_a_killed_process_and_the_run_leaves_no_process_or_file():
    is_back = EndWhen(lambda seen: seen.joined == [1] and seen.used_since[1] >= 3)
    result = run(
        pl.bsp(), [pl.Fault(worker=1, draw=3, kind="die")], n=2, updates=1_000_000, respawn=True, callbacks=[is_back]
    )
    assert lost(result) == [(1, "killed by SIGKILL, out of memory or kill -9")]
    assert [record.worker for record in result.history.of(WorkerJoined)] == [1]
    assert used_by(result, 1) >= 2 + 3
    assert multiprocessing.active_children() == []
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "paceline", "psm_"))]


@parametrize_few("respawn", [True, False], keep=1)
def test_a_worker_is_replaced_if_respawn_is_on(respawn):
    is_enough = EndWhen(lambda seen: seen.used_since[1] > 4 and seen.updates > 20 and seen.joined == [1] * respawn)
    replacing = pl.bsp() + Replacing(worker=1, version=3)
    result = run(replacing, n=2, updates=1_000_000, respawn=respawn, callbacks=[is_enough])
    assert lost(result) == ([(1, "replaced by another one")] if respawn else [])
    assert [record.worker for record in result.history.of(WorkerJoined)] == ([1] if respawn else [])
    assert used_by(result, 1) > 4


@pytest.mark.slow
def test_a_silent_worker_is_declared_lost_by_a_timer():
    result = run(pl.bsp(), [pl.Fault(worker=0, draw=4, kind="hang")], worker_timeout_s=2.0)
    reasons = [record.reason for record in result.history.of(DecisionMade) if record.kind == "lost"]
    assert reasons == ["worker 0: silent for worker_timeout_s = 2 s"]
    assert result.stopped_by == "updates"
    assert used_by(result, 0) == 3


def test_a_gradient_that_is_not_finite_is_rejected_and_counted():
    result = run(pl.bsp(), [pl.Fault(worker=0, draw=4, kind="not_finite")])
    rejected = [record for record in result.history.of(GradientArrived) if record.reason == "not finite"]
    assert [(record.worker, record.draw) for record in rejected] == [(0, 4)]
    assert result.history.totals.dropped == 1
    assert all(torch.isfinite(parameter).all() for parameter in result.model.parameters())


def failing_loss(output, target):
    raise ValueError("no such class\nin the labels")


@parametrize_few("respawn", [True, False], keep=1)
def test_a_job_that_fails_in_every_worker_is_a_one_line_error_with_a_run_folder(respawn, tmp_path, caplog):
    job = tiny_job(loss=failing_loss, sampling="epoch")
    line = (
        r"^every worker failed, the first one with: job tiny failed for worker [01], draw 1, minibatch [01] of "
        r"epoch 0, after update 0: ValueError: no such class$"
    )
    with pytest.raises(pl.RunError, match=line) as error:
        run(pl.bsp(), job=job, n=2, respawn=respawn, out=tmp_path / "run")
    assert "in failing_loss" in str(error.value.__cause__)
    assert caplog.text.count("Traceback") == 1
    assert {
        each.worker for each in read_records(tmp_path / "run" / "events.jsonl") if isinstance(each, WorkerLost)
    } == {0, 1}
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_comparison_counts_a_job_that_fails_in_every_worker_as_failed(tmp_path):
    stop = pl.Stop(loss=0.5, updates=2)
    cluster = pl.LocalCluster(1, respawn=False)
    job, out = tiny_job(loss=failing_loss), tmp_path / "compared"
    with pytest.raises(FailedRunsError) as error:
        pl.compare(job, protocols="bsp", cluster=cluster, seeds=1, stop=stop, out=out)
    [row] = error.value.comparison.rows
    assert [row.status(seed, stop) for seed in row.seeds] == ["failed"]
    assert "ValueError: no such class" in row.crashes[0].message


def test_a_run_with_one_killed_worker_ends_without_an_error():
    faults = [pl.Fault(worker=0, draw=2, kind="die"), pl.Fault(worker=1, draw=2, kind="raise")]
    assert run(pl.asp(), faults, n=2, updates=10_000).stopped_by == "no_workers"


def test_the_run_ends_when_every_worker_is_lost():
    result = run(pl.asp(), [pl.Fault(worker=worker, draw=2, kind="die") for worker in range(3)], updates=10_000)
    assert result.stopped_by == "no_workers"
    assert {worker for worker, _ in lost(result)} == {0, 1, 2}


def test_a_non_scalar_loss_is_a_one_line_error():
    with pytest.raises(pl.UsageError, match=r"the loss is not a scalar \(given shape \[8\]\)"):
        run(pl.bsp(), job=tiny_job(loss=nn.CrossEntropyLoss(reduction="none")))


@pytest.mark.slow
def test_evaluation_runs_only_with_evaluation_data():
    job = tiny_job(model=batch_norm_net, eval_data=tiny_job().data)
    result = run(pl.bsp(), job=job)
    assert set(result.metrics) == {"loss", "accuracy"}


def test_an_interrupt_ends_a_simulated_delay_at_once():
    slow = pl.Cluster(
        3, timing=[pl.timing.Deterministic(1e-6), pl.timing.Deterministic(1e-6), pl.timing.Deterministic(30.0)]
    )
    result = run(pl.k_sync(k=2), slowness=slow, updates=20)
    assert result.time_s < 10
    assert {record.worker for record in result.history.of(WorkInterrupted)} >= {2}


@pytest.mark.slow
def test_a_worker_that_ignores_interrupts_accumulates_no_tasks():
    result = run(pl.k_sync(k=2), [pl.Fault(worker=2, draw=1, kind="hang")], updates=100)
    assert result.stopped_by == "updates"
    assert used_by(result, 2) == 0


def test_shared_memory_is_anonymous():
    memory = SharedMemory(FlatLayout(batch_norm_net()), workers=2, slots=3)
    target = os.readlink(f"/proc/self/fd/{memory._file}")
    assert "memfd:paceline" in target
    memory.close()


def test_a_run_of_silent_workers_ends(monkeypatch):
    monkeypatch.setattr(workers, "GRACE_S", 0.1)
    result = run(pl.asp(), [pl.Fault(worker=0, draw=1, kind="hang")], n=1, worker_timeout_s=0.3)
    assert result.stopped_by == "no_workers"


def many_layers():
    return nn.Sequential(*[nn.Linear(5, 5) for _ in range(150)], nn.Linear(5, 3)).double()


@pytest.mark.slow
def test_a_job_of_hundreds_of_tensors_can_be_sent():
    samples = list(zip(*tiny_job().data.tensors, strict=True))
    result = run(pl.bsp(), job=tiny_job(model=many_layers(), data=samples), updates=2)
    assert result.stopped_by == "updates"


def test_large_tensors_of_a_job_are_shared_by_every_process():
    large, small = torch.arange(300_000.0), torch.arange(3.0)
    parcel = SharedPickle({"a": large, "again": large, "small": small})
    assert len(parcel._pickle) < 2_000
    opened = parcel.load()
    assert torch.equal(opened["a"], large)
    assert opened["a"].data_ptr() == opened["again"].data_ptr()
    assert torch.equal(opened["small"], small)
