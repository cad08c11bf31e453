"""Models and data of the training loops that are balanced."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from fully_sharded import fully_shard


def data(count=200, width=6, classes=0):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, width, generator=generator)
    if classes:
        return TensorDataset(inputs, torch.randint(0, classes, (count,), generator=generator))
    return TensorDataset(inputs, torch.randn(count, 3, generator=generator))


def net(width=6, out=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, out))


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, y):
        return mse_loss(self.net(x), y)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.other = net(), net()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.net(x) + (self.other(x) if self.calls % 2 else 0)


class Checkpointed(nn.Module):
    def __init__(self, is_reentrant):
        super().__init__()
        self.first, self.net, self.is_reentrant = nn.Linear(6, 6), net(), is_reentrant

    def forward(self, x):
        return checkpoint(self.net, self.first(x), use_reentrant=self.is_reentrant)


class KeepsLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        out = self.net(x)
        self.kept = out.pow(2).mean()
        return out


def token_data():
    """Return tokens of which a third is ignored."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 4, 6, generator=generator)
    targets = torch.randint(0, 5, (200, 4), generator=generator)
    targets[torch.rand(200, 4, generator=generator) < 0.33] = -100
    return TensorDataset(inputs, targets)


def token_loss(out, y):
    return cross_entropy(out.flatten(0, 1), y.flatten())


def sharded(model, **options):
    for each in model:
        if isinstance(each, nn.Linear):
            fully_shard(each, **options)
    return fully_shard(model, **options)


class Tied(nn.Module):
    """Model whose first and last layer have one weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.blocks = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.blocks(self.first(x)).tanh())[:, :3]


class Sequences(list):
    """Samples of unequal length, as a data set of Hugging Face that knows them."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(2)
        lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
        super().__init__({"input_ids": torch.randn(length, 6, generator=generator)} for length in lengths)


def pad(samples):
    sequences = [each["input_ids"] for each in samples]
    counts = torch.tensor([len(each) for each in sequences])
    return nn.utils.rnn.pad_sequence(sequences, batch_first=True), counts


class MeanOfSequence(nn.Module):
    """Model whose output does not depend on the padding."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, counts):
        is_there = torch.arange(x.shape[1], device=x.device)[None, :, None] < counts[:, None, None]
        return (self.net(x) * is_there).sum(1) / counts[:, None]
