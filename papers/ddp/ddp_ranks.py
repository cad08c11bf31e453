"""One rank of PyTorch's DistributedDataParallel, started by torchrun, which sleeps as the workers of paceline do.

First parameters and minibatches are those of paceline's simulated all_reduce with the same seed, so that both have the
same losses up to rounding.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.evaluation import evaluate
from paceline.worker.torch_utils import build_model
from papers.ddp.real import Order, Real
from papers.store import Line


def main() -> None:
    order = Order.of(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job, updates = order.task.job(order.folder), order.task.gradients // order.task.live
    result = train(order.task, job, min(updates, order.updates or updates))
    if dist.get_rank() == 0:
        order.out.write_text(json.dumps(result))
    dist.destroy_process_group()


class Clock:
    """Clock of a run, in seconds, which stands still while it is paused."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    @property
    def now_s(self) -> float:
        """Seconds since the start of the run, without the pauses."""
        return time.monotonic() - self._began_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the clock."""
        since_s = time.monotonic()
        yield
        self._began_s += time.monotonic() - since_s


def train(task: Real, job: pl.Job, updates: int) -> Line:
    """Train, and return the evaluations, the seconds, and the mean k of the run.

    Also return the processor time of a gradient on this rank. Ranks wait for an evaluation with their clocks paused.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    loader, sleeps = MinibatchLoader(job, task.seed, n), task.sleeping.round_trips(task.seed)
    model = DistributedDataParallel(build_model(job, task.seed))
    optimizer = job.optimizer(model.parameters())
    evaluated, computed_s = [], 0.0
    dist.barrier()
    clock = Clock()
    for update in range(1, updates + 1):
        time.sleep(sleeps.times(rank, update, clock.now_s).compute_s)
        before_s = time.thread_time()
        optimizer.zero_grad()
        job.loss_of(model, loader.batch(rank, update, None))[0].backward()
        computed_s += time.thread_time() - before_s
        optimizer.step()
        now_s = clock.now_s
        if is_evaluated(update, n, task.every) or update == updates:
            with clock.paused():
                if rank == 0:
                    made = {"updates": update, "gradients": update * n, "time_s": round(now_s, 4)}
                    metrics = evaluate(job, model.module, task.seed)
                    evaluated.append({**made, **{name: round(value, 5) for name, value in metrics.items()}})
                dist.barrier()
    return {"evaluated": evaluated, "s": round(now_s, 4), "mean_k": n, "computed_s": round(computed_s / updates, 5)}


def is_evaluated(update: int, n: int, every: int) -> bool:
    """Return whether this update of n gradients is the first one at or after a multiple of `every` gradients."""
    return update * n // every > (update - 1) * n // every


if __name__ == "__main__":
    main()
