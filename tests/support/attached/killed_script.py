"""User's script: an attached loop whose ranks kill themselves, each some times, and then rank 0 or its server once.

Arguments: folder of the marks of what was killed, kills of each other rank, and what is killed last: "rank" or
"server".
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

STEPS = 3  # of a process before it is killed
LAST_STEPS = 20  # of rank 0 after the last kill
EPOCHS = 10**6


def files():
    """Return how many files in memory this process has, and how many others."""
    names = []
    for each in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the folder itself
            names.append(os.readlink(f"/proc/self/fd/{each}"))
    in_memory = sum("memfd:paceline" in name for name in names)
    return in_memory, len(names) - in_memory


class Counting(pl.callbacks.Callback):
    """Writes the numbers of files of the coordinator's process when they change."""

    def __init__(self, folder):
        self.folder = folder
        self.last = None

    def on_update(self, update):
        found = files()
        if found != self.last:
            self.last = found
            with (self.folder / f"files.{os.getpid()}").open("a") as file:
                print(*found, file=file)


def kill_if_due(marks, kills, last, steps):
    """Kill this process, or the server of rank 0, if it is its turn; return whether all were killed before."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    others = [mark for mark in marks.glob("killed.*") if not mark.name.startswith("killed.0")]
    own = len(list(marks.glob(f"killed.{rank}.*")))
    is_due = own < kills if rank else not own and len(others) == kills * (ranks - 1)
    if is_due and steps >= STEPS:
        (marks / f"killed.{rank}.{own}").touch()
        [*_, victim] = psutil.Process().children() if last == "server" and not rank else [psutil.Process()]
        victim.send_signal(signal.SIGKILL)
    return not rank and own > 0


def main(marks, kills, last):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 50), torch.randn(256, 1))
    model = nn.Sequential(nn.Linear(50, 1000), nn.Tanh(), nn.Linear(1000, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    folder, steps = Path(marks), 0
    run = pl.attach(
        model,
        optimizer,
        DataLoader(data, batch_size=8, shuffle=True),
        protocol="bsp",
        cluster="torchrun(server=true,min_workers=1)",
        callbacks=[Counting(folder)],
        out="run",
        checkpoint_every="updates=5",
    )
    for _ in run.epochs(EPOCHS):
        for x, y in run.loader:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            steps += 1
            if kill_if_due(folder, int(kills), last, steps) and steps > LAST_STEPS:
                run.stop()
    print(f"ANSWER {os.environ['RANK']} {run.stopped_by}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
