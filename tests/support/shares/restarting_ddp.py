"""User's script: DDP that keeps its own checkpoint; a rank is killed in an update, the first time.

Arguments: number of the rank, number of the update. Rank 0 prints the sum of the parameters at the end.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

UPDATES = 8


def main():
    lost, at = map(int, sys.argv[1:])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, life = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=64 // dist.get_world_size() // UPDATES, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin, saved = 0, Path("saved.pt")
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        begin = state["update"]
    for update, (x, y) in enumerate(loader):
        if update < begin:
            continue
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        if (rank, update, life) == (lost, at, "0"):
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        if rank == 0:
            torch.save({"model": model.state_dict(), "update": update + 1}, "new.pt")
            os.replace("new.pt", saved)
    print(f"rank {rank} in life {life}, from update {begin}", flush=True)
    if rank == 0:
        print(f"sum {sum(float(each.detach().sum()) for each in model.parameters()):.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
