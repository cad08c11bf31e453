"""Jobs that show how many times each sample was applied: by parameters, by a buffer, or by the order of the work."""

from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.core.gradient import GradientArrived
from paceline.jobs.job import Job

BATCH = 4


class Counter(nn.Module):
    def __init__(self, samples):
        super().__init__()
        self.count = nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def forward(self, index):
        return self.count[index]


def mean_count(model, batch):
    return model(batch[0]).mean()


def counting_job(samples, **settings):
    """Return a job in which each application of a sample adds -1 to the parameter of the sample.

    The gradient of a sample is 1 / (k * BATCH) in an update of k gradients, and the learning rate is k * BATCH.
    """
    return Job(
        model=partial(Counter, samples),
        step=mean_count,
        optimizer=partial(torch.optim.SGD, lr=float(BATCH)),
        lr_rule="proportional",
        lr_is="per_worker",
        data=TensorDataset(torch.arange(samples)),
        batch_size=BATCH,
        sampling="epoch",
        name="counting",
        **settings,
    )


def times_applied(model):
    return (-model.count.detach()).round(decimals=9).tolist()


class Tally(nn.Module):
    """Model with a buffer that counts how many times each sample was used, also by local steps.

    The buffer moves by the mean of its changes, so it is exact in updates of a single gradient.
    """

    def __init__(self, samples):
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("used", torch.zeros(samples, dtype=torch.float64))

    def forward(self, index):
        self.used[index] += 1
        return self.linear(index[:, None].float() / 100)


def tallying_job(samples, **settings):
    """Return a job whose buffer `used` counts the uses of each sample."""
    return Job(
        model=partial(Tally, samples),
        step=mean_count,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        data=SeenSamples(samples),
        batch_size=BATCH,
        sampling="epoch",
        name="tallying",
        **settings,
    )


class SeenSamples(TensorDataset):
    """Samples that record in which order simulated workers use them."""

    def __init__(self, samples):
        super().__init__(torch.arange(samples))
        self.seen = []

    def minibatch(self, indices):
        self.seen.append(indices.tolist())
        return [indices]

    def times_used(self, history):
        """Return how many times each sample was used: simulated workers compute only what will be used."""
        used = sum(each.minibatches for each in history.of(GradientArrived) if each.used)
        counts = [0] * len(self)
        for batch in self.seen[-used:]:  # after those of the fingerprint
            for number in batch:
                counts[number] += 1
        return counts
