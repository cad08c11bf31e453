"""One rank of the run that `storm.py` disturbs: a small network on the digits, with a count of every sample.

Called with the folder of the run, the number of epochs and "out" or "resume".
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline as pl

BATCH, LR = 8, 0.02
WORKERS, MORE = 7, 2  # started, and those that join and leave
COMPUTE_S = 0.4
WORKER_TIMEOUT_S = 8.0


class CountingNet(nn.Module):
    """Network with a parameter for each sample, which counts how many times it was applied."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.count = nn.Parameter(torch.zeros(len(samples()), dtype=torch.float64))


def samples() -> TensorDataset:
    images, labels = tensors_of(pl.jobs.digits().data)
    return TensorDataset(images, labels, torch.arange(len(labels)))


def tensors_of(data: object) -> tuple[Tensor, ...]:
    assert isinstance(data, TensorDataset)
    return data.tensors


def loss_and_count(model: nn.Module, batch: Any) -> Tensor:
    assert isinstance(model, CountingNet)
    images, labels, index = batch
    return F.cross_entropy(model.net(images), labels) + model.count[index].mean()


def step_and_count(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    count, *net = parameters  # a module's own parameters come before those of its parts
    groups = [{"params": net, "lr": LR}, {"params": [count], "lr": float(BATCH)}]
    return torch.optim.SGD(groups)


def make_job() -> pl.Job:
    return pl.Job(
        model=CountingNet,
        step=loss_and_count,
        optimizer=step_and_count,
        lr_rule="proportional",
        lr_is="per_worker",
        data=samples(),
        batch_size=BATCH,
        sampling="epoch",
        name="counted digits",
    )


def cut_connections(number: int, frame: FrameType | None) -> None:
    """Cut all connections of this process, as a broken link does."""
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED and connection.fd >= 0:
            with socket.socket(fileno=os.dup(connection.fd)) as copied:
                copied.shutdown(socket.SHUT_RDWR)


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGUSR1, cut_connections)
    folder, epochs, kind = sys.argv[1:]
    n = WORKERS + MORE
    timing = pl.timing.ShiftedExponential(shift_s=COMPUTE_S / 2, mean_s=COMPUTE_S / 2)
    cluster = pl.Torchrun(
        standby=1,
        standby_address=f"127.0.0.1:{int(os.environ['MASTER_PORT']) + 1}",
        min_workers=1,
        max_workers=n,
        start_timeout_s=60.0,
        threads=1,
        slowness=pl.Cluster(n, timing=timing),
    )
    pl.train(
        make_job(),
        protocol="asp",
        cluster=cluster,
        stop=pl.Stop(epochs=int(epochs)),
        worker_timeout_s=WORKER_TIMEOUT_S,
        checkpoint_every="updates=200",
        progress=False,
        **{kind: folder},  # type: ignore[arg-type]
    )


if __name__ == "__main__":
    main()
