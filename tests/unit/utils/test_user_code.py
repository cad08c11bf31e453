"""A failure in the user's code says where: the part, the job, the worker, the minibatch and the update."""

import sys
from functools import partial
from textwrap import dedent

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline.cli import main
from paceline.utils.user_code import place_of, report_of
from tiny_jobs import dataset, small_net, tiny_job

CALLS = {"loss": 0}


class UnluckyError(ValueError):
    """An exception of the user's own."""


def broken(*args, **kwargs):
    raise UnluckyError("the user's fault")


class BrokenData(torch.utils.data.TensorDataset):
    __getitem__ = broken


class BrokenNet(nn.Linear):
    forward = broken


class BrokenSGD(torch.optim.SGD):
    step = broken


class BrokenCallback(pl.callbacks.Callback):
    def on_record(self, record):
        if isinstance(record, pl.callbacks.UpdateMade):
            broken()


class BrokenController(pl.controllers.Controller[None]):
    def begin(self, n):
        return None

    decide = broken


def third_fails(output, target):
    CALLS["loss"] += 1
    return F.cross_entropy(output, target) if CALLS["loss"] < 3 else broken()


def train(protocol="bsp", callbacks=(), cluster="2*deterministic(value=1)", **changes):
    CALLS["loss"] = 0
    return pl.train(tiny_job(**changes), protocol=protocol, cluster=cluster, stop="updates=3", callbacks=callbacks)


FAILURES = {
    "the model of job tiny could not be built": {"model": broken},
    "the optimizer of job tiny could not be made": {"optimizer": broken},
    "the scheduler of job tiny could not be made": {"scheduler": broken},
    "the data of job tiny failed for worker 0, draw 1, after update 0": {"data": BrokenData(*dataset().tensors)},
    "job tiny failed for worker 0, draw 1, after update 0": {"model": partial(BrokenNet, 5, 3)},
    "the optimizer of job tiny failed after 0 gradients": {"optimizer": partial(BrokenSGD, lr=0.1)},
    "the evaluation of job tiny failed": {"eval_data": BrokenData(*dataset().tensors)},
    "callback BrokenCallback failed at UpdateMade": {"callbacks": [BrokenCallback()]},
    "controller BrokenController() failed after update 0": {"protocol": pl.bsp().controlled_by(BrokenController())},
    "failed for worker 0, draw 1, minibatch 0 of epoch 0": {"sampling": "epoch", "model": partial(BrokenNet, 5, 3)},
}


@pytest.mark.parametrize(("place", "changes"), FAILURES.items(), ids=FAILURES)
def test_a_failure_of_user_code_keeps_its_type_and_has_a_location(place, changes):
    with pytest.raises(UnluckyError) as failure:
        train(**changes)
    assert place in place_of(failure.value)


@pytest.mark.parametrize("protocol", ["bsp", "all_reduce", "dc_s3gd"])
def test_every_kind_of_run_names_worker_draw_and_update(protocol):
    with pytest.raises(UnluckyError) as failure:
        train(protocol, loss=third_fails)
    assert "job tiny failed for worker" in place_of(failure.value)
    assert place_of(failure.value).endswith("draw 2, after update 1")


def test_an_error_report_begins_with_the_location_above_the_traceback():
    with pytest.raises(UnluckyError) as failure:
        train(model=partial(BrokenNet, 5, 3))
    first, *report = report_of(failure.value).splitlines()
    assert first == "job tiny failed for worker 0, draw 1, after update 0:"
    assert report[0].startswith("Traceback")
    assert report[-1] == "test_user_code.UnluckyError: the user's fault"


def test_a_local_worker_reports_the_location_above_the_traceback(caplog):
    with pytest.raises(pl.RunError, match=r"^every worker failed, "):
        train(loss=broken, cluster=pl.LocalCluster(1))
    said = caplog.text
    at = said.index("worker 0 failed:\njob tiny failed for worker 0, draw 1, after update 0:\nTraceback")
    assert "UnluckyError: the user's fault" in said[at:]


def test_a_usage_error_has_no_location():
    with pytest.raises(pl.UsageError) as refusal:
        train(loss=nn.CrossEntropyLoss(reduction="none"), model=small_net)
    assert not hasattr(refusal.value, "__notes__")


@pytest.mark.parametrize("cluster", ["2*exp(mean=1)", "local:2"])
def test_the_command_line_reports_the_location_above_the_traceback(cluster, monkeypatch, capsys, tmp_path):
    code = """
        from tiny_jobs import tiny_job

        def broken(output, target):
            raise ValueError("mine")

        job = tiny_job(loss=broken)
    """
    (tmp_path / "breaking_job.py").write_text(dedent(code))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    options = ["--protocol", "bsp", "--cluster", cluster, "--stop", "updates=1", "--out", "run"]
    monkeypatch.setattr(sys, "argv", ["paceline", "train", "breaking_job:job", *options])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert end.value.code == 1
    assert said.count("Traceback") == 1
    if cluster == "local:2":
        assert "paceline: every worker failed, the first one with: job tiny failed for worker " in " ".join(
            said.split()
        )
        return
    at = said.index("paceline: job tiny failed for worker 1, draw 1, after update 0:\nTraceback")
    assert said[at:].rstrip().endswith("ValueError: mine")
