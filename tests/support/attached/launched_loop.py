"""User's script: an attached loop, of which one rank is killed once there is a checkpoint, the first time.

With a server the run goes on until that rank makes steps again. Without a rank it goes on and on. Arguments: protocol,
number of the rank or "none".
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.recording.run_folder import CHECKPOINTS

EPOCHS = {"bsp": 100_000, "all_reduce": 20}  # with a server, more than are made until then


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    protocol, lost = sys.argv[1:]
    points = torch.randn(64, 4)
    data = TensorDataset(points, (points[:, 0] > 0).long())
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    run = pl.attach(model, optimizer, loader, protocol=protocol, out="run", checkpoint_every="updates=1")
    rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    is_back = Path("is_back")
    for _ in run.epochs(EPOCHS[protocol] if lost != "none" else 1_000_000):
        for x, y in run.loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if rank == lost and restarts == "0" and list(Path("run").glob(f"{CHECKPOINTS}/*-update-*")):
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == lost and restarts != "0":
                is_back.touch()
            if rank == "0" and protocol == "bsp" and is_back.exists():
                run.stop()
    print(f"rank {rank} in life {restarts}", flush=True)


if __name__ == "__main__":
    main()
