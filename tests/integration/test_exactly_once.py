"""With numbered minibatches, every sample is applied exactly once an epoch, whatever becomes of the workers."""

import signal
import subprocess
import sys

import pytest

import paceline as pl
from counting_runs import SAMPLES, N, deaths, on_processes
from paceline.core.records import RunResumed
from paths import environment
from selections import parametrize_few
from tiny_counting import BATCH, counting_job, times_applied

EPOCHS = 3
PROTOCOLS = ["bsp", "k_sync(k=3)", "pull(k=3)", "k_batch_sync(k=6)", "k_async(k=2)", "k_batch_async(k=3)", "asp"]
MORE = ["backup(k=2)", "ssp(lead=1)", "ringmaster(r=2)", "ringmaster(r=2, stops=true)", "bsp@updates=4 >> asp"]


def losses(result):
    return len([record for record in result.history if type(record).__name__ == "WorkerLost"])


@pytest.mark.parametrize("sharding", ["shared", "partitioned"])
@parametrize_few("protocol", [*PROTOCOLS, *MORE], keep=2)
def test_simulated(protocol, sharding):
    cluster = pl.Cluster(N, timing=pl.timing.Exponential(1.0), faults=deaths(3, back_after_s=1.5))
    result = pl.train(
        counting_job(SAMPLES, sharding=sharding), protocol=protocol, cluster=cluster, stop=f"epochs={EPOCHS}"
    )
    assert times_applied(result.model) == [EPOCHS] * SAMPLES
    assert losses(result) >= 3
    assert result.stopped_by == "epochs"
    assert result.history.totals.used == EPOCHS * SAMPLES // BATCH


def test_a_minibatch_with_a_non_finite_gradient_is_skipped_and_the_run_ends():
    faults = [pl.Fault(worker=1, draw=2, kind="not_finite"), pl.Fault(worker=0, draw=4, kind="not_finite")]
    result = pl.train(
        counting_job(SAMPLES), protocol="k_async(k=2)", cluster=pl.Cluster(N, faults=faults), stop="epochs=2"
    )
    assert sorted(times_applied(result.model)) == [1] * 2 * BATCH + [2] * (SAMPLES - 2 * BATCH)
    assert result.reason == "every minibatch was dealt out; 38 gradients were applied, the others not finite"


def test_a_worker_without_remaining_data_is_not_awaited():
    cluster = pl.Cluster(N, timing=pl.timing.Exponential(1.0), faults=deaths(40, back_after_s=6.5))
    result = pl.train(counting_job(SAMPLES), protocol="bsp", cluster=cluster, stop="epochs=2", seed=40)
    assert times_applied(result.model) == [2] * SAMPLES


def test_a_run_continues_when_all_failed_workers_rejoin():
    faults = [pl.Fault(worker=worker, draw=3, back_after_s=5.0) for worker in range(N)]
    cluster = pl.Cluster(N, timing=pl.timing.Deterministic(1.0), faults=faults)
    result = pl.train(counting_job(SAMPLES), protocol="k_async(k=2)", cluster=cluster, stop="epochs=2")
    assert losses(result) == N
    assert times_applied(result.model) == [2] * SAMPLES


def test_without_requeue_the_workload_ends_the_run():
    cluster = pl.Cluster(N, faults=deaths(3, back_after_s=1.5))
    result = pl.train(
        counting_job(SAMPLES, on_drop="discard"), protocol="k_sync(k=2)", cluster=cluster, stop="epochs=2"
    )
    assert result.history.totals.used == 2 * SAMPLES // BATCH
    assert times_applied(result.model) != [2] * SAMPLES


def check_processes(protocol, seed):
    result = on_processes(protocol, seed, stop=f"epochs={EPOCHS}")
    assert times_applied(result.model) == [EPOCHS] * SAMPLES
    assert losses(result) >= 1


def test_worker_processes_that_are_killed_and_rejoin():
    check_processes("k_batch_async(k=3)", seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_worker_processes_twenty_times(seed):
    check_processes(PROTOCOLS[seed % len(PROTOCOLS)], seed)


@pytest.mark.slow
def test_worker_processes_of_a_resumed_run(tmp_path):
    on_processes("k_async(k=2)", 1, stop="updates=9", out=tmp_path / "run")
    result = on_processes("k_async(k=2)", 1, stop=f"epochs={EPOCHS}", resume=tmp_path / "run")
    assert times_applied(result.model) == [EPOCHS] * SAMPLES


KILLED = """
import os, signal
import paceline as pl
from counting_runs import on_processes

class Kill(pl.callbacks.Callback):
    def on_update(self, update):
        if update.version == 7:
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    on_processes("k_async(k=2)", 1, stop="epochs=3", out="run", checkpoint_every="updates=3", callbacks=[Kill()])
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(ended in the middle of a line|threads)")
def test_kill_9_of_the_parent_loses_only_the_updates_since_the_checkpoint(tmp_path):
    (tmp_path / "script.py").write_text(KILLED)
    killed = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment(), check=False)
    assert killed.returncode == -signal.SIGKILL
    result = on_processes("k_async(k=2)", 1, stop=f"epochs={EPOCHS}", resume=tmp_path / "run")
    [resumed] = result.history.of(RunResumed)
    assert resumed.version == 6
    assert times_applied(result.model) == [EPOCHS] * SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("protocol", [*PROTOCOLS, *MORE])
def test_a_run_of_whole_epochs_can_be_extended(protocol, tmp_path):
    options = {"protocol": protocol, "cluster": pl.Cluster(N, timing=pl.timing.Exponential(1.0))}
    first = pl.train(counting_job(SAMPLES), stop="epochs=1", out=tmp_path / "run", **options)
    assert times_applied(first.model) == [1] * SAMPLES
    more = pl.train(counting_job(SAMPLES), stop="epochs=3", resume=tmp_path / "run", **options)
    assert times_applied(more.model) == [3] * SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"protocol": "bsp"}, {"cluster": "2*exp(mean=1)"}, {"cluster": "7*exp(mean=1)"}])
def test_resumed_under_another_protocol_or_on_another_cluster(change, tmp_path):
    asked = {"protocol": "k_batch_async(k=3)", "cluster": "4*exp(mean=1)"}
    pl.train(counting_job(SAMPLES), stop="updates=9", out=tmp_path / "run", **asked)
    options = {"stop": f"epochs={EPOCHS}", "resume": tmp_path / "run", **asked, **change}
    with pytest.raises(
        pl.UsageError, match=r"has a run with other settings: .*; to resume with the new ones, give allow_change=True"
    ):
        pl.train(counting_job(SAMPLES), **options)
    result = pl.train(counting_job(SAMPLES), allow_change=True, **options)
    assert times_applied(result.model) == [EPOCHS] * SAMPLES
