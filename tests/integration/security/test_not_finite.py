"""A worker that sends numbers that are not finite and says that they are: the server sees for itself."""

from math import inf, nan
from unittest.mock import patch

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.checkpoint.store import Checkpoints
from paceline.core.records import RunResumed
from paceline.engines.distributed.parameter_server.worker_process import WorkerProcess
from paceline.recording.run_folder import CHECKPOINTS
from paceline.tensors.finite import are_finite
from rank_threads import ranks
from selections import each_value_once, parametrize_few
from tiny_jobs import small_net, tiny_job

POISONED = 3  # first such draw of worker 1


def poisoned(value):
    """Return a patch with which worker 1 writes a number into its gradient after it has measured it."""
    send = WorkerProcess._send_gradient

    def send_poisoned(worker, stats):
        if worker._worker == 1 and worker._draw >= POISONED:
            worker._tensors.gradient.flat_parameters[0][0] = value
        send(worker, stats)

    return patch.object(WorkerProcess, "_send_gradient", send_poisoned)


@parametrize_few(
    ("run", "value"),
    each_value_once(
        [("bsp", {}), ("asp", {}), ("k_async(k=2)", {}), ("asp", {"shards": 2}), ("bsp", {"wire": "bf16"})],
        [nan, inf, -inf],
    ),
    keep=1,
)
def test_the_run_ends_names_the_worker_and_is_saved_before(run, value, tmp_path, caplog):
    protocol, torchrun = run
    settings = {"protocol": protocol, "stop": "updates=40", "out": tmp_path / "run", "checkpoint_every": "updates=1"}
    with ranks(4, tiny_job(), torchrun, **settings) as job, poisoned(value):
        job.start_workers()
        end = job.serve()
    assert end.stopped_by == "not_finite"
    assert "because the gradient of worker 1 is not, which was sent as finite" in end.reason
    assert "so they are not saved; resume=" in caplog.text
    _, state = next(Checkpoints(tmp_path / "run" / "checkpoints").whole())
    assert are_finite(state["server"]["model"].values())
    assert are_finite(tensor for each in state["server"]["optimizer"]["state"].values() for tensor in each.values())
    assert pl.replay(tmp_path / "run").difference == ""


@pytest.mark.slow
def test_a_run_is_resumed_from_the_checkpoint_whose_name_is_written_by_hand(tmp_path):
    folder, settings = tmp_path / "run", {"protocol": "bsp", "stop": "updates=12", "checkpoint_every": "updates=1"}
    with ranks(3, tiny_job(), **settings, out=folder) as job, poisoned(nan):
        job.start_workers()
        assert job.serve().stopped_by == "not_finite"
    checkpoints = sorted((folder / "checkpoints").glob("*-update-*"))
    assert [each.name for each in checkpoints] == ["000001-update-0", "000002-update-1", "000003-update-2"]
    (folder / "checkpoints" / "latest").write_text("000002-update-1\n")  # as `echo` does
    with ranks(3, tiny_job(), **settings, resume=folder) as job:
        job.start_workers()
        end = job.serve()
    assert [each.version for each in end.of(RunResumed)] == [1]
    assert end.reason == "12 updates made"
    assert are_finite(end.parameters.values())


class Masked(nn.Module):
    """A network with a mask of -inf, as that of attention."""

    def __init__(self):
        super().__init__()
        self.net = small_net()
        self.register_buffer("mask", torch.tensor([-inf, 0.0, 0.0]))

    def forward(self, x):
        return self.net(x) + self.mask.clamp(min=-1.0)


@parametrize_few("protocol", ["bsp", "asp"], keep=1)
def test_a_mask_that_was_never_finite_ends_no_run_and_is_saved(protocol, tmp_path):
    settings = {"protocol": protocol, "cluster": pl.Cluster(2), "stop": "updates=4", "checkpoint_every": "updates=1"}
    run = pl.train(tiny_job(model=Masked), out=tmp_path / "run", **settings)
    assert run.stopped_by == "updates"
    assert Checkpoints(tmp_path / "run" / CHECKPOINTS, 3).newest.name.endswith("-update-4")
    assert torch.equal(run.model.mask, torch.tensor([-inf, 0.0, 0.0]))
