"""Script of `shares.py`: it trains under torchrun and under `paceline run` alike, on workers that sleep.

A rank sleeps in proportion to its samples (to the tokens of its padded batch with --lengths). Rank 0 prints the seconds
of an update after the first 20, and the seconds of a processor that a rank uses for it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

WARM = 20
EPOCH = 8192
MEAN_LENGTH = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pattern", default="even", choices=["even", "slow", "moving", "jitter"])
    parser.add_argument("--slow", type=float, default=1.0, help="factor of the slow rank")
    parser.add_argument("--seconds", type=float, default=0.1, help="seconds of a batch")
    parser.add_argument("--parameters", type=float, default=1e6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--processes", type=int, default=0, help="processes of the loader")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--lengths", action="store_true")
    parser.add_argument("--rebalance", action="store_true", help="deal the samples by the sampler of transformers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sleep = Sleep(args)
    model = network(sleep, int((args.parameters / 2) ** 0.5), args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    updates = WARM + args.updates
    begun_s = begun_processor_s = 0.0
    for sleep.update, (x, y) in zip(range(updates), batches(args), strict=False):
        if sleep.update == WARM:
            dist.barrier()
            begun_s, begun_processor_s = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    processor_s = torch.tensor([time.process_time() - begun_processor_s])
    dist.all_reduce(processor_s)
    if dist.get_rank() == 0:
        seconds = (time.perf_counter() - begun_s) / args.updates
        used_s = float(processor_s) / dist.get_world_size() / args.updates
        print(json.dumps({"seconds": seconds, "processor_s": used_s}), flush=True)
    dist.destroy_process_group()


class Sleep(nn.Module):
    """Layer that sleeps as long as its rank computes."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args, self.update = args, 0
        parts = 4 if args.fsdp else 1
        self.sample_s = args.seconds / args.batch / parts
        self.draws = torch.Generator().manual_seed(dist.get_rank())
        self.drawn: tuple[int, float] = (-1, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.numel() / MEAN_LENGTH / 4 if self.args.lengths else len(x)
        time.sleep(self.sample_s * size * self.factor())
        return x

    def factor(self) -> float:
        """Return how slow this rank is in this update; noise is the same with and without shares."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        if self.args.pattern == "jitter":
            if self.drawn[0] != self.update:
                self.drawn = self.update, float(torch.empty(1).log_normal_(0, 0.3, generator=self.draws))
            return self.drawn[1]
        slow = (self.update // 15) % ranks if self.args.pattern == "moving" else ranks - 1
        return self.args.slow if self.args.pattern != "even" and rank == slow else 1.0


class Block(nn.Module):
    """Linear layer that sleeps first."""

    def __init__(self, sleep: Sleep, inputs: int, outputs: int) -> None:
        super().__init__()
        self.sleep, self.linear = sleep, nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(self.sleep(x)))


class Padded(nn.Module):
    """Model of padded sequences, of which only the mean is computed."""

    def __init__(self, sleep: Sleep, width: int) -> None:
        super().__init__()
        self.sleep, self.layers = sleep, nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(self.sleep(x).mean(1, keepdim=True))
        return output


def network(sleep: Sleep, width: int, args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    if args.lengths:
        return nn.parallel.DistributedDataParallel(Padded(sleep, 1000))
    if not args.fsdp:
        tanh = nn.Tanh()
        layers = [nn.Linear(64, width), tanh, nn.Linear(width, width), tanh, nn.Linear(width, width), tanh]
        return nn.parallel.DistributedDataParallel(nn.Sequential(sleep, *layers, nn.Linear(width, 8)))
    from torch.distributed.fsdp import fully_shard

    sizes = [64, width, width, width, 8]
    model = nn.Sequential(*(Block(sleep, *each) for each in pairwise(sizes)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model


class Sequences(Dataset[Any]):
    """Sequences of log-normal lengths, which are known before they are loaded."""

    column_names = ("length",)

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        lengths = torch.empty(EPOCH).log_normal_(0, 0.8, generator=generator).mul(MEAN_LENGTH).ceil()
        self.lengths = lengths.int().tolist()

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: Any) -> Any:
        return self.lengths if index == "length" else torch.zeros(self.lengths[index])


def pad(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True), torch.zeros(len(samples), 8)


def batches(args: argparse.Namespace) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(1)
    plain = TensorDataset(torch.randn(EPOCH, 64, generator=generator), torch.randn(EPOCH, 8, generator=generator))
    dataset = Sequences() if args.lengths else plain
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=int(os.environ.get("SEED", "0")))
    collate = pad if args.lengths else None
    loader = DataLoader(dataset, args.batch, sampler=sampler, num_workers=args.processes, collate_fn=collate)
    if args.rebalance:
        from transformers.trainer_pt_utils import BatchRebalanceSampler

        ranks = dist.get_world_size()
        sampler = BatchRebalanceSampler(dataset["length"], ranks * args.batch, ranks, 1, rank=dist.get_rank())
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


if __name__ == "__main__":
    main()
