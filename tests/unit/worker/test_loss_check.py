"""Loss of pieces: its gradient is that of the whole minibatch, or the job is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline.catalogue.parser import parse_plan
from paceline.errors import UsageError
from paceline.worker.loss_check import check_loss_of_pieces
from tiny_jobs import batch_norm_net, dataset, tiny_job
from tiny_tokens import mean_over_tokens, token_job, tokens_of


def check(job, piece=2):
    model = job.model() if not isinstance(job.model, nn.Module) else job.model
    before = [buffer.clone() for buffer in model.buffers()]
    check_loss_of_pieces(job, model, piece, parse_plan("balanced(m=4)"))
    assert all(map(torch.equal, model.buffers(), before))
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


class Counting(nn.Module):
    """Layer that counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


def counting():
    return nn.Sequential(batch_norm_net(), Counting())


def with_dropout():
    return nn.Sequential(batch_norm_net(), nn.Dropout(0.5))


def in_single():
    return nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 3))


def contrastive(output, target):
    similar = output @ output.T
    return F.cross_entropy(similar, torch.arange(len(output)))


@pytest.mark.parametrize(
    "job",
    [
        {},
        {"model": with_dropout},
        {"model": counting},
        {"model": in_single, "data": dataset(dtype=torch.float32)},
        {"loss": lambda output, target: F.cross_entropy(output, target, reduction="sum") / len(target)},
        {
            "loss": lambda output, target: (
                F.cross_entropy(output, target) + 0.1 * F.mse_loss(output, output.detach() + 1)
            )
        },
    ],
)
@pytest.mark.parametrize("piece", [1, 2, 3])
def test_a_mean_over_samples_may_be_computed_in_pieces(job, piece):
    check(tiny_job(**job), piece)


def test_a_mean_over_tokens_needs_its_weight():
    check(token_job(step=mean_over_tokens, weight=tokens_of))
    with pytest.raises(
        UsageError, match=r"job tokens: the gradient of a minibatch is not the mean of those of its pieces"
    ):
        check(token_job(step=mean_over_tokens))


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, target: F.cross_entropy(output, target, reduction="sum"),
        lambda output, target: F.cross_entropy(output, target, weight=torch.tensor([1.0, 2.0, 9.0]).double()),
        contrastive,
    ],
)
def test_other_losses_are_refused_with_what_to_type(loss):
    with pytest.raises(UsageError, match=r"balanced\(m=4\) computes pieces: give weight=, .* or type bsp"):
        check(tiny_job(loss=loss))


def test_a_run_refuses_them_before_it_begins():
    with pytest.raises(UsageError, match="is not the mean of those of its pieces"):
        pl.train(tiny_job(loss=contrastive), protocol="balanced(m=4)", cluster="4*exp(mean=1)", stop="updates=2")


def test_random_numbers_are_no_difference():
    def noisy(output, target):
        return F.cross_entropy(output + torch.randn_like(output), target)

    check(tiny_job(loss=noisy))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_out_of_range_is_refused(weight):
    job = tiny_job(weight=lambda batch: weight)
    with pytest.raises(UsageError, match=r"job tiny: weight of a batch = .*, expected a number >= 0"):
        pl.train(job, protocol="bsp", cluster="2*exp(mean=1)", stop="updates=2")


@pytest.mark.parametrize("protocol", ["all_reduce", "bsp + local_steps(H=2)"])
def test_what_averages_by_samples_refuses_a_weight(protocol):
    job = tiny_job(weight=len)
    with pytest.raises(UsageError, match=r"job tiny has a weight, but .* takes means by samples"):
        pl.train(job, protocol=protocol, cluster="2*exp(mean=1)", stop="updates=2")
