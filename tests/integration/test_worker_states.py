"""The state that only one worker has is in the checkpoints of real runs: resumed, they continue with it."""

import shutil
from functools import partial

import pytest
import torch

import paceline as pl
from end_when import FOREVER, EndWhen
from paceline.checkpoint.store import Checkpoints
from paceline.core.records import RunResumed, WorkerLost
from paceline.errors import PacelineWarning
from rank_threads import ranks, run
from ranks import flat
from selections import each_value_once, parametrize_few
from tiny_jobs import SAMPLES, dataset, largest_relative_difference, parameters_of, tiny_job

EXACT = 1e-9  # a resumed run has the samples of a minibatch in another order
STOP, WHOLE_STOP = "updates=8", "updates=16"
adam = partial(torch.optim.Adam, lr=0.02)


def whole_batches(n, **changes):
    """Return a job whose minibatches have all samples of their worker, so that tasks which a stop loses change nothing.

    The workers have different samples, and so different states.
    """
    return tiny_job(batch_size=SAMPLES // n, sampling="epoch", sharding="partitioned", optimizer=adam, **changes)


def difference(end, other):
    return largest_relative_difference(flat(end.parameters), flat(other.parameters))


def remove_states(folder):
    shutil.rmtree(folder / "workers")


def logged(caplog, text):
    return [record for record in caplog.records if text in record.getMessage()]


class Failing(pl.callbacks.Callback):
    """Ends the run of rank 0 by an error at an update."""

    def __init__(self, version):
        self._version = version

    def on_update(self, update):
        if update.version == self._version:
            raise RuntimeError("the disk is full")


WITH_A_SERVER = ["bsp + local_steps(H=3)", "bsp + local_steps(H=2, outer=nesterov)"]
WITHOUT = ["local_sgd(H=4)", "local_sgd(H=4, outer=nesterov)"]
LOSING = ["local_sgd(H=4, fragments=2)", "s3gd"]  # a stop loses the steps of each rank that no sum contains
CASES = [
    *((each, "float32") for each in [*WITH_A_SERVER, *WITHOUT]),
    ("local_sgd(H=4)", "int8"),
    ("all_reduce", "int4"),
]


@parametrize_few(("case", "stops"), each_value_once(CASES, ["by an error", "at its end"]), keep=1)
def test_a_resumed_run_continues_with_the_state_of_every_rank(case, stops, tmp_path, caplog):
    protocol, wire = case
    job = (
        whole_batches(3, model=float32_net, data=dataset(dtype=torch.float32))
        if wire != "float32"
        else whole_batches(3)
    )
    start = partial(run, 3, job, {"wire": wire}, protocol=protocol)
    whole = start(stop=WHOLE_STOP)
    if stops == "at its end":
        start(stop=STOP, out=tmp_path / "run")
    else:
        failing = {"checkpoint_every": "updates=8", "callbacks": [Failing(12)]}
        settings = {"protocol": protocol, "stop": WHOLE_STOP, "out": tmp_path / "run", **failing}
        with ranks(3, job, {"wire": wire}, **settings) as started:
            started.start_workers()
            with pytest.raises(RuntimeError, match="the disk is full"):
                started.serve()
    shutil.copytree(tmp_path / "run", tmp_path / "without")
    remove_states(tmp_path / "without")

    resumed = start(stop=WHOLE_STOP, resume=tmp_path / "run")
    assert not logged(caplog, "state")
    exact = EXACT if wire == "float32" else 1e-5
    assert max(map(difference, resumed, whole)) < exact
    assert resumed[0].of(RunResumed)
    assert pl.replay(tmp_path / "run").is_same
    without = start(stop=WHOLE_STOP, resume=tmp_path / "without")
    assert difference(without[0], whole[0]) > 10 * exact
    assert logged(caplog, "state")


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "delay"), [("bsp", 0), ("dc_s3gd", 1)])
def test_checkpoints_are_saved_at_the_interval_and_one_update_later_without_a_server(protocol, delay, tmp_path):
    settings = {"checkpoint_every": "updates=10", "keep_checkpoints": 9, "out": tmp_path / "run"}
    run(3, tiny_job(), protocol=protocol, stop="updates=34", **settings)
    names = sorted(each.name for each in (tmp_path / "run" / "checkpoints").glob("*-update-*"))
    versions = [int(name.rpartition("-")[2]) for name in names]
    assert versions == [0, 1 + delay, *(each + delay for each in (10, 20, 30)), 34]


def float32_net():
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


