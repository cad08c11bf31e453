"""One rank of a job that `membership.py` measures.

Called with the name of a contender and its settings as JSON; every rank prints its answer as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl
from distributed_ranks import ANSWER, train_on
from paceline.clusters.launch_env import SIDECAR
from paceline.core.records import GradientArrived, UpdateMade, WorkerJoined, WorkerLost
from paceline.recording.callback import Callback


def main() -> None:
    torch.set_num_threads(1)
    contender, settings = sys.argv[1], json.loads(sys.argv[2])
    print(ANSWER + json.dumps(CONTENDERS[contender](settings)), flush=True)


# --- a standby -------------------------------------------------------------------------------------------------------


class Dying(Callback):
    """Callback that kills rank 0 with an update, and writes down when."""

    def __init__(self, version: int, folder: str) -> None:
        self._version = version
        self._file = Path(folder, "killed_s")

    def on_update(self, update: UpdateMade) -> None:
        """Kill this process."""
        if update.version == self._version and os.environ["RANK"] == "0":
            self._file.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)


def train_followed(settings: dict[str, Any]) -> dict[str, Any]:
    dying = [Dying(settings["dies_at"], settings["folder"])] if "dies_at" in settings else []
    clock = train_on(settings, *dying, **settings["torchrun"])
    if os.environ.get(SIDECAR):  # the standby, which has taken over
        Path(settings["folder"], "clock.json").write_text(json.dumps(vars(clock)))
    return vars(clock)


# --- a run that grows and shrinks ------------------------------------------------------------------------------------


class Counter(nn.Module):
    """Model whose parameters count how many times each sample was applied."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def forward(self, index: Tensor) -> Tensor:
        return self.count[index]


def mean_count(model: nn.Module, batch: Any) -> Tensor:
    return torch.mean(model(batch[0]))


class Stages(Callback):
    """Callback that writes a file when the run is to grow, and when it is to shrink.

    Args:
        workers: number of workers that the run grows to.
        updates: updates before it grows, and between its growth and its shrinking.
        folder: folder of the files.
    """

    def __init__(self, workers: int, updates: int, folder: str) -> None:
        self._workers = workers
        self._updates = updates
        self._folder = Path(folder)
        self._grown = 0  # updates of all workers

    def on_update(self, update: UpdateMade) -> None:
        """Write a file if a stage ends with this update."""
        self._grown += update.k == self._workers
        if update.version == self._updates:
            (self._folder / "grow").touch()
        if self._grown == self._updates:
            (self._folder / "shrink").touch()


def train_growing(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return how often samples were applied, and the seconds for which workers have waited for their next task."""
    workers, batch, samples = settings["max_workers"], 4, settings["samples"]
    job = pl.Job(
        model=partial(Counter, samples),
        step=mean_count,
        optimizer=partial(torch.optim.SGD, lr=float(batch)),
        lr_rule="proportional",
        lr_is="per_worker",
        data=TensorDataset(torch.arange(samples)),
        batch_size=batch,
        sampling="epoch",
    )
    result = pl.train(
        job,
        protocol="bsp",
        cluster=pl.Torchrun(
            threads=1,
            slowness=pl.Cluster(workers, timing=pl.timing.Deterministic(settings["compute_s"])),
            encrypt=settings["encrypt"],
            max_workers=workers,
        ),
        stop=pl.Stop(epochs=settings["epochs"]),
        callbacks=[Stages(workers, settings["updates"], settings["folder"])],
    )
    if os.environ["RANK"] != "0":
        return None
    free_s: dict[int, float] = {}  # since when each worker has no task
    waits_s: list[float] = []
    for record in result.history:
        match record:
            case GradientArrived():
                if record.worker in free_s:
                    waits_s.append(record.started_s - free_s[record.worker])
                free_s[record.worker] = record.now_s
            case WorkerJoined():
                free_s[record.worker] = record.now_s
            case WorkerLost():
                free_s.pop(record.worker, None)
    applied = (-result.model.get_parameter("count").detach()).round(decimals=9)
    updates = [(update.now_s, update.version, update.k) for update in result.history.of(UpdateMade)]
    return {"applied": applied.unique().tolist(), "waits_s": waits_s, "updates": updates}


CONTENDERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "train_followed": train_followed,
    "train_growing": train_growing,
}

if __name__ == "__main__":
    main()
