"""A parameter without a gradient is not stepped, as by an optimizer of torch: it has no decay and no momentum."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
import rank_threads
from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads
from loop_parts import make_parts
from paceline.tensors.flat_buffers import FlatLayout
from selections import parametrize_each_once, parametrize_few

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*was None or zero in each of the first:paceline.errors.PacelineWarning"
)
EXACT = 1e-12
SAMPLES, BATCH = 32, 4


class Branches(nn.Module):
    """Network of which the sign of the first input decides which branch is used; one is never used."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.positive, self.negative, self.never = (nn.Linear(3, 1) for _ in range(3))

    def forward(self, x):
        return (self.positive if x[0, 0] > 0 else self.negative)(torch.tanh(self.first(x)))


def network():
    torch.manual_seed(0)
    return Branches().double()


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 3, generator=generator).double()
    return TensorDataset(x, x.sum(1, keepdim=True))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5)


def loss_of(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def plain_steps(make_optimizer, steps):
    """Return the parameters after steps, each with the mean gradient of some batches."""
    model = network()
    optimizer = make_optimizer(model.parameters())
    for batches in steps:
        optimizer.zero_grad()
        for batch in batches:
            (loss_of(model, batch) / len(batches)).backward()
        optimizer.step()
    return list(model.parameters())


def train(run, model, optimizer):
    steps = []
    for _ in run.epochs(2):
        for batch in run.loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            steps.append(batch)
    return steps


@parametrize_each_once(
    make_optimizer=[sgd, adamw], count__protocol=[(1, "bsp"), (2, "bsp"), (1, "bsp + local_steps(H=2)")]
)
def test_an_attached_run_with_a_server_makes_the_steps_of_a_plain_loop(count, protocol, make_optimizer):
    check_attached(AttachedThreads(count, parts(make_optimizer), protocol), make_optimizer)


@parametrize_each_once(make_optimizer=[sgd, adamw], count=[1, 2])
def test_an_attached_run_without_a_server_makes_the_steps_of_a_plain_loop(count, make_optimizer):
    check_attached(AllReduceLoops(count, parts(make_optimizer), "all_reduce"), make_optimizer)


def parts(make_optimizer):
    return make_parts(network(), data(), lambda model: make_optimizer(model.parameters()), batch_size=BATCH)


def check_attached(ranks, make_optimizer):
    steps = ranks.run(train)
    expected = plain_steps(make_optimizer, zip(*steps, strict=True))
    for model, _, _ in ranks.parts:
        assert max((one - other).abs().max() for one, other in zip(model.parameters(), expected, strict=True)) < EXACT


@parametrize_few("protocol", ["asp", "all_reduce", "bsp", "local_sgd(H=2)"], keep=1)
def test_every_cluster_leaves_a_parameter_without_a_gradient_as_it_is(protocol):
    job = pl.Job(model=network, optimizer=adamw, data=data(), batch_size=BATCH, step=loss_of, name="branches")
    model = pl.train(job, protocol=protocol, cluster=pl.Cluster(2), stop="updates=9").model
    check_trained(model.state_dict())
    with rank_threads.ranks(2, job, protocol=protocol, stop="updates=9") as processes:
        processes.start_workers()
        check_trained(processes.serve().parameters)
    if protocol in {"bsp", "asp"}:
        check_trained(pl.train(job, protocol=protocol, cluster=pl.LocalCluster(2), stop="updates=9").model.state_dict())


@parametrize_few("protocol", ["bsp", "bsp + local_steps(H=2)"], keep=1)
def test_a_host_leaves_a_parameter_that_none_of_its_processes_uses_as_it_is(protocol):
    job = pl.Job(model=network, optimizer=adamw, data=data(), batch_size=BATCH, step=loss_of, name="branches")
    with rank_threads.ranks(4, job, {"workers": "node"}, nodes=2, protocol=protocol, stop="updates=9") as processes:
        processes.start_workers()
        check_trained(processes.serve().parameters)


def check_trained(tensors):
    before = network().state_dict()
    assert torch.equal(tensors["never.weight"], before["never.weight"])
    assert not torch.equal(tensors["positive.weight"], before["positive.weight"])


def test_what_a_compressed_message_had_left_out_is_a_gradient():
    layout = FlatLayout(network())
    gradient = layout.allocate()
    gradient.parameters[2].fill_(1.0)
    gradient.receive(missing=(2, 3))
    assert gradient.missing == (3,)
