"""Script of `gpu_shares.py`: ResNet-18 under DistributedDataParallel (gloo) on one GPU that all ranks share.

It trains under torchrun and under `paceline run` alike. First all ranks are alike, then the last one sleeps in
proportion to its samples. Rank 0 prints the seconds of an update of both parts.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from paceline.jobs.models.resnet import resnet18

DEVICE = os.environ.get("DEVICE", "cuda")
WARM = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--delay-s", type=float, default=0.1, help="seconds that the slow rank sleeps for a batch")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    data = TensorDataset(torch.randn(8192, 3, 32, 32), torch.randint(10, (8192,)))
    loader = DataLoader(data, args.batch, sampler=DistributedSampler(data), drop_last=True)
    model = DistributedDataParallel(resnet18().to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches = endless(loader)
    found = {}
    for part, delay_s in {"even": 0.0, "slow": args.delay_s * is_last}.items():
        for update in range(WARM + args.updates):
            if update == WARM:
                dist.barrier()
                begun_s = time.perf_counter()
            images, labels = (each.to(DEVICE) for each in next(batches))
            time.sleep(delay_s * len(images) / args.batch)
            optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.bfloat16, enabled=args.autocast):
                loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            loss.item()
        dist.barrier()
        found[part] = (time.perf_counter() - begun_s) / args.updates
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": found}), flush=True)
    dist.destroy_process_group()


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


if __name__ == "__main__":
    main()
