"""One rank of PyTorch's DistributedDataParallel, started by torchrun, which sleeps as the workers of paceline do.

First parameters and minibatches are those of paceline's simulated all_reduce with the same seed. So both have the same
losses, until a difference of rounding decides which pixel is the largest one of a max-pooling.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.torch_utils import build_model
from papers.ddp.real import RankArguments, Real, Snapshots
from papers.store import Line


def main() -> None:
    given = RankArguments.of(sys.argv[1])
    task, job = given.task, given.task.job(given.folder)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, snapshots = dist.get_rank(), Snapshots(task.every)
    updates = min(task.gradients // task.live, given.updates or task.gradients)
    result = train(task, job, updates, snapshots)
    dist.barrier()  # a rank that ends while another one uses the group may abort
    dist.destroy_process_group()
    if rank == 0:
        given.out.write_text(json.dumps({"evaluated": snapshots.evaluated(job, task.seed), **result}))


def train(task: Real, job: pl.Job, updates: int, snapshots: Snapshots) -> Line:
    """Train, and return the seconds and the mean k of the run, and the processor time of a gradient on this rank.

    Args:
        task: settings of the run.
        job: job to train.
        updates: number of updates.
        snapshots: snapshots that are taken.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    loader, sleeps = MinibatchLoader(job, task.seed, n), task.sleeping.round_trips(task.seed)
    model = DistributedDataParallel(build_model(job, task.seed))
    optimizer = job.optimizer(model.parameters())
    computing_s = 0.0
    dist.barrier()
    began_s = time.monotonic()
    for update in range(1, updates + 1):
        time.sleep(sleeps.times(rank, update, time.monotonic() - began_s).compute_s)
        before_s = time.thread_time()
        optimizer.zero_grad()
        job.loss_of(model, loader.batch(rank, update, None))[0].backward()
        computing_s += time.thread_time() - before_s
        optimizer.step()
        snapshots.on_update(update, update * n, time.monotonic() - began_s, model.parameters())
    run_s = time.monotonic() - began_s
    return {"s": round(run_s, 4), "mean_k": n, "computing_s": round(computing_s / updates, 5)}


if __name__ == "__main__":
    main()
