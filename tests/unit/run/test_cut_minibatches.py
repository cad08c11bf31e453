"""Minibatches that cannot be cut: `auto` leaves them whole, and other protocols refuse or note it."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import IterableDataset

import paceline as pl
from paceline.core.records import DecisionMade, GradientArrived
from tiny_jobs import batch_norm_net, dataset, largest_relative_difference, parameters_of, tiny_job

SLOW = pl.Cluster(4, pl.timing.Uniform(0.9, 1.1), speed=[1.0, 1.0, 1.0, 0.25])


class Endless(IterableDataset):
    """Data without numbers of samples."""

    def __iter__(self):
        numbers = torch.Generator().manual_seed(0)
        while True:
            yield torch.randn(5, generator=numbers, dtype=torch.float64), torch.tensor(0)


def first_protocol(run):
    return [each.reason.split(":")[0] for each in run.history.of(DecisionMade) if each.kind == "protocol"][1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": batch_norm_net}, "its layer 1 would normalize by pieces of a minibatch"),
        ({"loss": lambda output, target: F.cross_entropy(output, target, reduction="sum")}, "a loss is a sum"),
        ({"data": Endless()}, "each worker reads its own"),
        ({"sharding": "partitioned", "sampling": "epoch"}, "each worker reads its own"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*reduce the loss with")
def test_auto_leaves_them_whole(changes, reason, caplog, tmp_path):
    job = tiny_job(**changes)
    with caplog.at_level(logging.INFO, "paceline"):
        run = pl.train(job, protocol="auto", cluster=SLOW, stop="updates=6", out=tmp_path / "run")
    assert first_protocol(run) == "pull(k=4)"
    assert {each.samples for each in run.history.of(GradientArrived)} == {8}
    assert reason in caplog.text
    assert pl.replay(tmp_path / "run").is_same


def test_auto_cuts_others_and_makes_the_updates_of_bsp(tmp_path):
    plan = "auto(candidates=['balanced(m=8)'])"
    run = pl.train(tiny_job(), protocol=plan, cluster=SLOW, stop="updates=40", out=tmp_path / "run")
    assert first_protocol(run) == "balanced(m=8)"
    assert len({each.samples for each in run.history.of(GradientArrived)}) > 2
    expected = pl.train(tiny_job(), protocol="bsp", cluster=SLOW, stop="updates=40")
    assert run.time_s < 0.5 * expected.time_s
    assert largest_relative_difference(parameters_of(run.model), parameters_of(expected.model)) < 1e-12
    assert pl.replay(tmp_path / "run").is_same


def test_a_layer_that_normalizes_by_pieces_is_noted_once(caplog):
    pl.train(tiny_job(model=batch_norm_net), protocol="balanced(m=2)", cluster=SLOW, stop="updates=3")
    notes = [each.getMessage() for each in caplog.records if "normalizes by pieces" in each.getMessage()]
    assert notes == ["balanced(m=2): the layer 1 of the model normalizes by pieces of 4 samples"]
    caplog.clear()
    pl.train(tiny_job(data=dataset()), protocol="balanced(m=8)", cluster=SLOW, stop="updates=3")
    assert "normalizes" not in caplog.text
