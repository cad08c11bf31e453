"""One rank of a contender of paceline, started by torchrun: rank 0 is the server, every other one a worker."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

import paceline as pl
from paceline.core.records import UpdateMade
from papers.ddp.real import RankArguments, Snapshots, measured


def main() -> None:
    given = RankArguments.of(sys.argv[1])
    task, job = given.task, given.task.job(given.folder)
    server = Server(job, task.every)
    cluster = pl.Torchrun(threads=1, slowness=task.sleeping)
    trained = replace(job, optimizer=server.make_optimizer, eval_data=None)
    result = task.train(trained, cluster, given.updates, callbacks=[server])
    if cluster.is_server:
        evaluated = server.snapshots.evaluated(job, task.seed)
        given.out.write_text(json.dumps({"evaluated": evaluated, **measured(result)}))


class Server(pl.callbacks.Callback):
    """Callback that takes snapshots of the parameters which the server gives to its optimizer.

    Args:
        job: job, whose optimizer is used.
        every: number of gradients between two snapshots.
    """

    def __init__(self, job: pl.Job, every: int) -> None:
        self.snapshots = Snapshots(every)
        self._optimizer = job.optimizer
        self._parameters: list[Tensor] = []

    def make_optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Return the job's optimizer."""
        self._parameters = list(parameters)
        return self._optimizer(self._parameters)

    def on_update(self, update: UpdateMade) -> None:
        """Keep the parameters if this update is due."""
        self.snapshots.on_update(update.version, update.workload, update.now_s, self._parameters)


if __name__ == "__main__":
    main()
