"""Training with numbers rounded to bf16 as on the wire."""

from functools import partial

import torch

from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.torch_utils import build_model
from tiny_jobs import dataset, parameters_of, small_net, tiny_job

UPDATES = 20


def single_job(**changes):
    return tiny_job(**{"model": partial(small_net, torch.float32), "data": dataset(dtype=torch.float32), **changes})


def plain_loop_with_rounding(job, seed, n):
    """Train with synchronous SGD on rounded parameters and gradients, with float32 master parameters."""
    master, replica = build_model(job, seed), build_model(job, seed)
    optimizer = job.optimizer(master.parameters())
    loader = MinibatchLoader(job, seed, n)
    for draw in range(1, UPDATES + 1):
        optimizer.zero_grad()
        for ours, theirs in zip(replica.parameters(), master.parameters(), strict=True):
            ours.data = theirs.data.bfloat16().float()
            theirs.grad = torch.zeros_like(theirs)
        for worker in range(n):
            inputs, target = loader.batch(worker, draw, None)
            replica.zero_grad()
            job.loss(replica(inputs), target).backward()
            for ours, theirs in zip(replica.parameters(), master.parameters(), strict=True):
                theirs.grad += ours.grad.bfloat16().float() / n
        optimizer.step()
    return parameters_of(master)
