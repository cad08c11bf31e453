"""Sparse gradients of attached loops: they are summed as dense ones, and SparseAdam steps with sparse ones."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from attached_threads import AttachedThreads
from paceline.user_loop.several_optimizers import as_one

EXACT = 1e-12
SAMPLES, BATCH, RANKS = 48, 4, 3


def data():
    return TensorDataset(torch.zeros(SAMPLES), torch.arange(SAMPLES))


def run(loop, parts, **settings):
    ranks = AttachedThreads(RANKS, parts, "bsp", **settings)
    return ranks, ranks.run_well(loop)


def distance(one, other):
    return max(float((a - b).detach().abs().max()) for a, b in zip(one, other, strict=True))


class Embedded(nn.Module):
    """Embedding with sparse gradients, and a layer with dense ones."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(SAMPLES, 2, sparse=True).double()
        self.last = nn.Linear(2, 1).double()


def embedded():
    torch.manual_seed(0)
    return Embedded()


def embedded_optimizers(model):
    return [torch.optim.SparseAdam(model.table.parameters(), lr=0.05), torch.optim.SGD(model.last.parameters(), lr=0.1)]


def embedded_step(model, optimizers, numbers):
    for each in optimizers:
        each.zero_grad()
        (model.last(model.table(numbers % 5)).square().mean() + model.table(numbers).sum() / 100).backward()
        each.step()


@pytest.mark.parametrize("server", [False, True])
def test_an_embedding_has_a_sparse_optimizer_of_its_own(server):
    def loop(run, model, both):
        batches = []
        for _ in run.epochs(2):
            for _, numbers in run.loader:
                batches.append(numbers)
                embedded_step(model, both.optimizers, numbers)
        return batches

    def parts():
        model = embedded()
        return model, as_one(embedded_optimizers(model)), DataLoader(data(), BATCH, shuffle=True)

    ranks, answers = run(loop, parts, server=server)
    model = embedded()
    optimizers = embedded_optimizers(model)
    for numbers in zip(*answers, strict=True):
        # the sum is over the samples of one rank
        for each in optimizers:
            each.zero_grad()
            for own in numbers:
                loss = model.last(model.table(own % 5)).square().mean() + model.table(own).sum() / 100
                (loss / RANKS).backward()
            each.step()
    assert distance(ranks.parts[0][0].parameters(), model.parameters()) < EXACT
