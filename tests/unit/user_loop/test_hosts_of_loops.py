"""Hosts as workers of attached loops: what their ranks can share, and what they cannot."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from loop_parts import loop_of
from paceline.catalogue.parser import parse_plan
from paceline.core.events import Minibatch
from paceline.user_loop.data.dealt_batches import DealtBatches
from paceline.user_loop.data.loop_data import LoopData
from paceline.user_loop.data.pieces import check_hosts
from paceline.user_loop.server.description import describe, make_job, tensors_of
from paceline.user_loop.several_optimizers import as_one
from paceline.user_loop.start_line import start_line

DATA = TensorDataset(torch.arange(12.0)[:, None])


def parts(**loading):
    model = nn.Linear(1, 1)
    loader = DataLoader(DATA, **{"batch_size": 4, **loading})
    return loop_of(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_ranks_of_a_host_load_each_sample_of_a_minibatch_once(ranks, accumulate):
    loop = parts()._replace(accumulate=accumulate)
    job = make_job(describe(loop), tensors_of(loop.model))
    size = LoopData.of_loop(loop).batch_size
    dealt = [
        DealtBatches(job, 0, loop.loader, accumulate, (rank, ranks)).of(Minibatch(0, 0, 0)) for rank in range(ranks)
    ]
    assert [number for batches in dealt for batch in batches for number in batch] == list(range(size))
    assert {len(batches) for batches in dealt} == {accumulate}


@pytest.mark.parametrize(
    ("plan", "loading", "words"),
    [
        ("balanced(m=2)", {}, "one gradient of each minibatch"),
        ("bsp + local_steps(H=2)", {}, "one gradient of each minibatch"),
        ("bsp", {"batch_size": 1}, "needs 2 samples"),
        ("bsp", {"batch_size": 11}, "drop_last=True"),
    ],
)
def test_what_cannot_be_shared_is_refused(plan, loading, words):
    with pytest.raises(pl.UsageError, match=words):
        check_hosts(parse_plan(plan), parts(**loading), 2)
    check_hosts(parse_plan(plan), parts(**loading), 1)


def test_several_optimizers_are_refused():
    model = nn.Linear(1, 1)
    optimizers = [torch.optim.SGD([each], lr=0.1) for each in model.parameters()]
    with pytest.raises(pl.UsageError, match="several optimizers"):
        check_hosts(parse_plan("bsp"), loop_of(model, as_one(optimizers), DataLoader(DATA, 4)), 2)


def test_the_first_line_names_the_hosts():
    assert start_line(parse_plan("bsp"), 2, None, ranks_each=4).startswith("bsp on 2 hosts of 4 ranks, not recorded")
