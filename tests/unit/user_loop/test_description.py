"""Description of a user's training: names, order and values survive the way to the server."""

import io
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import paceline as pl
from loop_parts import loop_of
from paceline.jobs.job import trainable
from paceline.protocols.protocol import as_plan
from paceline.run.plan_json import plan_as_json, plan_of
from paceline.user_loop.run_options import RunOptions
from paceline.user_loop.server.description import (
    FirstTensors,
    ParameterBag,
    SentRun,
    ServerRun,
    describe,
    make_job,
    recv_run,
    send_run,
    tensors_of,
)
from paceline.user_loop.server.frames import read_tensors, write_tensors
from paceline.user_loop.worker.loop_optimizer import shared_parameters


class Network(nn.Module):
    """Network whose modules are not registered in the order of their use, with a tied and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(2)])
        self.last = nn.Linear(3, 2, bias=False)
        self.tied = self.last
        self.frozen = nn.Linear(2, 2)
        self.frozen.requires_grad_(requires_grad=False)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))


@pytest.fixture
def model():
    return Network()


def description(model, kind=torch.optim.AdamW):
    vectors = [each for each in trainable(model) if each.ndim < 2]
    matrices = [each for each in trainable(model) if each.ndim == 2]
    groups = [{"params": [*matrices, *model.frozen.parameters()]}, {"params": vectors, "weight_decay": 0.0}]
    loader = torch.utils.data.DataLoader(range(10), batch_size=1)
    return describe(loop_of(model, kind(groups, lr=0.25, betas=(0.8, 0.9)), loader, accumulate=2, clip_norm=1.5))


def test_a_bag_has_the_trainable_parameters_and_the_buffers_in_the_model_s_order(model):
    bag = ParameterBag(description(model), tensors_of(model))
    for ours, theirs in [
        (bag.named_parameters(), model.named_parameters()),
        (bag.named_buffers(), model.named_buffers()),
    ]:
        expected = [(name, tensor) for name, tensor in theirs if not name.startswith("frozen")]
        found = list(ours)
        assert [name for name, _ in found] == [name for name, _ in expected]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, expected, strict=True))


def test_a_run_is_received_as_it_was_sent(model):
    plan, options = plan_as_json(as_plan(pl.bsp().until(0.25) >> pl.asp())), RunOptions(seed=7, resume="/runs/1")
    run = ServerRun(
        training=description(model),
        plan=plan,
        stop="epochs=3",
        options=options,
        cluster={"wire": "bfloat16"},
        ranks={"rank": 0},
    )
    stream = io.BytesIO()
    state = {"exp_avg last.weight": torch.ones(2, 3)}
    send_run(stream, SentRun(run, FirstTensors(tensors_of(model), state), b"optimizer"))
    stream.seek(0)
    received, (tensors, received_state), optimizer, own = recv_run(stream)
    assert own == b""
    assert optimizer == b"optimizer"
    assert received.training.groups[1].options["weight_decay"] == 0.0
    assert (received.stop, received.options, received.cluster) == ("epochs=3", options, run.cluster)
    assert plan_of(received.plan) == as_plan(pl.bsp().until(0.25) >> pl.asp())
    assert torch.equal(received_state["exp_avg last.weight"], torch.ones(2, 3))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in tensors_of(model).items())
    job = make_job(received.training, tensors)
    assert (job.batch_size, job.clip_norm, job.minibatches_per_epoch()) == (2, 1.5, 5)
    assert [*job.sampler] == [*range(10)]


class Named(nn.Module):
    """Network whose modules have the names of methods of every module."""

    def __init__(self):
        super().__init__()
        self.type = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        last = nn.Linear(3, 1)
        last.float = nn.Linear(1, 1)
        self.half = nn.ModuleList([last])
        self.parameters = nn.Linear(1, 1)


def test_a_module_may_have_the_name_of_a_method():
    model = Named()
    loader = torch.utils.data.DataLoader(range(10), batch_size=1)
    described = describe(loop_of(model, torch.optim.SGD(trainable(model)), loader))
    for made in (ParameterBag(described, tensors_of(model)), shared_parameters(model)):
        assert list(made.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("number", [np.float64, np.float32, np.array, torch.tensor, lambda value: value])
def test_numbers_of_an_optimizer_are_received_as_python_s(number, model):
    parameters = trainable(model)
    optimizer = torch.optim.Rprop(
        parameters, lr=number(0.5), etas=(number(0.25), 2.0), step_sizes=(number(0.125), float("inf"))
    )
    loader = torch.utils.data.DataLoader(range(10), batch_size=1)
    described = describe(loop_of(model, optimizer, loader, clip_norm=np.float64(1.5)))
    stream = io.BytesIO()
    send_run(
        stream,
        SentRun(
            ServerRun(training=described, plan=[], stop="epochs=3", options=RunOptions(), cluster={}, ranks={}),
            FirstTensors({}, {}),
        ),
    )
    stream.seek(0)
    received = recv_run(stream).run.training
    options = received.groups[0].options
    assert (options["lr"], [*options["etas"]], [*options["step_sizes"]]) == (0.5, [0.25, 2.0], [0.125, float("inf")])
    assert {type(options["lr"]), *map(type, options["etas"]), type(described.clip_norm)} == {float}


def test_an_option_of_an_optimizer_that_is_no_number_is_refused_by_name(model):
    optimizer = torch.optim.SGD(trainable(model), lr=0.1, weight_decay=Fraction(1, 8))
    loader = torch.utils.data.DataLoader(range(10), batch_size=1)
    with pytest.raises(pl.UsageError, match="parameter group 0 has weight_decay of type Fraction, expected a number"):
        describe(loop_of(model, optimizer, loader))


def test_tensors_of_complex128_are_received_as_they_were_sent():
    sent = {"w": torch.randn(2, 3, dtype=torch.complex128).conj(), "real": torch.ones(2), "0": torch.tensor(1 + 2j)}
    stream = io.BytesIO()
    write_tensors(stream, {name: tensor.contiguous() for name, tensor in sent.items()})
    stream.seek(0)
    received = read_tensors(stream)
    assert {name: tensor.dtype for name, tensor in received.items()} == {n: each.dtype for n, each in sent.items()}
    assert all(torch.equal(received[name], tensor) for name, tensor in sent.items())


def test_the_server_s_optimizer_has_the_groups_of_the_user_s(model):
    job = make_job(description(model), tensors_of(model))
    bag = job.build_model(0)
    optimizer = job.optimizer(bag.named_parameters())
    first, second = optimizer.param_groups
    assert type(optimizer) is torch.optim.AdamW
    assert (first["lr"], tuple(first["betas"]), first["weight_decay"]) == (0.25, (0.8, 0.9), 0.01)
    assert second["weight_decay"] == 0.0
    assert {each.ndim for each in first["params"]} == {2}
    assert {each.ndim for each in second["params"]} == {0, 1}