@pytest.mark.slow
def test_a_resumed_local_run_continues_with_the_state_of_every_worker(tmp_path):
    settings = {"protocol": WITH_A_SERVER[0], "cluster": pl.LocalCluster(2), "seed": 1}
    whole = pl.train(whole_batches(2), stop=WHOLE_STOP, **settings)
    pl.train(whole_batches(2), stop=STOP, out=tmp_path / "run", **settings)
    shutil.copytree(tmp_path / "run", tmp_path / "without")
    remove_states(tmp_path / "without")
    resumed, without = (
        pl.train(whole_batches(2), stop=WHOLE_STOP, resume=tmp_path / name, **settings) for name in ("run", "without")
    )
    far = largest_relative_difference(parameters_of(without.model), parameters_of(whole.model))
    assert largest_relative_difference(parameters_of(resumed.model), parameters_of(whole.model)) < EXACT < far / 10


def test_a_worker_that_is_restarted_begins_with_its_last_saved_state(tmp_path, caplog):
    cluster = pl.LocalCluster(2, faults=[pl.Fault(worker=1, draw=9)], respawn=True)
    is_back = EndWhen(lambda seen: seen.joined and seen.used_since[1] > 2)
    settings = {"protocol": "asp + local_steps(H=2)", "checkpoint_every": "updates=2", "callbacks": [is_back]}
    result = pl.train(whole_batches(2), cluster=cluster, stop=FOREVER, out=tmp_path / "run", **settings)
    assert len(result.history.of(WorkerLost)) == 1
    [begun] = logged(caplog, "worker 1 continues from its state after gradient")
    assert 1 <= begun.args[1] < begun.args[2] == 8


@pytest.mark.slow
def test_a_new_run_in_the_same_folder_begins_without_the_states_of_the_old_one(tmp_path, caplog):
    settings = {"protocol": WITH_A_SERVER[0], "cluster": pl.LocalCluster(2), "seed": 1, "stop": STOP}
    first, second = (pl.train(whole_batches(2), out=tmp_path / "run", overwrite=True, **settings) for _ in range(2))
    assert largest_relative_difference(parameters_of(first.model), parameters_of(second.model)) < EXACT
    assert not logged(caplog, "state")


@pytest.mark.slow
def test_a_rank_whose_states_are_damaged_says_so_and_begins_anew(tmp_path, caplog):
    start = partial(run, 2, whole_batches(2), protocol=WITH_A_SERVER[0])
    start(stop=STOP, out=tmp_path / "run")
    for path in (tmp_path / "run" / "workers" / "0").glob("*/tensors.safetensors"):
        path.write_bytes(b"damaged")
    with pytest.warns(PacelineWarning, match="damaged"):
        start(stop=WHOLE_STOP, resume=tmp_path / "run")
    assert logged(caplog, "worker 0 cannot read its saved states")
    assert logged(caplog, "worker 0 has no saved state")


def test_a_state_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    states = tmp_path / "run" / "workers"
    states.mkdir(parents=True)
    (states / "1").write_text("in the way")
    settings = {"protocol": WITH_A_SERVER[0], "cluster": pl.LocalCluster(2), "seed": 1, "stop": STOP}
    assert pl.train(whole_batches(2), out=tmp_path / "run", overwrite=True, **settings).reason == "8 updates made"
    assert logged(caplog, "worker 1: cannot write the checkpoint")
    assert [*(states / "0").glob("*-gradient-8")]


@pytest.mark.slow
@pytest.mark.parametrize("protocol", LOSING)
def test_a_rank_keeps_its_optimizer_where_its_steps_are_lost_with_the_sums(protocol, tmp_path, caplog):
    start = partial(run, 3, whole_batches(3), protocol=protocol)
    start(stop=STOP, out=tmp_path / "run")
    start(stop=WHOLE_STOP, resume=tmp_path / "run")
    assert not logged(caplog, "state")
    for rank in range(3):
        newest = {
            stop: state["parts"]["optimizer"][0]["exp_avg"]
            for stop, (_, state) in zip(
                ("whole", "half"), Checkpoints(tmp_path / "run" / "workers" / str(rank)).whole(), strict=False
            )
        }
        assert not torch.equal(newest["whole"], newest["half"])
    remove_states(tmp_path / "run")
    start(stop="updates=30", resume=tmp_path / "run")
    assert len(logged(caplog, "no saved state of update 16: it begins with that of rank 0")) == 3


@pytest.mark.slow
def test_a_worker_of_an_asynchronous_run_saves_the_state_of_its_accepted_work(tmp_path):
    settings = {"protocol": "k_async(k=1) + local_steps(H=2)", "checkpoint_every": "updates=5"}
    run(3, whole_batches(2), **settings, stop="updates=31", out=tmp_path / "run")
    [(_, saved), *_] = Checkpoints(tmp_path / "run" / "checkpoints").whole()
    accepted = {
        worker: state["accepted"]
        for worker, state in saved["coordinator"]["membership"]["dispatcher"]["table"]["workers"].items()
    }
    for worker in range(2):
        found = Checkpoints(tmp_path / "run" / "workers" / str(worker), counted="gradient").whole()
        positions = [state["position"] for _, state in found]
        assert accepted[worker] in positions
