"""Ranks of a training in the shape of nanoGPT: own batches, accumulation, prefetching, and evaluation by rank 0.

The shares change all the time. Rank 0 replays the batches of all ranks in one process, and prints the distance.
"""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from balance_changing import force_changes
from paceline.shares.script import install_patches
from paceline.shares.settings import BalanceSettings

BATCH, CONTEXT, WORDS, MICRO, UPDATES = 8, 5, 11, 2, 40
TOKENS = torch.randint(0, WORDS, (2000,), generator=torch.Generator().manual_seed(5))
taken = []  # training batches of this rank


def get_batch(generator, split):
    size = pl.share(BATCH)  # the line that is changed
    at = torch.randint(len(TOKENS) - CONTEXT - 1, (size,), generator=generator)
    x, y = (torch.stack([TOKENS[i + shift : i + shift + CONTEXT] for i in at]) for shift in (0, 1))
    if split == "train":
        taken.append((x, y))
    return x, y


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, WORDS))


def loss_of(model, x, y):
    logits = model(x)
    return cross_entropy(logits.view(-1, WORDS), y.view(-1), ignore_index=-1)


def step(model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def train(rank):
    generator = torch.Generator().manual_seed(1337 + rank)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = get_batch(generator, "train")
    for update in range(UPDATES):
        if update % 10 == 0 and rank == 0:
            with torch.no_grad():
                loss_of(model.module, *get_batch(torch.Generator().manual_seed(update), "val"))
        for micro in range(MICRO):
            model.require_backward_grad_sync = micro == MICRO - 1
            loss = loss_of(model, x, y) / MICRO
            x, y = get_batch(generator, "train")  # while the device computes
            loss.backward()
        step(model, optimizer)
    return model.module


def replay(batches):
    """Return the model of one process that computes the batches of all ranks."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for update in range(UPDATES):
        for micro in range(MICRO):
            of_ranks = [each[update * MICRO + micro] for each in batches]
            x, y = (torch.cat(parts) for parts in zip(*of_ranks, strict=True))
            (loss_of(model, x, y) / MICRO).backward()
        step(model, optimizer)
    return model


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    force_changes()
    patches = install_patches(BalanceSettings())
    trained = nn.utils.parameters_to_vector(train(dist.get_rank()).parameters()).detach()
    patches.remove()
    batches = [None] * dist.get_world_size()
    dist.all_gather_object(batches, taken)
    patches.balancer.close()
    if dist.get_rank() == 0:
        replayed = nn.utils.parameters_to_vector(replay(batches).parameters()).detach()
        sizes = sorted({len(x) for x, _ in taken})
        distance = float((trained - replayed).norm() / replayed.norm())
        print(json.dumps({"distance": distance, "sizes": sizes}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
