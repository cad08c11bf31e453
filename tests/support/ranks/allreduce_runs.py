"""All-reduce algorithms under test, and a short simulated run."""

import torch

import paceline as pl

N = 4
ITERATIONS = 25
RATE, MOMENTUM, DECAY = 0.05, 0.9, 0.01
ALGORITHMS = (
    "all_reduce",
    "local_sgd(H=3)",
    "local_sgd(H=3, outer='nesterov(lr=0.7,momentum=0.5)')",
    "s3gd",
    "dc_s3gd",
    "dc_s3gd(lag=2)",
    "local_sgd(H=3, lag=4)",
    "local_sgd(H=4, fragments=2, lag=1)",
)


def trained(protocol, job, n=N, updates=ITERATIONS, seed=3, **cluster):
    simulated = pl.Cluster(n, timing=pl.timing.Exponential(1.0), **cluster)
    return pl.train(job, protocol=protocol, cluster=simulated, stop=pl.Stop(updates=updates), seed=seed)


def decaying(parameters):
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
