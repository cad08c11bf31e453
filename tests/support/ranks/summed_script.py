"""Script of ranks that sum their gradients: protocol, folder, who is killed, once, and at which of its gradients."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline as pl
from machine_speed import scaled
from paceline.clusters.launch_env import SIDECAR
from paceline.core.records import WorkerJoined
from tiny_jobs import tiny_job

UPDATES = 24
NOBODY, BESIDE = "nobody", "beside"
LIMIT_S = scaled(60)
left = [0]  # gradients until this process is killed; 0 for never
awaited = []  # file without which no gradient is computed after that


def loss(output, target):
    left[0] -= 1
    if left[0] == 0 and not awaited:
        os.kill(os.getpid(), signal.SIGKILL)
    if left[0] <= 0 and awaited:
        deadline_s = time.monotonic() + LIMIT_S
        while not awaited[0].exists():
            assert time.monotonic() < deadline_s, "the lost worker does not come back"
            time.sleep(0.01)
    return F.cross_entropy(output, target)


def job():
    return tiny_job(sampling="epoch", optimizer=torch.optim.Adam, loss=loss)


class NoteJoin(pl.callbacks.Callback):
    """Callback that makes a file when a worker has come back."""

    def __init__(self, path):
        self._path = path

    def on_record(self, record):
        super().on_record(record)
        if isinstance(record, WorkerJoined):
            self._path.touch()


if __name__ == "__main__":
    torch.set_num_threads(1)
    protocol, folder, killed, killed_at = sys.argv[1:]
    name = BESIDE if SIDECAR in os.environ else os.environ["RANK"]
    begun, joined = Path(f"{folder}.{name}"), Path(f"{folder}.joined")
    if name == killed and not begun.exists():
        left[0] = int(killed_at)
    elif killed == BESIDE:
        left[0] = int(killed_at)
        awaited.append(joined)
    begun.touch()
    stop = f"updates={UPDATES}"
    cluster = pl.Torchrun(server=False)
    settings = {"protocol": protocol, "cluster": cluster, "stop": stop, "callbacks": [NoteJoin(joined)], "out": folder}
    if killed == BESIDE:  # the others wait for it within a gradient, which is no silence then
        settings["worker_timeout_s"] = 300.0
    pl.train(job(), checkpoint_every="updates=5", seed=1, **settings)
