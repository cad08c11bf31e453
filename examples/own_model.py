"""Train a model of your own on worker processes of this machine."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))


x = torch.randn(2000, 20)
job = pl.Job(
    model=make_model,
    loss=nn.CrossEntropyLoss(),
    optimizer=torch.optim.Adam,
    data=TensorDataset(x, (x.sum(dim=1) > 0).long()),
    batch_size=32,
)
result = pl.train(job, protocol=pl.k_sync(k=2), cluster=pl.LocalCluster(3), stop=pl.Stop(loss=0.2))
print(f"{result.reason} in {result.time_s:.2f} s; {result.history.totals.used} gradients used")
