"""User's script with the process groups that a case names; it prints the parameters after each training.

Arguments: "temporary", "anew" or "fails", and a file. A rank that fails does so once: the file is there afterwards.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, SAMPLES = 3, 8, 64


def use_another_group():
    group = dist.new_group(range(dist.get_world_size()))
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    dist.destroy_process_group(group)
    return total.item()


def fail_once(file, epoch):
    if dist.get_rank() == 1 and epoch == 1 and not file.exists():
        file.touch()
        raise OSError("no such sample")


def parts():
    torch.manual_seed(0)
    return TensorDataset(torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 1)), nn.Linear(4, 1)


def train(name, case, file):
    data, model = parts()
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=False))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        for x, y in loader:
            if case == "fails":
                fail_once(file, epoch)
            optimizer.zero_grad()
            (model(x) - y).pow(2).mean().backward()
            optimizer.step()
        if case == "temporary":
            assert use_another_group() == dist.get_world_size()
    print(name, *model.module.weight.flatten().tolist())


def main(case, file):
    dist.init_process_group("gloo")
    try:
        train("first", case, file)
    finally:
        dist.destroy_process_group()
    if case == "anew":
        dist.init_process_group("gloo")
        train("second", case, file)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
